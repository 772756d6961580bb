"""Who makes room for a new connection of a stranger, and that writers are not those who do."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import numpy as np
import pytest

from baton.endpoint import source_of, split_endpoint
from baton.shared_places import SharedPlaces
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import TcpWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import REGION_NBYTES, Recorder, run
from tests.support.tcp_harness import PAIR, Receiving, receiving


def test_a_flood_pushes_out_itself() -> None:
    """Three places. The flood's oldest makes room, for another source too; that one stays until it is the last."""
    strangers = SharedPlaces(3)
    left = [strangers.enter(n, "flood") for n in (1, 2, 3, 4)]
    left.append(strangers.enter(5, "other"))
    left += [strangers.enter(n, "flood") for n in (6, 7)]
    assert left == [None, None, None, 1, 2, 3, 4]
    strangers.leave(5)
    strangers.leave(5)
    assert [strangers.enter(n, "third") for n in (8, 9, 10)] == [None, 6, 8]


def test_a_source_is_an_address_or_a_network_of_ipv6() -> None:
    """All addresses of a /64 are one source; an IPv4 address is itself in both notations."""
    assert source_of("127.0.0.2") == source_of("::ffff:127.0.0.2") == "127.0.0.2"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1:2:3") == "2001:db8::/64"
    assert source_of("2001:db8:0:1::1") != source_of("2001:db8::1")


def connect_from(source: str, r: Receiving) -> socket.socket:
    sock = socket.socket()
    sock.bind((source, 0))
    sock.connect(split_endpoint(r.endpoint.address))
    return sock


@pytest.mark.parametrize("says", [b"", b"B"])
def test_a_writer_needs_no_place_among_strangers(says: bytes) -> None:
    """Twice as many half-open connections as there are places, of the writer's own address, and one from elsewhere. The
    writer gets its link; of the flood the newest are left, and the one from elsewhere. (The writer has a place between
    its connection and its HELLO, unless both come at once.)"""

    async def test() -> None:
        async with receiving(PortLimits(handshakes_max=8, handshake_ms_max=60_000)) as r:
            with ExitStack() as stack:
                elsewhere = stack.enter_context(connect_from("127.0.0.2", r))
                flood = [stack.enter_context(connect_from("127.0.0.1", r)) for _ in range(16)]
                for sock in (elsewhere, *flood):
                    sock.send(says)
                parts = LinkParts(r.endpoint, PAIR, Recorder(), asyncio.get_running_loop())
                link = await TcpWriterLink.connect(parts, np.ones(REGION_NBYTES, np.uint8), TcpConfig(streams=2))
                assert r.refused in ({"HANDSHAKES_MAX": 9}, {"HANDSHAKES_MAX": 10})
                for sock in (elsewhere, *flood[10:]):
                    with pytest.raises(BlockingIOError):
                        sock.recv(1, socket.MSG_DONTWAIT)
                await link.close()

    run(test())
