"""What every cluster test shares: a cluster of processes on a loop of its own, a client, and the proof of conservation.

    with running(ClusterSpec(prefill=2, decode=2, ...)) as cluster:
        answer = cluster.run(cluster.client.generate([1, 2, 3], max_tokens=8))
        cluster.run(assert_conserved(cluster))

Nothing here sleeps to wait for an outcome: conditions are polled, each with a deadline.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import grpc
import grpc.aio
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc

from baton.errors import BatonError, Reason
from baton.rpc import rpc_errors
from baton.tls import Kind
from cli.services import Service
from cli.supervisor import ROUTER_NAME, Cluster, ClusterSpec
from engine.build import EngineKind
from engine.mock import MockConfig
from engine.types import SamplingParams
from tests.support.fork_server import forked_children
from tests.support.mock_reference import mock_reference
from tests.support.operators import as_operator

_T = TypeVar("_T")

CALL_S_MAX: Final = 60.0
"""Deadline of every call here that is not about deadlines: long past what a loaded machine takes."""
CONSERVED_S_MAX: Final = 30.0
POLL_S: Final = 0.02
WARM_UP_CALLS: Final = 8
_NOT_READY: Final = frozenset({Reason.NO_PREFILL_NODE, Reason.NO_DECODE_NODE})
_NODES: Final = (Service.PREFILL, Service.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request's whole answer, as the client saw it."""

    ids: list[int]
    text: str
    reason: common_pb2.FinishReason
    stats: inference_pb2.RequestStats
    batches: int
    """Messages with tokens."""
    logprobs: list[common_pb2.TokenLogprobs]


def make_request(
    prompt: Sequence[int] | str,
    *,
    max_tokens: int | None = None,
    model: str | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """Greedy unless `sampling` (fields of inference.Sampling) says otherwise."""
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(**{"temperature": 0.0, **sampling}))
    if max_tokens is not None:
        request.sampling.max_tokens = max_tokens
    if model is not None:
        request.model = model
    if cache_salt:
        request.cache_salt = cache_salt
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


class Client:
    """Calls one router. Lives on the loop that it was made on."""

    def __init__(self, endpoint: str, *, api_key: str | None = None, own_connection: bool = False) -> None:
        """Clients of one process share a connection, unless they want their own."""
        self.endpoint = endpoint
        self.metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        options = [("grpc.use_local_subchannel_pool", 1)] if own_connection else None
        self._channel = grpc.aio.insecure_channel(endpoint, options=options)
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def connect(self) -> None:
        """Without a call, which would do so on its own."""
        await asyncio.wait_for(self._channel.channel_ready(), CALL_S_MAX)

    async def generate(self, prompt: Sequence[int] | str, *, timeout_s: float = CALL_S_MAX, **request: Any) -> Answer:
        """One streamed answer; `request` goes to `make_request`. Raises BatonError, AssertionError on a gap."""
        return await self.send(make_request(prompt, **request), timeout_s=timeout_s)

    async def send(self, request: inference_pb2.GenerateRequest, *, timeout_s: float = CALL_S_MAX) -> Answer:
        """Like `generate`, of a request that is made already."""
        with rpc_errors(self.endpoint):
            return await collect(self.stub.Generate(request, timeout=timeout_s, metadata=self.metadata))

    async def unary(
        self, prompt: Sequence[int] | str, *, timeout_s: float = CALL_S_MAX, **request: Any
    ) -> inference_pb2.GenerateResponse:
        """One answer at once. Raises BatonError."""
        with rpc_errors(self.endpoint):
            response: inference_pb2.GenerateResponse = await self.stub.GenerateUnary(
                make_request(prompt, **request), timeout=timeout_s, metadata=self.metadata
            )
            return response

    async def close(self) -> None:
        await self._channel.close()


async def collect(call: Any) -> Answer:
    """Read a Generate call to its end: started once, each token index once and in order, finished once and last."""
    ids: list[int] = []
    text, batches = "", 0
    logprobs: list[common_pb2.TokenLogprobs] = []
    finished: inference_pb2.Finished | None = None
    started = 0
    async for event in call:
        assert finished is None, "something came after finished"
        match event.WhichOneof("event"):
            case "started":
                started += 1
            case "tokens":
                assert event.tokens.first_index == len(ids), (event.tokens.first_index, len(ids))
                ids.extend(event.tokens.ids)
                text += event.tokens.text
                logprobs.extend(event.tokens.logprobs)
                batches += 1
            case "finished":
                finished = event.finished
    assert started == 1, started
    assert finished is not None, "the stream ended without finished"
    assert finished.stats.output_tokens == len(ids)
    return Answer(ids=ids, text=text, reason=finished.reason, stats=finished.stats, batches=batches, logprobs=logprobs)


def mock_params(**changes: Any) -> SamplingParams:
    """Greedy mock sampling as the router hands it on, with changes."""
    fields: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "max_tokens": 1}
    return SamplingParams(**{**fields, **changes})


