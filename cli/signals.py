"""Ctrl-C and its like, for commands that have something to put away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from baton.errors import BatonError
from baton.lifecycle import install_signal_handlers


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as the end of a wait. A second SIGINT or SIGTERM ends the process at once, with status
    128 + signal, after a call of `at_second`.

    To be entered on the running loop, in the main thread.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.received: signal.Signals | None = None
        """The first one, once `stop` is set."""
        self.at_second: Callable[[], None] = lambda: None
        """Called in a signal handler, between any two bytecodes: must not wait."""

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        self._restore = install_signal_handlers(self._loop, self._first)
        # A terminal that is closed; ignored already where the user asked for that (nohup).
        self._hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        if self._hangup:
            self._loop.add_signal_handler(signal.SIGHUP, self._note, signal.SIGHUP)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hangup:
            self._loop.remove_signal_handler(signal.SIGHUP)
        self._restore()

    def _note(self, signum: signal.Signals) -> None:
        self.received = self.received or signum
        self.stop.set()

    def _first(self, signum: signal.Signals) -> None:
        self._note(signum)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._second)

    def _second(self, signum: int, _: FrameType | None) -> None:
        try:
            self.at_second()
        finally:
            os._exit(128 + signum)

    async def unless_stopped(self, work: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> bool:
        """Wait for `work`; False when a signal comes first: then it has been cancelled and has ended.

        Raises what `work` raises; after a signal only what is no BatonError, for the work was given up.
        """
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.wait({working, stopping})
        failure = None if working.cancelled() else working.exception()
        if failure is not None and not isinstance(failure, BatonError):
            raise failure
        return False
