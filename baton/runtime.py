"""What every node process has: server, channels, membership, lifecycle, upkeep, and the Node service."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batonpb import node_pb2, node_pb2_grpc

from baton.clock import Clock, wait_s
from baton.config import setting
from baton.directory_setting import DIRECTORY_HELP, check_directory_setting, open_directory
from baton.drain import Holdings, NodeDrain
from baton.endpoint import check_reachable, from_here, join_endpoint, split_endpoint
from baton.errors import BatonError, Reason, check_positive
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle, LifecycleEvent, NodeLifecycle
from baton.listen import check_can_bind
from baton.liveness import LivenessConfig
from baton.log import get_log
from baton.loop_lag import LoopLag
from baton.membership import Membership, MembershipConfig
from baton.operator import OperatorToken
from baton.pod import DeletionCost, PodConfig
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.tasks import end_task
from baton.tls import INSECURE_HELP, INSECURE_WHEN, PROBE_HELP, PROBE_WHEN, TlsConfig, open_tls
from baton.wire import ModelInfo, NodeLoad, NodeRecord, Role, check_name, check_receiver, record_to_proto

log = get_log("node")

UPKEEP_MS = 1_000
WATCH_STATUS_MS = 1_000
"""Time between two statuses of `WatchStatus` while nothing changes."""
NODE_SERVICE = "baton.v1.Node"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What routers and serving nodes both configure. Raises InvalidField."""

    name: str = field(
        metadata={
            "help": "name of this node, unique in the cluster",
            "when": "Always: two nodes must not have the same.",
        },
    )
    listen: str = setting(
        "127.0.0.1:0",
        "host:port of gRPC; port 0 takes any",
        "Nodes are on several machines, or firewalls need fixed ports.",
    )
    advertise: str | None = setting(
        None,
        "host:port that peers reach; none: what listen takes",
        "listen names all addresses of the machine, or peers reach it at a translated address.",
    )
    directory: str = setting("127.0.0.1:7070", DIRECTORY_HELP, "Always, except on one machine with the default port.")
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    insecure: bool = setting(False, INSECURE_HELP, INSECURE_WHEN)
    probe_listen: str | None = setting(None, PROBE_HELP, PROBE_WHEN)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    operator_token_file: Path | None = setting(
        None,
        "file with the token that orders (drain, cordon, pins) must bring; made where there is none; none: "
        "$XDG_STATE_HOME/baton/operator_token, by default in ~/.local/state",
        "Nodes run on several machines or as several users: give all of them a copy. Or this one has no home folder.",
    )
    drain_ms_max: int = setting(
        60_000,
        "how long SIGTERM waits for running requests before they are given up",
        "Answers take longer. Give Kubernetes a longer terminationGracePeriodSeconds too.",
    )
    stop_grace_ms: int = setting(
        2_000,
        "how long running calls may take to end at a stop",
        "Clients are cut off at a stop in the middle of their last messages.",
    )

    def __post_init__(self) -> None:
        check_directory_setting(self.directory)
        check_positive(self, "drain_ms_max", "stop_grace_ms")


