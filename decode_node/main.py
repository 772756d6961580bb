"""Puts a decode node together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Unpack

from batonpb import decode_pb2_grpc, node_pb2, transfer_pb2_grpc

from baton.runtime import NodeRuntime
from baton.wire import Role
from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.service import DecodeService, ReceiverService
from node.main import Serving, serve_node
from node.pool import DevicePool, RegionTransports
from node.transfers import Transfers


async def serve(config: DecodeConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.DECODE, lambda *parts: DecodeHalf(config, *parts), spill=config.spill, **serving)


class DecodeHalf:
    """A decode node, or that part of a mixed one. Implements node.main.Half."""

    def __init__(
        self,
        config: DecodeConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
    ) -> None:
        self._runtime = runtime
        self.node = DecodeNode(config=config, pool=pool)
        self.transfers = Transfers(
            runtime=runtime, config=config, pool=pool, transports=transports, opened=opened, handoffs=self.node
        )
        self.transfers.room_changed = self.node.blocks_released
        self.node.transfers = self.transfers

    def open(self) -> None:
        server = self._runtime.server
        self.transfers.open()
        transfer = ReceiverService(self.node, self.transfers, self._runtime)
        server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, transfer)
        decode = DecodeService(self.node, self._runtime.incarnation)
        server.add("baton.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server, decode)

    def follow_directory(self) -> None:
        self.transfers.follow_directory()

    def upkeep(self) -> None:
        self.node.reap()
        self.transfers.upkeep()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self.transfers.add_status(message)

    async def end_requests(self) -> None:
        await self.node.close()
        self.node.streams.close_all()
        self.transfers.end_streams()
