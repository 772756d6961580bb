"""How long a link waits for the writes of an abandoned grant, by a clock that the test turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

from baton.ids import GrantId
from kvtransfer.transport import DataEndpoint, Seal, TransportName
from kvtransfer.transports.tcp import acknowledged_bytes
from kvtransfer.transports.writer_link import LINK_LIMITS, BaseWriterLink, LinkParts
from tests.support.shm_harness import DEADLINE_S, LINK_EPOCH, LINK_PAIR, Recorder, grant_of

GRANT, OTHER = grant_of(7), grant_of(8)


class Timer:
    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call, self.cancelled = at_s, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """What a link uses of a loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: object) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, lambda: callback(*args)))
        return self.timers[-1]

    def turn(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.at_s <= self.now_s and not timer.cancelled]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.call()

    def create_future(self) -> None:
        """Nobody waits for the end here."""

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


class Scene(BaseWriterLink):
    """`marks` has how far each grant has come; one that is not there has nothing on its way."""

    transport = TransportName.TCP

    def __init__(self) -> None:
        self.clock = Clock()
        loop: Any = self.clock
        endpoint = DataEndpoint(transport=self.transport, address="", secret=b"", epoch=LINK_EPOCH)
        super().__init__(LinkParts(endpoint=endpoint, pair=LINK_PAIR, events=Recorder(), loop=loop), LINK_LIMITS)
        self._queue = Mock()
        self.marks: dict[GrantId, int] = {}

    def _mark(self, grant: GrantId) -> int | None:
        return self.marks.get(grant)

    def _send_seal(self, seal: Seal) -> None:
        raise AssertionError(seal)

    def _seals_waiting(self) -> int:
        return 0

    @property
    def ended(self) -> str:
        return self._reason or ""


def test_what_moves_may_take_as_long_as_it_takes() -> None:
    """Something has moved at each look, for ten times the limit; then nothing, for one: the link is to end."""
    scene = Scene()
    scene.marks[GRANT] = 0
    scene.abandon(GRANT)
    for _ in range(10):
        scene.marks[GRANT] += 1
        scene.clock.turn(2)
        assert scene.ended == ""
    scene.clock.turn(1.9)
    assert scene.ended == ""
    scene.clock.turn(0.1)
    assert scene.ended == "writes of an abandoned grant have not moved for 2000 ms"
    assert scene.clock.waiting == 0


def test_what_has_arrived_is_waited_for_no_longer() -> None:
    """Nothing on its way at first, or at a look: no further look. Watching twice is watching once, and each grant has
    its own time."""
    scene = Scene()
    scene.abandon(GRANT)
    assert scene.clock.waiting == 0
    scene.marks[GRANT] = scene.marks[OTHER] = 5
    scene.abandon(GRANT)
    scene.abandon(GRANT)
    scene.clock.turn(1)
    scene.abandon(OTHER)
    assert scene.clock.waiting == 2
    del scene.marks[GRANT]
    scene.clock.turn(1)
    assert (scene.clock.waiting, scene.ended) == (1, "")
    scene._end("closed")
    scene.clock.turn(9)
    assert (scene.clock.waiting, scene.ended) == (0, "closed")


def test_the_kernel_tells_what_the_peer_has_acknowledged() -> None:
    """It rises while the peer reads, by bytes and not by messages, and stands still while its buffers are full."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            before = acknowledged_bytes(ours)
            fill(ours)
            async with asyncio.timeout(DEADLINE_S):
                full = await settled(ours)
                assert full > before
                taken = 0
                while taken < 1 << 20:
                    taken += len(await loop.sock_recv(theirs, 1 << 16))
                    if acknowledged_bytes(ours) > full:
                        return
            raise AssertionError("nothing was acknowledged")

    def fill(sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))

    async def settled(sock: socket.socket) -> int:
        """Once the kernel has passed on what it can: the same at two looks in a row."""
        last = -1
        while (now := acknowledged_bytes(sock)) != last:
            last = now
            await asyncio.sleep(0.05)
        return now

    asyncio.run(test())
