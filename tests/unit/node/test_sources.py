"""The choice between fetching, promoting and computing, by measured costs, and how long it waits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.computing_cost import ComputingCost
from node.sources import (
    WAIT_SHARE_MAX,
    Gathered,
    Gatherer,
    LinearCost,
    Offer,
    Prefix,
    SourceKind,
    Wait,
)

SIZE = 16
COMPUTE_S = 1e-4
"""Per token."""


def prompt(blocks: int, name: int = 0) -> Prefix:
    return Prefix(tokens=[name] * blocks * SIZE, salt=b"", chain=[b"%d-%d" % (name, index) for index in range(blocks)])


class Played:
    """A source that has some blocks of every prompt and takes as long as it is told to."""

    def __init__(self, world: World, blocks: int, *, block_s: float, fixed_s: float = 0.0, kind: SourceKind) -> None:
        self.world, self.blocks, self.kind = world, blocks, kind
        self.block_s, self.fixed_s = block_s, fixed_s
        self.sign_s: float | None = None
        """When it shows that it is at work."""
        self.takes: Callable[[Offer], float] = lambda offer: offer.expected_s
        self.brings: Callable[[Offer], int] = lambda offer: offer.blocks
        self.grants: Callable[[Offer], int] = lambda offer: offer.blocks
        """Of how many it shows that then."""
        self.shows = True
        """It does, if `sign_s` is set."""
        self.asked: list[int] = []
        self.given_up: list[bool] = []
        """For each that was cancelled, whether the time was over."""

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        return Offer(
            source=self,
            kind=self.kind,
            prompt=prompt,
            have_blocks=have_blocks,
            blocks=max(0, min(self.blocks, len(prompt.chain)) - have_blocks),
            fixed_s=self.fixed_s,
            block_s=self.block_s,
            block_bytes=1,
            sign_s=self.sign_s,
            origin="other" if self.kind is SourceKind.PEER else "",
        )

    async def bring(self, offer: Offer, wait: Wait) -> int:
        self.asked.append(offer.blocks)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            if self.shows and self.sign_s is not None:
                await asyncio.sleep(self.sign_s)
                wait.at_work(self.grants(offer))
            await asyncio.sleep(began_s + self.takes(offer) - loop.time())
        except asyncio.CancelledError:
            self.given_up.append(wait.timer.expired())
            raise
        came = self.brings(offer)
        self.world.have[bytes(offer.prompt.chain[0])] = offer.have_blocks + came
        return came


class World:
    """A gatherer on a loop whose time passes only while all sleep."""

    def __init__(self) -> None:
        self.have: dict[bytes, int] = {}
        self.computing = ComputingCost(fixed_s=0.0, token_s=COMPUTE_S)
        self.gatherer: Gatherer | None = None
        self.sources: list[Played] = []
        self.ended_s: list[float] = []

    def source(self, blocks: int, *, share: float, fixed_s: float = 0.0, kind: SourceKind = SourceKind.PEER) -> Played:
        """`share`: of the time that computing a block takes."""
        source = Played(self, blocks, block_s=share * COMPUTE_S * SIZE, fixed_s=fixed_s, kind=kind)
        self.sources.append(source)
        return source

    def run(self, *prompts: Prefix, at_s: Sequence[float] = ()) -> tuple[list[Gathered], float]:
        """What each gather brought, and how long all of them together took. `at_s`: when each begins; `ended_s` has
        when they ended, in that order."""

        async def all_of_them() -> tuple[list[Gathered], float]:
            loop = asyncio.get_running_loop()
            gatherer = Gatherer(
                block_size=SIZE,
                have=lambda prompt: self.have.get(bytes(prompt.chain[0]), 0),
                computing=self.computing,
                clock=loop.time,
            )
            for source in self.sources:
                gatherer.add(source)
            began_s = loop.time()

            async def one(each: Prefix, begins_s: float) -> Gathered:
                await asyncio.sleep(begins_s)
                got = await gatherer.gather(each)
                self.ended_s.append(loop.time() - began_s)
                return got

            begins = [*at_s, *[0.0] * (len(prompts) - len(at_s))]
            got = await asyncio.gather(*map(one, prompts, begins))
            assert gatherer.requests == 0
            return got, loop.time() - began_s

        loop = SkippingLoop()
        try:
            return loop.run_until_complete(all_of_them())
        finally:
            loop.close()


class SkippingLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        private: Any = self
        if not private._ready and private._scheduled:
            self._now_s = max(self._now_s, private._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def test_a_source_ten_times_as_fast_as_computing_brings_all_at_once() -> None:
    world = World()
    source = world.source(64, share=0.1)
    (got,), took_s = world.run(prompt(64))
    assert got.blocks == {SourceKind.PEER: 64} and got.origins == ["other"]
    assert source.asked == [64]
    assert took_s == pytest.approx(0.1 * 64 * SIZE * COMPUTE_S)


@pytest.mark.parametrize(("fixed_s", "asked"), [(0.010, [40]), (0.012, [])])
def test_all_of_a_short_prompt_may_take_most_of_the_time(fixed_s: float, asked: list[int]) -> None:
    """40 blocks that take 64 ms to compute: 16 ms may be waited. All of them are asked for where they are expected in
    12 ms, not in 14; and no part, as 8 ms would not be enough to begin."""
    world = World()
    source = world.source(40, share=0.002 / 0.064, fixed_s=fixed_s)
    (got,), _ = world.run(prompt(40))
    assert source.asked == asked and got.blocks == ({SourceKind.PEER: 40} if asked else {})


def test_the_third_owner_is_asked_where_two_refuse() -> None:
    """Three owners have the prompt; two say at once that they have no room. The third one brings it."""
    world = World()
    source = world.source(64, share=0.1)
    source.takes = lambda _offer: 0.001 if len(source.asked) < 3 else 0.005
    source.brings = lambda offer: 0 if len(source.asked) < 3 else offer.blocks
    (got,), _ = world.run(prompt(64))
    assert source.asked == [64, 64, 64] and got.blocks == {SourceKind.PEER: 64}


def test_a_source_slower_than_computing_is_not_asked() -> None:
    world = World()
    source = world.source(64, share=1.1)
    (got,), took_s = world.run(prompt(64))
    assert (got.blocks, source.asked, took_s) == ({}, [], 0)


def test_a_source_a_little_faster_than_computing_brings_in_parts() -> None:
    """Each part is expected well within the time that may be lost, which grows with what has come."""
    world = World()
    source = world.source(256, share=0.6)
    (got,), _ = world.run(prompt(256))
    assert got.blocks[SourceKind.PEER] == sum(source.asked) > 200
    assert len(source.asked) > 1


def test_a_fixed_cost_keeps_short_prompts_from_it() -> None:
    """Five milliseconds to begin: a prompt that takes 12.8 ms to compute is computed, one of 205 ms is fetched."""
    world = World()
    source = world.source(256, share=0.1, fixed_s=0.005)
    (short,), _ = world.run(prompt(8))
    assert short.blocks == {} and source.asked == []
    (long,), _ = world.run(prompt(128))
    assert long.blocks == {SourceKind.PEER: 128}


def test_a_dead_source_costs_a_quarter_of_computing() -> None:
    world = World()
    source = world.source(64, share=0.1)
    source.takes = lambda offer: 1e6
    (got,), took_s = world.run(prompt(64))
    assert got.blocks == {}
    assert took_s <= WAIT_SHARE_MAX * 64 * SIZE * COMPUTE_S * (1 + 1e-6)


def test_a_source_at_work_is_waited_for_as_long_as_it_saves_time() -> None:
    """Computing takes 102 ms; a quarter may be waited. All 64 blocks are expected after 61 ms, and a sign after 20:
    they are fetched. One that never shows anything costs the quarter, one that shows it and stops then no more than
    computing; if it had room for 24 of them, no more than computing these. Where the sign is expected after 30 ms,
    nothing is asked for, as no part comes in time."""
    for sign_s, shows, granted, takes_s, came, took_s in [
        (0.02, True, 64, 0.0614, 64, 0.0614),
        (0.02, False, 64, 1e6, 0, 0.0256),
        (0.02, True, 64, 1e6, 0, 0.1024),
        (0.02, True, 24, 1e6, 0, 0.0384),
        (0.03, True, 64, 0.0614, 0, 0.0),
    ]:
        world = World()
        source = world.source(64, share=0.0, fixed_s=0.0614)
        source.sign_s, source.shows = sign_s, shows
        source.grants = lambda offer, granted=granted: granted  # type: ignore[misc]
        source.takes = lambda offer, takes_s=takes_s: takes_s  # type: ignore[misc]
        (got,), waited_s = world.run(prompt(64))
        assert got.blocks.get(SourceKind.PEER, 0) == came
        assert waited_s == pytest.approx(took_s)


@pytest.mark.parametrize(
    ("expected_s", "sign_s", "waited_s"), [(0.008, 0.001, 0.0256), (0.02, 0.001, 0.0256), (0.022, 0.001, 0.066)]
)
def test_a_source_at_work_is_waited_for_no_longer_than_three_times_as_expected(
    expected_s: float, sign_s: float, waited_s: float
) -> None:
    """Computing takes 102 ms. One that shows that it is at work, and stops then, costs a quarter, as if it had shown
    nothing, where all was expected within that; else three times what was expected of it."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=expected_s)
    source.sign_s, source.takes = sign_s, lambda offer: 1e6
    (got,), took_s = world.run(prompt(64))
    assert got.blocks == {} and took_s == pytest.approx(waited_s)


