"""Life of a request in this node: `DecodeNode.live`. Everything else here starts it, feeds it or ends it.

Reserve starts the task; the receiver's instructions (`committed`, `let_go`, `cancelled`) and the engine's events move
it on; it always runs to its end, in which both references to its blocks are dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from batonpb import common_pb2, transfer_pb2

from baton.ids import BlockId, GrantId, Incarnation, Pair, RequestKey, ReserveNumber
from baton.log import get_log
from baton.wire import NodeLoad
from cachestore.spill import Spill
from decode_node.config import DecodeConfig
from decode_node.overcommit import has_room
from decode_node.streams import RequestOutput, TokenStreams
from engine.block_manager import BlockManager, growth_blocks
from engine.core import Engine, TokenEvent
from engine.loop import EngineLoop
from engine.sequence import Sequence, SequenceMode
from engine.types import Batch, FinishReason, KvSink, NullSink, Runner, SamplingParams
from engine.wire import FINISH_TO_PROTO, key_from_proto, logprobs_to_proto, params_from_proto
from kvtransfer.grant_messages import AnswerGranted, AnswerRefused, CommitAsked, Refusal, ReserveAsked
from kvtransfer.ledger import Ledger
from kvtransfer.receiver import Receiver
from kvtransfer.report import block_load

log = get_log("decode")


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One granted request."""

    key: RequestKey
    grant: GrantId
    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes
    prefix: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    deadline_s: float
    output: RequestOutput
    committed: asyncio.Future[bool]
    """True at the commit, False when the grant is over without one."""
    footprint: int
    """Blocks that prompt and answer may take in all."""
    resumed: bool = False
    """The engine has it: its blocks can be moved."""
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None


