"""What every writer's link does alike, however it moves its bytes: it has one epoch, gives grants up, and ends once."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import DataEndpoint, TransportName, WriterEvents
from kvtransfer.transports.drains import Drains
from kvtransfer.transports.link_end import LinkEnd
from kvtransfer.transports.post_queue import PostQueue, TooManyAbandonedGrants


class BaseLink(ABC):
    """The part of `kvtransfer.transport.WriterLink` that no transport has for itself. Loop's thread.

    A subclass sets `_queue` when it is made, and `_drains` where what is on its way may stand still for ever.
    """

    transport: ClassVar[TransportName]
    _queue: PostQueue[Any, Any]
    _drains: Drains | None = None

    def __init__(
        self, *, endpoint: DataEndpoint, pair: Pair, events: WriterEvents, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._address, self._epoch = endpoint.address, endpoint.epoch
        self._loop = loop
        self._ending = LinkEnd(pair=pair, events=events, loop=loop)

    @property
    def epoch(self) -> Epoch:
        """See `WriterLink.epoch`."""
        return self._epoch

    @property
    def fenced(self) -> bool:
        """See `WriterLink.fenced`."""
        return self._ending.by_fence

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. Remembered until `forget(grant)` or the end of the link. What is on its way may
        arrive; where nothing moves for `drain_ms_max` the link ends."""
        try:
            self._queue.abandon(grant)
        except TooManyAbandonedGrants as error:
            self._end(str(error))
            return
        if self._drains is not None and not self._ending.begun:
            self._drains.watch(grant)

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this abandoned grant."""
        self._queue.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when every batch is complete, the threads have ended, the region and the
        sockets are let go of."""
        self._ending.ask()
        self._end("closed", orderly=True)
        await self._ending.wait()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            "transport": self.transport.value,
            "address": self._address,
            "epoch": self._epoch,
            "state": self._ending.reason or "open",
        }

    @abstractmethod
    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """Begin the end, once; it goes on up to `_ending.finish`. `orderly`: what is on its way may arrive."""
