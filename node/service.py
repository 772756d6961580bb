"""Services that serving nodes have in common: the one that takes pins, and baton.v1.Transfer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from batonpb import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    node_pb2,
    pins_pb2,
    pins_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

from baton.clock import Clock
from baton.errors import BatonError, Reason, bad_field
from baton.ids import GrantId, Incarnation, Pair, ReserveNumber
from baton.log import get_log
from baton.runtime import NodeRuntime
from baton.wire import check_header, check_receiver, model_from_proto
from cachestore.holdings import Tier
from kvtransfer.link import check_compatible, choose, host_difference, host_parts, rejected_transports
from node.pool import DevicePool, check_tokens
from node.transfers import Transfers

log = get_log("pins")

NAME_CHARS_MAX: Final = 63
SALT_BYTES_MAX: Final = 256
TIERS_BELOW: Final = {"host": Tier.HOST, "disk": Tier.DISK}


class PinService(pins_pb2_grpc.NodePinsServicer):
    """baton.v1.NodePins, for routers."""

    def __init__(self, pool: DevicePool, own: Incarnation, clock: Clock) -> None:
        self._pool = pool
        self._own = own
        self._clock = clock

    def upkeep(self) -> None:
        """Called every second."""
        for name in self._pool.pins.expire(self._clock.monotonic_s()):
            log.warning("pin expired: no router renewed it", pin=name)

    def add_status(self, message: node_pb2.PrefixStatus) -> None:
        cache, pins = self._pool.blocks.prefix_cache, self._pool.pins
        message.prompt_tokens, message.hit_tokens = cache.prompt_tokens, cache.hit_tokens
        message.pinned_blocks, message.pinned_blocks_max = cache.pinned_blocks, pins.blocks_max
        for pin in pins.states(self._clock.monotonic_s()):
            message.pins.add(
                name=pin.name,
                blocks=pin.blocks,
                blocks_pinned=pin.blocks_pinned,
                lease_left_ms=int(pin.lease_left_s * 1e3),
            )

    async def HoldPin(self, request: pins_pb2.HoldPinRequest, context: Any) -> pins_pb2.HoldPinReply:
        check_header(request.header, own=self._own)
        self._check(request)
        state = self._pool.pins.hold(
            request.name,
            request.tokens,
            request.cache_salt,
            version=request.version,
            lease_s=request.lease_ms / 1e3,
            now_s=self._clock.monotonic_s(),
        )
        if isinstance(state, int):
            return pins_pb2.HoldPinReply(superseded_by=state)
        return pins_pb2.HoldPinReply(blocks=state.blocks, blocks_pinned=state.blocks_pinned)

    async def DropPin(self, request: pins_pb2.DropPinRequest, context: Any) -> pins_pb2.DropPinReply:
        check_header(request.header, own=self._own)
        return pins_pb2.DropPinReply(known=self._pool.pins.drop(request.name, version=request.version))

    def _check(self, request: pins_pb2.HoldPinRequest) -> None:
        """The router has checked the operator's input; what reaches the hash chain here is checked again."""
        if not 0 < len(request.name) <= NAME_CHARS_MAX:
            raise bad_field("name", f"A pin's name has 1 to {NAME_CHARS_MAX} characters, not {len(request.name)}.")
        if len(request.cache_salt) > SALT_BYTES_MAX:
            raise bad_field("cache_salt", f"A salt has at most {SALT_BYTES_MAX} bytes, not {len(request.cache_salt)}.")
        check_tokens("tokens", request.tokens, self._pool.model)


class CacheService(cache_pb2_grpc.CacheServicer):
    """baton.v1.Cache, for operators."""

    def __init__(self, pool: DevicePool, own: Incarnation) -> None:
        self._pool = pool
        self._own = own

    async def EmptyTier(self, request: cache_pb2.EmptyTierRequest, context: Any) -> cache_pb2.EmptyTierReply:
        if request.incarnation:
            check_receiver(request.incarnation, own=self._own)
        store, tier = self._pool.store, TIERS_BELOW.get(request.tier)
        if tier is None or store is None:
            text = f"This node has no tier '{request.tier}' below its region; `baton cache` shows what there is."
            raise bad_field("tier", text)
        count = await store.empty(tier)
        log.info("a tier has been emptied", tier=request.tier, blocks=count)
        return cache_pb2.EmptyTierReply(blocks=count)


