"""Where a prompt's leading blocks may come from other than computing, and the choice between these ways.

A `PrefixSource` is another node, or a tier below the region. Its blocks go into the prefix cache, evictable, before the
prompt is queued. The choice is by measured costs: the source is asked that is expected to save most time. Whatever
fails, the prompt is computed. One rule bounds what that costs: a source is given up that is silent for a share of what
computing takes, `LOST_SHARE_MAX`, or for `LOST_S_MIN` if that is more. It breaks its silence when it shows that it is
at work, and then with all that is seen to come. At work it has twice the time that was expected besides, or as long as
computing what it brings takes, if that is less. What a gather waits for in vain comes out of one share.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from baton.log import get_log
from baton.wire import Owner
from node.computing_cost import ComputingCost

log = get_log("sources")

LOST_SHARE_MAX: Final = 0.115
"""Of the time that computing would take: how long a source may be silent. One that stops has been so twice at most,
before it showed itself and behind the last that came, which is seen an eighth later: a quarter of computing is what it
may cost."""
LOST_S_MIN: Final = 0.004
"""It may cost as much anyway: about what a short prompt takes besides its computing."""
EXPECTED_TIMES_MAX: Final = 2
"""How many times what is expected of a source it may take besides, once it has shown that it is at work."""
LOOKS: Final = 8
"""At what has come of a source, in the time that it may be silent."""
ROUNDS_MAX: Final = 16
"""Of one gather."""
FAILURES_MAX: Final = 4
"""Rounds of one gather that bring nothing: all owners that a router names may refuse, and a tier have no room."""
SAMPLES_KEPT: Final = 16
"""How many measurements a cost remembers, about."""
NONE_WEIGHT: Final = 0.2
UNITS_WEIGHT: Final = 1e-3
"""What a belief weighs beside one measurement: that of what none cost, and that of so many."""
LEAST_SLOPE: Final = 0.01
"""Of the mean cost of a unit."""


class SourceKind(Enum):
    """As what the tokens are counted."""

    HOST = "host"
    DISK = "disk"
    PEER = "peer"


class LinearCost:
    """What so many units cost: a fixed time and a time for each, by least squares over about the last `SAMPLES_KEPT`
    measurements and a belief. Pure.

    The belief that none cost `fixed_s` weighs a fifth of one measurement, for good: it tells the two parts apart where
    all measurements are of one size. That of the time for each weighs next to nothing once there is a measurement.
    """

    def __init__(self, *, fixed_s: float, unit_s: float, units: float) -> None:
        """What is believed: of none, and of `units`."""
        self._believed = _sums(0.0, fixed_s, NONE_WEIGHT)
        self._believed += _sums(units, fixed_s + unit_s * units, UNITS_WEIGHT)
        self._sums = self._believed

    @classmethod
    def believed(cls, fixed_s: float, unit_s: float) -> LinearCost:
        """Of no more units than are needed to tell the two parts apart: a measurement then outweighs it."""
        weight_share = (NONE_WEIGHT + UNITS_WEIGHT) / UNITS_WEIGHT
        units = weight_share * LEAST_SLOPE / (1 - LEAST_SLOPE) * fixed_s / unit_s if unit_s > 0 else 0.0
        return cls(fixed_s=fixed_s, unit_s=unit_s, units=max(1.0, 1.1 * units))

    def measured(self, units: float, seconds: float) -> None:
        keep = 1 - 1 / SAMPLES_KEPT
        self._sums = keep * (self._sums - self._believed) + self._believed + _sums(units, seconds, 1.0)

    def of(self, units: float) -> float:
        """Seconds for so many."""
        return self.fixed_s + self.unit_s * units

    @property
    def fixed_s(self) -> float:
        weight, x, y, _, _ = self._figures()
        return max(0.0, (y - self.unit_s * x) / weight)

    @property
    def unit_s(self) -> float:
        weight, x, y, xx, xy = self._figures()
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 0 else 0.0
        # A slope of nothing would call any amount cheap. Neither part is less than none.
        return min(max(slope, LEAST_SLOPE * y / x), y / x)

    def _figures(self) -> list[float]:
        figures: list[float] = self._sums.tolist()
        return figures


def _sums(x: float, y: float, weight: float) -> npt.NDArray[np.float64]:
    return weight * np.array([1.0, x, y, x * x, x * y])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The part of a prompt whose KV may come from elsewhere: its full blocks, less the one with its last token."""

    tokens: Sequence[int]
    """A whole number of blocks."""
    salt: bytes
    chain: Sequence[bytes]
    """Digest of each of its blocks."""
    owners: Sequence[Owner] = ()
    """Nodes that have a part of it, as the router says, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a source can bring: `blocks` positions behind the first `have_blocks`, which are here."""

    source: PrefixSource
    kind: SourceKind
    prompt: Prefix
    have_blocks: int
    blocks: int
    fixed_s: float
    """Expected, whatever the number of blocks."""
    block_s: float
    """Expected for each block."""
    block_bytes: int
    sign_s: float = 0.0
    """When it is expected to show that it is at work. None of this node's own has to."""
    origin: str = ""
    """A peer's name."""
    detail: object = None
    """The source's own."""

    @property
    def expected_s(self) -> float:
        return self.fixed_s + self.block_s * self.blocks

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.blocks


