"""Life of a request in this node: `RouterNode.generate`. `_attempt` is one try at it on one prefill and decode node.

`Intake` first checks the request and makes a job of it. Tokens reach the client from the attempt's inbox, which the
prefill call (first token; `PrefillCalls`) and the decode node's stream (all of them; `DecodeStreams`) fill; each index
is taken once. A client that does not read is cut off before its unread tokens take room from others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType

from batonpb import common_pb2, inference_pb2

from baton.clock import Clock
from baton.errors import BatonError, Reason, bad_field
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.retry_time import ROOM_SHARE, LeaveRate, retry_after_ms, wait_s
from baton.rpc import Channels
from baton.tasks import Tasks
from baton.tracing import Traceparent, new_request_id
from baton.wire import ModelInfo, NodeRecord, Role
from engine.model_config import SamplingDefaults
from router.chat import ChatEncoder
from router.config import RouterConfig
from router.decode_streams import DecodeStreams, DecodeSubscription, Inbox
from router.job import Job, RequestLog, TokenPart, Try, finished_event, started_event, tokens_event
from router.observer import ObservedRequest, RequestObserver
from router.placement import RegionWatch, answer_tokens, tokens_max
from router.prefill_nodes import PrefillCalls, PrefillNodes
from router.request import NEUTRAL, CheckedRequest, check_request
from router.retries import GONE, RESOLVES_MAX, RESUMABLE, ResumptionPace, Retries, Verdict, pause_ms
from router.text import AnswerText, StopStrings, TextCodec

log = get_log("router")


def slow_client(unread: int) -> BatonError:
    return BatonError(
        Reason.SLOW_CLIENT,
        f"The client has left {unread} tokens unread, more than are kept for it (client_tokens_unread_max); the "
        "request was cancelled. Read faster, or ask for fewer tokens at a time.",
        metadata={"unread": str(unread)},
    )


def unread_limit(
    config: RouterConfig,
    loop: asyncio.AbstractEventLoop,
    observed: ObservedRequest,
    cut_off: Callable[[BatonError], None],
    request_id: RequestId,
) -> Callable[[Inbox], None]:
    """What looks at an inbox each time that something was put into it, and cuts its client off where it does not read.

    Many tokens may come at once for a client that reads, so that it must have left some for a while, too.
    """

    def look(inbox: Inbox) -> None:
        if inbox.unread <= config.client_tokens_unread_max or inbox.writing_s is None:
            return
        if (loop.time() - inbox.writing_s) * 1000 > config.client_stall_ms:
            error = slow_client(inbox.unread)
            observed.failed(error.reason)
            log.warning("client cut off", request=request_id, key=inbox.key.request, unread=inbox.unread)
            cut_off(error)

    return look


class ClientGuard:
    """Around everything that writes to one client: `cut_off` ends it, even in a write that waits for the client.

    Raises the error given to `cut_off` at its end. One event loop; for one task.
    """

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._error: BatonError | None = None
        self._over = False

    def cut_off(self, error: BatonError) -> None:
        """The first call counts; nothing happens once the block is over."""
        if self._error is None and not self._over:
            self._error = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> ClientGuard:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            told, self._error = self._error, None
            assert told is not None
            try:
                raise told from None
            finally:
                del told  # or it would refer to itself, by this frame in its traceback


def not_taken() -> BatonError:
    """What a router that drains says at its doors."""
    return BatonError(Reason.NODE_DRAINING, "This router takes no new requests.", retry_after_ms=1_000)


class Intake:
    """Lives on the router's loop."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        prefill_nodes: PrefillNodes,
        codec: TextCodec | None,
        chats: ChatEncoder | None,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        sampling_defaults: SamplingDefaults,
        records: Callable[[], Sequence[NodeRecord]],
        check_known: Callable[[], None],
        pause: Callable[[int], Awaitable[None]],
    ) -> None:
        """`sampling_defaults` are the model's, `records` all known nodes. `check_known` raises BatonError while too
        little is known of them. `pause(looks)` comes between two looks for a node that is ready."""
        self._config = config
        self._prefill_nodes = prefill_nodes
        self._codec = codec
        self._chats = chats or ChatEncoder(codec=codec, template=None, chars_max=config.prompt_chars_max)
        self._loop = loop
        self._rng = rng
        self._sampling_defaults = sampling_defaults
        self._records = records
        self._check_known = check_known
        self._pause = pause

    async def job(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        request_id: RequestId,
        trace: Traceparent,
        deadline_s: float,
        choice: int,
    ) -> Job:
        """Check the request, against the model of a cluster that may still be coming up. Raises BatonError."""
        self._check_known()
        give_up_s = self._loop.time() + self._config.placement_wait_ms_max / 1000
        for looks in range(1 << 30):
            if self._prefill_nodes.ready() or self._loop.time() >= give_up_s:
                break
            await self._pause(looks)
        encoded = await self._encode(request)
        model = self._prefill_nodes.model()
        checked = check_request(
            request,
            model=model,
            encode=(lambda _text: encoded) if self._codec is not None else None,
            chat=encoded,
            answer_tokens=lambda prompt_tokens: self._answer_tokens(prompt_tokens, model),
            rng=self._rng,
            defaults=self._sampling_defaults,
            choice=choice,
        )
        return Job(
            id=new_request_id(self._rng),
            client_id=request_id,
            trace=trace,
            checked=checked,
            began_s=self._loop.time(),
            deadline_s=deadline_s,
            retries=Retries(config=self._config.retries, give_up_s=give_up_s),
            stats=inference_pb2.RequestStats(prompt_tokens=len(checked.prompt)),
        )

    def _answer_tokens(self, prompt_tokens: int, model: ModelInfo) -> int:
        default = self._config.max_tokens_default
        return answer_tokens(prompt_tokens, self._records(), model) if default is None else default

    def answer_text(self, checked: CheckedRequest) -> AnswerText:
        """What the tokens of its answer go through."""
        return AnswerText(
            self._codec.stream() if self._codec is not None else None,
            StopStrings(checked.stop, include=checked.include_stop),
            min_tokens=checked.sampling.min_tokens,
        )

    async def _encode(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        """Token ids of a text or a chat, off the loop: a long one takes seconds, and others' tokens must flow."""
        if request.WhichOneof("prompt") == "chat":
            return await asyncio.to_thread(self._chats.encode_proto, request.chat)
        if self._codec is None or request.WhichOneof("prompt") != "text":
            return ()
        if len(request.text) > self._config.prompt_chars_max:
            raise bad_field(
                "text",
                f"The prompt has {len(request.text)} characters; at most {self._config.prompt_chars_max} are taken.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return await asyncio.to_thread(self._codec.encode, request.text)


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
            clock=Clock(),
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
