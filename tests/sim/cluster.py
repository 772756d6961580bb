"""Starts and ends simulated processes: the product's own `serve` functions, with the world's parts in place of the
machine's. What they take from the machine (clock, randomness, gRPC, sockets, memory) is replaced by name while the
simulation runs, and made for the process whose loop is running.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import baton.liveness
import baton.runtime
import cli.directory
import decode_node.main
import decode_node.reserving
import decode_node.service
import node.engine_loop
import node.fetching
import node.main
import node.peers
import node.pool
import node.receiver
import node.service
import node.transfers
import prefill_node.main
import router.main
import router.serving
from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import GrantId, Pair, RequestKey
from baton.runtime import NodeRuntime
from cachestore.ledger import Ledger
from decode_node.node import DecodeNode
from decode_node.service import DecodeService
from kvtransfer.receiver import PortEvents, Receiver
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from node.fetching import Fetches
from node.peers import Peers
from prefill_node.node import PrefillNode
from router.node import RouterNode
from tests.sim.books import LedgerWatch
from tests.sim.calls import Call
from tests.sim.data import SimLink, SimPort
from tests.sim.engine import make_pool
from tests.sim.ghosts import watch_decode, watch_decode_service, watch_receiver, watched_routers
from tests.sim.links import SimShmLink, SimTcpLink
from tests.sim.loop import ProcessLoop, ProcessState, World
from tests.sim.network import Network
from tests.sim.profiles import (
    DIRECTORY,
    DIRECTORY_ENDPOINT,
    Profile,
    decode_config,
    prefill_config,
    router_config,
)
from tests.sim.rpc import SimChannel, SimChannels, SimServer, break_connections

if TYPE_CHECKING:
    from tests.sim.excuses import Excuses

PACE_S = 0.000_3
RESTART_S = 0.5
"""How long at most a process that has ended by itself stays away."""


class Kind(Enum):
    DIRECTORY = "directory"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    CLIENT = "client"


class Process:
    """One start of one node. Everything that it has of the simulated world."""

    def __init__(self, cluster: SimCluster, name: str, kind: Kind, loop: ProcessLoop, start: int) -> None:
        self.cluster = cluster
        self.name = name
        self.kind = kind
        self.loop = loop
        self.start = start
        self.host = cluster.hosts.get(name, name)
        self.network = cluster.network
        self.server: SimServer | None = None
        self.channels: dict[SimChannel, None] = {}
        self.calls_out: dict[Call, None] = {}
        self.calls_in: dict[Call, None] = {}
        """Calls made to it, those that have not arrived yet included."""
        self.ports: list[SimPort] = []
        self.links: list[SimLink] = []
        self.region: Any = b""
        self.page_bytes = 1
        self.pace_s = PACE_S
        """About how long its data links take for one batch."""
        self.ledger: Ledger | None = None
        self.runtime: NodeRuntime | None = None
        self.router: RouterNode | None = None
        self.prefill: PrefillNode | None = None
        self.decode: DecodeNode | None = None
        self.decode_service: DecodeService | None = None
        self.forgotten: OrderedDict[RequestKey, float] = OrderedDict()
        """Of a decode node: what clients have told it to forget, and until when it is to know that, by its clock."""
        self.taken_over: OrderedDict[RequestKey, int] = OrderedDict()
        """Of a router: attempts that it has lost to another, and the epoch by which it had them."""
        self.receiver: Receiver | None = None
        self.peers: Peers | None = None
        self.ready = False
        self.ended = False
        self.stopping = asyncio.Event()
        loop.sink = self

    @property
    def alive(self) -> bool:
        return self.loop.state is not ProcessState.DEAD and not self.ended

    def landed(self, grant: GrantId, pair: Pair, dst: int) -> None:
        """A byte of a grant's write is about to land here: the block must be its writer's by the ledger."""
        ledger = self.ledger
        if ledger is None or self.loop.state is ProcessState.DEAD:
            return
        block = dst // self.page_bytes % ledger.num_blocks
        owner = ledger._writer[block]
        if owner != grant:
            self.cluster.violation(
                f"late write: {grant.hex()[:8]} of writer {pair.writer:x} lands in block {block} of {self.name}, "
                f"whose writer is {owner.hex()[:8] if owner is not None else 'nobody'}"
            )


class SimCluster:
    """Processes by name, the last start of each."""

    def __init__(self, world: World, network: Network, profile: Profile, *, rng: Random) -> None:
        self.world = world
        self.network = network
        self.profile = profile
        self.rng = rng
        self.excuses: Excuses
        self.processes: dict[str, Process] = {}
        self.violations: list[str] = []
        self.starts = 0
        self.deaths = 0
        self.resolves = 0
        """Times a decode node was asked to Resolve."""
        self.fetches: list[Fetches] = []
        """Those of all starts of all nodes."""
        self.kinds: dict[str, Kind] = {DIRECTORY: Kind.DIRECTORY}
        for kind, count in (
            (Kind.ROUTER, profile.routers),
            (Kind.PREFILL, profile.prefill),
            (Kind.DECODE, profile.decode),
        ):
            for index in range(count):
                self.kinds[f"{kind.value}-{index}"] = kind
        self.hosts = {name: f"host-{rng.randrange(profile.hosts)}" for name in self.kinds}
        self._endpoints = dict.fromkeys(self.kinds, 7000)
        self._peers = {name: f"ipv4:10.0.0.{number}:1" for number, name in enumerate(self.kinds, 1)}

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self.kinds.items() if not kinds or kind in kinds]

    def peer(self, name: str) -> str:
        """The address from which it calls. All clients have one."""
        return self._peers.get(name, "ipv4:10.0.0.0:1")

    def violation(self, text: str) -> None:
        self.violations.append(f"{self.world.now_s:.6f} {text}")
        self.world.stop()

    def start_all(self) -> None:
        for name in self.kinds:
            self.start(name)

    def new_process(self, name: str, kind: Kind, *, rate: float = 1.0, offset_s: float = 0.0) -> Process:
        self.starts += 1
        loop = ProcessLoop(  # type: ignore[abstract]  # what is missing is not used
            self.world, name, Random(self.rng.getrandbits(64)), rate=rate, offset_s=offset_s
        )
        return Process(self, name, kind, loop, self.starts)

    def start(self, name: str) -> None:
        """Start a node that is not running; another process under the same name."""
        kind = self.kinds[name]
        old = self.processes.get(name)
        assert old is None or not old.alive, name
        rate = 1 + self.rng.uniform(-0.01, 0.01)
        process = self.new_process(name, kind, rate=rate, offset_s=self.rng.uniform(0, 1e6))
        self.processes[name] = process
        if kind is not Kind.DIRECTORY and self.rng.random() < 0.2:
            self._endpoints[name] += 1  # as a pod that comes back with another address
        asyncio.events._set_running_loop(process.loop)
        try:
            task = process.loop.create_task(self._serve(process), name=f"serve-{name}")
        finally:
            asyncio.events._set_running_loop(None)
        del task

    async def _serve(self, process: Process) -> None:
        try:
            await self._serve_function(process)
        except BatonError as error:
            if error.reason is Reason.INTERNAL:
                self.violation(f"{process.name} ended: {error!r} from {error.__cause__!r}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug of ours
            self.violation(f"{process.name} ended: {''.join(traceback.format_exception(error))}")
        process.ended = True
        self.bury(process)
        self.world.after(RESTART_S * self.rng.random(), self.revive, process.name)

    def revive(self, name: str) -> None:
        """Start it if it is not running: what a supervisor does."""
        if not self.processes[name].alive:
            self.start(name)

    async def _serve_function(self, process: Process) -> None:
        name, profile = process.name, self.profile
        index = list(self.kinds).index(name) + 1
        endpoint = f"10.0.0.{index}:{self._endpoints[name]}"

        def on_ready(_endpoint: str, **_others: str) -> None:
            process.ready = True

        common: dict[str, Any] = {"stop": process.stopping, "on_ready": on_ready, "progress": _no_progress}
        if process.kind is Kind.DIRECTORY:
            await cli.directory.serve(
                cli.directory.DirectoryProcessConfig(listen=DIRECTORY_ENDPOINT, insecure=True),
                **common,
                limits=profile.directory,
            )
        elif process.kind is Kind.ROUTER:
            await router.main.serve(router_config(name, endpoint, profile), **common)
        elif process.kind is Kind.PREFILL:
            await prefill_node.main.serve(prefill_config(name, endpoint, profile), **common)
        else:
            await decode_node.main.serve(decode_config(name, endpoint, profile), **common)

    async def nobody_listens(self, asker: Process, endpoint: str, timeout_s: float) -> bool:
        """What the machine at an address says to a connection. A stopped process's machine accepts it."""
        host = endpoint.rpartition(":")[0]
        name = list(self.kinds)[int(host.rpartition(".")[2]) - 1]
        link, back = self.network.link(asker.name, name), self.network.link(name, asker.name)
        if link.cut or back.cut:
            await asyncio.sleep(timeout_s)
            return False
        await asyncio.sleep(min(timeout_s, self.network.rng.random() * 0.002))
        return endpoint not in self.network.servers

    def crash(self, name: str) -> None:
        """SIGKILL: the kernel ends its connections; nothing of it runs from now on."""
        process = self.processes[name]
        if process.loop.state is ProcessState.STOPPED:
            process.loop.state = ProcessState.RUNNING  # a stopped process can be killed, and its peers are told
        if process.alive:
            self.deaths += 1
        self.bury(process)
        process.loop.kill()

    def bury(self, process: Process) -> None:
        """What the kernel does when a process ends."""
        self.excuses.ended(process)
        break_connections(process, "the connection was reset", both_ends=False)
        for link in list(process.links):
            link.writer_died()
        for port in process.ports:
            if not port.closed:
                port.closed = True
                del self.network.data_ports[port.address]
                for link in port.links.values():
                    link.receiver_ended()
        if process.server is not None:
            process.server.unlisten()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The world's parts instead of the machine's, for as long as the simulation runs."""
        with ExitStack() as stack:
            for owner, name, replacement in _replacements(self):
                stack.enter_context(patch.object(owner, name, replacement))
            yield


def current() -> Process:
    """The process whose callback is running."""
    process: Process = asyncio.get_running_loop().sink  # type: ignore[attr-defined]
    return process


class SimClock(Clock):
    """`baton.clock.Clock` of the running process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic_s(self) -> float:
        return self._loop.time()

    def wall_s(self) -> float:
        return self._loop.time()


