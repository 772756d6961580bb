"""What is particular to tcp: frames are checked before a byte lands, and a grant can be taken back in mid-frame."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable

import numpy as np
import pytest

from baton.ids import Epoch, Pair
from kvtransfer.transport import Seal
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import tcp
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import CODEC, FRAME_BYTES_MAX, Ack, TcpHello, TcpWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.conformance.transport_kits import Everything
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, pair_of, run
from tests.support.tcp_harness import (
    EPOCH,
    GOOD,
    GRANT,
    PAIR,
    PAYLOAD,
    First,
    head,
    raw,
    receiving,
    table,
    wait_until,
)

BAD_FRAMES = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64, b" "), "MALFORMED"),
    "another version": (GOOD[:2] + b"\x09" + GOOD[3:], "VERSION"),
    "unknown kind": (GOOD[:3] + b"\x63" + GOOD[4:], "MALFORMED"),
    "padding used": (CODEC.encode(wire.Bye(sequence=0, epoch=EPOCH))[:-1] + b"x", "MALFORMED"),
    "receiver's own message": (CODEC.encode(Ack(sequence=0, landed=True)), "OUT_OF_ORDER"),
    "a second hello": (
        CODEC.encode(wire.Hello(pair=PAIR, epoch=EPOCH, link=1, payload=TcpHello(stream=0).encode())),
        "OUT_OF_ORDER",
    ),
    "another epoch": (head(epoch=Epoch(EPOCH + 1)) + GOOD[64:], "EPOCH"),
    "a gap in the sequence": (head(1) + GOOD[64:], "SEQUENCE"),
    "a seal ahead of its data": (
        CODEC.encode(wire.SealSent(number=1, seal=Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=1))) + GOOD,
        "SEQUENCE",
    ),
    "a BYE ahead of its data": (CODEC.encode(wire.Bye(sequence=1, epoch=EPOCH)) + GOOD, "SEQUENCE"),
    "replayed": (GOOD + GOOD, "REPLAYED"),
    "too many bytes": (head(nbytes=FRAME_BYTES_MAX + 1), "OVERSIZED"),
    "too many segments": (head(segments=1 << 40), "OVERSIZED"),
    "no segments": (head(segments=0), "OVERSIZED"),
    "table says less": (head() + table((0, 5)) + PAYLOAD, "MALFORMED"),
    "negative destination": (head() + table((-8, len(PAYLOAD))), "MALFORMED"),
    "beyond the region": (head() + table((REGION_NBYTES - 5, len(PAYLOAD))), "MALFORMED"),
    "sums that overflow": (head(segments=2) + table((0, 2**63 - 1), (0, 2**63 - 1)), "MALFORMED"),
    "outside the grant": (head() + table((5000, len(PAYLOAD))) + PAYLOAD, "OUT_OF_GRANT"),
    "cut off in the head": (GOOD[:40], "TRUNCATED"),
    "cut off in the table": (GOOD[:70], "TRUNCATED"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_lands_nothing_and_ends_the_pair(name: str) -> None:
    """Refused and counted once; what was good before it has landed, nothing else; the pair is fenced."""
    frames, reason = BAD_FRAMES[name]

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            r.port.allow(PAIR, EPOCH, GRANT, First(4096))
            await writer.send(frames)
            writer.sock.shutdown(socket.SHUT_WR)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 closed, its receive thread joined")]
            assert (r.refused, r.events.seals) == ({reason: 1}, [])
            landed = np.zeros(REGION_NBYTES, np.uint8)
            if name == "replayed":
                landed[: len(PAYLOAD)] = np.frombuffer(PAYLOAD, np.uint8)
            assert np.array_equal(r.region.array_U8, landed)

    run(test())


def test_a_payload_that_is_cut_off_is_never_acknowledged() -> None:
    """The connection breaks in mid-payload: what came may lie in the granted blocks, but counts for nothing."""

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            r.port.allow(PAIR, EPOCH, GRANT, First(4096))
            await writer.send(GOOD[:-100])
            writer.sock.shutdown(socket.SHUT_WR)
            await r.events.until(lambda e: bool(e.gone))
            assert await writer.receive() == wire.Refused(reason=wire.RefusalReason.TRUNCATED)
            assert r.refused == {"TRUNCATED": 1}
            assert r.port.describe()["frames_landed"] == 0

    run(test())


def test_a_grant_taken_back_in_mid_frame_sends_the_rest_to_scratch() -> None:
    """Half of a frame has landed; after `forbid` the other half does not; the frame is acknowledged as dropped, the
    stream goes on, and a later grant to the same place is not disturbed."""
    later = grant_of(9)

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            await writer.send(GOOD[:-500])
            await wait_until(lambda: bool(r.region.array_U8[499]))
            r.port.forbid(GRANT)
            half_U8 = r.region.array_U8.copy()
            await writer.send(GOOD[-500:])
            assert await writer.receive() == Ack(sequence=0, landed=False)
            assert np.array_equal(r.region.array_U8, half_U8)
            assert half_U8[:500].all()
            assert not half_U8[500:].any()
            await writer.send(head(1) + GOOD[64:])
            assert await writer.receive() == Ack(sequence=1, landed=False), "it stays forbidden"
            r.port.allow(PAIR, EPOCH, later, First(4096))
            await writer.send(head(2, grant=later) + GOOD[64:])
            assert await writer.receive() == Ack(sequence=2, landed=True)
            assert r.region.array_U8[: len(PAYLOAD)].tobytes() == PAYLOAD
            assert (r.port.describe()["frames_dropped"], r.port.describe()["frames_landed"]) == (2, 1)
            assert r.refused == {}

    run(test())


def test_a_fence_in_mid_frame_needs_nothing_of_the_writer() -> None:
    """The writer has sent half a frame and stands still: the fence ends, and the other half finds nobody."""

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            await writer.send(GOOD[:-500])
            await wait_until(lambda: bool(r.region.array_U8[499]))
            r.port.fence(PAIR, EPOCH)
            half_U8 = r.region.array_U8.copy()
            await r.events.until(lambda e: bool(e.gone))
            assert await writer.receive() == wire.Fence(epoch=EPOCH)
            assert await writer.receive() is None
            assert np.array_equal(r.region.array_U8, half_U8)

    run(test())


def test_a_seal_counts_when_it_has_come_down_every_stream() -> None:
    """A seal of two streams is reported once, by the second; one that names a stream that is not its own is refused."""
    seal = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=2)

    async def test() -> None:
        async with receiving() as r, raw(r, 0) as one, raw(r, 1) as two:
            await one.send(CODEC.encode(wire.SealSent(number=0, seal=seal, ways_mask=0b11)))
            assert await one.receive() == Ack(sequence=0, landed=True)
            assert r.events.seals == []
            await two.send(CODEC.encode(wire.SealSent(number=0, seal=seal, ways_mask=0b11)))
            await r.events.until(lambda e: bool(e.seals))
            assert r.events.seals == [(PAIR, seal)]
            await two.send(CODEC.encode(wire.SealSent(number=1, seal=seal, ways_mask=0b01)))
            await r.events.until(lambda e: bool(e.gone))
            assert r.refused == {"MALFORMED": 1}
            assert r.events.seals == [(PAIR, seal)]

    run(test())


def test_a_seal_counts_although_its_streams_have_ended_before_the_loop_looks() -> None:
    """A writer seals on both streams and is gone. Both receive threads have ended when the busy control thread comes to
    what they reported: the first stream's end does not drop the half of the seal that the second completes."""
    seal = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=2)

    async def test() -> None:
        async with receiving() as r, raw(r, 0) as one, raw(r, 1) as two:
            await wait_until(lambda: len(r.port._streams(PAIR)) == 2)
            streams = {stream.connection.index: stream for stream in r.port._streams(PAIR)}
            for index, each in enumerate((one, two)):
                each.sock.send(CODEC.encode(wire.SealSent(number=0, seal=seal, ways_mask=0b11)))
                each.sock.shutdown(socket.SHUT_WR)
                deadline_s = time.monotonic() + DEADLINE_S
                while streams[index]._thread.is_alive():  # keeps the loop's thread
                    assert time.monotonic() < deadline_s
            await r.events.until(lambda e: bool(e.seals))
            assert r.events.seals == [(PAIR, seal)]

    run(test())


