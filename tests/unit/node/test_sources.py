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
    LOST_S_MIN,
    LOST_SHARE_MAX,
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
LOST_S = LOST_SHARE_MAX * 64 * SIZE * COMPUTE_S
"""12 ms: how long a prompt of 64 blocks waits for a silent source."""


def prompt(blocks: int, name: int = 0) -> Prefix:
    return Prefix(tokens=[name] * blocks * SIZE, salt=b"", chain=[b"%d-%d" % (name, index) for index in range(blocks)])


class Played:
    """A source that has some blocks of every prompt and takes as long as it is told to."""

    def __init__(self, world: World, blocks: int, *, block_s: float, fixed_s: float = 0.0, kind: SourceKind) -> None:
        self.world, self.blocks, self.kind = world, blocks, kind
        self.block_s, self.fixed_s = block_s, fixed_s
        self.sign_s = 0.0
        """When it shows that it is at work. At once: it is the node's own."""
        self.takes: Callable[[Offer], float] = lambda offer: offer.expected_s
        self.brings: Callable[[Offer], int] = lambda offer: offer.blocks
        self.shows = True
        """It does, if `sign_s` is set."""
        self.moves: Sequence[float] | None = None
        """When something is seen to come, from the call on, until all has. None: that cannot be seen."""
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

    def _come(self, began_s: float) -> Callable[[], int] | None:
        moves, loop = self.moves, asyncio.get_running_loop()
        return None if moves is None else lambda: sum(began_s + each <= loop.time() for each in moves)

    async def bring(self, offer: Offer, wait: Wait) -> int:
        self.asked.append(offer.blocks)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            if self.shows and self.sign_s:
                await asyncio.sleep(self.sign_s)
                wait.at_work(self.brings(offer), self._come(began_s))
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


def test_a_source_a_little_faster_than_computing_brings_all() -> None:
    world = World()
    source = world.source(256, share=0.9)
    (got,), took_s = world.run(prompt(256))
    assert got.blocks[SourceKind.PEER] == 256 and source.asked == [256]
    assert took_s == pytest.approx(0.9 * 256 * SIZE * COMPUTE_S)


def test_a_fixed_cost_keeps_short_prompts_from_it() -> None:
    """Five milliseconds to begin: a prompt that takes 4.8 ms to compute is computed, one of 205 ms is fetched."""
    world = World()
    source = world.source(256, share=0.1, fixed_s=0.005)
    (short,), _ = world.run(prompt(3))
    assert short.blocks == {} and source.asked == []
    (long,), _ = world.run(prompt(128))
    assert long.blocks == {SourceKind.PEER: 128}


@pytest.mark.parametrize(
    ("expected_s", "sign_s", "shows", "takes_s", "came", "waited_s"),
    [
        (0.04, 0.01, True, 0.04, 64, 0.04),
        (0.04, 0.01, True, 0.09, 64, 0.09),
        (0.04, 0.01, True, 1e6, 0, 0.08 + LOST_S),
        (0.09, 0.01, True, 1e6, 0, 0.1024 + LOST_S),
        (0.04, 0.01, False, 1e6, 0, LOST_S),
        (0.04, 0.0, True, 1e6, 0, 0.08 + LOST_S),
        (0.04, 0.013, True, 0.04, 0, 0.0),
    ],
)
def test_a_source_may_cost_a_share_of_computing(
    expected_s: float, sign_s: float, shows: bool, takes_s: float, came: int, waited_s: float
) -> None:
    """Computing takes 102 ms, of which 12 may be lost; all 64 blocks are expected after `expected_s`. One that shows in
    time that it is at work, as the node's own always is, may take twice as long besides, or as long as computing, where
    what comes is not seen; one that never shows it is given up after 12 ms, and one that is expected to show it later
    is not asked."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=expected_s)
    source.sign_s, source.shows = sign_s, shows
    source.takes = lambda offer: takes_s
    (got,), took_s = world.run(prompt(64))
    assert got.blocks.get(SourceKind.PEER, 0) == came and took_s == pytest.approx(waited_s)
    assert len(source.asked) == (waited_s > 0)


@pytest.mark.parametrize(
    ("moves", "takes_s", "came", "waited_s"),
    [
        ([], 1e6, 0, 0.01 + LOST_S),
        ([0.015, 0.025], 1e6, 0, 0.01 + 11 * LOST_S / 8 + LOST_S),
        ([0.02, 0.03, 0.04, 0.05, 0.06, 0.07], 0.075, 64, 0.075),
        ([0.02, 0.03, 0.04, 0.05, 0.066], 0.075, 0, 0.01 + 28 * LOST_S / 8 + LOST_S),
        ([number / 1000 for number in range(11, 200)], 1e6, 0, 0.08 + LOST_S),
    ],
    ids=["nothing", "two parts", "all, late", "with a pause too long", "on and on"],
)
def test_a_source_that_falls_silent_is_given_up(moves: list[float], takes_s: float, came: int, waited_s: float) -> None:
    """Computing takes 102 ms, a silent source 12 of them at most. This one is expected to take 40 and shows after 10
    that it is at work. What comes is looked at eight times in those 12 ms."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=0.04)
    source.sign_s, source.takes, source.moves = 0.01, lambda offer: takes_s, moves
    (got,), took_s = world.run(prompt(64))
    assert got.blocks.get(SourceKind.PEER, 0) == came and took_s == pytest.approx(waited_s)


