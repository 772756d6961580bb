"""What a serving node moves KV with: writers towards other nodes, a receiver for what they write, and fetches.

Every role has both ends. A prefill node hands over and fetches, a decode node is handed over to, and both are owners.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from batonpb import node_pb2

from baton.drain import Holdings
from baton.ids import GrantId, RequestKey
from baton.runtime import NodeRuntime
from baton.wire import MovedLoad, Role
from kvtransfer.protocol.receiver import GrantState
from kvtransfer.receiver import LivenessStreams, ReceiverHost
from node.config import NodeConfig
from node.fetching import Fetches, FetchOwner
from node.peers import Peers
from node.pool import DevicePool, RegionTransports
from node.receiver import add_status, make_receiver, open_ports


class Transfers:
    """Of one node; control thread only. Is the receiver's `ReceiverHost`: grants of fetches are ended here, others go
    to the node that takes handoffs."""

    def __init__(
        self,
        *,
        runtime: NodeRuntime,
        config: NodeConfig,
        pool: DevicePool,
        transports: RegionTransports,
        opened: AsyncExitStack,
        handoffs: ReceiverHost | None = None,
    ) -> None:
        """`opened` closes what is opened here. `handoffs`: of a node that requests are handed over to."""
        self._runtime = runtime
        self._config = config
        self.pool = pool
        self._transports = transports
        self._handoffs = handoffs
        self.room_changed: Callable[[], None] = lambda: None
        """Called when blocks have been released that requests may wait for."""
        # Of the receiving side alone: each side drops the channels of peers that are gone for it, whatever they are to
        # the other.
        channels = runtime.make_channels()
        opened.push_async_callback(channels.close)
        self.receiver = make_receiver(config, pool, host=self, own=runtime.incarnation, channels=channels)
        opened.push_async_callback(self.receiver.ports.close)
        opened.push_async_callback(self.receiver.close)
        self.liveness_streams = LivenessStreams(lost=self.receiver.writer_lost, liveness=config.liveness)
        self.fetches = Fetches(
            runtime=runtime, pool=pool, receiver=self.receiver, channels=channels, changed=self._room_changed
        )
        opened.push_async_callback(self.fetches.close)
        self.peers = Peers(runtime=runtime, config=config, pool=pool, transports=transports)
        opened.push_async_callback(self.peers.close)
        self.owner = FetchOwner(runtime=runtime, pool=pool, peers=self.peers, changed=self._room_changed)
        if pool.host is not None:  # what runners should find free under overcommit is not for fetches
            spill = pool.host.spill
            self.fetches.spare = self.owner.spare = lambda: pool.ledger.available - spill.headroom()

    def open(self) -> None:
        """Listen for data connections. Raises BatonError PORT_IN_USE or BAD_ENDPOINT."""
        open_ports(self._config, self.pool, self._transports, self.receiver.ports)

    def follow_directory(self) -> None:
        self.peers.follow_directory()
        membership = self._runtime.membership
        if not membership.stale:
            others = (record for record in membership.nodes() if record.role is not Role.ROUTER)
            self.receiver.writers_seen({record.endpoint: record.incarnation for record in others})

    def upkeep(self) -> None:
        """Called every second."""
        self.peers.upkeep()
        self.receiver.upkeep()
        self.fetches.upkeep()

    def holds(self) -> Holdings:
        """Without requests."""
        return Holdings(
            grants_received=self.receiver.grants.unreleased,
            grants_quarantined=self.receiver.grants.states()[GrantState.QUARANTINED],
            grants_written=self.peers.grants_written,
            unacknowledged_writes=self.peers.unacknowledged_writes,
            fetches_under_way=self.fetches.under_way + self.owner.serving,
        )

    def moved(self) -> MovedLoad:
        handoff_bytes, served_bytes = self.peers.bytes_moved
        fetches = self.fetches
        return MovedLoad(
            handoff_bytes=handoff_bytes,
            served_bytes=served_bytes,
            fetches=fetches.total.times.count,
            fetched_bytes=fetches.total.nbytes,
            fetch_s=fetches.total.times.total_s,
            fetch_counts=tuple(fetches.total.times.counts),
            fetches_refused=fetches.total.refused,
            fetches_failed=fetches.total.failed,
        )

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        self.peers.add_status(message)
        add_status(self.receiver, message)
        self.fetches.add_status(message)

    def end_streams(self) -> None:
        """This node is about to end: writers hear of it. The server still answers."""
        self.liveness_streams.close()

    # What the receiver instructs (kvtransfer.receiver.ReceiverHost).

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        if self.fetches.has(grant):
            self.fetches.committed(key, grant)
        else:
            assert self._handoffs is not None, grant.hex()
            self._handoffs.committed(key, grant)

    def cancelled(self, key: RequestKey, grant: GrantId) -> None:
        """Of a committed grant. That of a fetch is over with its commit."""
        assert self._handoffs is not None, grant.hex()
        self._handoffs.cancelled(key, grant)

    def let_go(self, grant: GrantId) -> None:
        if self.fetches.has(grant):
            self.fetches.let_go(grant)
        elif self._handoffs is not None:
            self._handoffs.let_go(grant)

    def _room_changed(self) -> None:
        self.pool.engine.changed()  # a sequence may wait for these blocks
        self.room_changed()
