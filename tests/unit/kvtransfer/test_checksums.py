"""Sampled checksums: who is in the sample, what a CRC is of, what counts as a difference. And the thread that reads."""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from batonpb import common_pb2, transfer_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId, Epoch, GrantId, ReserveNumber
from cachestore.layout import Layout, kv_layout
from kvtransfer import checksums
from kvtransfer.checksums import (
    CHECKSUM_RECORDS_MAX,
    CORRUPT_NAMED_MAX,
    ChecksumThread,
    RecordChecks,
    RecordChecksums,
    SourceSample,
    checksums_from_proto,
    crcs,
    differing,
    in_sample,
    sample_fraction,
)
from kvtransfer.link import PairSpeed
from kvtransfer.protocol.receiver import AnswerCommit, RecordsChecked, ReportCorrupt
from kvtransfer.protocol.writer import GiveUp, HandoffEnd, SendCommit, WriterEvent
from kvtransfer.status import WriterPlace
from kvtransfer.transport import RecordPlan, Seal, TransportName, WriteOps
from kvtransfer.writer import StepWrites, WriterConfig, WriterPeer
from tests.support.grant_scripts import PAIR as SCRIPT_PAIR
from tests.support.grant_scripts import Receiver as Script
from tests.support.grant_scripts import grant_of as script_grant
from tests.support.grant_scripts import key_of
from tests.support.write_ops import whole_records

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="uint8", dtype_bytes=1)
BLOCKS = 8
GRANT = GrantId(bytes(range(16)))
grants = st.binary(min_size=16, max_size=16).map(GrantId)


def random_region(seed: int, layout: Layout = LAYOUT, blocks: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, layout.region_bytes(blocks), dtype=np.uint8)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


def sums(layers: list[int], blocks: list[int], values: list[int]) -> RecordChecksums:
    return RecordChecksums(
        layers_R=np.array(layers, np.uint32), blocks_R=np.array(blocks, np.uint32), crcs_R=np.array(values, np.uint32)
    )


# The sample.


@given(grant=grants, layer=st.integers(0, 200), blocks=st.lists(st.integers(0, 2**32 - 1), min_size=1, unique=True))
def test_all_or_none_at_the_ends(grant: GrantId, layer: int, blocks: list[int]) -> None:
    assert in_sample(grant, layer, ids(*blocks), 1.0).all()
    assert not in_sample(grant, layer, ids(*blocks), 0.0).any()


