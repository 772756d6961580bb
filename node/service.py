"""Services that serving nodes have in common: the one that takes pins, and the writer's part of baton.v1.Transfer."""

from __future__ import annotations

from typing import Any, Final

from batonpb import cache_pb2, cache_pb2_grpc, node_pb2, pins_pb2, pins_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from baton.clock import Clock
from baton.errors import bad_field
from baton.ids import Incarnation, ReserveNumber
from baton.log import get_log
from baton.wire import check_header, check_receiver
from cachestore.holdings import Tier
from node.peers import Peers
from node.pool import DevicePool, check_tokens

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
        count = store.empty(tier)
        log.info("a tier has been emptied", tier=request.tier, blocks=count)
        return cache_pb2.EmptyTierReply(blocks=count)


class WriterService(transfer_pb2_grpc.TransferServicer):
    """The writer's half of baton.v1.Transfer."""

    def __init__(self, own: Incarnation, peers: Peers) -> None:
        self._own = own
        self._peers = peers

    async def Revoke(self, request: transfer_pb2.RevokeRequest, context: Any) -> transfer_pb2.RevokeReply:
        receiver = check_header(request.header, own=self._own)
        peer = self._peers.find(receiver)
        if peer is None:
            # Given up and its links closed, or never met: nothing is written there any more, and what may still be
            # under way nobody here knows. The receiver's fence does.
            return transfer_pb2.RevokeReply(writes_in_doubt=True)
        return transfer_pb2.RevokeReply(writes_in_doubt=await peer.revoked(ReserveNumber(request.number)))
