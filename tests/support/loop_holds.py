"""How long a process keeps its event loop from turning: watched inside the process, read from outside.

A process that the fork server starts with BATON_TESTS_HOLDS in its environment looks at its clocks every TICK_S, on its
own loop, and answers on the socket NAME.sock in that folder. The hold of one tick is the smaller of two times:

- the time since the last tick in which the loop's thread could have run: the clock's, less the time for which the
  kernel had the thread wait for a core (schedstat). It counts what the thread computes, and what it waits for the
  interpreter's lock;
- the processor time of the loop's thread since then, and of the one other Python thread that used most: it is the one
  that may have held the lock.

What the machine's own host took lately from one core (steal) is taken off: not all of it is missing in the processor
time. It is counted in hundredths of a second, so a hold of a few of them may be read as shorter than it was.

Neither grows with the load of the machine as the clock does. `time.process_time` alone would not do: gRPC's own
threads parse messages beside the loop and never hold the lock, and threads that tokenise let go of it. They keep nobody
waiting, but on a loaded machine, where the loop's thread waits for a core, they would count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HOLDS_ENV: Final = "BATON_TESTS_HOLDS"
TICK_S: Final = 0.002
SUSPECT_S: Final = 0.01
STEAL_TICKS: Final = 25
"""So many ticks later it is looked at anew."""
HOLD_S: Final = 1.0
"""Of an order to hold the loop: far more than what a loaded machine adds to a hold, or takes off."""
_CALL_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """Since the last reset."""

    longest_ms: float
    ticks: int
    cpu_s: float
    """Processor time of the whole process."""
    rss_kib: int
    threads: int
    files: int
    frozen: int
    """Objects that the collector leaves alone."""
    collected_at: tuple[int, ...]
    """The collector's thresholds."""


class Watch:
    """Lives on the loop that it watches."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._own = threading.current_thread()
        self.reset()
        self._next = self._loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        self._next.cancel()
        os.close(self._schedstat)

    def reset(self) -> None:
        self._longest_s = 0.0
        self._stolen_s = _stolen_s()
        self._ticks = 0
        self._began_cpu_s = time.process_time()
        self._read_clocks()

    def read(self) -> Holds:
        self._look()
        return Holds(
            longest_ms=self._longest_s * 1e3,
            ticks=self._ticks,
            cpu_s=time.process_time() - self._began_cpu_s,
            rss_kib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            frozen=gc.get_freeze_count(),
            collected_at=gc.get_threshold(),
        )

    def _tick(self) -> None:
        self._look()
        self._next = self._loop.call_later(TICK_S, self._tick)

    def _look(self) -> None:
        before_s, own_before_s, others_before_s = self._could_run_s, self._own_s, self._others_s
        self._read_clocks()
        busiest_s = max((s - others_before_s.get(tid, 0.0) for tid, s in self._others_s.items()), default=0.0)
        hold_s = min(self._could_run_s - before_s, self._own_s - own_before_s + busiest_s)
        if hold_s >= SUSPECT_S or self._ticks % STEAL_TICKS == 0:
            before_steal_s, self._stolen_s = self._stolen_s, _stolen_s()
            hold_s -= max(now_s - then_s for now_s, then_s in zip(self._stolen_s, before_steal_s, strict=True))
        self._longest_s = max(self._longest_s, hold_s)
        self._ticks += 1

    def _read_clocks(self) -> None:
        waited_ns = int(os.pread(self._schedstat, 64, 0).split()[1])
        self._could_run_s = time.perf_counter() - waited_ns / 1e9
        self._own_s = time.thread_time()
        threads = [thread.native_id for thread in threading.enumerate() if thread is not self._own]
        self._others_s = {tid: _thread_s(tid) for tid in threads if tid is not None}


def _thread_s(tid: int) -> float:
    """The processor time of a thread of this process; none if it has just ended. The clock's number is the kernel's:
    pthread_getcpuclockid, which gives the same, takes no thread that may have ended."""
    try:
        return time.clock_gettime((~tid << 3) | 6)
    except OSError:
        return 0.0


def _stolen_s() -> list[float]:
    """By core."""
    with open("/proc/stat", "rb") as stat:
        lines = [line.split() for line in stat.read().splitlines() if line.startswith(b"cpu")]
    return [int(line[8]) / os.sysconf("SC_CLK_TCK") for line in lines[1:]]


def burn_s(seconds: float) -> None:
    """Compute for this long on the calling thread, in pieces that keep the interpreter's lock."""
    end_s = time.thread_time() + seconds
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    try:
        while time.thread_time() < end_s:
            pass
    finally:
        sys.setswitchinterval(interval_s)


def watched(serve: Callable[..., Coroutine[Any, Any, None]], folder: Path) -> Callable[..., Coroutine[Any, Any, None]]:
    """`cli.services._serve` with a watch."""

    async def serve_watched(service: Any, config: Any, printer: Any) -> None:
        watch = Watch()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while order := await reader.readline():
                if order == b"reset\n":
                    watch.reset()
                if order == b"hold\n":
                    burn_s(HOLD_S)
                if order == b"hold in a thread\n":
                    await asyncio.to_thread(burn_s, HOLD_S)
                found = watch.read()
                writer.write(json.dumps({name: getattr(found, name) for name in Holds.__slots__}).encode() + b"\n")
            writer.close()

        try:
            async with await asyncio.start_unix_server(answer, folder / f"{config.name}.sock"):
                await serve(service, config, printer)
        finally:
            watch.close()

    return serve_watched


class HoldReader:
    """The other end: asks one process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, folder: Path, name: str) -> HoldReader:
        return cls(*await asyncio.open_unix_connection(folder / f"{name}.sock"))

    async def reset(self) -> None:
        await self._ask(b"reset\n")

    async def read(self) -> Holds:
        return Holds(**await self._ask(b"read\n"))

    async def hold(self, *, in_thread: bool = False) -> None:
        """Have the process keep its loop, or the interpreter's lock in another thread, for HOLD_S of processor time."""
        await self._ask(b"hold in a thread\n" if in_thread else b"hold\n")

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _ask(self, order: bytes) -> dict[str, Any]:
        self._writer.write(order)
        async with asyncio.timeout(_CALL_S_MAX):
            answer: dict[str, Any] = json.loads(await self._reader.readline())
        return answer
