"""The last word on a connection, and what the kernel makes of it where something was left unread."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import sys
import termios
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import UNREAD_BYTES_MAX, close_politely, take_leave
from kvtransfer.transports.rdma import CODEC as RDMA
from kvtransfer.transports.rdma import HostBytes, RdmaMemory, RdmaWriterLink, RegionAddress
from kvtransfer.transports.tcp import CODEC as TCP
from kvtransfer.transports.tcp import FRAME_BYTES_MAX, MESSAGE_BYTES, SEGMENT_BYTES, Ack, ReceiveStream, TcpWriterLink
from kvtransfer.transports.ucx import CODEC as UCX
from kvtransfer.transports.ucx import UcxWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.support.rdma_harness import CONFIG, double
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, pair_of, run
from tests.support.tcp_harness import wait_until
from tests.support.ucx_double import AgentDouble, agents
from tests.unit.kvtransfer.test_transport_tcp_writer import linked

__all__ = ["agents", "double"]

PAIR, EPOCH = pair_of(2), Epoch(3)
WAITING_BYTES = 1 << 17
BYE = b"this was all"
REFUSALS = 1000
"""More bytes than one call reads, of any wire."""


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends; the second has room for much less than WAITING_BYTES."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    theirs.settimeout(DEADLINE_S)
    return ours, theirs


def heard(sock: socket.socket) -> tuple[bytes, str]:
    """All that comes, and how it ends. From now on there is room for it: else the sender's kernel would send a little
    at a time, with pauses that double."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    data = bytearray()
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionResetError:
        return bytes(data), "reset"
    return bytes(data), "EOF"


def just_close(sock: socket.socket, last_word: bytes) -> None:
    sock.send(last_word)
    sock.close()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("leave", "arrives"), [(just_close, False), (take_leave, True)])
def test_the_last_word_arrives_from_a_side_that_has_left_something_unread(
    leave: Callable[[socket.socket, bytes], None], arrives: bool, blocking: bool
) -> None:
    """The peer reads slowly, so the word is still on our side of the network when we close. With something unread there
    the kernel resets the connection, and throws away what the peer has not got yet."""
    ours, theirs = connected()
    with ours, theirs:
        ours.sendall(bytes(WAITING_BYTES))
        theirs.send(b"unread")
        assert select.select([ours], [], [], DEADLINE_S)[0]
        ours.setblocking(blocking)
        leave(ours, BYE)
        assert ours.fileno() == -1
        data, end = heard(theirs)
    assert (data == bytes(WAITING_BYTES) + BYE, end) == ((True, "EOF") if arrives else (False, "reset"))


def test_a_peer_that_goes_on_talking_is_not_listened_to_without_end() -> None:
    """Reading before closing has a limit, whoever is at the other end."""

    class Talker:
        read_bytes, closed = 0, False

        def recv(self, nbytes: int, flags: int) -> bytes:
            assert flags == socket.MSG_DONTWAIT
            self.read_bytes += nbytes
            return bytes(nbytes)

        def close(self) -> None:
            self.closed = True

    talker = Talker()
    close_politely(talker)  # type: ignore[arg-type]
    assert (talker.read_bytes, talker.closed) == (UNREAD_BYTES_MAX, True)


