"""A cluster inside the test's own process and loop, whose protocol can be held still at named points.

Directory, router, prefill and decode nodes are the real `serve` functions, over real gRPC on 127.0.0.1 and the real shm
transport, with the mock engine. The test reaches into the node objects, and closes gates: a request that is *marked*
(its first token is `MARK`) then waits at the gate; all others pass.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, Final
from unittest.mock import patch

from batonpb import decode_pb2, node_pb2, prefill_pb2, transfer_pb2

import decode_node.main
import mixed_node.main
import node.main
import node.transfers
import prefill_node.main
import router.main
import router.serving
from baton.config import describe
from baton.errors import BatonError, Reason
from baton.ids import GrantId, RequestId
from baton.runtime import NodeRuntime
from baton.wire import record_to_proto
from cli.services import Service, config_class, load_config, serve_function
from cli.supervisor import DIRECTORY_NAME, ROUTER_NAME, ClusterSpec
from decode_node.node import DecodeNode
from decode_node.service import ReceiverService
from engine.types import Batch, KvSink
from kvtransfer.protocol.receiver import GrantState
from kvtransfer.receiver import Receiver
from kvtransfer.writer import WriterPeer
from mixed_node.node import MixedNode
from node.fetching import Fetches
from node.peers import Peers
from prefill_node.node import PrefillNode, PrefillService, StepSink
from router.decode_streams import DecodeSubscription
from router.node import RouterNode
from tests.support.cluster_harness import (
    Answer,
    Client,
    mock_tokens,
    wait_for,
)
from tests.support.node_states import decode_state, prefill_state

MARK: Final = 999
"""First token of a marked prompt."""
HELD_S_MAX: Final = 60.0
"""How long a gate holds the engine thread when the test has died."""
CALL_ENDS_S_MAX: Final = 30.0
"""How long gRPC may take to end a call that was cancelled."""
GRPC_CALLS: Final = ("_AioCall.", "UnaryUnaryCall.", "UnaryStreamCall.", "StreamStreamCall.", "_StreamRequestMixin.")
"""Its classes whose methods run as tasks, at the caller's side."""


class Point(Enum):
    """Where a marked request can be held, in the order of its life."""

    PLACEMENT = "a prefill node answers that all decode nodes are full"
    PREFILL_QUEUE = "head of the prefill node's queue"
    RESERVE_ARRIVED = "Reserve has arrived, the decode node has not seen it"
    RESERVE_ANSWERED = "granted, the answer is on its way"
    LAYER = "one layer of one chunk has been posted; the engine thread waits"
    SEAL = "all computed, the seal is not sent"
    COMMIT_ARRIVED = "Commit has arrived, the decode node has not seen it"
    COMMIT_TAKEN = "the decode node has the Commit (never holds)"
    SEAL_LANDED = "the decode node has the seal (never holds)"
    COMMIT_ANSWERED = "committed, the answer is on its way"
    LAST_TOKEN = "the answer's end has reached the router, which has not looked"


def load_with_limits(service: Service, flags: Mapping[str, str]) -> Any:
    """The configuration of a service, with limits that are no settings under their dotted names too."""
    settings = {key.key for key in describe(config_class(service))}
    config = load_config(service, toml_path=None, env={}, flags={k: v for k, v in flags.items() if k in settings})
    return _with_limits(config, {k: v for k, v in flags.items() if k not in settings})


def _with_limits(config: Any, limits: Mapping[str, str]) -> Any:
    """All of them at once: some must fit each other."""
    changed: dict[str, Any] = {}
    for key, text in limits.items():
        name, _, rest = key.partition(".")
        now = changed.get(name, getattr(config, name))
        changed[name] = _with_limits(now, {rest: text}) if rest else type(now)(text)
    return replace(config, **changed) if changed else config


