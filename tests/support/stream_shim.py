"""A device without a device: streams and events whose work runs late, in an order that CUDA allows, picked by a seed.

Work of one stream runs in order. Across streams nothing is ordered but by an event that one recorded and the other
waits for, or by the host having seen an event done. Two accesses to the same bytes, one of them a write, without such
an order between them raise `MissingDependency`, in whatever order they happen to run: found by vector clocks, as a race
detector for threads does it (Lamport 1978; Fidge 1988).
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.transport import WriteOps

HOST = -1
Clock = dict[int, int]


class MissingDependency(AssertionError):
    """Two pieces of work touch the same bytes and nothing orders them."""


@dataclass(eq=False)
class Memory:
    """Bytes of the device, and who has touched them."""

    name: str
    bytes_U8: np.ndarray
    accesses: list[tuple[int, int, bool, int, int, str]] = field(default_factory=list)
    """(first byte, end, whether written, stream, number in the stream, what)"""


@dataclass(eq=False)
class _Work:
    run: Callable[[], None]
    after: list[ShimEvent]
    event: ShimEvent | None = None


class ShimEvent:
    def __init__(self, device: ShimDevice, clock: Clock) -> None:
        self._device = device
        self.clock = clock
        self.passed = False

    def done(self) -> bool:
        """Lets the device run a little, then looks: the host's view comes late, and never too early."""
        with self._device.lock:
            self._device.run_some()
            if self.passed:
                _join(self._device.host_clock, self.clock)
            return self.passed


class ShimStream:
    def __init__(self, device: ShimDevice, number: int) -> None:
        self._device = device
        self.number = number
        self.clock: Clock = {}
        self.queue: deque[_Work] = deque()
        self._waits: list[ShimEvent] = []

    def record(self) -> ShimEvent:
        with self._device.lock:
            event = ShimEvent(self._device, dict(self.clock))
            self.queue.append(_Work(run=lambda: None, after=self._take_waits(), event=event))
            return event

    def wait(self, event: ShimEvent) -> None:
        with self._device.lock:
            self._waits.append(event)
            _join(self.clock, event.clock)

    def launch(
        self,
        what: str,
        run: Callable[[], None],
        *,
        reads: list[tuple[Memory, int, int]] | None = None,
        writes: list[tuple[Memory, int, int]] | None = None,
    ) -> None:
        """Queue work that touches the given bytes; raises MissingDependency."""
        with self._device.lock:
            _join(self.clock, self._device.host_clock)
            self.clock[self.number] = self.clock.get(self.number, 0) + 1
            for part, written in ((reads or [], False), (writes or [], True)):
                for memory, first, end in part:
                    _check(memory, first, end, written, self.clock, what)
                    memory.accesses.append((first, end, written, self.number, self.clock[self.number], what))
            self.queue.append(_Work(run=run, after=self._take_waits()))

    def _take_waits(self) -> list[ShimEvent]:
        waits, self._waits = self._waits, []
        return waits


class ShimDevice:
    """`DeviceStreams` for the tests. The compute stream is the first one, current on every thread."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.host_clock: Clock = {}
        self._chance = random.Random(seed)
        self._streams: list[ShimStream] = []
        self.compute = self.side()
        # One stream is slow for a whole run, which is how an order that "always" holds stops holding.
        self._slow = self._chance.randrange(3)

    def current(self) -> ShimStream:
        return self.compute

    def side(self) -> ShimStream:
        with self.lock:
            stream = ShimStream(self, len(self._streams))
            self._streams.append(stream)
            return stream

    def copy(self, stream: ShimStream, dst: Memory, src: Memory, ops: WriteOps) -> None:
        parts = list(zip(ops.src.tolist(), ops.dst.tolist(), ops.nbytes.tolist(), strict=True))

        def run() -> None:
            for a, b, n in parts:
                dst.bytes_U8[b : b + n] = src.bytes_U8[a : a + n]

        stream.launch(
            "copy",
            run,
            reads=[(src, a, a + n) for a, _, n in parts],
            writes=[(dst, b, b + n) for _, b, n in parts],
        )

    def host_access(self, memory: Memory, first: int, end: int, *, write: bool) -> None:
        """The host is about to touch these bytes: everything that touched them must be known to it as done."""
        with self.lock:
            _check(memory, first, end, write, self.host_clock, "the host")

    def run_some(self) -> None:
        """A random number of steps, each the head of a stream that may run."""
        for _ in range(self._chance.randrange(4)):
            ready = [s for s in self._streams if s.queue and all(e.passed for e in s.queue[0].after)]
            fast = [s for s in ready if s.number != self._slow]
            if not ready:
                return
            stream = self._chance.choice(fast if fast and self._chance.random() < 0.9 else ready)
            work = stream.queue.popleft()
            work.run()
            if work.event is not None:
                work.event.passed = True

    def finish(self) -> None:
        """Run everything; the host then knows of all."""
        with self.lock:
            while any(s.queue for s in self._streams):
                self.run_some()
            for stream in self._streams:
                _join(self.host_clock, stream.clock)


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def _check(memory: Memory, first: int, end: int, written: bool, clock: Clock, what: str) -> None:
    for a, b, was_written, stream, number, before in memory.accesses:
        if a < end and first < b and (written or was_written) and clock.get(stream, 0) < number:
            raise MissingDependency(
                f"{what} touches {memory.name}[{first}:{end}], and nothing orders it after {before} of stream {stream}"
            )


class ForgetfulDevice(ShimDevice):
    """Its streams wait for no event."""

    def side(self) -> ShimStream:
        stream = super().side()
        stream.wait = lambda event: None  # type: ignore[method-assign]
        return stream
