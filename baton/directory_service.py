"""The embedded directory over gRPC: `DirectoryState` with a clock and watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from batonpb import directory_pb2, directory_pb2_grpc

from baton.clock import Clock
from baton.directory import DirectoryLimits, DirectoryState, PushOutcome
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.log import get_log
from baton.rpc import RpcServer
from baton.tasks import end_task

log = get_log("directory")
DIRECTORY_SERVICE: Final = "baton.v1.Directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Fixed; tests pass others."""

    limits: DirectoryLimits = field(default_factory=DirectoryLimits)
    watchers_max: int = 1024
    watch_interval_ms: int = 10
    """A watcher gets changes at most this often; those in between come together."""
    expire_interval_ms: int = 100
    """Time between two looks for expired records."""
    standstill_ms_min: int = 400
    """After a longer time between two looks this process itself stood still (stopped, paused or without a core) and
    heard from nobody: every expiry is extended once by what is beyond it. With less taken off, a loop that is always
    slow would keep dead nodes forever."""

    def __post_init__(self) -> None:
        check_positive(self, "watchers_max", "watch_interval_ms", "expire_interval_ms")
        if self.standstill_ms_min <= self.expire_interval_ms:
            raise InvalidField("standstill_ms_min", f"must be above expire_interval_ms ({self.expire_interval_ms})")


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """Lives on one event loop, without a lock. `start` it beside its server, `close` it before the server stops."""

    def __init__(self, *, config: DirectoryConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._state = DirectoryState(limits=config.limits)
        self._looked_s = clock.monotonic_s()
        self._changed = asyncio.Event()
        self._seen_version = 0
        """The version at the last wake-up of the watchers."""
        self._watchers = 0
        self._closing = False
        self._expirer: asyncio.Task[None] | None = None

    def start(self, server: RpcServer) -> None:
        """Register with `server`, which is not started yet, and begin to drop expired records. Needs a running loop."""
        server.add(DIRECTORY_SERVICE, directory_pb2_grpc.add_DirectoryServicer_to_server, self)
        self._expirer = asyncio.create_task(self._expire_forever(), name="directory-expire")

    async def close(self) -> None:
        """End the watches, so that the server can stop without waiting for them. Idempotent."""
        self._closing = True
        self._wake()
        await end_task(self._expirer)

    async def Push(self, request: directory_pb2.PushRequest, _context: object) -> directory_pb2.PushReply:
        now_s = self._expire()
        record = request.record
        outcome = self._state.push(record, ttl_ms=request.ttl_ms, now_s=now_s)
        if outcome in (PushOutcome.ADDED, PushOutcome.REPLACED):
            log.info("node " + outcome.value, name=record.name, endpoint=record.endpoint)
        self._wake_if_changed()
        return directory_pb2.PushReply()

    async def Remove(self, request: directory_pb2.RemoveRequest, _context: object) -> directory_pb2.RemoveReply:
        now_s = self._expire()
        removed = self._state.remove(name=request.name, incarnation=request.incarnation, now_s=now_s)
        if removed:
            log.info("node removed", name=request.name)
        self._wake_if_changed()
        return directory_pb2.RemoveReply(removed=removed)

    async def List(self, _request: object, _context: object) -> directory_pb2.ListReply:
        return directory_pb2.ListReply(records=self._state.list(now_s=self._expire()))

    async def Watch(self, _request: object, _context: object) -> AsyncIterator[directory_pb2.WatchEvent]:
        if self._watchers >= self._config.watchers_max:
            raise BatonError(
                Reason.TOO_MANY_CALLS,
                f"The directory has {self._watchers} watchers, its limit (watchers_max).",
                retry_after_ms=1_000,
            )
        self._watchers += 1
        try:
            version: int | None = None
            while not self._closing:
                now_s = self._expire()
                changed = self._changed
                if version == self._state.version:
                    await changed.wait()
                    continue
                event = self._state.changes_since(version, now_s=now_s)
                version = self._state.version
                # While the watcher is slow to read, the generator waits here, and further changes are merged.
                yield event
                await self._clock.sleep_s(self._config.watch_interval_ms / 1e3)
        finally:
            self._watchers -= 1

    async def _expire_forever(self) -> None:
        while True:
            await self._clock.sleep_s(self._config.expire_interval_ms / 1e3)
            self._expire()

    def _expire(self) -> float:
        """Extend all records after a standstill, then drop the expired ones. Call it before every use of the records.

        Returns the time that it used, which the caller uses too.
        """
        now_s = self._clock.monotonic_s()
        gap_s = now_s - self._looked_s - self._config.standstill_ms_min / 1e3
        self._looked_s = now_s
        if gap_s > 0:
            log.warning("stood still and heard from no node; all records are extended", ms=round(gap_s * 1e3))
            self._state.stood_still(gap_s=gap_s)
        for record in self._state.expire(now_s=now_s):
            log.warning("node expired", name=record.name, endpoint=record.endpoint)
        self._wake_if_changed()
        return now_s

    def _wake_if_changed(self) -> None:
        if self._state.version != self._seen_version:
            self._seen_version = self._state.version
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
