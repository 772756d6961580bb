"""Posts that wait until the device has computed what they send. That a link behind them is one like any other is in
the conformance suite (tcp-behind-events)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.ids import GrantId
from kvtransfer.device.driver import EventPoster
from kvtransfer.transport import DeviceError, WriteOps, WriteOutOfBounds
from kvtransfer.transports.post_queue import Batch, OpsPart, PostQueue
from tests.support.shm_harness import DEADLINE_S, grant_of, run
from tests.support.staging_scenes import GRANT, NBYTES, RECORD, Node, whole
from tests.support.tcp_harness import wait_until

OTHER = grant_of(8)


def cut_whole(ops: WriteOps) -> list[OpsPart]:
    return [OpsPart(ops=ops, nbytes=ops.total_bytes)]


class ReadingLane:
    """Reads its sources when they are taken, as a card does that no stream orders."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.queue: PostQueue[OpsPart, None]
        self.read: list[tuple[GrantId, int]] = []

    def offer(self, batch: Batch[OpsPart]) -> None:
        """Records (grant, the source's first byte)."""
        while (taken := self.queue.take(0)) is not None:
            at = int(taken.part.ops.src[0])
            self._node.look(self._node.region, at, at + RECORD, write=False)
            self.read.append((taken.batch.grant, int(self._node.region.bytes_U8[at])))
            self.queue.finished(taken, copied=True)

    def stop(self) -> None:
        pass


class Scene:
    """`completed` has (grant, whether copied)."""

    def __init__(self, seed: int) -> None:
        self.node = Node(seed)
        self.poster = EventPoster(streams=self.node.device, name="event-poster")
        self.lane = ReadingLane(self.node)
        self.completed: list[tuple[GrantId, bool]] = []
        self.uncomputed: list[GrantId] = []
        self.queue = self.lane.queue = PostQueue(
            cut_whole,
            self.lane,
            src_nbytes=NBYTES,
            dst_nbytes=NBYTES,
            loop=asyncio.get_running_loop(),
            completed=lambda grant, writes, nbytes, copied: self.completed.append((grant, copied)),
        )
        self.queue.post_behind(self.poster.after, self._never_computed)

    def _never_computed(self, grant: GrantId) -> None:
        self.uncomputed.append(grant)
        self.queue.abandon(grant)

    def compute_and_post(self, block: int, value: int, grant: GrantId = GRANT) -> None:
        self.queue.post(grant, whole(self.node.compute(0, block, value), RECORD))

    async def until(self, completed: int) -> None:
        await wait_until(lambda: len(self.completed) >= completed)

    async def close(self) -> None:
        self.queue.stop()
        self.poster.close()
        await asyncio.sleep(0)
        self.node.staged.close()
        assert self.node.found == []


@pytest.mark.parametrize("seed", range(6))
def test_what_is_posted_has_been_computed(seed: int) -> None:
    """Kernels and posts without a wait between them: each record is read when its kernel is known to be over, in the
    order of the posts."""

    async def test() -> None:
        scene = Scene(seed)
        for block in range(8):
            scene.compute_and_post(block, 10 + block, GRANT if block % 2 else OTHER)
        await scene.until(8)
        assert scene.lane.read == [(GRANT if i % 2 else OTHER, 10 + i) for i in range(8)]
        assert scene.completed == [(GRANT if i % 2 else OTHER, True) for i in range(8)]
        assert scene.queue.describe()["batches_uncomputed"] == 0
        await scene.close()

    run(test())


def test_a_poster_that_does_not_wait_is_found() -> None:
    """The event taken as passed: the simulator objects to the read."""

    async def test() -> None:
        scene = Scene(1)
        scene.node.device.hasty = True
        scene.compute_and_post(0, 7)
        await scene.until(1)
        (found,) = scene.node.found
        assert found == "the host touches region[0:64], and nothing orders it after layer 0 of stream 0"
        scene.node.found.clear()
        await scene.close()

    run(test())


