"""Puts a decode node together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from batonpb import decode_pb2_grpc, node_pb2, transfer_pb2_grpc

from baton.drain import Holdings
from baton.rpc import Channels
from baton.runtime import NodeRuntime, Progress
from baton.wire import NodeLoad, Role
from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.service import DecodeService, ReceiverService
from kvtransfer.receiver import LivenessStreams
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_device import LentRegistration
from node.engine_loop import EngineLoop
from node.main import serve_node
from node.pool import DevicePool
from node.receiver import add_status, make_receiver, open_ports


async def serve(
    config: DecodeConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """See `serve_node`."""

    def make(runtime: NodeRuntime, pool: DevicePool) -> DecodeHalf:
        half = DecodeHalf(config, runtime, pool, channels=runtime.channels)
        half.engine_loop = half.node.engine_loop = EngineLoop(pool.engine, half.node, name=config.name)
        if pool.host is not None:
            pool.host.spill.changed = half.engine_loop.wake
        return half

    await serve_node(
        config,
        Role.DECODE,
        make,
        stop=stop,
        drain=drain,
        on_ready=on_ready,
        progress=progress,
        spill=config.spill,
    )


class DecodeHalf:
    """A decode node, or that part of a mixed one, with its receiver. Implements node.main.Half."""

    engine_loop: EngineLoop

    def __init__(
        self,
        config: DecodeConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        *,
        channels: Channels,
        lent: LentRegistration | None = None,
    ) -> None:
        """`channels` lead to writers; see `open_ports` for `lent`."""
        self._config = config
        self._runtime = runtime
        self._pool = pool
        self._lent = lent
        loop = asyncio.get_running_loop()
        self.node = DecodeNode(config=config, pool=pool, loop=loop, randomness=secrets.token_bytes)
        self.receiver = self.node.receiver = make_receiver(
            config, pool, host=self.node, own=runtime.incarnation, channels=channels
        )
        self.liveness_streams = LivenessStreams(lost=self.receiver.writer_lost, liveness=config.liveness)

    @property
    def transports(self) -> Sequence[TransportName]:
        return self.receiver.ports.transports

    def open(self) -> None:
        runtime = self._runtime
        service = ReceiverService(
            self.node,
            self.liveness_streams,
            runtime.incarnation,
            self._pool.model,
            lambda: runtime.lifecycle.takes_requests,
        )
        self.open_with(service)

    def open_with(self, service: ReceiverService) -> None:
        """`service` serves baton.v1.Transfer."""
        own, server = self._runtime.incarnation, self._runtime.server
        open_ports(self._config, self._pool, self.receiver.ports, self._lent)
        server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, service)
        server.add("baton.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server, DecodeService(self.node, own))

    def follow_directory(self) -> None:
        if not self._runtime.membership.stale:
            records = self._runtime.membership.nodes(Role.PREFILL)
            self.receiver.writers_seen({record.endpoint: record.incarnation for record in records})

    def upkeep(self) -> None:
        self.node.reap()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        add_status(self.receiver, message)

    def load(self) -> NodeLoad:
        return self.node.load()

    def holds(self) -> Holdings:
        return self.node.holds()

    async def end_requests(self) -> None:
        await self.node.close()
        self.node.streams.close_all()
        self.liveness_streams.close()

    async def close(self) -> None:
        await self.receiver.close()
        await self.receiver.ports.close()
