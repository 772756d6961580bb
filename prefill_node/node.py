"""Life of a request in this node: `PrefillNode.prefill`, and its steps.

The engine loop calls `step_begins` and `step_ended`; in between, on the engine thread, the step's sink posts each
layer's finished records.
"""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from batonpb import prefill_pb2, prefill_pb2_grpc

from baton.drain import Holdings, node_draining
from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, RequestKey
from baton.retry_time import ROOM_SHARE, retry_after_ms, spread_of, wait_s
from baton.runtime import NodeRuntime
from baton.tracing import forward_metadata
from baton.wire import NodeLoad, check_header, key_from_proto, owner_from_proto
from cachestore.block_manager import prefix_blocks_max
from engine.core import TokenEvent
from engine.scheduler import SequenceMode
from engine.types import (
    GRAMMAR_MESSAGE,
    NOT_FINITE_MESSAGE,
    Batch,
    FinishReason,
    KvSink,
    logprobs_to_proto,
    params_from_proto,
)
from kvtransfer.protocol.writer import HandoffEnd
from kvtransfer.writer import Handoff, Metadata, StepWrites
from node.computing_cost import ComputingCost, attended
from node.pool import DevicePool
from node.sources import Gatherer, Prefix
from node.transfers import Transfers
from prefill_node.config import PrefillConfig
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.job import (
    NOBODY,
    Job,
    LocalRunner,
    check_fits,
    first_token,
    granted_event,
    handed_off,
    handoff_failed,
    no_room,
)
from prefill_node.local_policy import NOT_THERE, TAKES_NONE_NOW, LocalFallback, falls_back, is_kept
from prefill_node.request_queue import PrefillRate, RequestQueue

STEPS_AHEAD: Final = 2
"""The current step, and the step whose grants are requested meanwhile."""
GRANT_WAIT_MS_MAX: Final = 50
"""Requests do not wait longer than this for the grant of one before them."""
COMPUTING_FIXED_S: Final = 0.005
"""What a step is believed to take before the first one, whatever its tokens."""
COMPUTING_TOKEN_S: Final = 1e-4
"""What each of its tokens is believed to take besides."""


