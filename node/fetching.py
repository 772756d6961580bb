"""Fetches of a prompt's leading blocks from another node: both sides of `Transfer.Fetch`.

The caller is the receiver of the blocks, the node called is their owner and writes them. From the owner's Reserve on it
is a handoff as any other, with the same state machines; only its end differs: the blocks go into the receiver's prefix
cache, and nobody holds them (docs/handoff.md).

Neither side waits while it holds what the other may want: a Reserve is answered at once, out of blocks that nobody
waits for, and an owner without a place for one more fetch refuses it.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc.aio
import numpy as np
from batonpb import node_pb2, transfer_pb2, transfer_pb2_grpc

from baton.errors import BatonError, Reason, bad_field
from baton.ids import Attempt, BlockId, GrantId, Incarnation, Pair, RequestId, RequestKey, ReserveNumber
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.runtime import NodeRuntime
from baton.tasks import Tasks
from baton.wire import FetchLoad, Owner, check_header, key_from_proto, key_to_proto
from cachestore.prefix_cache import DIGEST_BYTES, TOKEN_BYTES, Draft, IndexCursor, pack_tokens, unpack_tokens
from kvtransfer.checksums import checksums_from_proto
from kvtransfer.protocol.receiver import AnswerRefused, CommitAsked, Refusal, ReserveAsked
from kvtransfer.protocol.writer import HandoffEnd
from kvtransfer.receiver import Receiver
from kvtransfer.transport import RegionKind
from kvtransfer.writer import WriterPeer
from node.fetch_costs import FetchCosts
from node.landing import Marks
from node.peers import Peers
from node.pool import DevicePool
from node.sources import Offer, Prefix, SourceKind, Wait

log = get_log("fetch")

FETCHES_MAX: Final = 4
"""That a node has under way as receiver. Beyond it prompts are computed."""
FETCHES_OWNED_MAX: Final = 8
"""That a node serves at the same time as owner. Beyond it callers compute."""
CONNECTS_MAX: Final = 8
"""Owners that are asked to connect at a time. Beyond it others are not asked for anything."""
FETCH_MS_MAX: Final = 10_000
"""A fetch that takes longer is given up, whatever it might save."""
CONNECT_MS_MAX: Final = 2_000
FAILED_PAUSE_MS: Final = 5_000
"""An owner that has failed is not asked meanwhile."""
SILENT_MAX: Final = 3
"""An owner that was silent for too long so many times in a row has failed. It promotes what it has in lower tiers
before it asks for room, and a busy machine stands still now and then: a single time says nothing of other prompts."""
UNFIT_PAUSE_MS: Final = 60_000
"""An owner whose KV is another's is not asked meanwhile."""
ABSENT_PAUSE_MS: Final = 2_000
"""An owner is not asked again for a block that it had not. The router learns of it sooner or later."""
BUSY_PAUSE_MS: Final = 500
"""An owner that refused a block for want of room, or was silent for too long, is not asked for it again meanwhile: the
next owner is."""
PAUSES_MAX: Final = 1_024
"""Remembered, oldest dropped first."""
DRAFT_AFTER_MS: Final = 1
"""Behind a grant: it is to be on its way by then."""
DRAFTED_MAX: Final = 256
"""Blocks whose entries are made at a time: about a millisecond of the control thread."""
ANY_BLOCK: Final = b""
"""In place of a block's digest, where an owner is not asked for any."""


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch:
    """One, as its receiver has it."""

    key: RequestKey
    owner: Owner
    prompt: Prefix
    end: int
    """Leading blocks wanted, in positions."""
    wait: Wait
    began_s: float = 0.0
    """Of the call."""
    prefix: tuple[BlockId, ...] = ()
    blocks: tuple[BlockId, ...] = ()
    table: tuple[BlockId, ...] = ()
    """Both."""
    draft: Draft | None = None
    """Entries of `blocks`, made while they are being filled."""
    marks: Marks | None = None
    """In `blocks`, where what comes can be seen."""
    filled: int = 0
    """Leading ones of `blocks` that the Commit names."""
    came: int = 0
    """Positions that the prefix cache has by it."""
    arrived: asyncio.Future[None]
    """Done once they have come, or will not: earlier than the owner can say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """An owner that has been asked to connect."""

    began_s: float
    over: asyncio.Future[bool]
    """Whether it is connected."""


class Fetches:
    """This node's fetches as receiver. Is a `node.sources.PrefixSource`. Control thread only."""

    def __init__(
        self,
        *,
        runtime: NodeRuntime,
        pool: DevicePool,
        receiver: Receiver,
        channels: Channels,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when blocks have been released that requests may wait for."""
        self.spare: Callable[[], int] = lambda: pool.ledger.available
        """Blocks of the region that nothing here waits for. The node that computes prompts sets it."""
        self._runtime = runtime
        self._own = runtime.incarnation
        self._pool = pool
        self._blocks = pool.blocks
        self._cache = pool.blocks.prefix_cache
        self._groups = pool.layout.num_groups
        self._receiver = receiver
        self._channels = channels
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[RequestKey, Fetch] = {}
        self._granted: dict[GrantId, Fetch] = {}
        self.costs = FetchCosts()
        self._pauses: OrderedDict[tuple[Incarnation, bytes], float] = OrderedDict()
        """Until when an owner is not asked for the block of a digest, or for ANY_BLOCK."""
        self._connecting: dict[Incarnation, Connecting] = {}
        self._tasks = Tasks(self._loop, log, broken="asking an owner failed")
        self._repeats = RepeatLog(log, self._loop.time)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def load(self) -> FetchLoad:
        """What fetching costs, for whoever places prompts; nothing before the first measurement."""
        return self.costs.load(self._loop.time(), self._pool.layout.position_bytes / self._pool.layout.block_size)

    # As a source of prefixes.

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        """From the owner with most of it; of equal ones the one that is expected to bring it sooner. One that is not
        connected is asked to connect, whatever becomes of the offer: for this prompt, or those to come."""
        if len(self._under_way) >= FETCHES_MAX or have_blocks >= len(prompt.chain):
            return None
        spare = self.spare() // self._groups
        offers = [
            self._offer_of(owner, prompt, have_blocks, spare)
            for owner in prompt.owners
            if owner.blocks > have_blocks and self._may_ask(owner, prompt.chain[have_blocks])
        ]
        best = max(offers, key=lambda offer: (offer.blocks, -offer.expected_s), default=None)
        if best is not None and best.blocks and not self.is_connected(_owner(best)):
            self.connect(_owner(best))
        return best

    def _offer_of(self, owner: Owner, prompt: Prefix, have_blocks: int, spare: int) -> Offer:
        now_s = self._loop.time()
        cost = self.costs.cost(owner, now_s)
        block_bytes = self._pool.layout.position_bytes
        return Offer(
            source=self,
            kind=SourceKind.PEER,
            prompt=prompt,
            have_blocks=have_blocks,
            blocks=max(0, min(owner.blocks, len(prompt.chain), have_blocks + spare) - have_blocks),
            fixed_s=cost.fixed_s + self._connects_in_s(owner, now_s),
            block_s=cost.unit_s * block_bytes,
            block_bytes=block_bytes,
            sign_s=self.costs.sign_s(owner, now_s) + self._connects_in_s(owner, now_s),
            origin=owner.name,
            detail=owner,
        )

    def _may_ask(self, owner: Owner, digest: bytes) -> bool:
        if owner.incarnation == self._own:
            return False
        now_s = self._loop.time()
        if any(self._pauses.get((owner.incarnation, what), now_s) > now_s for what in (ANY_BLOCK, digest)):
            return False
        if self.is_connected(owner):
            return True
        if owner.incarnation in self._connecting:
            return self._connects_in_s(owner, now_s) > 0  # one that takes longer than expected is not waited for
        return len(self._connecting) < CONNECTS_MAX

    def _connects_in_s(self, owner: Owner, now_s: float) -> float:
        if self.is_connected(owner):
            return 0.0
        connecting = self._connecting.get(owner.incarnation)
        waited_s = 0.0 if connecting is None else now_s - connecting.began_s
        return max(0.0, self.costs.connect_s - waited_s)

    def is_connected(self, owner: Owner) -> bool:
        return self._receiver.is_connected(Pair(receiver=self._own, writer=owner.incarnation))

    def connect(self, owner: Owner) -> asyncio.Future[bool]:
        """Have an owner make its link to here -> whether it has. It goes on though nobody waits for it; those who do
        shield it."""
        connecting = self._connecting.get(owner.incarnation)
        if connecting is None:
            connecting = Connecting(began_s=self._loop.time(), over=self._loop.create_future())
            self._connecting[owner.incarnation] = connecting
            self._tasks.spawn(self._connect(owner, connecting))
        return connecting.over

    async def _connect(self, owner: Owner, connecting: Connecting) -> None:
        """A Fetch of nothing does that."""
        try:
            reply = await self._ask(owner, transfer_pb2.FetchRequest(), ms_max=CONNECT_MS_MAX)
            if self.is_connected(owner):
                self.costs.connected(self._loop.time() - connecting.began_s)
            else:
                self._refused(owner, reply, ANY_BLOCK)
        except BatonError as error:
            self._failed(owner, error.message)
        finally:
            del self._connecting[owner.incarnation]
            if not connecting.over.done():
                connecting.over.set_result(self.is_connected(owner))

    async def bring(self, offer: Offer, wait: Wait) -> int:
        owner = _owner(offer)
        size = self._pool.layout.block_size
        fetch = Fetch(
            key=RequestKey(request=RequestId(f"fetch-{secrets.token_hex(16)}"), attempt=Attempt(0)),
            owner=owner,
            prompt=offer.prompt,
            end=offer.have_blocks + offer.blocks,
            wait=wait,
            arrived=self._loop.create_future(),
        )
        self._under_way[fetch.key] = fetch
        call: asyncio.Task[None] | None = None
        try:
            if not self.is_connected(owner) and not await asyncio.shield(self.connect(owner)):
                return 0
            request = transfer_pb2.FetchRequest(
                key=key_to_proto(fetch.key),
                tokens=pack_tokens(offer.prompt.tokens[: fetch.end * size]),
                digests=b"".join(offer.prompt.chain[: fetch.end]),
                cache_salt=offer.prompt.salt,
                first_block=offer.have_blocks,
            )
            fetch.began_s = self._loop.time()
            call = self._tasks.spawn(self._call(fetch, request, offer))
            await asyncio.wait({call, fetch.arrived}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if call is not None:
                call.cancel()
                if wait.timer.expired() and not fetch.came:  # else it is the request that has been given up
                    self._late(fetch, offer)
            raise
        finally:
            del self._under_way[fetch.key]
            if not fetch.came:
                self._receiver.cancel(fetch.key)
        if fetch.came:
            self._count(fetch, self._loop.time() - fetch.began_s)
        elif fetch.arrived.done():  # so that the next owner is asked
            self._pause(owner, offer.prompt.chain[offer.have_blocks], BUSY_PAUSE_MS)
        return fetch.came

    async def _call(self, fetch: Fetch, request: transfer_pb2.FetchRequest, offer: Offer) -> None:
        try:
            reply = await self._ask(fetch.owner, request, ms_max=FETCH_MS_MAX)
            if not fetch.came:
                self._refused(fetch.owner, reply, offer.prompt.chain[offer.have_blocks])
        except BatonError as error:
            if not fetch.came:
                self._failed(fetch.owner, error.message)

    async def _ask(self, owner: Owner, request: transfer_pb2.FetchRequest, *, ms_max: int) -> transfer_pb2.FetchReply:
        """Raises BatonError."""
        request.header.sender, request.header.receiver = self._own, owner.incarnation
        request.kv_root = self._pool.model.kv_root
        request.receiver_name, request.receiver_endpoint = self._runtime.name, self._runtime.endpoint
        try:
            with rpc_errors(owner.endpoint):
                stub = transfer_pb2_grpc.TransferStub(self._channels.get(owner.endpoint))
                reply: transfer_pb2.FetchReply = await stub.Fetch(request, timeout=ms_max / 1000)
                return reply
        except grpc.aio.UsageError as error:  # the channel was closed under us
            raise BatonError(Reason.PEER_UNREACHABLE, f"{owner.name} is being forgotten.") from error

    def _refused(self, owner: Owner, reply: transfer_pb2.FetchReply, digest: bytes) -> None:
        """`digest`: of the first block that was asked for, or ANY_BLOCK."""
        outcome = reply.outcome
        if outcome == transfer_pb2.FETCH_OUTCOME_FAILED:
            self._failed(owner, reply.reason)
            return
        self.costs.refused(owner)
        self._repeats.info("fetch refused", peer=owner.name, why=reply.reason)
        if outcome == transfer_pb2.FETCH_OUTCOME_ABSENT:
            self._pause(owner, digest, ABSENT_PAUSE_MS)
        elif outcome == transfer_pb2.FETCH_OUTCOME_UNFIT:
            self._pause(owner, ANY_BLOCK, UNFIT_PAUSE_MS)
        else:
            self._pause(owner, digest, BUSY_PAUSE_MS)

    def _late(self, fetch: Fetch, offer: Offer) -> None:
        """The time is over, and not all has come. That says something of an owner that was to bring it sooner, or to
        ask for room by then, and of one that was silent after it had."""
        now_s = self._loop.time()
        waited_s = now_s - fetch.began_s
        late = waited_s > self.costs.cost(fetch.owner, now_s).of(offer.nbytes)
        if late:
            self.costs.measured(fetch.owner, offer.nbytes, waited_s, now_s)
        if fetch.blocks or late or waited_s > self.costs.sign_s(fetch.owner, now_s):
            if not fetch.blocks:
                self.costs.silent(fetch.owner, waited_s, now_s)
            self._pause(fetch.owner, offer.prompt.chain[offer.have_blocks], BUSY_PAUSE_MS)
            figures = self.costs.of(fetch.owner)
            figures.silent += 1
            late = figures.silent >= SILENT_MAX
        if late:
            self._failed(fetch.owner, f"not here after {waited_s:.3f} s")
        elif fetch.blocks:
            self.costs.failed(fetch.owner)

    def _failed(self, owner: Owner, why: str) -> None:
        self.costs.failed(owner)
        self._repeats.warning("fetch failed", peer=owner.name, why=why)
        self._pause(owner, ANY_BLOCK, FAILED_PAUSE_MS)

    def _pause(self, owner: Owner, what: bytes, pause_ms: int) -> None:
        self._pauses[owner.incarnation, what] = self._loop.time() + pause_ms / 1000
        self._pauses.move_to_end((owner.incarnation, what))
        while len(self._pauses) > PAUSES_MAX:
            self._pauses.popitem(last=False)

    def _count(self, fetch: Fetch, seconds: float) -> None:
        layout = self._pool.layout
        nbytes = fetch.filled // self._groups * layout.position_bytes
        self.costs.measured(fetch.owner, nbytes, seconds, self._loop.time())
        self.costs.of(fetch.owner).silent = 0
        self.costs.brought(fetch.owner, tokens=fetch.came * layout.block_size, nbytes=nbytes, seconds=seconds)

    # What the owner asks, as the writer.

    def reserve(self, request: transfer_pb2.ReserveRequest, pair: Pair) -> transfer_pb2.ReserveReply:
        """Grant spare blocks to a fetch that this node has asked this owner for, at once or not at all. A repeat gets
        the first one's answer."""
        key, number = key_from_proto(request.key), ReserveNumber(request.number)
        fetch = self._under_way.get(key)
        wanted = fetch is not None and fetch.owner.incarnation == pair.writer
        grant, prefix, new = GrantId(secrets.token_bytes(16)), [], 0
        if fetch is not None and wanted:
            end = min(request.fetch_blocks, fetch.end)
            # So that no more tokens are packed and compared.
            here = bisect_left(fetch.prompt.chain, True, hi=end, key=lambda digest: not self._cache.indexed(digest))
            prefix = self._cache.match(fetch.prompt.tokens, fetch.prompt.salt, here * self._groups)
            spare = self.spare() - self._pool.ledger.idle_cached(prefix)
            new = min(end * self._groups - len(prefix), max(0, spare) // self._groups * self._groups)
        self._pool.ledger.hold(prefix)  # so that making room does not evict what was just matched
        try:
            room = new > 0 and self._cache.evict_until(new)
            answer = self._receiver.reserve(
                ReserveAsked(
                    pair=pair,
                    number=number,
                    lowest_live=ReserveNumber(request.lowest_live),
                    key=key,
                    grant=grant,
                    blocks_new=new,
                    prefix=tuple(prefix),
                    room=room,
                )
            )
        finally:
            self._blocks.release(prefix, used=False)
        if isinstance(answer, AnswerRefused):
            if answer.refusal in (Refusal.BUSY, Refusal.FENCING, Refusal.SPAN):
                why = "it has the blocks, or no spare ones" if wanted else "it does not wait for this fetch"
                return transfer_pb2.ReserveReply(busy=transfer_pb2.Busy(reason=why))
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=answer.refusal.value))
        if answer.grant == grant and fetch is not None:
            fetch.prefix, fetch.blocks = answer.prefix, answer.blocks
            fetch.table = (*answer.prefix, *answer.blocks)
            self._granted[grant] = fetch
            self._signed(fetch)
            self._loop.call_later(DRAFT_AFTER_MS / 1000, self._draft, grant)
        return transfer_pb2.ReserveReply(
            granted=transfer_pb2.Grant(
                grant=answer.grant,
                epoch=answer.epoch,
                blocks=answer.blocks,
                prefix_skip=len(answer.prefix),
                lease_ms=self._receiver.config.lease_ms,
            )
        )

    def _signed(self, fetch: Fetch) -> None:
        """The owner is at work: it is waited for longer. It may not write yet, so what will come can be marked, but on
        a device's memory."""
        now_s, pool = self._loop.time(), self._pool
        self.costs.signed(fetch.owner, now_s - fetch.began_s, now_s)
        if pool.region.kind is RegionKind.HOST:
            fetch.marks = Marks(pool.host_region, pool.layout, fetch.blocks, num_blocks=pool.ledger.num_blocks)
        come = partial(self._come_from, fetch.owner) if fetch.marks is not None else None
        fetch.wait.at_work(len(fetch.blocks) // self._groups, come)

    def _come_from(self, owner: Owner) -> int:
        """Of all its fetches: it writes one after the other, and is not silent while it writes any."""
        granted = (fetch for fetch in self._granted.values() if fetch.owner.incarnation == owner.incarnation)
        return self.costs.of(owner).come + sum(fetch.marks.gone() for fetch in granted if fetch.marks is not None)

    def _take(self, grant: GrantId) -> Fetch:
        """The fetch of a grant that is over."""
        fetch = self._granted.pop(grant)
        if fetch.marks is not None:
            self.costs.of(fetch.owner).come += fetch.marks.gone()
            fetch.marks = None  # it looks into the region
        return fetch

    def _draft(self, grant: GrantId) -> None:
        """Make the next entries of what is being written."""
        fetch = self._granted.get(grant)
        if fetch is None or fetch.key not in self._under_way:
            return
        have, chain = len(fetch.prefix) // self._groups, fetch.prompt.chain
        if fetch.draft is None:
            fetch.draft = self._cache.begin_draft(chain[have - 1] if have else None)
            if fetch.draft is None:  # its prefix is not in the cache any more
                return
        first = have + len(fetch.draft.entries)
        end = min(first + DRAFTED_MAX, len(fetch.table) // self._groups)
        self._cache.draft(fetch.draft, fetch.prompt.tokens, fetch.table, range(first, end), fetch.prompt.salt, chain)
        if end * self._groups < len(fetch.table):
            self._loop.call_soon(self._draft, grant)

    async def commit(self, request: transfer_pb2.CommitRequest, pair: Pair) -> bool:
        """As `Receiver.commit`. Also of a grant that is over: a repeat is answered from its state."""
        grant = GrantId(request.grant)
        fetch = self._granted.get(grant)
        if fetch is not None and self._receiver.grants.blocks_uncommitted(grant, pair) is not None:
            fetch.filled = min(request.blocks_filled, len(fetch.blocks)) // self._groups * self._groups
        sampled = bool(request.checksums or request.checksum_layers or request.checksum_blocks)
        return await self._receiver.commit(
            CommitAsked(
                pair=pair,
                grant=grant,
                writes=request.writes,
                bytes_written=request.bytes_written,
                sampled=sampled,
            ),
            checksums_from_proto(request) if sampled else None,
        )

    # What the receiver instructs, of grants of fetches.

    def has(self, grant: GrantId) -> bool:
        return grant in self._granted

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        """The blocks are here: enter them, and let go. What the cache has by now under other blocks is released."""
        fetch = self._take(grant)
        taken = self._receiver.grants.take_over(grant)
        assert taken, grant.hex()
        positions = (len(fetch.prefix) + fetch.filled) // self._groups
        have, draft, prompt = len(fetch.prefix) // self._groups, fetch.draft, fetch.prompt
        if draft is not None and len(draft.entries) == positions - have and self._cache.enter(draft):
            fetch.came = positions - have
        else:
            cursor = IndexCursor()  # it stops at a block whose content may be broken
            computed = positions * self._pool.layout.block_size
            self._cache.index(prompt.tokens, fetch.table, computed, prompt.salt, cursor, chain=prompt.chain)
            fetch.came = max(0, cursor.positions - have)
        self._blocks.release(fetch.table, used=False)
        if fetch.came and not fetch.arrived.done():
            fetch.arrived.set_result(None)
        self._receiver.ended(key)
        self._changed()

    def let_go(self, grant: GrantId) -> None:
        """It does not come: given up, refused renewal, or its owner fenced."""
        fetch = self._take(grant)
        self._cache.released(fetch.table, used=False)
        if not fetch.arrived.done():
            fetch.arrived.set_result(None)
        self._changed()

    # Upkeep.

    def upkeep(self) -> None:
        """Called every second."""
        self._repeats.upkeep()

    def add_status(self, message: node_pb2.NodeStatus) -> None:
        for incarnation, figures in self.costs.owners.items():
            if figures.times.count or figures.refused or figures.failed:
                message.fetches.add(
                    owner=figures.name,
                    owner_incarnation=incarnation,
                    fetches=figures.times.count,
                    tokens=figures.tokens,
                    nbytes=figures.nbytes,
                    refused=figures.refused,
                    failed=figures.failed,
                    seconds=figures.times.total_s,
                )

    async def close(self) -> None:
        await self._tasks.cancel()
        self._repeats.close()


def _owner(offer: Offer) -> Owner:
    assert isinstance(offer.detail, Owner), offer
    return offer.detail


class FetchOwner:
    """This node's side of fetches that others ask it for. Control thread only."""

    def __init__(self, *, runtime: NodeRuntime, pool: DevicePool, peers: Peers, changed: Callable[[], None]) -> None:
        """`changed` is called when blocks have been released that requests may wait for."""
        self._runtime = runtime
        self._pool = pool
        self._ledger = pool.ledger
        self._blocks = pool.blocks
        self._groups = pool.layout.num_groups
        self._peers = peers
        self._changed = changed
        self.spare: Callable[[], int] = lambda: self._ledger.available
        """Blocks of the region that nothing here waits for. The node that computes prompts sets it."""
        self.serving = 0
        """Fetches under way."""

    async def serve(self, request: transfer_pb2.FetchRequest) -> transfer_pb2.FetchReply:
        """Until the blocks are committed, or are not to be. Cancelling it gives the fetch up."""
        receiver = check_header(request.header, own=self._runtime.incarnation)
        if not self._runtime.lifecycle.takes_requests:
            return _refusal(transfer_pb2.FETCH_OUTCOME_BUSY, "it takes nothing new")
        if request.kv_root != self._pool.model.kv_root:
            return _refusal(transfer_pb2.FETCH_OUTCOME_UNFIT, "another model, rounding or layout made its KV")
        if self.serving >= FETCHES_OWNED_MAX:
            return _refusal(transfer_pb2.FETCH_OUTCOME_BUSY, "it serves as many fetches as it may")
        nbytes, nbytes_max = len(request.tokens), self._pool.model.context_len_max * TOKEN_BYTES
        if nbytes % TOKEN_BYTES or nbytes > nbytes_max:  # ids that no token has match nothing
            raise bad_field("tokens", f"{nbytes} bytes; must be tokens of {TOKEN_BYTES}, in {nbytes_max} at most.")
        digests_nbytes = nbytes // (TOKEN_BYTES * self._pool.layout.block_size) * DIGEST_BYTES
        if len(request.digests) not in (0, digests_nbytes):
            raise bad_field("digests", f"{len(request.digests)} bytes; must be {digests_nbytes}, or none.")
        self.serving += 1
        try:
            return await self._serve(request, receiver)
        except BatonError as error:
            return _refusal(_OUTCOMES.get(error.reason, transfer_pb2.FETCH_OUTCOME_FAILED), error.message)
        finally:
            self.serving -= 1

    async def _serve(self, request: transfer_pb2.FetchRequest, receiver: Incarnation) -> transfer_pb2.FetchReply:
        """Raises BatonError: not granted."""
        peer = self._peer(request, receiver)
        await peer.connect()
        if not request.tokens:
            return _refusal(transfer_pb2.FETCH_OUTCOME_ABSENT, "nothing was asked for")
        if self._pool.store is not None:
            await self._pool.store.bring_all(unpack_tokens(request.tokens), request.cache_salt)
            peer = self._peer(request, receiver)  # the first may have been closed meanwhile, or filled up
        blocks = self._found(request)
        if len(blocks) // self._groups <= request.first_block:
            return _refusal(transfer_pb2.FETCH_OUTCOME_ABSENT, "it has no more of it than the caller")
        self._ledger.hold(blocks)
        held = list(blocks)

        def release() -> None:
            """Once, whoever comes first: the writer, or a Reserve that was not granted."""
            released, held[:] = held[:], []
            self._blocks.release(released)
            self._changed()

        reserve = transfer_pb2.ReserveRequest(key=request.key, fetch_blocks=len(blocks) // self._groups)
        try:
            handoff = await peer.reserve(key_from_proto(request.key), reserve, metadata=(), sources_released=release)
        except BaseException:
            release()
            raise
        try:
            handoff.pinned_blocks = len(blocks)
            if any(map(self._ledger.is_spoiled, blocks)):  # since they were found
                return _refusal(transfer_pb2.FETCH_OUTCOME_FAILED, "the blocks may be broken")
            skip, count = handoff.prefix_skip, len(handoff.dst_blocks)
            src_B, dst_B = (np.array(b, dtype=np.int64) for b in (blocks[skip : skip + count], handoff.dst_blocks))
            if handoff.may_post():
                handoff.plan_step(src_B, dst_B).all_layers_done()
                handoff.all_filled(count)
            # Shielded: cancelling this call must not cancel the writer's future.
            end = await asyncio.shield(handoff.ended)
        finally:
            handoff.cancel()
        if end is not HandoffEnd.COMMITTED:
            return _refusal(transfer_pb2.FETCH_OUTCOME_FAILED, f"it ended: {end.value}")
        filled = (skip + count) // self._groups
        return transfer_pb2.FetchReply(outcome=transfer_pb2.FETCH_OUTCOME_DONE, blocks=filled)

    def _peer(self, request: transfer_pb2.FetchRequest, receiver: Incarnation) -> WriterPeer:
        """Raises BatonError DECODE_FULL."""
        try:
            peer = self._peers.towards(request.receiver_name, request.receiver_endpoint, receiver)
        except BatonError as error:  # an earlier writer is still being closed
            raise BatonError(Reason.DECODE_FULL, error.message) from error
        if not peer.has_room():
            raise BatonError(Reason.DECODE_FULL, "Earlier writes are not acknowledged.")
        return peer

    def _found(self, request: transfer_pb2.FetchRequest) -> list[BlockId]:
        """The leading blocks that are here, fewer where holding them would take what requests are promised or wait
        for."""
        cache = self._blocks.prefix_cache
        if request.digests:
            found = cache.match_known(request.tokens, request.digests, request.cache_salt)
        else:  # a caller of a version that sends none
            tokens = unpack_tokens(request.tokens)
            found = cache.match(tokens, request.cache_salt, len(tokens) // cache.block_size * self._groups)
        room = max(0, min(self.spare(), self._ledger.available))
        if self._ledger.idle_cached(found) > room:
            found = found[: room // self._groups * self._groups]
        return found


_OUTCOMES: Final = {
    Reason.DECODE_FULL: transfer_pb2.FETCH_OUTCOME_BUSY,
    Reason.PROMPT_TOO_LONG: transfer_pb2.FETCH_OUTCOME_BUSY,
    Reason.PAIR_FENCING: transfer_pb2.FETCH_OUTCOME_BUSY,
    Reason.TOO_MANY_PEERS: transfer_pb2.FETCH_OUTCOME_BUSY,
    Reason.INCOMPATIBLE_NODE: transfer_pb2.FETCH_OUTCOME_UNFIT,
}
"""Of errors before a grant. Any other is a failure."""


def _refusal(outcome: transfer_pb2.FetchOutcome, reason: str) -> transfer_pb2.FetchReply:
    return transfer_pb2.FetchReply(outcome=outcome, reason=reason)
