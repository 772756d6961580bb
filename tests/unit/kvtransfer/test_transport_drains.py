"""How long a link waits for the writes of an abandoned grant, by a clock that the test turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from baton.ids import GrantId
from kvtransfer.transports.tcp import acknowledged_bytes
from kvtransfer.transports.writer_link import Drains
from tests.support.shm_harness import DEADLINE_S, grant_of

GRANT, OTHER = grant_of(7), grant_of(8)


class Timer:
    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call, self.cancelled = at_s, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """What `Drains` uses of a loop."""

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

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


class Scene:
    """`marks` has how far each grant has come; one that is not there has nothing on its way."""

    def __init__(self) -> None:
        self.clock = Clock()
        loop: Any = self.clock
        self.marks: dict[GrantId, int] = {}
        self.stuck: list[str] = []
        self.drains = Drains(loop=loop, drain_ms_max=2_000, mark=self.marks.get, stuck=self.stuck.append)


def test_what_moves_may_take_as_long_as_it_takes() -> None:
    """Something has moved at each look, for ten times the limit; then nothing, for one: the link is to end."""
    scene = Scene()
    scene.marks[GRANT] = 0
    scene.drains.watch(GRANT)
    for _ in range(10):
        scene.marks[GRANT] += 1
        scene.clock.turn(2)
        assert scene.stuck == []
    scene.clock.turn(1.9)
    assert scene.stuck == []
    scene.clock.turn(0.1)
    assert scene.stuck == ["writes of an abandoned grant have not moved for 2000 ms"]
    assert scene.clock.waiting == 0


def test_what_has_arrived_is_waited_for_no_longer() -> None:
    """Nothing on its way at first, or at a look: no further look. Watching twice is watching once, and each grant has
    its own time."""
    scene = Scene()
    scene.drains.watch(GRANT)
    assert scene.clock.waiting == 0
    scene.marks[GRANT] = scene.marks[OTHER] = 5
    scene.drains.watch(GRANT)
    scene.drains.watch(GRANT)
    scene.clock.turn(1)
    scene.drains.watch(OTHER)
    assert scene.clock.waiting == 2
    del scene.marks[GRANT]
    scene.clock.turn(1)
    assert (scene.clock.waiting, scene.stuck) == (1, [])
    scene.drains.close()
    scene.clock.turn(9)
    assert (scene.clock.waiting, scene.stuck) == (0, [])


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
