"""How many calls a gRPC server takes: in all, of one address, and of those whose request has not come."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

from baton.errors import BatonError, Reason
from baton.retry_time import whole_seconds_ms
from baton.shared_places import SharedPlaces

T = TypeVar("T")

REQUEST_S_MAX: Final = 30.0
"""How long a call's request may take to come."""
UNREAD_MAX: Final = 128
"""Calls at the same time whose request is still to come: each may hold as much memory as the largest. Of a thousand
good calls at once only a few are among them, as gRPC hands over a few in each turn of the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimit:
    """Of the calls of one method that have no deadline."""

    of_address: int
    in_all: int


class CallSlots:
    """The places of one server's calls. `source` is the address of a caller. Lives on one event loop."""

    def __init__(self, *, rpcs_max: int, busy_retry_ms: int, rng: random.Random) -> None:
        """`busy_retry_ms` is for callers that are nodes; clients get whole seconds."""
        self._rpcs_max = rpcs_max
        self._retry_ms = busy_retry_ms
        self._rng = rng
        self._running = 0
        self._public: Counter[str] = Counter()
        """By source."""
        self._public_max = rpcs_max - rpcs_max // 4
        self._streams: dict[str, Counter[str]] = {}
        """By method and source."""
        self._numbers = count()
        self._unread = SharedPlaces(UNREAD_MAX)
        self._reads: dict[int, asyncio.Timeout] = {}

    async def read(self, source: str, request: Callable[[], Awaitable[T]]) -> T:
        """A call's request. While it is read the call has no other place: a client that sends no request, or sends it
        slowly, keeps nobody else out. Raises BatonError: it takes too long, or others need the place."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(REQUEST_S_MAX) as scope:
                self._reads[number] = scope
                leaves = self._unread.enter(number, source)
                if leaves is not None and not (left := self._reads.pop(leaves)).expired():
                    left.reschedule(asyncio.get_running_loop().time())
                return await request()
        except TimeoutError:
            if number in self._reads:
                raise BatonError(Reason.DEADLINE, f"The request has not come within {REQUEST_S_MAX:g} s.") from None
            raise self._full("Too many calls wait for their requests, this one for longest") from None
        finally:
            self._unread.leave(number)
            self._reads.pop(number, None)

    def running(self, refused: Callable[[BatonError], None] | None = None, *, source: str | None = None) -> _Running:
        """`refused` is called with what is raised, BatonError TOO_MANY_CALLS; the caller is a client then."""
        if self._running >= self._rpcs_max:
            full = self._full(
                f"This server is answering {self._running} calls already, its limit", public=refused is not None
            )
            if refused is not None:
                refused(full)
            raise full
        return _Running(self, source)

    def public(self, source: str | None, refused: Callable[[BatonError], None]) -> _Running:
        """As `running`, of clients: one address leaves a quarter of the places to others. None: of a proxy of ours."""
        if source is not None and self._public[source] >= self._public_max:
            full = self._full(f"This server answers {self._public_max} calls of one address at a time", public=True)
            refused(full)
            raise full
        return self.running(refused, source=source)

    @contextmanager
    def stream(self, method: str, limit: StreamLimit, source: str) -> Iterator[None]:
        """Raises BatonError TOO_MANY_CALLS."""
        streams = self._streams.setdefault(method, Counter())
        if streams.total() >= limit.in_all or streams[source] >= limit.of_address:
            raise self._full(f"This server keeps {limit.of_address} such streams of one address, {limit.in_all} in all")
        with _counted(streams, source):
            yield

    def _full(self, text: str, *, public: bool = False) -> BatonError:
        retry_ms = whole_seconds_ms(self._rng.random()) if public else self._retry_ms
        return BatonError(Reason.TOO_MANY_CALLS, f"{text}; try again later.", retry_after_ms=retry_ms)


class _Running:
    """A call that is answered while this is entered; of a client where it has a source."""

    __slots__ = ("_slots", "_source")

    def __init__(self, slots: CallSlots, source: str | None) -> None:
        self._slots = slots
        self._source = source

    def __enter__(self) -> None:
        self._slots._running += 1
        if self._source is not None:
            self._slots._public[self._source] += 1

    def __exit__(self, *_: object) -> None:
        self._slots._running -= 1
        if self._source is not None:
            _leave(self._slots._public, self._source)


@contextmanager
def _counted(counts: Counter[str], source: str) -> Iterator[None]:
    counts[source] += 1
    try:
        yield
    finally:
        _leave(counts, source)


def _leave(counts: Counter[str], source: str) -> None:
    counts[source] -= 1
    if not counts[source]:
        del counts[source]