@given(
    grant=grants,
    layer=st.integers(0, 200),
    blocks=st.lists(st.integers(0, 2**32 - 1), min_size=2, unique=True),
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_the_sample_is_a_matter_of_each_record(
    grant: GrantId, layer: int, blocks: list[int], fractions: tuple[float, float]
) -> None:
    """Whether a record is in it does not depend on the chunk that it is sent with, and a larger fraction only adds."""
    small, large = sorted(fractions)
    together = in_sample(grant, layer, ids(*blocks), large)
    apart = [bool(in_sample(grant, layer, ids(block), large)[0]) for block in blocks]
    assert together.tolist() == apart
    assert not (in_sample(grant, layer, ids(*blocks), small) & ~together).any()


def test_a_sample_is_about_as_large_as_asked_and_another_for_each_grant() -> None:
    """One in ten of 100 layers and 1,000 blocks, for two grants: within five standard deviations, and they share no
    more than chance would have it."""
    blocks = np.arange(1_000, dtype=np.int64)
    one, other = (
        np.concatenate([in_sample(grant, layer, blocks, 0.1) for layer in range(100)])
        for grant in (GRANT, GrantId(GRANT[:15] + b"\0"))
    )
    for drawn in (one, other):
        assert abs(int(drawn.sum()) - 10_000) < 475
    assert abs(int((one & other).sum()) - 1_000) < 160
    per_layer = one.reshape(100, 1_000).sum(axis=1)
    assert per_layer.min() > 50, "a layer is hardly ever looked at"


@given(fraction=st.floats(0, 1), records=st.integers(0, 10**7))
def test_the_fraction_keeps_to_the_limit_of_a_commit(fraction: float, records: int) -> None:
    used = sample_fraction(fraction, records)
    assert used <= fraction
    assert used * records <= CHECKSUM_RECORDS_MAX
    assert used == fraction or records * fraction > CHECKSUM_RECORDS_MAX * 0.9


# What is summed.


@given(seed=st.integers(0, 99), src=st.permutations(range(BLOCKS)), dst=st.permutations(range(BLOCKS)))
def test_whole_records_have_the_same_sum_on_both_sides(seed: int, src: list[int], dst: list[int]) -> None:
    """Copy as the write operations say: the receiver's sums are the writer's, and they are zlib's of the bytes."""
    source, target = random_region(seed), np.zeros(LAYOUT.region_bytes(BLOCKS), np.uint8)
    ops = whole_records(LAYOUT, 1, ids(*src), ids(*dst), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS)
    for a, b, n in zip(ops.src, ops.dst, ops.nbytes, strict=True):
        target[b : b + n] = source[a : a + n]
    sent = sums([1] * BLOCKS, dst, crcs(source.data, ops.src, ops.nbytes).tolist())
    assert sent.crcs_R.tolist() == [zlib.crc32(source[a : a + LAYOUT.record_bytes].tobytes()) for a in ops.src]
    found = crcs(target.data, sent.offsets(LAYOUT, BLOCKS), sent.nbytes(LAYOUT))
    assert differing(sent, found) is None


@given(
    seed=st.integers(0, 99),
    layer=st.integers(0, 2),
    block=st.integers(0, BLOCKS - 1),
    byte=st.integers(0, LAYOUT.record_bytes - 1),
    bits=st.integers(1, 255),
)
def test_a_wrong_byte_anywhere_is_found_and_named(seed: int, layer: int, block: int, byte: int, bits: int) -> None:
    region = random_region(seed)
    layers, blocks = np.repeat(np.arange(3), BLOCKS).tolist(), list(range(BLOCKS)) * 3
    blank = sums(layers, blocks, [0] * len(blocks))
    offsets, nbytes = blank.offsets(LAYOUT, BLOCKS), blank.nbytes(LAYOUT)
    sent = sums(layers, blocks, crcs(region.data, offsets, nbytes).tolist())
    region[(layer * BLOCKS + block) * LAYOUT.record_bytes + byte] ^= bits
    corrupt = differing(sent, crcs(region.data, offsets, nbytes))
    assert corrupt is not None
    assert (corrupt.checked, corrupt.count, corrupt.named) == (24, 1, f"{layer}/{block}")


def test_many_differences_are_counted_and_some_are_named() -> None:
    sent = sums([0] * 20, list(range(20)), [1] * 20)
    corrupt = differing(sent, np.zeros(20, np.uint32))
    assert corrupt is not None
    assert (corrupt.count, len(corrupt.named.split())) == (20, CORRUPT_NAMED_MAX)
    assert corrupt.named == "0/0 0/1 0/2 0/3 0/4 0/5 0/6 0/7"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (sums([0], [3, 4], [1, 2]), "1 layers, 2 blocks"),
        (sums([3], [3], [1]), "layer 3 of 3"),
        (sums([0, 0], [3, 5], [1, 1]), "block 5"),
        (sums([0] * (CHECKSUM_RECORDS_MAX + 1), [3] * (CHECKSUM_RECORDS_MAX + 1), [1] * (CHECKSUM_RECORDS_MAX + 1)),
         f"at most {CHECKSUM_RECORDS_MAX}"),
    ],
)  # fmt: skip
def test_checksums_that_cannot_be_of_this_grant_are_refused(sent: RecordChecksums, says: str) -> None:
    assert says in (sent.problem(LAYOUT, [BlockId(3), BlockId(4)]) or "")
    assert sums([2], [4], [1]).problem(LAYOUT, [BlockId(3), BlockId(4)]) is None