class TransferService(transfer_pb2_grpc.TransferServicer):
    """baton.v1.Transfer: for writers to this node, for the receivers that it writes to, and for nodes that fetch. Takes
    no handoffs of requests: a node that does adds that."""

    def __init__(self, transfers: Transfers, runtime: NodeRuntime) -> None:
        self._transfers = transfers
        self._receiver = transfers.receiver
        self._lifecycle = runtime.lifecycle
        self._own = runtime.incarnation
        self._host_parts = host_parts()

    # Served as receiver.

    async def Connect(self, request: transfer_pb2.ConnectRequest, context: Any) -> transfer_pb2.ConnectReply:
        pair, pool = self._pair(request.header), self._transfers.pool
        check_compatible(own=pool.model, peer=model_from_proto(request.model), peer_name=request.writer_name)
        own = self._receiver.ports.transports
        apart = host_difference(request.host_parts, self._host_parts)
        transport = choose(request.transports, own, same_host=not apart)
        if transport is None:
            raise BatonError(
                Reason.INCOMPATIBLE_NODE,
                f"{request.writer_name} offers the transports {', '.join(request.transports) or 'none'}, this node "
                f"{', '.join(t.value for t in own)}; none of them works between the two (shm and cuda_ipc need the "
                "same machine, user and namespaces). Add tcp to the transports of both, where their regions allow it.",
            )
        endpoint = self._receiver.connect(
            pair, request.writer_endpoint, transport, name=request.writer_name, host=request.host_name
        )
        return transfer_pb2.ConnectReply(
            receiver=self._own,
            transport=endpoint.transport.value,
            address=endpoint.address,
            secret=endpoint.secret,
            epoch=endpoint.epoch,
            num_blocks=pool.ledger.num_blocks,
            rejected_transports=rejected_transports(
                transport,
                request.transports,
                own,
                withdrawn=self._receiver.ports.withdrawn,
                apart=apart,
            ),
        )

    async def Liveness(
        self, request: transfer_pb2.LivenessRequest, context: Any
    ) -> AsyncIterator[transfer_pb2.LivenessReply]:
        streams = self._transfers.liveness_streams
        async with aclosing(streams.serve(self._pair(request.header))) as replies:
            async for reply in replies:
                yield reply

    async def Reserve(self, request: transfer_pb2.ReserveRequest, context: Any) -> transfer_pb2.ReserveReply:
        """Of a fetch. Draining does not matter: this node has asked for it."""
        if not request.HasField("fetch_blocks"):
            raise BatonError(Reason.INCOMPATIBLE_NODE, "This node takes no requests from other nodes.")
        if not request.key.request:
            raise bad_field("key.request", "A Reserve needs the key of its fetch.")
        return self._transfers.fetches.reserve(request, self._pair(request.header))

    async def Renew(self, request: transfer_pb2.RenewRequest, context: Any) -> transfer_pb2.RenewReply:
        renewed = self._receiver.renew(self._pair(request.header), GrantId(request.grant))
        return transfer_pb2.RenewReply(renewed=renewed, lease_ms=self._receiver.config.lease_ms)

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Any) -> transfer_pb2.CommitReply:
        """Of a fetch."""
        return commit_reply(await self._transfers.fetches.commit(request, self._pair(request.header)))

    async def Release(self, request: transfer_pb2.ReleaseRequest, context: Any) -> transfer_pb2.ReleaseReply:
        pair = self._pair(request.header)
        number, lowest_live = ReserveNumber(request.number), ReserveNumber(request.lowest_live)
        await self._receiver.release(pair, number, lowest_live, in_doubt=request.writes_in_doubt)
        return transfer_pb2.ReleaseReply()

    # Served as writer.

    async def Revoke(self, request: transfer_pb2.RevokeRequest, context: Any) -> transfer_pb2.RevokeReply:
        receiver = check_header(request.header, own=self._own)
        peer = self._transfers.peers.find(receiver)
        if peer is None:
            # Given up and its links closed, or never met: nothing is written there any more, and what may still be
            # under way nobody here knows. The receiver's fence does.
            return transfer_pb2.RevokeReply(writes_in_doubt=True)
        return transfer_pb2.RevokeReply(writes_in_doubt=await peer.revoked(ReserveNumber(request.number)))

    async def Fetch(self, request: transfer_pb2.FetchRequest, context: Any) -> transfer_pb2.FetchReply:
        return await self._transfers.owner.serve(request)

    def _pair(self, header: common_pb2.Header) -> Pair:
        return Pair(receiver=self._own, writer=check_header(header, own=self._own))


def commit_reply(committed: bool) -> transfer_pb2.CommitReply:
    return transfer_pb2.CommitReply(committed=committed, reason="" if committed else "the grant is revoked")
