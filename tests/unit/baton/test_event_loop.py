"""How many sockets have their say in one turn of the loop."""

from __future__ import annotations

import socket
from collections import Counter

from baton.event_loop import SOCKETS_MAX, new_event_loop


def test_nobody_is_kept_waiting_by_many() -> None:
    """Four times as many sockets as one turn takes always have something to read, and nobody reads it. Each turn hears
    as many as it may, and four turns hear every one once."""
    loop, heard = new_event_loop(), Counter[int]()
    pairs = [socket.socketpair() for _ in range(4 * SOCKETS_MAX)]
    try:
        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            loop.add_reader(ours, heard.update, [number])
        counts = []
        for _ in range(4):
            before = heard.total()
            loop.call_soon(loop.stop)
            loop.run_forever()
            counts.append(heard.total() - before)
        assert counts == [SOCKETS_MAX] * 4
        assert set(heard.values()) == {1}
    finally:
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()
        loop.close()
