"""The public ports: who listens there, who has a place, and who serves a connection. Not what is said on it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol

from baton.endpoint import Address, is_trusted, join_endpoint, parse_address, split_endpoint
from baton.errors import BatonError, Reason
from baton.listen import bind_all
from baton.log import get_log
from baton.repeats import RepeatLog
from router.config import RouterConfig
from router.http_slots import Slot, Slots

log = get_log("doors")

GRPC_CONNECTIONS_MAX: Final = 1_024
"""At the same time."""
GRPC_CONNECTION_FILES: Final = 3
"""Descriptors of each: of its client, of the front, of gRPC."""
SURPLUS_CONNECTIONS_MAX: Final = 64
"""HTTP connections beyond the limit that are answered with 429 and closed. Further ones, and those of gRPC, are closed
without a word."""
SEND_BUFFER_BYTES: Final = 131_072
"""Bytes that the kernel may keep of what an HTTP client has not read."""
BACKLOG_MAX: Final = 2_048
"""Connections that wait in the kernel to be accepted."""
ACCEPTS_MAX: Final = 32
"""In one turn of the loop."""
NO_ROOM_MS: Final = 100
"""Pause when the system has no descriptor or no memory for one more connection: it waits in the kernel."""
REOPEN_MS: Final = 50
_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER, for a close by RST: the kernel keeps nothing of it."""


class Door(Enum):
    GRPC = 1
    HTTP = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class Taker(Protocol):
    """Serves connections: this process, or a worker. It calls `Doors.closed` with the number of each that is over."""

    def is_able(self, door: Door) -> bool:
        """Whether it takes one now. When this becomes true it calls `Doors.resume`."""
        ...

    def take(self, door: Door, sock: socket.socket, peer: Address | None, slot: Slot, number: int) -> None:
        """`sock` does not block, and is the taker's from now on."""
        ...


