"""What a receiver has written down: its grants, the numbering of each pair, the attempts that are over. Pure.

No rules are here: `receiver_grants` says what is entered when, and is the only one to change an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.ids import Attempt, BlockId, Epoch, GrantId, Pair, RequestId, RequestKey, ReserveNumber
from kvtransfer.receiver_messages import Refusal
from kvtransfer.receiver_states import OPEN, UNCOMMITTED, GrantState, RecordCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    live_span_max: int = 4096
    """Reserve numbers a writer may have between its lowest live one and its newest."""
    tombstones_max: int = 65_536
    """Cancelled requests remembered so that a late Reserve or Commit of them is refused; the oldest goes first."""
    revoke_rounds_before_fence: int = 1
    revoke_rounds_before_quarantine: int = 3
    story_steps_max: int = 24

    def __post_init__(self) -> None:
        assert 0 < self.revoke_rounds_before_fence < self.revoke_rounds_before_quarantine, self
        assert self.live_span_max > 0 and self.tombstones_max > 0, self


@dataclass(slots=True, kw_only=True)
class GrantEntry:
    """One grant, with what is known of its writes so far."""

    id: GrantId
    number: ReserveNumber
    key: RequestKey
    pair: Pair
    epoch: Epoch
    state: GrantState
    blocks: tuple[BlockId, ...]
    prefix: tuple[BlockId, ...]
    seals: dict[int, tuple[int, int]] = field(default_factory=dict)
    expected: tuple[int, int, int] | None = None
    commit_waits: bool = False
    check: RecordCheck = RecordCheck.NONE
    was_committed: bool = False
    revoke_rounds: int = 0
    let_go_waits: bool = False
    """The writer has let go with writes adrift: it is answered when there is evidence."""
    story: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class PairEntry:
    """The numbering of one pair: numbers that have a grant, those that were refused, the epoch of new ones."""

    epoch: Epoch = Epoch(0)
    lowest_live: ReserveNumber = ReserveNumber(0)
    refused: dict[ReserveNumber, Refusal] = field(default_factory=dict)
    by_number: dict[ReserveNumber, GrantId] = field(default_factory=dict)
    fencing: bool = False


class GrantBook:
    """The books of one receiver process, with the questions that others may ask of them."""

    def __init__(self, limits: ReceiverLimits) -> None:
        self.limits = limits
        self._grants: dict[GrantId, GrantEntry] = {}
        self._pairs: dict[Pair, PairEntry] = {}
        self._first_epoch = Epoch(0)
        self._dead_attempts: dict[RequestId, Attempt] = {}
        self._by_request: dict[RequestId, set[GrantId]] = {}

    def epoch(self, pair: Pair) -> Epoch:
        """The epoch that new connections of the pair carry."""
        return self._pair(pair).epoch

    def admits_write(self, pair: Pair, epoch: Epoch, grant: GrantId) -> bool:
        """May bytes of this grant, on a connection of this epoch, land? For transports whose receiver can still refuse.

        The epoch alone does not do: after a connection broke, its writer lets go of what it had posted, while bytes
        of it may still be on their way here, in an epoch that nobody had a reason to raise.
        """
        known = self._grant(grant, pair)
        return known is not None and known.state in UNCOMMITTED and known.epoch == epoch == self.epoch(pair)

    def has_answered(self, pair: Pair, number: ReserveNumber) -> bool:
        """Is the answer to this Reserve written down? A repeat gets it, whatever has changed here meanwhile."""
        known = self._pairs.get(pair)
        return known is not None and (number in known.by_number or number in known.refused)

    def state_of(self, grant: GrantId) -> GrantState | None:
        known = self._grants.get(grant)
        return known.state if known else None

    def blocks_uncommitted(self, grant: GrantId, pair: Pair) -> tuple[BlockId, ...] | None:
        """The blocks that this pair's writer may have written under this grant; None where its right is over."""
        known = self._grant(grant, pair)
        return known.blocks if known is not None and known.state in UNCOMMITTED else None

    def uncommitted(self, pair: Pair) -> list[tuple[ReserveNumber, GrantId]]:
        """This pair's grants whose writer may still write, by the numbers of their Reserves, ascending."""
        state = self._pairs.get(pair)
        known = [] if state is None else sorted(state.by_number.items())
        return [(number, grant) for number, grant in known if self._grants[grant].state in UNCOMMITTED]

    def grant_of(self, key: RequestKey) -> GrantId | None:
        """The grant of this attempt that is still known, the newest if there are several."""
        ids = [g for g in self._by_request.get(key.request, ()) if self._grants[g].key == key]
        return max(ids, key=lambda g: self._grants[g].number, default=None)

    def is_quiet(self, pair: Pair) -> bool:
        """No grant of this pair owns blocks."""
        state = self._pairs.get(pair)
        return state is None or all(g.state in (GrantState.FENCED, GrantState.RELEASED) for g in self._grants_of(state))

    def owner(self, grant: GrantId) -> tuple[Pair, int] | None:
        """Whose grant this is, and how many blocks it opens to him."""
        known = self._grants.get(grant)
        return (known.pair, len(known.blocks)) if known is not None else None

    def owned(self) -> Iterator[tuple[Pair, GrantState, int]]:
        """Of each grant whose writer may still write: whose it is, its state, how many blocks it opens."""
        return ((g.pair, g.state, len(g.blocks)) for g in self._grants.values() if g.state in UNCOMMITTED)

    @property
    def unreleased(self) -> int:
        """Grants through which somebody owns blocks."""
        return sum(g.state not in (GrantState.FENCED, GrantState.RELEASED) for g in self._grants.values())

    @property
    def known(self) -> int:
        return len(self._grants)

    def states(self) -> dict[GrantState, int]:
        counts = dict.fromkeys(GrantState, 0)
        for grant in self._grants.values():
            counts[grant.state] += 1
        return counts

    # For the machine.

    def _enter(self, grant: GrantEntry) -> None:
        self._grants[grant.id] = grant
        self._pair(grant.pair).by_number[grant.number] = grant.id
        self._by_request.setdefault(grant.key.request, set()).add(grant.id)

    def _strike_out(self, grant: GrantEntry) -> None:
        del self._grants[grant.id]
        del self._pairs[grant.pair].by_number[grant.number]
        siblings = self._by_request[grant.key.request]
        siblings.remove(grant.id)
        if not siblings:
            del self._by_request[grant.key.request]

    def is_over(self, key: RequestKey) -> bool:
        """Whether this attempt gets no grant any more: cancelled, overtaken by a newer one, or granted already. It may
        come again under a new number only once its earlier grant is doomed."""
        if key.attempt <= self._dead_attempts.get(key.request, -1):
            return True
        grants = [self._grants[g] for g in self._by_request.get(key.request, ())]
        if any(g.key.attempt > key.attempt for g in grants):
            return True
        return any(g.key == key and (g.was_committed or g.state in OPEN) for g in grants)

    def _bury(self, key: RequestKey) -> None:
        """Leave a tombstone: no Reserve or Commit of this attempt, or of one before it, is accepted from now on."""
        dead = max(key.attempt, self._dead_attempts.pop(key.request, key.attempt))
        self._dead_attempts[key.request] = dead
        while len(self._dead_attempts) > self.limits.tombstones_max:
            del self._dead_attempts[next(iter(self._dead_attempts))]

    def _pair(self, pair: Pair) -> PairEntry:
        return self._pairs.setdefault(pair, PairEntry(epoch=self._first_epoch))

    def _forget_pair(self, pair: Pair) -> None:
        """No epoch is given twice: a writer that comes back, believed dead, takes a later one for the sign of a fence,
        without which what it had adrift would hold up its numbering for good. So all pairs go on from here."""
        self._first_epoch = max(self._first_epoch, self._pairs.pop(pair).epoch)

    def _grant(self, grant: GrantId, pair: Pair) -> GrantEntry | None:
        """The grant, if it was given to this pair: another pair's word about it counts for nothing."""
        known = self._grants.get(grant)
        return known if known is not None and known.pair == pair else None

    def _grants_of(self, pair: PairEntry) -> list[GrantEntry]:
        return [self._grants[g] for _, g in sorted(pair.by_number.items())]
