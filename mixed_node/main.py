"""Puts a mixed node together: a prefill half and a decode half over one pool."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Unpack

from batonpb import node_pb2, transfer_pb2

from baton.runtime import NodeRuntime
from baton.wire import Role
from decode_node.main import DecodeHalf
from decode_node.service import ReceiverService
from mixed_node.config import MixedConfig
from mixed_node.node import MixedNode
from node.main import Serving, serve_node
from node.pool import DevicePool, RegionTransports
from node.service import WriterService
from prefill_node.main import PrefillHalf


async def serve(config: MixedConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.MIXED, lambda *parts: MixedHalves(config, *parts), **serving)


class TransferService(ReceiverService):
    """baton.v1.Transfer, for the writers to this node and for the receivers that it writes to."""

    writer: WriterService

    async def Revoke(self, request: transfer_pb2.RevokeRequest, context: Any) -> transfer_pb2.RevokeReply:
        return await self.writer.Revoke(request, context)


class MixedHalves:
    """Both halves of a node. Implements node.main.Half."""

    def __init__(
        self,
        config: MixedConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
    ) -> None:
        self._runtime = runtime
        # Of the receiver alone: each half drops the channels of peers that are gone for it, whatever they are to the
        # other.
        channels = runtime.make_channels()
        opened.push_async_callback(channels.close)
        self._decode = DecodeHalf(config, runtime, pool, transports, opened, channels=channels)
        self.node = MixedNode(policy=config.policy(), decode=self._decode.node, pool=pool)
        self._prefill = PrefillHalf(config.prefill_half(), runtime, pool, transports, opened, local=self.node)
        self.node.prefill = self._prefill.node

    def open(self) -> None:
        service = TransferService(self._decode.node, self._decode.liveness_streams, self._runtime)
        service.writer = WriterService(self._runtime.incarnation, self._prefill.peers)
        self._decode.open(service)
        self._prefill.add_prefill_service()

    def follow_directory(self) -> None:
        self._prefill.follow_directory()
        self._decode.follow_directory()
        self._prefill.node.look_again()  # a decode node that has come or gone may be what the queue waits for

    def upkeep(self) -> None:
        self._decode.upkeep()
        self._prefill.upkeep()
        self._prefill.node.look_again()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self._prefill.add_status(message)
        self._decode.add_status(message)

    async def end_requests(self) -> None:
        await self._decode.end_requests()
