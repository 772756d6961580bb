"""A tcp link's queue: who sends what, what is left to whom, and how a batch is shared between streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import GrantId
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps
from kvtransfer.transports.control_channel import SealSent
from kvtransfer.transports.tcp import (
    AT_ONCE_BYTES_MAX,
    AT_ONCE_OPS_MAX,
    CODEC,
    FRAME_BYTES_MAX,
    MESSAGE_BYTES,
    SEGMENT_BYTES,
    SHARED_BYTES_MIN,
    SHARES_OF_A_STREAM,
    Data,
    TcpWelcome,
    TcpWriterLink,
    ToSend,
    frame_starts,
)
from kvtransfer.transports.writer_link import LINK_LIMITS, LinkParts
from tests.support.shm_harness import DEADLINE_S, Recorder, grant_of, ops_of
from tests.support.tcp_harness import EPOCH, PAIR

REGION_NBYTES = 1 << 17
GRANT = grant_of(7)
SEAL = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=1)


class Sending:
    """A link with threads of the test's for its streams, which stand where the test has put them."""

    def __init__(self, streams: int) -> None:
        self.events = Recorder()
        self.completed = self.events.completed
        self.loop = asyncio.new_event_loop()
        self.link = TcpWriterLink(
            LinkParts(
                endpoint=DataEndpoint(transport=TransportName.TCP, address="nowhere:1", secret=b"", epoch=EPOCH),
                pair=PAIR,
                events=self.events,
                loop=self.loop,
            ),
            LINK_LIMITS,
            socks=[socket.socket() for _ in range(streams)],
            welcome=TcpWelcome(region_nbytes=REGION_NBYTES, frame_bytes_max=1 << 20, frame_segments_max=512),
            source_region_U8=np.zeros(REGION_NBYTES, np.uint8),
        )
        self.streams = self.link._streams
        self.queue = self.link._queue
        self._threads: list[threading.Thread] = []

    def take(self, index: int) -> Future[ToSend | None]:
        """What a stream's thread takes next; returns when it has, or waits."""
        result: Future[ToSend | None] = Future()
        thread = threading.Thread(target=lambda: result.set_result(self.link._take(self.streams[index])))
        self._threads.append(thread)
        thread.start()
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self.streams[index].waits or result.done()):
            assert time.monotonic() < deadline_s
        return result

    def give_back_sent(self, lent: ToSend) -> None:
        """All of it has been sent."""
        lent.sent_nbytes += lent.left_nbytes
        self.link._give_back(lent)

    def close(self) -> None:
        self.queue.stop()
        for stream in self.streams:
            if stream.lent:
                self.give_back_sent(ToSend(stream=stream, head=b"", frame=None))
        for thread in self._threads:
            thread.join()
        for stream in self.streams:
            stream.sock.close()
        self.loop.close()


@contextlib.contextmanager
def sending(streams: int = 1) -> Iterator[Sending]:
    it = Sending(streams)
    try:
        yield it
    finally:
        it.close()


def small(at: int = 0) -> WriteOps:
    return ops_of([at], [at], [100])


def many_ops(count: int) -> WriteOps:
    apart = list(range(0, 3 * count, 3))
    return ops_of(apart, apart, [1] * count)


def sequence_of(taken: ToSend | None) -> int:
    return data_of(taken).sequence


def data_of(taken: ToSend | None) -> Data:
    assert taken is not None
    message = CODEC.decode(taken.head)
    assert isinstance(message, Data)
    return message


def sealing(number: int, ways_mask: int = 1) -> SealSent:
    return SealSent(number=number, seal=SEAL, ways_mask=ways_mask)


def test_an_idle_stream_is_lent_to_whoever_posts_something_small() -> None:
    """The first post is lent, the second finds the stream lent and waits; given back, its thread takes the second."""
    with sending() as s:
        waiting = s.take(0)
        lent = s.queue.post(GRANT, small())
        assert lent is not None
        assert (lent.stream.index, sequence_of(lent)) == (0, 0)
        assert s.queue.post(GRANT, small(200)) is None
        assert not waiting.done()
        s.give_back_sent(lent)
        assert sequence_of(waiting.result(DEADLINE_S)) == 1
        s.link._acknowledged(s.streams[0], 1, landed=True)
        assert s.completed == [(GRANT, 1, 100, True)] * 2
        assert s.queue.uncompleted(GRANT) == 0


def test_what_is_not_small_or_finds_no_idle_stream_is_left_to_the_threads() -> None:
    """No thread waits yet; too many bytes; too many copies."""
    with sending() as s:
        assert s.queue.post(GRANT, small()) is None
        assert sequence_of(s.take(0).result(DEADLINE_S)) == 0
        for ops in (
            ops_of([0], [0], [AT_ONCE_BYTES_MAX + 1]),
            many_ops(AT_ONCE_OPS_MAX + 1),
        ):
            waiting = s.take(0)
            assert s.queue.post(GRANT, ops) is None
            taken = waiting.result(DEADLINE_S)
            assert data_of(taken).payload_nbytes == ops.total_bytes