def mock_tokens(prompt: Sequence[int], count: int, *, config: MockConfig | None = None, **sampling: Any) -> list[int]:
    """What a mock cluster must answer (no stop rule applied)."""
    return mock_reference(prompt, mock_params(**sampling), count, config=config or MockConfig())


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 1000) for _ in range(length)]


def mock_spec(
    *,
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    blocks: int = 300,
    both: Mapping[str, object] | None = None,
    prefill_flags: Mapping[str, object] | None = None,
    decode_flags: Mapping[str, object] | None = None,
    mixed_flags: Mapping[str, object] | None = None,
    router_flags: Mapping[str, object] | None = None,
    node_flags: Mapping[str, Mapping[str, object]] | None = None,
    tls: bool = False,
) -> ClusterSpec:
    """A mock cluster whose freed blocks are poisoned. `both` goes to prefill, decode and mixed nodes."""
    engine = {"engine.poison_freed": True, **(both or {})}
    return ClusterSpec(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        blocks=blocks,
        engine_kind=EngineKind.MOCK,
        flags={
            Service.PREFILL: {**engine, **(prefill_flags or {})},
            Service.DECODE: {**engine, **(decode_flags or {})},
            Service.MIXED: {**engine, **(mixed_flags or {})},
            Service.ROUTER: {"lame_duck_ms": 0, **(router_flags or {})},
        },
        node_flags=node_flags or {},
        tls=tls,
        start_ms_max=60_000,
    )


class StatusSource(Protocol):
    """Whatever `assert_conserved` can ask: a cluster of processes, or one in this process."""

    async def statuses(self) -> dict[str, node_pb2.NodeStatus]:
        """By name, of every node that runs, the router among them."""
        ...

    def story(self) -> str:
        """What to print beside a failure."""
        ...


def log_text(cluster: Cluster, name: str) -> str:
    return (cluster.log_dir / f"{name}.log").read_text(encoding="utf-8", errors="replace")


async def wait_exit(cluster: Cluster, name: str) -> int:
    return await asyncio.shield(cluster._children[name].exited)


def send_signal(cluster: Cluster, name: str, signum: signal.Signals) -> None:
    cluster._children[name].send_signal(signum)


@asynccontextmanager
async def started(spec: ClusterSpec) -> AsyncIterator[Cluster]:
    cluster = Cluster(spec)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


class RunningCluster:
    """A started cluster of processes, its client, and the loop that both live on (`run`). Made by `running`."""

    client: Client
    api_key: str | None = None
    """That the client has."""

    def __init__(self, spec: ClusterSpec, runner: asyncio.Runner) -> None:
        self.cluster = Cluster(spec)
        self._runner = runner
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._down: set[str] = set()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run one coroutine to its end, on the cluster's loop. Main thread only."""
        return self._runner.run(work)

    async def start(self, *, warm_up: bool = True) -> None:
        """Start everything. With `warm_up`, return only when the router knows of the nodes, and they of each other."""
        await self.cluster.start()
        self.client = Client(self.cluster.router, api_key=self.api_key)
        if warm_up:
            await wait_for(self._warm, "the nodes to know of each other", story=self.story)

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        if hasattr(self, "client"):
            await self.client.close()
        await self.cluster.stop()

    def channel(self, name: str) -> grpc.aio.Channel:
        """A channel to one process, closed with the cluster."""
        return self._channel(self.cluster.endpoints[name])

    def command_channel(self, name: str) -> grpc.aio.Channel:
        """To where the process serves Node, and a router Pins."""
        return self._channel(self.cluster.command_endpoints[name])

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            files = self.cluster.operator_files
            if files is None or endpoint == self.cluster.router:
                self._channels[endpoint] = grpc.aio.insecure_channel(endpoint)
            else:
                mine = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (files.ca, files.key, files.cert)))
                named = [("grpc.ssl_target_name_override", Kind.NODE.dns_name)]
                self._channels[endpoint] = grpc.aio.secure_channel(endpoint, mine, options=named)
        return self._channels[endpoint]

    def set_down(self, name: str, down: bool = True) -> None:
        """A process that was killed or stopped on purpose: its status is not asked for."""
        (self._down.add if down else self._down.discard)(name)

    async def status(self, name: str) -> node_pb2.NodeStatus:
        stub = node_pb2_grpc.NodeStub(self.command_channel(name))
        with rpc_errors(name):
            status: node_pb2.NodeStatus = await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=CALL_S_MAX)
            return status

    async def order(self, name: str, what: str) -> None:
        """Cordon, Uncordon, Drain or Undrain of one node."""
        call = getattr(node_pb2_grpc.NodeStub(self.command_channel(name)), what)
        with rpc_errors(name):
            await call(node_pb2.LifecycleOrder(why="the test says so"), timeout=CALL_S_MAX, metadata=as_operator())

    async def statuses(self) -> dict[str, node_pb2.NodeStatus]:
        services = dict(self.cluster.spec.processes())
        names = [n for n, s in services.items() if s is not Service.DIRECTORY and n not in self._down]
        return dict(zip(names, await asyncio.gather(*map(self.status, names)), strict=True))

    def log_text(self, name: str) -> str:
        """All that the process has logged so far."""
        return log_text(self.cluster, name)

    async def wait_exit(self, name: str) -> int:
        """Wait for one process to end; its exit status, negative for a signal."""
        return await wait_exit(self.cluster, name)

    def send_signal(self, name: str, signum: signal.Signals) -> None:
        """Does nothing to a process that has ended."""
        send_signal(self.cluster, name, signum)

    def story(self) -> str:
        tails = []
        for name in self.cluster.pids:
            lines = self.log_text(name).splitlines()[-12:]
            tails.append(f"--- {name}\n" + "\n".join(lines))
        return "\n".join(tails)

    async def _warm(self) -> bool:
        """Prompts too short to fill a block: the prefix caches stay empty."""
        calls = [self.client.generate([1 + i], max_tokens=2) for i in range(WARM_UP_CALLS)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BatonError) and outcome.reason in _NOT_READY:
                return False
            if isinstance(outcome, BaseException):
                raise outcome
        return True


