"""Both sides of rdma on a device made of arrays (`rdma_double`): words, seals, fences, and what a broken peer meets.

On a real device the same code is tested by `make test-rdma`.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from baton.errors import InvalidField
from baton.ids import Epoch
from kvtransfer.transport import ConnectError, PairBeingFenced, Seal, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.rdma import (
    CODEC,
    HostBytes,
    RdmaLinkLimits,
    RdmaMemory,
    RdmaReceiverPort,
    RdmaWelcome,
    RdmaWriterLink,
    RegionAddress,
)
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.writer_link import LinkParts
from node.pool import RegionTransports
from tests.conformance.transport_suite import expected_region, record_ops
from tests.support.offered import RDMA, TCP, offer
from tests.support.rdma_double import Deliver, DoubleQueuePairs
from tests.support.rdma_harness import (
    CONFIG,
    EPOCH,
    GRANT,
    LIMITS,
    OTHER,
    PAIR,
    Raw,
    double,
    linked,
    receiving,
    seal_of,
)
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, run
from tests.support.shm_peer import source_bytes

__all__ = ["double"]

pytestmark = pytest.mark.usefixtures("double")


def test_records_land_and_the_seal_waits_for_every_queue_pair_that_they_took() -> None:
    """Two queue pairs: the seal is reported once, after the immediates of both, and all bytes are there."""

    async def test() -> None:
        source_U8 = source_bytes(1, REGION_NBYTES)
        async with receiving() as r:
            async with linked(r, source_U8, chain_wrs_max=8) as (link, events):
                link.post(GRANT, record_ops(1))
                await events.until(lambda e: bool(e.completed))
                link.seal(Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=2))
                await r.events.until(lambda e: bool(e.seals))
                assert r.events.seals == [(PAIR, Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=2))]
                assert np.array_equal(r.region.array_U8, expected_region(source_U8, record_ops(1)))
                reported = link.describe()
                assert (reported["writes"], reported["chains"]) == (128, 16)
            assert r.events.gone == [] and events.lost == []

    run(test())


def test_more_seals_than_may_be_on_their_way_wait_their_turn() -> None:
    """Twenty at once with room for four: all arrive, in order."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (link, _):
            for number in range(1, 21):
                link.seal(seal_of(number))
            await r.events.until(lambda e: len(e.seals) == 20)
            assert [seal for _, seal in r.events.seals] == [seal_of(number) for number in range(1, 21)]

    run(test())