class PrefixSource(Protocol):
    """Control thread only."""

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        """What it could bring now behind the first `have_blocks` positions. Immediate; None: nothing, or it has no
        place for another."""
        ...

    async def bring(self, offer: Offer, wait: Wait) -> int:
        """Bring the offer's blocks, or its leading ones, into the prefix cache, evictable -> how many positions came.

        One whose offer has a `sign_s` calls `wait.at_work` then.
        Uses spare blocks of the region only, and waits for none. 0 where it fails: it raises nothing of its own. It is
        cancelled when the request ends, or by `wait` when the time is over, and then returns at once: what is to be
        undone goes on elsewhere.
        """
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Wait:
    """Of one prompt for one offer."""

    timer: asyncio.Timeout
    """Until the time is over."""
    until_s: Callable[[int], float] = lambda _blocks: 0.0
    """When that is at the latest, by the loop's clock, once a source is at work that brings so many positions."""
    silent_s: float = math.inf
    """How long nothing new may be seen of a source at work, where that can be seen."""
    blocks: int = 0
    """How many it brings, as far as is known."""
    ends_s: float = 0.0
    """When all is expected to be here, by the loop's clock."""
    is_seen: bool = False
    """Whether the source is known to be at work."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """For other prompts of the same beginning."""
    _count: Callable[[], int] | None = None
    _counted: int = 0
    _moved_s: float = math.inf
    _look_next: asyncio.TimerHandle | None = None

    def at_work(self, blocks: int, come: Callable[[], int] | None = None) -> None:
        """The source brings so many positions: it may be waited for longer. `come` counts what is here of them, in
        whatever unit; None: that cannot be seen."""
        when_s = self.timer.when()
        if when_s is not None and not self.is_seen and not self.timer.expired():
            self.timer.reschedule(max(when_s, self.until_s(blocks)))
            if come is not None:
                self._count, self._moved_s = come, asyncio.get_running_loop().time()
                self._look_on()
        self.is_seen, self.blocks = True, blocks

    def moved_s(self) -> float:
        """When it was seen last that something came, by the loop's clock. Looks. Infinite: that cannot be seen."""
        if self._count is not None and (count := self._count()) > self._counted:
            self._counted, self._moved_s = count, asyncio.get_running_loop().time()
        return self._moved_s

    def _look_on(self) -> None:
        loop, until_s = asyncio.get_running_loop(), self.moved_s() + self.silent_s
        if until_s > (now_s := loop.time()):
            self._look_next = loop.call_at(min(until_s, now_s + self.silent_s / LOOKS), self._look_on)
        elif not self.timer.expired():
            self.timer.reschedule(now_s)

    def end(self) -> None:
        self._count = None
        if self._look_next is not None:
            self._look_next.cancel()
        self.over.set()


@dataclass(slots=True, kw_only=True)
class Gathered:
    """What a gather brought for one prompt, in positions, by kind."""

    blocks: dict[SourceKind, int] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    """Names of peers, in order of use."""

    def add(self, offer: Offer, blocks: int) -> None:
        self.blocks[offer.kind] = self.blocks.get(offer.kind, 0) + blocks
        if offer.origin and offer.origin not in self.origins:
            self.origins.append(offer.origin)


