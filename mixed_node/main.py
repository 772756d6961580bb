"""Puts a mixed node together: a prefill half and a decode half over one pool."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from batonpb import node_pb2, prefill_pb2, transfer_pb2

from baton.drain import Holdings
from baton.runtime import NodeRuntime, Progress
from baton.wire import NodeLoad, Role
from decode_node.main import DecodeHalf
from decode_node.service import ReceiverService
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_device import LentRegistration, register_if_usable
from mixed_node.config import MixedConfig
from mixed_node.node import MixedNode
from node.engine_loop import EngineLoop
from node.main import serve_node
from node.pool import DevicePool
from node.regions import offered, rdma_region
from node.service import WriterService
from prefill_node.main import PrefillHalf


async def serve(
    config: MixedConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """See `serve_node`."""
    await serve_node(
        config,
        Role.MIXED,
        lambda runtime, pool: MixedHalves(config, runtime, pool),
        stop=stop,
        drain=drain,
        on_ready=on_ready,
        progress=progress,
    )


class TransferService(ReceiverService):
    """baton.v1.Transfer, for the writers to this node and for the receivers that it writes to."""

    writer: WriterService

    async def Revoke(self, request: transfer_pb2.RevokeRequest, context: Any) -> transfer_pb2.RevokeReply:
        return await self.writer.Revoke(request, context)


class MixedHalves:
    """Both halves of a node. Implements node.main.Half."""

    def __init__(self, config: MixedConfig, runtime: NodeRuntime, pool: DevicePool) -> None:
        """The region is registered for rdma once, for both halves. Raises InvalidField."""
        loop = asyncio.get_running_loop()
        self._runtime = runtime
        self._pool = pool
        # Of the receiver alone: each half drops the channels of peers that are gone for it, whatever they are to the
        # other.
        self._channels = runtime.make_channels()
        self._memory = register_if_usable(
            offered(config.transports, pool.region), rdma_region(pool.region), config.rdma, remote_writes=True
        )
        lent = LentRegistration(memory=self._memory)
        self._decode = DecodeHalf(config, runtime, pool, channels=self._channels, lent=lent)
        try:
            self._prefill = self._make_prefill(config, loop, lent)
        except BaseException:
            # Its thread reads the region, which could not be closed, and would hide why the node does not start.
            self._decode.receiver.checks.close()
            raise
        self.engine_loop = EngineLoop(pool.engine, self.node, name=config.name)
        self.node.engine_loop = self.node.prefill.engine_loop = self.node.decode.engine_loop = self.engine_loop

    def _make_prefill(
        self, config: MixedConfig, loop: asyncio.AbstractEventLoop, lent: LentRegistration
    ) -> PrefillHalf:
        """The node around both halves, and its prefill half. Raises InvalidField: no transport works."""
        self.node = MixedNode(
            policy=config.policy(),
            decode=self._decode.node,
            pool=self._pool,
            granted=self._granted,
            loop=loop,
            randomness=secrets.token_bytes,
        )
        prefill = PrefillHalf(config.prefill_half(), self._runtime, self._pool, lent=lent, local=self.node)
        self.node.prefill = prefill.node
        return prefill

    def _granted(self) -> prefill_pb2.Granted:
        return prefill_pb2.Granted(
            decode_node=self._runtime.name,
            decode_incarnation=self._runtime.incarnation,
            decode_endpoint=self._runtime.endpoint,
        )

    @property
    def transports(self) -> Sequence[TransportName]:
        return self._decode.transports

    def open(self) -> None:
        runtime, decode = self._runtime, self._decode
        own = runtime.incarnation
        service = TransferService(
            decode.node, decode.liveness_streams, own, self._pool.model, lambda: runtime.lifecycle.takes_requests
        )
        service.writer = WriterService(own, self._prefill.peers.find)
        decode.open_with(service)
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

    def load(self) -> NodeLoad:
        return self._prefill.peers.add_load(self.node.load())

    def holds(self) -> Holdings:
        return self.node.holds(self._prefill.peers.holds())

    async def end_requests(self) -> None:
        await self._decode.end_requests()

    async def close(self) -> None:
        await self._prefill.close()
        await self._decode.close()
        await self._channels.close()
        if self._memory is not None:
            await self._memory.close()
