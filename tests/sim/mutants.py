"""Guards of the product taken out one at a time. A suite of seeds that finds nothing wrong with these is worth nothing.

Each mutant is a replacement by name, in force for one run. Machines without a guard are those of `tests.explorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import node.peers
import node.receiver
from baton.ids import Epoch, GrantId, Pair, RequestKey
from decode_node.node import DecodeNode
from kvtransfer.protocol.receiver import FencePair, PairFenced, ReceiverMachine
from kvtransfer.receiver import Receiver, ReceiverPorts
from router.inbox import Inbox
from tests.explorer import mutants as machines

Replacement = tuple[Any, str, Any]


def _receiver(machine: type[ReceiverMachine]) -> Sequence[Replacement]:
    return [(node.receiver, "ReceiverMachine", machine)]


def _writer(machine: type) -> Sequence[Replacement]:
    return [(node.peers, "WriterMachine", machine)]


def _fence_without_evidence() -> Sequence[Replacement]:
    """A fence that is over as soon as it is asked for."""
    real = Receiver.__init__

    def init(self: Receiver, **kwargs: Any) -> None:
        real(self, **kwargs)

        def fence(instruction: FencePair) -> None:
            self.ports.fence(instruction.pair, instruction.epoch)
            self._handle(PairFenced(pair=instruction.pair, epoch=instruction.epoch))

        self._actions[FencePair] = fence

    return [(Receiver, "__init__", init)]


def _forbid_nothing(_self: ReceiverPorts, _grant: GrantId) -> bool:
    """What a grant opened stays open: only the epoch of a connection is looked at."""
    return True


def _same_epoch(_self: ReceiverMachine, _pair: Pair) -> Epoch:
    """The pair's epoch does not rise at a fence."""
    return Epoch(0)


def _put_all(self: Inbox, first_index: int, ids: list[int], logprobs: Sequence[Any] = ()) -> None:
    """Tokens that are here already are taken again."""
    del first_index
    self.tokens.extend(ids)
    self.logprobs.extend(logprobs)
    self.news.set()


def _resolve_nothing(_self: DecodeNode, _key: RequestKey) -> bool:
    """Resolve leaves no tombstone, and knows nothing."""
    return False


def _no_look_after_commit() -> Sequence[Replacement]:
    """A request that was cancelled in the moment of its commit is run (the node once did this)."""
    real = ReceiverMachine.take_over

    def take_over(self: ReceiverMachine, grant_id: GrantId) -> bool:
        real(self, grant_id)
        return True

    return [(ReceiverMachine, "take_over", take_over)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`seed` is one of the suite's that catches it, tried first."""

    replaced: Callable[[], Sequence[Replacement]]
    seed: int


MUTANTS: dict[str, Mutant] = {
    "fence: over without evidence": Mutant(replaced=_fence_without_evidence, seed=33),
    "fence: a lease that has run out frees the blocks": Mutant(
        replaced=lambda: _receiver(machines.FreeOnTimeout), seed=5
    ),
    "fence: so do unanswered Revokes": Mutant(replaced=lambda: _receiver(machines.FreeAfterRevokes), seed=33),
    "fence: only epochs are looked at": Mutant(replaced=lambda: [(ReceiverPorts, "forbid", _forbid_nothing)], seed=8),
    "fence: no seal is waited for": Mutant(replaced=lambda: _receiver(machines.NoSeal), seed=6),
    "fence: the writer lets go before its writes have drained": Mutant(
        replaced=lambda: _writer(machines.ReleaseUndrained), seed=107
    ),
    "epoch: never rises": Mutant(replaced=lambda: [(ReceiverMachine, "epoch", _same_epoch)], seed=13),
    "tombstone: none for refused numbers": Mutant(replaced=lambda: _receiver(machines.NoRefusedNumbers), seed=31),
    "tombstone: none for cancelled attempts": Mutant(replaced=lambda: _receiver(machines.NoDeadAttempts), seed=112),
    "dedupe: token indices are not looked at": Mutant(replaced=lambda: [(Inbox, "put", _put_all)], seed=6),
    "resolve: leaves no tombstone": Mutant(replaced=lambda: [(DecodeNode, "resolve", _resolve_nothing)], seed=70),
    "commit: not looked at again after a cancel": Mutant(replaced=_no_look_after_commit, seed=12),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The product with one guard less."""
    patches = [patch.object(owner, attribute, value) for owner, attribute, value in MUTANTS[name].replaced()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
