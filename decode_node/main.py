"""Puts a decode node together, runs it until it is asked to stop, and takes it apart in the reverse order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from random import Random

from batonpb import decode_pb2_grpc, node_pb2, transfer_pb2_grpc

from baton.clock import SystemClock
from baton.runtime import NodeRuntime, Progress
from baton.wire import Role
from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.service import DecodeService, ReceiverService
from kvtransfer.liveness_stream import LivenessStreams
from node.conservation import ConservationWatch
from node.engine_loop import EngineLoop, done_or_broken
from node.pool import DevicePool, open_device_pool, report_engine
from node.prefix_service import serve_prefixes
from node.receiver import add_status, make_receiver, open_ports


async def serve(
    config: DecodeConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the node cannot start."""
    loop = asyncio.get_running_loop()
    rng = Random(secrets.randbits(64))

    def follow_directory() -> None:
        if not runtime.membership.stale:
            records = runtime.membership.nodes(Role.PREFILL)
            node.receiver.writers_seen({record.endpoint: record.incarnation for record in records})

    runtime = NodeRuntime(config, Role.DECODE, pod=config.pod, clock=SystemClock(), rng=rng, on_change=follow_directory)
    await runtime.check_listen()
    pool = await open_device_pool(
        config.engine,
        name=config.name,
        progress=progress,
        spill=config.spill,
        transports=config.transports,
        staging=config.staging,
    )
    spill = None if pool.host is None else pool.host.spill
    try:
        node = DecodeNode(
            config=config,
            runner=pool.runner,
            engine=pool.engine,
            ledger=pool.ledger,
            blocks=pool.blocks,
            spill=spill,
            loop=loop,
            randomness=secrets.token_bytes,
        )
        node.receiver = make_receiver(config, pool, host=node, own=runtime.incarnation, channels=runtime.channels)
        node.engine_loop = EngineLoop(pool.engine, node, name=config.name)
        if spill is not None:
            spill.changed = node.engine_loop.wake
        try:
            open_ports(config, pool, node.receiver.ports)
            await _run(runtime, node, pool, stop, drain, on_ready)
        finally:
            await node.receiver.ports.close()
    finally:
        pool.close()


async def _run(
    runtime: NodeRuntime,
    node: DecodeNode,
    pool: DevicePool,
    stop: asyncio.Event,
    drain: asyncio.Event | None,
    on_ready: Callable[[str], None],
) -> None:
    spill = None if pool.host is None else pool.host.spill
    watch = ConservationWatch(pool.ledger, runtime.clock, beside=None if spill is None else spill.check)
    receiver = node.receiver
    liveness_streams = LivenessStreams(lost=receiver.writer_lost, liveness=runtime.config.liveness)

    def upkeep() -> None:
        watch.check_sometimes()
        node.reap()

    def status(message: node_pb2.NodeStatus) -> None:
        watch.check()
        message.conservation_errors = watch.errors
        add_status(receiver, message)
        if spill is not None:
            for what, count in spill.report(pool.layout.num_layers * pool.layout.record_bytes).items():
                message.counters.add(name=f"spill: {what}", value=count)

    runtime.model, runtime.load = pool.model, node.load
    runtime.transports = tuple(t.value for t in receiver.ports.transports)
    runtime.status, runtime.upkeep, runtime.holds = status, upkeep, node.holds
    serve_prefixes(runtime, pool)
    report_engine(runtime, pool)
    runtime.server.add(
        "baton.v1.Transfer",
        transfer_pb2_grpc.add_TransferServicer_to_server,
        ReceiverService(
            node, receiver, liveness_streams, runtime.incarnation, pool.model, lambda: runtime.lifecycle.takes_requests
        ),
    )
    runtime.server.add(
        "baton.v1.Decode",
        decode_pb2_grpc.add_DecodeServicer_to_server,
        DecodeService(node, runtime.incarnation),
    )
    stepping = asyncio.create_task(node.engine_loop.run(), name="engine-loop")
    try:
        on_ready(await runtime.open())
        await done_or_broken(runtime.serve_until(stop, drain), stepping)
    finally:
        await runtime.leave()
        await node.close()
        node.streams.close_all()
        liveness_streams.close()
        await runtime.server.stop(runtime.config.stop_grace_ms / 1000)
        await node.engine_loop.stop(stepping)
        await receiver.close()
        await receiver.ports.close()
        await runtime.close()
