"""The least that a front door can be: one asyncio loop, or one grpc.aio server, that writes at a pace what a router
writes. `python -m benchmarks.front_door_bare http|grpc|whole|nodes RATE GROUPS` says its port and serves until it is
ended. `whole NODES_PORT` answers without streaming, with the messages that a router and its nodes exchange; `nodes`
are the other end of these.

All streams of a group get their tokens in the same turn, as they do from a decode node's step. Nothing is
detokenised, counted or limited. The pace is that of benchmarks/front_door_node.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from secrets import token_bytes
from typing import Any

import grpc.aio
from batonpb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

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


class Nodes(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """A prefill and a decode node that compute nothing: an answer comes whole, when its last token is due."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due: defaultdict[int, list[decode_pb2.RequestTokens]] = defaultdict(list)
        """By the step that ends them."""
        self._ready: asyncio.Queue[decode_pb2.TokenBatch] = asyncio.Queue()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        await context.send_initial_metadata(())
        yield prefill_pb2.PrefillEvent(
            granted=prefill_pb2.Granted(decode_node="decode-0", decode_incarnation=1, decode_endpoint="127.0.0.1:1")
        )
        first = prefill_pb2.FirstToken(token=3, prompt_tokens_cached=0)
        yield prefill_pb2.PrefillEvent(handed_off=prefill_pb2.HandedOff(transport="shm", first_token=first))
        loop, count = asyncio.get_running_loop(), request.sampling.max_tokens
        step_s = request.prompt[0] / self._rate
        step = int(loop.time() / step_s) + count
        answer = decode_pb2.RequestTokens(key=request.key, ids=[stamp(loop.time())] * count)
        answer.finish = common_pb2.FINISH_REASON_LENGTH
        if step not in self._due:
            loop.call_at(step * step_s, self._end, step)
        self._due[step].append(answer)

    def _end(self, step: int) -> None:
        self._ready.put_nowait(decode_pb2.TokenBatch(requests=self._due.pop(step)))

    async def Subscribe(
        self, requests: AsyncIterator[decode_pb2.SubscribeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        reading = asyncio.ensure_future(_read_all(requests))
        await context.send_initial_metadata(())
        while not reading.done():
            yield await self._ready.get()


async def _read_all(messages: AsyncIterator[Any]) -> None:
    async for _ in messages:
        pass


async def serve_nodes(rate: float) -> int:
    nodes = Nodes(rate)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(nodes, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(nodes, server)
    port: int = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    serve_nodes.server = server  # type: ignore[attr-defined]
    return port


class WholeAnswers:
    """What a router says to nodes for a request, and hears of them: one call, and a part of one stream."""

    def __init__(self, port: int) -> None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._prefill, decode = prefill_pb2_grpc.PrefillStub(channel), decode_pb2_grpc.DecodeStub(channel)
        self._waiting: dict[str, asyncio.Future[decode_pb2.RequestTokens]] = {}
        self._done: list[common_pb2.RequestKey] = []
        self._stream = decode.Subscribe()
        self.reading = asyncio.ensure_future(self._read())
        self.tasks: set[asyncio.Task[None]] = set()

    async def _read(self) -> None:
        await self._stream.write(decode_pb2.SubscribeRequest(open=decode_pb2.SubscribeOpen(packed=True)))
        async for batch in self._stream:
            for message in batch.requests:
                self._waiting.pop(message.key.request).set_result(message)

    async def say_done(self) -> None:
        await asyncio.sleep(0.02)
        done, self._done = self._done, []
        await self._stream.write(decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=done)))

    async def answer(self, asked: dict[str, Any]) -> bytes:
        loop = asyncio.get_running_loop()
        key = common_pb2.RequestKey(request=token_bytes(16).hex())
        request = prefill_pb2.PrefillRequest(
            key=key,
            prompt=asked["prompt"],
            sampling=common_pb2.SamplingSpec(temperature=asked["temperature"], max_tokens=asked["max_tokens"]),
            whole=True,
        )
        self._waiting[key.request] = tokens = loop.create_future()
        async for _ in self._prefill.Prefill(request, timeout=300.0, metadata=(("x-request-id", key.request),)):
            pass
        message = await tokens
        if not self._done:
            self._keep(asyncio.create_task(self.say_done()))
        self._done.append(key)
        choice = {"index": 0, "text": "".join(map(text_of, message.ids)), "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(message.ids)}
        head = {"id": key.request, "object": "text_completion", "created": 1790000000, "model": "mock"}
        return json.dumps({**head, "choices": [choice], "usage": usage}).encode()

    def start(self, asked: dict[str, Any], transport: asyncio.WriteTransport) -> None:
        self._keep(asyncio.create_task(self._reply(asked, transport)))

    async def _reply(self, asked: dict[str, Any], transport: asyncio.WriteTransport) -> None:
        body = await self.answer(asked)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % len(body) + body)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class WholeReply(HttpStream):
    """The same door, whose answers have no stream."""

    answers: WholeAnswers

    def data_received(self, data: bytes) -> None:
        self._read += data
        _, found, body = self._read.partition(b"\r\n\r\n")
        if found and body.endswith(b"}"):
            self._read = b""
            self.answers.start(json.loads(body), self._transport)


async def serve_whole(nodes_port: int) -> int:
    WholeReply.answers = WholeAnswers(nodes_port)
    WholeReply.paces = cycle([Pace(1.0)])
    server = await asyncio.get_running_loop().create_server(WholeReply, "127.0.0.1", 0, backlog=4_096)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def main() -> None:
    door, rate, groups = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    paces = [Pace(rate, number / groups) for number in range(groups)]
    if door == "nodes":
        port = await serve_nodes(rate)
    elif door == "whole":
        port = await serve_whole(int(rate))
    else:
        port = await (serve_http(*paces) if door == "http" else serve_grpc(paces[0]))
    print(port, flush=True)
    # Until whoever started it closes this pipe, or ends.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # gRPC's servers would go on without a loop


if __name__ == "__main__":
    asyncio.run(main())