def test_an_abandoned_grant_and_a_stopped_queue_wait_for_no_kernel() -> None:
    """The device stands still: what is abandoned completes at once, uncopied, and the rest when the queue is stopped;
    nothing completes twice."""

    async def test() -> None:
        scene = Scene(2)
        scene.node.freeze()
        for block in range(3):
            scene.compute_and_post(block, 1, GRANT if block else OTHER)
        assert scene.queue.describe()["batches_uncomputed"] == 3
        scene.queue.abandon(GRANT)
        await asyncio.sleep(0)
        assert scene.completed == [(GRANT, False), (GRANT, False)]
        scene.queue.forget(GRANT)
        scene.queue.stop()
        await asyncio.sleep(0)
        assert scene.completed == [(GRANT, False), (GRANT, False), (OTHER, False)]
        scene.node.thaw()
        # Behind all events of before.
        passed = threading.Event()
        scene.poster.after(lambda computed: passed.set() if computed else None)
        assert await asyncio.to_thread(passed.wait, DEADLINE_S)
        assert len(scene.completed) == 3
        assert scene.lane.read == []
        with pytest.raises(WriteOutOfBounds):
            scene.queue.post(GRANT, whole(1))
        await scene.close()

    run(test())


def test_what_waits_behind_an_abandoned_grant_is_taken_when_that_goes() -> None:
    """Two threads post at once, and the second batch is computed first: it waits, and is taken when the first grant is
    abandoned before its own sources are there."""

    async def test() -> None:
        scene = Scene(5)
        computed: list[Callable[[bool], None]] = []
        scene.queue.post_behind(computed.append, scene.queue.abandon)
        scene.queue.post(GRANT, whole(0, RECORD))
        scene.queue.post(OTHER, whole(RECORD, RECORD))
        computed[1](True)
        assert scene.lane.read == []
        scene.queue.abandon(GRANT)
        assert scene.lane.read == [(OTHER, 0)]
        await scene.until(2)
        assert scene.completed == [(GRANT, False), (OTHER, True)]
        await scene.close()

    run(test())


@pytest.mark.parametrize("how", ["the device fails", "the poster is closed"])
def test_what_is_never_computed_is_abandoned(how: str) -> None:
    """Posted or to be posted: the grant is abandoned, and its batches complete uncopied."""

    async def test() -> None:
        scene = Scene(3)
        scene.node.freeze()
        scene.compute_and_post(0, 1)
        scene.compute_and_post(1, 1, OTHER)
        if how == "the device fails":
            scene.node.device.run_some = broken  # type: ignore[method-assign]
        else:
            scene.poster.close()
        await scene.until(2)
        assert sorted(scene.completed) == [(GRANT, False), (OTHER, False)]
        scene.compute_and_post(2, 1)
        await scene.until(3)
        assert scene.completed[2] == (GRANT, False)
        assert set(scene.uncomputed) == {GRANT, OTHER}
        assert scene.lane.read == []
        await scene.close()

    run(test())


def broken(*_: Any) -> Any:
    raise DeviceError("an illegal memory access was encountered")


@pytest.mark.parametrize("abandoned", [GRANT, OTHER])
def test_an_error_of_the_device_is_raised_for_what_was_not_taken(
    abandoned: GrantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails while a batch is posted, and just then a grant is abandoned. Is it the batch's own, then the
    batch has completed, and the error is not raised on top of that; otherwise it is raised, and the batch is nowhere.
    Either way it is heard of once."""

    async def test() -> None:
        scene = Scene(4)

        def failing(_: Callable[[bool], None]) -> None:
            scene.queue.abandon(abandoned)
            broken()

        scene.queue.post_behind(failing, scene.queue.abandon)
        if abandoned == GRANT:
            scene.compute_and_post(0, 1)
        else:
            with pytest.raises(DeviceError):
                scene.compute_and_post(0, 1)
        assert scene.queue.uncompleted(GRANT) == (abandoned == GRANT)
        await asyncio.sleep(0)
        assert scene.completed == ([(GRANT, False)] if abandoned == GRANT else [])
        assert scene.queue.describe()["batches_uncomputed"] == 0
        assert scene.queue.uncompleted(GRANT) == 0
        await scene.close()

    run(test())