class Gate:
    """Holds marked requests while closed; `reached` is set when one comes, open or closed."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.closed = False
        self._opened = asyncio.Event()
        self._thread_may_go = threading.Event()
        self._late: list[Callable[[], None]] = []

    def close(self) -> None:
        self.closed = True
        self._opened.clear()
        self._thread_may_go.clear()

    def open(self) -> None:
        self.closed = False
        self._opened.set()
        self._thread_may_go.set()
        late, self._late = self._late, []
        for act in late:
            act()

    async def passing(self) -> None:
        self.reached.set()
        if self.closed:
            await self._opened.wait()

    def passing_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self.reached.set)
        if self.closed:
            assert self._thread_may_go.wait(HELD_S_MAX), "the test never opened the gate"

    def do(self, act: Callable[[], None]) -> None:
        """`act` now, or when the gate opens."""
        self.reached.set()
        if self.closed:
            self._late.append(act)
        else:
            act()


class InProcessCluster:
    """Made by `inprocess`. Nodes by name; `gates` by point; a client of the router."""

    client: Client

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.loop = asyncio.get_running_loop()
        self.endpoints: dict[str, str] = {}
        self.router_others: dict[str, str] = {}
        """The first router's other endpoints, by what they are for."""
        self.runtimes: dict[str, NodeRuntime] = {}
        self.prefill: dict[str, PrefillNode] = {}
        self.decode: dict[str, DecodeNode] = {}
        self.peers: dict[str, Peers] = {}
        self.fetches: dict[str, Fetches] = {}
        self.gates = {point: Gate() for point in Point}
        self.marked: set[RequestId] = set()
        self.layer_held = (1, 1)
        """(chunk, layer) after which Point.LAYER holds; chunk counts the steps that post something."""
        self.layers_done: dict[RequestId, list[int]] = {}
        self.routers: dict[str, RouterNode] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def router(self) -> RouterNode:
        """The first one."""
        return self.routers[ROUTER_NAME]

    async def start(self, without: Collection[str] = ()) -> None:
        for name, service in self.spec.processes():
            if name not in without:
                await self.start_node(name, service)
        self.client = Client(self.endpoints[ROUTER_NAME])
        everybody = len(self.runtimes)
        await wait_for(self._everybody_knows(everybody), "the nodes to know of each other")

    async def start_node(self, name: str, service: Service) -> None:
        """Raises what `serve` raises when it ends instead of becoming ready."""
        flags = self.spec.flags_of(name, service, self.endpoints.get(DIRECTORY_NAME, ""))
        config = load_with_limits(service, flags)
        ready: asyncio.Future[str] = self.loop.create_future()

        def on_ready(endpoint: str, **others: str) -> None:
            if name == ROUTER_NAME:
                self.router_others.update(others)
            ready.set_result(endpoint)

        stop = self._stops[name] = asyncio.Event()
        serve = serve_function(service)
        task = self.loop.create_task(
            serve(config, stop=stop, on_ready=on_ready, progress=_no_progress), name=f"serve-{name}"
        )
        self._tasks[name] = task
        either: list[asyncio.Future[Any]] = [ready, task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            del self._tasks[name]
            task.result()
        self.endpoints[name] = ready.result()

    async def start_double(self, name: str, service: Service, /, **flags: object) -> BatonError:
        """Start a second node of this name, which must fail; what it failed with. The first one stays in the books."""
        books: list[dict[str, Any]] = [self.runtimes, self.prefill, self.decode, self.peers, self.fetches, self.routers]
        kept = [dict(book) for book in books]
        settings = {**self.spec.flags_of(name, service, self.endpoints[DIRECTORY_NAME]), **flags}
        text = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in settings.items()}
        config = load_with_limits(service, text)
        try:
            await serve_function(service)(
                config, stop=asyncio.Event(), on_ready=lambda _endpoint, **_others: None, progress=_no_progress
            )
        except BatonError as error:
            return error
        finally:
            for book, before in zip(books, kept, strict=True):
                book.clear()
                book.update(before)
        raise AssertionError(f"a second {name} has started and ended")

    async def stop_node(self, name: str) -> None:
        self._stops[name].set()
        await self._tasks.pop(name)
        self.runtimes.pop(name, None)

    async def broken(self, name: str) -> BatonError:
        """What a node's `serve` ends with by itself; the node is then out of the books."""
        task = self._tasks.pop(name)
        await asyncio.wait([task])
        del self.runtimes[name], self._stops[name]
        error = task.exception()
        assert isinstance(error, BatonError), error
        return error

    async def stop(self) -> None:
        """Open all gates and stop everything. Nothing of ours may be running afterwards."""
        for gate in self.gates.values():
            gate.open()
        if hasattr(self, "client"):
            await self.client.close()
        order = [name for name in self._tasks if name != DIRECTORY_NAME] + [DIRECTORY_NAME]
        for name in order:
            if name in self._tasks:
                await self.stop_node(name)

    async def statuses(self) -> dict[str, node_pb2.NodeStatus]:
        found = {}
        for name, runtime in self.runtimes.items():
            holds = runtime.holds()
            found[name] = node_pb2.NodeStatus(
                record=record_to_proto(runtime.record()),
                requests=holds.requests,
                grants_received=holds.grants_received,
                grants_written=holds.grants_written,
                unacknowledged_writes=holds.unacknowledged_writes,
            )
            runtime.status(found[name])
        return found

    def story(self) -> str:
        grants = {name: node.receiver.grants.states() for name, node in self.decode.items()}
        return f"grants: {grants}; marked: {self.traces()}"

    def traces(self) -> dict[str, str]:
        """What the marked requests still have, by node. Empty when they are freed everywhere."""
        found: dict[str, str] = {}
        for name, front in self.routers.items():
            if any(key.request in self.marked for key in front.streams.inboxes):
                found[name] = "an inbox"
        for name, prefill in self.prefill.items():
            jobs = [*prefill_state(prefill).queue, *prefill_state(prefill).admitted]
            handoffs = [h for peer in self.peers[name]._peers.values() for h in peer._handoffs.values()]
            keys = [job.key for job in jobs] + [handoff.key for handoff in handoffs]
            if any(key.request in self.marked for key in keys):
                found[name] = f"{len(jobs)} jobs, {len(handoffs)} handoffs"
        for name, decode in self.decode.items():
            grants = decode.receiver.grants
            jobs_left = [job for job in decode_state(decode).jobs if job.key.request in self.marked]
            states = [grants.state_of(g) for request in self.marked for g in grants._by_request.get(request, ())]
            open_ = [s.value for s in states if s not in (None, GrantState.FENCED, GrantState.RELEASED) and s]
            if jobs_left or open_ or any(key.request in self.marked for key in decode_state(decode).known):
                found[name] = f"{len(jobs_left)} jobs, grants {open_}"
        return found

    def is_marked(self, request: str) -> bool:
        return RequestId(request) in self.marked

    def _everybody_knows(self, count: int) -> Callable[[], Any]:
        async def holds() -> bool:
            return all(len(runtime.membership.nodes()) == count for runtime in self.runtimes.values())

        return holds