class PrefillNode:
    """State of one prefill node; control thread only. Implements node.engine_loop.StepHost."""

    def __init__(
        self, *, config: PrefillConfig, pool: DevicePool, transfers: Transfers, local: LocalRunner | None = None
    ) -> None:
        """`local` is the other half of a mixed node."""
        self.config = config
        self.pool = pool
        self.ledger = pool.ledger
        self._engine = pool.engine
        self._blocks = pool.blocks
        self._transfers = transfers
        self._peers = peers = transfers.peers
        self.decode_nodes = DecodeNodes(config=config, pool=pool, peers=peers)
        self._loop = asyncio.get_running_loop()
        self._local = local
        self._queue = RequestQueue(bypasses_max=config.engine.scheduler().bypasses_max)
        self._admitted: dict[RequestKey, Job] = {}
        self._rate = PrefillRate(
            tokens_per_step_max=config.engine.tokens_per_step_max, age_ms_max=config.rate_age_ms_max
        )
        self._requests_taken = 0
        self._gathering: dict[RequestKey, Job] = {}
        self._computing = ComputingCost(fixed_s=COMPUTING_FIXED_S, token_s=COMPUTING_TOKEN_S)
        self.gatherer = Gatherer(
            block_size=pool.blocks.block_size, have=self._have, computing=self._computing, clock=self._loop.time
        )
        if pool.store is not None:
            pool.store.spare = lambda: self.spare_blocks
            pool.store.room_changed = self.look_again
            self.gatherer.add(pool.store)
        transfers.fetches.spare = transfers.owner.spare = lambda: self.spare_blocks
        self.gatherer.add(transfers.fetches, needs_owners=True)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, *, deadline_s: float, metadata: Metadata
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """One request: gather what others have of it, queue, grant, compute while the layers are sent (`step_begins`),
        first token, commit.

        A mixed node may keep a request instead: its decode half then computes it from the start. Closing the iterator
        at any point gives the request up and frees everything.

        Raises BatonError: QUEUE_FULL, NO_DECODE_NODE, DECODE_FULL, INCOMPATIBLE_NODE, HANDOFF_FAILED, ...
        """
        job = self._take(request, deadline_s, metadata)
        try:
            await self._gather(job)
            self._enqueue(job)
            await job.turn  # until engine and region have room for the whole prompt
            yield await self._place(job) if job.needs_decode else prefill_pb2.PrefillEvent(granted=NOBODY)
            if not job.local:
                self._start(job)
            first = await self._first_token(job)
            if job.local:
                self._commit_here(job)
            token = first_token(job, first, block_size=self._blocks.block_size)
            hands_off = first.finish is None and job.needs_decode
            if not (hands_off and request.whole):
                yield prefill_pb2.PrefillEvent(first_token=token)
            if hands_off:
                if job.handoff is not None:
                    await self._commit(job.handoff)
                job.over = True
                done = handed_off(job, layout=self.pool.layout, now_s=self._loop.time())
                if request.whole:
                    done.first_token.CopyFrom(token)
                yield prefill_pb2.PrefillEvent(handed_off=done)
            job.over = True
        except BatonError:
            job.failed = True
            raise
        finally:
            self._give_back(job)

    # The steps of a request's life, in order.

    def _take(self, request: prefill_pb2.PrefillRequest, deadline_s: float, metadata: Metadata) -> Job:
        key = key_from_proto(request.key)
        self._check(request, key)
        job = Job(
            key=key,
            tokens=[*request.prompt, *request.output],
            params=params_from_proto(request.sampling),
            request=request,
            deadline_s=deadline_s,
            metadata=metadata,
            turn=self._loop.create_future(),
            drawn=self._loop.create_future(),
        )
        self._requests_taken += 1
        return job

    async def _gather(self, job: Job) -> None:
        """Compile its grammar, before anything is reserved for it. Bring leading blocks from tiers and other nodes, as
        far as they come sooner than they are computed. Raises BatonError BAD_FIELD: the grammar cannot be used."""
        has_sources = not job.is_scored and self.gatherer.has_sources(owners=bool(job.request.owners))
        if not has_sources and job.params.grammar is None:
            return
        self._gathering[job.key] = job
        try:
            if job.params.grammar is not None:
                job.grammar = await self.pool.grammars.matcher(job.params.grammar, job.request.output)
            if has_sources:
                job.gathered = await self.gatherer.gather(self._prefix(job))
        finally:
            del self._gathering[job.key]

    def _prefix(self, job: Job) -> Prefix:
        chain = self._chain(job)
        tokens = job.tokens[: len(chain) * self._blocks.block_size]
        owners = [owner_from_proto(owner) for owner in job.request.owners]
        return Prefix(tokens=tokens, salt=job.request.cache_salt, chain=chain, owners=owners)

    def _have(self, prompt: Prefix) -> int:
        """Leading positions of it that are in the prefix cache, which has the start of a chain."""
        return bisect_left(prompt.chain, True, key=lambda digest: not self._blocks.prefix_cache.indexed(digest))

    @property
    def spare_blocks(self) -> int:
        """Blocks for what is brought: those that no promise, and nothing in the queue, is for."""
        return self.ledger.available - sum(map(self._need, self._queue))

    def _need(self, job: Job) -> int:
        """Blocks that a request in the queue may wait for: where it may be kept, those of its answer too."""
        kept = self._local is not None and job.needs_decode
        return job.footprint(self.pool) if kept else self._blocks.blocks_for(len(job.tokens))

    def _enqueue(self, job: Job) -> None:
        self._queue.add(job)
        self._admit()

    def look_again(self) -> None:
        """Something that the queue may wait for has changed outside this half."""
        self._admit()

    def _admit(self) -> None:
        """Admit requests from the head of the queue while their blocks can be promised, until this step and the next
        are full: grants then come in time, and decode nodes reserve no memory for the rest."""
        if not self._queue:
            return
        ahead = sum(job.tokens_ahead for job in self._admitted.values())
        while self._queue and ahead < STEPS_AHEAD * self.config.engine.tokens_per_step_max:
            job = self._queue[0]
            need = self._blocks.blocks_for(len(job.tokens))
            too_long = need > self._blocks.blocks_usable  # a pin may have come after the request
            full = self._places_taken() >= self.config.engine.sequences_max or need > self.ledger.available
            if full and not too_long:
                return
            if not too_long and self._local is not None and self._is_kept(job, self._local):
                footprint = job.footprint(self.pool)
                may = self._local.has_place and not self._local.yields(job)
                job.kept = may and footprint <= self.ledger.available
                if job.kept:
                    need = footprint
                elif not self._others(job):
                    return  # without a decode node it waits for room here, and so do those behind it
            self._queue.popleft()
            if job.turn.done():
                continue  # being cancelled: its own task gives it back
            if too_long:
                job.turn.set_exception(no_room(job.tokens, self._blocks))
                continue
            self.ledger.promise(job.key, need)
            self._admitted[job.key] = job
            ahead += job.tokens_ahead
            job.turn.set_result(None)

    def _places_taken(self) -> int:
        """Places in the engine that are taken; a kept request counts for the decode half."""
        if self._local is None:
            return len(self._admitted)
        return sum(not job.local for job in self._admitted.values()) + self._local.requests

    def _is_kept(self, job: Job, local: LocalRunner) -> bool:
        """Whether it is to run here, and can."""
        if not job.needs_decode or local.never(job) is not None or self._only_others_reached(job):
            return False
        cached = [] if job.is_scored else self._blocks.match_prompt(job.tokens, job.request.cache_salt)
        return is_kept(
            local.policy,
            prompt_tokens=len(job.tokens),
            cached_tokens=self._blocks.tokens_in(len(cached)),
            decode_nodes=self._others(job),
        )

    async def _place(self, job: Job) -> prefill_pb2.PrefillEvent:
        """Find the node that writes the answer: this one, if it keeps the request, or a decode node that grants.

        Raises BatonError: the refusal for the router.
        """
        local, own = self._local, self._peers.runtime
        if local is not None and job.kept and self._keep(job, local):
            return granted_event(own.name, own.incarnation, own.endpoint)
        slow = self._loop.call_later(GRANT_WAIT_MS_MAX / 1000, self._go_past, job)
        try:
            asked = await self.decode_nodes.reserve(
                job, sources_released=lambda: self._sources_released(job), avoided_too=self._asks_avoided(job)
            )
        finally:
            slow.cancel()
        if isinstance(asked, Handoff):
            job.handoff, address = asked, asked.peer.address
            return granted_event(address.name, address.pair.receiver, address.endpoint)
        if local is not None and falls_back(local.policy, asked.reasons):
            # The router reaches a decode node that may have room later.
            waits = self._only_others_reached(job) and asked.reasons & TAKES_NONE_NOW
            if not waits and not local.yields(job) and self._keep(job, local):
                self.decode_nodes.wants_no_more(job, asked.full)
                return granted_event(own.name, own.incarnation, own.endpoint)
            never = local.never(job)
            if never is not None and asked.reasons <= NOT_THERE and not self.decode_nodes.may_be_held(job):
                raise bad_field("prompt", f"{never}.", reason=Reason.PROMPT_TOO_LONG)
        try:
            raise asked.error
        finally:
            del asked  # otherwise the error would refer to itself through this frame, and keep the job alive

    def _is_avoided(self, job: Job) -> bool:
        """Whether its router does not reach this node."""
        return self._peers.runtime.incarnation in job.request.avoid_decode

    def _only_others_reached(self, job: Job) -> bool:
        """Whether its router reaches a decode node that may hold it, but not this node."""
        return self._is_avoided(job) and self.decode_nodes.ready_for(job, avoided_too=False) > 0

    def _others(self, job: Job) -> int:
        """How many decode nodes may get it."""
        return self.decode_nodes.ready_for(job, avoided_too=self._asks_avoided(job))

    def _asks_avoided(self, job: Job) -> bool:
        """Whether it may go to a decode node that its router does not reach: only if it cannot run here instead."""
        local = self._local
        if local is None or local.policy.fallback is LocalFallback.NEVER:
            return True
        return self._is_avoided(job) or local.never(job) is not None

    def _go_past(self, job: Job) -> None:
        """Its decode node does not answer, and may be dead: requests behind it no longer wait."""
        job.grant_slow = True
        self._admit()

    def _keep(self, job: Job, local: LocalRunner) -> bool:
        """Start it in the decode half, with its own blocks and promise. False: no room, and nothing has changed."""
        promised = self.ledger.promise_left(job.key)
        assert promised is not None, job.key
        self.ledger.unpromise(job.key)
        job.seq = local.start(job)
        job.local = job.seq is not None
        if not job.local:
            self.ledger.promise(job.key, promised)
        return job.local

    def _commit_here(self, job: Job) -> None:
        assert self._local is not None
        self._local.commit(job.key)
        job.over = True

    async def _commit(self, handoff: Handoff) -> None:
        """Wait for the handoff's end. Raises BatonError HANDOFF_FAILED or PEER_UNREACHABLE."""
        # Shielded: cancelling this request must not cancel the writer's future.
        end = await asyncio.shield(handoff.ended)
        if end is not HandoffEnd.COMMITTED:
            raise handoff_failed(handoff, end)

    def _start(self, job: Job) -> None:
        """Hold the prompt's blocks, send the cached ones that decode lacks, and submit it to the engine."""
        self.ledger.unpromise(job.key)
        prefix = [] if job.is_scored else self._blocks.match_prompt(job.tokens, job.request.cache_salt)
        table = self._blocks.admit(prefix, self._blocks.blocks_for(len(job.tokens)) - len(prefix))
        cached_tokens = self._blocks.tokens_in(len(prefix))
        job.seq = job.sequence(table, cached_tokens=cached_tokens, promise_key=job.key, mode=SequenceMode.PREFILL_ONLY)
        try:
            if job.handoff is not None and job.handoff.may_post():
                self._post_cached(job, job.handoff, table, len(prefix))
            self._engine.submit(job.seq)
        except BaseException:
            self._blocks.release(table)
            raise
        if prefix:
            self._admit()  # fewer tokens are left to compute than were counted

    def _post_cached(self, job: Job, handoff: Handoff, table: list[BlockId], cached_blocks: int) -> None:
        """Hold the prompt's blocks until the transport has read them, and send the cached ones that decode lacks."""
        self.ledger.hold(table)
        job.pinned = list(table)
        handoff.pinned_blocks = len(table)
        job.next_block = handoff.prefix_skip
        writes = self._plan_writes(job, handoff, cached_blocks)
        if writes is not None:
            writes.all_layers_done()

    def _plan_writes(self, job: Job, handoff: Handoff, end_block: int) -> StepWrites | None:
        """Writes of the prompt's blocks from `next_block` to `end_block`, in all layers. None without such blocks."""
        assert job.seq is not None
        first, job.next_block = job.next_block, max(job.next_block, end_block)
        if first >= job.next_block:
            return None
        src = job.seq.block_table[first : job.next_block]
        dst = handoff.dst_blocks[first - handoff.prefix_skip : job.next_block - handoff.prefix_skip]
        return handoff.plan_step(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64))

    async def _first_token(self, job: Job) -> TokenEvent:
        """Wait for the engine. A handoff that ends before the last layer is posted ends the request at once."""
        waits: set[asyncio.Future[Any]] = {job.drawn}
        if job.handoff is not None:
            waits.add(job.handoff.ended)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not job.drawn.done():
            assert job.handoff is not None
            raise handoff_failed(job.handoff, job.handoff.ended.result())
        event = job.drawn.result()
        if event.finish is FinishReason.NOT_FINITE:
            raise BatonError(Reason.SCORES_NOT_FINITE, NOT_FINITE_MESSAGE)
        if event.finish is FinishReason.GRAMMAR and event.seq.grammar is not None:
            raise BatonError(Reason.GRAMMAR_TOO_COMPLEX, GRAMMAR_MESSAGE.format(event.seq.grammar.problem))
        if event.token is None and job.local:
            raise BatonError(
                Reason.HANDOFF_FAILED, "This node gave up the request; its log says why. Send the request again."
            )
        if event.token is None:
            raise BatonError(Reason.INTERNAL, "The engine gave up this request; the node's log says why.")
        return event

    def step_begins(self, batch: Batch) -> KvSink:
        """Plan the writes of the blocks that this step completes (StepHost)."""
        prompts = [piece for piece in batch.slices if piece.output_index == 0]
        sink = StepSink(
            tokens=sum(piece.stop - piece.start for piece in prompts),
            attended=sum(attended(piece.start, piece.stop) for piece in prompts),
            began_s=self._loop.time(),
        )
        for piece in batch.slices:
            job = self._admitted.get(piece.key)
            if job is not None and job.handoff is not None and job.handoff.may_post():
                # A block that is not full is sent at the prompt's end.
                end = self._blocks.blocks_for(piece.stop) if piece.sample else self._blocks.full_blocks(piece.stop)
                writes = self._plan_writes(job, job.handoff, end)
                if writes is not None:
                    sink.writes.append(writes)
        return sink

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        """Take in first tokens and ends (StepHost)."""
        if isinstance(sink, StepSink):
            for writes in sink.writes:
                writes.finish()
            began_s, now_s = max(sink.began_s, self._rate.ended_s), self._loop.time()
            self._rate.step_ended(sink.tokens, began_s=sink.began_s, now_s=now_s)
            if sink.tokens and is_timed:
                self._computing.measured(sink.tokens, sink.attended, now_s - began_s)
        for event in events:
            self._left_engine(event)
        self._admit()  # the queue may wait for the blocks of those that left

    def _left_engine(self, event: TokenEvent) -> None:
        self._blocks.release(event.seq.block_table)
        job = self._admitted.get(event.seq.key)
        if job is None or job.seq is not event.seq:
            return
        job.computed_s = self._loop.time()
        if event.token is not None and job.handoff is not None and event.finish is None:
            job.handoff.all_posted(event.token, logprobs_to_proto(event.logprobs))
        if not job.drawn.done():
            job.drawn.set_result(event)

    def _sources_released(self, job: Job) -> None:
        """The transport no longer reads this job's blocks."""
        pinned, job.pinned = job.pinned, []
        self._blocks.release(pinned)
        self._admit()

    def _give_back(self, job: Job) -> None:
        """The end of each request, in any case: nothing stays queued, promised, computed or granted for it."""
        if job in self._queue:
            self._queue.remove(job)
        self.ledger.unpromise(job.key)
        if job.handoff is not None:
            job.handoff.cancel()
            if not job.over and not job.failed:
                # It may be committed already, and the router, which has left, may not know the decode node yet.
                job.handoff.peer.cancel_request(job.key)
        if job.local and not job.over:
            assert self._local is not None
            self._local.cancel(job.key)
        if self._admitted.get(job.key) is job:
            del self._admitted[job.key]
            if not job.local:
                self._engine.abort(job.key)
        self._admit()

    # Upkeep.

    def upkeep(self) -> None:
        """Called every second."""
        self.decode_nodes.upkeep()

    @property
    def requests(self) -> int:
        return len(self._gathering) + len(self._queue) + len(self._admitted)

    def load(self) -> NodeLoad:
        return NodeLoad(
            waiting_requests=len(self._gathering) + len(self._queue),
            running_requests=sum(not job.local for job in self._admitted.values()),
            waiting_tokens=self._tokens_left((*self._admitted.values(), *self._queue, *self._gathering.values())),
            blocks=self.ledger.books(),
            prefill_tokens_per_s=self._rate.per_s(self._loop.time()),
            requests_taken=self._requests_taken,
            transports_given_up=self._peers.transports_given_up,
            moved=self._transfers.moved(),
            fetch=self._transfers.fetches.load,
        )

    def holds(self) -> Holdings:
        return dataclasses.replace(self._transfers.holds(), requests=self.requests)

    def _tokens_left(self, jobs: Iterable[Job]) -> int:
        """Tokens left to compute for these requests, in this order: without cached and computed ones, and with a shared
        prefix counted once."""
        cache, size = self._blocks.prefix_cache, self._blocks.block_size
        expected: set[bytes] = set()
        left = 0
        for job in jobs:
            computed = 0 if job.seq is None else job.seq.computed
            if computed >= len(job.tokens):
                continue  # only its handoff is left
            chain = self._chain(job)
            # The cache has the start of a chain, so bisection finds the first block that is missing.
            missing = bisect_left(chain, True, key=lambda digest: digest not in expected and not cache.indexed(digest))
            expected.update(chain[missing:])
            left += len(job.tokens) - (missing * size if job.seq is None else computed)
        return left

    def _chain(self, job: Job) -> tuple[bytes, ...]:
        """Digests of the blocks that may come from elsewhere than computing."""
        if job.chain is None:
            size = self._blocks.block_size
            reusable = prefix_blocks_max(len(job.tokens), size) * size
            job.chain = self._blocks.prefix_cache.chain(job.tokens[:reusable], job.request.cache_salt)
        return job.chain

    def _check(self, request: prefill_pb2.PrefillRequest, key: RequestKey) -> None:
        check_fits(request, self.pool)
        alike = sum(job.resumed == bool(request.output) for job in (*self._queue, *self._gathering.values()))
        if alike >= self.config.queue_max:
            room_s = wait_s(ROOM_SHARE * self._tokens_left(self._queue), self._rate.last_per_s)
            raise BatonError(
                Reason.QUEUE_FULL,
                f"{alike} requests are waiting here already, the limit.",
                retry_after_ms=retry_after_ms(room_s, ms_min=self.config.busy_retry_ms, spread=spread_of(key.request)),
            )
        taken = key in self._admitted or key in self._gathering or self._engine.has(key)
        if taken or any(job.key == key for job in self._queue):
            raise BatonError(Reason.REQUEST_EXISTS, f"Attempt {key.attempt} of request {key.request} is here already.")


@dataclass(slots=True, eq=False, kw_only=True)
class StepSink:
    """Posts the records that a step completes, after each layer."""

    tokens: int
    attended: float
    """See `ComputingCost`."""
    began_s: float
    writes: list[StepWrites] = field(default_factory=list)

    def layer_done(self, layer: int) -> None:
        for step_writes in self.writes:
            step_writes.layer_done(layer)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """baton.v1.Prefill, for routers."""

    def __init__(self, node: PrefillNode, runtime: NodeRuntime) -> None:
        self._node = node
        self._runtime = runtime

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        own = self._runtime.incarnation
        check_header(request.header, own=own)
        if not self._runtime.lifecycle.takes_requests:
            raise node_draining(own)
        # From here on the router waits for its turn, not for the node.
        await context.send_initial_metadata(())
        deadline_s = asyncio.get_running_loop().time() + context.time_remaining()
        metadata = forward_metadata(context.invocation_metadata(), self._runtime.rng)
        events = self._node.prefill(request, deadline_s=deadline_s, metadata=metadata)
        async with aclosing(events):
            async for event in events:
                yield event
