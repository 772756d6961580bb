"""A frame's payload between socket and region, by native calls and by Python alike."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtransfer.native.sockets import Received, native_sockets
from kvtransfer.transports import tcp
from kvtransfer.transports.tcp import (
    CALL_BYTES_MAX,
    Frame,
    cut_frames,
    left_nbytes,
    moved_by,
    scatter,
    send_at_once,
    send_frame,
)
from tests.support.shm_harness import DEADLINE_S, ops_of

REGION_NBYTES = 1 << 17
HEAD = bytes(range(64))


def without_native_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both directions."""
    monkeypatch.setattr(tcp, "native_sockets", lambda: None)


@pytest.fixture(params=["native", "python"])
def sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, ...]]:
    """A connected pair, the second end not waiting."""
    if request.param == "python":
        without_native_sockets(monkeypatch)
    else:
        assert native_sockets() is not None, "the tests need a C compiler (gcc or clang)"
    assert moved_by().lower().startswith(request.param)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def frame_of(src: list[int], dst: list[int], nbytes: list[int]) -> Frame:
    (frame,) = cut_frames(ops_of(src, dst, nbytes), 1 << 20, 512)
    return frame


def take(sock: socket.socket, nbytes: int) -> bytes:
    sock.settimeout(DEADLINE_S)
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part
        data += part
    sock.setblocking(False)
    return bytes(data)


class Receiving:
    """One frame that is received into a region."""

    def __init__(
        self, sock: socket.socket, region_U8: np.ndarray, table_S2: np.ndarray, interrupt: ctypes.c_int32 | None = None
    ) -> None:
        self.place = np.zeros(2, np.int64)
        self.table_S2 = table_S2
        self._args = sock, region_U8, table_S2, self.place, interrupt or ctypes.c_int32(0)

    def receive(self) -> Received:
        return scatter(*self._args)

    @property
    def left_nbytes(self) -> int:
        return left_nbytes(self.table_S2, self.place)


def receive_all(frame: Receiving, sock: socket.socket) -> None:
    sock.settimeout(DEADLINE_S)
    while (received := frame.receive()) is not Received.ALL:
        assert received is Received.NOTHING_YET
        sock.recv(1, socket.MSG_PEEK)
        sock.setblocking(False)


def test_payload_arrives_where_the_table_says(sockets: tuple[socket.socket, socket.socket]) -> None:
    """300 scattered segments of many sizes, more than the socket holds at once: head, table and payload whole, nothing
    beside the segments changed."""
    ours, theirs = sockets
    rng = np.random.default_rng(1)
    source_U8 = rng.integers(0, 256, REGION_NBYTES, dtype=np.uint8)
    nbytes = rng.integers(1, 400, 300)
    dst = rng.permutation(300) * 430
    src = rng.integers(0, REGION_NBYTES - nbytes)
    frame = frame_of(src.tolist(), dst.tolist(), nbytes.tolist())
    sender = threading.Thread(target=send_frame, args=(ours, HEAD, frame, source_U8))
    sender.start()
    assert take(theirs, len(HEAD)) == HEAD
    assert take(theirs, frame.table_S2.nbytes) == frame.table_S2.tobytes()
    region_U8, wanted_U8 = np.zeros(REGION_NBYTES, np.uint8), np.zeros(REGION_NBYTES, np.uint8)
    taking = Receiving(theirs, region_U8, frame.table_S2)
    assert taking.left_nbytes == nbytes.sum()
    receive_all(taking, theirs)
    sender.join()
    for s, d, n in zip(src, dst, nbytes, strict=True):
        wanted_U8[d : d + n] = source_U8[s : s + n]
    assert np.array_equal(region_U8, wanted_U8)
    assert taking.left_nbytes == 0


