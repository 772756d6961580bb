"""The event loop of our processes: few sockets have their say in one turn of it.

asyncio takes all that are ready, and a thousand connections that come, send or end at once would keep everything else
waiting for as long as all of them take. The kernel gives out those first that have waited longest.
"""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import time
from typing import Final

SOCKETS_MAX: Final = 32
"""In one turn."""
COLLECTED_AT: Final = (2_000, 10, 100)
"""Objects, and collections of a generation, at which the collector looks at the next one. By default it looks through
all objects for every 70,000 new ones: what thousands of connections hold, while others wait for 20 ms."""


class _Epoll:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fileno, self.close = self._epoll.fileno, self._epoll.close
        self.register, self.modify, self.unregister = self._epoll.register, self._epoll.modify, self._epoll.unregister

    def poll(self, timeout_s: float, count_max: int) -> list[tuple[int, int]]:
        return self._epoll.poll(timeout_s, min(count_max, SOCKETS_MAX))


class _Selector(selectors.EpollSelector):
    _selector_cls = _Epoll


class _Loop(asyncio.SelectorEventLoop):
    time = staticmethod(time.monotonic)
    """As asyncio's, without a call around it: routers look at the clock for each token."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    return _Loop(_Selector())


def collect_seldom() -> None:
    """What is there now stays. A collection that looks through all of it holds the loop for 60 ms and more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
