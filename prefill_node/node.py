"""Life of a request in this node: `PrefillNode.prefill`. Everything else here is a step of it, or feeds it.

The engine loop calls `step_begins` and `step_ended`; in between, on the engine thread, each layer's finished records
are posted by the step's sink.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from batonpb import common_pb2, prefill_pb2, transfer_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, Incarnation, RequestKey
from baton.log import get_log
from baton.wire import ModelInfo, NodeLoad, NodeRecord
from engine.block_manager import BlockManager, prefix_blocks_max
from engine.core import Engine, TokenEvent
from engine.loop import EngineLoop
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceMode
from engine.types import Batch, KvSink, Runner, SamplingParams, SequenceSlice
from engine.wire import FINISH_TO_PROTO, key_from_proto, logprobs_to_proto, params_from_proto
from kvtransfer.grant_messages import HandoffEnd
from kvtransfer.ledger import Ledger
from kvtransfer.report import block_load
from kvtransfer.writer import Handoff, Metadata, StepWrites, WriterPeer
from prefill_node.config import PrefillConfig
from prefill_node.placement import order_decode_nodes

log = get_log("prefill")

ASK_ELSEWHERE = frozenset(
    {
        Reason.DECODE_FULL,
        Reason.PEER_UNREACHABLE,
        Reason.PAIR_FENCING,
        Reason.DEADLINE,
        Reason.INCARNATION_MISMATCH,
        Reason.INCOMPATIBLE_NODE,
        Reason.HANDOFF_FAILED,
        Reason.PROMPT_TOO_LONG,
        Reason.NODE_DRAINING,
        Reason.TOO_MANY_PEERS,
        Reason.TOO_MANY_CALLS,
    }
)
"""What one decode node may answer without ending the request: the next one is asked."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in this node."""

    key: RequestKey
    prompt: list[int]
    params: SamplingParams
    router: Incarnation
    cache_salt: bytes
    request: prefill_pb2.PrefillRequest
    deadline_s: float
    metadata: Metadata
    turn: asyncio.Future[None]
    drawn: asyncio.Future[TokenEvent]
    """The first token, or the ABORTED event."""
    handoff: Handoff | None = None
    seq: EngineSequence | None = None
    pinned: list[BlockId] = field(default_factory=list)
    """Blocks that the writer holds on top of the engine, until the transport has let go of them."""
    next_block: int = 0
    """First block of the prompt that has not been posted (and that decode lacks)."""
    computed_s: float = 0.0
    over: bool = False
    """Its life here went to the end. Otherwise the decode node must not run it."""


@dataclass(slots=True, eq=False, kw_only=True)
class StepSink:
    """Posts, after each layer, the records that this step finishes."""

    tokens: int
    began_s: float
    writes: list[StepWrites] = field(default_factory=list)

    def layer_done(self, layer: int) -> None:
        for step_writes in self.writes:
            step_writes.layer_done(layer)


