"""Guards of the product taken out one at a time. A suite of seeds that finds nothing wrong with these is worth nothing.

Each mutant is a replacement by name, in force for one run. Machines without a guard are those of `tests.explorer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import node.peers
import node.receiver
import router.retries
from baton.errors import Reason
from baton.ids import Epoch, GrantId, Incarnation, Pair, RequestKey
from decode_node.job import GoneRequests
from decode_node.node import DecodeNode
from decode_node.streams import RequestOutput, TokenStreams
from kvtransfer.protocol.receiver import FencePair, PairFenced, ReceiverMachine
from kvtransfer.receiver import Receiver, ReceiverPorts
from router.decode_streams import DecodeSubscription
from router.job import Inbox, Parting
from router.resume import Unseen
from router.retries import RESUMABLE
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
    if self.on_put is not None:
        self.on_put()


def _put_next(self: Inbox, first_index: int, token: int) -> None:
    _put_all(self, first_index, [token])


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


def _same_owner_epoch(self: TokenStreams, output: RequestOutput, router: Incarnation) -> None:
    """A request that changes hands keeps its epoch."""
    _TAKE_OVER(self, output, router)
    output.epoch = max(1, output.epoch - 1)


_TAKE_OVER = TokenStreams.take_over


def _heed_all(_self: RequestOutput, _router: Incarnation, _epoch: int) -> bool:
    """A router that has lost the request is listened to."""
    return True


def _cancel_anyway(self: DecodeSubscription, inbox: Inbox, parting: Parting = Parting.DROP) -> None:
    """A router cancels what another has taken over."""
    _LET_GO(self, inbox, Parting.DROP if parting is Parting.NOTHING else parting)


_LET_GO = DecodeSubscription.let_go


def _keep_for_ever(self: DecodeNode, output: RequestOutput) -> float:
    """What was left is never reaped."""
    return math.inf if output.left else _KEPT_UNTIL_S(self, output)


_KEPT_UNTIL_S = DecodeNode._kept_until_s


def _remember_nothing(_self: GoneRequests, _key: RequestKey, _now_s: float) -> None:
    """What its client has forgotten may be asked for again."""


def _unseen(by: int) -> Sequence[Replacement]:
    """A client that attaches is taken to have so many tokens more."""
    real = Unseen.take

    def take(self: Unseen, first_index: int, ids: Sequence[int], text: str) -> tuple[int, int] | None:
        known = real(self, first_index, ids, text)
        if known is None:
            return None
        seen, chars = known
        first = self._had.tokens and first_index + seen == self._had.tokens
        return (max(0, seen + by), chars) if first and len(ids) - seen >= 2 else known

    return [(Unseen, "take", take)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`seed` is one of the suite's that catches it, tried first."""

    replaced: Callable[[], Sequence[Replacement]]
    seed: int
    resumable: float | None = None
    """Share of the requests that are. Those of handoffs need clients whose leaving cancels, at any moment."""
    profile: str | None = None
    """Of all its seeds, where those of the suite hardly ever come to what the guard is for."""


MUTANTS: dict[str, Mutant] = {
    "fence: over without evidence": Mutant(replaced=_fence_without_evidence, seed=8, resumable=0.0),
    "fence: a lease that has run out frees the blocks": Mutant(
        replaced=lambda: _receiver(machines.FreeOnTimeout), seed=8, resumable=0.0
    ),
    "fence: so do unanswered Revokes": Mutant(
        replaced=lambda: _receiver(machines.FreeAfterRevokes), seed=8, resumable=0.0
    ),
    "fence: only epochs are looked at": Mutant(
        replaced=lambda: [(ReceiverPorts, "forbid", _forbid_nothing)], seed=3, resumable=0.0, profile="resets"
    ),
    "fence: no seal is waited for": Mutant(replaced=lambda: _receiver(machines.NoSeal), seed=6, resumable=0.0),
    "fence: the writer lets go before its writes have drained": Mutant(
        replaced=lambda: _writer(machines.ReleaseUndrained), seed=24, resumable=0.0
    ),
    "epoch: never rises": Mutant(replaced=lambda: [(ReceiverMachine, "epoch", _same_epoch)], seed=13, resumable=0.0),
    "tombstone: none for refused numbers": Mutant(
        replaced=lambda: _receiver(machines.NoRefusedNumbers), seed=31, resumable=0.0
    ),
    "tombstone: none for cancelled attempts": Mutant(
        replaced=lambda: _receiver(machines.NoDeadAttempts), seed=8, resumable=0.0, profile="overtaken"
    ),
    "dedupe: token indices are not looked at": Mutant(
        replaced=lambda: [(Inbox, "put", _put_all), (Inbox, "put_next", _put_next)], seed=6, resumable=0.0
    ),
    "resolve: leaves no tombstone": Mutant(
        replaced=lambda: [(DecodeNode, "resolve", _resolve_nothing)], seed=8, resumable=0.0, profile="overtaken"
    ),
    "commit: not looked at again after a cancel": Mutant(replaced=_no_look_after_commit, seed=19, resumable=0.0),
    "take-over: the epoch does not rise": Mutant(
        replaced=lambda: [(TokenStreams, "take_over", _same_owner_epoch)], seed=1
    ),
    "take-over: a Done or Leave of an older epoch is taken": Mutant(
        replaced=lambda: [(RequestOutput, "heeds", _heed_all)], seed=2
    ),
    "take-over: the former router cancels": Mutant(
        replaced=lambda: [(DecodeSubscription, "let_go", _cancel_anyway)], seed=2
    ),
    "take-over: the former router tries again": Mutant(
        replaced=lambda: [(router.retries, "RESUMABLE", RESUMABLE | {Reason.TAKEN_OVER})], seed=3, profile="routers"
    ),
    "leave: nobody reaps": Mutant(replaced=lambda: [(DecodeNode, "_kept_until_s", _keep_for_ever)], seed=1),
    "forget: nobody remembers": Mutant(replaced=lambda: [(GoneRequests, "find", _remember_nothing)], seed=1),
    "attach: a token too few is sent": Mutant(replaced=lambda: _unseen(1), seed=1),
    "attach: a token too many is sent": Mutant(replaced=lambda: _unseen(-1), seed=1),
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
