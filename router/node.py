"""Life of a request in this node: `RouterNode.generate`. `_attempt` is one try at it on one prefill and decode node.

Tokens reach the client from the attempt's inbox, which the prefill call (first token) and the decode node's stream (all
of them) fill; each index is taken once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from batonpb import common_pb2, inference_pb2, prefill_pb2, prefill_pb2_grpc

from baton.clock import SystemClock
from baton.errors import BatonError, Reason, bad_field
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.retry_time import ROOM_SHARE, LeaveRate, retry_after_ms, wait_s
from baton.rpc_client import Channels, begun, rpc_errors
from baton.tasks import Tasks
from baton.tracing import Traceparent, call_metadata, new_request_id
from baton.wire import ModelInfo, NodeRecord, Role
from router.chat import ChatEncoder
from router.config import RouterConfig
from router.decode_streams import DecodeStreams
from router.job import Job, TokenPart, Try, finished_event, started_event, tokens_event
from router.observer import RequestObserver
from router.prefill_nodes import PrefillNodes
from router.regions import RegionWatch
from router.request import CheckedRequest, check_request
from router.request_log import RequestLog
from router.retries import GONE, RESUMABLE, ResumptionPace, Retries, Verdict, pause_ms
from router.slow_client import unread_limit
from router.stop_strings import StopStrings
from router.subscriptions import Inbox
from router.text import AnswerText, TextCodec

log = get_log("router")


DEADLINE_MARGIN_S = 0.05
"""A call may be ended a little before what we hold for its deadline."""


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
        observer: RequestObserver | None = None,
        check_known: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_known` raises BatonError while the nodes are not known well enough to place a new request."""
        self.config = config
        self.requests = 0
        self._incarnation = incarnation
        self._prefill_nodes = PrefillNodes(prefill_nodes, blocks_max=config.prefix_blocks_max)
        self._channels = channels
        self._codec = codec
        self._chats = chats or ChatEncoder(codec=codec, template=None, chars_max=config.prompt_chars_max)
        self._loop = loop
        self._rng = rng
        self._check_known = check_known
        self._observer = observer or RequestObserver()
        self._inboxes: dict[RequestKey, Inbox] = {}
        self._pace = ResumptionPace(config.retries, now_s=loop.time(), rng=rng)
        self._calls: Counter[str] = Counter()
        """Running prefill calls by endpoint, endpoints without one included."""
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
        self._ended = LeaveRate()
        self._regions = RegionWatch()

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
            job = await self._take_in(request, request_id, trace, deadline_s, choice)
            job.observed = observed
            if cut_off is not None:
                job.on_put = unread_limit(self.config, self._loop, observed, _noting(job, cut_off), request_id)
            yield started_event(job)
            text = self._answer_text(job.checked)
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
            # The client has left, or whoever calls has ended it for a reason that the client is told.
            told = job.cut_off if job is not None else None
            unfinished = job is None or job.finish == common_pb2.FINISH_REASON_UNSPECIFIED
            if told is None and unfinished and self._loop.time() >= deadline_s - DEADLINE_MARGIN_S:
                told = BatonError(Reason.DEADLINE, "The request's deadline has passed.")
            if told is not None:
                self._log.failed(told, request_id=request_id, job=job, began_s=began_s)
            raise
        finally:
            observed.ended()
            self.requests -= 1
            if admitted:
                self._ended.left(1, self._loop.time())

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

    def _answer_text(self, checked: CheckedRequest) -> AnswerText:
        return AnswerText(
            self._codec.stream() if self._codec is not None else None,
            StopStrings(checked.stop, include=checked.include_stop),
            min_tokens=checked.sampling.min_tokens,
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
        prefilling = self._loop.create_task(self._prefill(job, attempt), name=f"prefill-{job.id}")
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
                    await self._resolve(attempt, inbox.error)
                else:
                    await inbox.news.wait()
                    inbox.news.clear()
            job.finish = inbox.finish
            await asyncio.wait([prefilling], timeout=self.config.handed_off_ms_max / 1000)
        finally:
            prefilling.cancel()
            del self._inboxes[inbox.key]
            if attempt.subscription is not None:
                self._streams.let_go(attempt.subscription, inbox)

    async def _resolve(self, attempt: Try, error: BatonError) -> None:
        """Something of the attempt has failed. Where the decode node has committed it all the same, it goes on there.

        Raises `error` otherwise: the decode node never runs the attempt then, or its tokens are not taken.
        """
        inbox, subscription = attempt.inbox, attempt.subscription
        if subscription is None or subscription.lost or inbox.given_up or error.reason not in RESUMABLE:
            raise error
        if attempt.resolved == self.config.retries.resolves_max:
            raise error
        attempt.resolved += 1
        goes_on = await self._streams.has_committed(subscription, inbox.key)
        if inbox.finish is not None:
            return  # the rest of the answer has come meanwhile
        if not goes_on or inbox.given_up:
            raise error
        log.info("committed all the same", request=inbox.key.request, node=subscription.name, why=error.message)
        inbox.go_on()
        subscription.add(inbox)

    async def _prefill(self, job: Job, attempt: Try) -> None:
        """The call to one prefill node, from placement to the commit. Its failure is the attempt's."""
        inbox = attempt.inbox
        try:
            record, placed = self._prefill_nodes.place(job, inbox.key, silent=self._streams.silent())
            job.stats.prefill_node = record.name
            job.nodes[record.name] = None
            self._calls[record.endpoint] += 1
            try:
                stub = prefill_pb2_grpc.PrefillStub(self._channels.get(record.endpoint))
                with rpc_errors(record.name):
                    events = stub.Prefill(
                        self._prefill_request(job, inbox.key, record),
                        timeout=job.deadline_s - self._loop.time(),
                        metadata=call_metadata(request_id=job.client_id, traceparent=job.trace.child(self._rng)),
                    )
                    if await begun(events):  # the node says that it has it, before it is its turn
                        attempt.queued_s = self._loop.time()
                    async for event in events:
                        self._take(job, attempt, event)
            except BatonError as error:
                if error.reason is Reason.DATA_CORRUPT:
                    job.observed.corrupt(record.name, job.stats.decode_node, error.metadata.get("transport", ""))
                told = self._prefill_nodes.failed(job, record, error)
                if told is not error:
                    raise told from error
                raise
            finally:
                self._calls[record.endpoint] -= 1
                placed()
        except BatonError as error:
            inbox.fail(error)
        except Exception:
            # A bug of ours ends this request, and no other.
            log.exception("prefill call broke off", request=job.id)
            inbox.fail(BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details."))

    def _take(self, job: Job, attempt: Try, event: prefill_pb2.PrefillEvent) -> None:
        stats, inbox = job.stats, attempt.inbox
        kind = event.WhichOneof("event")
        if kind == "granted":
            attempt.granted = True
            granted = event.granted
            if granted.decode_node and attempt.subscription is None:
                attempt.subscription = self._streams.get(
                    granted.decode_node, granted.decode_endpoint, Incarnation(granted.decode_incarnation)
                )
                attempt.subscription.users += 1
                inbox.lost_before = attempt.subscription.out_of_reach
                attempt.subscription.add(inbox)
            stats.decode_node = event.granted.decode_node
            if granted.decode_node:
                job.nodes[granted.decode_node] = None
        elif kind == "first_token":  # behind `granted`, always
            stats.prompt_tokens_cached = min(event.first_token.prompt_tokens_cached, stats.prompt_tokens)
            has_logprobs = event.first_token.HasField("logprobs")
            inbox.put(
                inbox.first_index, [event.first_token.token], [event.first_token.logprobs] if has_logprobs else []
            )
            if event.first_token.HasField("finish"):
                stats.decode_node = ""
                inbox.end(event.first_token.finish)
        elif kind == "handed_off":
            done = event.handed_off
            stats.transport = done.transport
            stats.blocks_written, stats.blocks_skipped = done.blocks_written, done.blocks_skipped
            stats.bytes_written = done.bytes_written
            stats.prompt_tokens_skipped = min(done.blocks_skipped * job.block_size, stats.prompt_tokens)
            stats.handoff_exposed_ms = done.handoff_exposed_ms

    # Small helpers.

    def upkeep(self) -> None:
        """Called every second."""
        self._log.upkeep()
        self._repeats.upkeep()

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
        for endpoint in self._calls.keys() - endpoints:
            if self._calls[endpoint] == 0:
                del self._calls[endpoint]
                self._tasks.spawn(self._drop_channel(endpoint))
        self._streams.follow(records)
        self._regions.look(records)

    async def _drop_channel(self, endpoint: str) -> None:
        """Unless it is in use: a mixed node has prefill calls and a stream at one endpoint."""
        if not self._streams.use(endpoint) and self._calls[endpoint] == 0:
            await self._channels.drop(endpoint)

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        return self._prefill_nodes.model()

    async def _encode(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        """Token ids of a text or a chat, off the loop: a long one takes seconds, and others' tokens must flow."""
        if request.WhichOneof("prompt") == "chat":
            return await asyncio.to_thread(self._chats.encode_proto, request.chat)
        if self._codec is None or request.WhichOneof("prompt") != "text":
            return ()
        if len(request.text) > self.config.prompt_chars_max:
            raise bad_field(
                "text",
                f"The prompt has {len(request.text)} characters; at most {self.config.prompt_chars_max} are taken.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return await asyncio.to_thread(self._codec.encode, request.text)

    async def _take_in(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: RequestId,
        trace: Traceparent,
        deadline_s: float,
        choice: int,
    ) -> Job:
        """Check the request, against the model of a cluster that may still be coming up."""
        self._check_known()
        give_up_s = self._loop.time() + self.config.placement_wait_ms_max / 1000
        for attempt in range(1 << 30):
            if self._prefill_nodes.ready() or self._loop.time() >= give_up_s:
                break
            await self._pause(attempt)
        return self._check(request, await self._encode(request), request_id, trace, deadline_s, give_up_s, choice)

    def _check(
        self,
        request: inference_pb2.GenerateRequest,
        encoded: Sequence[int],
        request_id: RequestId,
        trace: Traceparent,
        deadline_s: float,
        give_up_s: float,
        choice: int,
    ) -> Job:
        checked = check_request(
            request,
            model=self.model(),
            encode=(lambda _text: encoded) if self._codec is not None else None,
            chat=encoded,
            max_tokens_default=self.config.max_tokens_default,
            rng=self._rng,
            choice=choice,
        )
        return Job(
            id=new_request_id(self._rng),
            client_id=request_id,
            trace=trace,
            checked=checked,
            began_s=self._loop.time(),
            deadline_s=deadline_s,
            retries=Retries(config=self.config.retries, give_up_s=give_up_s),
            stats=inference_pb2.RequestStats(prompt_tokens=len(checked.prompt)),
        )

    def _prefill_request(self, job: Job, key: RequestKey, record: NodeRecord) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            header=common_pb2.Header(sender=self._incarnation, receiver=record.incarnation),
            key=common_pb2.RequestKey(request=key.request, attempt=key.attempt),
            prompt=job.checked.prompt,
            output=job.output,
            sampling=job.checked.sampling,
            router=self._incarnation,
            cache_salt=job.checked.cache_salt,
            avoid_decode=job.avoid_decode | self._streams.out_of_reach(),
        )


def _noting(job: Job, cut_off: Callable[[BatonError], None]) -> Callable[[BatonError], None]:
    def cut(error: BatonError) -> None:
        job.cut_off = error
        cut_off(error)

    return cut
