"""Puts a mixed node together: a prefill half and a decode half over one pool."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Unpack

from batonpb import node_pb2

from baton.runtime import NodeRuntime
from baton.wire import Role
from decode_node.main import DecodeHalf
from mixed_node.config import MixedConfig
from mixed_node.node import MixedNode
from node.main import Serving, serve_node
from node.pool import DevicePool, RegionTransports
from prefill_node.main import add_prefill_service
from prefill_node.node import PrefillNode


async def serve(config: MixedConfig, **serving: Unpack[Serving]) -> None:
    """See `serve_node`."""
    await serve_node(config, Role.MIXED, lambda *parts: MixedHalves(config, *parts), **serving)


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
        self._decode = DecodeHalf(config, runtime, pool, transports, opened)
        self.node = MixedNode(policy=config.policy(), decode=self._decode.node, pool=pool)
        self.node.prefill = PrefillNode(
            config=config.prefill_half(), pool=pool, transfers=self._decode.transfers, local=self.node
        )

    def open(self) -> None:
        self._decode.open()
        add_prefill_service(self.node.prefill, self._runtime)

    def follow_directory(self) -> None:
        self._decode.follow_directory()
        self.node.prefill.look_again()  # a decode node that has come or gone may be what the queue waits for

    def upkeep(self) -> None:
        self._decode.upkeep()
        self.node.prefill.upkeep()
        self.node.prefill.look_again()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self._decode.add_status(message)

    async def end_requests(self) -> None:
        await self._decode.end_requests()
