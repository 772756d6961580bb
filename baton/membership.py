"""One node's place in the cluster: it reports itself to the directory and keeps the records of the others.

The directory gives hints. When it is lost, the last known records stay, marked stale, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from baton.clock import Clock, wait_s
from baton.config import fixed, setting
from baton.directory_client import Directory, Snapshot
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.ids import NodeName
from baton.log import get_log
from baton.retry_time import backoff_s
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role

log = get_log("membership")

_TRANSIENT: Final = frozenset(
    {Reason.PEER_UNREACHABLE, Reason.DEADLINE, Reason.TOO_MANY_CALLS, Reason.DIRECTORY_FULL, Reason.CANCELLED}
)
_NAME_WAIT_TTLS: Final = 1.5
"""For how many times `ttl_ms` a starting node waits until its predecessor's record has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    heartbeat_ms: int = setting(
        500,
        "time between two reports of the own record to the directory; a change that matters is sent at once",
        "The heartbeats of many nodes load the directory. Keep ttl_ms at twice this or more.",
    )
    ttl_ms: int = setting(
        2_500,
        "the directory drops a node that it has not heard from for this long",
        "Nodes drop out of the directory under load (raise it), or dead ones stay in it too long (lower it).",
    )
    stale_ms_max: int = setting(
        300_000,
        "how long new requests go to the last known nodes while the directory is unreachable",
        "The directory may be away for longer, as in an upgrade, while nodes come and go rarely.",
    )
    directory_wait_ms_max: int = setting(
        30_000,
        "how long a starting node waits for a directory that does not answer",
        "Nodes start long before the directory does.",
    )
    backoff_ms_min: int = fixed(50)
    """First pause before the directory is asked again after a failure; it doubles each time."""
    backoff_ms_max: int = fixed(1_000)
    """Longest such pause."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
        if self.ttl_ms < 2 * self.heartbeat_ms:
            raise InvalidField("ttl_ms", f"must be at least twice heartbeat_ms ({self.heartbeat_ms})")
        if self.backoff_ms_min > self.backoff_ms_max:
            raise InvalidField("backoff_ms_min", "must not exceed backoff_ms_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unconfirmed:
    """How long a record is kept that the directory, found again, does not list."""

    until_s: float
    last_s: float
    """The end of `until_s`, however often the directory is lost and found meanwhile."""


class Membership:
    """Heartbeat and watch of one process, on one event loop. Does not own the directory client.

    `own_record` returns the record as it is now, before each push (`sequence` is set here); None: only watch.
    `on_change` is called on the loop after `nodes()` or `stale` has changed; it must not raise. `last_known` returns
    the nodes to begin with where the directory does not answer; it may block.
    """

    def __init__(
        self,
        *,
        directory: Directory,
        own_record: Callable[[], NodeRecord] | None,
        clock: Clock,
        rng: random.Random,
        config: MembershipConfig,
        on_change: Callable[[], None] | None = None,
        last_known: Callable[[], tuple[NodeRecord, ...]] = tuple,
    ) -> None:
        self._directory = directory
        self._own_record = own_record
        self._clock = clock
        self._rng = rng
        self._config = config
        self._on_change = on_change
        self._last_known = last_known
        self._waits_for = ""
        """Why it is not registered yet."""
        self._records: tuple[NodeRecord, ...] = ()
        self._of_role: dict[Role, tuple[NodeRecord, ...]] = {}
        """Cache of `nodes(role)`, emptied when the records change."""
        self._unconfirmed: dict[NodeName, _Unconfirmed] = {}
        self._stale = True
        self._stale_since_s = clock.monotonic_s()
        self._sequence = 0
        self._registered = False
        self._push_trouble: Reason | None = None
        self._announced = asyncio.Event()
        self._tasks = Tasks(asyncio.get_running_loop(), log, broken="heartbeat or watch ended by a bug")

    @property
    def stale(self) -> bool:
        """The directory is out of reach or was not reached yet, so `nodes()` may be out of date."""
        return self._stale

    def trouble(self) -> str:
        """What is the matter with the directory, in a sentence or two; empty while it is reached."""
        if self._waits_for:
            return f"This process waits until it is registered. {self._waits_for}"
        if not self._stale:
            return ""
        lost_s = self._clock.monotonic_s() - self._stale_since_s
        count = len(self._records)
        rest = f"new requests go to the {count} last known nodes" if count else "no node is known before it answers"
        return f"The directory has been out of reach for {lost_s:.0f} s: {rest}."

    def check_known(self) -> None:
        """Raises BatonError DIRECTORY_LOST if `nodes()` is too old to place new requests by."""
        lost_ms = (self._clock.monotonic_s() - self._stale_since_s) * 1e3
        if self._stale and lost_ms > self._config.stale_ms_max:
            raise BatonError(
                Reason.DIRECTORY_LOST,
                f"The directory has been out of reach for {lost_ms / 1e3:.0f} s, and what was known of the nodes is "
                f"not used for new requests after {self._config.stale_ms_max / 1e3:g} s (membership.stale_ms_max). "
                "Running requests go on. Bring the directory back; this node finds it by itself.",
                retry_after_ms=self._config.backoff_ms_max,
            )

    def nodes(self, role: Role | None = None) -> tuple[NodeRecord, ...]:
        """The last known records, ordered by name and with this node's own. No I/O.

        With `role`, those that serve it: a mixed node is both a prefill node and a decode node.
        """
        if role is None:
            return self._records
        found = self._of_role.get(role)
        if found is None:
            found = self._of_role[role] = tuple(record for record in self._records if record.role.serves(role))
        return found

    async def start(self) -> None:
        """Register, then keep pushing and watching in the background.

        It waits for a name that is taken, which may be taken by this node's killed predecessor, and for a directory
        that does not answer yet; if it has nodes to begin with, it registers in the background instead. Raises
        BatonError with nothing left running: NAME_IN_USE after 1.5 `ttl_ms`, PEER_UNREACHABLE or DEADLINE after
        `directory_wait_ms_max`, anything else at once.
        """
        assert not self._tasks, "started twice"
        if self._own_record is not None:
            await self._register()
        self._tasks.spawn(self._beat_forever())
        self._tasks.spawn(self._watch_forever())

    async def stop(self) -> None:
        """Stop both, then remove the own record; if the directory is gone, only log that. Idempotent."""
        await self._tasks.cancel()
        if self._registered and self._own_record is not None:
            self._registered = False
            record = self._own_record()
            try:
                await self._directory.remove(record.name, record.incarnation)
            except BatonError as error:
                log.warning("own record stays in the directory until it runs out", problem=error.message)

    def announce(self) -> None:
        """Push the own record now and not at the next heartbeat, for example because the lifecycle has changed."""
        self._announced.set()

    async def _register(self) -> None:
        config, begun_s, attempt = self._config, self._clock.monotonic_s(), 0
        while True:
            try:
                await self._push()
                self._waits_for = ""
                return
            except BatonError as error:
                waited_ms = (self._clock.monotonic_s() - begun_s) * 1e3
                if error.reason is Reason.NAME_IN_USE:
                    wait_ms_max, delay_s = config.ttl_ms * _NAME_WAIT_TTLS, config.heartbeat_ms / 1e3
                elif error.reason in _TRANSIENT:
                    if attempt == 0 and await self._begin_with_last_known(error):
                        return
                    wait_ms_max, delay_s = float(config.directory_wait_ms_max), self._pause_s(attempt)
                else:
                    raise
                if waited_ms >= wait_ms_max:
                    raise _gave_up(error, waited_ms) from error
                self._waits_for = error.message
                if attempt == 0:
                    log.warning("not registered yet", problem=error.message, wait_ms_max=wait_ms_max)
            attempt += 1
            await self._clock.sleep_s(delay_s)

    async def _begin_with_last_known(self, error: BatonError) -> bool:
        nodes = await asyncio.to_thread(self._last_known)
        if nodes:
            log.warning(
                "not registered yet; going on with the last known nodes", nodes=len(nodes), problem=error.message
            )
            self._publish(nodes, stale=True)
        return bool(nodes)

    def _pause_s(self, attempt: int) -> float:
        return backoff_s(attempt, self._config.backoff_ms_min, self._config.backoff_ms_max, self._rng)

    async def _push(self) -> None:
        assert self._own_record is not None
        self._sequence += 1
        record = dataclasses.replace(self._own_record(), sequence=self._sequence)
        # Set before the answer: a push whose answer is lost may have arrived, and then stop() must remove it.
        self._registered = True
        await self._directory.push(record, ttl_ms=self._config.ttl_ms)

    async def _beat_forever(self) -> None:
        while True:
            jitter = self._rng.uniform(0.9, 1.0)
            await wait_s(self._clock, self._announced, self._config.heartbeat_ms * jitter / 1e3)
            self._announced.clear()
            self._drop_unconfirmed()
            if self._own_record is None:
                continue
            try:
                await self._push()
            except BatonError as error:
                if error.reason is not self._push_trouble:
                    log.warning("heartbeat not taken", reason=error.reason, problem=error.message)
                self._push_trouble = error.reason
            else:
                if self._push_trouble is not None:
                    log.info("heartbeat taken again")
                self._push_trouble = None

    async def _watch_forever(self) -> None:
        attempt = 0
        while True:
            found_again = True
            try:
                async with aclosing(self._directory.watch()) as snapshots:
                    async for snapshot in snapshots:
                        self._take(snapshot, found_again=found_again)
                        found_again, attempt = False, 0
            except BatonError as error:
                if attempt == 0:
                    log.warning("directory lost; going on with the last known nodes", problem=error.message)
                self._publish(self._records, stale=True)
            await self._clock.sleep_s(self._pause_s(attempt))
            attempt += 1

    def _take(self, snapshot: Snapshot, *, found_again: bool) -> None:
        """Take over the directory's records, and keep for a while those that it may have lost.

        A directory that is found again may not know the living nodes: it was restarted, stood still, or was cut off
        from them. It knows them again within a heartbeat. Until then, for `ttl_ms`, nodes stay that it neither lists
        nor reports as removed, so that its trouble causes no outage. If it is lost again and again, a dead node stays
        for `stale_ms_max` in all; a loss of `ttl_ms` or more, during which nothing could be learned, does not count.
        """
        settled = {record.name for record in snapshot.records} | snapshot.left
        if found_again:
            self._unconfirmed = {record.name: self._wait_for(record.name) for record in self._records}
        now_s, waits = self._clock.monotonic_s(), self._unconfirmed
        self._unconfirmed = {name: waits[name] for name in waits if name not in settled and waits[name].until_s > now_s}
        kept = [record for record in self._records if record.name in self._unconfirmed]
        self._publish(tuple(sorted([*snapshot.records, *kept], key=lambda record: record.name)), stale=False)

    def _wait_for(self, name: NodeName) -> _Unconfirmed:
        """How long to keep a record that the directory, found again just now, may not know."""
        now_s, ttl_s = self._clock.monotonic_s(), self._config.ttl_ms / 1e3
        before, last_s = self._unconfirmed.get(name), now_s + self._config.stale_ms_max / 1e3
        if before is not None:
            lost_s = now_s - self._stale_since_s if self._stale else 0.0
            last_s = before.last_s + (lost_s if lost_s >= ttl_s else 0.0)
        return _Unconfirmed(until_s=min(now_s + ttl_s, last_s), last_s=last_s)

    def _drop_unconfirmed(self) -> None:
        if self._stale:
            return
        now_s = self._clock.monotonic_s()
        overdue = {name for name, wait in self._unconfirmed.items() if wait.until_s <= now_s}
        for name in overdue:
            del self._unconfirmed[name]
        self._publish(tuple(record for record in self._records if record.name not in overdue), stale=False)

    def _publish(self, records: tuple[NodeRecord, ...], *, stale: bool) -> None:
        if records == self._records and stale == self._stale:
            return
        if stale and not self._stale:
            self._stale_since_s = self._clock.monotonic_s()
        self._records, self._stale = records, stale
        self._of_role.clear()
        if self._on_change is not None:
            self._on_change()


def _gave_up(error: BatonError, waited_ms: float) -> BatonError:
    unanswered = error.reason in (Reason.PEER_UNREACHABLE, Reason.DEADLINE)
    hint = " Start the directory first, or say where it is with --directory." if unanswered else ""
    return error.reworded(f"Not registered after {waited_ms:.0f} ms. {error.message}{hint}")
