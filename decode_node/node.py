"""Life of a request in this node: `DecodeNode.live`. Everything else here starts it, feeds it or ends it.

Reserve starts the task; the receiver's instructions (`committed`, `let_go`, `cancelled`) and the engine's events move
it on; it always runs to its end, in which both references to its blocks are dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
from collections.abc import Callable
from typing import Final

from batonpb import common_pb2, decode_pb2, prefill_pb2, transfer_pb2

from baton.drain import Holdings
from baton.errors import BatonError, Code, Reason
from baton.ids import GrantId, Incarnation, Pair, RequestKey
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.tasks import Tasks
from baton.wire import NodeLoad, key_from_proto
from decode_node.config import DecodeConfig
from decode_node.job import GoneRequests, Job, check_first_token, output_of
from decode_node.reserving import Reserving
from decode_node.streams import RequestOutput, TokenStreams
from engine.core import TokenEvent
from engine.scheduler import Sequence
from engine.types import (
    FINISH_TO_PROTO,
    GRAMMAR_MESSAGE,
    NOT_FINITE_MESSAGE,
    Batch,
    FinishReason,
    KvSink,
    NullSink,
    logprobs_to_proto,
)
from kvtransfer.checksums import checksums_from_proto
from kvtransfer.protocol.receiver import AnswerGranted, CommitAsked
from kvtransfer.receiver import Receiver
from node.pool import DevicePool
from node.transfers import Transfers

log = get_log("decode")

LEFT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of finished answers that no router has. Without its answer a request is computed again."""


