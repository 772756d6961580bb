"""Life of a request in this node: `RouterNode.run`. `_attempt` is one try at it on one prefill and decode node.

Tokens reach the client from the attempt's inbox, which the prefill call (first token; `PrefillCalls`) and the decode
node's stream (all of them; `DecodeStreams`) fill; each index is taken once. They go on to the client's sink in the same
call (`Job`), and the request's own task waits for the attempt's end only. A client that does not read is cut off before
its unread tokens take room from others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from batonpb import common_pb2, inference_pb2, resume_pb2

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.lifecycle import Lifecycle, Readiness
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.retry_time import whole_seconds_ms
from baton.rpc import Channels
from baton.tasks import Tasks
from baton.tracing import Traceparent, new_request_id
from baton.wire import ModelInfo, NodeRecord, Role
from cachestore.holder_index import HolderIndex
from engine.model_config import SamplingDefaults
from router.answers import AnswerSink, Collected
from router.byte_shares import TextOwner
from router.config import RouterConfig
from router.decode_streams import DecodeStreams, DecodeSubscription
from router.holdings_reader import HoldingsReader
from router.job import TOKENS_AT_ONCE_MAX, Inbox, Job, Parting, foreign_error, taken_over_error
from router.line import Place, Turns, priority_to_proto
from router.placement import RegionWatch, answer_tokens, tokens_max
from router.prefill_nodes import NOT_READY_RETRY_MS, PrefillCalls, PrefillNodes
from router.prompts import PromptEncoder
from router.request import (
    NEUTRAL,
    UINT32_MAX,
    CheckedRequest,
    ClientCall,
    ObservedRequest,
    check_request,
    text_of,
)
from router.request_log import RequestLog
from router.resume import (
    REQUEST_ID_BYTES,
    SECRET_BYTES,
    Resume,
    ResumeToken,
    Unseen,
    tag,
)
from router.resume import Place as ResumePlace
from router.retries import ASK_ANOTHER, GONE, RESOLVES_MAX, RESUMABLE, ResumptionPace, Retries, Verdict, pause_ms
from router.text import AnswerText
from router.text_jobs import encode_prompt
from router.text_workers import TextWorkers
from router.waiting import WaitingLine

log = get_log("router")

CUT_OFF: Final = frozenset({Reason.SLOW_CLIENT, Reason.TAKEN_OVER, Reason.CANCELLED})
"""Reasons of errors for clients that may not read: such an error does not wait behind what they have not read."""
HANDED_OFF_MS_MAX: Final = 1_000
"""How long a finished answer waits for the prefill node to confirm its handoff."""
"""Between two looks whether the former connection of a client that comes back has ended."""
FIRST_NEWS_MS_MAX: Final = 1_000
"""How long a client that attaches waits for the first word of the directory: this router has just started."""
DEADLINE_MARGIN_S: Final = 0.05
"""A call may be ended a little before what we hold for its deadline."""


class RouterNode:
    """State of one router; control thread only."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        incarnation: Incarnation,
        lifecycle: Readiness,
        channels: Channels,
        prompts: PromptEncoder,
        clock: Clock,
        rng: random.Random,
        token_bytes: Callable[[int], bytes],
        sampling_defaults: SamplingDefaults = NEUTRAL,
        received: Callable[[float], ObservedRequest] | None = None,
        check_known: Callable[[], None] = lambda: None,
    ) -> None:
        """`sampling_defaults` are the model's. `received` is called with the time of each request that comes in.
        `check_known` raises BatonError while the nodes are not known well enough to place a new request. `token_bytes`
        makes secrets."""
        self.config = config
        self.prompts = prompts
        self.rng = rng
        self.requests = 0
        self._loop = loop = asyncio.get_running_loop()
        self.request_log = RequestLog(loop.time)
        self._lifecycle = lifecycle
        self._channels = channels
        self._sampling_defaults = sampling_defaults
        self._received = received or (lambda _now_s: ObservedRequest())
        self._check_known = check_known
        self.token_bytes = token_bytes
        self._records: Sequence[NodeRecord] = ()
        self._first_news = asyncio.Event()
        self._resumable: dict[RequestId, Job] = {}
        """Resumable requests that this router serves."""
        self._attaches: WeakValueDictionary[RequestId, asyncio.Lock] = WeakValueDictionary()
        """By the request that is taken over."""
        self._pace = ResumptionPace(config.retries, now_s=loop.time(), rng=rng)
        self._tasks = Tasks(loop, log)
        self._repeats = RepeatLog(log, loop.time, key="node")
        self.streams = DecodeStreams(
            config=config, own=incarnation, channels=channels, tasks=self._tasks, clock=clock, repeats=self._repeats
        )
        index = HolderIndex()
        self.holdings = HoldingsReader(index, own=incarnation, channels=channels, clock=clock, repeats=self._repeats)
        self._prefill_nodes = PrefillNodes(index, loop.time)
        self._line = WaitingLine(config, rng)
        self._prefill_calls = PrefillCalls(self._prefill_nodes, self.streams, rng, placed=self._line.placed)
        self.texts = TextWorkers(prompts, rng.random)
        self._regions = RegionWatch()
        self._turns = Turns(loop.call_soon, loop.time)
        """Shared by what goes to clients."""

    def resumable(self, digest: int) -> Resume:
        """For a new call that its client may go on with; `digest` is that of its request."""
        return Resume(secret=self.token_bytes(SECRET_BYTES), seed=self.rng.getrandbits(64), digest=digest)

    def _new_id(self) -> RequestId:
        """Nobody can foretell it from those that clients have seen: a node takes the word of who knows it that a
        request is over which it does not have yet."""
        return RequestId(self.token_bytes(REQUEST_ID_BYTES).hex())

    async def run(self, request: inference_pb2.GenerateRequest | None, call: ClientCall, sink: AnswerSink) -> None:
        """One request, from the client's call to its last token. Cancelling it frees it on every node, or leaves a
        resumable one to other routers. A call with a place goes on behind it, with the answer from wherever it is, or
        computed again; `request` is None where the client has not repeated it.

        Raises BatonError: what is wrong with the request, or why it could not be run.
        """
        began_s = self._loop.time()
        job: Job | None = None
        place: Place | None = None
        observed = self._received(began_s)
        self.requests += 1
        try:
            comes_back = call.resume is not None and call.resume.place is not None
            size_bytes = 0 if request is None else request.ByteSize()
            place = self._line.enter(call.priority, size_bytes, comes_back=comes_back)
            job = await self._begin(request, call, observed, place, sink)
            try:
                async with job.scope:
                    if not job.taken_over:
                        await call.take_prompt(len(job.checked.prompt))
                    job.start()
                    await self._attempts(job)
                    job.end()
            except TimeoutError:
                if job.cut_off_with is None:
                    raise
                raise job.cut_off_with from None
        except BatonError as error:
            observed.failed(error.reason)
            self.request_log.failed(error, call=call, job=job, began_s=began_s)
            raise
        except asyncio.CancelledError:
            # The client has left, which is nobody's error, or its deadline has passed, which the caller tells it.
            if (outside := self._deadline_error(job, call)) is not None:
                observed.failed(outside.reason)
                self.request_log.failed(outside, call=call, job=job, began_s=began_s)
            raise
        finally:
            observed.ended()
            sink.on_open = None
            if job is not None:
                self._let_go(job)
                self._forget_id(job)
                job.over()
            self.requests -= 1
            if place is not None:
                self._line.leave(place)

    async def _begin(
        self,
        request: inference_pb2.GenerateRequest | None,
        call: ClientCall,
        observed: ObservedRequest,
        place: Place,
        sink: AnswerSink,
    ) -> Job:
        """Take over the attempt that the client has a part of, or check the request. Raises BatonError."""
        resume, inbox = call.resume, None
        attaches = resume is not None and resume.place is not None
        try:
            if attaches and (taken := await self._take_over(call)) is not None:
                inbox, state = taken
                call = replace(call, id=RequestId(state.call))
                checked, prompt_tokens = text_of(state), state.prompt_tokens
            else:
                checked = await self._check(request, call)
                prompt_tokens = len(checked.prompt)
        except BatonError:
            if attaches:
                observed.attached("refused")
            raise
        job = Job(
            id=self._new_id() if inbox is None else inbox.key.request,
            call=call,
            request=request,
            checked=checked,
            began_s=self._loop.time(),
            observed=observed,
            place=place,
            retries=Retries(config=self.config.retries, search_ms_max=self.config.placement_wait_ms_max),
            stats=inference_pb2.RequestStats(prompt_tokens=prompt_tokens, priority=priority_to_proto(call.priority)),
            sink=sink,
            text=AnswerText(self.prompts.codec, checked, call.shown),
            config=self.config,
            turns=self._turns,
            now_s=self._loop.time,
            inbox=inbox,
            taken_over=inbox is not None,
        )
        if resume is not None:
            job.unseen = Unseen(resume.place or ResumePlace())
            self._resumable[job.id] = job
        if inbox is not None:
            call.came_back(inbox.key.request, inbox.epoch)
            self._line.skip(place)
            if (stream := self.streams.find(inbox.decode)) is not None:
                job.stats.decode_node = stream.name
                job.nodes[stream.name] = None
        if attaches:
            observed.attached("taken" if job.taken_over else "computed_again")
        return job

    async def _take_over(self, call: ClientCall) -> tuple[Inbox, resume_pb2.ResumeState] | None:
        """The attempt that a client which attaches has a part of, wherever it is, and what was left with it. None: no
        node has it, or none answers. Raises BatonError CANCELLED or PERMISSION_DENIED."""
        resume = call.resume
        assert resume is not None
        assert resume.place is not None
        if not resume.place.request:
            return None  # its answer had not begun
        own_tag = resume.tag(call.key_name)
        # A client may come back twice at once. The later call finds what the earlier one has taken over, and ends that.
        async with self._attaches.setdefault(resume.place.request, asyncio.Lock()):
            key, stream = await self._find(resume.place, own_tag, taken_over_error())
            if stream is None:
                return None
            if key.request not in self._resumable and key in self.streams.inboxes:
                raise foreign_error()  # of a request here that nobody may take over
            inbox = Inbox(key=key, told=True)
            state = await stream.take_over(inbox, own_tag, left_s=call.deadline_s - self._loop.time())
            return None if state is None else (inbox, state)

    async def _find(
        self, place: ResumePlace, own_tag: bytes, error: BatonError
    ) -> tuple[RequestKey, DecodeSubscription | None]:
        """The attempt that a client has a part of, and its node, if there is one that is known. Where this router
        serves it, its client there gets `error`. Raises BatonError PERMISSION_DENIED."""
        key = RequestKey(request=place.request, attempt=place.attempt)
        if (job := self._resumable.get(place.request)) is not None:
            if not job.is_tagged(own_tag):
                raise foreign_error()
            job.cut_off(error)
            return (key, None) if job.inbox is None else (job.inbox.key, self.streams.find(job.inbox.decode))
        if not place.decode:
            return key, None
        if not self._records:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_NEWS_MS_MAX / 1000):
                    await self._first_news.wait()
        return key, self.streams.find(place.decode)

    def cut_former(self, token: ResumeToken, key_name: str) -> bool:
        """A client comes back while this router still serves its former connection: end that. Whether there was one."""
        own_tag = tag(token.secret, key_name)
        jobs = [job for place in token.places if (job := self._resumable.get(place.request)) is not None]
        found = [job for job in jobs if job.is_tagged(own_tag)]
        for job in found:
            job.cut_off(taken_over_error())
        return bool(found)

    async def forget(
        self,
        token: ResumeToken,
        key_name: str | None,
        ended: Callable[[RequestId], None] = lambda _request: None,
    ) -> None:
        """The client has the whole answers, or wants no more of them. Idempotent. `ended` is called with each
        that has heard of it. Raises BatonError PERMISSION_DENIED, or PEER_UNREACHABLE where a node did not."""
        own_tag = tag(token.secret, key_name)
        await asyncio.gather(*(self._forget(place, own_tag, ended) for place in token.places if place.request))

    async def _forget(self, place: ResumePlace, own_tag: bytes, ended: Callable[[RequestId], None]) -> None:
        error = BatonError(Reason.CANCELLED, "The client has ended this request by another call.")
        # Not beside a call that takes it over: that would wait for tokens which nobody sends.
        async with self._attaches.setdefault(place.request, asyncio.Lock()):
            key, stream = await self._find(place, own_tag, error)
            if stream is not None:
                await stream.forget(key, own_tag)
                ended(place.request)

    async def _check(self, request: inference_pb2.GenerateRequest | None, call: ClientCall) -> CheckedRequest:
        """Check the request, against the model of a cluster that may still be coming up. Raises BatonError."""
        if request is None:
            raise BatonError(
                Reason.NOT_RESUMABLE,
                "No node has this answer any more, or none that has it can be reached. Repeat the request with the "
                "resume token (over HTTP by POST): it is computed again, and goes on behind what you have.",
            )
        self._check_known()
        give_up_s = self._loop.time() + self.config.placement_wait_ms_max / 1000
        for looks in range(1 << 30):
            if self._prefill_nodes.ready or self._loop.time() >= give_up_s:
                break
            await self._pause(looks, resumed=False)
        kind, resume = request.WhichOneof("prompt"), call.resume
        prompt: Sequence[int] = request.token_ids.ids  # copied once its length has been checked
        if kind in ("text", "chat"):
            raw = request.SerializeToString()
            owner = TextOwner(address=call.source, key=call.key_name)
            prompt = await self.texts.run(owner, encode_prompt, raw, call.special_tokens, self.context_len_max())
        said: Sequence[int] = ()
        if resume is not None:
            if not request.sampling.HasField("seed"):
                request.sampling.seed = resume.seed
            chat = resume.chat or kind == "chat"
            if not chat or call.special_tokens or not self.prompts.may_not_say(resume.said):
                said = resume.said
        model, limit = self.model(), self.config.max_tokens_default
        return check_request(
            request,
            model=model,
            prompt=prompt,
            has_tokenizer=self.prompts.codec is not None,
            answer_tokens=lambda tokens: answer_tokens(tokens, self._records, model) if limit is None else limit,
            rng=self.rng,
            defaults=self._sampling_defaults,
            choice=call.choice,
            key_salt=call.key_salt,
            said=said,
            names=self.config.served_model_name,
            source=call.source_number,
        )

    def _deadline_error(self, job: Job | None, call: ClientCall) -> BatonError | None:
        """Where a request that was cancelled has passed its deadline."""
        unfinished = job is None or job.finish == common_pb2.FINISH_REASON_UNSPECIFIED
        if unfinished and self._loop.time() >= call.deadline_s - DEADLINE_MARGIN_S:
            return BatonError(Reason.DEADLINE, "The request's deadline has passed.")
        return None

    async def _attempts(self, job: Job) -> None:
        """The answer's tokens in order, each index once, from as many attempts as it takes, one at a time."""
        looks = rounds = 0
        for number in range(1 << 30):
            job.attempts = number + 1
            if not job.taken_over:
                if await self._is_complete(job):
                    return
                if not number:
                    await self._first(job)
                key = RequestKey(request=job.id, attempt=Attempt(number))
                job.inbox = Inbox(key=key, first_index=len(job.output))
            inbox = job.inbox
            assert inbox is not None
            try:
                await self._attempt(job, inbox)
                return
            except BatonError as error:
                error_reason = error.reason
                verdict = job.retries.judge(
                    error,
                    granted=inbox.taken,
                    now_s=self._loop.time(),
                    queued_s=inbox.queued_s,
                    lost_before=inbox.never_reached,
                    in_answer=bool(job.output),
                )
                if not looks or verdict is Verdict.RESUME:
                    self.request_log.tried_again(verdict, error, job, attempt=number)
            if verdict is Verdict.RESUME:
                looks = rounds = 0
                job.stats.resumptions += 1
                job.observed.resumed()
                corrupt = error_reason is Reason.DATA_CORRUPT
                if inbox.decode and (inbox.out_of_reach or corrupt):
                    job.avoid_decode.add(inbox.decode)
                if job.taken_over:
                    await self._run_anew(job)
                await asyncio.sleep(self._pace.take_turn(self._loop.time()))
            elif verdict is Verdict.WAIT:
                looks += 1
                if not (error_reason in ASK_ANOTHER and self._prefill_nodes.untried(job)):
                    await self._line.again(job)
            else:
                self._line.searches(job.place)
                await self._pause(rounds, resumed=bool(job.output))
                looks += 1
                rounds += not (error_reason in GONE and self._prefill_nodes.untried(job))

    async def _is_complete(self, job: Job) -> bool:
        """Whether nothing of the answer is left to compute. What the client says that it has counts as output."""
        said = job.take_said()
        for start in range(0, len(said), TOKENS_AT_ONCE_MAX):
            ids = said[start : start + TOKENS_AT_ONCE_MAX]
            job.pass_on(len(job.output) - len(said) + start, ids, (), self._loop.time())
            if job.text_ended:
                return True
            await asyncio.sleep(0)
        finish = job.checked.finish_after(job.output)
        if finish is not None:
            job.finish = finish
        return finish is not None

    async def _first(self, job: Job) -> None:
        """Wait for the turn of the first attempt. Raises BatonError."""
        if job.output:
            self._line.skip(job.place)
            await asyncio.sleep(self._pace.take_turn(self._loop.time()))
        else:
            await self._line.first(job)

    async def _run_anew(self, job: Job) -> None:
        """The attempt that was taken over is lost: what follows is this router's own. Raises BatonError."""
        job.checked = await self._check(job.request, job.call)
        await job.call.take_prompt(len(job.checked.prompt))
        self._forget_id(job)
        job.id = self._new_id()  # the old one has tombstones
        self._resumable[job.id] = job
        job.taken_over = False

    def _forget_id(self, job: Job) -> None:
        """Unless a later call of its client has it by now."""
        if self._resumable.get(job.id) is job:
            del self._resumable[job.id]

    async def _pause(self, rounds: int, *, resumed: bool) -> None:
        retry_ms = self.config.placement_retry_ms
        await asyncio.sleep(pause_ms(retry_ms, rounds, resumed=resumed, spread=self.rng.random()) / 1000)

    async def _attempt(self, job: Job, inbox: Inbox) -> None:
        """One attempt: prefill call and decode stream both fill the inbox; whatever happens, both let go at the end."""
        inbox.on_put = job.came
        self.streams.inboxes[inbox.key] = inbox
        prefilling = None
        if job.taken_over:
            job.came()
        else:
            prefilling = self._loop.create_task(self._prefill_calls.run(job, inbox), name=f"prefill-{job.id}")
        try:
            while not job.text_ended and not (inbox.finish is not None and inbox.empty):
                if inbox.error is None or not inbox.empty:
                    await inbox.news.wait()
                    inbox.news.clear()
                elif not await self._goes_on(inbox, inbox.error):
                    raise inbox.error
            if not job.text_ended:
                assert inbox.finish is not None
                job.finish = inbox.finish
                if prefilling is not None and not prefilling.done():
                    await asyncio.wait([prefilling], timeout=HANDED_OFF_MS_MAX / 1000)
        finally:
            if prefilling is not None:
                prefilling.cancel()
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """The job's last attempt is over here. Idempotent."""
        inbox = job.inbox
        if inbox is None or inbox.over:
            return
        inbox.over = True
        parting = self._parting(job, inbox)
        self.streams.remove(inbox)
        # Or it would refer to the job, and to itself by way of the frames in the error's traceback.
        inbox.on_put = inbox.error = None
        if parting is Parting.LEAVE and inbox.finish is None:
            job.call.left(inbox.key.request, inbox.epoch)
        if (stream := self.streams.find(inbox.decode)) is not None:
            stream.let_go(inbox, parting)

    def _parting(self, job: Job, inbox: Inbox) -> Parting:
        """What the decode node is to do with the attempt. A client can come back only to one that it was told of."""
        if job.unseen is None:
            return Parting.DROP
        if job.cut_off_with is not None:
            wanted = job.cut_off_with.reason in (Reason.TAKEN_OVER, Reason.INTERNAL)
            return Parting.LEAVE if wanted and inbox.committed else Parting.DROP
        if inbox.error is not None and inbox.error.reason is Reason.TAKEN_OVER:
            return Parting.NOTHING
        if not (inbox.told and inbox.committed) or inbox.error is not None:
            return Parting.DROP
        if job.text_ended:
            return Parting.LEAVE_ENDED
        return Parting.DROP if self._deadline_error(job, job.call) is not None else Parting.LEAVE

    async def _goes_on(self, inbox: Inbox, error: BatonError) -> bool:
        """A part of the attempt has failed. Whether it goes on because the decode node has committed it.

        If not, the decode node never runs the attempt, or its tokens are not taken.
        """
        subscription = self.streams.find(inbox.decode)
        if subscription is None or subscription.lost or inbox.given_up or error.reason not in RESUMABLE:
            return False
        if inbox.resolved == RESOLVES_MAX:
            return False
        inbox.resolved += 1
        goes_on = await subscription.has_committed(inbox)
        if inbox.finish is not None:
            return True  # the rest of the answer has come meanwhile
        if not goes_on or inbox.given_up:
            return False
        log.info(
            "attempt goes on at its decode node", request=inbox.key.request, node=subscription.name, why=error.message
        )
        inbox.go_on()
        subscription.add(inbox)
        return True

    async def warm(self, prompt: Sequence[int], salt: str | None) -> None:
        """Compute a prompt under a salt, so that its nodes have it cached. Raises BatonError."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            # Two tokens: with one, no decode node would be asked.
            sampling=inference_pb2.Sampling(temperature=0, max_tokens=2, ignore_eos=True),
            cache_salt=salt,
        )
        call = ClientCall(
            id=new_request_id(self.rng),
            trace=Traceparent.new(self.rng, sampled=False),
            deadline_s=self._loop.time() + self.config.rpc.public_deadline_ms_default / 1e3,
        )
        await self.run(request, call, Collected())

    # What is around the requests.

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._line.waiting

    def upkeep(self) -> None:
        """Called every second."""
        self.request_log.upkeep()
        self._repeats.upkeep()
        self.holdings.upkeep()

    async def close(self) -> None:
        await self.texts.close()
        await self.holdings.close()
        await self.streams.close()
        await self._tasks.drain(self.config.stop_grace_ms)
        await self._tasks.cancel()
        self._line.close()
        self.request_log.close()
        self._repeats.close()

    def follow_directory(self, records: Sequence[NodeRecord]) -> None:
        """The nodes that are known now, with new load reports; streams and channels to processes that are gone and
        serve nothing are dropped."""
        prefill_nodes = [record for record in records if record.role.serves(Role.PREFILL)]
        self._prefill_nodes.follow(prefill_nodes, [record for record in records if record.role is not Role.ROUTER])
        self.holdings.follow(records)
        routers = max(1, sum(record.role is Role.ROUTER for record in records))
        self._pace.routers = routers * self.config.workers
        for endpoint in self._prefill_calls.forget({record.endpoint for record in prefill_nodes}):
            self._tasks.spawn(self._drop_channel(endpoint))
        for stream in self.streams.follow(records):
            self._tasks.spawn(self._drop_stream(stream))
        self._regions.look(records)
        self._records = records
        if records:
            self._first_news.set()
        self._line.follow(records)

    def on_their_way(self) -> dict[Incarnation, int]:
        """Tokens sent to each prefill process since its last report."""
        return self._prefill_nodes.placement.on_their_way()

    def follow_siblings(self, tokens: Mapping[Incarnation, int]) -> None:
        """What the other workers of this router have on their way to each prefill process."""
        self._prefill_nodes.placement.follow_siblings(tokens)

    async def _drop_stream(self, stream: DecodeSubscription) -> None:
        self._repeats.over(stream.name, "it is gone")
        await stream.close()
        await self._drop_channel(stream.endpoint)

    async def _drop_channel(self, endpoint: str) -> None:
        """Unless it is in use: a mixed node has prefill calls and a stream at one endpoint."""
        users = (self.streams, self._prefill_calls, self.holdings)
        if not any(user.use(endpoint) for user in users):
            await self._channels.drop(endpoint)

    def check_ready(self) -> None:
        """Raises BatonError NODE_DRAINING where new requests are to go to other routers."""
        self.check_open()
        if not self._lifecycle.ready:
            text = "This router is about to take no new requests: others do."
            raise BatonError(Reason.NODE_DRAINING, text, retry_after_ms=whole_seconds_ms(self.rng.random()))

    def check_open(self) -> None:
        """Raises BatonError NODE_DRAINING where this router takes no new requests."""
        if not self._lifecycle.takes_requests:
            text = "This router takes no new requests."
            raise BatonError(Reason.NODE_DRAINING, text, retry_after_ms=whole_seconds_ms(self.rng.random()))

    def check_cluster(self) -> None:
        """Raises BatonError DIRECTORY_LOST, NO_DECODE_NODE or NO_PREFILL_NODE where each request would end so."""
        self._check_known()
        decode_nodes = [record for record in self._records if record.role.serves(Role.DECODE)]
        if not any(record.lifecycle is Lifecycle.READY for record in decode_nodes):
            raise BatonError(
                Reason.NO_DECODE_NODE,
                f"No decode node is ready ({len(decode_nodes)} known). Start one, or wait for one to come up.",
                retry_after_ms=NOT_READY_RETRY_MS,
            )
        self.model()

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        return self._prefill_nodes.model()

    def model_names(self) -> Sequence[str]:
        """Those that clients may call it by, the usual one first. Raises BatonError NO_PREFILL_NODE."""
        return self.config.served_model_name or (self.model().name,)

    def model_of(self, *, attaches: bool) -> ModelInfo:
        """The model. For a client that attaches, any node's: its answer may be there though no prefill node is ready.
        Raises BatonError NO_PREFILL_NODE."""
        known = (record.model for record in self._records if record.model is not None)
        return next(known, None) or self.model() if attaches else self.model()

    def context_len_max(self) -> int:
        """The model's, or no limit while no node is known."""
        return self._prefill_nodes.model().context_len_max if self._prefill_nodes.ready else UINT32_MAX

    def tokens_max(self) -> int:
        """What prompt and answer may have together on the nodes that are there. Raises BatonError NO_PREFILL_NODE."""
        return tokens_max(self._records, self.model())
