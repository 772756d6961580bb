"""The fences of one receiving port: a book for each pair (`pair_fence`), and telling when one has its evidence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from baton.ids import Epoch, Pair
from kvtransfer.transport import PairBeingFenced, ReceiverEvents, TooManyPairs, TransportName
from kvtransfer.transports.pair_fence import Evidence, PairFence

SECRET_BYTES = 16


class NotAdmitted(Enum):
    """Why a connection may not be opened; each wire has a reason of this name to refuse it with."""

    NOT_EXPECTED = "not of this pair, or not any more"
    EPOCH = "not in this epoch"


class PortFences:
    """Books of all pairs that one port expects, has connections of, or fences. Runs on `loop`'s thread."""

    def __init__(
        self,
        *,
        transport: TransportName,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        pairs_max: int,
    ) -> None:
        self._transport = transport
        self._events = events
        self._loop = loop
        self._randomness = randomness
        self._pairs_max = pairs_max
        self._books: dict[Pair, PairFence] = {}
        self._closed = False
        self.ended = 0
        """Fences that have had their evidence."""

    @property
    def waiting(self) -> int:
        """Fences that have no evidence yet."""
        return sum(book.fences_waiting for book in self._books.values())

    def book(self, pair: Pair) -> PairFence | None:
        return self._books.get(pair)

    def expect(self, pair: Pair, epoch: Epoch) -> bytes:
        """Allow connections of this pair in this epoch, and no longer in an older one: the secret to be shown.

        Raises:
            PairBeingFenced: a fence of this epoch has begun.
            TooManyPairs: `pairs_max` pairs are expected, connected or being fenced.
        """
        assert not self._closed
        book = self._books.get(pair)
        if book is not None and book.has_fenced(epoch):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        if book is None:
            if len(self._books) >= self._pairs_max:
                raise TooManyPairs(
                    f"{len(self._books)} pairs use this region's {self._transport.value} port, pairs_max is reached"
                )
            book = self._books[pair] = PairFence()
        secret = book.secret(epoch)
        if secret is None:
            secret = self._randomness(SECRET_BYTES)
            book.expect(epoch, secret)
        return secret

    def secret(self, pair: Pair, epoch: Epoch) -> bytes | NotAdmitted:
        """What a connection of this pair and epoch has to prove; to be asked again before it is opened, for a fence, or
        a newer epoch, may have come meanwhile."""
        book = self._books.get(pair)
        secret = book.secret(epoch) if book is not None else None
        if secret is not None:
            return secret
        return NotAdmitted.NOT_EXPECTED if book is None or book.has_fenced(epoch) else NotAdmitted.EPOCH

    def opened(self, pair: Pair, connection: int, epoch: Epoch) -> None:
        """See `PairFence.opened`."""
        self._books[pair].opened(connection, epoch)

    def closed(self, pair: Pair, connection: int, evidence: Evidence, pid: int = 0) -> None:
        """See `PairFence.closed`. Fences that waited for it are told soon."""
        self._books[pair].closed(connection, evidence, pid)
        self._loop.call_soon(self._settle, pair)

    def is_fencing(self, pair: Pair, epoch: Epoch) -> bool:
        """See `PairFence.is_fencing`."""
        return self._books[pair].is_fencing(epoch)

    def fence(self, pair: Pair, epoch: Epoch) -> list[int]:
        """Begin a fence: `writer_gone` comes when it has its evidence. The connections that are still open."""
        assert not self._closed
        still_open = self._books.setdefault(pair, PairFence()).fence(epoch)
        self._loop.call_soon(self._settle, pair)
        return still_open

    def close(self) -> None:
        """Tell of nothing any more."""
        self._closed = True
        self._books.clear()

    def _settle(self, pair: Pair) -> None:
        """Tell every fence of the pair that has its evidence; the callback may call back into this port."""
        while not self._closed and (book := self._books.get(pair)) is not None:
            settled = book.settled()
            if settled is None:
                if book.is_idle:
                    del self._books[pair]
                return
            self.ended += 1
            self._events.writer_gone(pair, *settled)