def test_seals_that_nobody_takes_end_the_link() -> None:
    """A limit, not a queue without end: the fifth that has to wait is one too many."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES), seals_waiting_max=4) as (link, events):
            for number in range(1, 10):
                link.seal(seal_of(number))
            await events.until(lambda e: bool(e.lost))
            assert events.lost == [(PAIR, "the receiver does not read: 4 seals wait")]

    run(test())


def test_a_fence_destroys_the_queue_pairs_before_it_is_told() -> None:
    """When `fence` returns they are gone; a write of a writer that does not know comes to nothing."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            welcome = await raw.welcome()
            address = RegionAddress.decode(raw.endpoint.address)
            poster = raw.qps.poster(dst_base=address.base, rkey=address.rkey)
            raw.qps.device.region_U8 = source_bytes(1, REGION_NBYTES)
            assert welcome.region_nbytes == REGION_NBYTES
            r.port.fence(PAIR, EPOCH)
            assert set(DoubleQueuePairs.alive.values()) == {raw.qps}
            start = np.array([0], np.int64)
            poster.post_writes(0, start, start, start + 4096, 1)
            assert poster.wait(raw.qps.fd, 0, 0)[0] == [(1, 10)]
            assert not r.region.array_U8.any()
            with pytest.raises(PairBeingFenced):
                r.port.expect(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 reset, its queue pairs destroyed")]
            assert await raw.hear() == wire.Fence(epoch=EPOCH)
            assert await raw.hear() is None
            await raw.close()

    run(test())


def test_without_evidence_the_fence_waits() -> None:
    """The device refuses to destroy the queue pairs, twice: nobody is told that the writer is gone before it does."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (_, events):
            DoubleQueuePairs.fails_to_destroy = 2
            r.port.fence(PAIR, EPOCH)
            await asyncio.sleep(0)
            assert r.events.gone == []
            assert r.port.describe()["fences_waiting"] == 1
            await r.events.until(lambda e: bool(e.gone))
            await events.until(lambda e: bool(e.lost))
            assert DoubleQueuePairs.fails_to_destroy == 0

    run(test())


def test_a_writer_keeps_its_source_until_its_queue_pairs_are_gone() -> None:
    """The same at the other side: what was on its way completes only then, and `close` waits for it."""

    async def test() -> None:
        async with receiving() as r:
            async with linked(r, source_bytes(1, REGION_NBYTES)) as (link, events):
                DoubleQueuePairs.fails_to_destroy = 1
                await link.close()
                assert DoubleQueuePairs.fails_to_destroy == 0
            assert events.lost == []

    run(test())


def test_a_link_closes_though_its_queue_pairs_cannot_be_destroyed() -> None:
    """The device refuses for good. The link says so and ends without BYE; its hold leaves the device open."""

    async def test() -> None:
        async with receiving() as r:
            theirs = set(DoubleQueuePairs.alive)
            source_U8, loop, events = source_bytes(1, REGION_NBYTES), asyncio.get_running_loop(), Recorder()
            memory = RdmaMemory(region=HostBytes(lambda: source_U8), config=CONFIG, remote_writes=False, limits=LIMITS)
            limits = RdmaLinkLimits(connect_ms_max=2_000)
            link = await RdmaWriterLink.connect(
                LinkParts(r.port.expect(PAIR, EPOCH), PAIR, events, loop), memory, limits
            )
            device: Any = memory.device
            own: Any = link._hold.qps
            DoubleQueuePairs.fails_to_destroy = 1 << 20
            async with asyncio.timeout(DEADLINE_S):
                await link.close()
            await memory.close()
            assert not device.closed
            DoubleQueuePairs.fails_to_destroy = 0
            own.destroy()
            device.close()  # as the process's end does
            await r.events.until(lambda e: bool(e.gone))
            assert set(DoubleQueuePairs.alive) == theirs

    run(test())


def test_a_port_closes_though_its_queue_pairs_cannot_be_destroyed() -> None:
    """The device refuses for good. The port says so, ends, and leaves the device open and the region registered."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (_, events):
            qps = r.qps
            device: Any = r.memory.device
            DoubleQueuePairs.fails_to_destroy = 1 << 20
            await r.port.close()
            assert not qps.destroyed
            await r.memory.close()
            assert not device.closed
            DoubleQueuePairs.fails_to_destroy = 0
            qps.destroy()
            device.close()  # as the process's end does
            await events.until(lambda e: bool(e.lost))

    run(test())


def test_a_queue_pair_that_fails_at_the_receiver_fences_the_pair() -> None:
    """Half of a grant is there, its seal is not: no seal is reported any more, the pair is fenced, the link is lost."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (link, events):
            link.post(GRANT, record_ops(1))
            await events.until(lambda e: bool(e.completed))
            r.qps.fail()
            await r.events.until(lambda e: bool(e.gone))
            await events.until(lambda e: bool(e.lost))
            link.seal(Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=1))
            assert r.events.gone_epochs == [(PAIR, EPOCH)]
            assert r.events.seals == []

    run(test())


def test_a_write_that_fails_ends_the_link_and_completes_everything() -> None:
    """The receiver's queue pairs vanish without a word: the batches complete uncopied, and the link is lost, once."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (link, events):
            r.qps.destroy()
            for _ in range(3):
                link.post(GRANT, record_ops(1))
            await events.until(lambda e: bool(e.lost))
            assert [copied for *_, copied in events.completed] == [False] * 3
            assert events.lost == [(PAIR, "a write completed with status 10")]
            assert link.fenced is False

    run(test())


def test_what_is_on_its_way_when_the_link_ends_is_adrift_until_the_receiver_has_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network holds two batches back while the link ends at the writer. There they complete and are in doubt. The
    receiver has not noticed: the one that arrives now lands. After its fence the other one is dropped.
    Of a batch that was posted to the dead link nothing has left."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (link, events):
            held: list[Deliver] = []
            monkeypatch.setattr(DoubleQueuePairs, "on_the_way", held)
            monkeypatch.setattr(RdmaReceiverPort, "_lost", lambda port, c: port._loop.remove_reader(c.sock))
            link.post(GRANT, record_ops(1, 4))
            link.post(OTHER, record_ops(2, 4))
            async with asyncio.timeout(DEADLINE_S):
                while len(held) < 2:  # noqa: ASYNC110 - the posting thread has no event to wait for
                    await asyncio.sleep(0.001)
            link._device_lost("cut off")
            await events.until(lambda e: bool(e.lost))
            assert events.completed == [(GRANT, 4, ANY, False), (OTHER, 4, ANY, False)]
            assert sorted(events.in_doubt) == [(GRANT, 0), (OTHER, 0)]
            link.post(grant_of(9), record_ops(3, 4))
            await events.until(lambda e: len(e.completed) == 3)
            assert len(events.in_doubt) == 2
            assert r.events.gone == [] and not r.region.array_U8.any()
            assert held[0]()
            landed_U8 = r.region.array_U8.copy()
            assert landed_U8.any()
            r.port.fence(PAIR, EPOCH)
            assert not held[1]()
            assert np.array_equal(r.region.array_U8, landed_U8)

    run(test())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([wire.SealSent(number=1, seal=seal_of(), ways_mask=4)], "SEAL"),
        ([wire.SealSent(number=1, seal=seal_of(), ways_mask=0)], "SEAL"),
        ([wire.SealSent(number=1, seal=seal_of(), ways_mask=1)] * 2, "SEAL"),
        ([wire.SealSent(number=n, seal=seal_of(), ways_mask=1) for n in range(5)], "SEALS_MAX"),
        ([wire.Sealed(number=1)], "OUT_OF_ORDER"),
        ([wire.Bye(epoch=Epoch(99))], "OUT_OF_ORDER"),
    ],
)
def test_a_writer_that_breaks_the_protocol_is_refused_and_fenced(messages: list[wire.Message], reason: str) -> None:
    """A seal for a queue pair that is not, for none, twice, too many of them, a word out of turn."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome()
            await raw.say(*messages)
            await r.events.until(lambda e: bool(e.gone))
            assert r.refused == {reason: 1}
            assert r.events.gone_epochs == [(PAIR, EPOCH)]
            refusal = await raw.hear()
            assert isinstance(refusal, wire.Refused) and refusal.reason.name == reason
            await raw.close()

    run(test())


def test_strangers_cost_no_queue_pair() -> None:
    """A wrong proof, bytes that are none of ours, silence: refused, counted, nothing to fence."""

    async def test() -> None:
        async with receiving(handshake_ms_max=1_000) as r:
            silent, wrong, noise = Raw(r), Raw(r), Raw(r)
            for raw in (silent, wrong, noise):
                await raw.open()
            hello = wire.Hello(pair=PAIR, epoch=EPOCH, link=1, payload=wrong.qps.ends.encode())
            await wrong.say(CODEC.tagged(wrong.endpoint.secret, hello))
            assert isinstance(await wrong.hear(), wire.Challenge)
            await wrong.say(wire.Answer(proof=bytes(32)))
            noise.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            reasons = []
            for raw in (silent, wrong, noise):
                refusal = await raw.hear()
                assert isinstance(refusal, wire.Refused)
                reasons.append(refusal.reason.name)
                assert await raw.hear() is None
                await raw.close()
            assert reasons == ["DEADLINE", "SECRET", "MALFORMED"]
            assert not DoubleQueuePairs.alive
            assert r.events.gone == []

    run(test())


def test_a_receiver_that_does_not_know_the_secret_gets_no_data() -> None:
    """Whoever answers at the address with a proof of its own is turned down, and the writer's queue pairs are gone."""

    async def test() -> None:
        async with receiving() as r:
            endpoint = r.port.expect(PAIR, EPOCH)

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(4096)
                writer.write(CODEC.encode(wire.Challenge(nonce=bytes(32))))
                await reader.read(4096)
                ends = next(iter(DoubleQueuePairs.alive.values())).ends.encode()
                says = RdmaWelcome(region_nbytes=REGION_NBYTES, probe_base=1, probe_rkey=1, ends=ends)
                false = wire.Welcome(proof=bytes(32), payload=says.encode())
                writer.write(CODEC.encode(false))
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                address = RegionAddress(listens=f"127.0.0.1:{port}", base=1, rkey=1).encode()
                elsewhere = type(endpoint)(
                    transport=TransportName.RDMA, address=address, secret=endpoint.secret, epoch=EPOCH
                )
                loop = asyncio.get_running_loop()
                with pytest.raises(ConnectError, match="does not know the pair's secret"):
                    await RdmaWriterLink.connect(LinkParts(elsewhere, PAIR, Recorder(), loop), r.memory)

    run(test())