class DecodeNode:
    """State of one decode node; control thread only.

    Implements kvtransfer.receiver.ReceiverHost and node.engine_loop.StepHost.
    """

    transfers: Transfers
    """Set once, before the first call."""

    def __init__(self, *, config: DecodeConfig, pool: DevicePool) -> None:
        self.config = config
        self.pool = pool
        self.ledger = pool.ledger
        self._loop = loop = asyncio.get_running_loop()
        self.streams = TokenStreams(loop.time)
        self._gone = GoneRequests(keep_ms=config.resume_ms)
        self._engine = pool.engine
        self._blocks = pool.blocks
        self._spill = None if pool.host is None else pool.host.spill
        self._jobs: dict[GrantId, Job] = {}
        self._by_key: dict[RequestKey, Job] = {}
        self.reserving = Reserving(config=config, pool=pool, jobs=self._jobs.values())
        self._lives = Tasks(loop, log, broken="a request's life broke off")
        self._repeats = RepeatLog(log, loop.time, key="router")
        self._requests_taken = 0
        self.room_changed: Callable[[], None] = lambda: None
        """Called when a request or its blocks may have made room, outside of a step too."""

    @property
    def receiver(self) -> Receiver:
        return self.transfers.receiver

    def blocks_released(self) -> None:
        """Blocks that others held are not held any more."""
        self.room_changed()

    async def live(self, job: Job) -> None:
        """The whole life of one request in this node, from its grant until nobody needs its answer any more.

        One that a mixed node keeps is in the engine and open to its router already (`keep`).
        """
        output = job.output
        try:
            async with asyncio.timeout_at(job.deadline_s) as job.timer:
                if not job.kept:
                    if (grammar := job.seq.params.grammar) is not None:  # while the KV comes
                        job.seq.grammar = await self.pool.grammars.matcher(grammar, output.tokens)
                    if not await asyncio.shield(job.committed):
                        return  # revoked, or cancelled before the commit: the receiver has let go
                    await asyncio.sleep(0)  # the Commit is answered first: what follows grows with the prompt
                    if not self._resume(job):
                        return  # cancelled just after the commit
                    self.streams.open(output)
                await output.ended.wait()
        except TimeoutError:
            output.end(error="the request's deadline passed")
            self.receiver.cancel(job.key)
        except BatonError as error:
            self._break_off(job, error.message, Reason.GRAMMAR_TOO_COMPLEX)  # too much here, if not on the prefill node
        except Exception:
            # A bug of ours ends this request, and says so to its router.
            log.exception("request broke off", request=job.key.request)
            self._break_off(job, "internal error of the decode node; its log has the details")
        finally:
            if job.runs:
                self._engine.abort(job.key)
                if not job.kept:
                    self.receiver.ended(job.key)
                    self.let_go(job.grant)
            del self._jobs[job.grant]
            self.reserving.ended(job.footprint)
            if not output.opened:
                self._forget(job)
            self.room_changed()
        if not output.opened:
            return
        try:
            async with asyncio.timeout_at(self._kept_until_s(output)) as job.timer:
                await output.forgotten.wait()
        except TimeoutError:
            if not output.left:
                self._repeats.warning("answer was never fetched", peer=f"{output.router:016x}", request=job.key.request)
        finally:
            self.streams.close(output)
            self._forget(job)

    # What the transfer service asks.

    def reserve(self, request: transfer_pb2.ReserveRequest, pair: Pair) -> transfer_pb2.ReserveReply:
        """Grant blocks for the prompt and set the answer's growth aside, or say why not. A repeat gets the first one's
        answer. Raises BatonError TAKEN_OVER."""
        self.check_not_taken_over(key_from_proto(request.key))
        reserved = self.reserving.ask(request, pair, self.receiver)
        if isinstance(reserved, transfer_pb2.ReserveReply):
            return reserved
        answer = reserved.answer
        if reserved.seq is not None:
            deadline_s = self._loop.time() + request.deadline_left_ms / 1000
            output = output_of(request, reserved.seq)
            self._start(reserved.seq, answer, output, deadline_s, footprint=reserved.footprint)
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
        """The prefill node commits. Returns when the seal is here too, or the grant is revoked.

        Raises BatonError as `Receiver.commit` does, and TOKEN_OUT_OF_RANGE or BAD_FIELD, which end the request.
        """
        grant = GrantId(request.grant)
        job = self._jobs.get(grant)
        is_open = self.receiver.grants.blocks_uncommitted(grant, pair) is not None  # and it is this writer's
        try:
            if job is not None and is_open:
                check_first_token(request, vocab_size=self.pool.runner.vocab_size)
                job.first_token = request.first_token
                if request.HasField("first_logprobs"):
                    job.first_logprobs = request.first_logprobs
            sampled = bool(request.checksums or request.checksum_layers or request.checksum_blocks)
            return await self.receiver.commit(
                CommitAsked(
                    pair=pair,
                    grant=grant,
                    writes=request.writes,
                    bytes_written=request.bytes_written,
                    sampled=sampled,
                ),
                checksums_from_proto(request) if sampled else None,
            )
        except BatonError as error:
            if job is not None and is_open and error.code is Code.INVALID_ARGUMENT:
                self.cancel(job.key, f"its Commit is refused: {error.message}", notify_router=True)
            raise

    # What a mixed node asks, for requests that it keeps.

    def keep(self, seq: Sequence, request: prefill_pb2.PrefillRequest, *, deadline_s: float) -> None:
        """Live with a sequence that the engine has from its prompt on: no grant and no copy. There is a place for it,
        and no other router has taken it over.

        The engine holds its blocks, and its promise is named by a grant id that no writer knows.
        """
        assert self.reserving.has_place, seq.key
        self.receiver.supersede(seq.key)
        self.reserving.resumed_first.waits_no_more(seq.key)
        footprint = len(seq.block_table) + (self.ledger.promise_left(seq.promise_key) or 0)
        output = output_of(request, seq)
        self._start(seq, None, output, deadline_s, footprint=footprint)
        self.streams.open(output)

    def commit_kept(self, key: RequestKey) -> None:
        """The prefill half has the first token: from here on only the router, or the deadline, ends the request."""
        job = self._by_key.get(key)
        if job is not None and job.kept and not job.committed.done():
            job.committed.set_result(True)

    # What routers ask.

    def cancel(self, key: RequestKey, reason: str, *, notify_router: bool = False) -> bool:
        """The request lets go of what it has or waits for. Idempotent; an unknown key leaves a tombstone.

        `notify_router`: somebody else cancels, and the router may be waiting for tokens.
        """
        job = self._by_key.get(key)
        if job is not None:
            job.output.end(error=f"cancelled: {reason}")
        self.receiver.cancel(key)
        self.reserving.resumed_first.waits_no_more(key)
        if job is not None and not notify_router:
            job.output.forgotten.set()
        return job is not None

    def is_router_of(self, key: RequestKey, sender: Incarnation, epoch: int) -> bool:
        job = self._by_key.get(key)
        return job is not None and job.output.heeds(sender, epoch)

    def is_taken_over(self, key: RequestKey, epoch: int) -> bool:
        """Whether another router has it since, or has or had an attempt before it here: words of this epoch change
        nothing."""
        job, gone = self._by_key.get(key), self._gone.find(key.request, self._loop.time())
        if job is not None:
            return job.output.epoch > epoch
        return (gone is not None and gone.epoch > epoch) or any(
            each.output.epoch and each.key.request == key.request and each.key.attempt < key.attempt
            for each in self._jobs.values()
        )

    def check_not_taken_over(self, key: RequestKey) -> None:
        """Of one that is to begin here. Raises BatonError TAKEN_OVER."""
        if self.is_taken_over(key, 0):
            raise BatonError(Reason.TAKEN_OVER, f"Another router has taken the request {key.request} over.")

    def ends_by(self, key: RequestKey, sender: Incarnation, epoch: int) -> bool:
        """Whether a Cancel by `sender` ends it. A resumable request that has committed is its router's alone: a prefill
        node cancels whatever its call ends with, also if the router has left."""
        job = self._by_key.get(key)
        if job is not None and job.is_committed and job.output.resumable is not None:
            return job.output.heeds(sender, epoch)
        return not self.is_taken_over(key, epoch)

    def take_over(self, request: decode_pb2.TakeOverRequest, router: Incarnation) -> decode_pb2.TakeOverReply:
        """Make `router` the one that has it, if it is resumable and goes on or is finished. Or forget it. If this node
        cannot go on with it, it never will."""
        key = key_from_proto(request.key)
        job, gone = self._by_key.get(key), self._gone.find(key.request, self._loop.time())
        if gone is None and job is None:
            if not self.is_taken_over(key, 0):  # neither an attempt before it
                self.cancel(key, "it was not here when a router wanted to take it over")
            return decode_pb2.TakeOverReply(outcome=decode_pb2.TAKE_OVER_OUTCOME_ABSENT)
        tag = gone.tag if gone is not None else job.tag if job is not None else b""
        if not tag or not hmac.compare_digest(tag, request.tag):
            return decode_pb2.TakeOverReply(outcome=decode_pb2.TAKE_OVER_OUTCOME_FOREIGN)
        over, epoch = (gone.over, gone.epoch) if gone is not None else (False, 0)
        if job is not None:
            self.streams.take_over(job.output, router)
            epoch = job.output.epoch
            if job.goes_on and not (over or request.forget):
                return self._taken_over(job, deadline_left_ms=request.deadline_left_ms)
            self.cancel(key, "its client went on elsewhere before it was committed, or wants no more of it")
        over = over or request.forget
        self._gone.add(key.request, tag=tag, epoch=epoch, over=over, now_s=self._loop.time())
        outcome = decode_pb2.TAKE_OVER_OUTCOME_OVER if over else decode_pb2.TAKE_OVER_OUTCOME_ABSENT
        return decode_pb2.TakeOverReply(outcome=outcome)

    def _taken_over(self, job: Job, *, deadline_left_ms: int) -> decode_pb2.TakeOverReply:
        output = job.output
        assert output.resumable is not None, job.key
        job.deadline_s = self._loop.time() + deadline_left_ms / 1000
        job.reschedule(self._kept_until_s(output) if output.ended.is_set() else job.deadline_s)
        return decode_pb2.TakeOverReply(
            outcome=decode_pb2.TAKE_OVER_OUTCOME_TAKEN, epoch=output.epoch, state=output.resumable.state
        )

    def leave(self, router: Incarnation, key: RequestKey, epoch: int, *, ended: bool) -> None:
        """The router serves it no longer: it waits for another, if it is resumable. `ended`: the answer has an end that
        only a router sees."""
        job = self._by_key.get(key)
        if job is None or not job.output.heeds(router, epoch):
            return
        output = job.output
        if output.resumable is None:
            self.done(router, key, epoch)
            return
        self.streams.leave(output)
        if ended and output.opened:
            output.end(finish=common_pb2.FINISH_REASON_STOP)
        if output.ended.is_set():
            job.reschedule(self._kept_until_s(output))

    def resolve(self, key: RequestKey) -> bool:
        """Did this attempt commit, and goes on here? If not it never will."""
        job = self._by_key.get(key)
        # Given up or forgotten, there is nothing to go on with, whatever was committed.
        goes_on = job is not None and job.output.error is None
        if job is not None and job.kept:
            if goes_on and job.committed.done() and job.committed.result():
                return True
            self.cancel(key, "it was not committed when its router asked")
        return self.receiver.resolve(key) and goes_on

    def done(self, router: Incarnation, key: RequestKey, epoch: int) -> None:
        """The router has the whole answer, or wants no more of it."""
        job = self._by_key.get(key)
        if job is None or not job.output.heeds(router, epoch):
            return
        job.output.forgotten.set()
        if not job.output.ended.is_set():
            self.cancel(key, "no longer wanted")

    # What the receiver instructs (ReceiverHost).

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        del key
        self._jobs[grant].committed.set_result(True)

    def cancelled(self, key: RequestKey, grant: GrantId) -> None:
        del grant
        job = self._by_key.get(key)
        if job is not None:  # at once, so that no router takes over what the engine is about to end
            job.output.end(error="cancelled: a newer attempt has come")
        self._engine.abort(key)

    def let_go(self, grant: GrantId) -> None:
        job = self._jobs.get(grant)
        if job is None:
            return
        # Of what the engine had, it has said so itself: that is one use, not two.
        self._blocks.prefix_cache.released((*job.prefix, *job.blocks), used=not job.resumed)
        self._engine.changed()  # a sequence may wait for these blocks
        if not job.committed.done():
            job.committed.set_result(False)
            job.output.end(error="the handoff did not complete")
            job.output.forgotten.set()
        self.room_changed()

    # What the engine loop calls (StepHost).

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        del sink, is_timed
        for event in events:
            job = self._by_key.get(event.seq.key)
            if job is None:
                continue
            if event.token is not None:
                logprobs = event.logprobs
                job.output.append(event.token, None if logprobs is None else logprobs_to_proto(logprobs))
            if event.finish is None:  # most
                continue
            if event.finish is FinishReason.ABORTED:
                job.output.end(error="the engine gave the request up")
            elif event.finish is FinishReason.NOT_FINITE:
                job.output.end(error=NOT_FINITE_MESSAGE, reason=Reason.SCORES_NOT_FINITE)
            elif event.finish is FinishReason.GRAMMAR and event.seq.grammar is not None:
                problem = event.seq.grammar.problem
                job.output.end(error=GRAMMAR_MESSAGE.format(problem), reason=Reason.GRAMMAR_TOO_COMPLEX)
            else:
                job.output.end(finish=FINISH_TO_PROTO[event.finish])

    def _break_off(self, job: Job, error: str, reason: Reason | None = None) -> None:
        job.output.end(error=error, reason=reason)
        self.receiver.cancel(job.key)
        if not job.output.opened:
            self.streams.open(job.output)

    # Upkeep.

    def reap(self) -> None:
        """Called every second: requests without a router, answers that nobody fetches."""
        for output in self.streams.orphans(orphan_ms=self.config.orphan_ms, resume_ms=self.config.resume_ms):
            if not output.left and not output.ended.is_set():
                self._repeats.warning("orphan cancelled", peer=f"{output.router:016x}", request=output.key.request)
            self.cancel(output.key, "it has no router")
            output.forgotten.set()
        # Those that a router is reading go last.
        finished = sorted(self.streams.finished, key=lambda output: not output.left)
        for output in finished[: -self.config.finished_max]:
            output.forgotten.set()
        self.streams.drop_left(LEFT_BYTES_MAX)
        self._gone.upkeep(self._loop.time())
        self._repeats.upkeep()

    def holds(self) -> Holdings:
        return dataclasses.replace(
            self.transfers.holds(), requests=self.requests, answers_unacknowledged=self.answers_unacknowledged
        )

    @property
    def requests(self) -> int:
        return len(self._jobs)

    @property
    def answers_unacknowledged(self) -> int:
        """Requests that are over here, and whose answer a router or a client may still want."""
        return len(self._lives) - len(self._jobs)

    def load(self) -> NodeLoad:
        host = None if self._spill is None else self._spill.host
        return NodeLoad(
            waiting_requests=self._engine.scheduler.waiting,
            running_requests=len(self._jobs),
            blocks=self.ledger.books(),
            swapped_out_requests=self._engine.scheduler.swapped_out,
            host_blocks_filled=0 if host is None else host.filled,
            host_blocks_free=0 if host is None else host.free,
            requests_taken=self._requests_taken,
            moved=self.transfers.moved(),
        )

    async def close(self) -> None:
        """Give every request up and wait until all have let go; none is taken any more."""
        self.reserving.closed = True
        for job in list(self._by_key.values()):
            self.cancel(job.key, "this node is shutting down")
        await self._lives.drain(self.config.stop_grace_ms)
        self._repeats.close()

    # Steps of a request's life.

    def _start(
        self, seq: Sequence, granted: AnswerGranted | None, output: RequestOutput, deadline_s: float, *, footprint: int
    ) -> None:
        """Begin the life of a request that was granted, or (None) that the engine has already."""
        for older in list(self._jobs.values()):  # of the same request; the receiver does this for granted ones
            if older.kept and older.key.request == seq.key.request and older.key.attempt < seq.key.attempt:
                self.cancel(older.key, "a newer attempt has come")
        assert isinstance(seq.promise_key, bytes), seq.key
        kept = granted is None
        job = Job(
            seq=seq,
            grant=GrantId(seq.promise_key),
            prefix=() if granted is None else granted.prefix,
            blocks=() if granted is None else granted.blocks,
            deadline_s=deadline_s,
            output=output,
            committed=self._loop.create_future(),
            footprint=footprint,
            resumed=kept,
            kept=kept,
        )
        self._jobs[job.grant] = self._by_key[job.key] = job
        self._requests_taken += 1
        self._lives.spawn(self.live(job))

    def _resume(self, job: Job) -> bool:
        """Give the committed sequence to the engine, with the grant's references to every block.

        False when it was cancelled between its commit and now.
        """
        if not self.receiver.grants.take_over(job.grant):
            return False
        job.resumed = True
        # The references are nobody's until the engine has them: nothing between here and resume may fail.
        seq = job.seq
        seq.block_table = [*job.prefix, *job.blocks]
        seq.computed = len(seq.tokens)
        seq.tokens.append(job.first_token)
        job.output.append(job.first_token, job.first_logprobs)
        self._engine.resume(seq)
        return True

    def _kept_until_s(self, output: RequestOutput) -> float:
        """Of an answer that has ended now, or changed hands."""
        return self._loop.time() + (self.config.resume_ms if output.left else self.config.finished_ms_max) / 1000

    def _forget(self, job: Job) -> None:
        output = job.output
        if output.epoch:  # routers that had it may still ask
            self._gone.add(job.key.request, tag=job.tag, epoch=output.epoch, over=False, now_s=self._loop.time())
        if self._by_key.get(job.key) is job:  # a later grant of the same attempt may have taken its place
            del self._by_key[job.key]
