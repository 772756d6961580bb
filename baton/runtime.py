"""What every node process has around its work: server, channels, membership, lifecycle, upkeep, the Node service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batonpb import node_pb2, node_pb2_grpc

from baton.clock import Clock
from baton.directory_setting import open_directory
from baton.endpoint import join_endpoint, split_endpoint
from baton.ids import Incarnation
from baton.lifecycle import LifecycleEvent, NodeLifecycle
from baton.log import get_log
from baton.membership import Membership, MembershipConfig
from baton.rpc import RpcLimits, RpcServer, check_can_bind
from baton.rpc_client import ChannelLimits, Channels
from baton.wire import ModelInfo, NodeLoad, NodeRecord, Role, check_name, record_to_proto

log = get_log("node")

UPKEEP_MS = 1_000
NODE_SERVICE = "baton.v1.Node"

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The part of a node's configuration that this module works by."""

    name: str
    role: Role
    listen: str
    advertise: str | None
    directory: str
    membership: MembershipConfig
    rpc: RpcLimits
    stop_grace_ms: int


class NodeRuntime:
    """One node process. `status` fills in what the node holds; `upkeep` is called every second; neither may block."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Raises BatonError BAD_NAME, BAD_ENDPOINT or BAD_CONFIG."""
        self.settings = settings
        self.name = check_name(settings.name)
        self.incarnation = Incarnation(rng.getrandbits(64) | 1)
        self.clock = clock
        self.rng = rng
        self.lifecycle = NodeLifecycle(now_s=clock.monotonic_s())
        self.channels = Channels(limits=ChannelLimits())
        self.server = RpcServer(limits=settings.rpc, rng=rng)
        self.endpoint = ""
        self.model: ModelInfo | None = None
        self.transports: tuple[str, ...] = ()
        self.load: Callable[[], NodeLoad] = NodeLoad
        self.status: Callable[[node_pb2.NodeStatus], None] = _nothing_to_add
        self.upkeep: Callable[[], None] = lambda: None
        self._upkeep_task: asyncio.Task[None] | None = None
        self.directory = open_directory(settings.directory, channels=self.channels, clock=clock)
        self.membership = Membership(
            directory=self.directory,
            own_record=self.record,
            clock=clock,
            rng=rng,
            config=settings.membership,
            on_change=on_change,
        )
        self.server.add(NODE_SERVICE, node_pb2_grpc.add_NodeServicer_to_server, _NodeService(self))

    def record(self) -> NodeRecord:
        return NodeRecord(
            name=self.name,
            role=self.settings.role,
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            lifecycle=self.lifecycle.state,
            model=self.model,
            load=self.load(),
            transports=self.transports,
        )

    async def check_listen(self) -> None:
        """Fail early where the port is taken, before a model is loaded."""
        await check_can_bind(self.settings.listen)

    async def open(self) -> str:
        """Serve, register, become ready. Returns the endpoint that peers call.

        Raises BatonError PORT_IN_USE, NAME_IN_USE, PEER_UNREACHABLE (the directory), ...
        """
        port = await self.server.start(self.settings.listen)
        host, _ = split_endpoint(self.settings.listen)
        self.endpoint = self.settings.advertise or join_endpoint(host, port)
        self._upkeep_task = asyncio.create_task(self._upkeep_forever(), name="upkeep")
        # Registered as ready, not made ready later: whoever is told "ready" finds the node in the directory.
        self._become(LifecycleEvent.STARTED, "ready")
        await self.membership.start()
        self.server.set_ready(True)
        return self.endpoint

    async def leave(self) -> None:
        """Take nothing new: not ready, out of the directory. Idempotent."""
        if self.endpoint:
            self.server.set_ready(False)
        self._become(
            LifecycleEvent.STOP if not self.lifecycle.takes_requests else LifecycleEvent.DRAIN, "asked to stop"
        )
        await self.membership.stop()

    async def close(self) -> None:
        """End running calls within the grace time, then everything else. Idempotent."""
        if self._upkeep_task is not None:
            self._upkeep_task.cancel()
            await asyncio.wait([self._upkeep_task])
        await self.server.stop(self.settings.stop_grace_ms / 1000)
        await self.directory.close()
        await self.channels.close()

    def _become(self, event: LifecycleEvent, why: str) -> None:
        self.lifecycle.handle(event, now_s=self.clock.monotonic_s(), why=why)

    async def _upkeep_forever(self) -> None:
        while True:
            await self.clock.sleep_s(UPKEEP_MS / 1000)
            try:
                self.upkeep()
            except Exception:
                # The next second's upkeep must not depend on this one's.
                log.exception("upkeep failed")


def _nothing_to_add(_status: node_pb2.NodeStatus) -> None:
    """A node that holds nothing but its record."""


class _NodeService(node_pb2_grpc.NodeServicer):
    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime

    async def GetStatus(self, _request: node_pb2.GetStatusRequest, _context: Any) -> node_pb2.NodeStatus:
        status = node_pb2.NodeStatus(record=record_to_proto(self._runtime.record()))
        self._runtime.status(status)
        return status