class PrefillNode:
    """State of one prefill node; control thread only. Implements engine.loop.StepHost."""

    engine_loop: EngineLoop

    def __init__(
        self,
        *,
        config: PrefillConfig,
        model: ModelInfo,
        runner: Runner,
        engine: Engine,
        ledger: Ledger,
        blocks: BlockManager,
        decode_nodes: Callable[[], Sequence[NodeRecord]],
        peer_for: Callable[[NodeRecord], WriterPeer],
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self._model = model
        self._runner = runner
        self._engine = engine
        self._blocks = blocks
        self._decode_nodes = decode_nodes
        self._peer_for = peer_for
        self._loop = loop
        self._rng = rng
        self._queue: deque[Job] = deque()
        self._admitted: dict[RequestKey, Job] = {}
        self._tokens_per_s = 0.0

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, *, deadline_s: float, metadata: Metadata
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """One request: queue, grant, compute while the layers are sent, first token, commit.

        Closing the iterator at any point gives the request up and frees everything.

        Raises BatonError: QUEUE_FULL, NO_DECODE_NODE, DECODE_FULL, INCOMPATIBLE_NODE, HANDOFF_FAILED, ...
        """
        job = self._enqueue(request, deadline_s, metadata)
        try:
            await job.turn  # in order of arrival, when engine and region have room for the whole prompt
            if job.params.max_tokens > 1:
                job.handoff = await self._reserve(job)
                yield _granted(job.handoff)
            self._start(job)
            first = await self._first_token(job)
            yield _first_token(job, first)
            if first.finish is not None or job.handoff is None:
                job.over = True
                return
            # Shielded: a cancel of this request must not cancel the future that the writer reports to.
            end = await asyncio.shield(job.handoff.ended)
            if end is not HandoffEnd.COMMITTED:
                raise _handoff_failed(job.handoff, end)
            job.over = True
            yield self._handed_off(job, job.handoff)
        finally:
            self._give_back(job)

    # The steps of a request's life, in order.

    def _enqueue(self, request: prefill_pb2.PrefillRequest, deadline_s: float, metadata: Metadata) -> Job:
        key = key_from_proto(request.key)
        self._check(request, key)
        job = Job(
            key=key,
            prompt=list(request.prompt),
            params=params_from_proto(request.sampling),
            router=Incarnation(request.router),
            cache_salt=request.cache_salt,
            request=request,
            deadline_s=deadline_s,
            metadata=metadata,
            turn=self._loop.create_future(),
            drawn=self._loop.create_future(),
        )
        self._queue.append(job)
        self._admit()
        return job

    def _admit(self) -> None:
        """Let the head of the queue go ahead while its prompt's blocks can be set aside (a count: nobody holds any)."""
        while self._queue:
            job = self._queue[0]
            need = self._blocks.blocks_for(len(job.prompt))
            if len(self._admitted) >= self.config.engine.sequences_max or need > self.ledger.available:
                return
            self._queue.popleft()
            if job.turn.done():
                continue  # being cancelled: its own task gives it back
            self.ledger.promise(job.key, need)
            self._admitted[job.key] = job
            job.turn.set_result(None)

    async def _reserve(self, job: Job) -> Handoff:
        """Ask decode nodes one after the other. Raises the last one's refusal when none grants."""
        candidates = order_decode_nodes(
            self._decode_nodes(),
            own=self._model,
            may_place=self._may_place,
            rng=self._rng,
            tries_max=self.config.decode_tries_max,
        )
        refusals: list[BatonError] = []
        for record in candidates:
            request = transfer_pb2.ReserveRequest(
                key=job.request.key,
                prompt=job.prompt,
                sampling=job.request.sampling,
                router=job.router,
                cache_salt=job.cache_salt,
                deadline_left_ms=max(0, int((job.deadline_s - self._loop.time()) * 1000)),
            )
            try:
                return await self._peer_for(record).reserve(
                    job.key, request, metadata=job.metadata, sources_released=lambda: self._sources_released(job)
                )
            except BatonError as error:
                if error.reason not in ASK_ELSEWHERE:
                    raise
                log.info("not granted", request=job.key.request, node=record.name, reason=error.message)
                refusals.append(error)
        # A full node is worth another try later, so that answer is preferred over "unreachable" and the like.
        refusal = next((e for e in refusals if e.reason is Reason.DECODE_FULL), refusals[-1])
        if refusal.reason is Reason.DEADLINE:
            # The call's own limit, not the client's deadline: the router is to look further.
            raise BatonError(Reason.PEER_UNREACHABLE, f"No decode node answered in time. {refusal.message}")
        raise refusal

    def _may_place(self, record: NodeRecord) -> bool:
        try:
            return self._peer_for(record).has_room()
        except BatonError:
            return False

    def _start(self, job: Job) -> None:
        """Hold the prompt's blocks, send what was cached here and decode lacks, and hand over to the engine."""
        self.ledger.unpromise(job.key)
        size = self._blocks.block_size
        prefix = self._blocks.match(job.prompt, job.cache_salt, prefix_blocks_max(len(job.prompt), size))
        table = self._blocks.admit(prefix, self._blocks.blocks_for(len(job.prompt)) - len(prefix))
        job.seq = EngineSequence(
            key=job.key,
            params=job.params,
            tokens=list(job.prompt),
            prompt_len=len(job.prompt),
            computed=len(prefix) * size,
            block_table=table,
            promise_key=job.key,
            mode=SequenceMode.PREFILL_ONLY,
            cache_salt=job.cache_salt,
            cached_tokens=len(prefix) * size,
        )
        if job.handoff is not None and job.handoff.may_post():
            self._blocks.hold(table)
            job.pinned = list(table)
            job.handoff.pinned_blocks = len(table)
            job.next_block = job.handoff.prefix_skip
            cached = self._post(job, job.handoff, len(prefix))
            for layer in cached.layers if cached is not None else ():
                assert cached is not None
                cached.layer_done(layer)
        try:
            self._engine.submit(job.seq)
        except BaseException:
            self._blocks.release(table)
            raise
        self.engine_loop.wake()

    async def _first_token(self, job: Job) -> TokenEvent:
        """Wait for the engine; a handoff that ends before the last layer is posted ends the request at once."""
        waits: set[asyncio.Future[Any]] = {job.drawn}
        if job.handoff is not None:
            waits.add(job.handoff.ended)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not job.drawn.done():
            assert job.handoff is not None
            raise _handoff_failed(job.handoff, job.handoff.ended.result())
        event = job.drawn.result()
        if event.token is None:
            raise BatonError(Reason.INTERNAL, "The engine gave this request up; the node's log says why.")
        return event

    def _post(self, job: Job, handoff: Handoff, end_block: int) -> StepWrites | None:
        """Plan writes of the prompt's blocks from `next_block` to `end_block`, all layers. None if there are none."""
        assert job.seq is not None
        first, job.next_block = job.next_block, max(job.next_block, end_block)
        if first >= job.next_block:
            return None
        src = job.seq.block_table[first : job.next_block]
        dst = handoff.dst_blocks[first - handoff.prefix_skip : job.next_block - handoff.prefix_skip]
        return handoff.plan_step(
            np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), range(self._runner.kv_spec.num_layers)
        )

    def step_begins(self, batch: Batch) -> KvSink:
        """Plan what this step finishes of each handed-over request (StepHost)."""
        sink = StepSink(tokens=batch.num_tokens, began_s=self._loop.time())
        for piece in batch.slices:
            job = self._admitted.get(piece.key)
            if job is not None and job.handoff is not None and job.handoff.may_post():
                writes = self._post(job, job.handoff, self._finished_blocks(piece))
                if writes is not None:
                    sink.writes.append(writes)
        return sink

    def step_ended(self, sink: KvSink, events: list[TokenEvent]) -> None:
        """First tokens drawn, or sequences aborted (StepHost)."""
        if isinstance(sink, StepSink):
            for writes in sink.writes:
                writes.finish()
            self._measure(sink)
        for event in events:
            self._left_engine(event)
        self._admit()  # the blocks of those who left may be what the head of the queue waits for

    def _left_engine(self, event: TokenEvent) -> None:
        self._blocks.release(event.seq.block_table)
        job = self._admitted.get(event.seq.key)
        if job is None or job.seq is not event.seq:
            return
        job.computed_s = self._loop.time()
        if event.token is not None and job.handoff is not None and event.finish is None:
            job.handoff.all_posted(event.token, _logprobs(event))
        if not job.drawn.done():
            job.drawn.set_result(event)

    def _finished_blocks(self, piece: SequenceSlice) -> int:
        """How many of the prompt's records are finished by this slice: full ones, and the last one at the end."""
        size = self._blocks.block_size
        return self._blocks.blocks_for(piece.stop) if piece.sample else piece.stop // size

    def _sources_released(self, job: Job) -> None:
        """The transport has let go of every source block of this job."""
        pinned, job.pinned = job.pinned, []
        self._blocks.release(pinned)
        self._admit()

    def _handed_off(self, job: Job, handoff: Handoff) -> prefill_pb2.PrefillEvent:
        transport = handoff.peer.transport
        return prefill_pb2.PrefillEvent(
            handed_off=prefill_pb2.HandedOff(
                transport=transport.value if transport is not None else "",
                blocks_written=handoff.writes // self._runner.kv_spec.num_layers,
                blocks_skipped=handoff.prefix_skip,
                bytes_written=handoff.bytes_written,
                handoff_exposed_ms=(self._loop.time() - job.computed_s) * 1000,
            )
        )

    def _give_back(self, job: Job) -> None:
        """The end of every request, whatever happened: nothing stays queued, promised, computed or granted for it."""
        if job in self._queue:
            self._queue.remove(job)
        self.ledger.unpromise(job.key)
        if job.handoff is not None:
            job.handoff.cancel()
            if not job.over:
                # Its Commit may have won, and the router may not know yet who granted.
                job.handoff.peer.cancel_request(job.key)
        if self._admitted.get(job.key) is job:
            del self._admitted[job.key]
            self._engine.abort(job.key)
            self.engine_loop.wake()
        self._admit()

    # Upkeep.

    @property
    def requests(self) -> int:
        return len(self._queue) + len(self._admitted)

    def load(self) -> NodeLoad:
        return NodeLoad(
            waiting_requests=len(self._queue),
            running_requests=len(self._admitted),
            waiting_tokens=sum(len(job.prompt) for job in (*self._queue, *self._admitted.values())),
            blocks=block_load(self.ledger),
            prefill_tokens_per_s=self._tokens_per_s,
        )

    def _measure(self, sink: StepSink) -> None:
        """Prompt tokens a second, smoothed over about ten steps.

        Only steps that fill half their budget count. A step of a few tokens costs nearly as much, and a node that has
        had nothing else would say that it is slow, and then be given nothing that shows otherwise.
        """
        if 2 * sink.tokens < self.config.engine.tokens_per_step_max:
            return
        seconds = self._loop.time() - sink.began_s
        rate = sink.tokens / max(seconds, 1e-6)
        self._tokens_per_s = rate if self._tokens_per_s == 0 else 0.9 * self._tokens_per_s + 0.1 * rate

    def _check(self, request: prefill_pb2.PrefillRequest, key: RequestKey) -> None:
        """Refuse at the door what cannot be served: the router has checked the client's input, this is our own."""
        count = len(request.prompt)
        if count == 0:
            raise bad_field("prompt", "The prompt is empty.", reason=Reason.EMPTY_PROMPT)
        if count >= self._runner.context_len_max:
            raise bad_field(
                "prompt",
                f"The prompt has {count} tokens; the model's context of {self._runner.context_len_max} must hold an "
                "output token too.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        if max(request.prompt) >= self._runner.vocab_size:
            raise bad_field(
                "prompt",
                f"Token id {max(request.prompt)} is outside the vocabulary of {self._runner.vocab_size}.",
                reason=Reason.TOKEN_OUT_OF_RANGE,
            )
        if self._blocks.blocks_for(count) > self.ledger.num_blocks:
            raise bad_field(
                "prompt",
                f"The prompt's {count} tokens need {self._blocks.blocks_for(count)} blocks; this node's region has "
                f"{self.ledger.num_blocks}.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        if len(self._queue) >= self.config.queue_max:
            raise BatonError(
                Reason.QUEUE_FULL,
                f"{len(self._queue)} requests are waiting here already, the limit.",
                retry_after_ms=self.config.busy_retry_ms,
            )
        if key in self._admitted or self._engine.has(key) or any(job.key == key for job in self._queue):
            raise BatonError(Reason.REQUEST_EXISTS, f"Attempt {key.attempt} of request {key.request} is here already.")


def _granted(handoff: Handoff) -> prefill_pb2.PrefillEvent:
    address = handoff.peer.address
    return prefill_pb2.PrefillEvent(
        granted=prefill_pb2.Granted(
            decode_node=address.name,
            decode_incarnation=address.pair.receiver,
            decode_endpoint=address.endpoint,
        )
    )


def _first_token(job: Job, first: TokenEvent) -> prefill_pb2.PrefillEvent:
    assert job.seq is not None and first.token is not None
    event = prefill_pb2.FirstToken(
        token=first.token, prompt_tokens_cached=job.seq.cached_tokens, logprobs=_logprobs(first)
    )
    if first.finish is not None:
        event.finish = FINISH_TO_PROTO[first.finish]
    return prefill_pb2.PrefillEvent(first_token=event)


def _logprobs(event: TokenEvent) -> common_pb2.TokenLogprobs | None:
    return None if event.logprobs is None else logprobs_to_proto(event.logprobs)


def _handoff_failed(handoff: Handoff, end: HandoffEnd) -> BatonError:
    lost = end in (HandoffEnd.LINK_LOST, HandoffEnd.PEER_GONE)
    return BatonError(
        Reason.PEER_UNREACHABLE if lost else Reason.HANDOFF_FAILED,
        f"The handoff to {handoff.peer.address.name} ended: {end.value}. Send the request again.",
    )