class _NoThread:
    """For `_EngineThread`: the loop runs computations itself."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()

    def run(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return self._loop.run_in_executor(None, call, *arguments)

    def stop(self) -> None:
        pass


class _NoLag:
    """For `LoopLag`: simulated time does not pass while a callback runs."""

    looks = 0
    max_ms = 0.0

    def __init__(self, clock: Any) -> None:
        pass

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


_SECRETS: Final = SimpleNamespace(
    randbits=lambda bits: current().loop.rng.getrandbits(bits),
    token_bytes=lambda count: current().loop.rng.randbytes(count),
    token_hex=lambda count: current().loop.rng.randbytes(count).hex(),
)
"""For the module of that name: the running process draws."""


def _no_device(*_: Any, **__: Any) -> None:
    """Whatever the machine has that the simulation runs on."""
    raise RdmaUnavailable("simulated")


def _replacements(cluster: SimCluster) -> list[tuple[Any, str, Any]]:
    def channels(*, limits: Any, rng: Any, tls: None) -> SimChannels:
        del rng, tls
        return SimChannels(limits=limits, process=current())

    def server(*, limits: Any, rng: Random, liveness: Any = None, tls: None = None) -> SimServer:
        del tls
        process = current()
        process.server = SimServer(limits=limits, rng=rng, liveness=liveness, process=process)
        return process.server

    async def open_pool(config: Any, *, spill: Any = None, **_: Any) -> Any:
        assert spill is None or spill.host_blocks == 0, "host memory is not simulated"
        process, profile = current(), cluster.profile
        pool = make_pool(
            config, groups=profile.layer_groups, step_s=profile.step_s, token_s=profile.token_s, rng=process.loop.rng
        )
        process.region = memoryview(pool.host_region.array_U8)  # type: ignore[arg-type]  # a buffer
        process.page_bytes = pool.layout.page_bytes
        process.ledger = pool.ledger
        LedgerWatch(pool.ledger, process)
        return pool

    def open_port(transport: TransportName, _config: Any, _pool: Any, ports: Any, _memory: None) -> SimPort:
        return SimPort(transport=transport, process=current(), events=PortEvents(ports, transport))

    async def nobody_listens(endpoint: str, *, timeout_s: float) -> bool:
        return await cluster.nobody_listens(current(), endpoint, timeout_s)

    def one_server(*args: Any, admin_listen: str | None = None, **kwargs: Any) -> NodeRuntime:
        """A router's second port is for operators: there are none."""
        return NodeRuntime(*args, **kwargs)

    def fetches(**parts: Any) -> Fetches:
        cluster.fetches.append(made := Fetches(**parts))
        return made

    capture = _capture
    mains = (router.main, node.main)
    return [
        (baton.runtime, "Channels", channels),
        (baton.runtime, "RpcServer", server),
        (baton.runtime, "LoopLag", _NoLag),
        (baton.runtime, "OperatorToken", _NoToken),
        (baton.runtime, "check_can_bind", _can_bind),
        (router.main, "native_front", lambda: None),
        (baton.liveness, "nobody_listens", nobody_listens),
        (cli.directory, "RpcServer", server),
        (cli.directory, "Clock", SimClock),
        (cli.directory, "random", SimpleNamespace(Random=lambda: Random(current().loop.rng.getrandbits(64)))),
        *((main, "Clock", SimClock) for main in mains),
        *((module, "secrets", _SECRETS) for module in (*mains, router.serving, decode_node.reserving, node.fetching)),
        *((main, "NodeRuntime", capture("runtime", one_server)) for main in mains),
        (router.serving, "RouterNode", capture("router", RouterNode)),
        *watched_routers(current),
        (prefill_node.main, "PrefillNode", capture("prefill", PrefillNode)),
        (node.transfers, "Peers", capture("peers", Peers)),
        (node.transfers, "Fetches", fetches),
        (node.main, "open_device_pool", open_pool),
        (node.peers, "ShmWriterLink", SimShmLink),
        (node.peers, "TcpWriterLink", SimTcpLink),
        (node.pool, "RdmaMemory", _no_device),
        (node.peers, "host_parts", lambda: [current().host] * 4),
        (decode_node.main, "DecodeNode", capture("decode", DecodeNode, watch_decode)),
        (node.receiver, "Receiver", capture("receiver", Receiver, watch_receiver)),
        (node.receiver, "_open_port", open_port),
        (decode_node.main, "DecodeService", capture("decode_service", DecodeService, watch_decode_service)),
        (node.service, "host_parts", lambda: [current().host] * 4),
        (node.engine_loop, "_EngineThread", _NoThread),
        (asyncio.tasks._all_tasks, "add", id),  # type: ignore[attr-defined]  # a list that nobody asks for
    ]


async def _can_bind(_listen: str) -> None:
    """Whatever it is."""


class _NoToken:
    """Of operators, who give no orders here."""

    def __init__(self, _path: None) -> None:
        self.authorize = None

    def read_or_make(self) -> None:
        pass


def _capture(
    attribute: str, make: Callable[..., Any], watch: Callable[[Process, Any], None] | None = None
) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        thing = make(*args, **kwargs)
        setattr(current(), attribute, thing)
        if watch is not None:
            watch(current(), thing)
        return thing

    return made


def _no_progress(_what: str, _done: int, _total: int) -> None:
    pass