class NodeRuntime:
    """One node process. Its owner sets `load`, `holds` (what the node still answers for), `status` (adds details to the
    answer of GetStatus), `upkeep` (called every second) and `follow_lifecycle` (called with each change). None of them
    may block."""

    def __init__(
        self,
        config: ProcessConfig,
        role: Role,
        *,
        pod: PodConfig | None = None,
        admin_listen: str | None = None,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[], None] | None = None,
        lame_duck_ms: int = 0,
        last_known: Callable[[], tuple[NodeRecord, ...]] = tuple,
    ) -> None:
        """A router has no `pod`: it sets no deletion cost. At `admin_listen` is served what is for operators.

        Raises BatonError BAD_NAME, BAD_ENDPOINT or BAD_CONFIG."""
        self.config, self.role = config, role
        self.name = check_name(config.name)
        self.incarnation = Incarnation(rng.getrandbits(64) | 1)
        self.clock, self.rng = clock, rng
        self.lifecycle = NodeLifecycle(now_s=clock.monotonic_s())
        self.tls = open_tls(config)
        self.channels = self.make_channels()
        callers_are_nodes = role is not Role.ROUTER
        self.operator = OperatorToken(config.operator_token_file)
        self.server = RpcServer(
            limits=config.rpc,
            rng=rng,
            liveness=config.liveness if callers_are_nodes else None,
            tls=self.tls if callers_are_nodes else None,
        )
        self.admin = self.server if admin_listen is None else RpcServer(limits=config.rpc, rng=rng, tls=self.tls)
        self._admin_listen = admin_listen
        self._servers = tuple(dict.fromkeys((self.server, self.admin)))
        self.admin.authorize_by(self.operator.authorize)
        self.endpoint = ""
        self.admin_endpoint = ""
        self.model: ModelInfo | None = None
        self.transports: tuple[str, ...] = ()
        self.load: Callable[[], NodeLoad] = NodeLoad
        self.holds: Callable[[], Holdings] = Holdings
        self.status: Callable[[node_pb2.NodeStatus], None] = lambda _status: None
        self.upkeep: Callable[[], None] = lambda: None
        self.follow_lifecycle: Callable[[], None] = lambda: None
        self.loop_lag = LoopLag(clock)
        self.ending = False
        """The process is shutting down."""
        self.lifecycle_news = asyncio.Event()
        """Set at the next change of the lifecycle, and then replaced by a new one."""
        self._upkeep_task: asyncio.Task[None] | None = None
        self.directory = open_directory(config.directory, channels=self.channels, clock=clock)
        self.membership = Membership(
            directory=self.directory,
            own_record=self.record,
            clock=clock,
            rng=rng,
            config=config.membership,
            on_change=on_change,
            last_known=last_known,
        )
        self.deletion_cost = DeletionCost(pod or PodConfig(), clock=clock, rng=rng)
        self.drain = NodeDrain(
            self.lifecycle,
            clock=clock,
            holds=lambda: self.holds(),
            changed=self._lifecycle_changed,
            lame_duck_ms=lame_duck_ms,
        )
        self.admin.add(NODE_SERVICE, node_pb2_grpc.add_NodeServicer_to_server, _NodeService(self))

    def make_channels(self) -> Channels:
        """New channels to other nodes, with this node's limits. The caller closes them."""
        return Channels(limits=ChannelLimits(liveness=self.config.liveness), rng=self.rng, tls=self.tls)

    def record(self) -> NodeRecord:
        load, lag_ms = self.load(), round(self.loop_lag.max_ms)
        return NodeRecord(
            name=self.name,
            role=self.role,
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            lifecycle=self.lifecycle.state,
            model=self.model,
            load=dataclasses.replace(load, control_loop_lag_ms_max=max(lag_ms, load.control_loop_lag_ms_max)),
            transports=self.transports,
            admin_endpoint=self.admin_endpoint,
        )

    async def check_listen(self) -> None:
        """Fail before a model is loaded if the port is taken, peers cannot reach the address, or there is no token for
        operators and none can be made. Raises BatonError."""
        listen, advertise = self.config.listen, self.config.advertise
        if advertise is not None:
            check_reachable(advertise)
        elif from_here(listen) != listen:
            raise BatonError(
                Reason.BAD_ENDPOINT,
                f"{listen} is for listening only: say with --advertise HOST:PORT where the other processes reach this "
                "one.",
                field="advertise",
            )
        await check_can_bind(listen)
        for key, place in (("admin_listen", self._admin_listen), ("probe_listen", self.config.probe_listen)):
            if place is not None:
                await check_can_bind(place, setting=key)
        await asyncio.to_thread(self.operator.read_or_make)

    async def open(self) -> str:
        """Serve, register, become ready. Returns the endpoint that peers call.

        Raises BatonError PORT_IN_USE, NAME_IN_USE, PEER_UNREACHABLE (the directory), ...
        """
        port = await self.server.start(self.config.listen, probe_listen=self.config.probe_listen)
        admin = self._admin_listen
        admin_port = 0 if admin is None else await self.admin.start(admin)
        host, _ = split_endpoint(self.config.listen)
        self.endpoint = self.config.advertise or join_endpoint(host, port)
        if admin is not None:
            reached = admin if from_here(admin) == admin else self.endpoint
            self.admin_endpoint = join_endpoint(split_endpoint(reached)[0], admin_port)
        self._upkeep_task = asyncio.create_task(self._upkeep_forever(), name="upkeep")
        self.loop_lag.start()
        # Ready before it registers: whoever sees "ready" finds the node in the directory.
        self._become(LifecycleEvent.STARTED, "ready")
        await self.membership.start()
        self._lifecycle_seen()
        return self.endpoint

    async def leave(self) -> None:
        """Take nothing new: not ready, out of the directory. Idempotent."""
        if self.endpoint:
            self._set_ready(False)
        serving = self.lifecycle.takes_requests or self.lifecycle.state is Lifecycle.CORDONED
        self._become(LifecycleEvent.DRAIN if serving else LifecycleEvent.STOP, "asked to stop")
        self.follow_lifecycle()  # the directory may take its time
        self.ending = True
        self._wake_watchers()
        await self.membership.stop()

    async def close(self) -> None:
        """End running calls within the grace time, then everything else. Idempotent."""
        await end_task(self._upkeep_task)
        await self.loop_lag.close()
        await self.drain.close()
        await self.deletion_cost.close()
        await self.stop_serving()
        await self.directory.close()
        await self.channels.close()

    async def stop_serving(self) -> None:
        """End running calls within the grace time. Idempotent."""
        await asyncio.gather(*(server.stop(self.config.stop_grace_ms / 1000) for server in self._servers))

    def _set_ready(self, ready: bool) -> None:
        for server in self._servers:
            server.set_ready(ready)

    def _become(self, event: LifecycleEvent, why: str) -> None:
        self.lifecycle.handle(event, now_s=self.clock.monotonic_s(), why=why)

    def _lifecycle_changed(self) -> None:
        self._lifecycle_seen()
        self.membership.announce()

    def _wake_watchers(self) -> None:
        news, self.lifecycle_news = self.lifecycle_news, asyncio.Event()
        news.set()

    def _lifecycle_seen(self) -> None:
        self._set_ready(self.lifecycle.ready)
        self.follow_lifecycle()
        self.deletion_cost.follow(self.lifecycle.state)
        self._wake_watchers()

    async def _upkeep_forever(self) -> None:
        while True:
            await self.clock.sleep_s(UPKEEP_MS / 1000)
            try:
                self.upkeep()
            except Exception:
                # The next second's upkeep must not depend on this one's.
                log.exception("upkeep failed")


