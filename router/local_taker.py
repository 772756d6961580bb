"""Connections that this process serves itself."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from functools import partial

from baton.endpoint import Address, Network, is_trusted
from baton.http2_front import Ended, Http2Front, NativeFront
from baton.log import get_log
from baton.repeats import RepeatLog
from router.doors import Door
from router.http_slots import Slot

log = get_log("front")

TakeHttp = Callable[[socket.socket, Address | None, Slot, Callable[[], None]], None]
"""`HttpServer.take`."""


class LocalTaker:
    """HTTP by the HttpServer, gRPC by way of a front; either may be missing."""

    def __init__(
        self,
        closed: Callable[[int], None],
        *,
        proxies: Sequence[Network] = (),
        ended: Callable[[Ended], None] = lambda _why: None,
    ) -> None:
        """`closed` is called with the number of each connection that is over, `ended` for each of gRPC that the front
        has ended."""
        self._closed = closed
        self._proxies = proxies
        self._ended = ended
        self._repeats: RepeatLog | None = None
        self.http: TakeHttp | None = None
        self.front: Http2Front | None = None

    def open_front(self, native: NativeFront, *, rng: random.Random, now_s: Callable[[], float]) -> Http2Front:
        """Raises BatonError LISTEN_REFUSED."""
        self._repeats = RepeatLog(log, now_s)
        self.front = Http2Front(native, rng=rng, ended=self._over)
        return self.front

    def is_able(self, door: Door) -> bool:
        if door is Door.HTTP:
            return self.http is not None
        return self.front is not None and self.front.is_open

    def take(self, door: Door, sock: socket.socket, peer: Address | None, slot: Slot, number: int) -> None:
        if door is Door.HTTP:
            assert self.http is not None
            self.http(sock, peer, slot, partial(self._closed, number))
            return
        assert self.front is not None and peer is not None
        try:
            self.front.add(sock, peer, number, paced=not is_trusted(peer, self._proxies))
        except OSError as error:
            sock.close()
            self._over(number, Ended.NO_ROOM, str(error.strerror))

    def upkeep(self) -> None:
        """Every second."""
        if self._repeats is not None:
            self._repeats.upkeep()

    async def close(self) -> None:
        """After the servers have stopped."""
        if self.front is not None:
            await self.front.close()
        if self._repeats is not None:
            self._repeats.close()

    def _over(self, number: int, why: Ended, problem: str = "") -> None:
        self._closed(number)
        if why is Ended.LEFT:
            return
        self._ended(why)
        assert self._repeats is not None
        self._repeats.warning("gRPC connection ended", peer=why.name, **({"problem": problem} if problem else {}))
