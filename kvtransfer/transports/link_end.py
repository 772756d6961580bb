"""How a writer's link comes to its end: once, for one reason, told once."""

from __future__ import annotations

import asyncio

from baton.ids import Pair
from kvtransfer.transport import WriterEvents


class LinkEnd:
    """Shared by `close`, a fence, a lost connection and a failure of our own, whichever comes first. Loop's thread."""

    def __init__(self, *, pair: Pair, events: WriterEvents, loop: asyncio.AbstractEventLoop) -> None:
        self._pair = pair
        self._events = events
        self._asked_by_caller = False
        self._over = loop.create_future()
        self.reason: str | None = None
        """Why the end has begun."""
        self.by_fence = False

    @property
    def begun(self) -> bool:
        return self.reason is not None

    @property
    def over(self) -> bool:
        return self._over.done()

    def begin(self, reason: str) -> bool:
        """True the first time: the caller goes on with the end, up to `finish`."""
        if self.begun:
            return False
        self.reason = reason
        return True

    def ask(self) -> None:
        """The caller's `close` is about to begin the end, unless it has begun: an end that it began is not told."""
        if not self.begun:
            self._asked_by_caller = True

    def finish(self) -> None:
        """Nothing of the link is left. Once; tells `link_lost`."""
        assert self.reason is not None
        self._over.set_result(None)
        if not self._asked_by_caller:
            self._events.link_lost(self._pair, self.reason)

    async def wait(self) -> None:
        """Until `finish`, and the loop has carried out what was handed to it before. Cancelling the waiter cancels
        nothing else."""
        await asyncio.shield(self._over)
        # Where the end lies behind already: a batch posted since then completes by a call that the loop still has.
        await asyncio.sleep(0)
