"""Who makes room and who comes back, decided from figures alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import RequestKey
from cachestore.spill_policy import (
    CopyBack,
    CopyOut,
    SpillPolicy,
    SpillState,
    Standing,
    SwapOut,
)
from tests.support.engine_bench import key_of

OLD, MIDDLE, YOUNG = key_of("old"), key_of("middle"), key_of("young")
AGES = {OLD: 1, MIDDLE: 2, YOUNG: 3}


def standing(key: RequestKey, **figures: int) -> Standing:
    return Standing(key=key, age=AGES[key], **{"promise_left": 9, **figures})


def step(runners: list[Standing], swapped_out: list[Standing] | None = None, **figures: int) -> dict[str, Any]:
    return {
        "growable": 0,
        "freeing": 0,
        "host_free": 99,
        "runners": runners,
        "swapped_out": swapped_out or (),
        **figures,
    }


def running(*keys: RequestKey, headroom_blocks: int = 2) -> SpillPolicy:
    policy = SpillPolicy(headroom_blocks=headroom_blocks)
    assert policy.before_step(**step([standing(key) for key in keys])) == []
    return policy


def spilled(*runners: RequestKey) -> SpillPolicy:
    """YOUNG is in host memory, the others run."""
    policy = running(*runners, YOUNG)
    policy.before_step(**step([*(standing(key, need=1) for key in runners), standing(YOUNG, spillable=3)]))
    policy.copies_done(YOUNG, absent=3)
    assert policy.state_of(YOUNG) is SpillState.SPILLED
    return policy


def test_without_pressure_nothing_happens() -> None:
    """Two blocks are needed and two can be had."""
    policy = running(OLD, YOUNG)
    assert policy.before_step(**step([standing(OLD, need=1), standing(YOUNG, need=1)], growable=2)) == []


def test_the_youngest_makes_room_for_more_than_one_step() -> None:
    """One block short: the youngest is swapped out, and gives what the others need and their headroom, tail first."""
    policy = running(OLD, MIDDLE, YOUNG)
    runners = [standing(YOUNG, spillable=8), standing(OLD, need=1, spillable=8), standing(MIDDLE, spillable=8)]
    assert policy.before_step(**step(runners)) == [SwapOut(key=YOUNG), CopyOut(key=YOUNG, blocks=1 + 2 + 2)]
    assert policy.state_of(YOUNG) is SpillState.SPILLING


def test_who_can_grow_no_further_asks_for_no_headroom() -> None:
    """The old one needs its last block, the middle one none."""
    policy = running(OLD, MIDDLE, YOUNG)
    runners = [standing(OLD, need=1, promise_left=1), standing(MIDDLE, promise_left=0), standing(YOUNG, spillable=8)]
    assert policy.before_step(**step(runners)) == [SwapOut(key=YOUNG), CopyOut(key=YOUNG, blocks=1)]


def test_a_swapped_out_sequence_gives_more_before_another_is_swapped_out() -> None:
    """The young one has three blocks left on the device: no second victim."""
    policy = spilled(OLD, MIDDLE)
    asked = step([standing(OLD, need=1), standing(MIDDLE, spillable=5)], [standing(YOUNG, absent=3, spillable=3)])
    assert policy.before_step(**asked) == [CopyOut(key=YOUNG, blocks=3)]


def test_a_second_victim_when_the_first_has_nothing_left() -> None:
    """The middle one follows; the old one runs alone."""
    policy = spilled(OLD, MIDDLE)
    asked = step([standing(OLD, need=1), standing(MIDDLE, spillable=5)], [standing(YOUNG, absent=3)])
    assert policy.before_step(**asked) == [SwapOut(key=MIDDLE), CopyOut(key=MIDDLE, blocks=1 + 2)]


def test_the_youngest_is_swapped_out_for_its_own_need() -> None:
    """Only the youngest is short: it stops growing, and gives the headroom of the other."""
    policy = running(OLD, YOUNG)
    asked = step([standing(OLD), standing(YOUNG, need=1, spillable=4)])
    assert policy.before_step(**asked) == [SwapOut(key=YOUNG), CopyOut(key=YOUNG, blocks=2)]


def test_the_last_runner_is_never_swapped_out() -> None:
    """It waits for blocks that are on their way, or held by writers."""
    policy = running(OLD)
    assert policy.before_step(**step([standing(OLD, need=1, spillable=5)])) == []


def test_copies_under_way_count_as_room() -> None:
    """The block that is missing is being copied out already."""
    policy = spilled(OLD, MIDDLE)
    asked = step([standing(OLD, need=1), standing(MIDDLE, spillable=5)], [standing(YOUNG, absent=3)], freeing=1)
    assert policy.before_step(**asked) == []


def test_no_more_is_copied_out_than_host_memory_takes() -> None:
    """Four are wanted, two fit."""
    policy = running(OLD, MIDDLE, YOUNG)
    runners = [standing(YOUNG, spillable=8), standing(OLD, need=1), standing(MIDDLE)]
    assert policy.before_step(**step(runners, host_free=2)) == [SwapOut(key=YOUNG), CopyOut(key=YOUNG, blocks=2)]


@pytest.mark.parametrize(("growable", "comes"), [(6, False), (7, True)])
def test_a_return_leaves_everybody_headroom(growable: int, comes: bool) -> None:
    """Three blocks absent, two of headroom for each of the two."""
    policy = spilled(OLD)
    out = policy.before_step(**step([standing(OLD)], [standing(YOUNG, absent=3)], growable=growable))
    assert out == ([CopyBack(key=YOUNG, blocks=3)] if comes else [])


def test_it_runs_again_when_all_of_it_is_back() -> None:
    """Not while a block is still absent."""
    policy = spilled(OLD)
    policy.before_step(**step([standing(OLD)], [standing(YOUNG, absent=3)], growable=9))
    assert not policy.copies_done(YOUNG, absent=1)
    assert policy.state_of(YOUNG) is SpillState.SPILLED
    policy.before_step(**step([standing(OLD)], [standing(YOUNG, absent=1)], growable=9))
    assert policy.state_of(YOUNG) is SpillState.RETURNING
    assert policy.copies_done(YOUNG, absent=0)
    assert policy.state_of(YOUNG) is SpillState.RUNNING


def test_the_oldest_comes_back_first_and_nobody_overtakes() -> None:
    """The younger one would fit, the older one does not: neither comes."""
    policy = spilled(OLD, MIDDLE)
    policy.before_step(**step([standing(OLD, need=1), standing(MIDDLE, spillable=5)], [standing(YOUNG, absent=3)]))
    policy.copies_done(MIDDLE, absent=5)
    swapped_out = [standing(YOUNG, absent=1), standing(MIDDLE, absent=5)]
    assert policy.before_step(**step([standing(OLD)], swapped_out, growable=8)) == []
    both = [CopyBack(key=MIDDLE, blocks=5), CopyBack(key=YOUNG, blocks=1)]
    assert policy.before_step(**step([standing(OLD)], swapped_out, growable=12)) == both


def test_who_starts_while_an_older_one_is_swapped_out_waits_behind_it() -> None:
    """A request granted before the pressure commits during it."""
    policy = running(OLD, MIDDLE)
    policy.before_step(**step([standing(OLD, need=1), standing(MIDDLE, spillable=1)]))
    out = policy.before_step(**step([standing(OLD), standing(YOUNG)], [standing(MIDDLE, absent=1)], freeing=1))
    assert out == [SwapOut(key=YOUNG)]
    assert policy.state_of(YOUNG) is SpillState.SPILLED


def test_when_nobody_runs_the_oldest_comes_back_at_any_price() -> None:
    """Two blocks are free, the oldest lacks five: it gets the two, and the other makes room for the rest of it."""
    policy = spilled(OLD, MIDDLE)
    policy.before_step(**step([standing(OLD, need=1), standing(MIDDLE, spillable=5)], [standing(YOUNG, absent=3)]))
    policy.copies_done(MIDDLE, absent=5)
    policy.left(OLD)
    swapped_out = [standing(MIDDLE, absent=5), standing(YOUNG, absent=3, spillable=9)]
    out = policy.before_step(**step([], swapped_out, growable=2, host_free=3))
    assert out == [CopyBack(key=MIDDLE, blocks=2), CopyOut(key=YOUNG, blocks=3)]


@pytest.mark.parametrize("state", [SpillState.RUNNING, SpillState.SPILLING, SpillState.SPILLED, SpillState.RETURNING])
def test_a_sequence_may_leave_in_every_state(state: SpillState) -> None:
    """Nothing is asked for it afterwards, and the same key may come again."""
    policy = running(OLD, YOUNG)
    if state is not SpillState.RUNNING:
        policy.before_step(**step([standing(OLD, need=1), standing(YOUNG, spillable=3)]))
    if state in (SpillState.SPILLED, SpillState.RETURNING):
        policy.copies_done(YOUNG, absent=3)
    if state is SpillState.RETURNING:
        policy.before_step(**step([standing(OLD)], [standing(YOUNG, absent=3)], growable=9))
    assert policy.state_of(YOUNG) is state
    policy.left(YOUNG)
    assert policy.state_of(YOUNG) is None
    assert policy.before_step(**step([standing(OLD), standing(YOUNG)])) == []
    assert policy.state_of(YOUNG) is SpillState.RUNNING


@dataclass
class Simulated:
    """One sequence of the model: blocks on the device and in host memory, and what is being copied."""

    age: int
    size: int
    device: int
    host: int = 0
    going_out: int = 0
    coming_back: int = 0
    runs: bool = True
    steps: int = 0

    @property
    def have(self) -> int:
        return self.device + self.host


@dataclass
class World:
    """A device and host memory as counts. Copies end when the script says so; each step grows every runner it can."""

    device: int
    host: int
    headroom: int
    live: dict[RequestKey, Simulated] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    entered: int = 0

    def __post_init__(self) -> None:
        self.policy = SpillPolicy(headroom_blocks=self.headroom)

    @property
    def growable(self) -> int:
        return self.device - sum(s.device for s in self.live.values())

    @property
    def host_free(self) -> int:
        return self.host - sum(s.host + s.going_out for s in self.live.values())

    def admit(self, start: int, size: int) -> bool:
        """The rule of the ledger: all that is promised fits on both, less the reserve."""
        sizes = sum(s.size for s in self.live.values())
        if start > self.growable or sizes + size > self.device + self.host - self.headroom:
            return False
        self.entered += 1
        self.live[key_of(f"{self.entered}")] = Simulated(age=self.entered, size=size, device=start)
        return True

    def figures(self, key: RequestKey) -> Standing:
        s = self.live[key]
        left = s.size - s.have
        return Standing(
            key=key,
            age=s.age,
            promise_left=left,
            need=int(left > 0 and s.runs),
            spillable=s.device - s.going_out - s.coming_back,
            absent=s.host + s.going_out,
        )

    def step(self) -> None:
        runners = tuple(self.figures(key) for key, s in self.live.items() if s.runs)
        swapped_out = tuple(self.figures(key) for key, s in self.live.items() if not s.runs)
        freeing = sum(s.going_out for s in self.live.values())
        instructions = self.policy.before_step(
            growable=self.growable, freeing=freeing, host_free=self.host_free, runners=runners, swapped_out=swapped_out
        )
        for instruction in instructions:
            self.obey(instruction)
        self.check()
        for key, s in sorted(self.live.items(), key=lambda item: item[1].age):
            if s.runs and s.have < s.size and self.growable > 0:
                s.device += 1
                s.steps += 1
            if s.runs and s.have == s.size:
                self.ended.append(s.age)
                self.policy.left(key)
                del self.live[key]
        self.check()

    def obey(self, instruction: object) -> None:
        match instruction:
            case SwapOut(key=key):
                older = [s for s in self.live.values() if s.age < self.live[key].age]
                assert older, "the oldest was swapped out"
                self.live[key].runs = False
            case CopyOut(key=key, blocks=blocks):
                s = self.live[key]
                assert 0 < blocks <= s.device - s.going_out
                s.going_out += blocks
            case CopyBack(key=key, blocks=blocks):
                s = self.live[key]
                assert 0 <= blocks <= s.host
                s.device, s.host, s.coming_back = s.device + blocks, s.host - blocks, blocks
                if blocks == 0:
                    self.done(key)

    def done(self, key: RequestKey) -> None:
        """All that was being copied for this sequence has been."""
        s = self.live[key]
        s.device, s.host = s.device - s.going_out, s.host + s.going_out
        s.going_out = s.coming_back = 0
        s.runs = self.policy.copies_done(key, absent=s.host)

    def copying(self) -> list[RequestKey]:
        return [key for key, s in self.live.items() if s.going_out or s.coming_back]

    def check(self) -> None:
        assert self.growable >= 0, "more on the device than there is"
        assert self.host_free >= 0, "more in host memory than there is"
        ages = [s.age for s in self.live.values() if s.runs]
        here = (SpillState.SPILLING, SpillState.SPILLED)
        waiting = [s.age for key, s in self.live.items() if self.policy.state_of(key) in here]
        assert not ages or not waiting or max(ages) < min(waiting), "a younger one runs while an older one waits"


@given(
    device=st.integers(4, 16),
    host=st.integers(4, 24),
    headroom=st.integers(1, 3),
    queue=st.lists(st.tuples(st.integers(1, 4), st.integers(2, 16)), min_size=2, max_size=10),
    copies=st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40),
)
@settings(max_examples=300, deadline=None)
def test_everybody_finishes_and_nothing_overflows(
    device: int, host: int, headroom: int, queue: list[tuple[int, int]], copies: list[int | None]
) -> None:
    """Sequences come as soon as the sums allow it, copies end late and in any order: the device and host memory are
    never overfull, whoever runs is older than whoever waits, and all end within steps that their sizes bound."""
    world = World(device=device, host=host, headroom=headroom)
    script = iter(copies)
    waiting = [(min(start, size), size) for start, size in queue if size <= device]
    steps_max = 20 * (1 + sum(size for _, size in waiting))
    for _ in range(steps_max):
        waiting = [each for each in waiting if not world.admit(*each)]
        if not world.live and not waiting:
            break
        world.step()
        copying = world.copying()
        late = next(script, 0)
        if copying and late is not None:
            world.done(copying[late % len(copying)])
    assert not world.live, (world.live, world.policy._states)
    assert sorted(world.ended) == list(range(1, world.entered + 1))