class Gatherer:
    """Decides for each prompt what is brought and from where, and brings it. Control thread only."""

    def __init__(
        self,
        *,
        block_size: int,
        have: Callable[[Prefix], int],
        computing: ComputingCost,
        clock: Callable[[], float],
    ) -> None:
        """`have` counts the leading positions of a prefix that are in the prefix cache; `computing` is what
        computing costs, which the node measures."""
        self._block_size = block_size
        self._have = have
        self._computing = computing
        self._clock = clock
        self._sources: list[PrefixSource] = []
        self._needs_owners = True
        self._under_way: dict[bytes, tuple[Offer, Wait]] = {}
        """By the digest of the first block that is being brought: prompts of the same beginning wait for it."""
        self.requests = 0
        """Prompts that are being gathered for."""

    def add(self, source: PrefixSource, *, needs_owners: bool = False) -> None:
        """`needs_owners`: it brings nothing of a prompt without owners."""
        self._sources.append(source)
        self._needs_owners = self._needs_owners and needs_owners

    def has_sources(self, *, owners: bool) -> bool:
        """Whether any source may have a part of a prompt, with or without owners."""
        return bool(self._sources) and (owners or not self._needs_owners)

    async def gather(self, prompt: Prefix) -> Gathered:
        """Bring what comes sooner than it is computed. Raises nothing of its own; cancelling it ends it at once."""
        got = Gathered()
        self.requests += 1
        try:
            await self._gather(prompt, got)
        finally:
            self.requests -= 1
        return got

    async def _gather(self, prompt: Prefix, got: Gathered) -> None:
        share_s = left_s = 0.0
        failures = 0
        for _ in range(ROUNDS_MAX):
            have = self._have(prompt)
            offers = self._offers(prompt, have)
            if not offers:
                return
            if not share_s:  # not before: it takes a part of a millisecond, and most prompts are offered nothing
                # With the fixed part: a short prompt's first token costs more than its blocks, and may wait as long.
                computing_s = self._computing.of(have * self._block_size, len(prompt.tokens))
                share_s = left_s = max(LOST_S_MIN, LOST_SHARE_MAX * computing_s)
            began_s, came = self._clock(), 0
            other = self._under_way.get(prompt.chain[have])
            offer = self._best(offers, math.inf if other else left_s)
            if offer is None:
                return
            if other is None:
                came = await self._bring(offer, left_s)
            elif not await self._other_brings(prompt, *other, left_s):
                return
            more = max(came, self._have(prompt) - have)
            left_s = min(share_s, left_s + self._worth_s(have, more) - (self._clock() - began_s))
            if came:
                got.add(offer, came)
            failures += more <= 0
            if failures >= FAILURES_MAX or left_s <= 0:
                return

    def _offers(self, prompt: Prefix, have: int) -> list[Offer]:
        found = [source.offer(prompt, have) for source in self._sources] if have < len(prompt.chain) else []
        return [offer for offer in found if offer is not None and offer.blocks > 0]

    def _best(self, offers: Sequence[Offer], left_s: float) -> Offer | None:
        """The one that saves most time, of those that do and are expected to show in time that they are at work."""
        best = max((offer for offer in offers if offer.sign_s < left_s), key=self._gain_s, default=None)
        return best if best is not None and self._gain_s(best) > 0 else None

    def _gain_s(self, offer: Offer) -> float:
        return self._worth_s(offer.have_blocks, offer.blocks) - offer.expected_s

    def _worth_s(self, have_blocks: int, blocks: int) -> float:
        """What computing them would add."""
        return self._computing.saved(have_blocks * self._block_size, (have_blocks + blocks) * self._block_size)

    async def _bring(self, offer: Offer, unseen_s: float) -> int:
        """Waits so long for a source that is silent -> positions that came."""
        digest = offer.prompt.chain[offer.have_blocks]
        unseen_s = min(unseen_s, self._worth_s(offer.have_blocks, offer.blocks))
        began_s = asyncio.get_running_loop().time()

        def until_s(blocks: int) -> float:
            longest_s = EXPECTED_TIMES_MAX * (offer.fixed_s + offer.block_s * blocks)
            return began_s + unseen_s + min(longest_s, self._worth_s(offer.have_blocks, blocks))

        try:
            async with asyncio.timeout_at(began_s + unseen_s) as timer:
                ends_s = self._clock() + offer.expected_s
                wait = Wait(timer=timer, until_s=until_s, silent_s=unseen_s, blocks=offer.blocks, ends_s=ends_s)
                if offer.sign_s == 0:
                    wait.at_work(offer.blocks)
                self._under_way[digest] = offer, wait
                try:
                    return await offer.source.bring(offer, wait)
                finally:
                    del self._under_way[digest]
                    wait.end()
        except TimeoutError:
            log.info("blocks did not come in time", kind=offer.kind.value, origin=offer.origin, blocks=offer.blocks)
            return 0

    async def _other_brings(self, prompt: Prefix, offer: Offer, wait: Wait, unseen_s: float) -> bool:
        """Wait for what is being brought for another prompt, if it saves time and is at work, or comes within what may
        be lost -> whether it was waited for."""
        end = min(offer.have_blocks + wait.blocks, len(prompt.chain))
        same = bisect_left(range(end), True, key=lambda index: prompt.chain[index] != offer.prompt.chain[index])
        expected_s = max(0.0, wait.ends_s - self._clock())
        worth_s = self._worth_s(offer.have_blocks, same - offer.have_blocks)
        longest_s = min(unseen_s, worth_s)
        if wait.is_seen:
            longest_s += min(EXPECTED_TIMES_MAX * expected_s, worth_s)
        if expected_s >= min(longest_s, worth_s):
            return False
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ends_s = began_s + longest_s
        if wait.moved_s() + unseen_s <= began_s:
            return False
        while not wait.over.is_set():
            until_s = min(ends_s, wait.moved_s() + unseen_s)
            if until_s <= loop.time():
                log.info("what another prompt waits for did not come in time", blocks=offer.blocks)
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await wait.over.wait()
        return True
