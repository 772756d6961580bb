"""A tcp link's queue: who sends what, what is left to whom, and how a batch is shared between streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import GrantId
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.post_queue import Taken
from kvtransfer.transports.tcp import FRAME_BYTES_MAX
from kvtransfer.transports.tcp_lanes import (
    AT_ONCE_OPS_MAX,
    SHARED_BYTES_MIN,
    SHARES_OF_A_STREAM,
    SealToSend,
    StreamLanes,
    ToSend,
    frame_starts,
)
from tests.support.shm_harness import DEADLINE_S, grant_of, ops_of
from tests.support.tcp_harness import EPOCH

AT_ONCE_BYTES_MAX = 1000
HEAD_NBYTES, SEGMENT_NBYTES = 64, 16
GRANT = grant_of(7)
SEAL = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=1)


class Sending:
    """A queue with a thread for each stream, that stands where the test has put it."""

    def __init__(self, streams: int) -> None:
        self.completed: list[tuple[GrantId, int, int, bool]] = []
        self.loop = asyncio.new_event_loop()
        self.lanes = StreamLanes(
            streams=streams,
            src_nbytes=1 << 16,
            dst_nbytes=1 << 16,
            frame_bytes_max=1 << 20,
            frame_segments_max=512,
            at_once_bytes_max=AT_ONCE_BYTES_MAX,
            abandoned_grants_max=10,
            loop=self.loop,
            completed=lambda *told: self.completed.append(told),
        )
        self.queue = self.lanes.queue
        self._threads: list[threading.Thread] = []

    def take(self, index: int) -> Future[ToSend | None]:
        """What a stream's thread takes next; returns when it has, or waits."""
        result: Future[ToSend | None] = Future()
        thread = threading.Thread(target=lambda: result.set_result(self.lanes.take(index)))
        self._threads.append(thread)
        thread.start()
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self.lanes._streams[index].waits or result.done()):
            assert time.monotonic() < deadline_s
        return result

    def close(self) -> None:
        self.queue.stop()
        for index, stream in enumerate(self.lanes._streams):
            if stream.lent:
                self.lanes.give_back(index, None)
        for thread in self._threads:
            thread.join()
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
    assert taken is not None
    return taken.sequence


def test_an_idle_stream_is_lent_to_whoever_posts_something_small() -> None:
    """The first post is lent, the second finds the stream lent and waits; given back, its thread takes the second."""
    with sending() as s:
        waiting = s.take(0)
        lent = s.queue.post(GRANT, small())
        assert lent is not None
        assert (lent.index, lent.sequence) == (0, 0)
        assert s.queue.post(GRANT, small(200)) is None
        assert not waiting.done()
        s.lanes.give_back(0, None)
        assert sequence_of(waiting.result(DEADLINE_S)) == 1
        s.lanes.acknowledged(0, 1, landed=True)
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
            assert taken is not None
            assert isinstance(taken.item, Taken)
            assert taken.item.part.nbytes == ops.total_bytes


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
        assert taken is not None
        assert isinstance(taken.item, Taken)
        assert taken.item.batch.grant == other
        s.lanes.acknowledged(0, taken.sequence, landed=True)
        assert s.completed[2:] == [(GRANT, 1, 100, True), (other, 1, 100, True)]


def test_an_error_in_one_completion_loses_no_other() -> None:
    """One acknowledgement completes three batches, and whoever is told of the first fails: the others are told of, in
    order, and then the error comes."""
    with sending() as s:
        told: list[int] = []

        def completed(grant: GrantId, writes: int, nbytes: int, copied: bool) -> None:
            told.append(nbytes)
            if len(told) == 1:
                raise RuntimeError("the first")

        s.queue._completed = completed
        for nbytes in (10, 20, 30):
            s.queue.post(GRANT, ops_of([0], [0], [nbytes]))
            s.take(0).result(DEADLINE_S)
        with pytest.raises(RuntimeError, match="the first"):
            s.lanes.acknowledged(0, 2, landed=True)
        assert told == [10, 20, 30]


def test_the_rest_of_what_was_lent_comes_before_everything_else() -> None:
    """The socket took ten bytes: the stream's thread goes on from there, then with the seal, and after a stop it still
    sends a rest, and ends only then."""
    with sending() as s:
        waiting = s.take(0)
        lent = s.queue.post(GRANT, small())
        assert lent is not None
        assert s.lanes.seal(SEAL) == []
        s.lanes.give_back(0, lent.after(HEAD_NBYTES, 10))
        assert waiting.result(DEADLINE_S) == ToSend(index=0, sequence=0, item=lent.item, sent_nbytes=10)
        sealing = s.take(0).result(DEADLINE_S)
        assert sealing == ToSend(index=0, sequence=1, item=SealToSend(seal=SEAL, streams_mask=1))
        waiting = s.take(0)
        (lent_seal,) = s.lanes.seal(SEAL)
        s.queue.stop()
        assert not waiting.done(), "somebody else sends on the stream"
        s.lanes.give_back(0, lent_seal.after(HEAD_NBYTES, 0))
        assert waiting.result(DEADLINE_S) == lent_seal
        assert s.take(0).result(DEADLINE_S) is None
        assert s.lanes.bye_sequence(0) == 3


def test_what_is_left_of_a_frame_is_counted_with_its_head_and_table() -> None:
    """All but one byte: a rest; all: none."""
    with sending() as s:
        s.take(0)
        lent = s.queue.post(GRANT, small())
        assert lent is not None
        total_nbytes = HEAD_NBYTES + SEGMENT_NBYTES + 100
        assert lent.after(HEAD_NBYTES, total_nbytes) is None
        rest = lent.after(HEAD_NBYTES, total_nbytes - 1)
        assert rest is not None
        assert rest.sent_nbytes == total_nbytes - 1


def test_the_stream_with_the_fewest_frames_on_their_way_is_lent() -> None:
    """Three small posts over two idle streams: the first, the other, and where something was acknowledged."""
    with sending(streams=2) as s:
        s.take(0)
        s.take(1)
        indices = []
        for acknowledged in (None, 1, None):
            lent = s.queue.post(GRANT, small())
            assert lent is not None
            indices.append(lent.index)
            s.lanes.give_back(lent.index, None)
            if acknowledged is not None:
                s.lanes.acknowledged(acknowledged, lent.sequence, landed=True)
        assert indices == [0, 1, 1]
        assert [(t.index, t.sequence, t.item) for t in s.lanes.seal(SEAL)] == [
            (0, 1, SealToSend(seal=SEAL, streams_mask=0b11)),
            (1, 2, SealToSend(seal=SEAL, streams_mask=0b11)),
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
