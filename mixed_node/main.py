"""Puts a mixed node together, runs it until it is asked to stop, and takes it apart in the reverse order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from random import Random

from batonpb import decode_pb2_grpc, node_pb2, prefill_pb2, prefill_pb2_grpc, transfer_pb2_grpc

from baton.clock import SystemClock
from baton.rpc_client import Channels
from baton.runtime import NodeRuntime, Progress
from baton.wire import NodeRecord, Role
from decode_node.node import DecodeNode
from decode_node.service import DecodeService
from kvtransfer.liveness_stream import LivenessStreams
from kvtransfer.transports.rdma_offer import LentRegistration, register_if_usable
from mixed_node.config import MixedConfig
from mixed_node.node import MixedNode
from mixed_node.service import TransferService
from node.conservation import ConservationWatch
from node.engine_loop import EngineLoop, done_or_broken
from node.peers import Peers
from node.pool import DevicePool, open_device_pool, report_engine
from node.prefix_service import serve_prefixes
from node.receiver import add_status, make_receiver, open_ports
from node.regions import offered, rdma_region
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.node import PrefillNode
from prefill_node.service import PrefillService, WriterService


async def serve(
    config: MixedConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the node cannot start."""

    def follow_directory() -> None:
        peers.follow_directory()
        if not runtime.membership.stale:
            records = runtime.membership.nodes(Role.PREFILL)
            node.decode.receiver.writers_seen({record.endpoint: record.incarnation for record in records})
        node.prefill.look_again()  # a decode node that has come or gone may be what the queue waits for

    rng = Random(secrets.randbits(64))
    runtime = NodeRuntime(config, Role.MIXED, pod=config.pod, clock=SystemClock(), rng=rng, on_change=follow_directory)
    # Of the receiver alone: each half drops the channels of peers that are gone for it, whatever they are to the other.
    channels = runtime.make_channels()
    await runtime.check_listen()
    pool = await open_device_pool(
        config.engine, name=config.name, progress=progress, transports=config.transports, staging=config.staging
    )
    try:
        lent = _register_once(config, pool)
        peers = Peers(runtime=runtime, config=config.prefill_half(), pool=pool, lent=lent)
        node = _make_node(config, runtime, pool, peers, channels)
        try:
            open_ports(config, pool, node.decode.receiver.ports, lent)
            await _run(runtime, node, peers, pool, channels, stop, drain, on_ready)
        finally:
            await node.decode.receiver.ports.close()
            if lent.memory is not None:
                await lent.memory.close()
    finally:
        pool.close()


def _register_once(config: MixedConfig, pool: DevicePool) -> LentRegistration:
    """For both halves."""
    loop = asyncio.get_running_loop()
    serving = offered(config.transports, pool.region)
    memory = register_if_usable(serving, rdma_region(pool.region), config.rdma, loop, remote_writes=True)
    return LentRegistration(memory=memory)


def _make_node(
    config: MixedConfig, runtime: NodeRuntime, pool: DevicePool, peers: Peers, channels: Channels
) -> MixedNode:
    loop = asyncio.get_running_loop()

    def others() -> list[NodeRecord]:
        return [r for r in runtime.membership.nodes(Role.DECODE) if r.incarnation != runtime.incarnation]

    def granted() -> prefill_pb2.Granted:
        return prefill_pb2.Granted(
            decode_node=runtime.name,
            decode_incarnation=runtime.incarnation,
            decode_endpoint=runtime.endpoint,
        )

    decode = DecodeNode(
        config=config,
        runner=pool.runner,
        engine=pool.engine,
        ledger=pool.ledger,
        blocks=pool.blocks,
        spill=None,
        loop=loop,
        randomness=secrets.token_bytes,
    )
    decode.receiver = make_receiver(config, pool, host=decode, own=runtime.incarnation, channels=channels)
    node = MixedNode(
        policy=config.policy(),
        decode=decode,
        runner=pool.runner,
        engine=pool.engine,
        blocks=pool.blocks,
        granted=granted,
        loop=loop,
        randomness=secrets.token_bytes,
    )
    prefill = config.prefill_half()
    node.prefill = PrefillNode(
        config=prefill,
        runner=pool.runner,
        engine=pool.engine,
        ledger=pool.ledger,
        blocks=pool.blocks,
        decode_nodes=DecodeNodes(
            model=pool.model,
            records=others,
            peer_for=peers.for_record,
            blocks=pool.blocks,
            tries_max=prefill.decode_tries_max,
            affinity_blocks_max=prefill.affinity_blocks_max,
            loop=loop,
            rng=runtime.rng,
        ),
        loop=loop,
        local=node,
    )
    node.engine_loop = EngineLoop(pool.engine, node, name=config.name)
    node.prefill.engine_loop = decode.engine_loop = node.engine_loop
    return node


async def _run(
    runtime: NodeRuntime,
    node: MixedNode,
    peers: Peers,
    pool: DevicePool,
    channels: Channels,
    stop: asyncio.Event,
    drain: asyncio.Event | None,
    on_ready: Callable[[str], None],
) -> None:
    watch = ConservationWatch(pool.ledger, runtime.clock)
    receiver = node.decode.receiver
    liveness_streams = LivenessStreams(lost=receiver.writer_lost, liveness=runtime.config.liveness)

    def upkeep() -> None:
        watch.check_sometimes()
        node.upkeep()
        peers.upkeep()

    def status(message: node_pb2.NodeStatus) -> None:
        watch.check()
        message.conservation_errors = watch.errors
        peers.add_status(message)
        add_status(receiver, message)

    runtime.model, runtime.load = pool.model, lambda: peers.add_load(node.load())
    runtime.transports = tuple(t.value for t in receiver.ports.transports)
    runtime.status, runtime.upkeep = status, upkeep
    runtime.holds = lambda: node.holds(peers.holds())
    serve_prefixes(runtime, pool)
    report_engine(runtime, pool)
    _add_services(runtime, node, peers, liveness_streams, pool)
    stepping = asyncio.create_task(node.engine_loop.run(), name="engine-loop")
    try:
        on_ready(await runtime.open())
        await done_or_broken(runtime.serve_until(stop, drain), stepping)
    finally:
        await runtime.leave()
        await node.decode.close()
        node.decode.streams.close_all()
        liveness_streams.close()
        await runtime.server.stop(runtime.config.stop_grace_ms / 1000)
        await node.engine_loop.stop(stepping)
        await peers.close()
        await receiver.close()
        await receiver.ports.close()
        await channels.close()
        await runtime.close()


def _add_services(
    runtime: NodeRuntime, node: MixedNode, peers: Peers, liveness_streams: LivenessStreams, pool: DevicePool
) -> None:
    own, server = runtime.incarnation, runtime.server

    def takes_requests() -> bool:
        return runtime.lifecycle.takes_requests

    prefill = PrefillService(node.prefill, own, takes_requests, runtime.rng)
    server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    transfer = TransferService(node.decode, node.decode.receiver, liveness_streams, own, pool.model, takes_requests)
    transfer.writer = WriterService(own, peers.find)
    server.add("baton.v1.Transfer", transfer_pb2_grpc.add_TransferServicer_to_server, transfer)
    server.add("baton.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server, DecodeService(node.decode, own))
