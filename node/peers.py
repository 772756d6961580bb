"""A node's writers, one for each process that it has written to: decode nodes, and nodes that fetch from it."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict

from batonpb import node_pb2, transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, Pair
from baton.log import get_log
from baton.runtime import NodeRuntime
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role, model_to_proto
from kvtransfer.device.driver import EventPoster
from kvtransfer.device.region import DeviceRegion
from kvtransfer.link import (
    DataDoesNotPass,
    LivenessStream,
    Offers,
    PeerAddress,
    host_parts,
)
from kvtransfer.protocol.writer import WriterMachine
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName, WriterEvents, WriterLink
from kvtransfer.transports.cuda_ipc import CudaIpcWriterLink
from kvtransfer.transports.rdma import RdmaUnproved, RdmaWriterLink
from kvtransfer.transports.shm import ShmWriterLink, copy_turns
from kvtransfer.transports.tcp import TcpWriterLink
from kvtransfer.transports.tcp_staged import StagedTcpLink
from kvtransfer.transports.ucx import UcxWriterLink
from kvtransfer.transports.writer_link import LinkParts
from kvtransfer.writer import WriterPeer
from node.config import NodeConfig
from node.pool import DevicePool, RegionTransports, add_fact
from node.regions import checksum_thread

log = get_log("prefill")

OUT_OF_REACH = "decode nodes out of reach"
"""Name of a status counter."""
WRITERS_IDLE_MAX = 192
"""Writers without a handoff that stay connected, as at the receiver (`kvtransfer.receiver.PAIRS_IDLE_MAX`)."""
MACHINES_MAX = 4_096
"""Numberings kept of processes that are gone, oldest dropped first."""


class Peers:
    """This process's writers, one for each process that it has written to. Control thread only."""

    def __init__(
        self,
        *,
        runtime: NodeRuntime,
        config: NodeConfig,
        pool: DevicePool,
        transports: RegionTransports,
    ) -> None:
        self.runtime = runtime
        self._config = config
        self._copy_turns = copy_turns(config.shm)
        self._pool = pool
        self._host_parts = host_parts()
        self._loop = asyncio.get_running_loop()
        self._transports, self._rdma = transports.offered, transports.rdma
        self._peers: dict[Incarnation, WriterPeer] = {}
        self.liveness: dict[Incarnation, LivenessStream] = {}
        self._closing_peers: set[Incarnation] = set()
        self._machines: OrderedDict[Incarnation, WriterMachine] = OrderedDict()
        """Of closed peers: a receiver that was wrongly believed gone goes on with the numbering that it knows."""
        self._moved_before = self._fetched_before = 0
        """Bytes, by writers that are closed."""
        self._closing = Tasks(self._loop, log, broken="closing a writer failed")
        self._checksums = checksum_thread(pool.region, name=runtime.name) if config.writer.checksum_fraction else None
        self._poster: EventPoster | None = None
        """What rdma sends from a device waits for its events."""
        if self._rdma is not None and isinstance(pool.region, DeviceRegion):
            self._poster = EventPoster(streams=pool.region.driver.streams, name=f"{runtime.name}-poster")

    def for_record(self, record: NodeRecord) -> WriterPeer:
        """The writer towards a decode process. Raises BatonError PEER_UNREACHABLE while an earlier one is closing."""
        return self.towards(record.name, record.endpoint, record.incarnation)

    def towards(self, name: str, endpoint: str, incarnation: Incarnation) -> WriterPeer:
        """The same by where it is, which it may have said itself."""
        peer = self._peers.get(incarnation)
        if peer is None:
            peer = self._peers[incarnation] = self._make_peer(name, endpoint, incarnation)
            self.liveness[incarnation] = self._watch(peer)
        elif peer.gone:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{name} was lost; what was under way there is being ended.")
        elif self.liveness[incarnation].out_of_reach:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{name} is out of reach.")
        return peer

    def _make_peer(self, name: str, endpoint: str, incarnation: Incarnation) -> WriterPeer:
        runtime = self.runtime
        pair = Pair(receiver=incarnation, writer=runtime.incarnation)
        return WriterPeer(
            address=PeerAddress(name=name, endpoint=endpoint, pair=pair),
            connect_request=transfer_pb2.ConnectRequest(
                header={"sender": pair.writer, "receiver": pair.receiver},
                writer_name=runtime.name,
                writer_endpoint=runtime.endpoint,
                model=model_to_proto(self._pool.model),
                host_name=socket.gethostname(),
                host_parts=self._host_parts,
            ),
            layout=self._pool.layout,
            src_num_blocks=self._pool.ledger.num_blocks,
            machine=self._machines.pop(incarnation, WriterMachine()),
            channels=runtime.channels,
            make_link=self._make_link,
            offers=Offers(self._transports),
            loop=self._loop,
            config=self._config.writer,
            checksums=self._checksums,
        )

    def _watch(self, peer: WriterPeer) -> LivenessStream:
        return LivenessStream(
            address=peer.address,
            stub=peer.stub,
            lost=peer.receiver_lost,
            gone=peer.peer_gone,
            liveness=self._config.liveness,
            clock=self.runtime.clock,
        )

    def records(self) -> list[NodeRecord]:
        """The decode nodes beside this one, by the directory."""
        nodes = self.runtime.membership.nodes(Role.DECODE)
        return [record for record in nodes if record.incarnation != self.runtime.incarnation]

    def find(self, receiver: Incarnation) -> WriterPeer | None:
        return self._peers.get(receiver)

    def upkeep(self) -> None:
        """Called every second. Closes idle writers beyond the limit, the least recently used first."""
        for peer in list(self._peers.values()):
            peer.upkeep()
        idle = [peer for peer in self._peers.values() if not peer.gone and peer.machine.live == 0]
        idle.sort(key=lambda peer: peer.used_s)
        for peer in idle[: max(0, len(idle) - WRITERS_IDLE_MAX)]:
            peer.peer_gone()
        self.close_gone()

    @property
    def grants_written(self) -> int:
        """Grants under which something is or may be written."""
        return sum(peer.machine.writing for peer in self._peers.values())

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Since the start, for requests and for fetches by others."""
        fetched = self._fetched_before + sum(peer.bytes_fetched for peer in self._peers.values())
        return self._moved_before + sum(peer.bytes_moved for peer in self._peers.values()) - fetched, fetched

    @property
    def unacknowledged_writes(self) -> int:
        return sum(peer.machine.outstanding for peer in self._peers.values())

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        """Add each pair, and how many transports are given up or rejected."""
        message.pairs.extend(peer.status() for peer in self._peers.values())
        message.counters.add(name="transports given up", value=self.transports_given_up)
        rejecting = sum(bool(peer.link.rejected_transports) for peer in self._peers.values())
        message.counters.add(name="pairs that do not use a better transport", value=rejecting)
        if self._rdma is not None:
            add_fact(message, TransportName.RDMA.value, self._rdma.describe())
        in_doubt = sum(peer.machine.live - peer.machine.writing for peer in self._peers.values())
        message.counters.add(name="released with writes in doubt, not fenced yet", value=in_doubt)
        message.counters.add(name=OUT_OF_REACH, value=self.out_of_reach)

    @property
    def transports_given_up(self) -> int:
        """Counted over the peers there are."""
        return sum(len(peer.link.offers.given_up) for peer in self._peers.values())

    @property
    def out_of_reach(self) -> int:
        """Receivers that live as far as is known, and where nothing is placed until they are reached again."""
        return sum(not peer.gone and self.liveness[i].out_of_reach for i, peer in self._peers.items())

    def follow_directory(self) -> None:
        """Notice processes that have ended: another one is at the endpoint, or it is neither listed nor linked.
        An error costs the handoffs under way there, nothing else."""
        if self.runtime.membership.stale:
            return
        records = [record for record in self.runtime.membership.nodes() if record.role is not Role.ROUTER]
        owners = {record.endpoint: record.incarnation for record in records}
        present = {record.incarnation for record in records}
        for incarnation, peer in list(self._peers.items()):
            replaced = owners.get(peer.address.endpoint, incarnation) != incarnation
            if incarnation not in present and (replaced or peer.link.now is None):
                peer.peer_gone()
        self.close_gone()

    def close_gone(self) -> None:
        """Close peers that are gone and have let go of every source block. Called every second too."""
        for incarnation, peer in self._peers.items():
            if peer.gone and peer.machine.live == 0 and incarnation not in self._closing_peers:
                self._closing_peers.add(incarnation)
                self._closing.spawn(self._close_peer(incarnation, peer))

    async def _close_peer(self, incarnation: Incarnation, peer: WriterPeer) -> None:
        """Whatever the closing raises, which is logged, the next writer to that process goes on with its numbering."""
        try:
            await self.liveness.pop(incarnation).close()
            await peer.close()
        finally:
            del self._peers[incarnation]
            self._moved_before += peer.bytes_moved
            self._fetched_before += peer.bytes_fetched
            self._closing_peers.discard(incarnation)
            self._machines[incarnation] = peer.machine
            if len(self._machines) > MACHINES_MAX:
                self._machines.popitem(last=False)
        endpoint = peer.address.endpoint
        if all(other.address.endpoint != endpoint for other in self._peers.values()):
            await self.runtime.channels.drop(endpoint)

    async def close(self) -> None:
        await asyncio.gather(*(peer.settle(self._config.stop_grace_ms) for peer in self._peers.values()))
        await asyncio.gather(*(stream.close() for stream in self.liveness.values()))
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), self._closing.drain())
        if self._poster is not None:
            self._poster.close()
        if self._checksums is not None:
            self._checksums.close()

    async def _make_link(self, endpoint: DataEndpoint, pair: Pair, events: WriterEvents) -> WriterLink:
        """Open a link of the endpoint's transport. Raises BatonError PEER_UNREACHABLE, DataDoesNotPass."""
        transport, region, staged = endpoint.transport, self._pool.region, self._pool.staged
        config = self._config
        parts = LinkParts(endpoint, pair, events, self._loop)
        try:
            if transport is TransportName.CUDA_IPC:
                assert isinstance(region, DeviceRegion), region.kind
                return await CudaIpcWriterLink.connect(parts, region)
            if transport is TransportName.RDMA:
                assert self._rdma is not None
                link = await RdmaWriterLink.connect(parts, self._rdma)
                if self._poster is not None:
                    link.post_behind(self._poster)
                return link
            if staged is not None:
                assert transport is TransportName.TCP, transport
                return await StagedTcpLink.connect_staged(parts, staged, config.tcp)
            source_U8 = self._pool.host_region.array_U8
            if transport is TransportName.SHM:
                return await ShmWriterLink.connect(parts, source_U8, config.shm, turns=self._copy_turns)
            if transport is TransportName.UCX:
                return await UcxWriterLink.connect(parts, source_U8, config.ucx)
            return await TcpWriterLink.connect(parts, source_U8, config.tcp)
        except ConnectError as error:
            text = f"No {transport.value} link: {error}."
            if isinstance(error, RdmaUnproved):
                raise DataDoesNotPass(text) from error
            raise BatonError(Reason.PEER_UNREACHABLE, text) from error