def test_what_has_come_so_far_is_known_and_gone_on_from(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Five bytes of segments of three, four and two: one whole, half of the next; then the rest; then the end."""
    ours, theirs = sockets
    table_S2 = np.array([[10, 3], [0, 4], [20, 2]], "<i8")
    region_U8 = np.zeros(30, np.uint8)
    taking = Receiving(theirs, region_U8, table_S2)
    assert taking.receive() is Received.NOTHING_YET
    for part, left in ((b"\x01\x02\x03\x04\x05", 4), (b"\x06", 3)):
        ours.sendall(part)
        assert taking.receive() is Received.NOTHING_YET
        assert taking.left_nbytes == left
    ours.sendall(b"\x07\x08\x09")
    assert taking.receive() is Received.ALL
    assert (region_U8[10:13].tolist(), region_U8[:4].tolist(), region_U8[20:22].tolist()) == (
        [1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    )
    assert region_U8.sum() == 45
    ours.close()
    again = Receiving(theirs, region_U8, table_S2)
    assert again.receive() is Received.EOF


def test_an_interrupted_receive_takes_nothing(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Bytes are waiting, and somebody has interrupted: they stay with the kernel until the interrupt is taken back."""
    ours, theirs = sockets
    ours.sendall(b"abc")
    region_U8, interrupt = np.zeros(3, np.uint8), ctypes.c_int32(1)
    taking = Receiving(theirs, region_U8, np.array([[0, 3]], "<i8"), interrupt)
    assert taking.receive() is Received.INTERRUPTED
    assert not region_U8.any()
    interrupt.value = 0
    assert taking.receive() is Received.ALL
    assert region_U8.tobytes() == b"abc"


def test_the_rest_of_a_frame_is_sent_from_any_byte_on(sockets: tuple[socket.socket, socket.socket]) -> None:
    """In the head, in the table, at their borders, in a segment, between two, at the end; and of a head alone."""
    ours, theirs = sockets
    source_U8 = np.arange(100, 130, dtype=np.uint8)
    frame = frame_of([0, 20], [50, 0], [7, 5])
    whole = HEAD + frame.table_S2.tobytes() + bytes([*range(100, 107), *range(120, 125)])
    for sent in range(len(whole) + 1):
        send_frame(ours, HEAD, frame, source_U8, sent)
        assert take(theirs, len(whole) - sent) == whole[sent:]
    for sent in (0, 1, len(HEAD) - 1):
        send_frame(ours, HEAD, None, source_U8, sent)
        assert take(theirs, len(HEAD) - sent) == HEAD[sent:]
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


def test_sending_at_once_takes_what_fits_and_never_waits(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A frame larger than the socket's buffer: part of it; then nothing; the rest follows when somebody reads."""
    ours, theirs = sockets
    source_U8 = np.random.default_rng(2).integers(0, 256, 1 << 22, dtype=np.uint8)
    frame = Frame(
        src_S=np.array([0]),
        nbytes_S=np.array([1 << 22]),
        table_S2=np.array([[0, 1 << 22]], "<i8"),
        nbytes=1 << 22,
    )
    whole = HEAD + frame.table_S2.tobytes() + source_U8.tobytes()
    sent = send_at_once(ours, HEAD, frame, source_U8)
    assert 0 < sent < len(whole)
    while (more := send_at_once(ours, HEAD, None, source_U8)) > 0:
        assert more <= len(HEAD)
        sent, whole = sent + more, whole[:sent] + HEAD[:more] + whole[sent:]
    sender = threading.Thread(target=send_frame, args=(ours, whole[sent:], None, source_U8))
    sender.start()
    assert take(theirs, len(whole)) == whole
    sender.join()
    theirs.close()
    assert send_at_once(ours, HEAD, frame, source_U8) == 0


def test_a_broken_connection_is_an_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Sending to an end that is closed: an OSError, no signal."""
    ours, theirs = sockets
    theirs.close()
    with pytest.raises(BrokenPipeError):
        send_frame(ours, HEAD, frame_of([0], [0], [5]), np.zeros(9, np.uint8))


def test_python_moves_no_more_in_a_call_than_c_does(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants the landing lock waits for one system call: a segment of 3 MiB comes in several."""
    ours, theirs = sockets
    nbytes = 3 * CALL_BYTES_MAX
    without_native_sockets(monkeypatch)
    called: list[int] = []

    class Counting(socket.socket):
        def recv_into(self, buffer: Any, *rest: Any) -> Any:
            called.append(memoryview(buffer).nbytes)
            return super().recv_into(buffer, *rest)

    source_U8 = np.random.default_rng(2).integers(0, 256, nbytes, dtype=np.uint8)
    region_U8 = np.zeros(nbytes, np.uint8)
    frame = Frame(
        src_S=np.zeros(1, np.int64),
        nbytes_S=np.array([nbytes]),
        table_S2=np.array([[0, nbytes]]),
        nbytes=nbytes,
    )
    with Counting(fileno=theirs.detach()) as receiving:
        sender = threading.Thread(target=send_frame, args=(ours, HEAD, frame, source_U8))
        sender.start()
        take(receiving, len(HEAD) + frame.table_S2.nbytes)
        receive_all(Receiving(receiving, region_U8, frame.table_S2), receiving)
        sender.join(DEADLINE_S)
    assert np.array_equal(region_U8, source_U8)
    assert max(called) == CALL_BYTES_MAX
