"""A frame's payload from region to socket: by native calls, or in Python where there is no native library.

Shape suffix: U8 = one-dimensional array of bytes.
"""

from __future__ import annotations

import socket

import numpy as np

from kvtransfer.native.sockets import native_sockets
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
        sent = sock.sendmsg(of_one_call(views, first))


def send_at_once(sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray) -> int:
    """Send what one call takes without waiting; how many bytes that was. An error will come again: 0 for now."""
    try:
        return sock.sendmsg(of_one_call(_views(head, frame, source_U8)), (), socket.MSG_DONTWAIT)
    except OSError:
        return 0


def _views(head: bytes, frame: Frame | None, source_U8: np.ndarray) -> list[memoryview]:
    if frame is None:
        return [memoryview(head)]
    source = source_U8.data
    payload = [source[s : s + n] for s, n in zip(frame.src_S.tolist(), frame.nbytes_S.tolist(), strict=True)]
    return [memoryview(head + frame.table_S2.tobytes()), *payload]


def of_one_call(views: list[memoryview], first: int = 0) -> list[memoryview]:
    """The views from `first` on that one system call moves; the last of them may be the beginning of one."""
    taken, left = [], CALL_BYTES_MAX
    for view in views[first : first + CALL_SEGMENTS_MAX]:
        taken.append(view[:left])
        left -= taken[-1].nbytes
        if not left:
            break
    return taken
