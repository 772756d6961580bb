"""How a port accepts, on a listener whose `accept` fails in the ways that accept(2) names."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any, Final

import pytest

from kvtransfer.transports.receiver_port import BasePort, Connection, PortLimits
from kvtransfer.transports.shm import ShmReceiverPort
from tests.support.shm_harness import Recorder

DEADLINE_S: Final = 30.0
GONE: Final = ("ECONNABORTED", "EPROTO", "EPERM", "ENETDOWN", "EHOSTUNREACH", "EOPNOTSUPP")
FULL: Final = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM")


class Listener(socket.socket):
    """Fails with these errors first."""

    failures: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            number = self.failures.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


class Port(ShmReceiverPort):
    """On any listener; it keeps what it accepts."""

    def __init__(self, listener: Listener, got: asyncio.Future[socket.socket]) -> None:
        limits = PortLimits(accept_pause_ms=1)
        BasePort.__init__(self, Connection, listener=listener, address="", events=Recorder(), limits=limits)
        self.got = got

    def _admit(self, sock: socket.socket, _address: Any) -> None:
        self.got.set_result(sock)


async def accepted(failures: list[str]) -> tuple[int, list[str]]:
    """Connect once; how often the port paused, and what the loop was told of exceptions."""
    loop = asyncio.get_running_loop()
    reported: list[str] = []
    loop.set_exception_handler(lambda _, context: reported.append(repr(context.get("exception"))))
    got: asyncio.Future[socket.socket] = loop.create_future()
    with Listener() as listener, socket.socket() as peer:
        listener.failures = [getattr(errno, name) for name in failures]
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        port = Port(listener, got)
        peer.setblocking(False)
        await loop.sock_connect(peer, listener.getsockname())
        try:
            async with asyncio.timeout(DEADLINE_S):
                (await got).close()
        finally:
            await port.close()
    refused = BasePort.describe(port)["refused"]
    assert isinstance(refused, dict)
    return refused.get("DESCRIPTORS", 0), reported


@pytest.mark.parametrize("name", GONE)
def test_a_connection_that_is_gone_concerns_nobody_else(name: str) -> None:
    """More of them than are accepted at a time: the good one behind them is accepted, and nothing is logged."""
    assert asyncio.run(accepted([name] * 9)) == (0, [])


@pytest.mark.parametrize("name", FULL)
def test_without_descriptors_it_pauses(name: str) -> None:
    """Each time once, and then the connection is accepted."""
    assert asyncio.run(accepted([name] * 2)) == (2, [])


def test_an_error_of_ours_is_told() -> None:
    """EINVAL means that the socket does not listen: that is a bug, and it is not hidden."""
    pauses, reported = asyncio.run(accepted(["EINVAL"]))
    assert (pauses, len(reported)) == (0, 1)
    assert "Invalid argument" in reported[0]
