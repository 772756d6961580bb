"""The socket by which gRPC wakes the event loop: whatever is in it is read at once."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

from baton.rpc_wakes import WakeReader, whole_wakes

FIRST_CHANNEL = """
import asyncio
from baton.rpc_client import ChannelLimits, Channels
from baton.rpc_wakes import WakeReader

async def main():
    channels = Channels(limits=ChannelLimits())
    channels.get("127.0.0.1:9")
    keys = asyncio.get_running_loop()._selector.get_map().values()
    print(sum(isinstance(key.fileobj, WakeReader) for key in keys))
    await channels.close()

asyncio.run(main())
"""
FIRST_SERVER = """
import asyncio, random
from baton.rpc import RpcLimits, RpcServer
from baton.rpc_wakes import WakeReader

async def main():
    server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
    await server.start("127.0.0.1:0")
    keys = asyncio.get_running_loop()._selector.get_map().values()
    print(sum(isinstance(key.fileobj, WakeReader) for key in keys))
    await server.stop(0)

asyncio.run(main())
"""


def test_all_that_waits_is_read_at_once_and_nothing_is_waited_for() -> None:
    """Two hundred events while the loop was busy: one turn takes the word of them all, and one that comes after another
    loop has been there takes nothing."""
    with whole_wakes():
        reader, writer = socket.socketpair()
    with reader, writer:
        assert isinstance(reader, WakeReader)
        for _ in range(200):
            writer.send(b"1")
        assert reader.recv(1) == b"1" * 200
        assert reader.recv(1) == b""


def test_only_who_asks_gets_such_a_pair() -> None:
    """Not another thread meanwhile, and nobody afterwards."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    with whole_wakes():
        other = threading.Thread(target=lambda: pairs.append(socket.socketpair()))
        other.start()
        other.join()
    pairs.append(socket.socketpair())
    assert [type(end) for pair in pairs for end in pair] == [socket.socket] * 4
    for pair in pairs:
        for end in pair:
            end.close()


def test_grpc_reads_by_it() -> None:
    """The loop of a process watches one, whether it makes a channel first or a server: gRPC is as we believe it is."""
    for script in (FIRST_CHANNEL, FIRST_SERVER):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
