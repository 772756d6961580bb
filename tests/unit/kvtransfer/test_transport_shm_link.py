"""The writer's end of the shm transport within one process: abandon, fence, close, failures."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.transport import ConnectError, WriteOutOfBounds
from kvtransfer.transports import post_queue, shm
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import ShmLinkLimits
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Gate, grant_of, linked, ops_of, pair_of, receiver, run
from tests.support.shm_harness import LINK_EPOCH as EPOCH
from tests.support.shm_harness import LINK_PAIR as PAIR

GRANT = grant_of(7)


def test_a_fence_waits_for_the_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """FENCE arrives in the middle of a copy: no BYE, hence no evidence, before the copy has ended."""
    gate = Gate(monkeypatch)

    async def test() -> None:
        async with receiver() as r, linked(r) as (link, events):
            link.post(GRANT, ops_of([0], [0], [64]))
            link.post(GRANT, ops_of([0], [64], [64]))
            assert gate.reached.wait(DEADLINE_S)
            r.port.fence(PAIR, EPOCH)
            r.port.fence(pair_of(9), EPOCH)
            await events.until(lambda e: len(e.completed) == 1)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone_epochs == [(pair_of(9), EPOCH)]
            assert events.completed == [(GRANT, 1, 64, False)]
            gate.open.set()
            await r.events.until(lambda e: len(e.gone) == 2)
            assert r.events.gone[1] == (PAIR, EPOCH, "1 acknowledged")
            assert r.region.array_U8[:128].tolist() == [5] * 64 + [0] * 64
            await events.until(lambda e: bool(e.lost))
            assert events.completed[1:] == [(GRANT, 1, 64, True)]
            assert events.lost == [(PAIR, f"fenced by the receiver up to epoch {EPOCH}")]

    run(test())


def test_an_abandoned_grant_is_copied_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is under way: it finishes, its batch ends there, what is queued and posted later completes uncopied."""
    gate, other = Gate(monkeypatch), grant_of(8)

    async def test() -> None:
        async with receiver() as r, linked(r, ShmLinkLimits(copy_chunk_ops_max=1)) as (link, events):
            link.post(GRANT, ops_of([0, 0], [0, 1], [1, 1]))
            link.post(GRANT, ops_of([0], [2], [1]))
            link.post(other, ops_of([0], [3], [1]))
            assert gate.reached.wait(DEADLINE_S)
            link.abandon(GRANT)
            link.post(GRANT, ops_of([0], [4], [1]))
            await events.until(lambda e: len(e.completed) == 2)
            assert events.completed == [(GRANT, 1, 1, False)] * 2
            gate.open.set()
            await events.until(lambda e: len(e.completed) == 4)
            assert events.completed[2:] == [(GRANT, 2, 2, False), (other, 1, 1, True)]
            assert r.region.array_U8[:5].tolist() == [5, 0, 0, 5, 0]
            link.forget(GRANT)
            link.post(GRANT, ops_of([0], [4], [1]))
            await events.until(lambda e: len(e.completed) == 5)
            assert r.region.array_U8[4] == 5

    run(test())


def test_too_many_abandoned_grants_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting one could let a late post write: rather no link at all."""
    monkeypatch.setattr(post_queue, "ABANDONED_GRANTS_MAX", 2)

    async def test() -> None:
        async with receiver() as r, linked(r) as (link, events):
            for i in range(3):
                assert link.describe()["state"] == "open"
                link.abandon(grant_of(i))
            await events.until(lambda e: bool(e.lost))
            assert events.lost == [(PAIR, "too many abandoned grants are remembered, none may be forgotten")]
            link.post(grant_of(9), ops_of([0], [0], [1]))
            await events.until(lambda e: len(e.completed) == 1)
            assert not r.region.array_U8.any()

    run(test())


def test_close_completes_what_is_queued_and_says_bye_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed twice with a copy under way: both wait for it; the caller, who knows, is not told of a lost link."""
    gate = Gate(monkeypatch)

    async def test() -> None:
        async with receiver() as r, linked(r) as (link, events):
            link.post(GRANT, ops_of([0], [0], [1]))
            link.post(GRANT, ops_of([0], [1], [1]))
            assert gate.reached.wait(DEADLINE_S)
            closing = [asyncio.create_task(link.close()) for _ in range(2)]
            await events.until(lambda e: len(e.completed) == 1)
            assert not any(task.done() for task in closing)
            gate.open.set()
            await asyncio.gather(*closing)
            assert events.completed == [(GRANT, 1, 1, False), (GRANT, 1, 1, True)]
            assert events.lost == []
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]

    run(test())


