"""The queue of an rdma link: every write posted once, within the limits, and every batch completed once."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import GrantId
from kvtransfer.transport import WriteOps, WriteOutOfBounds
from kvtransfer.transports import post_queue
from kvtransfer.transports.post_queue import Taken
from kvtransfer.transports.writer_link import Chain, ChainLanes, ChainLimits, SealPart, cut_requests
from tests.support.shm_harness import grant_of, ops_of

NBYTES = 10_000
GRANT, OTHER = grant_of(1), grant_of(2)


class Bench:
    """A queue of which the test is the posting thread and the device."""

    def __init__(self, *, qps: int = 2, send_wrs_max: int = 8, **limits: int) -> None:
        self.qps, self.send_wrs_max = qps, send_wrs_max
        self.limits = ChainLimits(
            **{
                "chain_wrs_max": 4, "chain_bytes_max": 1_000, "wr_bytes_max": 300, "on_the_way_bytes_max": 3_000,
                **limits,
            }
        )  # fmt: skip
        self.completed: list[tuple[GrantId, int, int, bool]] = []
        self.in_doubt: list[tuple[GrantId, int]] = []
        self.wakes = 0
        self.loop = asyncio.new_event_loop()
        self.lanes = ChainLanes(
            limits=self.limits,
            qps=qps,
            send_wrs_max=send_wrs_max,
            src_nbytes=NBYTES,
            dst_nbytes=NBYTES,
            loop=self.loop,
            completed=lambda *reported: self.completed.append(reported),
            in_doubt=lambda grant: self.in_doubt.append((grant, len(self.completed))),
            wake=self._wake,
        )
        self.queue = self.lanes.queue

    def _wake(self) -> None:
        self.wakes += 1

    def take_all(self) -> list[Chain | SealPart]:
        taken = []
        while (item := self.lanes.take()) is not None:
            taken.append(item)
        return taken

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()


def copies(ops: WriteOps) -> dict[int, int]:
    """Source byte of each destination byte."""
    found: dict[int, int] = {}
    for src, dst, nbytes in zip(ops.src.tolist(), ops.dst.tolist(), ops.nbytes.tolist(), strict=True):
        for i in range(nbytes):
            assert dst + i not in found
            found[dst + i] = src + i
    return found


@given(st.lists(st.integers(0, 700), max_size=12), st.randoms(use_true_random=False))
def test_cutting_changes_no_copy(sizes: list[int], rng: random.Random) -> None:
    """Long writes are cut, empty ones dropped; every byte goes from where to where it did, in the same order."""
    starts = np.cumsum([0, *sizes])[:-1].tolist() if sizes else []
    ops = ops_of([rng.randrange(NBYTES - 700) for _ in sizes], starts, sizes)
    cut = cut_requests(ops, 300)
    assert copies(cut) == copies(ops)
    assert all(0 < nbytes <= 300 for nbytes in cut.nbytes.tolist())
    assert cut.dst.tolist() == sorted(cut.dst.tolist())
    assert all(array.flags.c_contiguous for array in (cut.src, cut.dst, cut.nbytes))


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 700), max_size=9)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_everything_is_posted_once_within_the_limits(batches: list[tuple[bool, list[int]]], rng: random.Random) -> None:
    """Batches of two grants, completed in any order: no limit is passed, each batch completes once, as posted, and the
    seal names exactly the queue pairs that its grant's writes took."""
    with Bench() as bench:
        wanted, posted, used = [], [], {GRANT: 0, OTHER: 0}
        dst = 0
        for other, sizes in batches:
            sizes = sizes[: max(0, (NBYTES - dst) // 700)]
            starts = (dst + np.cumsum([0, *sizes])[:-1]).tolist() if sizes else []
            dst += sum(sizes)
            ops = ops_of(starts, starts, sizes)
            grant = OTHER if other else GRANT
            bench.queue.post(grant, ops)
            wanted.append((grant, len(sizes), sum(sizes), True))
        out: list[Chain | SealPart] = []
        while True:
            out += bench.take_all()
            chains = [item for item in out if isinstance(item, Taken)]
            assert len(chains) == len(out)
            for qp in range(bench.qps):
                assert sum(len(c.part.ops.src) for c in chains if c.lane == qp) < bench.send_wrs_max
            assert sum(c.part.nbytes for c in chains) < bench.limits.on_the_way_bytes_max + bench.limits.chain_bytes_max
            for c in chains:
                assert 0 < len(c.part.ops.src) <= bench.limits.chain_wrs_max
                assert c.part.nbytes <= bench.limits.chain_bytes_max
            if not out:
                break
            done = out.pop(rng.randrange(len(out)))
            assert isinstance(done, Taken)
            posted += list(copies(done.part.ops))
            used[done.batch.grant] |= 1 << done.lane
            bench.lanes.completed(done.number)
        bench.settle()
        assert sorted(posted) == list(range(dst))
        assert sorted(bench.completed) == sorted(wanted)
        for number, grant in enumerate((GRANT, OTHER), start=1):
            mask = bench.lanes.seal(number, grant)
            assert mask == (used[grant] or 1)
            parts = bench.take_all()
            assert all(isinstance(part, SealPart) and part.seal == number for part in parts)
            assert sum(1 << part.lane for part in parts) == mask
            for part in parts:
                bench.lanes.completed(part.number)
        assert bench.lanes.drained


def test_a_seal_finds_room_when_the_queue_pairs_are_full() -> None:
    """The last place of each queue pair is kept for it, and it goes before the writes that wait."""
    with Bench(on_the_way_bytes_max=NBYTES) as bench:
        bench.queue.post(GRANT, ops_of([0], [0], [10]))
        (first,) = bench.take_all()
        bench.lanes.completed(first.number)
        bench.settle()
        bench.queue.post(OTHER, ops_of([0] * 40, list(range(40)), [1] * 40))
        full = bench.take_all()
        assert sum(len(chain.part.ops.src) for chain in full if isinstance(chain, Taken)) == 8
        assert bench.lanes.seal(1, GRANT) == 1
        assert [part.seal for part in bench.take_all() if isinstance(part, SealPart)] == [1]


def test_an_abandoned_grant_is_taken_no_further() -> None:
    """What the device has is waited for, the rest is left out; a batch that comes later completes at once."""
    with Bench() as bench:
        bench.queue.post(GRANT, ops_of([0] * 30, list(range(0, 9_000, 300)), [300] * 30))
        bench.queue.post(GRANT, ops_of([0], [0], [5]))
        out = bench.take_all()
        assert out
        bench.queue.abandon(GRANT)
        assert bench.take_all() == []
        bench.settle()
        assert bench.completed == [(GRANT, 1, 5, False)]
        for item in out:
            bench.lanes.completed(item.number)
        bench.queue.post(GRANT, ops_of([0], [0], [7]))
        bench.settle()
        assert bench.completed[1:] == [(GRANT, 30, 9_000, False), (GRANT, 1, 7, False)]
        bench.queue.forget(GRANT)
        bench.queue.post(GRANT, ops_of([0], [0], [8]))
        (item,) = bench.take_all()
        bench.lanes.completed(item.number)
        bench.settle()
        assert bench.completed[3] == (GRANT, 1, 8, True)


def test_too_many_abandoned_grants_stop_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """None may be forgotten: everything is stopped instead, and completes."""
    monkeypatch.setattr(post_queue, "ABANDONED_GRANTS_MAX", 2)
    with Bench() as bench:
        bench.queue.post(OTHER, ops_of([0], [0], [5]))
        bench.queue.abandon(grant_of(11))
        bench.queue.abandon(grant_of(12))
        assert not bench.queue.abandon(grant_of(13))
        bench.settle()
        assert bench.completed == [(OTHER, 1, 5, False)]
        assert bench.lanes.drained


def test_what_was_on_its_way_completes_uncopied_when_the_queue_pairs_are_gone() -> None:
    """A batch half landed, one that waits, and a seal: both batches complete, not copied; nothing is left. What the
    device had and did not complete is in doubt, which is told first; what it never had is not."""
    with Bench() as bench:
        bench.queue.post(GRANT, ops_of([0] * 8, list(range(0, 2_400, 300)), [300] * 8))
        bench.queue.post(OTHER, ops_of([0], [0], [5]))
        out = bench.take_all()
        bench.lanes.completed(out[0].number)
        bench.lanes.seal(1, grant_of(9))
        bench.lanes.lose()
        bench.settle()
        assert sorted(bench.completed) == [(GRANT, 8, 2_400, False), (OTHER, 1, 5, False)]
        # The other grant's batch was taken too: there was room for it.
        assert sorted(bench.in_doubt) == [(GRANT, 0), (OTHER, 0)]
        assert bench.lanes.drained
        assert bench.take_all() == []


def test_nothing_is_adrift_that_the_device_has_completed_or_never_had() -> None:
    """One batch has landed, one waits for room behind it: both complete, and no word of in-doubt writes."""
    with Bench(send_wrs_max=3, qps=1) as bench:
        bench.queue.post(GRANT, ops_of([0, 0], [0, 300], [300, 300]))
        bench.queue.post(OTHER, ops_of([0], [0], [5]))
        out = bench.take_all()
        bench.lanes.completed(out[0].number)
        assert len(out) == 1
        bench.lanes.lose()
        bench.settle()
        assert sorted(bench.completed) == [(GRANT, 2, 600, True), (OTHER, 1, 5, False)]
        assert bench.in_doubt == []


def test_writes_outside_the_regions_are_not_taken() -> None:
    with Bench() as bench:
        with pytest.raises(WriteOutOfBounds):
            bench.queue.post(GRANT, ops_of([0], [NBYTES], [1]))
        bench.settle()
        assert bench.completed == [] and bench.wakes == 0 and bench.lanes.drained