@pytest.mark.parametrize(("sign_s", "waited_s"), [(0.001, 0.15 * 0.1024), (0.01, 0.0256)])
def test_a_source_that_shows_nothing_early_is_given_up_early(sign_s: float, waited_s: float) -> None:
    """Where the sign is expected within an eighth of the shorter time; else the quarter is waited."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=0.0614)
    source.sign_s, source.shows = sign_s, False

    def never(offer: Offer) -> float:
        source.blocks = 0  # it has nothing more to offer then
        return 1e6

    source.takes = never
    (got,), took_s = world.run(prompt(64))
    assert got.blocks == {} and took_s == pytest.approx(waited_s)


def test_prompts_that_wait_for_what_another_fetches_wait_until_it_comes_or_not_at_all() -> None:
    """A fetch takes 61 ms, where computing takes 102; its sign comes after 20. A second prompt of the same beginning
    comes at once, when nothing is known yet: it is computed. A third one comes after the sign: it waits to the end,
    longer than a quarter. A fourth one has 24 blocks in common, which are computed sooner: it does not wait."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=0.0614)
    source.sign_s = 0.02
    other = dataclasses.replace(prompt(64), chain=[*prompt(64).chain[:24], *[b"other"] * 40])
    (first, *others), took_s = world.run(prompt(64), prompt(64), prompt(64), other, at_s=[0, 0, 0.021, 0.021])
    assert first.blocks == {SourceKind.PEER: 64} and all(each.blocks == {} for each in others)
    assert source.asked == [64]
    assert world.ended_s == pytest.approx([0, 0.021, 0.0614, 0.0614])
    assert took_s == pytest.approx(0.0614)


