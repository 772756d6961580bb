"""What the shm tests share: a recorder of events, a child process with `shm_peer`, and a receiver to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.native.copy import copy_checked
from kvtransfer.region import Region
from kvtransfer.transport import DataEndpoint, Seal, WriteOps
from kvtransfer.transports import shm
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import SHM_LINK_LIMITS, SHM_PORT_LIMITS, ShmLinkLimits, ShmReceiverPort, ShmWriterLink
from kvtransfer.transports.writer_link import LinkParts

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
REGION_NBYTES = 1 << 20
LINK_EPOCH = Epoch(3)


def pair_of(writer: int) -> Pair:
    return Pair(receiver=Incarnation(1), writer=Incarnation(writer))


LINK_PAIR = pair_of(2)


def grant_of(number: int) -> GrantId:
    return GrantId(number.to_bytes(16, "big"))


def ops_of(src: list[int], dst: list[int], nbytes: list[int]) -> WriteOps:
    return WriteOps(src=np.array(src, np.int64), dst=np.array(dst, np.int64), nbytes=np.array(nbytes, np.int64))


def run(test: Coroutine[None, None, None]) -> None:
    """Run a test, and check that it leaves no descriptor, thread, child, socket name or shared memory behind."""
    before = _what_is_there()
    asyncio.run(test)
    gc.collect()
    after = _what_is_there()
    # Less than before is no leak: what another test left to the collector may go now.
    more = {what: (before[what], after[what]) for what in before if not after[what] <= before[what]}
    assert not more, more


def _what_is_there() -> dict[str, set[str]]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": set(os.listdir("/proc/self/fd")),
        "threads": {thread.name for thread in threading.enumerate()},
        "children": set(children),
        "sockets": {str(n) for n in range(_own_shm_sockets())},
        # UCX unlinks its own as soon as it is made, Python's pools of processes have semaphores; both of any process.
        "shared memory": {n for n in os.listdir("/dev/shm") if not n.startswith(("ucx_shm_posix_", "sem.mp-"))},
        "mappings": {str(n) for n in range(Path("/proc/self/maps").read_text().count("memfd:"))},
    }


def _own_shm_sockets() -> int:
    """Bound or connected shm sockets of this process; other processes of the machine may have some of their own."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum("@baton-shm-" in line and line.split()[6] in inodes for line in lines)


class Recorder:
    """Keeps every event of either side in order, and lets a test wait for one."""

    def __init__(self) -> None:
        self.seals: list[tuple[Pair, Seal]] = []
        self.gone: list[tuple[Pair, Epoch, str]] = []
        self.completed: list[tuple[GrantId, int, int, bool]] = []
        self.in_doubt: list[tuple[GrantId, int]] = []
        """With how many batches had completed by then."""
        self.lost: list[tuple[Pair, str]] = []
        self._changed = asyncio.Event()

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.seals.append((pair, seal))
        self._changed.set()

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self.gone.append((pair, epoch, evidence))
        self._changed.set()

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        self.completed.append((grant, writes, bytes_written, copied))
        self._changed.set()

    def writes_in_doubt(self, grant: GrantId) -> None:
        self.in_doubt.append((grant, len(self.completed)))
        self._changed.set()

    def link_lost(self, pair: Pair, reason: str) -> None:
        self.lost.append((pair, reason))
        self._changed.set()

    @property
    def gone_epochs(self) -> list[tuple[Pair, Epoch]]:
        return [(pair, epoch) for pair, epoch, _ in self.gone]

    async def until(self, holds: Callable[[Recorder], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()


class Child:
    """A running `shm_peer`. Replies and events come on one pipe, in the order in which the child said them."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
        self.process = process
        self._events: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self._reader = reader

    async def ask(self, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its reply; events that come before it are kept."""
        self.tell(do, **arguments)
        while True:
            line = await self._line()
            if "reply" in line:
                return line["reply"]
            self._events[line["event"]].append(line)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    async def event(self, name: str) -> dict[str, Any]:
        """The first event of this name that was not taken yet."""
        while not self._events[name]:
            line = await self._line()
            self._events[line["event"]].append(line)
        return self._events[name].popleft()

    async def link(self, name: str, endpoint: DataEndpoint, pair: Pair, seed: int = 0, **limits: int) -> Any:
        return await self.ask(
            "link",
            name=name,
            endpoint=to_json(endpoint),
            pair=[pair.receiver, pair.writer],
            seed=seed,
            nbytes=REGION_NBYTES,
            limits=limits,
        )

    async def post(self, name: str, grant: GrantId, ops: WriteOps, times: int = 1) -> None:
        await self.ask(
            "post",
            name=name,
            grant=grant.hex(),
            src=ops.src.tolist(),
            dst=ops.dst.tolist(),
            nbytes=ops.nbytes.tolist(),
            times=times,
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until the kernel says that it has stopped."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    async def _line(self) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            line = await self._reader.readline()
        assert line, "the child is gone"
        decoded = json.loads(line)
        assert isinstance(decoded, dict)
        return decoded


class Gate:
    """Stands in for `copy_checked`: the first copy stays under way until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        monkeypatch.setattr(shm, "copy_checked", self._copy)

    def _copy(self, dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
        self.reached.set()
        assert self.open.wait(DEADLINE_S)
        copy_checked(dst_U8, src_U8, ops)


def to_json(endpoint: DataEndpoint) -> dict[str, Any]:
    return {"address": endpoint.address, "secret": endpoint.secret.hex(), "epoch": endpoint.epoch}


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _start(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


@asynccontextmanager
async def child(script: str = "shm_peer.py") -> AsyncIterator[Child]:
    process = _start(script)
    assert process.stdin is not None
    assert process.stdout is not None
    reader = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    try:
        yield Child(process, reader)
    finally:
        transport.close()
        process.kill()
        process.wait(DEADLINE_S)
        process.stdin.close()


class Receiver:
    """A region with a port on it, in this process."""

    def __init__(self, limits: PortLimits, events: Recorder | None) -> None:
        self.events = events or Recorder()
        self.region = Region.create(REGION_NBYTES, "test-region")
        self.port = ShmReceiverPort(
            region=self.region,
            events=self.events,
            limits=limits,
        )


@asynccontextmanager
async def receiver(limits: PortLimits = SHM_PORT_LIMITS, events: Recorder | None = None) -> AsyncIterator[Receiver]:
    it = Receiver(limits, events)
    try:
        yield it
    finally:
        await it.port.close()
        it.region.close()


@asynccontextmanager
async def linked(
    r: Receiver, limits: ShmLinkLimits = SHM_LINK_LIMITS, config: ShmConfig | None = None
) -> AsyncIterator[tuple[ShmWriterLink, Recorder]]:
    """A link within this process, from a region full of fives, of LINK_PAIR in LINK_EPOCH."""
    events, source_U8 = Recorder(), np.full(REGION_NBYTES, 5, np.uint8)
    loop = asyncio.get_running_loop()
    endpoint = r.port.expect(LINK_PAIR, LINK_EPOCH)
    link = await ShmWriterLink.connect(LinkParts(endpoint, LINK_PAIR, events, loop), source_U8, config, limits)
    try:
        yield link, events
    finally:
        await link.close()