def http_endpoint(cluster: RunningCluster) -> str:
    """Where the router serves it."""
    return cluster.cluster.router_others["http"]


def metrics_text(cluster: RunningCluster) -> str:
    """What the router tells Prometheus."""
    status, _, body = http_call(cluster.cluster.router_others["metrics"], "GET", "/metrics")
    assert status == 200
    return body.decode()


def http_call(
    endpoint: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str | bytes] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One call on a connection of its own: status, headers by their names in lower case, body."""
    connection = http.client.HTTPConnection(endpoint, timeout=CALL_S_MAX)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


@contextmanager
def running(spec: ClusterSpec, *, warm_up: bool = True) -> Iterator[RunningCluster]:
    """A cluster of processes for the length of the block."""
    with asyncio.Runner() as runner, forked_children():
        cluster = RunningCluster(spec, runner)
        try:
            cluster.run(cluster.start(warm_up=warm_up))
            yield cluster
        finally:
            cluster.run(cluster.stop())


async def wait_for(
    holds: Callable[[], Awaitable[bool]],
    what: str,
    *,
    story: Callable[[], str] = str,
    timeout_s: float = CONSERVED_S_MAX,
) -> None:
    """Poll until `holds()`; fail with the story when it does not within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await holds():  # noqa: ASYNC110 - another process has no event to wait on
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"waited {timeout_s:g} s in vain for {what}\n{story()}") from None


def leftovers(statuses: Mapping[str, node_pb2.NodeStatus]) -> dict[str, dict[str, int]]:
    """What each node still has that it should not: empty when all is conserved."""
    left: dict[str, dict[str, int]] = {}
    for name, status in statuses.items():
        blocks = status.record.load.blocks
        found = {
            "requests": status.requests,
            "grants_received": status.grants_received,
            "grants_written": status.grants_written,
            "unacknowledged_writes": status.unacknowledged_writes,
            "held": blocks.held - status.engine.padding_blocks,
            "writer_owned": blocks.writer_owned,
            "quarantined": blocks.quarantined,
            "promised": blocks.promised,
            "waiting": status.record.load.waiting_requests,
            "conservation_errors": status.conservation_errors,
        }
        wrong = {what: count for what, count in found.items() if count}
        if wrong:
            left[name] = wrong
    return left


async def assert_conserved(cluster: StatusSource, *, timeout_s: float = CONSERVED_S_MAX) -> float:
    """Wait until no node holds anything of a request: everything is free or cached. Returns how long that took, in
    seconds. A violation of conservation that a node has counted fails at once.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        statuses = await cluster.statuses()
        errors = {name: s.conservation_errors for name, s in statuses.items() if s.conservation_errors}
        assert not errors, f"blocks were not conserved: {errors}\n{cluster.story()}"
        left = leftovers(statuses)
        if not left:
            return loop.time() - began_s
        assert loop.time() - began_s < timeout_s, f"still held after {timeout_s:g} s: {left}\n{cluster.story()}"
        await asyncio.sleep(POLL_S)


async def error_of(call: Awaitable[Any]) -> BatonError:
    """The BatonError that a call ends with."""
    try:
        result = await call
    except BatonError as error:
        return error
    raise AssertionError(f"no error, but {result!r}")


__all__ = [
    "CALL_S_MAX",
    "ROUTER_NAME",
    "Answer",
    "Client",
    "RunningCluster",
    "assert_conserved",
    "collect",
    "error_of",
    "leftovers",
    "make_request",
    "mock_params",
    "mock_spec",
    "mock_tokens",
    "random_prompt",
    "running",
    "wait_for",
]
