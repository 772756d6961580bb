"""A frame's payload between socket and region: by native calls, or in Python where there is no native library.

Shape suffixes: U8 = one-dimensional array of bytes; S2 = (destination, length) of each segment of a frame.
"""

from __future__ import annotations

import ctypes
import socket

import numpy as np

from kvtransfer.native.sockets import Received, native_sockets
from kvtransfer.transports.tcp_lanes import Frame

CALL_SEGMENTS_MAX = 1024
"""Of one system call in Python: IOV_MAX of Linux."""

CALL_BYTES_MAX = 1 << 20
"""Of one system call in Python, as of a native one: who wants the landing lock waits for one call."""

SMALL_BYTES_MAX = 1 << 16
"""A single segment of at most so many bytes takes longer to prepare for a native call than to receive in Python."""


def moved_by() -> str:
    """How payload is sent and received in this process, for people."""
    return "Python: no native library" if native_sockets() is None else "native"


def send_frame(
    sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray, sent_nbytes: int = 0
) -> None:
    """Send head, table and payload of a frame over a blocking socket, from byte `sent_nbytes` on. Raises OSError.

    Without a frame the head is all there is.
    """
    native = native_sockets()
    if native is None:
        send_by_python(sock, head, frame, source_U8, sent_nbytes)
    elif frame is None:
        sock.sendall(memoryview(head)[sent_nbytes:])
    else:
        native.send(sock.fileno(), head, frame.table_S2, source_U8, frame.src_S, frame.nbytes_S, sent_nbytes)


def send_by_python(
    sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray, sent_nbytes: int = 0
) -> None:
    """What `send_frame` does where there is no native library."""
    views = _views(head, frame, source_U8)
    first, sent = 0, sent_nbytes
    while True:
        while first < len(views) and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if first == len(views):
            return
        views[first] = views[first][sent:]
        sent = sock.sendmsg(_of_one_call(views, first))


def send_at_once(sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray) -> int:
    """Send what one call takes without waiting; how many bytes that was. An error will come again: 0 for now."""
    try:
        return sock.sendmsg(_of_one_call(_views(head, frame, source_U8)), (), socket.MSG_DONTWAIT)
    except OSError:
        return 0


def _views(head: bytes, frame: Frame | None, source_U8: np.ndarray) -> list[memoryview]:
    if frame is None:
        return [memoryview(head)]
    source = source_U8.data
    payload = [source[s : s + n] for s, n in zip(frame.src_S.tolist(), frame.nbytes_S.tolist(), strict=True)]
    return [memoryview(head + frame.table_S2.tobytes()), *payload]


def _of_one_call(views: list[memoryview], first: int = 0) -> list[memoryview]:
    """The views from `first` on that one system call moves; the last of them may be the beginning of one."""
    taken, left = [], CALL_BYTES_MAX
    for view in views[first : first + CALL_SEGMENTS_MAX]:
        taken.append(view[:left])
        left -= taken[-1].nbytes
        if not left:
            break
    return taken


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
        if len(self._table_S2) == 1 and self._table_S2[0, 1] <= SMALL_BYTES_MAX:
            return self._receive_small()
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

    def _receive_small(self) -> Received:
        """One segment, by one system call."""
        if self._interrupt.value:
            return Received.INTERRUPTED
        dst, nbytes = self._table_S2[0].tolist()
        done = int(self._place[1])
        try:
            count = self._sock.recv_into(self._region_U8.data[dst + done : dst + nbytes])
        except BlockingIOError:
            return Received.NOTHING_YET
        if count == 0:
            return Received.EOF
        self._place[1] = done + count
        return Received.ALL if done + count == nbytes else Received.NOTHING_YET

    def _receive_by_python(self) -> Received:
        segment, done = self._place.tolist()
        region = self._region_U8.data
        views = [region[d : d + n] for d, n in self._table_S2[segment:].tolist()]
        while views and not self._interrupt.value:
            views[0] = views[0][done:]
            try:
                count = self._sock.recvmsg_into(_of_one_call(views))[0]
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
