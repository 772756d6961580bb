"""Keeps a router's index of who has which blocks true: one stream for each serving node (docs/cluster.md).

A node's stream is opened when the directory lists the process. What is known of a process is forgotten at once when the
directory, or the address itself, says that it is gone. A stream that breaks is opened again behind what is known; a gap
in it, or a node that no longer has what lies between, costs a snapshot, and until that is whole what was known counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from batonpb import common_pb2, holdings_pb2, holdings_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role
from cachestore.holder_index import HolderIndex
from cachestore.holdings import BLOCKS_MAX

log = get_log("holdings")

AGAIN_MS: Final = 100
"""Pause before a stream that broke is opened again; doubled with each that brings nothing."""
AGAIN_MS_MAX: Final = 5_000


class GapError(Exception):
    """The stream does not go on where it was: something is missing."""


class _Follower:
    """What is known of one process."""

    def __init__(self, record: NodeRecord, index: HolderIndex) -> None:
        self.record = record
        self.number = 0
        """The last change that is known."""
        self._index = index
        self._filling: int | None = None
        """Where a snapshot is put until it is whole."""
        self._parts = 0
        self._room = 2 * BLOCKS_MAX
        """Entries that it may still get before they are counted: hidden ones may make them twice as many."""
        self.task: asyncio.Task[None] | None = None

    def take(self, news: holdings_pb2.HoldingsNews) -> None:
        """Raises GapError."""
        if len(news.digests) != 16 * len(news.tiers) or max(news.tiers, default=0) > 3:
            raise GapError("a malformed message")
        if news.part:
            self._take_part(news)
            return
        holder = self._index.holders.get(self.record.incarnation)
        if news.behind != self.number or holder is None or self._filling is not None:
            raise GapError(f"behind {news.behind} instead of {self.number}")
        self._put(holder, news)
        self.number = news.number

    def _take_part(self, news: holdings_pb2.HoldingsNews) -> None:
        if news.part == 1:
            self.drop_part()
            self._filling, self._parts, self._room = self._index.begin(), 0, 2 * BLOCKS_MAX
            if self._filling is None:
                raise GapError("more nodes than can be known")
        if self._filling is None or news.part != self._parts + 1:
            raise GapError(f"part {news.part} behind {self._parts}")
        self._put(self._filling, news)
        self._parts = news.part
        if news.part == news.parts:
            self._index.publish(self.record.incarnation, self._filling)
            self._filling, self.number = None, news.number

    def _put(self, holder: int, news: holdings_pb2.HoldingsNews) -> None:
        self._room -= len(news.tiers)
        if self._room < 0:
            count = self._index.count(holder)
            self._room = 2 * BLOCKS_MAX - count - len(news.tiers)
            if count > BLOCKS_MAX or self._room < 0:
                self.forget()
                raise GapError("more blocks than are known of one node")
        self._index.put(holder, news.digests, news.tiers)

    def drop_part(self) -> None:
        """What has come of a snapshot that is not whole."""
        if self._filling is not None:
            self._index.discard(self._filling)
            self._filling = None

    def forget(self) -> None:
        self.drop_part()
        self._index.forget(self.record.incarnation)
        self.number = 0


class HoldingsReader:
    """Lives on the router's loop. Call `close` at the end."""

    def __init__(
        self,
        index: HolderIndex,
        *,
        own: Incarnation,
        channels: Channels,
        clock: Clock,
        repeats: RepeatLog,
    ) -> None:
        self.index = index
        self._own = own
        self._channels = channels
        self._clock = clock
        self._tasks = Tasks(asyncio.get_running_loop(), log, broken="what nodes have cached is no longer followed")
        self._repeats = repeats
        self._followers: dict[Incarnation, _Follower] = {}
        self._sweeps = False
        self.snapshots = 0
        """Taken since the start."""

    def follow(self, records: Iterable[NodeRecord]) -> None:
        """What the directory says."""
        present = {r.incarnation: r for r in records if r.role is not Role.ROUTER and r.model is not None}
        for incarnation in self._followers.keys() - present.keys():
            follower = self._followers.pop(incarnation)
            follower.forget()
            if follower.task is not None:
                follower.task.cancel()
        for incarnation, record in present.items():
            if incarnation not in self._followers:
                follower = self._followers[incarnation] = _Follower(record, self.index)
                self._tasks.spawn(self._read(follower))

    def use(self, endpoint: str) -> bool:
        """Whether one of the streams goes there."""
        return any(follower.record.endpoint == endpoint for follower in self._followers.values())

    def upkeep(self) -> None:
        """Every second."""
        if not self._sweeps:
            self._sweeps = True
            self._tasks.spawn(self._sweep())

    async def _sweep(self) -> None:
        """Others have the loop in between: of millions of entries it takes a while."""
        for _ in iter(self.index.sweep, False):
            await asyncio.sleep(0)
        self._sweeps = False

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _read(self, follower: _Follower) -> None:
        """Until the process is gone."""
        follower.task = asyncio.current_task()
        record, pause_ms = follower.record, AGAIN_MS
        while self._followers.get(record.incarnation) is follower:
            known = follower.number
            try:
                await self._stream(follower)
                problem = "the stream has ended"
            except BatonError as error:
                problem = error.message
                if error.reason is Reason.INCARNATION_MISMATCH:
                    follower.forget()  # the directory will say so too
            except GapError as error:
                problem = str(error)
                follower.number = 0
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    follower.drop_part()
                    raise
                problem = "its channel was closed"
            follower.drop_part()
            pause_ms = AGAIN_MS if follower.number != known else min(2 * pause_ms, AGAIN_MS_MAX)
            self._repeats.info("what a node has cached is not heard of", peer=record.name, problem=problem)
            await self._clock.sleep_s(pause_ms / 1000)

    async def _stream(self, follower: _Follower) -> None:
        """One call. Raises BatonError, GapError."""
        record = follower.record
        header = common_pb2.Header(sender=self._own, receiver=record.incarnation)
        stub = holdings_pb2_grpc.HoldingsStub(self._channels.get(record.endpoint))
        with rpc_errors(record.name):
            call = stub.Watch(holdings_pb2.WatchHoldingsRequest(header=header, known=follower.number))
            try:
                async for news in call:
                    self.snapshots += news.part == 1
                    follower.take(news)
            finally:
                call.cancel()
