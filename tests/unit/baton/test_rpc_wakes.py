"""The socket by which gRPC wakes the event loop: much of what is in it is read at once."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading

import pytest

from baton.grpc_core import WakeReader, whole_wakes

FIRST_CHANNEL = """
import asyncio
from baton.rpc import ChannelLimits, Channels
from baton.grpc_core import WakeReader

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
from baton.grpc_core import WakeReader

async def main():
    server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
    await server.start("127.0.0.1:0")
    keys = asyncio.get_running_loop()._selector.get_map().values()
    print(sum(isinstance(key.fileobj, WakeReader) for key in keys))
    await server.stop(0)

asyncio.run(main())
"""
ECHO = """
import asyncio, grpc, sys

begun, five = [], asyncio.Event()

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            if details.method == "/a/slow":
                begun.append(1)
                if len(begun) % 5 == 0:
                    five.set()
                await asyncio.Event().wait()
            if details.method == "/a/begun":
                await five.wait()
                five.clear()
            return b"x"
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)

asyncio.run(main())
"""
TWO_LOOPS = """
import asyncio, os, sys
from baton.rpc import ChannelLimits, Channels

target = "127.0.0.1:" + sys.argv[1]

async def call(channels, method):
    return await channels.get(target).unary_unary(method)(b"", timeout=20)

async def leaves_five_behind():
    channels = Channels(limits=ChannelLimits())
    calls = [asyncio.ensure_future(call(channels, "/a/slow")) for _ in range(5)]
    await call(channels, "/a/begun")
    for each in calls:
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await channels.close()

loop = asyncio.new_event_loop()
channels = Channels(limits=ChannelLimits())
loop.run_until_complete(call(channels, "/a/fast"))
for _ in range(4):
    asyncio.run(leaves_five_behind())
    print(loop.run_until_complete(call(channels, "/a/fast")), flush=True)
os._exit(0)
"""


def test_a_held_up_thread_goes_on_after_one_turn_and_nothing_is_waited_for() -> None:
    """A thread has written until the kernel held it up, while the loop was busy. After one turn there is room again;
    the rest is read one by one, and where another loop has been first nothing is."""
    with whole_wakes():
        reader, writer = socket.socketpair()
    with reader, writer:
        assert isinstance(reader, WakeReader)
        writer.setblocking(False)
        written = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                written += writer.send(b"1")
        room = select.poll()
        room.register(writer, select.POLLOUT)
        assert room.poll(0) == []
        assert reader.recv(1) == b"1" * (written - 32)
        assert room.poll(0) == [(writer.fileno(), select.POLLOUT)]
        assert [reader.recv(1) for _ in range(33)] == [b"1"] * 32 + [b""]


def test_a_process_with_one_loop_reads_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left that another turn of the loop would be for, and where nothing is nothing is waited for."""
    monkeypatch.setattr(WakeReader, "one_loop", True)
    with whole_wakes():
        reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(b"1" * 40)
        assert [reader.recv(1), reader.recv(1)] == [b"1" * 40, b""]


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


def test_what_a_closed_loop_has_left_behind_keeps_no_call_of_another_waiting() -> None:
    """Calls are cancelled on a loop that is closed then, with their ends still to come. The next call on another loop
    of the process has its answer, not when something else happens."""
    with subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as echo:
        assert echo.stdin is not None
        assert echo.stdout is not None
        with echo.stdin:
            port = echo.stdout.readline().strip()
            command = [sys.executable, "-W", "ignore", "-c", TWO_LOOPS, port]
            done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.stdout == "b'x'\n" * 4, done.stderr
