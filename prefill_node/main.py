"""Puts a prefill node together, runs it until it is asked to stop, and takes it apart in the reverse order."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from random import Random

from batonpb import node_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from baton.clock import SystemClock
from baton.drain import Holdings
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, Pair
from baton.log import get_log
from baton.runtime import NodeRuntime, NodeSettings, Progress
from baton.wire import NodeRecord, Role, model_to_proto
from cachestore.device_pool import DevicePool, open_device_pool
from engine.loop import EngineLoop, done_or_broken
from kvtransfer.attendance import WriterAttendance
from kvtransfer.conservation import ConservationWatch
from kvtransfer.negotiation import Offers, host_identity
from kvtransfer.transport import DataEndpoint, TransportName, WriterEvents, WriterLink
from kvtransfer.transports.shm import ShmConnectError, ShmWriterLink
from kvtransfer.transports.tcp import TcpConnectError, TcpWriterLink
from kvtransfer.writer import PeerAddress, WriterPeer
from kvtransfer.writer_grants import WriterGrants
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from prefill_node.service import PrefillService, WriterService

log = get_log("prefill")

MACHINES_MAX = 4_096
"""Numberings kept of decode processes that are gone, oldest dropped first."""


class Peers:
    """This process's writers, one for each decode process it has met."""

    def __init__(self, *, runtime: NodeRuntime, config: PrefillConfig, pool: DevicePool) -> None:
        self._runtime = runtime
        self._config = config
        self._pool = pool
        self._host = host_identity()
        self._loop = asyncio.get_running_loop()
        self._peers: dict[Incarnation, WriterPeer] = {}
        self._attendances: dict[Incarnation, WriterAttendance] = {}
        self._closing_peers: set[Incarnation] = set()
        self._machines: OrderedDict[Incarnation, WriterGrants] = OrderedDict()
        """Of closed peers: a receiver that was wrongly believed gone goes on with the numbering that it knows."""
        self._closing: set[asyncio.Task[None]] = set()

    def for_record(self, record: NodeRecord) -> WriterPeer:
        """The writer towards a decode process. Raises BatonError PEER_UNREACHABLE while an earlier one is closing."""
        peer = self._peers.get(record.incarnation)
        if peer is not None and peer.gone:
            raise BatonError(
                Reason.PEER_UNREACHABLE, f"{record.name} was lost; what was under way there is being ended."
            )
        if peer is not None and self._attendances[record.incarnation].out_of_reach:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{record.name} is out of reach.")
        if peer is None:
            pair = Pair(receiver=record.incarnation, writer=self._runtime.incarnation)
            peer = WriterPeer(
                address=PeerAddress(name=record.name, endpoint=record.endpoint, pair=pair),
                connect_request=transfer_pb2.ConnectRequest(
                    header={"sender": pair.writer, "receiver": pair.receiver},
                    writer_name=self._runtime.name,
                    writer_endpoint=self._runtime.endpoint,
                    model=model_to_proto(self._pool.model),
                    host=self._host,
                ),
                layout=self._pool.layout,
                src_num_blocks=self._pool.ledger.num_blocks,
                machine=self._machine(record.incarnation),
                channels=self._runtime.channels,
                make_link=self._make_link,
                offers=Offers(self._config.transports, self._config.fallback),
                loop=self._loop,
                config=self._config.writer,
            )
            self._peers[record.incarnation] = peer
            self._attendances[record.incarnation] = self._attend(peer)
        return peer

    def _attend(self, peer: WriterPeer) -> WriterAttendance:
        address = peer.address
        return WriterAttendance(
            name=address.name,
            endpoint=address.endpoint,
            stub=transfer_pb2_grpc.TransferStub(self._runtime.channels.get(address.endpoint)),
            request=transfer_pb2.AttendRequest(
                header={"sender": address.pair.writer, "receiver": address.pair.receiver}
            ),
            lost=peer.receiver_lost,
            gone=peer.peer_gone,
            liveness=self._config.liveness,
            clock=self._runtime.clock,
        )

    def _machine(self, receiver: Incarnation) -> WriterGrants:
        return self._machines.pop(receiver) if receiver in self._machines else WriterGrants()

    def find(self, receiver: Incarnation) -> WriterPeer | None:
        return self._peers.get(receiver)

    def all(self) -> list[WriterPeer]:
        return list(self._peers.values())

    def follow_directory(self) -> None:
        """Notice decode processes that have ended: another one is at the endpoint, or it is neither listed nor linked.

        Being wrong costs the handoffs under way there and nothing else: whoever asks for them is told they are over.
        """
        if self._runtime.membership.stale:
            return
        records = self._runtime.membership.nodes(Role.DECODE)
        owners = {record.endpoint: record.incarnation for record in records}
        present = set(owners.values())
        for incarnation, peer in list(self._peers.items()):
            replaced = owners.get(peer.address.endpoint, incarnation) != incarnation
            if replaced or (incarnation not in present and not peer.linked):
                peer.peer_gone()
        self.close_gone()

    def close_gone(self) -> None:
        """Close peers that are gone and have let go of every source block. Called every second too."""
        for incarnation, peer in self._peers.items():
            if peer.gone and peer.machine.live == 0 and incarnation not in self._closing_peers:
                self._closing_peers.add(incarnation)
                task = self._loop.create_task(self._close_peer(incarnation, peer))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _close_peer(self, incarnation: Incarnation, peer: WriterPeer) -> None:
        await self._attendances.pop(incarnation).close()
        await peer.close()
        del self._peers[incarnation]
        self._closing_peers.discard(incarnation)
        self._machines[incarnation] = peer.machine
        if len(self._machines) > MACHINES_MAX:
            self._machines.popitem(last=False)
        endpoint = peer.address.endpoint
        if all(other.address.endpoint != endpoint for other in self._peers.values()):
            await self._runtime.channels.drop(endpoint)

    async def close(self) -> None:
        await asyncio.gather(*(peer.settle(self._config.stop_grace_ms) for peer in self._peers.values()))
        await asyncio.gather(*(attendance.close() for attendance in self._attendances.values()))
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), *self._closing)

    async def _make_link(self, endpoint: DataEndpoint, pair: Pair, events: WriterEvents) -> WriterLink:
        """Open a link of the endpoint's transport. Raises BatonError PEER_UNREACHABLE."""
        source_U8 = self._pool.region.array_U8
        try:
            if endpoint.transport is TransportName.SHM:
                return await ShmWriterLink.connect(endpoint, pair, source_U8, events, self._loop)
            assert endpoint.transport is TransportName.TCP, endpoint.transport
            return await TcpWriterLink.connect(endpoint, pair, source_U8, events, self._loop, self._config.tcp)
        except (ShmConnectError, TcpConnectError) as error:
            text = f"No {endpoint.transport.value} link: {error}."
            raise BatonError(Reason.PEER_UNREACHABLE, text) from error