class _NodeService(node_pb2_grpc.NodeServicer):
    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime

    async def GetStatus(self, _request: node_pb2.GetStatusRequest, _context: Any) -> node_pb2.NodeStatus:
        return self._status()

    async def WatchStatus(
        self, _request: node_pb2.GetStatusRequest, _context: Any
    ) -> AsyncIterator[node_pb2.NodeStatus]:
        while True:
            news, status = self._runtime.lifecycle_news, self._status()
            yield status
            if status.ending:
                return
            await wait_s(self._runtime.clock, news, WATCH_STATUS_MS / 1e3)

    async def Cordon(self, request: node_pb2.LifecycleOrder, _context: Any) -> node_pb2.NodeStatus:
        return self._order(request, LifecycleEvent.CORDON)

    async def Uncordon(self, request: node_pb2.LifecycleOrder, _context: Any) -> node_pb2.NodeStatus:
        return self._order(request, LifecycleEvent.UNCORDON)

    async def Drain(self, request: node_pb2.LifecycleOrder, _context: Any) -> node_pb2.NodeStatus:
        return self._order(request, LifecycleEvent.DRAIN)

    async def Undrain(self, request: node_pb2.LifecycleOrder, _context: Any) -> node_pb2.NodeStatus:
        return self._order(request, LifecycleEvent.UNDRAIN)

    def _order(self, request: node_pb2.LifecycleOrder, event: LifecycleEvent) -> node_pb2.NodeStatus:
        if request.incarnation:
            check_receiver(request.incarnation, own=self._runtime.incarnation)
        self._runtime.drain.order(event, request.why)
        self._runtime.deletion_cost.retry(self._runtime.lifecycle.state)
        return self._status()

    def _status(self) -> node_pb2.NodeStatus:
        runtime = self._runtime
        status = node_pb2.NodeStatus(
            record=record_to_proto(runtime.record()),
            # A pool that shrinks removes this pod first only once its deletion cost is settled.
            safe_to_delete=runtime.drain.safe_to_delete and runtime.deletion_cost.settled,
            story=runtime.lifecycle.story(),
            ended_empty=runtime.lifecycle.ended_empty,
            ending=runtime.ending,
            **dataclasses.asdict(runtime.holds()),
        )
        for name, value in runtime.deletion_cost.counters().items():
            status.counters.add(name=name, value=value)
        status.counters.add(name="control loop lag, ms at most lately", value=runtime.loop_lag.max_ms)
        if runtime.loop_lag.looks:
            status.counters.add(name="control loop lag, ms in 99 of 100", value=runtime.loop_lag.below_ms(0.99))
        runtime.status(status)
        return status