def unread_nbytes(sock: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_fence_arrives_from_a_receiver_that_leaves_payload_unread() -> None:
    """tcp, a made link: the writer has sent on after its receiver stopped taking bytes, and reads slowly. It hears of
    the fence all the same, and then the end of the connection, no reset."""

    async def test() -> None:
        ours, theirs = connected()
        with theirs:
            ours.sendall(bytes(WAITING_BYTES))
            ended = asyncio.Event()
            connection: Any = SimpleNamespace(sock=ours, pair=PAIR, epoch=EPOCH, index=0, share=None)
            stream = ReceiveStream(
                connection,
                memory_U8=SOURCE_U8,
                region_nbytes=len(SOURCE_U8),
                frame_bytes_max=FRAME_BYTES_MAX,
                loop=loop_now(),
                sealed=lambda *_: None,
                ended=lambda _: ended.set(),
            )
            stream.start()
            stream.stop(wire.Fence(epoch=EPOCH))
            async with asyncio.timeout(DEADLINE_S):
                await ended.wait()
            theirs.send(b"payload")
            await wait_until(lambda: unread_nbytes(ours) == len(b"payload"))
            stream.join()
            assert ours.fileno() == -1
            data, end = heard(theirs)
        fence = TCP.encode(wire.Fence(epoch=EPOCH))
        assert (data == bytes(WAITING_BYTES) + fence, end) == (True, "EOF")

    run(test())


def test_what_a_writer_has_sent_arrives_though_it_leaves_acknowledgements_unread() -> None:
    """tcp, a made link: the receiver reads slowly, and the writer closes with an acknowledgement not looked at. Every
    frame comes, and the BYE behind them, by which the pair need not be fenced."""
    grant, events = grant_of(7), Recorder()

    async def test() -> None:
        ours, theirs = connected()
        async with linked(events, ends=(ours, theirs), bye_ms_max=DEADLINE_S * 1000) as (link, by_hand):
            loop_now().remove_reader(ours)  # from here on the link's loop comes to nothing that the receiver says
            link.post(grant, ops_of([0], [0], [WAITING_BYTES]))
            await by_hand.say(Ack(sequence=0, landed=True))
            await wait_until(lambda: unread_nbytes(ours) == MESSAGE_BYTES and unread_nbytes(theirs) > 0)
            closing = asyncio.ensure_future(link.close())
            await wait_until(lambda: link._streams[0].thread is None)
            link._cut_off()  # `bye_ms_max` is over
            await closing
            assert ours.fileno() == -1
            theirs.settimeout(DEADLINE_S)
            data, end = heard(theirs)
        assert len(data) == MESSAGE_BYTES + SEGMENT_BYTES + WAITING_BYTES + MESSAGE_BYTES
        assert TCP.decode(data[-MESSAGE_BYTES:]) == wire.Bye(sequence=1, epoch=EPOCH)
        assert end == "EOF"
        assert events.completed == [(grant, 1, WAITING_BYTES, False)]

    assert WAITING_BYTES < REGION_NBYTES
    run(test())


async def link_tcp(listens: str) -> None:
    await TcpWriterLink.connect(
        LinkParts(endpoint_of(TransportName.TCP, listens), PAIR, Recorder(), loop_now()), SOURCE_U8
    )


async def link_ucx(listens: str) -> None:
    await UcxWriterLink.connect(
        LinkParts(endpoint_of(TransportName.UCX, listens), PAIR, Recorder(), loop_now()), SOURCE_U8
    )


async def link_rdma(listens: str) -> None:
    memory = RdmaMemory(region=HostBytes(lambda: SOURCE_U8), config=CONFIG, remote_writes=False)
    try:
        endpoint = endpoint_of(TransportName.RDMA, RegionAddress(listens=listens, base=0, rkey=0).encode())
        await RdmaWriterLink.connect(LinkParts(endpoint, PAIR, Recorder(), loop_now()), memory)
    finally:
        await memory.close()


SOURCE_U8 = np.zeros(1 << 12, np.uint8)
loop_now = asyncio.get_running_loop


def endpoint_of(transport: TransportName, address: str) -> DataEndpoint:
    return DataEndpoint(transport=transport, address=address, secret=os.urandom(16), epoch=EPOCH)


Link = Callable[[str], Coroutine[Any, Any, None]]
REFUSED: dict[Link, bytes] = {
    link_tcp: TCP.encode(wire.Refused(reason=wire.RefusalReason.EPOCH)),
    link_rdma: RDMA.encode(wire.Refused(reason=wire.RefusalReason.EPOCH)),
    link_ucx: UCX.encode(wire.Refused(reason=wire.RefusalReason.EPOCH)),
}
BYES: dict[Link, bytes] = {
    link_tcp: TCP.encode(wire.Bye(sequence=0, epoch=EPOCH)),
    link_rdma: RDMA.encode(wire.Bye(epoch=EPOCH)),
    link_ucx: UCX.encode(wire.Bye(epoch=EPOCH)),
}


@pytest.mark.parametrize("link", BYES)
def test_a_writer_that_is_refused_at_length_leaves_in_order(
    link: Link, double: dict[str, str], agents: type[AgentDouble]
) -> None:
    """The receiver says more than the writer reads before it gives up: it hears the BYE all the same, and then the end
    of the connection, no reset."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            host, port = listener.getsockname()
            linking = asyncio.ensure_future(link(f"{host}:{port}"))
            async with asyncio.timeout(DEADLINE_S):
                sock, _ = await loop_now().sock_accept(listener)
                with sock:
                    hello = await loop_now().sock_recv(sock, 1 << 12)
                    await loop_now().sock_sendall(sock, REFUSED[link] * REFUSALS)
                    with pytest.raises(ConnectError, match="refused by the receiver: EPOCH"):
                        await linking
                    sock.setblocking(True)
                    sock.settimeout(DEADLINE_S)
                    data, end = heard(sock)
        assert hello and (data, end) == (BYES[link], "EOF")

    run(test())