class DecodeNode:
    """State of one decode node; control thread only.

    Implements kvtransfer.receiver.ReceiverHost and engine.loop.StepHost.
    """

    receiver: Receiver
    engine_loop: EngineLoop

    def __init__(
        self,
        *,
        config: DecodeConfig,
        runner: Runner,
        engine: Engine,
        ledger: Ledger,
        blocks: BlockManager,
        spill: Spill | None,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.streams = TokenStreams(loop)
        self._runner = runner
        self._engine = engine
        self._blocks = blocks
        self._spill = spill
        self._loop = loop
        self._randomness = randomness
        self._jobs: dict[GrantId, Job] = {}
        self._by_key: dict[RequestKey, Job] = {}
        self._lives: set[asyncio.Task[None]] = set()

    async def live(self, job: Job) -> None:
        """The whole life of one request in this node, from its grant to the router's acknowledgement."""
        output = job.output
        try:
            async with asyncio.timeout_at(job.deadline_s):
                if not await asyncio.shield(job.committed) or not self._resume(job):
                    return  # revoked or cancelled first: the receiver has dropped what it held
                self.streams.open(output)
                await output.ended.wait()
        except TimeoutError:
            output.end(error="the request's deadline passed")
            self.receiver.cancel(job.key)
        except Exception:
            # A bug of ours ends this request, and says so to its router.
            log.exception("request broke off", request=job.key.request)
            output.end(error="internal error of the decode node; its log has the details")
            self.receiver.cancel(job.key)
            if not output.opened:
                self.streams.open(output)
        finally:
            if job.committed.done() and job.committed.result():
                self._engine.abort(job.key)
                self.engine_loop.wake()
                self.receiver.ended(job.key)
            del self._jobs[job.grant]
            if not output.opened:
                self._forget(job)
        if not output.opened:
            return
        self.streams.notify(output.router)
        try:
            async with asyncio.timeout(self.config.finished_ms_max / 1000):
                await output.forgotten.wait()
        except TimeoutError:
            log.warning("answer was never fetched", request=job.key.request, router=f"{output.router:x}")
        finally:
            self.streams.close(output)
            self._forget(job)

    # What the transfer service asks.

    def reserve(self, request: transfer_pb2.ReserveRequest, pair: Pair) -> transfer_pb2.ReserveReply:
        """Grant blocks for the prompt and set the answer's growth aside, or say why not. Answers at once."""
        key = key_from_proto(request.key)
        prompt = list(request.prompt)
        reject = self._never(prompt, request.sampling)
        if reject is not None:
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=reject))
        if len(self._jobs) >= self.config.requests_max:
            return self._busy("its request limit is reached")
        prompt_blocks = self._blocks.blocks_for(len(prompt))
        prefix = self._blocks.match(prompt, request.cache_salt, prompt_blocks)
        promise = self._growth(prompt, request.sampling.max_tokens)
        self._blocks.hold(prefix)  # so that making room does not evict what was just matched
        try:
            new = prompt_blocks - len(prefix)
            footprint = prompt_blocks + promise
            room = has_room(
                self._spill, self.ledger, self._jobs.values(), prefix=len(prefix), new=new, footprint=footprint
            )
            if room:
                self._blocks.make_room(new)
            answer = self.receiver.reserve(
                ReserveAsked(
                    pair=pair,
                    number=ReserveNumber(request.number),
                    lowest_live=ReserveNumber(request.lowest_live),
                    key=key,
                    grant=GrantId(self._randomness(16)),
                    blocks_new=new,
                    prefix=tuple(prefix),
                    promise=promise,
                    host_backed=self._spill is not None,
                    room=room,
                )
            )
        finally:
            self._blocks.release(prefix)
        if isinstance(answer, AnswerRefused):
            if answer.refusal in (Refusal.BUSY, Refusal.FENCING, Refusal.SPAN):
                return self._busy(answer.refusal.value)
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=answer.refusal.value))
        if answer.grant not in self._jobs:
            self._begin(request, key, prompt, answer, footprint)
        return transfer_pb2.ReserveReply(
            granted=transfer_pb2.Grant(
                grant=answer.grant,
                epoch=answer.epoch,
                blocks=answer.blocks,
                prefix_skip=len(answer.prefix),
                lease_ms=self.receiver.config.lease_ms,
            )
        )

    async def commit(self, request: transfer_pb2.CommitRequest, pair: Pair) -> bool:
        """The prefill node's word. Returns when the seals are here too, or the grant is revoked."""
        grant = GrantId(request.grant)
        job = self._jobs.get(grant)
        if job is not None and not job.committed.done():
            job.first_token = request.first_token
            if request.HasField("first_logprobs"):
                job.first_logprobs = request.first_logprobs
        return await self.receiver.commit(
            CommitAsked(pair=pair, grant=grant, writes=request.writes, bytes_written=request.bytes_written)
        )

    # What routers ask.

    def cancel(self, key: RequestKey, reason: str) -> bool:
        """The request lets go, wherever it is in its life. Idempotent; an unknown key leaves a tombstone."""
        job = self._by_key.get(key)
        self.receiver.cancel(key)
        if job is not None:
            job.output.end(error=f"cancelled: {reason}")
            job.output.forgotten.set()
        return job is not None

    def resolve(self, key: RequestKey) -> bool:
        """Did this attempt commit? If not it never will."""
        output = self.streams.find(key)
        if output is not None and output.error is None:
            return True
        return self.receiver.resolve(key)

    def done(self, router: Incarnation, key: RequestKey) -> None:
        """The router has the whole answer, or wants no more of it."""
        output = self.streams.done(router, key)
        if output is not None and not output.ended.is_set():
            self.cancel(key, "no longer wanted")

    # What the receiver instructs (ReceiverHost).

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        del key
        self._jobs[grant].committed.set_result(True)

    def cancelled(self, key: RequestKey, grant: GrantId) -> None:
        del grant
        self._engine.abort(key)
        self.engine_loop.wake()

    def let_go(self, grant: GrantId) -> None:
        job = self._jobs.get(grant)
        if job is None:
            return
        self._blocks.prefix_cache.released((*job.prefix, *job.blocks))
        self.engine_loop.wake()  # a sequence may wait for these blocks
        if not job.committed.done():
            job.committed.set_result(False)
            job.output.end(error="the handoff did not complete")
            job.output.forgotten.set()

    # What the engine loop tells (StepHost).

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent]) -> None:
        del sink
        routers = set()
        for event in events:
            job = self._by_key.get(event.seq.key)
            if job is None:
                continue
            routers.add(job.output.router)
            if event.token is not None:
                job.output.append(event.token, logprobs_to_proto(event.logprobs) if event.logprobs else None)
            if event.finish is FinishReason.ABORTED:
                job.output.end(error="the engine gave the request up")
            elif event.finish is not None:
                job.output.end(finish=FINISH_TO_PROTO[event.finish])
        for router in routers:
            self.streams.notify(router)

    # Upkeep.

    def reap(self) -> None:
        """Called every second: requests of routers that are away, answers that nobody fetches."""
        for output in self.streams.orphans(self.config.orphan_ms):
            log.warning("orphan cancelled", request=output.key.request, router=f"{output.router:x}")
            self.cancel(output.key, "its router is away")
        for output in self.streams.finished[: -self.config.finished_max]:
            output.forgotten.set()

    @property
    def requests(self) -> int:
        return len(self._jobs)

    @property
    def answers_unacknowledged(self) -> int:
        """Requests that are over here and whose router has not said that it has the whole answer."""
        return len(self._lives) - len(self._jobs)

    def load(self) -> NodeLoad:
        spilled = None if self._spill is None else self._spill.figures
        return NodeLoad(
            waiting_requests=self._engine.waiting,
            running_requests=len(self._jobs),
            blocks=block_load(self.ledger),
            parked_requests=self._engine.parked,
            host_blocks_filled=0 if spilled is None else spilled.host_filled,
            host_blocks_free=0 if spilled is None else spilled.host_free,
        )

    async def close(self) -> None:
        """Give every request up and wait until all have let go."""
        for job in list(self._by_key.values()):
            self.cancel(job.key, "this node is shutting down")
        if self._lives:
            await asyncio.wait(self._lives, timeout=self.config.stop_grace_ms / 1000)

    # Small helpers.

    def _forget(self, job: Job) -> None:
        if self._by_key.get(job.key) is job:  # a later grant of the same attempt may have taken its place
            del self._by_key[job.key]

    def _begin(
        self,
        request: transfer_pb2.ReserveRequest,
        key: RequestKey,
        prompt: list[int],
        granted: AnswerGranted,
        footprint: int,
    ) -> None:
        grant = granted.grant
        job = Job(
            key=key,
            grant=grant,
            prompt=prompt,
            params=params_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            prefix=granted.prefix,
            blocks=granted.blocks,
            footprint=footprint,
            deadline_s=self._loop.time() + request.deadline_left_ms / 1000,
            output=RequestOutput(key=key, router=Incarnation(request.router), tokens=[]),
            committed=self._loop.create_future(),
        )
        self._jobs[grant] = job
        self._by_key[key] = job
        task = self._loop.create_task(self.live(job))
        self._lives.add(task)
        task.add_done_callback(self._life_over)

    def _life_over(self, task: asyncio.Task[None]) -> None:
        self._lives.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a request's life broke off", exc_info=task.exception())

    def _resume(self, job: Job) -> bool:
        """Give the committed sequence to the engine, with the grant's references to every block.

        False when it was cancelled between its commit and now.
        """
        if not self.receiver.grants.take_over(job.grant):
            return False
        job.resumed = True
        # The references are nobody's until the engine has them: nothing between here and resume may fail.
        table = [*job.prefix, *job.blocks]
        job.output.append(job.first_token, job.first_logprobs)
        self._engine.resume(
            Sequence(
                key=job.key,
                params=job.params,
                tokens=[*job.prompt, job.first_token],
                prompt_len=len(job.prompt),
                computed=len(job.prompt),
                block_table=table,
                promise_key=job.grant,
                mode=SequenceMode.COMPLETE,
                cache_salt=job.cache_salt,
                cached_tokens=len(job.prefix) * self._blocks.block_size,
            )
        )
        self.engine_loop.wake()
        return True

    def _never(self, prompt: list[int], sampling: common_pb2.SamplingSpec) -> str | None:
        """Why this request can never run here, whatever is free. A bad one must not break the steps of the others."""
        if max(prompt) >= self._runner.vocab_size:
            return f"token id {max(prompt)} is outside the vocabulary of {self._runner.vocab_size}"
        if sampling.max_tokens < 1 or not math.isfinite(sampling.temperature) or not 0 < sampling.top_p <= 1:
            return "its sampling parameters are out of range"
        if len(prompt) >= self._runner.context_len_max:
            return f"the prompt's {len(prompt)} tokens leave no room in a context of {self._runner.context_len_max}"
        need = self._blocks.blocks_for(len(prompt)) + self._growth(prompt, sampling.max_tokens)
        if need > self.ledger.num_blocks:
            return f"prompt and answer need {need} blocks, the region has {self.ledger.num_blocks}"
        return None

    def _growth(self, prompt: list[int], max_tokens: int) -> int:
        return growth_blocks(
            prompt_len=len(prompt),
            known_len=len(prompt) + 1,
            max_tokens=max_tokens,
            context_len_max=self._runner.context_len_max,
            block_size=self._blocks.block_size,
            blocks_held=self._blocks.blocks_for(len(prompt)),
        )

    def _busy(self, reason: str) -> transfer_pb2.ReserveReply:
        return transfer_pb2.ReserveReply(
            busy=transfer_pb2.Busy(retry_after_ms=self.config.busy_retry_ms, reason=reason)
        )
