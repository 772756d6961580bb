"""The shm transport between real processes: copies land, and evidence is evidence."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.region import Region
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps
from kvtransfer.transports import shm
from kvtransfer.transports.shm import ShmLinkLimits, ShmWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import (
    DEADLINE_S,
    REGION_NBYTES,
    Gate,
    Recorder,
    child,
    grant_of,
    ops_of,
    pair_of,
    receiver,
    run,
    to_json,
)
from tests.support.shm_peer import source_bytes

RECORD_NBYTES = 4096
RECORDS = REGION_NBYTES // RECORD_NBYTES
EPOCH = Epoch(3)
GRANT = grant_of(7)


def record_ops(seed: int, count: int = RECORDS // 2) -> WriteOps:
    """Records from random places to random other places, none written twice."""
    rng = np.random.default_rng(seed)
    src = rng.permutation(RECORDS)[:count].astype(np.int64) * RECORD_NBYTES
    dst = rng.permutation(RECORDS)[:count].astype(np.int64) * RECORD_NBYTES
    return WriteOps(src=src, dst=dst, nbytes=np.full(count, RECORD_NBYTES, np.int64))


def expected_region(source_U8: np.ndarray, *batches: WriteOps) -> np.ndarray:
    region_U8 = np.zeros(REGION_NBYTES, np.uint8)
    for ops in batches:
        for src, dst, nbytes in zip(ops.src, ops.dst, ops.nbytes, strict=True):
            region_U8[dst : dst + nbytes] = source_U8[src : src + nbytes]
    return region_U8


class SealSnapshots(Recorder):
    """Copies the region in the moment in which a seal is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.region: Region | None = None
        self.snapshots: list[np.ndarray] = []

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        assert self.region is not None
        self.snapshots.append(self.region.array_U8.copy())
        super().seal_landed(pair, seal)


