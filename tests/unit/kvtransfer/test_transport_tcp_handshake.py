"""Who gets a tcp data connection, and who does not."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from baton.ids import Epoch
from kvtransfer.transport import ConnectError
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import open_connection
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import CODEC, TcpHello, TcpWelcome, TcpWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import REGION_NBYTES, Recorder, pair_of, run
from tests.support.tcp_harness import (
    EPOCH,
    PAIR,
    Raw,
    receiving,
    wait_until,
)

HANDSHAKES = {
    "garbage": (b"\x16\x03\x01" + bytes(61), {"MALFORMED": 1}),
    "an answer first": (CODEC.encode(wire.Answer(proof=bytes(32))), {"OUT_OF_ORDER": 1}),
    "an unknown pair": (
        CODEC.encode(wire.Hello(pair=pair_of(99), epoch=EPOCH, link=1, payload=TcpHello(stream=0).encode())),
        {"NOT_EXPECTED": 1},
    ),
    "no tag": (
        CODEC.encode(wire.Hello(pair=PAIR, epoch=EPOCH, link=1, payload=TcpHello(stream=0).encode())),
        {"SECRET": 1},
    ),
    "an older epoch": (
        CODEC.encode(wire.Hello(pair=PAIR, epoch=Epoch(1), link=1, payload=TcpHello(stream=0).encode())),
        {"EPOCH": 1},
    ),
}


@pytest.mark.parametrize("name", HANDSHAKES)
def test_a_bad_handshake_is_refused(name: str) -> None:
    """Told why, closed, counted; no fence, for nothing of it ever had a right."""
    packet, refused = HANDSHAKES[name]

    async def test() -> None:
        async with receiving() as r:
            sock = await open_connection(r.endpoint.address, asyncio.get_running_loop())
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

    async def test() -> None:
        async with receiving() as r:
            untagged = wire.Hello(pair=PAIR, epoch=EPOCH, link=1, payload=TcpHello(stream=0).encode())
            hello = CODEC.tagged(r.endpoint.secret, untagged)
            loop, nonces, answers, socks = asyncio.get_running_loop(), [], [], []
            for _ in range(2):
                socks.append(await open_connection(r.endpoint.address, loop))
                peer = Raw(socks[-1])
                await peer.send(CODEC.encode(hello))
                challenge = await peer.receive()
                assert isinstance(challenge, wire.Challenge)
                nonces.append(challenge.nonce)
                proof = CODEC.writer_proof(r.endpoint.secret, hello, nonces[0])
                await peer.send(CODEC.encode(wire.Answer(proof=proof)))
                answers.append(await peer.receive())
            for sock in socks:
                sock.close()
            assert isinstance(answers[0], wire.Welcome)
            assert answers[1] == wire.Refused(reason=wire.RefusalReason.SECRET)

    run(test())


def test_a_silent_stranger_is_dropped_and_others_are_limited() -> None:
    """Three connections that say nothing, and two places: the oldest has to go, then the others time out."""
    config = PortLimits(handshakes_max=2, handshake_ms_max=1_000)

    async def test() -> None:
        async with receiving(config) as r:
            loop = asyncio.get_running_loop()
            socks = [await open_connection(r.endpoint.address, loop) for _ in range(3)]
            answers = [await Raw(sock).receive() for sock in socks]
            for sock in socks:
                sock.close()
            reasons = [answer.reason.name for answer in answers if isinstance(answer, wire.Refused)]
            assert reasons == ["HANDSHAKES_MAX", "DEADLINE", "DEADLINE"]
            assert r.refused == {"HANDSHAKES_MAX": 1, "DEADLINE": 2}

    run(test())


def test_proved_connections_are_limited() -> None:
    """One place, two streams wanted: the link is not made, and says why; the stream that was made leaves with BYE."""
    config = PortLimits(connections_max=1)

    async def test() -> None:
        async with receiving(config) as r:
            source_U8, loop = np.ones(REGION_NBYTES, np.uint8), asyncio.get_running_loop()
            with pytest.raises(ConnectError) as caught:
                await TcpWriterLink.connect(
                    LinkParts(r.endpoint, PAIR, Recorder(), loop), source_U8, TcpConfig(streams=2)
                )
            assert caught.value.reason is wire.RefusalReason.CONNECTIONS_MAX
            await wait_until(lambda: not r.port.describe()["connections_writing"])
            assert r.events.gone == []

    run(test())


@pytest.mark.parametrize("started", [0, 1])
def test_a_link_without_a_thread_for_each_stream_is_not_made(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """Two streams are connected, and the process can have none or one thread more: both leave with BYE, and their
    sockets and what was started are gone."""
    real, left = threading.Thread.start, [started]

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("tcp-send-"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    async def test() -> None:
        async with receiving() as r:
            source_U8, loop, events = np.ones(REGION_NBYTES, np.uint8), asyncio.get_running_loop(), Recorder()
            with pytest.raises(ConnectError, match="no thread to send with: can't start new thread"):
                await TcpWriterLink.connect(LinkParts(r.endpoint, PAIR, events, loop), source_U8, TcpConfig(streams=2))
            await wait_until(lambda: not r.port.describe()["connections_writing"])
            assert (r.events.gone, events.lost) == ([], [])
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("tcp-send-")]

    run(test())


def test_a_writer_trusts_nobody_who_does_not_know_the_secret() -> None:
    """An impostor that welcomes everybody gets no link, and the secret never crosses the wire."""

    async def test() -> None:
        async with receiving() as r:
            seen = bytearray()

            async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                seen.extend(await reader.readexactly(64))
                writer.write(CODEC.encode(wire.Challenge(nonce=bytes(32))))
                seen.extend(await reader.readexactly(64))
                says = TcpWelcome(region_nbytes=1, frame_bytes_max=1, frame_segments_max=1).encode()
                welcome = wire.Welcome(proof=bytes(32), payload=says)
                writer.write(CODEC.encode(welcome))
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(impostor, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                endpoint = type(r.endpoint)(
                    transport=r.endpoint.transport,
                    address=f"127.0.0.1:{port}",
                    secret=r.endpoint.secret,
                    epoch=EPOCH,
                )
                source_U8, loop = np.ones(REGION_NBYTES, np.uint8), asyncio.get_running_loop()
                with pytest.raises(ConnectError, match="does not know the pair's secret"):
                    await TcpWriterLink.connect(LinkParts(endpoint, PAIR, Recorder(), loop), source_U8)
            assert len(seen) == 128
            assert endpoint.secret not in seen

    run(test())