@pytest.mark.parametrize("cut_nbytes", [1, 7, 79, 81, 1 << 20])
def test_messages_are_told_apart_however_the_network_cuts_them(cut_nbytes: int) -> None:
    """Seals before and after frames of one and of three segments, in pieces of any size: each is what it was."""

    def seal_message(sequence: int) -> bytes:
        seal = Seal(grant=GRANT, epoch=EPOCH, writes=sequence, bytes_written=0)
        return CODEC.encode(wire.SealSent(number=sequence, seal=seal, ways_mask=1))

    three = head(3, segments=3) + table((2000, 500), (1000, 300), (3000, 200)) + PAYLOAD
    stream = b"".join([seal_message(0), GOOD[:8] + (1).to_bytes(8, "little") + GOOD[16:], seal_message(2), three])
    stream += seal_message(4) + CODEC.encode(wire.Bye(sequence=5, epoch=EPOCH))

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            r.port.allow(PAIR, EPOCH, GRANT, First(4096))
            for at in range(0, len(stream), cut_nbytes):
                await writer.send(stream[at : at + cut_nbytes])
            await r.events.until(lambda e: len(e.seals) == 3)
            assert [seal.writes for _, seal in r.events.seals] == [0, 2, 4]
            region = r.region.array_U8.tobytes()
            assert region[:1000] == PAYLOAD
            assert region[2000:2500] + region[1000:1300] + region[3000:3200] == PAYLOAD
            await wait_until(lambda: not r.port._streams(PAIR))
            assert (r.refused, r.events.gone) == ({}, [])

    run(test())