def test_a_commit_without_checksums_asks_for_no_comparison() -> None:
    assert len(checksums_from_proto(transfer_pb2.CommitRequest())) == 0
    request = transfer_pb2.CommitRequest(checksum_layers=[1], checksum_blocks=[2], checksums=[2**32 - 1])
    found = checksums_from_proto(request)
    assert (found.layers_R.tolist(), found.blocks_R.tolist(), found.crcs_R.tolist()) == ([1], [2], [2**32 - 1])


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan")])
def test_a_fraction_outside_of_0_and_1_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidField, match="between 0 and 1"):
        WriterConfig(checksum_fraction=fraction)


# The writer's sample, and its thread.


class Gate:
    """In the thread's way: nothing is read before `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.threads: set[str] = set()
        real = crcs

        def held(*args: object) -> object:
            assert self.open.wait(30)
            self.threads.add(threading.current_thread().name)
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(checksums, "crcs", held)


def test_chunks_add_up_and_sources_are_held_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of three layers, taken while the thread is busy: `take` returns at once, the sources are let go only
    when all has been read, and the checksums are those of every record, whatever chunk it came with."""
    gate = Gate(monkeypatch)
    region = random_region(7)

    async def scene() -> None:
        thread = ChecksumThread(region, name="test")
        try:
            sample = SourceSample(thread, GRANT, fraction=1.0, records=15)
            src, dst = [5, 1, 2, 7, 0], [0, 3, 4, 6, 7]
            for chunk in (slice(0, 2), slice(2, 5)):
                for layer in range(3):
                    ops = whole_records(
                        LAYOUT, layer, ids(*src[chunk]), ids(*dst[chunk]), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS
                    )
                    sample.take(layer, ids(*dst[chunk]), ops)
            released = asyncio.Event()
            sample.settled(asyncio.get_running_loop(), released.set)
            waiting = asyncio.ensure_future(sample.checksums())
            await asyncio.sleep(0)
            assert not released.is_set()
            assert not waiting.done()
            gate.open.set()
            async with asyncio.timeout(30):
                found = await waiting
                await released.wait()
            assert sample.records == len(found) == 15
            assert LAYOUT.record_bytes == 64
            want = {
                (layer, d): zlib.crc32(region[(layer * BLOCKS + s) * 64 : (layer * BLOCKS + s + 1) * 64].tobytes())
                for layer in range(3)
                for s, d in zip(src, dst, strict=True)
            }
            reported = zip(found.layers_R.tolist(), found.blocks_R.tolist(), found.crcs_R.tolist(), strict=True)
            assert {(layer, block): crc for layer, block, crc in reported} == want
            assert gate.threads == {"checksum-test_0"}
            again = asyncio.Event()
            sample.settled(asyncio.get_running_loop(), again.set)
            assert again.is_set(), "nothing is being read: the sources go at once"
        finally:
            gate.open.set()
            thread.close()

    asyncio.run(scene())


def test_a_sample_that_has_been_read_costs_the_commit_no_turn_of_the_loop() -> None:
    thread = ChecksumThread(random_region(1), name="test")
    sample = SourceSample(thread, GRANT, fraction=1.0, records=6)
    for layer in range(3):
        ops = whole_records(LAYOUT, layer, ids(1, 2), ids(3, 4), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS)
        sample.take(layer, ids(3, 4), ops)
    thread.close()
    with pytest.raises(StopIteration) as at_once:
        sample.checksums().send(None)
    assert len(at_once.value.value) == 6


def test_an_empty_sample_holds_nothing() -> None:
    async def scene() -> None:
        thread = ChecksumThread(random_region(1), name="test")
        sample = SourceSample(thread, GRANT, fraction=0.0, records=24)
        ops = whole_records(LAYOUT, 0, ids(1, 2), ids(3, 4), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS)
        sample.take(0, ids(3, 4), ops)
        released = asyncio.Event()
        sample.settled(asyncio.get_running_loop(), released.set)
        assert released.is_set()
        assert len(await sample.checksums()) == 0
        thread.close()

    asyncio.run(scene())