@asynccontextmanager
async def inprocess(spec: ClusterSpec, *, without: Collection[str] = ()) -> AsyncIterator[InProcessCluster]:
    """A cluster, `without` some of its nodes, on the running loop for the length of the block; afterwards no task and
    no thread of it is left."""
    tasks_before, threads_before = asyncio.all_tasks(), set(threading.enumerate())
    cluster = InProcessCluster(spec)
    with _captured(cluster), _gated(cluster):
        try:
            await cluster.start(without)
            yield cluster
        finally:
            await cluster.stop()
    tasks = asyncio.all_tasks() - tasks_before
    if grpc := {task for task in tasks if _is_grpc(task)}:
        await asyncio.wait(grpc, timeout=CALL_ENDS_S_MAX)
    tasks = {task for task in tasks if not task.done()}
    assert not tasks, f"tasks left: {tasks}"
    names = [thread.name for thread in set(threading.enumerate()) - threads_before]
    # gRPC's poller lives as long as the process, the loop's default pool as long as the loop.
    threads = [name for name in names if "_poll_wrapper" not in name and not name.startswith("asyncio_")]
    assert not threads, f"threads left: {threads}"


def _is_grpc(task: asyncio.Task[Any]) -> bool:
    """Its own end of a call: of one that was cancelled it hears from its thread, when that is given a turn."""
    return getattr(task.get_coro(), "__qualname__", "").startswith(GRPC_CALLS)