@pytest.mark.parametrize("copy_threads", [1, 3])
def test_scattered_records_have_landed_when_the_seal_arrives(copy_threads: int) -> None:
    """Whole records, part records and an empty batch; at the seal the region is exactly what the ops say."""
    equal = record_ops(1, 100)
    # With several threads the batches may be copied in any order, so they write to different records.
    free = sorted(set(range(RECORDS)) - set((equal.dst // RECORD_NBYTES).tolist()))
    odd = ops_of([5, 1_000, 0], [free[0] * RECORD_NBYTES + 1, free[1] * RECORD_NBYTES, 0], [7, RECORD_NBYTES - 1, 0])

    async def test() -> None:
        events = SealSnapshots()
        async with receiver(events=events) as r, child() as writer:
            events.region = r.region
            pair = pair_of(2)
            endpoint = r.port.expect(pair, EPOCH)
            assert await writer.link("a", endpoint, pair, seed=5, copy_threads=copy_threads) == "linked"
            for ops in (equal, odd, ops_of([], [], [])):
                await writer.post("a", GRANT, ops)
            done = [await writer.event("completed") for _ in range(3)]
            assert sorted((e["writes"], e["bytes"], e["copied"]) for e in done) == [
                (0, 0, True),
                (3, RECORD_NBYTES + 6, True),
                (100, 100 * RECORD_NBYTES, True),
            ]
            await writer.ask("seal", name="a", grant=GRANT.hex(), epoch=EPOCH, writes=103, bytes_written=11)
            await events.until(lambda e: len(e.seals) == 1)
            assert events.seals == [(pair, Seal(grant=GRANT, epoch=EPOCH, writes=103, bytes_written=11))]
            wanted = expected_region(source_bytes(5, REGION_NBYTES), equal, odd)
            assert np.array_equal(events.snapshots[0], wanted)
            assert await writer.ask("close", name="a") is True
            assert r.port.describe()["connections_writing"] == 0

    run(test())


def test_a_writer_killed_in_mid_batch_is_gone_by_its_pidfd_and_writes_no_more() -> None:
    """SIGKILL with a long queue of copies: the death is reported unasked, and from then on no byte changes."""

    async def test() -> None:
        async with receiver() as r, child() as writer:
            pair = pair_of(2)
            await writer.link("a", r.port.expect(pair, EPOCH), pair, copy_chunk_ops_max=4)
            await writer.post("a", GRANT, record_ops(1), times=5_000)
            await writer.event("completed")
            writer.signal(signal.SIGKILL)
            await r.events.until(lambda e: bool(e.gone))
            at_evidence = r.region.array_U8.copy()
            assert r.events.gone == [(pair, EPOCH, f"1 dead, by pidfd (pid {writer.process.pid})")]
            assert at_evidence.any()
            writer.process.wait()
            assert np.array_equal(r.region.array_U8, at_evidence)
            # Asked again, the port still answers, and still only once.
            r.port.fence(pair, EPOCH)
            await r.events.until(lambda e: len(e.gone) == 2)
            assert r.events.gone[1] == (pair, EPOCH, "no connection that could write")

    run(test())


def test_a_stopped_writer_gives_no_evidence_until_it_runs_again() -> None:
    """SIGSTOP, then a fence: another writer's fence completes meanwhile, this one's only after SIGCONT, by BYE."""

    async def test() -> None:
        async with receiver() as r, child() as stopped, child() as other:
            pair, other_pair = pair_of(2), pair_of(3)
            await stopped.link("a", r.port.expect(pair, EPOCH), pair, copy_chunk_ops_max=4)
            await other.link("b", r.port.expect(other_pair, EPOCH), other_pair)
            await stopped.post("a", GRANT, record_ops(1), times=5_000)
            await stopped.event("completed")
            stopped.stop()
            r.port.fence(pair, EPOCH)
            r.port.fence(other_pair, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(other_pair, EPOCH, "1 acknowledged")]
            assert r.port.describe()["fences_waiting"] == 1
            stopped.signal(signal.SIGCONT)
            await r.events.until(lambda e: len(e.gone) == 2)
            at_evidence = r.region.array_U8.copy()
            assert r.events.gone[1] == (pair, EPOCH, "1 acknowledged")
            lost = await stopped.event("lost")
            assert lost["reason"] == f"fenced by the receiver up to epoch {EPOCH}"
            assert await stopped.ask("maps", text="test-region") == 0
            assert np.array_equal(r.region.array_U8, at_evidence)

    run(test())


def test_a_stopped_writer_that_is_killed_gives_evidence() -> None:
    """The quarantine's last resort: SIGKILL ends a stopped process too. One fence, of a later epoch: one answer."""
    later = Epoch(EPOCH + 2)

    async def test() -> None:
        async with receiver() as r, child() as writer:
            pair = pair_of(2)
            await writer.link("a", r.port.expect(pair, EPOCH), pair)
            writer.stop()
            r.port.fence(pair, later)
            writer.signal(signal.SIGKILL)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(pair, later, f"1 dead, by pidfd (pid {writer.process.pid})")]

    run(test())


def test_a_closed_socket_is_no_evidence() -> None:
    """A writer closes its socket without BYE and writes on: fenced or not, only its death counts."""

    async def test() -> None:
        async with receiver() as r, child() as writer:
            pair, nobody = pair_of(2), pair_of(3)
            await writer.ask("raw", endpoint=to_json(r.port.expect(pair, EPOCH)), pair=[pair.receiver, pair.writer])
            await writer.ask("raw_close_socket")
            r.port.fence(pair, EPOCH)
            r.port.fence(nobody, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(nobody, EPOCH, "no connection that could write")]
            await writer.ask("raw_write", offset=99, value=201)
            assert r.region.array_U8[99] == 201
            assert r.port.describe()["connections_unproved"] == 1
            writer.signal(signal.SIGKILL)
            await r.events.until(lambda e: len(e.gone) == 2)
            assert r.events.gone[1] == (pair, EPOCH, f"1 dead, by pidfd (pid {writer.process.pid})")
            assert r.port.describe()["connections_unproved"] == 0

    run(test())


def test_a_stopped_writer_does_not_hold_up_another() -> None:
    """While one writer stands still in mid-batch, the other's records land and its seal arrives."""

    async def test() -> None:
        async with receiver() as r, child() as stopped, child() as other:
            pair, other_pair = pair_of(2), pair_of(3)
            await stopped.link("a", r.port.expect(pair, EPOCH), pair)
            await other.link("b", r.port.expect(other_pair, EPOCH), other_pair, seed=9)
            stopped.stop()
            await other.post("b", GRANT, record_ops(1))
            assert (await other.event("completed"))["copied"] is True
            await other.ask("seal", name="b", grant=GRANT.hex(), epoch=EPOCH, writes=1, bytes_written=1)
            await r.events.until(lambda e: bool(e.seals))
            assert r.events.seals[0][0] == other_pair
            wanted = expected_region(source_bytes(9, REGION_NBYTES), record_ops(1))
            assert np.array_equal(r.region.array_U8, wanted)

    run(test())


def test_after_a_fence_only_the_next_epoch_connects() -> None:
    """The fenced link is lost; its endpoint is refused from then on; a new epoch links the same pair again."""

    async def test() -> None:
        async with receiver() as r, child() as writer:
            pair = pair_of(2)
            old = r.port.expect(pair, EPOCH)
            await writer.link("old", old, pair)
            r.port.fence(pair, EPOCH)
            assert await writer.link("older", old, pair) == "NOT_EXPECTED"
            await r.events.until(lambda e: bool(e.gone))
            assert await writer.link("older", old, pair) == "NOT_EXPECTED"
            new = r.port.expect(pair, Epoch(EPOCH + 1))
            assert new.secret != old.secret
            assert await writer.link("older", old, pair) == "EPOCH"
            assert await writer.link("new", new, pair, seed=4) == "linked"
            await writer.post("new", GRANT, record_ops(2))
            assert (await writer.event("completed"))["copied"] is True
            assert np.array_equal(r.region.array_U8, expected_region(source_bytes(4, REGION_NBYTES), record_ops(2)))
            assert r.events.gone_epochs == [(pair, EPOCH)]
            assert r.port.describe()["refused"] == {"EPOCH": 1, "NOT_EXPECTED": 2}

    run(test())


def test_a_killed_receiver_loses_the_link_and_every_batch_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver dies with one copy under way, others queued: each completes exactly once, then the link is lost."""
    gate = Gate(monkeypatch)

    async def test() -> None:
        async with child() as peer:
            pair, events = pair_of(2), Recorder()
            reported = await peer.ask("receive", nbytes=REGION_NBYTES, pair=[pair.receiver, pair.writer], epoch=EPOCH)
            endpoint = DataEndpoint(
                transport=TransportName.SHM,
                address=reported["address"],
                secret=bytes.fromhex(reported["secret"]),
                epoch=EPOCH,
            )
            loop, source_U8 = asyncio.get_running_loop(), source_bytes(1, REGION_NBYTES)
            link = await ShmWriterLink.connect(LinkParts(endpoint, pair, events, loop), source_U8)
            for i in range(4):
                link.post(grant_of(i), record_ops(1, 10))
            assert gate.reached.wait(DEADLINE_S)
            peer.signal(signal.SIGKILL)
            await events.until(lambda e: len(e.completed) == 3)
            assert events.completed == [(grant_of(i), 10, 10 * RECORD_NBYTES, False) for i in (1, 2, 3)]
            assert not events.lost
            gate.open.set()
            await events.until(lambda e: bool(e.lost))
            assert events.lost == [(pair, "the receiver closed the connection or died")]
            assert events.completed[3:] == [(grant_of(0), 10, 10 * RECORD_NBYTES, True)]
            link.post(GRANT, record_ops(1, 20))
            await events.until(lambda e: len(e.completed) == 5)
            assert events.completed[4] == (GRANT, 20, 20 * RECORD_NBYTES, False)
            await link.close()
            with pytest.raises(ConnectError):
                await ShmWriterLink.connect(LinkParts(endpoint, pair, events, loop), source_U8)

    run(test())


def test_seals_wait_for_a_stopped_receiver_within_their_limit() -> None:
    """A receiver that stands still fills the socket; seals wait in order and arrive when it runs again."""

    async def test() -> None:
        async with child() as peer:
            pair, events = pair_of(2), Recorder()
            reported = await peer.ask("receive", nbytes=REGION_NBYTES, pair=[pair.receiver, pair.writer], epoch=EPOCH)
            endpoint = DataEndpoint(
                transport=TransportName.SHM,
                address=reported["address"],
                secret=bytes.fromhex(reported["secret"]),
                epoch=EPOCH,
            )
            loop, source_U8 = asyncio.get_running_loop(), source_bytes(1, REGION_NBYTES)
            limits = ShmLinkLimits(seals_waiting_max=10)
            link = await ShmWriterLink.connect(LinkParts(endpoint, pair, events, loop), source_U8, limits=limits)
            peer.stop()
            sent: list[GrantId] = []
            while link.describe()["seals_waiting"] != 10:
                sent.append(grant_of(len(sent)))
                link.seal(Seal(grant=sent[-1], epoch=EPOCH, writes=0, bytes_written=0))
            peer.signal(signal.SIGCONT)
            assert [(await peer.event("seal"))["grant"] for _ in sent] == [grant.hex() for grant in sent]
            assert link.describe()["seals_waiting"] == 0

            peer.stop()
            while link.describe()["state"] == "open":
                link.seal(Seal(grant=GRANT, epoch=EPOCH, writes=0, bytes_written=0))
            peer.signal(signal.SIGCONT)
            await events.until(lambda e: bool(e.lost))
            assert events.lost == [(pair, "the receiver does not read: 10 seals wait")]
            assert link.describe()["bye_sent"] is True

    run(test())


def test_a_killed_writer_leaves_its_last_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer had sent before it died is delivered before the news of its death, however slowly it is read."""
    grants = [grant_of(i) for i in range(8)]
    monkeypatch.setattr(shm, "MESSAGES_PER_WAKE_MAX", 1)

    async def test() -> None:
        async with receiver() as r, child() as writer:
            pair = pair_of(2)
            await writer.link("a", r.port.expect(pair, EPOCH), pair)
            # This loop reads nothing until seals and death are all there.
            for grant in grants:
                writer.tell("seal", name="a", grant=grant.hex(), epoch=EPOCH, writes=0, bytes_written=0)
            writer.tell("die")
            assert writer.process.wait(DEADLINE_S) == -signal.SIGKILL
            await r.events.until(lambda e: bool(e.gone))
            assert [seal.grant for _, seal in r.events.seals] == grants

    run(test())
