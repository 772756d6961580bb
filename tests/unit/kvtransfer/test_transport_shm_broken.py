"""shm connections that break while both processes live: the writer's word still reaches the receiver."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from kvtransfer.transport import ConnectError
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import shm
from kvtransfer.transports.control_channel import RefusalReason
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.shm import CODEC, ShmWriterLink, socket_address
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import DEADLINE_S, Gate, Receiver, Recorder, grant_of, linked, ops_of, receiver, run
from tests.support.shm_harness import LINK_EPOCH as EPOCH
from tests.support.shm_harness import LINK_PAIR as PAIR

GRANT = grant_of(7)


def cut(r: Receiver) -> None:
    """Shut down every socket that the port has accepted, as a fault from outside would."""
    for connection in r.port._connections.values():
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


async def fenced(r: Receiver) -> str:
    """Fence the pair; the evidence."""
    r.port.fence(PAIR, EPOCH)
    await r.events.until(lambda e: bool(e.gone))
    assert r.events.gone_epochs == [(PAIR, EPOCH)]
    return r.events.gone[0][2]


async def until_proved(r: Receiver) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while r.port._connections:  # noqa: ASYNC110 - the port tells nobody when nothing is fenced
            await asyncio.sleep(0)


@pytest.mark.parametrize("connections_max", [1, 1024])
def test_the_word_of_a_writer_whose_socket_broke_arrives_on_another(
    monkeypatch: pytest.MonkeyPatch, connections_max: int
) -> None:
    """Cut in the middle of a copy: no evidence before the copy has ended and the region is unmapped; then the writer
    says so on a new connection, a later link of the same epoch works, and a fence has nothing to wait for. The broken
    connection may have the only place: the word that makes room is heard all the same."""
    gate = Gate(monkeypatch)

    async def test() -> None:
        async with receiver(PortLimits(connections_max=connections_max)) as r:
            async with linked(r) as (link, events):
                link.post(GRANT, ops_of([0], [0], [64]))
                assert gate.reached.wait(DEADLINE_S)
                cut(r)
                async with asyncio.timeout(DEADLINE_S):
                    while not r.port.describe()["connections_unproved"]:  # noqa: ASYNC110 - as above
                        await asyncio.sleep(0)
                assert r.port.describe()["connections_made"] == 1
                gate.open.set()
                await events.until(lambda e: bool(e.lost))
                assert events.lost == [(PAIR, "the receiver closed the connection or died")]
                assert link.describe()["bye_sent"] is True
            await until_proved(r)
            async with linked(r) as (second, _):
                assert r.port.describe()["connections_writing"] == 1
                assert second.describe()["state"] == "open"
            assert await fenced(r) == "2 acknowledged"
            assert r.port.describe()["refused"] == {}

    run(test())


def test_a_handshake_that_breaks_after_the_region_left_leaves_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver has sent its descriptor and counts a writer; the connection breaks before the writer maps it."""

    async def test() -> None:
        async with receiver() as r:

            def map_region(fd: int, nbytes: int, address: str) -> None:
                assert r.port.describe()["connections_writing"] == 1
                cut(r)
                raise ConnectError(f"{address}: no room to map {nbytes} bytes")

            monkeypatch.setattr(shm, "map_region", map_region)
            loop = asyncio.get_running_loop()
            with pytest.raises(ConnectError, match="no room to map"):
                await ShmWriterLink.connect(
                    LinkParts(r.port.expect(PAIR, EPOCH), PAIR, Recorder(), loop), np.zeros(1, np.uint8)
                )
            assert await fenced(r) == "1 acknowledged"

    run(test())


def test_a_late_bye_for_a_nonce_that_was_never_given_proves_nothing() -> None:
    """Whoever does not know the challenge of a connection cannot speak for it; behind a HELLO it is out of order."""

    async def test() -> None:
        async with receiver() as r, linked(r):
            secret = r.port.expect(PAIR, EPOCH).secret
            loop = asyncio.get_running_loop()
            hello = CODEC.tagged(secret, wire.Hello(pair=PAIR, epoch=EPOCH))
            scripts: tuple[list[wire.Message], ...] = ([], [hello])
            for before in scripts:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.setblocking(False)
                    sock.connect(socket_address(r.port.address))
                    for message in (*before, wire.LateBye(nonce=bytes(32))):
                        sock.send(CODEC.encode(message))
                    async with asyncio.timeout(DEADLINE_S):
                        while await loop.sock_recv(sock, 4096):
                            pass  # the challenge, the refusal; then the end
                assert r.port.describe()["connections_writing"] == 1
            assert r.port.describe()["refused"] == {RefusalReason.OUT_OF_ORDER.name: 1}

    run(test())
