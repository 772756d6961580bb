"""Posts that wait until the device has computed what they send. That a link behind them is one like any other is in
the conformance suite (tcp-behind-events)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from baton.ids import Epoch, GrantId
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.event_poster import EventPostedLink, EventPoster
from kvtransfer.transport import Seal, WriteOps, WriteOutOfBounds, WriterEvents
from tests.support.shm_harness import DEADLINE_S, Recorder, grant_of, run
from tests.support.staging_scenes import EPOCH, GRANT, NBYTES, RECORD, Node, whole
from tests.support.tcp_harness import wait_until

OTHER = grant_of(8)


class ReadingLink:
    """A link that reads its sources when they are posted, as a card does that no stream orders."""

    fenced = False
    epoch: Epoch = EPOCH
    region_nbytes = NBYTES

    def __init__(self, node: Node) -> None:
        self._node = node
        self._wake = threading.Condition()
        self.posted: list[tuple[GrantId, int]] = []
        self.sealed: list[Seal] = []
        self.refused: set[GrantId] = set()
        self.closed = False

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Records (grant, the source's first byte), -1 for what a real link would complete uncopied."""
        at = int(ops.src[0])
        value = -1
        if not self.closed and grant not in self.refused:
            self._node.look(self._node.region, at, at + RECORD, write=False)
            value = int(self._node.region.bytes_U8[at])
        with self._wake:
            self.posted.append((grant, value))
            self._wake.notify_all()

    def wait_for(self, count: int) -> None:
        with self._wake:
            assert self._wake.wait_for(lambda: len(self.posted) >= count, DEADLINE_S), self.posted

    def seal(self, seal: Seal) -> None:
        self.sealed.append(seal)

    def abandon(self, grant: GrantId) -> None:
        self.refused.add(grant)

    def forget(self, grant: GrantId) -> None:
        self.refused.discard(grant)

    async def close(self) -> None:
        self.closed = True

    def describe(self) -> dict[str, object]:
        return {"transport": "reading"}


class Scene:
    def __init__(self, seed: int) -> None:
        self.node = Node(seed)
        self.poster = EventPoster(streams=self.node.device, name="event-poster", poll_interval_s=1e-5)
        self.below = ReadingLink(self.node)
        self.events = Recorder()
        self.link: EventPostedLink

    async def connect(self) -> Scene:
        async def below(events: WriterEvents) -> ReadingLink:
            assert events is not self.events
            return self.below

        loop = asyncio.get_running_loop()
        self.link = await EventPostedLink.over(below, self.events, src_nbytes=NBYTES, poster=self.poster, loop=loop)
        return self

    def compute_and_post(self, block: int, value: int, grant: GrantId = GRANT) -> None:
        self.link.post(grant, whole(self.node.compute(0, block, value), RECORD))

    async def close(self) -> None:
        await self.link.close()
        self.poster.close()
        self.node.staged.close()
        assert self.node.found == []


@pytest.mark.parametrize("seed", range(6))
def test_what_is_posted_has_been_computed(seed: int) -> None:
    """Kernels and posts without a wait between them: each record is read when its kernel is known to be over, in the
    order of the posts."""

    async def test() -> None:
        scene = await Scene(seed).connect()
        for block in range(8):
            scene.compute_and_post(block, 10 + block, GRANT if block % 2 else OTHER)
        await asyncio.to_thread(scene.below.wait_for, 8)
        assert scene.below.posted == [(GRANT if i % 2 else OTHER, 10 + i) for i in range(8)]
        assert scene.link.describe() == {"transport": "reading", "batches_uncomputed": 0}
        await scene.close()

    run(test())


def test_a_poster_that_does_not_wait_is_found() -> None:
    """The event taken as passed: the simulator objects to the read."""

    async def test() -> None:
        scene = await Scene(1).connect()
        scene.node.device.hasty = True
        scene.compute_and_post(0, 7)
        await asyncio.to_thread(scene.below.wait_for, 1)
        (found,) = scene.node.found
        assert found == "the host touches region[0:64], and nothing orders it after layer 0 of stream 0"
        scene.node.found.clear()
        await scene.close()

    run(test())


def test_an_abandoned_grant_and_a_closed_link_wait_for_no_kernel() -> None:
    """The device stands still: what is abandoned goes down at once, to be completed uncopied there, and the rest when
    the link is closed; nothing goes down twice."""

    async def test() -> None:
        scene = await Scene(2).connect()
        scene.node.freeze()
        for block in range(3):
            scene.compute_and_post(block, 1, GRANT if block else OTHER)
        assert scene.link.describe()["batches_uncomputed"] == 3
        scene.link.abandon(GRANT)
        assert scene.below.posted == [(GRANT, -1), (GRANT, -1)]
        scene.link.forget(GRANT)
        assert scene.below.refused == set()
        await scene.link.close()
        assert scene.below.posted == [(GRANT, -1), (GRANT, -1), (OTHER, -1)]
        scene.node.thaw()
        # Behind all events of before.
        passed = threading.Event()
        scene.poster.after(lambda computed: passed.set() if computed else None)
        assert await asyncio.to_thread(passed.wait, DEADLINE_S)
        assert len(scene.below.posted) == 3
        with pytest.raises(WriteOutOfBounds):
            scene.link.post(GRANT, whole(1))
        seal = Seal(grant=OTHER, epoch=EPOCH, writes=1, bytes_written=1)
        scene.link.seal(seal)
        assert (scene.below.sealed, scene.link.epoch, scene.link.fenced) == ([seal], EPOCH, False)
        await scene.close()

    run(test())


@pytest.mark.parametrize("how", ["the device fails", "the poster is closed"])
def test_what_is_never_computed_is_abandoned(how: str) -> None:
    """Posted or to be posted: the grant is given up below, where its batches then complete uncopied."""

    def broken() -> Any:
        raise DeviceError("an illegal memory access was encountered")

    async def test() -> None:
        scene = await Scene(3).connect()
        scene.node.freeze()
        scene.compute_and_post(0, 1)
        scene.compute_and_post(1, 1, OTHER)
        if how == "the device fails":
            scene.node.device.run_some = broken  # type: ignore[method-assign]
        else:
            scene.poster.close()
        await wait_until(lambda: len(scene.below.posted) == 2)
        assert sorted(scene.below.posted) == [(GRANT, -1), (OTHER, -1)]
        scene.compute_and_post(2, 1)
        await wait_until(lambda: len(scene.below.posted) == 3)
        assert scene.below.posted[2] == (GRANT, -1)
        assert scene.below.refused == {GRANT, OTHER}
        await scene.close()

    run(test())


@pytest.mark.parametrize("abandoned", [GRANT, OTHER])
def test_an_error_of_the_device_is_raised_for_what_was_not_taken(
    abandoned: GrantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails while a batch is posted, and just then a grant is abandoned. Is it the batch's own, then the
    batch has gone below, where it completes, and the error is not raised on top of that; otherwise it is raised, and
    the batch is nowhere."""

    async def test() -> None:
        scene = await Scene(4).connect()

        def failing(_: Any) -> None:
            scene.link.abandon(abandoned)
            raise DeviceError("an illegal memory access was encountered")

        monkeypatch.setattr(scene.poster, "after", failing)
        if abandoned == GRANT:
            scene.compute_and_post(0, 1)
        else:
            with pytest.raises(DeviceError):
                scene.compute_and_post(0, 1)
        assert scene.below.posted == ([(GRANT, -1)] if abandoned == GRANT else [])
        assert scene.link.describe()["batches_uncomputed"] == 0
        await scene.close()

    run(test())
