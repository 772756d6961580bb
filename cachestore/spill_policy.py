"""Which running sequences make room for the others, and when they come back (I5). Pure.

    RUNNING    decodes
    SPILLING   swapped out, blocks of it are being copied to host memory
    SPILLED    swapped out, nothing of it is being copied
    RETURNING  swapped out, blocks of it are being copied back

Age alone decides: the youngest makes room, the oldest swapped-out one comes back first, and one that starts waits
behind older ones that are swapped out. So every runner is older than whoever is swapped out, and nobody overtakes.

Room is made for `headroom_blocks` more of each runner than the next step takes, and a sequence comes back only while
that much stays free: else the same blocks would go to and fro. When nobody runs, the oldest comes back at any price,
block by block if host memory is full but for its reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from baton.ids import RequestKey


class SpillState(Enum):
    RUNNING = "RUNNING"
    SPILLING = "SPILLING"
    SPILLED = "SPILLED"
    RETURNING = "RETURNING"
    GONE = "GONE"


class SpillCause(Enum):
    """What can happen to one sequence: the columns of the transition table."""

    PRESSURE = "memory pressure"
    ROOM = "room for it"
    COPIED = "copies done"
    LEFT = "ended"


_S = SpillState

TRANSITIONS: Mapping[tuple[SpillState, SpillCause], tuple[SpillState, ...]] = {
    # Straight to SPILLED: there was nothing to copy, or no need to; it only stops growing.
    (_S.RUNNING, SpillCause.PRESSURE): (_S.SPILLING, _S.SPILLED),
    (_S.SPILLING, SpillCause.PRESSURE): (_S.SPILLING,),
    (_S.SPILLED, SpillCause.PRESSURE): (_S.SPILLING,),
    (_S.SPILLED, SpillCause.ROOM): (_S.RETURNING,),
    (_S.SPILLING, SpillCause.COPIED): (_S.SPILLED,),
    (_S.RETURNING, SpillCause.COPIED): (_S.SPILLED, _S.RUNNING),
    **{(state, SpillCause.LEFT): (_S.GONE,) for state in (_S.RUNNING, _S.SPILLING, _S.SPILLED, _S.RETURNING)},
}
"""Everything that may happen. Copies under way outlive a sequence that has ended; their blocks are freed after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One sequence at this moment."""

    key: RequestKey
    age: int
    """Its place in the order of entry; smaller is older."""
    promise_left: int
    """Blocks that it may still grow by."""
    need: int = 0
    """Blocks that its next step takes, if it runs."""
    spillable: int = 0
    """Its blocks on the device that would be free if they were copied out now."""
    absent: int = 0
    """Its blocks that are in host memory or about to go there; those that are coming back do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut:
    """Take this sequence out of the steps."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOut:
    """Begin to copy up to `blocks` of its blocks to host memory, tail first. `copies_done` follows."""

    key: RequestKey
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBack:
    """Begin to bring up to `blocks` of its absent blocks to the device, head first. `copies_done` follows."""

    key: RequestKey
    blocks: int


SpillInstruction = SwapOut | CopyOut | CopyBack


class SpillPolicy:
    """One engine's sequences under overcommit. Mutates itself only; one thread owns it."""

    def __init__(self, *, headroom_blocks: int, growth_blocks: int = 1) -> None:
        """A sequence grows by `growth_blocks` at a time: a block of each layer group."""
        assert headroom_blocks >= 1 and growth_blocks >= 1, (headroom_blocks, growth_blocks)
        self._headroom_blocks = headroom_blocks
        self._growth_blocks = growth_blocks
        self._states: dict[RequestKey, SpillState] = {}
        self._out: list[SpillInstruction] = []

    def before_step(
        self,
        *,
        growable: int,
        freeing: int,
        host_free: int,
        runners: Iterable[Standing],
        swapped_out: Iterable[Standing],
    ) -> list[SpillInstruction]:
        """No step is in flight. `runners` decode now, `swapped_out` do not; each in any order.

        Blocks: `growable` could be handed out on the device now, `freeing` of the device are being copied to host
        memory, `host_free` of host memory could be copied to (the reserve is counted).
        """
        self._out = []
        waiting = sorted(swapped_out, key=lambda each: each.age)
        going_on = self._let_in(sorted(runners, key=lambda each: each.age), waiting)
        short = sum(each.need for each in going_on) - growable - freeing
        if short > 0:
            self._make_room(short, going_on, waiting, host_free)
        elif freeing == 0 and waiting:
            self._bring_back(going_on, waiting, growable, host_free)
        return self._out

    def copies_done(self, key: RequestKey, *, absent: int) -> bool:
        """No block is being copied for this sequence any more; `absent` of its blocks are not whole on the device.

        Returns whether it decodes on.
        """
        runs = self._states[key] is _S.RETURNING and absent == 0
        self._move(key, SpillCause.COPIED, _S.RUNNING if runs else _S.SPILLED)
        return runs

    def left(self, key: RequestKey) -> None:
        """Finished, cancelled, past its deadline or aborted. The key may be unknown."""
        if key in self._states:
            self._move(key, SpillCause.LEFT, _S.GONE)

    def state_of(self, key: RequestKey) -> SpillState | None:
        """None for a sequence that has not been seen in a step yet, or is gone."""
        return self._states.get(key)

    def margin(self, standing: Standing) -> int:
        """How many blocks this sequence should find free to grow into, beside the one that it needs now."""
        return min(self._headroom_blocks, standing.promise_left - standing.need)

    def _move(self, key: RequestKey, cause: SpillCause, to: SpillState) -> None:
        came_from = self._states[key]
        assert to in TRANSITIONS.get((came_from, cause), ()), (key, came_from, cause, to)
        if to is _S.GONE:
            del self._states[key]
        else:
            self._states[key] = to

    def _let_in(self, runners: list[Standing], swapped_out: list[Standing]) -> list[Standing]:
        """Those of `runners` that go on. A new one is swapped out if it is younger than one that is swapped out."""
        going_on = []
        for each in runners:
            new = each.key not in self._states
            self._states.setdefault(each.key, _S.RUNNING)
            if new and swapped_out and each.age > swapped_out[0].age:
                self._swap_out(each, 0)
            else:
                going_on.append(each)
        return going_on

    def _make_room(self, short: int, runners: list[Standing], swapped_out: list[Standing], host_free: int) -> None:
        """Blocks of the swapped out first, then of the youngest runner, until the others can step."""
        on_their_way = [each.age for each in swapped_out if self._states[each.key] is _S.RETURNING]
        youngest_on_its_way = max(on_their_way, default=-1)
        while True:
            wanted = short + sum(map(self.margin, runners))
            for each in reversed(swapped_out):
                if self._states[each.key] is not _S.RETURNING:
                    blocks = min(wanted, each.spillable, host_free)
                    self._copy_out(each.key, blocks)
                    short, wanted, host_free = short - blocks, wanted - blocks, host_free - blocks
            if short <= 0 or len(runners) < 2 or runners[-1].age < youngest_on_its_way:
                return  # in the last case the younger one is the victim, as soon as it is back
            victim = runners.pop()
            short -= victim.need
            wanted -= victim.need + self.margin(victim)
            blocks = max(0, min(wanted, victim.spillable, host_free))
            self._swap_out(victim, blocks)
            short, host_free, swapped_out = short - blocks, host_free - blocks, []

    def _bring_back(self, runners: list[Standing], swapped_out: list[Standing], growable: int, host_free: int) -> None:
        spare = growable - sum(each.need + self.margin(each) for each in runners)
        on_their_way = False
        for each in swapped_out:
            if self._states[each.key] is _S.RETURNING:
                on_their_way = True
                spare -= each.absent + self.margin(each)
                continue
            if not runners and not on_their_way:
                self._bring_back_at_any_price(each, swapped_out, growable, host_free)
                return
            spare -= each.absent + self.margin(each)
            if spare < 0:
                return
            self._copy_back(each.key, each.absent)

    def _bring_back_at_any_price(
        self, oldest: Standing, swapped_out: list[Standing], growable: int, host_free: int
    ) -> None:
        """Nobody runs: as much of the oldest as fits comes back, while others make room for the rest of it."""
        if self._states[oldest.key] is _S.SPILLING:
            return
        blocks = min(oldest.absent, growable)
        if blocks > 0 or oldest.absent == 0:
            self._copy_back(oldest.key, blocks)  # first: what is coming back is not copied out for somebody else
        short = oldest.absent + min(self._growth_blocks, oldest.promise_left) - growable
        for each in reversed(swapped_out):
            if short > 0 and each.key != oldest.key:
                blocks = min(short, each.spillable, host_free)
                self._copy_out(each.key, blocks)
                short, host_free = short - blocks, host_free - blocks

    def _swap_out(self, victim: Standing, blocks: int) -> None:
        self._move(victim.key, SpillCause.PRESSURE, _S.SPILLING if blocks else _S.SPILLED)
        self._out.append(SwapOut(key=victim.key))
        if blocks:
            self._out.append(CopyOut(key=victim.key, blocks=blocks))

    def _copy_out(self, key: RequestKey, blocks: int) -> None:
        if blocks > 0:
            self._move(key, SpillCause.PRESSURE, _S.SPILLING)
            self._out.append(CopyOut(key=key, blocks=blocks))

    def _copy_back(self, key: RequestKey, blocks: int) -> None:
        self._move(key, SpillCause.ROOM, _S.RETURNING)
        self._out.append(CopyBack(key=key, blocks=blocks))