def test_what_is_queued_of_an_abandoned_grant_is_not_sent() -> None:
    """Three batches, of which a thread has taken the first: abandoned, the other two complete at once and uncopied,
    another grant's goes out next, and the first completes with its acknowledgement."""
    other = grant_of(8)
    with sending() as s:
        for at in (0, 200, 400):
            s.queue.post(GRANT, small(at))
        s.queue.post(other, small(600))
        assert sequence_of(s.take(0).result(DEADLINE_S)) == 0
        s.queue.abandon(GRANT)
        s.loop.run_until_complete(asyncio.sleep(0))
        assert s.completed == [(GRANT, 1, 100, False)] * 2
        taken = s.take(0).result(DEADLINE_S)
        assert data_of(taken).grant == other
        s.link._acknowledged(s.streams[0], sequence_of(taken), landed=True)
        assert s.completed[2:] == [(GRANT, 1, 100, True), (other, 1, 100, True)]


def test_an_error_in_one_completion_loses_no_other() -> None:
    """One acknowledgement completes three batches, and whoever is told of the first fails: the others are told of, in
    order, and then the error comes."""
    with sending() as s:
        reported: list[int] = []

        def completed(grant: GrantId, writes: int, nbytes: int, copied: bool) -> None:
            reported.append(nbytes)
            if len(reported) == 1:
                raise RuntimeError("the first")

        s.queue._completed = completed
        for nbytes in (10, 20, 30):
            s.queue.post(GRANT, ops_of([0], [0], [nbytes]))
            s.take(0).result(DEADLINE_S)
        with pytest.raises(RuntimeError, match="the first"):
            s.link._acknowledged(s.streams[0], 2, landed=True)
        assert reported == [10, 20, 30]


def test_the_rest_of_what_was_lent_comes_before_everything_else() -> None:
    """The socket took ten bytes: the stream's thread goes on from there, then with the seal, and after a stop it still
    sends a rest, and ends only then."""
    with sending() as s:
        waiting = s.take(0)
        lent = s.queue.post(GRANT, small())
        assert lent is not None
        assert s.link._take_seal(SEAL) == []
        lent.sent_nbytes = 10
        s.link._give_back(lent)
        assert waiting.result(DEADLINE_S) is lent
        seal = s.take(0).result(DEADLINE_S)
        assert seal is not None
        assert CODEC.decode(seal.head) == sealing(1)
        waiting = s.take(0)
        (lent_seal,) = s.link._take_seal(SEAL)
        s.queue.stop()
        assert not waiting.done(), "somebody else sends on the stream"
        s.link._give_back(lent_seal)
        assert waiting.result(DEADLINE_S) is lent_seal
        assert s.take(0).result(DEADLINE_S) is None
        assert s.streams[0].next_sequence == 3, "the number of the BYE"


def test_what_is_left_of_a_frame_is_counted_with_its_head_and_table() -> None:
    """All but one byte: a rest; all: none."""
    with sending() as s:
        for left_nbytes in (1, 0):
            waiting = s.take(0)
            lent = s.queue.post(GRANT, small())
            assert lent is not None
            lent.sent_nbytes = MESSAGE_BYTES + SEGMENT_BYTES + 100 - left_nbytes
            assert lent.left_nbytes == left_nbytes
            s.link._give_back(lent)
            if left_nbytes:
                assert waiting.result(DEADLINE_S) is lent
        assert s.streams[0].rest is None


def test_the_stream_with_the_fewest_frames_on_their_way_is_lent() -> None:
    """Three small posts over two idle streams: the first, the other, and where something was acknowledged."""
    with sending(streams=2) as s:
        s.take(0)
        s.take(1)
        indices = []
        for acknowledged in (None, 1, None):
            lent = s.queue.post(GRANT, small())
            assert lent is not None
            indices.append(lent.stream.index)
            s.give_back_sent(lent)
            if acknowledged is not None:
                s.link._acknowledged(s.streams[acknowledged], sequence_of(lent), landed=True)
        assert indices == [0, 1, 1]
        assert [(seal.stream.index, CODEC.decode(seal.head)) for seal in s.link._take_seal(SEAL)] == [
            (0, sealing(1, 0b11)),
            (1, sealing(2, 0b11)),
        ]


@given(st.integers(1, 1 << 28), st.integers(1 << 18, FRAME_BYTES_MAX), st.integers(1, 8))
def test_a_batch_is_shared_so_that_the_streams_end_together(total: int, bytes_max: int, streams: int) -> None:
    """Frames grow no larger than allowed, shrink towards the end, none but the last below the least size; while more
    than that is left, a frame is no more than 0.8 of its stream's share of it."""
    starts = frame_starts(total, bytes_max, streams)
    sizes = np.diff(starts, append=total)
    least = min(SHARED_BYTES_MIN, bytes_max)
    assert starts[0] == 0
    assert sizes.min() > 0
    assert sizes.max() <= bytes_max
    assert (sizes[:-1] >= least).all()
    assert (np.diff(sizes) <= 0).all()
    share = [max(least, (total - at) / (SHARES_OF_A_STREAM * streams)) for at in starts]
    assert (sizes <= share).all()
