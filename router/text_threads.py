"""Threads that parse bodies, render chats and encode prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_T = TypeVar("_T")

THREADS_EACH: Final = 2
SHORT_BYTES_MAX: Final = 65_536
"""Takes some ten milliseconds; a text of the largest size that is taken may take seconds."""


class TextThreads:
    """Two lanes: however many long texts wait, short ones wait for short ones only.

    Threads of our own: the loop's resolve names of hosts.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(THREADS_EACH, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(THREADS_EACH, thread_name_prefix="long text")

    async def run(self, size: int, work: Callable[..., _T], *args: object) -> _T:
        """`work(*args)`, which is about so many bytes of text."""
        lane = self._short if size <= SHORT_BYTES_MAX else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, work, *args)

    def close(self) -> None:
        """What waits is not begun any more."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
