"""Puts a prefill node together, and serves it to routers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Unpack

from batonpb import node_pb2, prefill_pb2_grpc, transfer_pb2_grpc

from baton.runtime import NodeRuntime
from baton.wire import Role
from node.main import Serving, serve_node
from node.peers import Peers
from node.pool import DevicePool, RegionTransports
from node.service import WriterService
from prefill_node.config import PrefillConfig
from prefill_node.job import LocalRunner
from prefill_node.node import PrefillNode, PrefillService


async def serve(config: PrefillConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.PREFILL, lambda *parts: PrefillHalf(config, *parts), decodes=False, **serving)


class PrefillHalf:
    """A prefill node, or that part of a mixed one, with its writers. Implements node.main.Half."""

    def __init__(
        self,
        config: PrefillConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
        *,
        local: LocalRunner | None = None,
    ) -> None:
        """See `PrefillNode` for `local`."""
        self._runtime = runtime
        self.peers = Peers(runtime=runtime, config=config, pool=pool, transports=transports)
        opened.push_async_callback(self.peers.close)
        self.node = PrefillNode(config=config, pool=pool, peers=self.peers, local=local)

    def open(self) -> None:
        self.add_prefill_service()
        writer = WriterService(self._runtime.incarnation, self.peers)
        self._runtime.server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, writer)

    def add_prefill_service(self) -> None:
        service = PrefillService(self.node, self._runtime)
        self._runtime.server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, service)

    def follow_directory(self) -> None:
        self.peers.follow_directory()

    def upkeep(self) -> None:
        self.node.decode_nodes.upkeep()
        self.peers.upkeep()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self.peers.add_status(message)

    async def end_requests(self) -> None:
        """They end with their calls."""