@pytest.mark.parametrize(
    ("src", "dst", "nbytes"),
    [(0, REGION_NBYTES - 3, 4), (REGION_NBYTES - 3, 0, 4), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (2**63 - 1, 0, 1)],
)
def test_a_write_outside_either_region_is_never_begun(src: int, dst: int, nbytes: int) -> None:
    """The good op before the bad one is not copied either; the link stays usable."""

    async def test() -> None:
        async with receiver() as r, linked(r) as (link, events):
            with pytest.raises(WriteOutOfBounds, match="write 1 of 2"):
                link.post(GRANT, ops_of([0, src], [0, dst], [4, nbytes]))
            link.post(GRANT, ops_of([0], [9], [1]))
            await events.until(lambda e: bool(e.completed))
            assert events.completed == [(GRANT, 1, 1, True)]
            assert np.flatnonzero(r.region.array_U8).tolist() == [9]

    run(test())


def test_a_failed_copy_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy thread that breaks must not leave anybody waiting: its batch completes uncopied, the link is lost."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(shm, "copy_checked", fail)

    async def test() -> None:
        async with receiver() as r, linked(r, config=ShmConfig(copy_threads=2)) as (link, events):
            link.post(GRANT, ops_of([0], [0], [1]))
            await events.until(lambda e: bool(e.lost))
            assert events.completed == [(GRANT, 1, 1, False)]
            assert events.lost == [(PAIR, "a copy thread failed")]
            assert seen == [MemoryError]
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]

    run(test())


def test_a_region_that_cannot_be_mapped_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor had arrived; without a mapping BYE is true, and the receiver need not wait for our death."""

    def fail(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shm, "map_region", fail)

    async def test() -> None:
        async with receiver() as r:
            with pytest.raises(ConnectError, match="Cannot allocate memory"):
                async with linked(r):
                    pass
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]

    run(test())


def test_a_forked_child_does_not_inherit_the_mapping() -> None:
    """The kernel marks it "dc": do not copy on fork. The receiver's own mapping is not marked."""

    def marks() -> list[bool]:
        sections = Path("/proc/self/smaps").read_text().split("/memfd:test-region")[1:]
        return [" dc" in next(line for line in s.splitlines() if line.startswith("VmFlags:")) for s in sections]

    async def test() -> None:
        async with receiver() as r, linked(r):
            assert sorted(marks()) == [False, True]

    run(test())


def test_posts_of_another_thread_all_complete_across_a_fence() -> None:
    """The engine posts while the fence comes: each batch completes once, and after the evidence no byte changes."""
    posts = 3_000

    async def test() -> None:
        async with receiver() as r, linked(r, config=ShmConfig(copy_threads=2)) as (link, events):

            def engine() -> None:
                for i in range(posts):
                    link.post(grant_of(i), ops_of([0], [i * 64], [64]))

            thread = threading.Thread(target=engine)
            thread.start()
            await events.until(lambda e: bool(e.completed))
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            at_evidence = r.region.array_U8.copy()
            thread.join()
            await events.until(lambda e: len(e.completed) == posts)
            assert sorted(done[0] for done in events.completed) == [grant_of(i) for i in range(posts)]
            assert np.array_equal(r.region.array_U8, at_evidence)
            copied = sorted(int.from_bytes(done[0], "big") for done in events.completed if done[3])
            assert (np.flatnonzero(at_evidence) // 64).tolist() == [i for i in copied for _ in range(64)]
            assert link.describe()["writes"] == len(copied)

    run(test())
