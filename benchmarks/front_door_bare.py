"""The least that a front door can be: one asyncio loop, or one grpc.aio server, that writes at a pace what a router
writes. `python -m benchmarks.front_door_bare http|grpc RATE GROUPS` says its port and serves until it is ended.

All streams of a group get their tokens in the same turn, as they do from a decode node's step. Nothing is
detokenised, counted or limited. The pace is that of benchmarks/front_door_node.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import grpc.aio
from batonpb import common_pb2, inference_pb2

from benchmarks.front_door_tokens import first_step_s, stamp, text_of

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNK = (
    'data: {"id":"cmpl-%032x","object":"text_completion","created":1790000000,"model":"mock","choices":[{"index":0,'
    '"text":"'
)
MORE = '","logprobs":null,"finish_reason":null}]}\n\n'
LAST = b'","logprobs":null,"finish_reason":"length"}]}\n\n'
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Pace:
    """Calls its streams for every step; a stream says whether it goes on."""

    def __init__(self, rate: float, share: float = 0.0) -> None:
        self._rate = rate
        self._share = share
        self.streams: dict[Any, int] = {}
        """With what each asks for as its pace."""
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Any, pace: int) -> None:
        self.streams[stream] = pace
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(first_step_s(loop.time(), pace / self._rate, self._share), self._step)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = max(loop.time(), self._due_s + max(self.streams.values()) / self._rate)
        drawn = stamp(loop.time())
        for stream in [stream for stream in self.streams if not stream.step(drawn)]:
            del self.streams[stream]
        self._timer = loop.call_at(self._due_s, self._step) if self.streams else None


class HttpStream(asyncio.Protocol):
    paces: Iterator[Pace]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._pace = next(self.paces)
        self._read = b""
        self._head = (CHUNK % id(self)).encode()

    def data_received(self, data: bytes) -> None:
        self._read += data
        _, found, body = self._read.partition(b"\r\n\r\n")
        if not found or not body.endswith(b"}"):
            return
        self._read = b""
        asked = json.loads(body)
        self._left = asked["max_tokens"]
        self._transport.write(HEAD)
        self._pace.add(self, asked["prompt"][0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._pace.streams.pop(self, None)

    def step(self, drawn: int) -> bool:
        self._left -= 1
        chunk = b"%b%b%b" % (self._head, text_of(drawn).encode(), MORE.encode())
        chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        if self._left:
            self._transport.write(chunk)
            return True
        last = self._head + LAST
        self._transport.write(chunk + b"%x\r\n%b\r\n" % (len(last), last) + DONE)
        return False


class GrpcSteps:
    """One turn for all calls: each waits for the same future."""

    def __init__(self) -> None:
        self.next: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.calls = 0

    def step(self, drawn: int) -> bool:
        tokens = inference_pb2.Tokens(first_index=self.calls, ids=[drawn], text=text_of(drawn))
        self.next.set_result(inference_pb2.GenerateEvent(tokens=tokens).SerializeToString())
        self.next = asyncio.get_running_loop().create_future()
        return self.calls > 0


async def serve_grpc(pace: Pace) -> int:
    steps = GrpcSteps()
    started = inference_pb2.GenerateEvent(started=inference_pb2.Started(request_id="0" * 32, prompt_tokens=16))
    finished = inference_pb2.GenerateEvent(finished=inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH))

    async def generate(request: bytes, context: Any) -> None:
        asked = inference_pb2.GenerateRequest.FromString(request)
        await context.write(started.SerializeToString())
        steps.calls += 1
        pace.add(steps, max(asked.token_ids.ids[0], pace.streams.get(steps, 0)))
        try:
            for _ in range(asked.sampling.max_tokens):
                await context.write(await steps.next)
        finally:
            steps.calls -= 1
        await context.write(finished.SerializeToString())

    handler: Any = grpc.unary_stream_rpc_method_handler(generate)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("baton.v1.Inference", {"Generate": handler})])
    port: int = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    serve_grpc.server = server  # type: ignore[attr-defined]
    return port


async def serve_http(*paces: Pace) -> int:
    HttpStream.paces = cycle(paces)
    server = await asyncio.get_running_loop().create_server(HttpStream, "127.0.0.1", 0, backlog=4_096)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def main() -> None:
    door, rate, groups = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    paces = [Pace(rate, number / groups) for number in range(groups)]
    port = await (serve_http(*paces) if door == "http" else serve_grpc(paces[0]))
    print(port, flush=True)
    # Until whoever started it closes this pipe, or ends.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
