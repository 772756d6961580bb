"""Puts a prefill node together, and serves it to routers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Unpack

from batonpb import node_pb2, prefill_pb2_grpc, transfer_pb2_grpc

from baton.runtime import NodeRuntime
from baton.wire import Role
from node.main import Serving, serve_node
from node.pool import DevicePool, RegionTransports
from node.service import TransferService
from node.transfers import Transfers
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode, PrefillService


async def serve(config: PrefillConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.PREFILL, lambda *parts: PrefillHalf(config, *parts), decodes=False, **serving)


class PrefillHalf:
    """A prefill node, or that part of a mixed one. Implements node.main.Half."""

    def __init__(
        self,
        config: PrefillConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
    ) -> None:
        self._runtime = runtime
        self.transfers = Transfers(runtime=runtime, config=config, pool=pool, transports=transports, opened=opened)
        self.node = PrefillNode(config=config, pool=pool, transfers=self.transfers)
        self.transfers.room_changed = self.node.look_again

    def open(self) -> None:
        self.transfers.open()
        server = self._runtime.server
        transfer = TransferService(self.transfers, self._runtime)
        server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, transfer)
        add_prefill_service(self.node, self._runtime)

    def follow_directory(self) -> None:
        self.transfers.follow_directory()

    def upkeep(self) -> None:
        self.node.upkeep()
        self.transfers.upkeep()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self.transfers.add_status(message)

    async def end_requests(self) -> None:
        """They end with their calls."""
        self.transfers.end_streams()


def add_prefill_service(node: PrefillNode, runtime: NodeRuntime) -> None:
    service = PrefillService(node, runtime)
    runtime.server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, service)