@dataclass(slots=True, kw_only=True)
class _Port:
    slots: Slots
    wanted: tuple[str, str] | None = None
    """Where to listen, and the setting that says so; None: nowhere."""
    listeners: list[socket.socket] = field(default_factory=list)
    watched: bool = False
    later: asyncio.TimerHandle | None = None
    """It waits to listen, or to accept, again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    door: Door
    peer: Address | None
    taker: Taker
    owner: Address | None
    slot: Slot


class Doors:
    """Lives on one loop."""

    def __init__(self, config: RouterConfig, *, refused: Callable[[Door, BatonError], None] = lambda *_: None) -> None:
        """`refused` is called for each connection that is closed at once for want of a place."""
        self._proxies = config.trusted_networks()
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._repeats = RepeatLog(log, self._loop.time)
        http = Slots(regular_max=config.http_connections_max, surplus_max=SURPLUS_CONNECTIONS_MAX)
        grpc = Slots(regular_max=GRPC_CONNECTIONS_MAX, surplus_max=0)
        self._ports = {Door.GRPC: _Port(slots=grpc), Door.HTTP: _Port(slots=http)}
        self._takers: Counter[Taker] = Counter()
        """And how many connections each has."""
        self._held: dict[int, _Held] = {}
        self._number = 0
        self._again: dict[int, socket.socket] = {}
        """Connections that wait for another taker, by number."""

    def add(self, taker: Taker) -> None:
        self._takers[taker] = 0
        self.resume()

    def remove(self, taker: Taker) -> list[int]:
        """It is gone; the connections that it had. They hold their places until `closed`."""
        del self._takers[taker]
        return [number for number, held in self._held.items() if held.taker is taker]

    def take_again(self, number: int, sock: socket.socket) -> None:
        """Its taker is gone, and has never had it: another one gets it, once one is able. Where its door is shut
        nobody may be for long: it is closed."""
        self._again[number] = sock
        if self._ports[self._held[number].door].listeners:
            self.resume()
        else:
            self._end_waits()

    def open(self, door: Door, listen: str, *, setting: str) -> int:
        """Listen, and take connections while somebody is able; the bound port.

        Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT.
        """
        port = self._ports[door]
        assert port.wanted is None, "opened twice"
        self._listen(door, listen, setting)
        bound = int(port.listeners[0].getsockname()[1])
        port.wanted = join_endpoint(split_endpoint(listen)[0], bound), setting
        return bound

    def set_open(self, door: Door, wanted: bool) -> None:
        """Listen at a door that was opened once, or not: then connections are refused by the kernel."""
        port = self._ports[door]
        if port.wanted is None or wanted == bool(port.listeners):
            return
        if wanted:
            self._reopen(door)
        else:
            self._shut(port)
            self._end_waits()

    def close(self) -> None:
        """Listen no more. What is connected stays. Idempotent."""
        for port in self._ports.values():
            self._shut(port)
            port.wanted = None
        self._end_waits()
        self._repeats.close()

    def _end_waits(self) -> None:
        """Of connections that wait for another taker behind a door that is shut."""
        for number, sock in list(self._again.items()):
            if not self._ports[self._held[number].door].listeners:
                del self._again[number]
                sock.close()
                self.closed(number)

    def closed(self, number: int) -> None:
        """The connection is over: its place is free."""
        held = self._held.pop(number)
        self._ports[held.door].slots.leave(held.slot, held.owner)
        if held.taker in self._takers:
            self._takers[held.taker] -= 1

    def resume(self) -> None:
        """A taker has become able."""
        for number, sock in list(self._again.items()):
            held = self._held[number]
            taker = self._taker(held.door)
            if taker is not None:
                del self._again[number]
                self._give(number, replace(held, taker=taker), sock)
        for door, port in self._ports.items():
            if not port.watched and port.later is None and self._taker(door) is not None:
                self._watch(door)

    def upkeep(self) -> None:
        """Every second."""
        self._repeats.upkeep()

    def _listen(self, door: Door, listen: str, setting: str) -> None:
        port = self._ports[door]
        listeners = bind_all(listen, setting=setting)
        for listener in listeners:
            if door is Door.HTTP:
                # Connections take it over. Left to itself the kernel keeps megabytes of an answer that nobody reads.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.setblocking(False)
            listener.listen(BACKLOG_MAX)
        port.listeners = listeners
        self.resume()

    def _reopen(self, door: Door) -> None:
        port = self._ports[door]
        assert port.wanted is not None
        port.later = None
        listen, setting = port.wanted
        try:
            self._listen(door, listen, setting)
        except BatonError as error:
            self._repeats.error("cannot take connections again: trying on", peer=door.label, problem=error.message)
            port.later = self._loop.call_later(REOPEN_MS / 1000, self._reopen, door)

    def _shut(self, port: _Port) -> None:
        self._unwatch(port)
        if port.later is not None:
            port.later.cancel()
            port.later = None
        for listener in port.listeners:
            listener.close()
        port.listeners = []

    def _watch(self, door: Door) -> None:
        port = self._ports[door]
        port.later = None
        for listener in port.listeners:
            port.watched = True
            self._loop.add_reader(listener, self._accept, door, listener)

    def _unwatch(self, port: _Port) -> None:
        port.watched = False
        for listener in port.listeners:
            self._loop.remove_reader(listener)

    def _taker(self, door: Door) -> Taker | None:
        able = [taker for taker in self._takers if taker.is_able(door)]
        return min(able, key=self._takers.__getitem__, default=None)

    def _accept(self, door: Door, listener: socket.socket) -> None:
        port = self._ports[door]
        for _ in range(ACCEPTS_MAX):
            taker = self._taker(door)
            if taker is None:
                self._unwatch(port)
                return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # or it would wake the loop without end
                self._repeats.warning("no connection can be taken", peer=door.label, problem=error.strerror)
                self._unwatch(port)
                port.later = self._loop.call_later(NO_ROOM_MS / 1000, self._watch, door)
                return
            self._seat(door, taker, sock, parse_address(address[0]))

    def _seat(self, door: Door, taker: Taker, sock: socket.socket, peer: Address | None) -> None:
        port = self._ports[door]
        owner = None if peer is None or is_trusted(peer, self._proxies) else peer
        slot = port.slots.take(owner)
        if slot is None:
            if door is Door.GRPC:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            sock.close()
            text = f"This router has too many {door.name} connections, or the address has its share of them."
            self._refused(door, BatonError(Reason.TOO_MANY_CALLS, text))
            return
        self._number += 1
        sock.setblocking(False)
        held = _Held(door=door, peer=peer, taker=taker, owner=owner, slot=slot)
        self._give(self._number, held, sock)

    def _give(self, number: int, held: _Held, sock: socket.socket) -> None:
        self._held[number] = held
        self._takers[held.taker] += 1
        held.taker.take(held.door, sock, held.peer, held.slot, number)