def test_posting_never_waits_for_a_receiver_that_does_not_read() -> None:
    """Far more small batches than the sockets hold, and a seal of another grant: every call returns while nothing is
    received; then all of it lands, each batch completes once, and the seal arrives."""
    batches = 400

    async def test() -> None:
        async with receiving() as r:
            source_U8 = np.random.default_rng(3).integers(0, 256, REGION_NBYTES, dtype=np.uint8)
            events, loop, other = Recorder(), asyncio.get_running_loop(), grant_of(8)
            link = await TcpWriterLink.connect(LinkParts(r.endpoint, PAIR, events, loop), source_U8)
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            streams = r.port._streams(PAIR)
            with streams[0]._landing, streams[1]._landing:
                for i in range(batches):
                    at = i * 65536 % REGION_NBYTES
                    link.post(GRANT, ops_of([at], [at], [65536]))
                seal = Seal(grant=other, epoch=EPOCH, writes=0, bytes_written=0)
                link.seal(seal)
                assert link._queue.lanes_with(GRANT)
            await events.until(lambda e: len(e.completed) == batches)
            await r.events.until(lambda e: bool(e.seals))
            assert events.completed == [(GRANT, 1, 65536, True)] * batches
            assert r.events.seals == [(PAIR, seal)]
            assert np.array_equal(r.region.array_U8, source_U8)
            await link.close()
            assert events.lost == []

    run(test())


def test_an_unread_acknowledgement_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that sends and never reads: past the limit of unread acknowledgements it is refused."""
    monkeypatch.setattr(tcp, "ACK_FRAMES_MAX", 1)
    monkeypatch.setattr(tcp, "OUTBOX_BYTES_MAX", 1)

    async def test() -> None:
        async with receiving() as r, contextlib.AsyncExitStack() as stack:
            # What is accepted inherits it.
            r.port._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            writer = await stack.enter_async_context(raw(r))
            seals = (
                CODEC.encode(wire.SealSent(number=i, seal=Seal(grant=GRANT, epoch=EPOCH, writes=0, bytes_written=0)))
                for i in range(1 << 20)
            )

            async def send_all(messages: Iterable[bytes]) -> None:
                for message in messages:
                    await writer.send(message)

            with pytest.raises(OSError, match=r"reset|pipe|abort"):
                await send_all(seals)
            await r.events.until(lambda e: bool(e.gone))
            assert r.refused == {"ACKS_UNREAD": 1}

    run(test())


def test_completions_wait_for_the_acknowledgement() -> None:
    """A forbidden grant: what the writer sent is completed, but not as copied; another's is."""

    async def test() -> None:
        async with receiving() as r:
            source_U8, events = np.full(REGION_NBYTES, 5, np.uint8), Recorder()
            loop, other = asyncio.get_running_loop(), grant_of(8)
            link = await TcpWriterLink.connect(LinkParts(r.endpoint, PAIR, events, loop), source_U8)
            r.port.allow(PAIR, EPOCH, other, First(1000))
            link.post(GRANT, ops_of([0], [0], [1000]))
            await events.until(lambda e: len(e.completed) == 1)
            link.post(other, ops_of([0], [0], [1000]))
            await events.until(lambda e: len(e.completed) == 2)
            assert events.completed == [(GRANT, 1, 1000, False), (other, 1, 1000, True)]
            assert r.region.array_U8[:1000].all()
            await link.close()
            assert link.describe()["bytes"] == 1000

    run(test())


def test_what_was_never_acknowledged_completes_with_the_link() -> None:
    """The receiver takes nothing in, and the connection breaks: the sources are let go of, uncopied, and the loss comes
    after that."""

    async def test() -> None:
        async with receiving() as r:
            source_U8, events = np.full(REGION_NBYTES, 5, np.uint8), Recorder()
            link = await TcpWriterLink.connect(
                LinkParts(r.endpoint, PAIR, events, asyncio.get_running_loop()), source_U8, TcpConfig(streams=1)
            )
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            (stream,) = r.port._streams(PAIR)
            with stream._landing:
                link.post(GRANT, ops_of([0], [0], [1000]))
                await wait_until(lambda: bool(link._queue.lanes_with(GRANT)))
                assert events.completed == []
                link._streams[0].sock.shutdown(socket.SHUT_RDWR)
                await events.until(lambda e: bool(e.lost))
                assert events.completed == [(GRANT, 1, 1000, False)]
            await r.events.until(lambda e: bool(e.gone))

    run(test())


def test_one_pair_cannot_use_the_grant_of_another() -> None:
    """A grant of another pair, or of another epoch, is as good as none."""

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            stranger = Pair(receiver=PAIR.receiver, writer=pair_of(5).writer)
            r.port.allow(stranger, EPOCH, GRANT, Everything())
            r.port.allow(PAIR, Epoch(EPOCH + 1), grant_of(9), Everything())
            await writer.send(GOOD, head(1, grant=grant_of(9)) + GOOD[64:])
            await wait_until(lambda: r.port.describe()["frames_dropped"] == 2)
            assert not r.region.array_U8.any()

    run(test())
