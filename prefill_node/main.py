"""Puts a prefill node together, runs it until it is asked to stop, and takes it apart in the reverse order."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from random import Random

from batonpb import node_pb2, prefill_pb2_grpc, transfer_pb2_grpc

from baton.clock import SystemClock
from baton.drain import Holdings
from baton.runtime import NodeRuntime, Progress
from baton.wire import Role
from kvtransfer.status import HandoffObserver
from node.conservation import ConservationWatch
from node.engine_loop import EngineLoop, done_or_broken
from node.peers import Peers
from node.pool import DevicePool, open_device_pool, report_engine
from node.prefix_service import serve_prefixes
from prefill_node.config import PrefillConfig
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.node import PrefillNode
from prefill_node.service import PrefillService, WriterService


async def serve(
    config: PrefillConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
    observer: HandoffObserver | None = None,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the node cannot start.

    `observer` is told of every handoff, for measurements.
    """
    rng = Random(secrets.randbits(64))
    runtime = NodeRuntime(
        config,
        Role.PREFILL,
        pod=config.pod,
        clock=SystemClock(),
        rng=rng,
        on_change=lambda: peers.follow_directory(),
    )
    await runtime.check_listen()
    pool = await open_device_pool(
        config.engine,
        name=config.name,
        progress=progress,
        decodes=False,
        transports=config.transports,
        staging=config.staging,
    )
    try:
        peers = Peers(runtime=runtime, config=config, pool=pool, observer=observer)
        node = PrefillNode(
            config=config,
            runner=pool.runner,
            engine=pool.engine,
            ledger=pool.ledger,
            blocks=pool.blocks,
            decode_nodes=DecodeNodes(
                model=pool.model,
                records=lambda: runtime.membership.nodes(Role.DECODE),
                peer_for=peers.for_record,
                blocks=pool.blocks,
                tries_max=config.decode_tries_max,
                affinity_blocks_max=config.affinity_blocks_max,
                loop=asyncio.get_running_loop(),
                rng=rng,
            ),
            loop=asyncio.get_running_loop(),
        )
        node.engine_loop = EngineLoop(pool.engine, node, name=config.name)
        await _run(runtime, node, peers, pool, stop, drain, on_ready)
    finally:
        pool.close()


async def _run(
    runtime: NodeRuntime,
    node: PrefillNode,
    peers: Peers,
    pool: DevicePool,
    stop: asyncio.Event,
    drain: asyncio.Event | None,
    on_ready: Callable[[str], None],
) -> None:
    watch = ConservationWatch(pool.ledger, runtime.clock)

    def upkeep() -> None:
        watch.check_sometimes()
        node.upkeep()
        peers.upkeep()

    def status(message: node_pb2.NodeStatus) -> None:
        watch.check()
        message.conservation_errors = watch.errors
        peers.add_status(message)

    def holds() -> Holdings:
        return dataclasses.replace(peers.holds(), requests=node.requests)

    runtime.model, runtime.load = pool.model, lambda: peers.add_load(node.load())
    runtime.transports = tuple(t.value for t in peers.transports)
    runtime.status, runtime.upkeep, runtime.holds = status, upkeep, holds
    serve_prefixes(runtime, pool)
    report_engine(runtime, pool)
    service = PrefillService(node, runtime.incarnation, lambda: runtime.lifecycle.takes_requests, runtime.rng)
    runtime.server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, service)
    runtime.server.add(
        "baton.v1.Transfer",
        transfer_pb2_grpc.add_TransferServicer_to_server,
        WriterService(runtime.incarnation, peers.find),
    )
    stepping = asyncio.create_task(node.engine_loop.run(), name="engine-loop")
    try:
        on_ready(await runtime.open())
        await done_or_broken(runtime.serve_until(stop, drain), stepping)
    finally:
        await runtime.leave()
        await runtime.server.stop(runtime.config.stop_grace_ms / 1000)
        await node.engine_loop.stop(stepping)
        await peers.close()
        await runtime.close()
