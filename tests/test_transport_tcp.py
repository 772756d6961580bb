"""What is particular to tcp: frames are checked before a byte lands, and a grant can be taken back in mid-frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.region import Region
from kvtransfer.transport import Seal
from kvtransfer.transports import tcp_connect
from kvtransfer.transports import tcp_wire as wire
from kvtransfer.transports.tcp import (
    StreamLimits,
    TcpConnectError,
    TcpReceiverConfig,
    TcpReceiverPort,
    TcpWriterConfig,
    TcpWriterLink,
)
from kvtransfer.transports.tcp_socket import TcpSocketOptions
from tests.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, pair_of, run
from tests.transport_kits import Everything

EPOCH = Epoch(3)
PAIR = pair_of(2)
GRANT = grant_of(7)
PAYLOAD = bytes(range(1, 201)) * 5


class First:
    """Ranges of a grant that may write the first bytes of the region."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        return bool((dst_S + nbytes_S <= self.nbytes).all())


class Receiving:
    def __init__(self, config: TcpReceiverConfig | None) -> None:
        self.events = Recorder()
        self.region = Region.create(REGION_NBYTES, "test-region")
        self.port = TcpReceiverPort(
            region=self.region,
            events=self.events,
            loop=asyncio.get_running_loop(),
            randomness=os.urandom,
            config=config,
        )
        self.endpoint = self.port.expect(PAIR, EPOCH)

    @property
    def refused(self) -> object:
        return self.port.describe()["refused"]

    async def until_refused(self, reasons: dict[str, int]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.refused != reasons:
                await asyncio.sleep(0)


@asynccontextmanager
async def receiving(config: TcpReceiverConfig | None = None) -> AsyncIterator[Receiving]:
    it = Receiving(config)
    try:
        yield it
    finally:
        await it.port.close()
        it.region.close()


class Raw:
    """A welcomed stream, spoken by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, *parts: bytes) -> None:
        await self._loop.sock_sendall(self.sock, b"".join(parts))

    async def receive(self) -> wire.Message | None:
        """The next message; None: closed."""
        packet = bytearray()
        async with asyncio.timeout(DEADLINE_S):
            while len(packet) < wire.MESSAGE_BYTES:
                data = await self._loop.sock_recv(self.sock, wire.MESSAGE_BYTES - len(packet))
                if not data:
                    assert not packet
                    return None
                packet += data
        return wire.decode(packet)


@asynccontextmanager
async def raw(r: Receiving, stream: int = 0, link: int = 1) -> AsyncIterator[Raw]:
    hello = wire.Hello(pair=PAIR, epoch=EPOCH, link=link, stream=stream)
    loop = asyncio.get_running_loop()
    sock, _ = await tcp_connect.connect_stream(r.endpoint, hello, loop, TcpSocketOptions())
    sock.setblocking(False)
    try:
        yield Raw(sock)
    finally:
        sock.close()


def table(*segments: tuple[int, int]) -> bytes:
    return np.array(segments, dtype="<i8").tobytes()


def head(
    sequence: int = 0,
    *,
    epoch: Epoch = EPOCH,
    grant: GrantId = GRANT,
    segments: int = 1,
    nbytes: int = len(PAYLOAD),
) -> bytes:
    return wire.encode(wire.Data(sequence=sequence, epoch=epoch, grant=grant, segments=segments, payload_nbytes=nbytes))


GOOD = head() + table((0, len(PAYLOAD))) + PAYLOAD
BAD_FRAMES = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64, b" "), "MALFORMED"),
    "another version": (GOOD[:4] + b"\x09\x00" + GOOD[6:], "VERSION"),
    "unknown kind": (GOOD[:6] + b"\x63\x00" + GOOD[8:], "MALFORMED"),
    "padding used": (wire.encode(wire.Bye(sequence=0, epoch=EPOCH))[:-1] + b"x", "MALFORMED"),
    "receiver's own message": (wire.encode(wire.Ack(sequence=0, landed=True)), "OUT_OF_ORDER"),
    "a second hello": (wire.encode(wire.Hello(pair=PAIR, epoch=EPOCH, link=1, stream=0)), "OUT_OF_ORDER"),
    "another epoch": (head(epoch=Epoch(EPOCH + 1)) + GOOD[64:], "EPOCH"),
    "a gap in the sequence": (head(1) + GOOD[64:], "SEQUENCE"),
    "replayed": (GOOD + GOOD, "REPLAYED"),
    "too many bytes": (head(nbytes=wire.FRAME_BYTES_MAX + 1), "OVERSIZED"),
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
            assert r.refused == {reason: 1}
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
            async with asyncio.timeout(DEADLINE_S):
                while not r.region.array_U8[499]:
                    await asyncio.sleep(0)
            r.port.forbid(GRANT)
            half_U8 = r.region.array_U8.copy()
            await writer.send(GOOD[-500:])
            assert await writer.receive() == wire.Ack(sequence=0, landed=False)
            assert np.array_equal(r.region.array_U8, half_U8)
            assert half_U8[:500].all()
            assert not half_U8[500:].any()
            await writer.send(head(1) + GOOD[64:])
            assert await writer.receive() == wire.Ack(sequence=1, landed=False), "it stays forbidden"
            r.port.allow(PAIR, EPOCH, later, First(4096))
            await writer.send(head(2, grant=later) + GOOD[64:])
            assert await writer.receive() == wire.Ack(sequence=2, landed=True)
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
            async with asyncio.timeout(DEADLINE_S):
                while not r.region.array_U8[499]:
                    await asyncio.sleep(0)
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
            await one.send(wire.encode(wire.SealFrame(sequence=0, seal=seal, streams_mask=0b11)))
            assert await one.receive() == wire.Ack(sequence=0, landed=True)
            assert r.events.seals == []
            await two.send(wire.encode(wire.SealFrame(sequence=0, seal=seal, streams_mask=0b11)))
            await r.events.until(lambda e: bool(e.seals))
            assert r.events.seals == [(PAIR, seal)]
            await two.send(wire.encode(wire.SealFrame(sequence=1, seal=seal, streams_mask=0b01)))
            await r.events.until(lambda e: bool(e.gone))
            assert r.refused == {"MALFORMED": 1}
            assert r.events.seals == [(PAIR, seal)]

    run(test())


def test_an_unread_acknowledgement_ends_the_stream() -> None:
    """A writer that sends and never reads: past the limit of unread acknowledgements it is refused."""
    limits = StreamLimits(ack_frames_max=1, outbox_bytes_max=1)

    async def test() -> None:
        async with receiving(TcpReceiverConfig(stream=limits)) as r, contextlib.AsyncExitStack() as stack:
            r.port._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # what is accepted inherits it
            writer = await stack.enter_async_context(raw(r))
            seals = (
                wire.encode(
                    wire.SealFrame(
                        sequence=i, seal=Seal(grant=GRANT, epoch=EPOCH, writes=0, bytes_written=0), streams_mask=1
                    )
                )
                for i in range(1 << 20)
            )
            with pytest.raises(OSError, match=r"reset|pipe|abort"):
                for message in seals:
                    await writer.send(message)
            await r.events.until(lambda e: bool(e.gone))
            assert r.refused == {"ACKS_UNREAD": 1}

    run(test())


HANDSHAKES = {
    "garbage": (b"\x16\x03\x01" + bytes(61), {"MALFORMED": 1}),
    "an answer first": (wire.encode(wire.Answer(proof=bytes(32))), {"OUT_OF_ORDER": 1}),
    "an unknown pair": (
        wire.encode(wire.Hello(pair=pair_of(99), epoch=EPOCH, link=1, stream=0)),
        {"NOT_EXPECTED": 1},
    ),
    "an older epoch": (wire.encode(wire.Hello(pair=PAIR, epoch=Epoch(1), link=1, stream=0)), {"EPOCH": 1}),
}


@pytest.mark.parametrize("name", HANDSHAKES)
def test_a_bad_handshake_is_refused(name: str) -> None:
    """Told why, closed, counted; no fence, for nothing of it ever had a right."""
    packet, refused = HANDSHAKES[name]

    async def test() -> None:
        async with receiving() as r:
            sock = await tcp_connect._connect(r.endpoint, asyncio.get_running_loop())
            with sock:
                stranger = Raw(sock)
                await stranger.send(packet)
                answer = await stranger.receive()
                assert isinstance(answer, wire.Refused)
                assert {answer.reason.name: 1} == refused == r.refused
                assert await stranger.receive() is None
            assert r.events.gone == []

    run(test())


def test_a_recorded_answer_is_of_no_use_a_second_time() -> None:
    """The proof of one handshake, shown in another: its nonce is a new one."""
    hello = wire.Hello(pair=PAIR, epoch=EPOCH, link=1, stream=0)

    async def test() -> None:
        async with receiving() as r:
            loop, nonces, answers, socks = asyncio.get_running_loop(), [], [], []
            for _ in range(2):
                socks.append(await tcp_connect._connect(r.endpoint, loop))
                peer = Raw(socks[-1])
                await peer.send(wire.encode(hello))
                challenge = await peer.receive()
                assert isinstance(challenge, wire.Challenge)
                nonces.append(challenge.nonce)
                proof = wire.writer_proof(r.endpoint.secret, hello, nonces[0])
                await peer.send(wire.encode(wire.Answer(proof=proof)))
                answers.append(await peer.receive())
            for sock in socks:
                sock.close()
            assert isinstance(answers[0], wire.Welcome)
            assert answers[1] == wire.Refused(reason=wire.RefusalReason.SECRET)

    run(test())


def test_a_silent_stranger_is_dropped_and_others_are_limited() -> None:
    """Two connections that say nothing fill the places of strangers: the third is refused, then all time out."""
    config = TcpReceiverConfig(handshakes_max=2, handshake_ms_max=200)

    async def test() -> None:
        async with receiving(config) as r:
            loop = asyncio.get_running_loop()
            socks = [await tcp_connect._connect(r.endpoint, loop) for _ in range(3)]
            answers = [await Raw(sock).receive() for sock in socks]
            for sock in socks:
                sock.close()
            reasons = [answer.reason.name for answer in answers if isinstance(answer, wire.Refused)]
            assert reasons == ["DEADLINE", "DEADLINE", "HANDSHAKES_MAX"]
            assert r.refused == {"HANDSHAKES_MAX": 1, "DEADLINE": 2}

    run(test())


def test_proved_connections_are_limited() -> None:
    """One place, two streams wanted: the link is not made, and says why; the stream that was made leaves with BYE."""
    config = TcpReceiverConfig(connections_max=1)

    async def test() -> None:
        async with receiving(config) as r:
            source_U8, loop = np.ones(REGION_NBYTES, np.uint8), asyncio.get_running_loop()
            with pytest.raises(TcpConnectError) as caught:
                await TcpWriterLink.connect(r.endpoint, PAIR, source_U8, Recorder(), loop, TcpWriterConfig(streams=2))
            assert caught.value.reason is wire.RefusalReason.CONNECTIONS_MAX
            async with asyncio.timeout(DEADLINE_S):
                while r.port.describe()["connections_writing"]:
                    await asyncio.sleep(0)
            assert r.events.gone == []

    run(test())


def test_a_writer_trusts_nobody_who_does_not_know_the_secret() -> None:
    """An impostor that welcomes everybody gets no link, and the secret never crosses the wire."""

    async def test() -> None:
        async with receiving() as r:
            seen = bytearray()

            async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                seen.extend(await reader.readexactly(64))
                writer.write(wire.encode(wire.Challenge(nonce=bytes(32))))
                seen.extend(await reader.readexactly(64))
                welcome = wire.Welcome(proof=bytes(32), region_nbytes=1, frame_bytes_max=1, frame_segments_max=1)
                writer.write(wire.encode(welcome))
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(impostor, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                hello = wire.Hello(pair=PAIR, epoch=EPOCH, link=1, stream=0)
                endpoint = type(r.endpoint)(
                    transport=r.endpoint.transport,
                    address=f"127.0.0.1:{port}",
                    secret=r.endpoint.secret,
                    epoch=EPOCH,
                )
                with pytest.raises(TcpConnectError, match="does not know the pair's secret"):
                    await tcp_connect.connect_stream(endpoint, hello, asyncio.get_running_loop(), TcpSocketOptions())
            assert len(seen) == 128
            assert endpoint.secret not in seen

    run(test())


def test_completions_wait_for_the_acknowledgement() -> None:
    """A forbidden grant: what the writer sent is completed, but not as copied; another's is."""

    async def test() -> None:
        async with receiving() as r:
            source_U8, events = np.full(REGION_NBYTES, 5, np.uint8), Recorder()
            loop, other = asyncio.get_running_loop(), grant_of(8)
            link = await TcpWriterLink.connect(r.endpoint, PAIR, source_U8, events, loop)
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


def test_one_pair_cannot_use_the_grant_of_another() -> None:
    """A grant of another pair, or of another epoch, is as good as none."""

    async def test() -> None:
        async with receiving() as r, raw(r) as writer:
            stranger = Pair(receiver=PAIR.receiver, writer=pair_of(5).writer)
            r.port.allow(stranger, EPOCH, GRANT, Everything())
            r.port.allow(PAIR, Epoch(EPOCH + 1), grant_of(9), Everything())
            await writer.send(GOOD, head(1, grant=grant_of(9)) + GOOD[64:])
            async with asyncio.timeout(DEADLINE_S):
                while r.port.describe()["frames_dropped"] != 2:
                    await asyncio.sleep(0)
            assert not r.region.array_U8.any()

    run(test())
