"""Abandoned grants of which writes are still on their way: how long a link waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.ids import GrantId

Mark = object
"""Of how far a link has come: an equal one means that nothing has moved since."""


class Drains:
    """Looks at each grant every `drain_ms_max`, and gives it up when nothing has moved since the last look.

    Counting from the last progress, and not from the abandonment, lets a slow link send what it has begun, however long
    that takes; one that stands still is found out after one to two times the limit. Loop's thread.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        drain_ms_max: int,
        mark: Callable[[GrantId], Mark | None],
        stuck: Callable[[str], None],
    ) -> None:
        """`mark` gives None for a grant of which nothing is on its way; `stuck` is told why the link has to end."""
        self._loop = loop
        self._drain_ms_max = drain_ms_max
        self._mark = mark
        self._stuck = stuck
        self._timers: dict[GrantId, asyncio.TimerHandle] = {}

    def watch(self, grant: GrantId) -> None:
        """It has been abandoned. Idempotent."""
        if grant not in self._timers:
            self._look_later(grant, self._mark(grant))

    def close(self) -> None:
        """The link is ending: look no more. Idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _look_later(self, grant: GrantId, mark: Mark | None) -> None:
        if mark is not None:
            self._timers[grant] = self._loop.call_later(self._drain_ms_max / 1000, self._look, grant, mark)

    def _look(self, grant: GrantId, before: Mark) -> None:
        del self._timers[grant]
        mark = self._mark(grant)
        if mark == before:
            self._stuck(f"writes of an abandoned grant have not moved for {self._drain_ms_max} ms")
        else:
            self._look_later(grant, mark)