def test_prompts_that_wait_for_what_another_fetches_hear_its_silence_too() -> None:
    """A prompt that takes 410 ms to compute fetches, and nothing comes any more 20 ms after the call. It may wait for
    49 ms of silence. One of 102 ms with the same beginning, which came after 18 ms, waits for 12."""
    world = World()
    peer = world.source(256, share=0.0, fixed_s=0.1)
    peer.sign_s, peer.takes, peer.moves = 0.01, lambda offer: 1e6, [0.02]
    world.run(prompt(256), prompt(64), at_s=(0.0, 0.018))
    assert peer.asked == [256]
    assert world.ended_s == pytest.approx([0.01 + 2 * LOST_S, 0.01 + LOST_S + 4 * LOST_S])


def test_a_short_prompt_may_wait_for_longer() -> None:
    """It takes 12.8 ms to compute. Its source is silent, and costs 4 ms."""
    world = World()
    source = world.source(8, share=0.5)
    source.sign_s, source.shows, source.takes = 0.002, False, lambda offer: 1e6
    (got,), took_s = world.run(prompt(8))
    assert got.blocks == {} and took_s == pytest.approx(LOST_S_MIN)


def test_a_source_that_shows_itself_in_time_is_asked_where_a_better_one_does_not() -> None:
    """A peer has all, and is expected to ask for room after 20 ms, where 12 may be lost. The disk has a half: that
    comes, and the peer is not asked for the rest either."""
    world = World()
    peer = world.source(64, share=0.1)
    peer.sign_s = 0.02
    world.source(32, share=0.5, kind=SourceKind.DISK)
    (got,), _ = world.run(prompt(64))
    assert got.blocks == {SourceKind.DISK: 32} and peer.asked == []


def test_what_has_come_does_not_pay_for_a_silent_source() -> None:
    """Computing takes 205 ms, of which 25 may be lost. The disk brings 120 of 128 blocks in 10 ms. A silent peer has
    the rest, which takes 12.8 ms to compute, and is waited for as long at a time, and for 25 ms in all."""
    world = World()
    world.source(120, share=0.0, fixed_s=0.01, kind=SourceKind.DISK)
    peer = world.source(128, share=0.5)
    peer.sign_s, peer.shows, peer.takes = 0.001, False, lambda offer: 1e6
    (got,), took_s = world.run(prompt(128))
    assert got.blocks == {SourceKind.DISK: 120} and peer.asked == [8, 8]
    assert took_s == pytest.approx(0.01 + 2 * LOST_S)


def test_a_source_that_was_granted_less_is_waited_for_by_what_it_was_granted() -> None:
    """A peer offers 64 blocks, is granted 4 of them, which take 6.4 ms to compute, and stops. It costs the share that
    any may cost, and twice what the 4 were expected to take."""
    world = World()
    peer = world.source(64, share=0.4)
    peer.sign_s, peer.brings, peer.takes = 0.001, lambda offer: 4, lambda offer: 1e6
    (got,), took_s = world.run(prompt(64))
    assert got.blocks == {} and took_s == pytest.approx(LOST_S + 2 * 0.4 * 4 * SIZE * COMPUTE_S)


def test_a_short_prompt_waits_for_a_long_ones_fetch_whose_owner_it_would_not_ask() -> None:
    """Owners show after 20 ms that they are at work. A prompt that takes 410 ms to compute asks one and is 5 ms from
    its end when a prompt of 102 ms with the same beginning comes, which may lose 12 ms: it waits for those 5."""
    world = World()
    peer = world.source(256, share=0.0, fixed_s=0.06)
    peer.sign_s = 0.02
    (_, short), _ = world.run(prompt(256), prompt(64), at_s=(0.0, 0.055))
    assert peer.asked == [256] and short.blocks == {}
    assert world.ended_s[1] == pytest.approx(0.06)


def test_prompts_that_wait_for_what_another_fetches_wait_until_it_comes_or_not_at_all() -> None:
    """A fetch takes 61 ms, where computing takes 102; its sign comes after 10. A second prompt of the same beginning
    comes at once, when nothing is known yet: it is computed. A third one comes after the sign: it waits to the end,
    longer than it may lose. A fourth one has 24 blocks in common, which are computed sooner: it does not wait."""
    world = World()
    source = world.source(64, share=0.0, fixed_s=0.0614)
    source.sign_s = 0.01
    other = dataclasses.replace(prompt(64), chain=[*prompt(64).chain[:24], *[b"other"] * 40])
    (first, *others), took_s = world.run(prompt(64), prompt(64), prompt(64), other, at_s=[0, 0, 0.011, 0.011])
    assert first.blocks == {SourceKind.PEER: 64} and all(each.blocks == {} for each in others)
    assert source.asked == [64]
    assert world.ended_s == pytest.approx([0, 0.011, 0.0614, 0.0614])
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
def test_whatever_a_source_does_the_loss_is_bounded(
    blocks: int, share: float, slower: list[float], comes: list[float]
) -> None:
    """It may take another time than expected and bring less. The time waited, less what computing that which has come
    would have taken, is at most the share of computing all of it that may be lost, and twice what was expected once."""
    world = World()
    source = world.source(blocks, share=share)
    source.takes = lambda offer: offer.expected_s * slower[len(source.asked) % len(slower)]
    source.brings = lambda offer: int(offer.blocks * comes[len(source.asked) % len(comes)])
    (got,), took_s = world.run(prompt(blocks))
    computing_s = blocks * SIZE * COMPUTE_S
    saved_s = got.blocks.get(SourceKind.PEER, 0) * SIZE * COMPUTE_S
    lost_s = max(LOST_S_MIN, LOST_SHARE_MAX * computing_s)
    assert took_s <= saved_s + lost_s + 2 * share * computing_s + 1e-6


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