def test_a_sample_never_outgrows_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More records come than were announced: the sample stops at the limit."""
    monkeypatch.setattr(checksums, "CHECKSUM_RECORDS_MAX", 3)

    async def scene() -> None:
        thread = ChecksumThread(random_region(1), name="test")
        sample = SourceSample(thread, GRANT, fraction=1.0, records=1)
        for layer in range(3):
            ops = whole_records(LAYOUT, layer, ids(1, 2), ids(3, 4), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS)
            sample.take(layer, ids(3, 4), ops)
        found = await sample.checksums()
        assert (found.layers_R.tolist(), found.blocks_R.tolist()) == ([0, 0, 1], [3, 4, 3])
        thread.close()

    asyncio.run(scene())


def test_a_source_that_cannot_be_read_ends_the_handoff(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device fails while the writer reads its sample: no Commit is sent, and the handoff ends at once. Its sources
    are released all the same."""

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(checksums, "crcs", broken)

    async def scene() -> None:
        thread = ChecksumThread(random_region(1), name="test")
        sample = SourceSample(thread, GRANT, fraction=1.0, records=24)
        ops = whole_records(LAYOUT, 0, ids(1, 2), ids(3, 4), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS)
        sample.take(0, ids(3, 4), ops)
        happened: list[WriterEvent] = []
        handoff = SimpleNamespace(key=key_of(), sample=sample, first_token=1, first_logprobs=None, blocks_filled=0)
        peer = SimpleNamespace(_handoffs={0: handoff}, _header=common_pb2.Header(), handle=happened.append)
        seal = Seal(grant=GRANT, epoch=Epoch(0), writes=2, bytes_written=128)
        commit = SendCommit(number=ReserveNumber(0), seal=seal)
        await WriterPeer._commit(cast(Any, peer), commit)
        assert happened == [GiveUp(number=ReserveNumber(0), end=HandoffEnd.LINK_LOST)]
        released = asyncio.Event()
        sample.settled(asyncio.get_running_loop(), released.set)
        assert released.is_set()
        thread.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scene())
    assert [record.getMessage() for record in caplog.records] == ["reading a handoff's sample failed"]


