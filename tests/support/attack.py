"""Attacks on a router that serves others meanwhile. All processes are real: a router with gRPC and HTTP, a prefill node
and a decode node with mock engines, a directory.

    with front_door() as front:
        async def attack() -> None:
            ...

        front.run(nobody_notices(front, attack))

One front door may serve all tests of a file. Attackers come from ATTACKER: limits of addresses are to hit them, and not
the bystanders, who come from 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
from batonpb import inference_pb2_grpc

from baton.endpoint import split_endpoint
from cli.supervisor import ROUTER_NAME
from engine.demo_model import DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    http_endpoint,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    wait_for,
)
from tests.support.fork_server import forked_children
from tests.support.loop_holds import HOLDS_ENV, HoldReader, Holds

HANG_MS: Final = 250.0
"""A hold that only an attack makes. Without what bounds them, attacks held a router for 450 to 2,800 ms; what a loaded
machine adds is far less. How little they hold it now is measured by `benchmarks/attacks.py` and `make soak`."""
ATTACKER: Final = "127.0.0.66"
STREAMS: Final = 20
HTTP_SHARE: Final = 4
"""Every fourth stream is one over HTTP."""
ANSWER_TOKENS: Final = 60
PROMPT_TOKENS: Final = 24
STEP_DELAY_MS: Final = 5
"""Of each of the mock model's four layers: a stream gets about 40 tokens a second."""
BOUND_S_MAX: Final = 30.0
_T = TypeVar("_T")
TINY: Final = DemoModelParams(num_layers=1, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the router serves clients."""

    grpc: str
    http: str
    metrics: str
    """Over HTTP too, on a port of its own."""


class Front(RunningCluster):
    """A running cluster whose processes say how long they have held their loops."""

    folder: Path
    target: Target
    token_name: Callable[[int], str] = str
    """How the HTTP side calls a token."""

    @property
    def http(self) -> str:
        """The HTTP endpoint of the router."""
        return self.target.http

    @contextmanager
    def texts_stopped(self) -> Iterator[None]:
        """The router's processes that read long texts stand still. There are some once it has read some."""
        threads = Path(f"/proc/{self.cluster.pids[ROUTER_NAME]}/task").iterdir()
        stopped = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def holds(self, name: str = ROUTER_NAME) -> HoldReader:
        """Of one process. The caller closes it."""
        return await HoldReader.connect(self.folder, name)


@contextmanager
def front_door(
    *,
    router_flags: Mapping[str, object] | None = None,
    decode_flags: Mapping[str, object] | None = None,
    both: Mapping[str, object] | None = None,
    api_key: str | None = None,
    tokenizer: bool = False,
    **spec: Any,
) -> Iterator[Front]:
    """A router and the nodes behind it, warmed up, for the length of the block. `spec` goes to `mock_spec`. `api_key`
    is what everybody but attackers sends. With `tokenizer` the router has one, and a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="baton-attack-"))
    router_flags = {"http_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", **(router_flags or {})}
    if tokenizer:
        write_demo_model(folder / "tiny", TINY)
        router_flags["model"] = str(folder / "tiny")
    made = mock_spec(
        blocks=spec.pop("blocks", 2_000),
        router_flags=router_flags,
        decode_flags={"engine.mock_layer_delay_ms": STEP_DELAY_MS, **(decode_flags or {})},
        both=both,
        **spec,
    )
    made = replace(made, env={**made.env, HOLDS_ENV: str(folder)})
    with asyncio.Runner() as runner, forked_children():
        front = Front(made, runner)
        front.folder, front.api_key = folder, api_key
        if tokenizer:
            front.token_name = TextCodec.load(folder / "tiny").token_text
        try:
            front.run(front.start())
            metrics = front.cluster.router_others["metrics"]
            front.target = Target(grpc=front.cluster.router, http=http_endpoint(front), metrics=metrics)
            yield front
        finally:
            front.run(front.stop())
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _expected(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt, and the answer to it."""
    prompt = random_prompt(random.Random(seed), PROMPT_TOKENS)
    return tuple(prompt), tuple(mock_tokens(prompt, ANSWER_TOKENS))


@dataclass(slots=True, kw_only=True)
class Bystander:
    """One client who asks again when it has its answer. `got` is of the answer that it is reading."""

    seed: int
    over_http: bool
    expected: tuple[str, ...]
    got: list[str] = field(default_factory=list)
    answers: int = 0
    messages: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between two messages with tokens of the same answer, by the clock."""
    waits_s: list[float] = field(default_factory=list)
    """From a request to its first token, by the clock."""
    wrong: str = ""

    def begin(self) -> None:
        self.got = []
        self._last_s, self._first = asyncio.get_running_loop().time(), True

    def take(self, tokens: Iterable[str]) -> None:
        now_s = asyncio.get_running_loop().time()
        (self.waits_s if self._first else self.gaps_s).append(now_s - self._last_s)
        self._last_s, self._first = now_s, False
        self.got.extend(tokens)
        self.messages += 1

    def end(self) -> None:
        self.check()
        assert len(self.got) == ANSWER_TOKENS, f"{self}: ended after {len(self.got)} tokens"
        self.answers += 1
        self.begin()

    def check(self) -> None:
        assert tuple(self.got) == self.expected[: len(self.got)], f"{self}: wrong tokens {self.got}"

    def __str__(self) -> str:
        return f"bystander {self.seed} over {'HTTP' if self.over_http else 'gRPC'}, after {self.answers} answers"

    _last_s: float = 0.0
    _first: bool = True


class Bystanders:
    """All of them, and what the router has kept its loop for since they began."""

    def __init__(self, front: Front, streams: int) -> None:
        self.each = [
            Bystander(seed=i, over_http=http, expected=tuple(map(front.token_name if http else str, _expected(i)[1])))
            for i, http in ((i, i % HTTP_SHARE == HTTP_SHARE - 1) for i in range(streams))
        ]
        self._front = front
        self._holds: Holds | None = None

    async def until_answers(self, count: int) -> None:
        """Wait until each has this many whole answers."""

        async def holds() -> bool:
            return all(each.answers >= count or each.wrong for each in self.each)

        await wait_for(holds, f"{count} answers to each bystander", story=self._front.story)

    def check(self) -> None:
        """Each got exactly its tokens, to the last that came, and none was refused or cut off. After the block."""
        wrong = [each.wrong for each in self.each if each.wrong]
        assert not wrong, "\n".join([*wrong[:5], self._front.story()])
        for each in self.each:
            each.check()
            assert each.messages, f"{each} got nothing"

    def longest_hold_ms(self) -> float:
        """The most processor time for which the router kept its loop from turning meanwhile; see `loop_holds`."""
        return self.holds.longest_ms

    @property
    def holds(self) -> Holds:
        assert self._holds is not None, "it is known after the block"
        return self._holds


@asynccontextmanager
async def bystanders(front: Front, streams: int = STREAMS) -> AsyncIterator[Bystanders]:
    """Within the block answers stream all the while; it begins when all have tokens, and ends when all have more."""
    others = Bystanders(front, streams)
    holds = await front.holds()
    channel = grpc.aio.insecure_channel(front.cluster.router, options=[("grpc.use_local_subchannel_pool", 1)])
    tasks = [
        asyncio.create_task(
            _ask_forever(each, _over_http(front, each) if each.over_http else _over_grpc(front, channel, each))
        )
        for each in others.each
    ]
    try:
        await _more(others, front)
        await holds.reset()
        yield others
        await _more(others, front)
        others._holds = await holds.read()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channel.close()
        await holds.close()


async def nobody_notices(
    front: Front, attack: Callable[[], Awaitable[_T]], *, streams: int = STREAMS, hold_ms_max: float = HANG_MS
) -> _T:
    """Play an attack beside bystanders: each gets exactly its tokens, and the router's loop is never kept from turning
    for `hold_ms_max`. Returns what the attack returns."""
    async with bystanders(front, streams) as others:
        result = await attack()
    others.check()
    assert others.longest_hold_ms() < hold_ms_max, others.holds
    return result


async def _more(others: Bystanders, front: Front) -> None:
    before = [each.messages for each in others.each]

    async def holds() -> bool:
        return all(each.messages > count or each.wrong for each, count in zip(others.each, before, strict=True))

    await wait_for(holds, "tokens of each bystander", story=front.story)


async def _ask_forever(each: Bystander, asking: AsyncIterator[None]) -> None:
    """An error is kept, and ends this one's asking."""
    try:
        each.begin()
        async for _ in asking:
            each.end()
    except Exception as error:  # noqa: BLE001 - whatever it is, `check` reports it
        each.wrong = f"{each}: {type(error).__name__}: {error}"


async def _over_grpc(front: Front, channel: grpc.aio.Channel, each: Bystander) -> AsyncIterator[None]:
    """Yields after each answer."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    message = make_request(_expected(each.seed)[0], max_tokens=ANSWER_TOKENS)
    while True:
        async for event in stub.Generate(message, timeout=CALL_S_MAX, metadata=front.client.metadata):
            if event.tokens.ids:
                each.take(map(str, event.tokens.ids))
        yield


async def _over_http(front: Front, each: Bystander) -> AsyncIterator[None]:
    """Yields after each answer. One connection for all."""
    body = json.dumps(
        {
            "prompt": _expected(each.seed)[0],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "logprobs": 0,  # there each token has a name
        }
    ).encode()
    reader, writer = await asyncio.open_connection(*split_endpoint(front.http))
    try:
        while True:
            writer.write(post("/v1/completions", body, headers=dict(front.client.metadata)))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head + await reader.read(2000)
            while (line := await reader.readline()) != b"0\r\n":
                assert line, "the connection ended in the middle of an answer"
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    assert "choices" in data, data
                    if (logprobs := data["choices"][0]["logprobs"]) is not None:
                        each.take(logprobs["tokens"])
            await reader.readline()
            yield
    finally:
        writer.close()


def post(path: str, body: bytes, *, headers: Mapping[str, str] | None = None) -> bytes:
    """One HTTP call as it is on the wire."""
    lines = [f"POST {path} HTTP/1.1", "host: router", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def attacker_connection(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from ATTACKER."""
    return await asyncio.open_connection(*split_endpoint(endpoint), local_addr=(ATTACKER, 0))


def attacker_socket(endpoint: str) -> socket.socket:
    """A plain, blocking one from ATTACKER."""
    return socket.create_connection(split_endpoint(endpoint), timeout=CALL_S_MAX, source_address=(ATTACKER, 0))


async def http_attack(front: Front | Target, raw: bytes, *, timeout_s: float = BOUND_S_MAX) -> tuple[int, bytes]:
    """Send bytes to the HTTP port from ATTACKER, and read until the router closes or the answer is whole; its status
    and body. (0, b"") if the connection is closed without an answer."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await attacker_connection(front.http)
        try:
            writer.write(raw)
            with suppress(ConnectionError):
                await writer.drain()
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, b""
            length = next((h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), None)
            count = int(length.split(b":")[1]) if length is not None else -1
            body = await (reader.readexactly(count) if count >= 0 else reader.read())
            return int(head.split(b" ", 2)[1]), body
        finally:
            writer.close()


@asynccontextmanager
async def attacker_endpoint(endpoint: str) -> AsyncIterator[str]:
    """An endpoint that leads to this one, with connections that come from ATTACKER: gRPC cannot choose its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            there, back = await attacker_connection(endpoint)
            try:
                await asyncio.gather(_pump(reader, back), _pump(there, writer))
            finally:
                back.close()
        except (OSError, asyncio.CancelledError):
            pass  # a cancelled handler of a connection would be reported as one that failed
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def attacker_channel(front: Front | Target, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC channel of its own to the router, from ATTACKER."""
    target = front if isinstance(front, Target) else front.target
    async with (
        attacker_endpoint(target.grpc) as endpoint,
        grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1), *options]) as channel,
    ):
        yield channel
