"""A tcp link whose receiver is played by hand: what it makes of acknowledgements, late ones and none at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.ids import GrantId
from kvtransfer.transport import DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import tcp
from kvtransfer.transports.tcp import (
    CODEC,
    FRAME_BYTES_MAX,
    FRAME_SEGMENTS_MAX,
    MESSAGE_BYTES,
    SEGMENT_BYTES,
    Ack,
    Frame,
    TcpWelcome,
    TcpWriterLink,
)
from kvtransfer.transports.writer_link import LinkLimits, LinkParts
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, run
from tests.support.shm_peer import source_bytes
from tests.support.tcp_harness import EPOCH, GRANT, PAIR, wait_until

OTHER = grant_of(8)
NBYTES = 1000
FRAME_NBYTES = MESSAGE_BYTES + SEGMENT_BYTES + NBYTES


class ByHand:
    """The receiver's end of one stream."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def take(self, nbytes: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while nbytes:
                data = await asyncio.get_running_loop().sock_recv(self.sock, nbytes)
                assert data
                nbytes -= len(data)

    async def say(self, *messages: wire.Message) -> None:
        """All in one packet."""
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(map(CODEC.encode, messages)))


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


@asynccontextmanager
async def linked(
    events: Recorder, *, ends: tuple[socket.socket, socket.socket] | None = None, **limits: int
) -> AsyncIterator[tuple[TcpWriterLink, ByHand]]:
    """`ends` are of one connection, the link's first; both are taken over."""
    ours, theirs = ends or connection()
    theirs.setblocking(False)
    link = TcpWriterLink(
        LinkParts(
            endpoint=DataEndpoint(transport=TransportName.TCP, address="by-hand:1", secret=b"", epoch=EPOCH),
            pair=PAIR,
            events=events,
            loop=asyncio.get_running_loop(),
        ),
        LinkLimits(**{"bye_ms_max": 50, **limits}),
        socks=[ours],
        welcome=TcpWelcome(
            region_nbytes=REGION_NBYTES,
            frame_bytes_max=FRAME_BYTES_MAX,
            frame_segments_max=FRAME_SEGMENTS_MAX,
        ),
        source_region_U8=source_bytes(1, REGION_NBYTES),
    )
    await link._start()
    try:
        with theirs:
            yield link, ByHand(theirs)
    finally:
        await link.close()


class FailsOnce(Recorder):
    """Whoever is told of the first completion cannot take it."""

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        super().writes_completed(grant, writes, bytes_written, copied)
        if len(self.completed) == 1:
            raise RuntimeError("the test says so")


def test_an_error_in_one_message_loses_none_behind_it_in_the_packet() -> None:
    """Three acknowledgements come in one packet, and the completion that the first one leads to raises: the other
    batches complete all the same, each as its own acknowledgement says, and the error is told."""

    async def test() -> None:
        events, reported = FailsOnce(), list[BaseException]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        async with linked(events) as (link, receiver):
            for grant in (GRANT, OTHER, GRANT):
                link.post(grant, ops_of([0], [0], [NBYTES]))
            await receiver.take(3 * FRAME_NBYTES)
            await receiver.say(*(Ack(sequence=n, landed=n != 1) for n in range(3)))
            await events.until(lambda e: len(e.completed) == 3)
            assert events.completed == [
                (GRANT, 1, NBYTES, True),
                (OTHER, 1, NBYTES, False),
                (GRANT, 1, NBYTES, True),
            ]
            assert [str(error) for error in reported] == ["the test says so"]
            assert events.lost == []

    run(test())


def test_a_batch_that_cannot_be_cut_leaves_no_stream_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """That shows when the batch is about to be sent at once: it is not taken, and the stream sends what comes next."""

    class Uncut:
        def __iter__(self) -> Uncut:
            return self

        def __next__(self) -> Frame:
            raise MemoryError

    async def test() -> None:
        events = Recorder()
        async with linked(events) as (link, receiver):
            await wait_until(lambda: link._streams[0].idle)
            with monkeypatch.context() as broken:
                broken.setattr(tcp, "cut_frames", lambda *_: Uncut())
                with pytest.raises(MemoryError):
                    link.post(GRANT, ops_of([0], [0], [NBYTES]))
            link.post(GRANT, ops_of([0], [0], [NBYTES]))
            async with asyncio.timeout(DEADLINE_S):
                await receiver.take(FRAME_NBYTES)
            await receiver.say(Ack(sequence=0, landed=True))
            await events.until(lambda e: e.completed == [(GRANT, 1, NBYTES, True)])

    run(test())


def test_a_slow_network_is_no_reason_to_end_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of an abandoned grant takes the network far longer than `drain_ms_max`: the link lives for as long as the
    peer's kernel acknowledges more bytes at each look. Then it does not any more, and one look later the link ends."""
    looks: list[int] = []

    def acknowledged(_: socket.socket) -> int:
        looks.append(len(looks))
        return min(looks[-1], 20)

    monkeypatch.setattr(tcp, "acknowledged_bytes", acknowledged)

    async def test() -> None:
        events = Recorder()
        async with linked(events, drain_ms_max=2) as (link, receiver):
            link.post(GRANT, ops_of([0], [0], [NBYTES]))
            await receiver.take(FRAME_NBYTES)
            link.abandon(GRANT)
            link.abandon(GRANT)
            await events.until(lambda e: bool(e.lost))
            assert events.lost == [(PAIR, "writes of an abandoned grant have not moved for 2 ms")]
            assert events.completed == [(GRANT, 1, NBYTES, False)]
            assert len(looks) == 22

    run(test())


def test_an_abandoned_grant_is_looked_at_no_more_when_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgement comes before the limit: the link goes on, and carries another grant."""
    monkeypatch.setattr(tcp, "acknowledged_bytes", lambda _: 0)

    async def test() -> None:
        events = Recorder()
        async with linked(events, drain_ms_max=60_000) as (link, receiver):
            link.post(GRANT, ops_of([0], [0], [NBYTES]))
            await receiver.take(FRAME_NBYTES)
            link.abandon(GRANT)
            (timer,) = link._drain_timers.values()
            await receiver.say(Ack(sequence=0, landed=True))
            await events.until(lambda e: bool(e.completed))
            timer._run()
            assert link._drain_timers == {}
            link.post(OTHER, ops_of([0], [0], [NBYTES]))
            await receiver.take(FRAME_NBYTES)
            await receiver.say(Ack(sequence=1, landed=True))
            await events.until(lambda e: len(e.completed) == 2)
            assert ([copied for *_, copied in events.completed], events.lost) == ([True, True], [])

    run(test())
