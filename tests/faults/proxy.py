"""A small TCP proxy between processes, which knows whose each connection is and can cut, still or garble it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tests.faults.owners import owner_of

READ_BYTES: Final = 1 << 16
NOISE_BYTES: Final = 64


class Spoil(Enum):
    """What becomes of bytes on their way from whoever connected."""

    CUT = "cut"
    """The connection ends behind them."""
    LOSE_BYTE = "lose-byte"
    """One byte is missing, and the stream goes on."""
    NOISE = "noise"
    """Bytes that nobody sent come between them."""
    FLIP = "flip"
    """One byte is another one. No test of the product: tcp carries no checksum of its own, and trusts the kernel's."""


class Dark(Enum):
    """What does not pass."""

    BOTH = "both"
    REQUESTS = "requests"
    """From whoever connected."""
    REPLIES = "replies"


@dataclass(slots=True, eq=False, kw_only=True)
class _Wire:
    """One connection through the proxy."""

    client: tuple[str, int]
    """Where whoever connected is, and where it connected to."""
    server: tuple[str, int]
    inner: asyncio.StreamWriter
    outer: asyncio.StreamWriter
    requests: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while nothing passes from whoever connected."""
    replies: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while nothing passes back."""
    spoil: tuple[Spoil, int] | None = None
    """What to do when so many more bytes have passed."""

    def cut(self) -> None:
        for writer in (self.inner, self.outer):
            writer.transport.abort()
        self.lighten()

    def darken(self, dark: Dark) -> None:
        if dark is not Dark.REPLIES:
            self.requests.clear()
        if dark is not Dark.REQUESTS:
            self.replies.clear()

    def lighten(self) -> None:
        self.requests.set()
        self.replies.set()


class Proxy:
    """Listens at `listen` and passes everything on to `target`, both (host, port). Lives on the running loop.

    `pids` are those of the processes whose connections are to be told apart, by name. Whose a connection is, is looked
    up when it matters: some are made while the processes are still being started.
    """

    def __init__(
        self, listen: tuple[str, int], target: tuple[str, int], *, pids: Callable[[], Mapping[str, int]]
    ) -> None:
        self._listen = listen
        self._target = target
        self._pids = pids
        self._wires: set[_Wire] = set()
        self._dark: dict[str, Dark] = {}
        self._healed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, *self._listen)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut_all()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self, owner: str) -> int:
        """End this process's connections; it may make new ones. How many there were."""
        found = self._of(owner)
        for wire in found:
            wire.cut()
        return len(found)

    def cut_all(self) -> None:
        for wire in list(self._wires):
            wire.cut()

    def darken(self, owner: str, dark: Dark = Dark.BOTH) -> None:
        """This does not pass on this process's connections, old ones and new ones, and none of them ends."""
        self._dark[owner] = dark
        self._healed.clear()
        for wire in self._of(owner):
            wire.darken(dark)

    def heal(self) -> None:
        """What was held back goes on."""
        self._dark.clear()
        self._healed.set()
        for wire in self._wires:
            wire.lighten()

    def spoil(self, owner: str, what: Spoil, *, after_bytes: int) -> int:
        """Spoil each of this process's connections, when so many more bytes have passed. How many there are."""
        found = self._of(owner)
        for wire in found:
            wire.spoil = (what, after_bytes)
        return len(found)

    def _of(self, owner: str) -> list[_Wire]:
        return [wire for wire in self._wires if owner_of(wire.client, wire.server, self._pids()) == owner]

    async def _accepted(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        client, server = outer.get_extra_info("peername"), outer.get_extra_info("sockname")
        dark = self._dark.get(owner_of(client, server, self._pids())) if self._dark else None
        held = bytearray()
        try:
            if dark in (Dark.BOTH, Dark.REQUESTS) and not await self._outlives_dark(reader, held):
                outer.transport.abort()  # like a connection whose first packet never arrived
                return
            inner_reader, inner = await asyncio.open_connection(*self._target)
        except OSError:
            outer.transport.abort()
            return
        inner.write(held)
        wire = _Wire(client=client, server=server, inner=inner, outer=outer)
        wire.lighten()
        if dark is Dark.REPLIES and self._dark:
            wire.darken(dark)
        self._wires.add(wire)
        try:
            await asyncio.gather(
                _pump(wire, wire.requests, reader, inner, spoiled=True), _pump(wire, wire.replies, inner_reader, outer)
            )
        finally:
            wire.cut()
            self._wires.discard(wire)

    async def _outlives_dark(self, reader: asyncio.StreamReader, held: bytearray) -> bool:
        """Hold what comes until all is healed; False when whoever connected gives up first. They try again and again,
        and what is left of their tries must not pile up."""

        async def read() -> None:
            while data := await reader.read(READ_BYTES):
                held.extend(data)

        given_up, healed = asyncio.ensure_future(read()), asyncio.ensure_future(self._healed.wait())
        try:
            await asyncio.wait({given_up, healed}, return_when=asyncio.FIRST_COMPLETED)
            return not given_up.done()
        finally:
            for task in (given_up, healed):
                task.cancel()
            await asyncio.gather(given_up, healed, return_exceptions=True)


async def _pump(
    wire: _Wire,
    clear: asyncio.Event,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    spoiled: bool = False,
) -> None:
    """Pass one direction on to its end, and the end too, while it is `clear`."""
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            await clear.wait()
            if spoiled and wire.spoil is not None:
                data = _spoil(wire, data)
            writer.write(data)
            await writer.drain()
            if spoiled and wire.spoil == (Spoil.CUT, 0):
                wire.cut()
                return
        if spoiled and clear.is_set() and not wire.replies.is_set():
            wire.cut()  # it waits for no reply any more
            return
        await clear.wait()
        if writer.can_write_eof():
            writer.write_eof()


def _spoil(wire: _Wire, data: bytes) -> bytes:
    assert wire.spoil is not None
    what, left = wire.spoil
    if left >= len(data):
        wire.spoil = (what, left - len(data))
        return data
    if what is Spoil.CUT:
        wire.spoil = (what, 0)
        return data[:left]
    wire.spoil = None
    between = {Spoil.LOSE_BYTE: b"", Spoil.NOISE: os.urandom(NOISE_BYTES) + data[left : left + 1]}
    return data[:left] + between.get(what, bytes([data[left] ^ 0xFF])) + data[left + 1 :]
