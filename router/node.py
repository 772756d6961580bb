"""Life of a request in this node: `RouterNode.generate`. `_attempt` is one try at it on one prefill and decode node.

`Intake` has made a job of it before. Tokens reach the client from the attempt's inbox, which the prefill call (first
token; `PrefillCalls`) and the decode node's stream (all of them; `DecodeStreams`) fill; each index is taken once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from batonpb import common_pb2, inference_pb2

from baton.clock import SystemClock
from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.retry_time import ROOM_SHARE, LeaveRate, retry_after_ms, wait_s
from baton.rpc_client import Channels
from baton.tasks import Tasks
from baton.tracing import Traceparent
from baton.wire import ModelInfo, NodeRecord, Role
from engine.model_config import SamplingDefaults
from router.chat import ChatEncoder
from router.config import RouterConfig
from router.decode_streams import DecodeStreams
from router.intake import Intake
from router.job import Job, TokenPart, Try, finished_event, started_event, tokens_event
from router.observer import ObservedRequest, RequestObserver
from router.prefill_calls import PrefillCalls
from router.prefill_nodes import PrefillNodes
from router.regions import RegionWatch, tokens_max
from router.request import NEUTRAL
from router.request_log import RequestLog
from router.retries import GONE, RESOLVES_MAX, RESUMABLE, ResumptionPace, Verdict, pause_ms
from router.slow_client import unread_limit
from router.subscriptions import DecodeSubscription, Inbox
from router.text import TextCodec

log = get_log("router")


HANDED_OFF_MS_MAX = 1_000
"""How long a finished answer waits for the prefill node to confirm its handoff."""
DEADLINE_MARGIN_S = 0.05
"""A call may be ended a little before what we hold for its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """What a router has at this moment, for tests and debugging. The inboxes are the router's own."""

    inboxes: dict[RequestKey, Inbox]
    streams: tuple[DecodeSubscription, ...]