def test_the_device_goes_and_comes_back(double: dict[str, str]) -> None:
    """Links are lost, pairs fenced, rdma is not offered and refused with the reason; then all of it works again."""

    async def test() -> None:
        async with receiving() as r:
            async with linked(r, source_bytes(1, REGION_NBYTES)) as (_, events):
                double["lost"] = "the device has been taken away"
                await events.until(lambda e: bool(e.lost))
                await r.events.until(lambda e: bool(e.gone))
                async with asyncio.timeout(DEADLINE_S):
                    while r.offered != [True, False]:  # noqa: ASYNC110 - the look is by a timer
                        await asyncio.sleep(0.005)
                assert r.port.describe()["device"] == "none"
            with pytest.raises(RdmaUnavailable):
                async with linked(r, source_bytes(1, REGION_NBYTES), Epoch(4)):
                    raise AssertionError("there is no device")
            double["lost"] = ""
            async with asyncio.timeout(DEADLINE_S):
                while r.offered != [True, False, True]:  # noqa: ASYNC110 - the look is by a timer
                    await asyncio.sleep(0.005)
            async with linked(r, source_bytes(2, REGION_NBYTES), Epoch(4)) as (link, events):
                link.post(GRANT, ops_of([0], [0], [REGION_NBYTES]))
                await events.until(lambda e: bool(e.completed))
                assert events.completed == [(GRANT, 1, REGION_NBYTES, True)]
            assert r.port.describe()["devices_lost"] == 1

    run(test())


def test_rdma_is_offered_where_it_works_and_was_not_forbidden(double: dict[str, str]) -> None:
    """In the list and a device: offered. Not in the list: not looked for. No device: left out, unless it is alone."""

    async def test() -> None:
        async with receiving() as r:
            assert (await offer(r.region, RDMA, TCP)).offered == (RDMA, TCP)
            assert await offer(r.region, TCP) == RegionTransports(offered=(TCP,))
            double["lost"] = "no device"
            assert await offer(r.region, RDMA, TCP) == RegionTransports(offered=(TCP,))
            with pytest.raises(InvalidField, match="rdma alone, which does not work here: no device"):
                await offer(r.region, RDMA)

    run(test())
