"""The limits as sides of the transfer benchmark: bare stores, a bare socket, a bare ping-pong. x86-64 only.

    python -m benchmarks.transfer_limits stores-1|stores-2|socket|socket-2|doorbell|echo

`stores-N` copies within one process, by N threads, between two shared mappings. `socket` gathers and scatters blocks
over one TCP connection (`socket-2`: over two, a thread for each), at most 1 MiB a system call, every list of buffers
made beforehand. `doorbell` copies a block into its own memory and rings at the other process over a Unix socket;
`echo` sends it over TCP. All but the first wait for a short answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from baton.native import build
from benchmarks.transfer_side import Plan, Side, fill, memory, serve

CALL_BYTES_MAX = 1 << 20
CALL_SEGMENTS_MAX = 512
ANSWER = bytes(64)


class StoresSide:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._src_U8, self.region_U8 = memory(), memory()
        source = Path(__file__).with_name("transfer_limits.c")
        library = ctypes.CDLL(str(build(source, Path(tempfile.mkdtemp()))))
        self._copy = library.limit_copy
        self._copy.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        fill(self._src_U8)

    def address(self) -> dict[str, Any]:
        return {}

    def connect(self, address: dict[str, Any]) -> None:
        return

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def move(self, prepared: Plan) -> None:
        arrays = (self.region_U8, self._src_U8, prepared.dst, prepared.src)
        addresses = (array.ctypes.data for array in arrays)
        assert self._copy(*addresses, len(prepared.src), prepared.size, self._threads) == 0


def views_of(region_U8: np.ndarray, at: np.ndarray, size: int) -> list[list[memoryview]]:
    """Buffers for one system call each."""
    region = region_U8.data
    step = max(1, min(CALL_SEGMENTS_MAX, CALL_BYTES_MAX // size))
    part = min(size, CALL_BYTES_MAX)
    pieces = [region[a + p : a + p + part] for a in at.tolist() for p in range(0, size, part)]
    return [pieces[i : i + step] for i in range(0, len(pieces), step)]


def all_of(call: Any, views: list[memoryview]) -> None:
    """Repeat `call`, which takes buffers and says how many bytes it moved, until it has moved all."""
    while views:
        count = call(views)
        assert count > 0
        while views and count >= len(views[0]):
            count -= len(views[0])
            views = views[1:]
        if count:
            views = [views[0][count:], *views[1:]]


class SocketSide:
    """Before each move the receiver is told what comes, so that it can make its lists."""

    def __init__(self, streams: int) -> None:
        self.region_U8 = memory()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams = streams
        self._socks: list[socket.socket] = []

    def address(self) -> dict[str, Any]:
        for _ in range(self._streams):
            threading.Thread(target=self._receive, daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def _receive(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = sock.makefile("rb", buffering=0)  # not a byte more than the line
        while line := lines.readline():
            reported = json.loads(line)
            calls = views_of(self.region_U8, np.array(reported["dst"]), reported["size"])
            sock.sendall(ANSWER)
            for views in calls:
                all_of(lambda views: sock.recvmsg_into(views)[0], views)
            sock.sendall(ANSWER)

    def connect(self, address: dict[str, Any]) -> None:
        for _ in range(self._streams):
            sock = socket.create_connection(("127.0.0.1", address["port"]))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks.append(sock)

    def prepare(self, plan: Plan) -> list[list[list[memoryview]]]:
        """Equal parts for the streams."""
        parts = []
        for i, sock in enumerate(self._socks):
            dst = plan.dst[i :: self._streams]
            sock.sendall(json.dumps({"size": plan.size, "dst": dst.tolist()}).encode() + b"\n")
            _answer(sock)
            parts.append(views_of(self.region_U8, plan.src[i :: self._streams], plan.size))
        return parts

    def move(self, prepared: list[list[list[memoryview]]]) -> None:
        threads = [threading.Thread(target=self._send, args=(i, prepared[i])) for i in range(1, self._streams)]
        for thread in threads:
            thread.start()
        self._send(0, prepared[0])
        for thread in threads:
            thread.join()

    def _send(self, index: int, part: list[list[memoryview]]) -> None:
        for views in part:
            all_of(self._socks[index].sendmsg, views)
        _answer(self._socks[index])


def _answer(sock: socket.socket) -> None:
    assert len(sock.recv(len(ANSWER), socket.MSG_WAITALL)) == len(ANSWER)


class PingSide:
    """`doorbell`: a copy into shared memory and a message over a Unix socket; `echo`: the block itself over TCP."""

    def __init__(self, *, over_tcp: bool) -> None:
        self._over_tcp = over_tcp
        self.region_U8 = memory()
        self._source_U8 = memory()
        if over_tcp:
            self._listener = socket.create_server(("127.0.0.1", 0))
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0baton-benchmark-{os.getpid()}")
            self._listener.listen()
        self._sock = self._listener

    def address(self) -> dict[str, Any]:
        threading.Thread(target=self._answer_all, daemon=True).start()
        return {"port": self._listener.getsockname()[1]} if self._over_tcp else {"pid": os.getpid()}

    def _answer_all(self) -> None:
        sock, _ = self._listener.accept()
        size = 1 << 14
        into = self.region_U8.data[:size]
        while True:
            if self._over_tcp:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if sock.recv_into(into, size, socket.MSG_WAITALL) != size:
                    return
            elif not sock.recv(len(ANSWER)):
                return
            sock.send(ANSWER)

    def connect(self, address: dict[str, Any]) -> None:
        if self._over_tcp:
            self._sock = socket.create_connection(("127.0.0.1", address["port"]))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sock.connect(f"\0baton-benchmark-{address['pid']}")

    def prepare(self, plan: Plan) -> Any:
        src, dst = int(plan.src[0]), int(plan.dst[0])
        return self._source_U8[src : src + plan.size], self.region_U8[dst : dst + plan.size]

    def move(self, prepared: Any) -> None:
        source_U8, into_U8 = prepared
        if self._over_tcp:
            self._sock.sendall(source_U8)
        else:
            into_U8[:] = source_U8
            self._sock.send(ANSWER)
        self._sock.recv(len(ANSWER))


def main(method: str) -> None:
    if method.startswith("stores-"):
        side: Side = StoresSide(int(method.removeprefix("stores-")))
    elif method.startswith("socket"):
        side = SocketSide(2 if method == "socket-2" else 1)
    else:
        side = PingSide(over_tcp=method == "echo")
    serve(side)


if __name__ == "__main__":
    main(sys.argv[1])
