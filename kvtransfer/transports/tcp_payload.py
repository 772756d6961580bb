"""A frame's payload between socket and region: by native calls, or in Python where there is no native library.

Shape suffixes: U8 = one-dimensional array of bytes; S2 = (destination, length) of each segment of a frame.
"""

from __future__ import annotations

import ctypes
import socket

import numpy as np

from kvtransfer.native.sockets import Received, native_sockets
from kvtransfer.transports.tcp_frames import Frame


def moved_by() -> str:
    """How payload is sent and received in this process, for people."""
    return "Python: no native library" if native_sockets() is None else "native"


def send_frame(sock: socket.socket, head: bytes, frame: Frame, source_U8: np.ndarray) -> None:
    """Send head, table and payload of a frame over a blocking socket. Raises OSError."""
    native = native_sockets()
    if native is not None:
        native.send(sock.fileno(), head, frame.table_S2, source_U8, frame.src_S, frame.nbytes_S)
    else:
        send_by_python(sock, head, frame, source_U8)


def send_by_python(sock: socket.socket, head: bytes, frame: Frame, source_U8: np.ndarray) -> None:
    """What `send_frame` does where there is no native library."""
    source = source_U8.data
    payload = (source[s : s + n] for s, n in zip(frame.src_S.tolist(), frame.nbytes_S.tolist(), strict=True))
    views = [memoryview(head + frame.table_S2.tobytes()), *payload]
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first:])
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]


class Scatter:
    """Receives the payload of one frame into the region, in as many calls as it takes; the socket does not wait.

    The caller has checked the table against the region, and lets nobody else call at the same time.
    """

    def __init__(
        self, sock: socket.socket, region_U8: np.ndarray, table_S2: np.ndarray, interrupt: ctypes.c_int32
    ) -> None:
        """`table_S2` is not copied. No system call is begun while `interrupt` is not 0."""
        self._sock = sock
        self._region_U8 = region_U8
        self._table_S2 = table_S2
        self._interrupt = interrupt
        self._place = np.zeros(2, np.int64)
        self._native = native_sockets()

    def receive(self) -> Received:
        """Go on until all has landed, nothing more has come, or somebody interrupts. Raises OSError."""
        if self._native is not None:
            return self._native.receive(
                self._sock.fileno(), self._region_U8, self._table_S2, self._place, self._interrupt
            )
        return self._receive_by_python()

    @property
    def left_nbytes(self) -> int:
        """What has not landed yet."""
        segment, done = self._place.tolist()
        return int(self._table_S2[segment:, 1].sum()) - done

    def _receive_by_python(self) -> Received:
        segment, done = self._place.tolist()
        region = self._region_U8.data
        views = [region[d : d + n] for d, n in self._table_S2[segment:].tolist()]
        while views and not self._interrupt.value:
            views[0] = views[0][done:]
            try:
                count = self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                return Received.NOTHING_YET
            if count == 0:
                return Received.EOF
            done = count
            passed = 0
            while passed < len(views) and done >= len(views[passed]):
                done -= len(views[passed])
                passed += 1
            at_first = 0 if passed else int(self._place[1])
            self._place[:] = self._place[0] + passed, done + at_first
            del views[:passed]
        return Received.INTERRUPTED if views else Received.ALL
