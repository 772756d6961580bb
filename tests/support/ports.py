"""Ports of 127.0.0.1 for servers that keep theirs when they are started again."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST: Final = 10_000
TRIES_MAX: Final = 1_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, all different, and none that the kernel gives to outgoing connections: one of those
    could have it while its server is away."""
    highest = int(RANGE_FILE.read_text().split()[0]) - 1
    assert highest - LOWEST > TRIES_MAX, f"{RANGE_FILE} leaves too few ports"
    rng = random.SystemRandom()
    ports: list[int] = []
    with ExitStack() as stack:
        for _ in range(TRIES_MAX):
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free for a server
            try:
                probe.bind(("127.0.0.1", rng.randint(LOWEST, highest)))
            except OSError:
                continue
            ports.append(int(probe.getsockname()[1]))
    assert len(ports) == count, "no free port was found"
    return ports