def test_a_source_can_tell_who_gave_it_up() -> None:
    """The time is over for the first prompt. The second one's client leaves while its blocks are brought."""
    world = World()
    source = world.source(64, share=0.1)
    source.takes = lambda offer: 1e6
    world.run(prompt(64))

    async def left() -> None:
        gatherer = Gatherer(block_size=SIZE, have=lambda _: 0, computing=world.computing, clock=lambda: 0.0)
        gatherer.add(source)
        gathering = asyncio.create_task(gatherer.gather(prompt(64)))
        await asyncio.sleep(0)  # it begins at once
        assert len(source.asked) == 2
        gathering.cancel()
        await asyncio.wait([gathering])

    first = len(source.asked)
    source.asked[:] = [1]
    asyncio.run(left())
    assert source.given_up == [True] * first + [False]


def test_the_next_source_goes_on_where_the_first_ends() -> None:
    """Disk has 16 blocks, a peer all 64: the peer saves most and is asked for all. It has lost them meanwhile, so the
    disk's 16 are promoted."""
    world = World()
    world.source(16, share=0.05, kind=SourceKind.DISK)
    peer = world.source(64, share=0.1)
    peer.takes = lambda offer: 0.0

    def gone(offer: Offer) -> int:
        peer.blocks = 0
        return 0

    peer.brings = gone
    (got,), _ = world.run(prompt(64))
    assert got.blocks == {SourceKind.DISK: 16}


def test_prompts_of_one_beginning_fetch_it_once() -> None:
    world = World()
    source = world.source(64, share=0.1)
    (first, second), _ = world.run(prompt(64), prompt(64))
    assert source.asked == [64]
    assert (first.blocks, second.blocks) == ({SourceKind.PEER: 64}, {})


@given(
    blocks=st.integers(1, 300),
    share=st.floats(0.01, 2),
    slower=st.lists(st.floats(0.1, 50), min_size=1, max_size=20),
    comes=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_whatever_a_source_does_the_loss_is_a_quarter(
    blocks: int, share: float, slower: list[float], comes: list[float]
) -> None:
    """It may take another time than expected and bring less. The time waited, less what computing that which has come
    would have taken, is at most a quarter of computing all of it."""
    world = World()
    source = world.source(blocks, share=share)
    source.takes = lambda offer: offer.expected_s * slower[len(source.asked) % len(slower)]
    source.brings = lambda offer: int(offer.blocks * comes[len(source.asked) % len(comes)])
    (got,), took_s = world.run(prompt(blocks))
    block_s = SIZE * COMPUTE_S
    saved_s = got.blocks.get(SourceKind.PEER, 0) * block_s
    assert took_s <= saved_s + WAIT_SHARE_MAX * blocks * block_s + 1e-6


@given(fixed_s=st.floats(0, 0.1), unit_s=st.floats(1e-6, 1e-2), sizes=st.lists(st.integers(1, 9000), min_size=40))
def test_a_cost_is_learned(fixed_s: float, unit_s: float, sizes: list[int]) -> None:
    """After forty measurements of various sizes what is believed of one of these sizes is within a quarter."""
    sizes = [*sizes, 1, 9000, 1, 9000]
    cost = LinearCost(fixed_s=0.005, unit_s=1e-4, units=1000)
    for _ in range(3):
        for size in sizes:
            cost.measured(size, fixed_s + unit_s * size)
    assert cost.of(9000) == pytest.approx(fixed_s + unit_s * 9000, rel=0.25)
    assert cost.fixed_s >= 0 and cost.unit_s > 0
