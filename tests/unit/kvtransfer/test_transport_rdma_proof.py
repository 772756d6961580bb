"""An rdma link is made when data has passed, and not before: what becomes of one whose probes are lost, or that breaks
in between. On a device made of arrays; `tests/rdma` has a real one."""

from __future__ import annotations

import asyncio
from unittest.mock import ANY

import numpy as np
import pytest

from kvtransfer.transport import ConnectError, DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.rdma import CODEC, HostBytes, RdmaUnproved, RdmaWelcome, RegionAddress
from tests.conformance.transport_kits import RDMA_KITS
from tests.conformance.transport_suite import record_ops
from tests.conformance.transport_suite_more import a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence
from tests.support.rdma_double import Deliver, DoubleDevice, DoubleQueuePairs
from tests.support.rdma_harness import (
    CONFIG,
    EPOCH,
    GRANT,
    LIMITS,
    PAIR,
    Raw,
    Receiving,
    double,
    linked,
    receiving,
    seal_of,
)
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, run
from tests.support.shm_peer import source_bytes

__all__ = ["double"]

pytestmark = pytest.mark.usefixtures("double")


async def links_unproved(r: Receiving, count: int) -> None:
    """Wait until the port has let go of so many links that never were made."""
    async with asyncio.timeout(DEADLINE_S):
        while r.port.describe()["links_unproved"] != count:  # noqa: ASYNC110 - a counter, which tells nobody
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ({0: None, 1: None}, "no data arrives within 1000 ms"),
        ({1: None}, "no data arrives within 1000 ms"),
        ({0: 12}, "a probe was not acknowledged: it completed with status 12"),
        ({0: 12, 1: None}, "a probe was not acknowledged: it completed with status 12"),
    ],
)
def test_where_data_does_not_pass_there_is_no_link(
    lost: dict[int, int | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All words are said, and the devices do not reach each other, on all queue pairs or on one, found out by the
    device or by the deadline: an error of its own. The receiver has lost nothing and fences nothing; in the same epoch
    the pair links when the way is free."""
    source_U8 = source_bytes(1, REGION_NBYTES)

    async def test() -> None:
        async with receiving() as r:
            with monkeypatch.context() as patch:
                patch.setattr(DoubleQueuePairs, "probes_lost", lost)
                with pytest.raises(RdmaUnproved, match=f"the devices do not reach each other: {says}$"):
                    async with linked(r, source_U8, connect_ms_max=1_000 if says.startswith("no data") else 60_000):
                        raise AssertionError("there is no link")
            await links_unproved(r, 1)
            assert not DoubleQueuePairs.alive
            async with linked(r, source_U8) as (link, events):
                link.post(GRANT, record_ops(1))
                await events.until(lambda e: bool(e.completed))
                assert (events.completed[0][3], events.lost) == (True, [])
            assert (r.events.gone, r.refused) == ([], {})

    run(test())


def test_the_receiver_does_not_wait_for_probes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own deadline comes first: it says why, which is the writer's error too, and has nothing to fence."""
    monkeypatch.setattr(DoubleQueuePairs, "probes_lost", {0: None})

    async def test() -> None:
        async with receiving(handshake_ms_max=1_000) as r:
            with pytest.raises(RdmaUnproved, match="refused by the receiver: PROBE"):
                async with linked(r, source_bytes(1, REGION_NBYTES), connect_ms_max=60_000):
                    raise AssertionError("there is no link")
            assert r.refused == {"PROBE": 1}
            assert r.port.describe()["links_unproved"] == 1
            assert r.events.gone == []

    run(test())


@pytest.mark.parametrize("immediates", [[(0, 7)], [(0, 0), (0, 0)], [(0, 1)]])
def test_an_immediate_that_is_no_probe_is_refused(immediates: list[tuple[int, int]]) -> None:
    """Another number than the queue pair's index, or a second one before the others have come."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome_unproved()
            for qp, number in immediates:
                r.qps.immediate_came(qp, number)
            assert await raw.hear() == wire.Refused(reason=wire.RefusalReason.PROBE)
            assert await raw.hear() is None
            assert set(DoubleQueuePairs.alive.values()) == {raw.qps}
            assert (r.refused, r.events.gone) == ({"PROBE": 1}, [])
            await raw.close()

    run(test())


def test_nothing_is_sealed_on_a_link_that_is_not_made() -> None:
    """A seal before the probes: out of order, and no reason for a fence, for no grant can have used the link."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome_unproved()
            await raw.say(wire.SealSent(number=1, seal=seal_of(), ways_mask=1))
            assert await raw.hear() == wire.Refused(reason=wire.RefusalReason.OUT_OF_ORDER)
            assert await raw.hear() is None
            assert (r.events.gone, r.events.seals) == ([], [])
            await raw.close()

    run(test())


def test_a_writer_that_dies_before_its_probes_leaves_nothing_to_fence() -> None:
    """Its connection ends without BYE: the queue pairs are destroyed, the epoch stays."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome_unproved()
            await raw.close()
            await links_unproved(r, 1)
            assert not DoubleQueuePairs.alive
            assert r.events.gone == []
            assert r.port.expect(PAIR, EPOCH) == raw.endpoint

    run(test())


def test_a_fence_before_the_probes_needs_none() -> None:
    """The queue pairs can receive from the WELCOME on: a fence destroys them, and tells of it."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome_unproved()
            r.port.fence(PAIR, EPOCH)
            assert set(DoubleQueuePairs.alive.values()) == {raw.qps}
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 reset, its queue pairs destroyed")]
            assert await raw.hear() == wire.Fence(epoch=EPOCH)
            assert r.port.describe()["fences_ended"] == 1
            await raw.close()

    run(test())


def test_a_receiver_that_ends_meanwhile_says_nothing_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies between its WELCOME and the probes: no link, and no reason to believe that the devices do not reach each
    other."""
    monkeypatch.setattr(DoubleQueuePairs, "probes_lost", {0: None, 1: None})

    async def test() -> None:
        async with receiving() as r:
            secret, nonce = bytes(16), bytes(32)
            there_U8 = np.zeros(REGION_NBYTES, np.uint8)
            device = DoubleDevice(HostBytes(lambda: there_U8), CONFIG, remote_writes=True, limits=LIMITS)
            theirs = DoubleQueuePairs(device, 2, sends=False)

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                (hello,) = wire.Inbox(CODEC).feed(await reader.read(4096))
                assert isinstance(hello, wire.Hello)
                writer.write(CODEC.encode(wire.Challenge(nonce=nonce)))
                await reader.read(4096)
                ends = theirs.ends.encode()
                says = RdmaWelcome(region_nbytes=REGION_NBYTES, probe_base=1, probe_rkey=1, ends=ends).encode()
                proof = CODEC.receiver_proof(secret, hello, nonce, says)
                welcome = wire.Welcome(proof=proof, payload=says)
                writer.write(CODEC.encode(welcome))
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                address = RegionAddress(listens=f"127.0.0.1:{port}", base=1, rkey=1).encode()
                there = DataEndpoint(transport=TransportName.RDMA, address=address, secret=secret, epoch=EPOCH)
                monkeypatch.setattr(r.port, "expect", lambda *_: there)
                with pytest.raises(ConnectError, match="the receiver closed the connection") as caught:
                    async with linked(r, source_bytes(1, REGION_NBYTES)):
                        raise AssertionError("there is no link")
                assert not isinstance(caught.value, RdmaUnproved)
            theirs.destroy()

    run(test())


def test_a_connect_may_be_given_up_at_any_step() -> None:
    """As every transport's; see the case's own text."""
    run(a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence(RDMA_KITS[0]))


def test_writes_of_an_abandoned_grant_that_stand_still_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device completes nothing any more, and reports no error either: an abandoned grant lets go of its sources
    within a limit all the same, by the link's end, and what may still land is told."""
    held: list[Deliver] = []

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES), drain_ms_max=20) as (link, events):
            monkeypatch.setattr(DoubleQueuePairs, "on_the_way", held)
            link.post(GRANT, record_ops(1, 4))
            async with asyncio.timeout(DEADLINE_S):
                while not held:  # noqa: ASYNC110 - the posting thread has no event to wait for
                    await asyncio.sleep(0.001)
            link.abandon(GRANT)
            await events.until(lambda e: bool(e.lost))
            assert events.completed == [(GRANT, 4, ANY, False)]
            assert events.in_doubt == [(GRANT, 0)]
            assert events.lost == [(PAIR, "writes of an abandoned grant have not moved for 20 ms")]

    run(test())