def _no_progress(_what: str, _done: int, _total: int) -> None:
    pass


@contextmanager
def _captured(cluster: InProcessCluster) -> Iterator[None]:
    """The objects that the `serve` functions make, by node name."""

    def capture(books: dict[str, Any], make: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            books[name_of(*args, **kwargs)] = thing = make(*args, **kwargs)
            return thing

        return made

    def by_config(**kwargs: Any) -> str:
        return str(kwargs["config"].name)

    def by_runtime(**kwargs: Any) -> str:
        return str(kwargs["runtime"].name)

    def by_first(config: Any, *_args: Any, **_kwargs: Any) -> str:
        return str(config.name)

    with ExitStack() as stack:
        for module in (router.main, node.main):
            stack.enter_context(patch.object(module, "NodeRuntime", capture(cluster.runtimes, NodeRuntime, by_first)))
        for owner, name, books, make in (
            (router.serving, "RouterNode", cluster.routers, RouterNode),
            (prefill_node.main, "PrefillNode", cluster.prefill, PrefillNode),
            (mixed_node.main, "PrefillNode", cluster.prefill, PrefillNode),
            (node.transfers, "Peers", cluster.peers, Peers),
            (node.transfers, "Fetches", cluster.fetches, Fetches),
            (decode_node.main, "DecodeNode", cluster.decode, DecodeNode),
        ):
            by = by_runtime if make is Fetches else by_config
            stack.enter_context(patch.object(owner, name, capture(books, make, by)))
        yield


@contextmanager
def _gated(cluster: InProcessCluster) -> Iterator[None]:
    """Every point's gate, put around the method where a request passes it."""
    hooks = (
        *_prefill_hooks(cluster),
        *_mixed_hooks(cluster),
        *_writer_hooks(cluster),
        *_receiver_hooks(cluster),
        *_router_hooks(cluster),
    )
    with ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.enter_context(patch.object(owner, name, hook))
        yield


_Hooks = tuple[tuple[type, str, Callable[..., Any]], ...]


def _prefill_hooks(cluster: InProcessCluster) -> _Hooks:
    placement, queue, layer_gate = (cluster.gates[p] for p in (Point.PLACEMENT, Point.PREFILL_QUEUE, Point.LAYER))
    real_prefill, real_admit, real_layer_done = PrefillService.Prefill, PrefillNode._admit, StepSink.layer_done

    async def prefill(
        self: PrefillService, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        if request.prompt[0] == MARK:
            cluster.marked.add(RequestId(request.key.request))
            placement.reached.set()
            if placement.closed:
                raise BatonError(Reason.DECODE_FULL, "The gate says so.", retry_after_ms=10)
        async with aclosing(real_prefill(self, request, context)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    def admit(self: PrefillNode) -> None:
        # Anywhere in the queue: one look may let several go ahead.
        if any(cluster.is_marked(job.key.request) for job in self._queue):
            queue.do(lambda: real_admit(self))
        else:
            real_admit(self)

    def layer_done(self: StepSink, layer: int) -> None:
        real_layer_done(self, layer)
        for writes in self.writes:
            request = writes.handoff.key.request
            if request in cluster.marked:
                done = cluster.layers_done.setdefault(request, [])
                done.append(layer)
                if (done.count(0) - 1, layer) == cluster.layer_held:
                    layer_gate.passing_thread(cluster.loop)

    return (
        (PrefillService, "Prefill", prefill),
        (PrefillNode, "_admit", admit),
        (StepSink, "layer_done", layer_done),
    )


def _mixed_hooks(cluster: InProcessCluster) -> _Hooks:
    """Point.LAYER for a request that its node keeps: no records of it are posted."""
    layer_gate, real_step_begins = cluster.gates[Point.LAYER], MixedNode.step_begins

    class HeldSink(StepSink):
        def layer_done(self, layer: int) -> None:
            StepSink.layer_done(self, layer)
            if layer == cluster.layer_held[1]:
                layer_gate.passing_thread(cluster.loop)

    def step_begins(self: MixedNode, batch: Batch) -> KvSink:
        sink = real_step_begins(self, batch)
        assert isinstance(sink, StepSink)
        mine = [p for p in batch.slices if cluster.is_marked(p.key.request) and p.key in self._first]
        if mine and mine[0].start > 0:
            return HeldSink(tokens=sink.tokens, attended=sink.attended, began_s=sink.began_s, writes=sink.writes)
        return sink

    return ((MixedNode, "step_begins", step_begins),)


def _writer_hooks(cluster: InProcessCluster) -> _Hooks:
    seal = cluster.gates[Point.SEAL]
    real_send_seal = WriterPeer._send_seal

    def send_seal(self: WriterPeer, instruction: Any) -> None:
        handoff = self._handoffs[instruction.number]
        if not cluster.is_marked(handoff.key.request):
            real_send_seal(self, instruction)
            return

        def send() -> None:
            if instruction.number in self._handoffs:  # else it was given up, and the seal is one that was lost
                real_send_seal(self, instruction)

        seal.do(send)

    return ((WriterPeer, "_send_seal", send_seal),)


def _receiver_hooks(cluster: InProcessCluster) -> _Hooks:
    gates = cluster.gates
    real_reserve, real_commit, real_landed = ReceiverService.Reserve, ReceiverService.Commit, Receiver.seal_landed

    def grant_is_marked(node: DecodeNode, grant: GrantId) -> bool:
        return any(job.grant == grant and cluster.is_marked(job.key.request) for job in decode_state(node).jobs)

    async def reserve(
        self: ReceiverService, request: transfer_pb2.ReserveRequest, context: Any
    ) -> transfer_pb2.ReserveReply:
        marked = cluster.is_marked(request.key.request)
        if marked:
            await gates[Point.RESERVE_ARRIVED].passing()
        reply = await real_reserve(self, request, context)
        if marked:
            await gates[Point.RESERVE_ANSWERED].passing()
        return reply

    async def commit(
        self: ReceiverService, request: transfer_pb2.CommitRequest, context: Any
    ) -> transfer_pb2.CommitReply:
        marked = grant_is_marked(self._node, GrantId(request.grant))
        if marked:
            await gates[Point.COMMIT_ARRIVED].passing()
            gates[Point.COMMIT_TAKEN].reached.set()
        reply = await real_commit(self, request, context)
        if marked:
            await gates[Point.COMMIT_ANSWERED].passing()
        return reply

    def landed(self: Receiver, pair: Any, seal: Any) -> None:
        real_landed(self, pair, seal)
        if any(grant_is_marked(node, seal.grant) for node in cluster.decode.values()):
            gates[Point.SEAL_LANDED].reached.set()

    return (
        (ReceiverService, "Reserve", reserve),
        (ReceiverService, "Commit", commit),
        (Receiver, "seal_landed", landed),
    )


def _router_hooks(cluster: InProcessCluster) -> _Hooks:
    last = cluster.gates[Point.LAST_TOKEN]
    real_take = DecodeSubscription._take

    def take(self: DecodeSubscription, batch: decode_pb2.TokenBatch) -> None:
        now = decode_pb2.TokenBatch()
        now.CopyFrom(batch)
        del now.requests[:]
        for message in batch.requests:
            if cluster.is_marked(message.key.request) and message.HasField("finish"):
                later = decode_pb2.TokenBatch(requests=[message])
                last.do(lambda later=later: real_take(self, later))  # type: ignore[misc]
            else:
                now.requests.append(message)
        real_take(self, now)

    return ((DecodeSubscription, "_take", take),)


__all__ = ["MARK", "Gate", "InProcessCluster", "Point", "inprocess"]


REACHED_S_MAX = 30.0


async def until(cluster: InProcessCluster, what: str, holds: Callable[[], bool]) -> None:
    async def now() -> bool:
        return holds()

    await wait_for(now, what, story=cluster.story)


async def ask_exactly(cluster: InProcessCluster, prompt: Sequence[int], count: int = 8) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


def peer_of(cluster: InProcessCluster, decode: str) -> WriterPeer:
    peer = cluster.peers["prefill-0"].find(cluster.runtimes[decode].incarnation)
    assert peer is not None
    return peer
