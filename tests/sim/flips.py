"""Bad hardware: bits of records that flip before their Commit counts, in flight or at rest, and who must notice.

`flipping` is in force for one run: every prefill node samples all its records, and a share of the handoffs has a bit
flipped at a decode node when its seal is read, which is after the last byte has landed and before anything is compared.
The checker: a handoff with a flipped record is never run. (Whether tokens are right the simulator looks at anyway.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import patch

import kvtransfer.checksums
import tests.sim.cluster
from baton.ids import GrantId, Pair, RequestKey
from decode_node.node import DecodeNode
from kvtransfer.receiver import Receiver
from kvtransfer.transport import Seal
from prefill_node.config import PrefillConfig
from tests.sim.cluster import current
from tests.sim.profiles import Profile, prefill_config

SHOUT = "CORRUPT RECORDS"


@dataclass(slots=True, kw_only=True)
class Flips:
    """What was done, and what the nodes said."""

    flipped: set[GrantId] = field(default_factory=set)
    reported: int = 0
    """Log lines of either side about corrupt records."""


class InlineThread:
    """For `ThreadPoolExecutor`: what is submitted runs at once."""

    def __init__(self, **_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self, *, wait: bool) -> None:
        pass


class _Ear(logging.Filter):
    """Takes the nodes' shouts: any other error that they log stays a violation."""

    def __init__(self, flips: Flips) -> None:
        super().__init__()
        self._flips = flips

    def filter(self, record: logging.LogRecord) -> bool:
        heard = record.getMessage() == SHOUT
        self._flips.reported += heard
        return not heard


@contextmanager
def flipping(*, seed: int, chance: float, fraction: float = 1.0) -> Iterator[Flips]:
    """`chance` of each handoff to be hit; `fraction` of its records that are compared."""
    flips, rng = Flips(), Random(seed)
    real_seal_landed, real_committed = Receiver.seal_landed, DecodeNode.committed

    def sampling_config(name: str, endpoint: str, profile: Profile) -> PrefillConfig:
        config = prefill_config(name, endpoint, profile)
        return replace(config, writer=replace(config.writer, checksum_fraction=fraction))

    def seal_landed(self: Receiver, pair: Pair, seal: Seal) -> None:
        blocks = self.grants.blocks_uncommitted(seal.grant, pair)
        if blocks and seal.grant not in flips.flipped and rng.random() < chance:
            flips.flipped.add(seal.grant)
            _flip(self, rng, rng.choice(blocks))
        real_seal_landed(self, pair, seal)

    def committed(self: DecodeNode, key: RequestKey, grant: GrantId) -> None:
        if grant in flips.flipped:
            current().cluster.violation(f"a handoff with a flipped bit runs: {key}")
        real_committed(self, key, grant)

    ear = _Ear(flips)
    loggers = [logging.getLogger(f"baton.{name}") for name in ("receiver", "writer")]
    with ExitStack() as stack:
        for owner, name, replacement in (
            (kvtransfer.checksums, "ThreadPoolExecutor", InlineThread),
            (tests.sim.cluster, "prefill_config", sampling_config),
            (Receiver, "seal_landed", seal_landed),
            (DecodeNode, "committed", committed),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        for logger in loggers:
            logger.addFilter(ear)
            stack.callback(logger.removeFilter, ear)
        yield flips


def _flip(receiver: Receiver, rng: Random, block: int) -> None:
    layout, region = receiver._layout, current().region
    record = layout.offset(rng.randrange(layout.num_layers), block, receiver.grants.ledger.num_blocks)
    region[record + rng.randrange(layout.record_bytes)] ^= 1 << rng.randrange(8)
