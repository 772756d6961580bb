"""Puts a prefill node together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from batonpb import node_pb2, prefill_pb2_grpc, transfer_pb2_grpc

from baton.drain import Holdings
from baton.runtime import NodeRuntime, Progress
from baton.wire import NodeLoad, NodeRecord, Role
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_device import LentRegistration
from node.engine_loop import EngineLoop
from node.main import serve_node
from node.peers import Peers
from node.pool import DevicePool
from node.service import WriterService
from prefill_node.config import PrefillConfig
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.job import LocalRunner
from prefill_node.node import PrefillNode
from prefill_node.service import PrefillService


async def serve(
    config: PrefillConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """See `serve_node`."""

    def make(runtime: NodeRuntime, pool: DevicePool) -> PrefillHalf:
        half = PrefillHalf(config, runtime, pool)
        half.engine_loop = half.node.engine_loop = EngineLoop(pool.engine, half.node, name=config.name)
        return half

    await serve_node(
        config,
        Role.PREFILL,
        make,
        stop=stop,
        drain=drain,
        on_ready=on_ready,
        progress=progress,
        decodes=False,
    )


class PrefillHalf:
    """A prefill node, or that part of a mixed one, with its writers. Implements node.main.Half."""

    engine_loop: EngineLoop

    def __init__(
        self,
        config: PrefillConfig,
        runtime: NodeRuntime,
        pool: DevicePool,
        *,
        lent: LentRegistration | None = None,
        local: LocalRunner | None = None,
    ) -> None:
        """See `Peers` for `lent`, `PrefillNode` for `local`. Raises InvalidField."""
        loop = asyncio.get_running_loop()
        self._runtime = runtime
        self.peers = Peers(runtime=runtime, config=config, pool=pool, lent=lent)
        decode_nodes = DecodeNodes(
            config=config, pool=pool, records=self._records, peer_for=self.peers.for_record, loop=loop, rng=runtime.rng
        )
        self.node = PrefillNode(config=config, pool=pool, decode_nodes=decode_nodes, loop=loop, local=local)

    def _records(self) -> list[NodeRecord]:
        """The decode nodes beside this one."""
        own = self._runtime.incarnation
        return [record for record in self._runtime.membership.nodes(Role.DECODE) if record.incarnation != own]

    @property
    def transports(self) -> Sequence[TransportName]:
        return self.peers.transports

    def open(self) -> None:
        self.add_prefill_service()
        self._runtime.server.add(
            "baton.v1.Transfer",
            transfer_pb2_grpc.add_TransferServicer_to_server,
            WriterService(self._runtime.incarnation, self.peers.find),
        )

    def add_prefill_service(self) -> None:
        runtime = self._runtime
        service = PrefillService(self.node, runtime.incarnation, lambda: runtime.lifecycle.takes_requests, runtime.rng)
        runtime.server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, service)

    def follow_directory(self) -> None:
        self.peers.follow_directory()

    def upkeep(self) -> None:
        self.node.upkeep()
        self.peers.upkeep()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self.peers.add_status(message)

    def load(self) -> NodeLoad:
        return self.peers.add_load(self.node.load())

    def holds(self) -> Holdings:
        return dataclasses.replace(self.peers.holds(), requests=self.node.requests)

    async def end_requests(self) -> None:
        """They end with their calls."""

    async def close(self) -> None:
        await self.peers.close()