# The receiver's comparison.


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
def test_the_receiver_says_what_it_found_and_remembers_it(
    inline_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small sample on the control thread, a large one on the other: the same word about each grant, and the error is
    there for every repeat of the Commit until the grant is forgotten."""
    monkeypatch.setattr("kvtransfer.checksums.INLINE_BYTES_MAX", inline_bytes_max)
    threads: list[str] = []
    real_submit = ChecksumThread.submit

    def submit(self: ChecksumThread, *args: Any) -> Future[np.ndarray]:
        threads.append("other")
        return real_submit(self, *args)

    monkeypatch.setattr(ChecksumThread, "submit", submit)
    region = random_region(3)
    good = crcs(region.data, sums([0, 2], [1, 4], [0, 0]).offsets(LAYOUT, BLOCKS), ids(64, 64)).tolist()
    one, other = GRANT, GrantId(bytes(16))

    async def scene() -> None:
        checks = RecordChecks(ChecksumThread(region, name="test"), LAYOUT, num_blocks=BLOCKS)
        reported: list[RecordsChecked] = []
        blocks = [BlockId(1), BlockId(4)]
        checks.keep(one, sums([0, 2], [1, 4], good), blocks)
        checks.keep(other, sums([0, 2], [1, 4], [good[0], good[1] ^ 1]), blocks)
        await checks.run(one, reported.append)
        await checks.run(other, reported.append)
        assert reported == [RecordsChecked(grant=one, intact=True), RecordsChecked(grant=other, intact=False)]
        assert checks.records == 4
        for _ in range(2):
            error = checks.error(other)
            assert error.reason is Reason.DATA_CORRUPT
            assert error.metadata["layer_block"] == "2/4"
        checks.forget(other)
        with pytest.raises(KeyError):
            checks.error(other)
        with pytest.raises(BatonError, match="block 5"):
            checks.keep(other, sums([0], [5], [0]), blocks)
        checks.close()

    asyncio.run(scene())
    assert threads == ([] if inline_bytes_max else ["other", "other"])


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
def test_a_grant_that_is_forgotten_is_compared_for_nobody(meanwhile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer is fenced and its books are closed before the comparison begins, or while the other thread reads:
    nothing breaks off, nothing is said or counted, and nothing is kept of it, though its records differ."""
    monkeypatch.setattr("kvtransfer.checksums.INLINE_BYTES_MAX", 0)
    gate = Gate(monkeypatch)

    async def scene() -> None:
        checks = RecordChecks(ChecksumThread(random_region(3), name="test"), LAYOUT, num_blocks=BLOCKS)
        reported: list[RecordsChecked] = []
        try:
            checks.keep(GRANT, sums([0], [1], [0]), [BlockId(1)])
            running = asyncio.ensure_future(checks.run(GRANT, reported.append))
            if meanwhile:
                await asyncio.sleep(0)
                assert not running.done()
            checks.forget(GRANT)
            gate.open.set()
            await running
            assert (reported, checks.records) == ([], 0)
            with pytest.raises(KeyError):
                checks.error(GRANT)
        finally:
            gate.open.set()
            checks.close()

    asyncio.run(scene())


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
def test_records_that_cannot_be_read_end_the_handoff_with_an_error(
    inline_bytes_max: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device fails while the receiver reads the sample. The grant is over, the Commit and each repeat of it get an
    error that says so, and nobody is told that bytes were corrupt."""
    monkeypatch.setattr("kvtransfer.checksums.INLINE_BYTES_MAX", inline_bytes_max)

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(checksums, "crcs", broken)

    async def scene() -> None:
        checks = RecordChecks(ChecksumThread(random_region(3), name="test"), LAYOUT, num_blocks=BLOCKS)
        script = Script()
        script.reserve(key=key_of())
        script.seal()
        grant = script_grant(0)
        blocks = script.machine.blocks_uncommitted(grant, SCRIPT_PAIR)
        assert blocks is not None
        checks.keep(grant, sums([0], [blocks[0]], [0]), blocks)
        script.commit(sampled=True)
        reported: list[RecordsChecked] = []
        await checks.run(grant, reported.append)
        assert reported == [RecordsChecked(grant=grant, intact=False)]
        (report, answer) = [
            i for i in script.machine.handle(reported[0]) if isinstance(i, ReportCorrupt | AnswerCommit)
        ]  # fmt: skip
        assert isinstance(report, ReportCorrupt)
        checks.report(report, WriterPlace(endpoint="", name="prefill-0", host="", transport=TransportName.TCP))
        assert answer == AnswerCommit(pair=SCRIPT_PAIR, grant=grant, committed=False, corrupt=True)
        for _ in range(2):
            error = checks.error(grant)
            assert (error.reason, "could not be read" in error.message) == (Reason.HANDOFF_FAILED, True)
        assert (checks.records, checks.corrupt) == (0, {})
        checks.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scene())
    assert [record.getMessage() for record in caplog.records] == ["comparing records failed"]


def test_a_post_whose_sample_fails_is_still_posted() -> None:
    """No thread can be started for the checksums. The transport has the records all the same, and will say when it has
    let go of them: they must not count as dropped besides."""
    dropped: list[int] = []
    posted: list[WriteOps] = []

    class Broken:
        def take(self, *_: object) -> None:
            raise RuntimeError("can't start new thread")

    peer = SimpleNamespace(
        link=SimpleNamespace(speed=PairSpeed()),
        loop=SimpleNamespace(time=lambda: 0.0),
        layout=LAYOUT,
        completed=lambda _handoff, writes: dropped.append(writes),
    )
    handoff = SimpleNamespace(peer=peer, grant=GRANT, sample=Broken(), steps=set())
    step = StepWrites(
        handoff=cast(Any, handoff),
        link=cast(Any, SimpleNamespace(post=lambda _grant, ops: posted.append(ops))),
        plan=RecordPlan(LAYOUT, ids(1, 2), ids(3, 4), src_num_blocks=BLOCKS, dst_num_blocks=BLOCKS),
    )
    with pytest.raises(RuntimeError):
        step.layer_done(0)
    step.finish()
    assert len(posted) == 1
    assert dropped == [4], "the two layers that were never posted, of two records each"