async def serve(
    config: PrefillConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the node cannot start."""
    rng = Random(secrets.randbits(64))
    runtime = NodeRuntime(_settings(config), clock=SystemClock(), rng=rng, on_change=lambda: peers.follow_directory())
    await runtime.check_listen()
    pool = await open_device_pool(config.engine, name=config.name, progress=progress)
    try:
        peers = Peers(runtime=runtime, config=config, pool=pool)
        node = PrefillNode(
            config=config,
            model=pool.model,
            runner=pool.runner,
            engine=pool.engine,
            ledger=pool.ledger,
            blocks=pool.blocks,
            decode_nodes=lambda: runtime.membership.nodes(Role.DECODE),
            peer_for=peers.for_record,
            loop=asyncio.get_running_loop(),
            rng=rng,
        )
        node.engine_loop = EngineLoop(pool.engine, node, name=config.name)
        await _run(runtime, node, peers, pool, stop, drain, on_ready, config=config)
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
    *,
    config: PrefillConfig,
) -> None:
    watch = ConservationWatch(pool.ledger, runtime.clock)

    def upkeep() -> None:
        watch.check_sometimes()
        for peer in peers.all():
            peer.give_up_stalled()
        peers.close_gone()

    def status(message: node_pb2.NodeStatus) -> None:
        watch.check()
        message.conservation_errors = watch.errors
        for peer in peers.all():
            message.pairs.add(
                peer=peer.address.name,
                peer_incarnation=peer.address.pair.receiver,
                transport=peer.transport.value if peer.transport is not None else "",
                bytes_moved=peer.bytes_moved,
                transports_given_up=[t.value for t in peer.offers.dropped],
                link_failures=peer.link_failures,
            )

        message.counters.add(name="transports given up", value=sum(len(p.offers.dropped) for p in peers.all()))

    def holds() -> Holdings:
        return Holdings(
            requests=node.requests,
            grants_written=sum(p.machine.live for p in peers.all()),
            unacknowledged_writes=sum(p.machine.outstanding for p in peers.all()),
        )

    runtime.model, runtime.load = pool.model, node.load
    runtime.transports = tuple(t.value for t in config.transports)
    runtime.status, runtime.upkeep, runtime.holds = status, upkeep, holds
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
        await runtime.server.stop(runtime.settings.stop_grace_ms / 1000)
        await node.engine_loop.stop(stepping)
        await peers.close()
        await runtime.close()


def _settings(config: PrefillConfig) -> NodeSettings:
    return NodeSettings(
        name=config.name,
        role=Role.PREFILL,
        listen=config.listen,
        advertise=config.advertise,
        directory=config.directory,
        membership=config.membership,
        rpc=config.rpc,
        liveness=config.liveness,
        stop_grace_ms=config.stop_grace_ms,
        drain_ms_max=config.drain_ms_max,
    )
