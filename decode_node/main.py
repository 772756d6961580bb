"""Puts a decode node together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Unpack

from batonpb import decode_pb2_grpc, node_pb2, transfer_pb2_grpc

from baton.rpc import Channels
from baton.runtime import NodeRuntime
from baton.wire import Role
from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.service import DecodeService, ReceiverService
from kvtransfer.receiver import LivenessStreams
from node.main import Serving, serve_node
from node.pool import DevicePool, RegionTransports
from node.receiver import add_status, make_receiver, open_ports


async def serve(config: DecodeConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.DECODE, lambda *parts: DecodeHalf(config, *parts), spill=config.spill, **serving)


class DecodeHalf:
    """A decode node, or that part of a mixed one, with its receiver. Implements node.main.Half."""

    def __init__(
        self,
        config: DecodeConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
        *,
        channels: Channels | None = None,
    ) -> None:
        """`channels` lead to writers (None: the node's own)."""
        self._config = config
        self._runtime = runtime
        self._pool = pool
        self._transports = transports
        self.node = DecodeNode(config=config, pool=pool)
        self.receiver = self.node.receiver = make_receiver(
            config, pool, host=self.node, own=runtime.incarnation, channels=channels or runtime.channels
        )
        opened.push_async_callback(self.receiver.ports.close)
        opened.push_async_callback(self.receiver.close)
        self.liveness_streams = LivenessStreams(lost=self.receiver.writer_lost, liveness=config.liveness)

    def open(self, transfer: ReceiverService | None = None) -> None:
        """`transfer` serves baton.v1.Transfer; None: the receiver's half of it is served."""
        server = self._runtime.server
        open_ports(self._config, self._pool, self._transports, self.receiver.ports)
        transfer = transfer or ReceiverService(self.node, self.liveness_streams, self._runtime)
        server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, transfer)
        decode = DecodeService(self.node, self._runtime.incarnation)
        server.add("baton.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server, decode)

    def follow_directory(self) -> None:
        if not self._runtime.membership.stale:
            records = self._runtime.membership.nodes(Role.PREFILL)
            self.receiver.writers_seen({record.endpoint: record.incarnation for record in records})

    def upkeep(self) -> None:
        self.node.reap()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        add_status(self.receiver, message)

    async def end_requests(self) -> None:
        await self.node.close()
        self.node.streams.close_all()
        self.liveness_streams.close()
