"""A flood of connections to a data port, by a process of its own: it holds as many as it is told, and opens another for
each that the port closes, as fast as it can.

    with flood("127.0.0.1:7000", Flood.GARBAGE, source="127.0.0.1") as flooding: ...
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from baton.endpoint import split_endpoint

HELD: Final = 400
"""Connections at a time."""
SECONDS_MAX: Final = 60.0
CONNECTIONS_MAX: Final = 1_000_000
OPENED_PER_TURN: Final = 64
_ROOT: Final = Path(__file__).parents[2]
_RESET: Final = struct.pack("ii", 1, 0)


class Flood(Enum):
    SILENT = "says nothing"
    GARBAGE = "64 bytes of garbage"
    DRIP = "the beginning of a HELLO, a byte at a time"


@dataclass(slots=True)
class Flooding:
    process: subprocess.Popen[str]
    opened: int = 0
    """Once it is over."""


@contextmanager
def flood(endpoint: str, kind: Flood, *, source: str, held: int = HELD) -> Iterator[Flooding]:
    """It has begun, and ends with the block."""
    command = [sys.executable, "-m", "tests.support.flood", endpoint, kind.name, source, str(held)]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "flooding\n"
            flooding = Flooding(process)
            yield flooding
            flooding.opened = int(process.communicate()[0])
        finally:
            process.kill()


def _open(to: tuple[str, int], source: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # or it runs out of ports
    sock.setblocking(False)
    sock.bind((source, 0))
    sock.connect_ex(to)
    return sock


def _attack(endpoint: str, kind: Flood, source: str, held: int) -> int:
    to, says = split_endpoint(endpoint), {Flood.GARBAGE: os.urandom(64), Flood.DRIP: b"B"}.get(kind, b"")
    socks: dict[int, socket.socket] = {}
    epoll, opened, end_s = select.epoll(), 0, time.monotonic() + SECONDS_MAX
    epoll.register(0, select.EPOLLIN | select.EPOLLHUP)
    waits_for = select.EPOLLIN | select.EPOLLRDHUP
    while time.monotonic() < end_s and opened < CONNECTIONS_MAX:
        for _ in range(min(OPENED_PER_TURN, held - len(socks))):
            sock = _open(to, source)
            socks[sock.fileno()] = sock
            epoll.register(sock, waits_for | (select.EPOLLOUT if says else 0))
            opened += 1
            if opened == held:
                print("flooding", flush=True)
        for number, events in epoll.poll(0.05):
            if number == 0:
                return opened
            if events & ~select.EPOLLOUT:
                socks.pop(number).close()
                continue
            with suppress(OSError):
                socks[number].send(says)
            epoll.modify(number, waits_for)
        if kind is Flood.DRIP:
            for sock in socks.values():
                with suppress(OSError):
                    sock.send(b"t")
    return opened


if __name__ == "__main__":
    print(_attack(sys.argv[1], Flood[sys.argv[2]], sys.argv[3], int(sys.argv[4])))