def test_a_link_that_cannot_be_given_back_keeps_the_device_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe arrives, and the queue pairs cannot be destroyed: the error is the same, no BYE is said, and the device
    stays open with them."""
    monkeypatch.setattr(DoubleQueuePairs, "probes_lost", {0: 12})

    async def test() -> None:
        async with receiving() as r:
            made: list[DoubleQueuePairs] = []
            destroy = DoubleQueuePairs.destroy

            def refuse(qps: DoubleQueuePairs) -> None:
                if qps.sends and qps not in made:
                    made.append(qps)
                    DoubleQueuePairs.fails_to_destroy = 1
                destroy(qps)

            monkeypatch.setattr(DoubleQueuePairs, "destroy", refuse)
            with pytest.raises(RdmaUnproved):
                async with linked(r, source_bytes(1, REGION_NBYTES)):
                    raise AssertionError("there is no link")
            (ours,) = made
            assert not ours.destroyed and not ours.device.closed
            ours.destroy()  # as the process's end does
            ours.device.close()
            await links_unproved(r, 1)

    run(test())


def test_a_link_that_was_made_is_fenced_when_its_writer_dies() -> None:
    """The same end after the probes, so that the silence above means something."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome()
            await raw.close()
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone_epochs == [(PAIR, EPOCH)]
            assert r.port.describe()["links_unproved"] == 0

    run(test())