class RouterNode:
    """State of one router; control thread only."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        incarnation: Incarnation,
        prefill_nodes: Callable[[], Sequence[NodeRecord]],
        channels: Channels,
        codec: TextCodec | None,
        chats: ChatEncoder | None = None,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        sampling_defaults: SamplingDefaults = NEUTRAL,
        observer: RequestObserver | None = None,
        check_known: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_known` raises BatonError while the nodes are not known well enough to place a new request."""
        self.config = config
        self.requests = 0
        self._prefill_nodes = PrefillNodes(prefill_nodes, blocks_max=config.prefix_blocks_max)
        self._channels = channels
        self._loop = loop
        self._rng = rng
        self._observer = observer or RequestObserver()
        self._inboxes: dict[RequestKey, Inbox] = {}
        self._pace = ResumptionPace(config.retries, now_s=loop.time(), rng=rng)
        self._tasks = Tasks(loop, log)
        self._log = RequestLog(loop.time)
        self._repeats = RepeatLog(log, loop.time, key="node")
        self._streams = DecodeStreams(
            config=config,
            own=incarnation,
            channels=channels,
            inboxes=self._inboxes,
            tasks=self._tasks,
            clock=SystemClock(),
            repeats=self._repeats,
            dropped=self._drop_channel,
        )
        self._prefill_calls = PrefillCalls(
            own=incarnation,
            nodes=self._prefill_nodes,
            channels=channels,
            streams=self._streams,
            loop=loop,
            rng=rng,
        )
        self._intake = Intake(
            config=config,
            prefill_nodes=self._prefill_nodes,
            codec=codec,
            chats=chats,
            loop=loop,
            rng=rng,
            sampling_defaults=sampling_defaults,
            records=lambda: self._records,
            check_known=check_known,
            pause=self._pause,
        )
        self._ended = LeaveRate()
        self._regions = RegionWatch()
        self._records: Sequence[NodeRecord] = ()

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        request_id: RequestId,
        trace: Traceparent,
        deadline_s: float,
        choice: int = 0,
        cut_off: Callable[[BatonError], None] | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        """One request, from the client's call to its last token. Closing the iterator frees it on every node.

        `choice` is the number of this answer among those to one question: other noise from the same seed. `cut_off` is
        called once the client has left too much unread; it is to close the iterator.
        Raises BatonError: what is wrong with the request, or why it could not be run.
        """
        began_s = self._loop.time()
        job: Job | None = None
        observed = self._observer.received(began_s)
        self.requests += 1
        admitted = self.requests <= self.config.requests_max
        try:
            if not admitted:
                raise self._full()
            job = await self._intake.job(
                request, request_id=request_id, trace=trace, deadline_s=deadline_s, choice=choice
            )
            job.observed = observed
            if cut_off is not None:
                job.on_put = unread_limit(self.config, self._loop, observed, _noting(job, cut_off), request_id)
            yield started_event(job)
            text = self._intake.answer_text(job.checked)
            async with aclosing(self._tokens(job)) as batches:
                async for first_index, ids, logprobs in batches:
                    taken, new = text.push(ids)
                    observed.tokens(self._loop.time(), taken)
                    yield tokens_event(first_index, ids[:taken], new, logprobs[:taken])
                    if text.found:
                        break
            rest = text.flush()
            if rest:
                yield tokens_event(text.tokens, [], rest, [])
            if text.found:
                job.finish = common_pb2.FINISH_REASON_STOP
            job.stats.output_tokens = text.tokens
            finished = finished_event(job)
            observed.finished(job.finish, job.stats)
            yield finished
        except BatonError as error:
            observed.failed(error.reason)
            self._log.failed(error, request_id=request_id, job=job, began_s=began_s)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._ended_from_outside(job, observed, request_id=request_id, began_s=began_s, deadline_s=deadline_s)
            raise
        finally:
            observed.ended()
            if job is not None:
                job.on_put = job.cut_off = None  # they refer to the job
            self.requests -= 1
            if admitted:
                self._ended.left(1, self._loop.time())

    def _ended_from_outside(
        self, job: Job | None, observed: ObservedRequest, *, request_id: RequestId, began_s: float, deadline_s: float
    ) -> None:
        """The client has left, which is nobody's error, or whoever calls has ended it for a reason that the client is
        told: that goes to log and metrics."""
        if job is not None and job.cut_off is not None:
            self._log.failed(job.cut_off, request_id=request_id, job=job, began_s=began_s)
            return
        unfinished = job is None or job.finish == common_pb2.FINISH_REASON_UNSPECIFIED
        if unfinished and self._loop.time() >= deadline_s - DEADLINE_MARGIN_S:
            late = BatonError(Reason.DEADLINE, "The request's deadline has passed.")
            observed.failed(late.reason)
            self._log.failed(late, request_id=request_id, job=job, began_s=began_s)

    def _full(self) -> BatonError:
        return BatonError(
            Reason.TOO_MANY_CALLS,
            f"This router has {self.config.requests_max} requests already, the limit.",
            retry_after_ms=retry_after_ms(
                wait_s(ROOM_SHARE * self.config.requests_max, self._ended.per_s(self._loop.time())),
                ms_min=self.config.placement_retry_ms,
                spread=self._rng.random(),
            ),
        )

    async def _tokens(self, job: Job) -> AsyncGenerator[TokenPart, None]:
        """The answer's tokens in order, each index once, from as many attempts as it takes, one at a time."""
        looks = rounds = 0
        for number in range(1 << 30):
            job.attempts = number + 1
            key = RequestKey(request=job.id, attempt=Attempt(number))
            attempt = Try(inbox=Inbox(key=key, first_index=len(job.output)))
            try:
                async with aclosing(self._attempt(job, attempt)) as batches:
                    async for batch in batches:
                        yield batch
                return
            except BatonError as error:
                error_reason = error.reason
                verdict = job.retries.judge(
                    error,
                    granted=attempt.taken,
                    now_s=self._loop.time(),
                    queued_s=attempt.queued_s,
                    lost_before=attempt.inbox.never_reached,
                )
                if not looks or verdict is Verdict.RESUME:
                    self._log.tried_again(verdict, error, job, attempt=number)
            if verdict is Verdict.RESUME:
                looks = rounds = 0
                job.stats.resumptions += 1
                job.observed.resumed()
                corrupt = error_reason is Reason.DATA_CORRUPT
                if attempt.subscription is not None and (attempt.inbox.out_of_reach or corrupt):
                    job.avoid_decode.add(attempt.subscription.incarnation)
                await asyncio.sleep(self._pace.take_turn(self._loop.time()))
            else:
                await self._pause(rounds, resumed=bool(job.output))
                looks += 1
                rounds += not (error_reason in GONE and self._prefill_nodes.untried(job))

    async def _pause(self, rounds: int, *, resumed: bool = False) -> None:
        retry_ms = self.config.placement_retry_ms
        await asyncio.sleep(pause_ms(retry_ms, rounds, resumed=resumed, spread=self._rng.random()) / 1000)

    async def _attempt(self, job: Job, attempt: Try) -> AsyncGenerator[TokenPart, None]:
        """One attempt: prefill call and decode stream both fill the inbox; whatever happens, both let go at the end."""
        inbox = attempt.inbox
        inbox.on_put = job.on_put
        self._inboxes[inbox.key] = inbox
        prefilling = self._loop.create_task(self._prefill_calls.run(job, attempt), name=f"prefill-{job.id}")
        given = 0
        try:
            while inbox.finish is None or given < len(inbox.tokens):
                new = inbox.tokens[given:]
                if new:
                    job.token_times_s += [self._loop.time()] * len(new)
                    job.output += new
                    inbox.writing_s = self._loop.time()
                    yield inbox.first_index + given, new, inbox.logprobs[given : given + len(new)]
                    given += len(new)
                    inbox.taken, inbox.writing_s = given, None
                elif inbox.error is not None:
                    if not await self._goes_on(attempt, inbox.error):
                        raise inbox.error
                else:
                    await inbox.news.wait()
                    inbox.news.clear()
            job.finish = inbox.finish
            await asyncio.wait([prefilling], timeout=HANDED_OFF_MS_MAX / 1000)
        finally:
            prefilling.cancel()
            del self._inboxes[inbox.key]
            inbox.error = None  # or each would refer to the other, by way of the frames in its traceback
            if attempt.subscription is not None:
                self._streams.let_go(attempt.subscription, inbox)

    async def _goes_on(self, attempt: Try, error: BatonError) -> bool:
        """Something of the attempt has failed. Whether it goes on, as the decode node has committed it all the same.

        If not, the decode node never runs the attempt, or its tokens are not taken.
        """
        inbox, subscription = attempt.inbox, attempt.subscription
        if subscription is None or subscription.lost or inbox.given_up or error.reason not in RESUMABLE:
            return False
        if attempt.resolved == RESOLVES_MAX:
            return False
        attempt.resolved += 1
        goes_on = await self._streams.has_committed(subscription, inbox.key)
        if inbox.finish is not None:
            return True  # the rest of the answer has come meanwhile
        if not goes_on or inbox.given_up:
            return False
        log.info("committed all the same", request=inbox.key.request, node=subscription.name, why=error.message)
        inbox.go_on()
        subscription.add(inbox)
        return True

    # Small helpers.

    def refused(self, error: BatonError, *, door: str, request_id: RequestId | None = None) -> None:
        """A client is told this at the `door`, before there is a request: the log has it too."""
        self._log.refused(error, door=door, request_id=request_id)

    def upkeep(self) -> None:
        """Called every second."""
        self._log.upkeep()
        self._repeats.upkeep()

    def debug_state(self) -> RouterState:
        return RouterState(inboxes=dict(self._inboxes), streams=self._streams.subscriptions)

    async def close(self) -> None:
        await self._streams.close()
        await self._tasks.drain(self.config.stop_grace_ms)
        await self._tasks.cancel()
        self._log.close()
        self._repeats.close()

    def follow_directory(self, records: Sequence[NodeRecord]) -> None:
        """New load reports; streams and channels to processes that are gone and serve nothing are dropped."""
        endpoints = self._prefill_nodes.follow()
        self._pace.routers = max(1, sum(record.role is Role.ROUTER for record in records))
        for endpoint in self._prefill_calls.forget(endpoints):
            self._tasks.spawn(self._drop_channel(endpoint))
        self._streams.follow(records)
        self._regions.look(records)
        self._records = records

    async def _drop_channel(self, endpoint: str) -> None:
        """Unless it is in use: a mixed node has prefill calls and a stream at one endpoint."""
        if not self._streams.use(endpoint) and not self._prefill_calls.use(endpoint):
            await self._channels.drop(endpoint)

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        return self._prefill_nodes.model()

    def tokens_max(self) -> int:
        """What prompt and answer may have together on the nodes that are there. Raises BatonError NO_PREFILL_NODE."""
        return tokens_max(self._records, self.model())


def _noting(job: Job, cut_off: Callable[[BatonError], None]) -> Callable[[BatonError], None]:
    def cut(error: BatonError) -> None:
        job.cut_off = error
        cut_off(error)

    return cut
