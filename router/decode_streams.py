"""Token streams from decode nodes: one for each decode process, shared by all requests that run there.

A stream is opened on first use, and dropped when nobody needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.liveness import LivenessConfig, Reach
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role
from router.config import RouterConfig

log = get_log("subscriptions")


@dataclass(slots=True, eq=False, kw_only=True)
class Inbox:
    """Tokens of one attempt, in order, each index once: those already here are dropped when they come again.

    Filled by the prefill call (index 0) and by the decode node's stream (0 to the end). Bounded by max_tokens.
    """

    key: RequestKey
    first_index: int = 0
    """Index of `tokens[0]` in the answer: what is before it came from earlier attempts."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One for each token where the request asks for them, else empty."""
    finish: common_pb2.FinishReason | None = None
    error: BatonError | None = None
    given_up: bool = False
    """The decode node itself has said that it will not go on."""
    out_of_reach: bool = False
    """The decode node's stream is lost to this router, which may be the only one that cannot reach it."""
    lost_before: bool = False
    """It was when the node granted, and the node has not been reached since."""
    never_reached: bool = False
    """That is what the attempt has failed of."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0
    """Tokens that the client has taken."""
    writing_s: float | None = None
    """Since when the client is being given what it has not taken."""
    on_put: Callable[[Inbox], None] | None = None
    """Called after each `put`."""

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.taken

    def put(self, first_index: int, ids: list[int], logprobs: Sequence[common_pb2.TokenLogprobs] = ()) -> None:
        """Take tokens in, and their log-probabilities if there are any.

        A gap is a bug of the sender: the request fails rather than skips a token.
        """
        have = self.next_index
        if first_index > have:
            self.fail(
                BatonError(Reason.INTERNAL, f"Tokens {have} to {first_index - 1} of the answer were never received.")
            )
            return
        self.tokens.extend(ids[have - first_index :])
        self.logprobs.extend(logprobs[have - first_index :])
        self.news.set()
        if self.on_put is not None:
            self.on_put(self)

    def end(self, finish: common_pb2.FinishReason) -> None:
        self.finish = finish
        self.news.set()

    def fail(self, error: BatonError) -> None:
        if self.error is None and self.finish is None:
            self.error = error
            self.news.set()

    def lose(self, error: BatonError) -> None:
        """Fail with the decode node's stream."""
        self.out_of_reach = True
        self.never_reached = self.lost_before and self.error is None and self.finish is None
        self.fail(error)

    def give_up(self, error: BatonError) -> None:
        """Fail, by the decode node's own word."""
        self.given_up = True
        self.fail(error)

    def go_on(self) -> None:
        """The failure was not one of what the tokens come from, which has answered."""
        self.error = None
        self.lost_before = self.never_reached = False

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.tokens)


class DecodeSubscription:
    """The stream of one decode process, made with the first request there; reconnects from the inboxes' own indices."""

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        incarnation: Incarnation,
        own: Incarnation,
        channels: Channels,
        liveness: LivenessConfig,
        clock: Clock,
        live: Mapping[RequestKey, Inbox],
        repeats: RepeatLog,
    ) -> None:
        """`live` has the inbox of each attempt of this router: tokens may come before the news of the grant does.
        `repeats` is told when the node is reached again."""
        self.name = name
        self.endpoint = endpoint
        self.incarnation = incarnation
        self._own = own
        self._stub = decode_pb2_grpc.DecodeStub(channels.get(endpoint))
        self._clock = clock
        self._reach = Reach(endpoint, liveness, clock)
        self._live = live
        self._repeats = repeats
        self._liveness = liveness
        self._inboxes: dict[RequestKey, Inbox] = {}
        self._dones: list[RequestKey] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.out_of_reach = False
        """Lost, and not connected since: whether it can be reached again, nobody knows while that is tried. The log has
        been told; streams to a dead process are tried until the directory drops it."""
        self.lost_s = 0.0
        """When the last stream ended for good, by the clock's monotonic time."""
        self.users = 0
        """Attempts that may still have something to ask of the node or to tell it; counted by the router."""

    def add(self, inbox: Inbox) -> None:
        self._inboxes[inbox.key] = inbox
        self._open()

    def open(self) -> None:
        """Have the stream before there is a request: the node's word on one that this router has dropped comes here,
        and its death is noticed. A node that ends its streams at once is left alone for a while first."""
        if self._clock.monotonic_s() >= self.lost_s + self._reach.doubt_pause_s:
            self._open()

    def _open(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"subscribe-{self.name}")

    def remove(self, inbox: Inbox) -> None:
        """Nothing more is wanted of this request; the node is told on the stream."""
        if self._inboxes.pop(inbox.key, None) is not None:
            self._dones.append(inbox.key)
            self._wake.set()

    @property
    def lost(self) -> bool:
        """Out of reach, by all that is known, or another process by now: asking it is of no use."""
        return self._task is not None and self._task.done()

    @property
    def silent(self) -> bool:
        """Out of reach, and not for streams that came to nothing: no other call is answered either."""
        return self.out_of_reach and not self._reach.doubted

    @property
    def idle(self) -> bool:
        """Nobody needs it, nor its channel: closing a channel would end the calls on it as if their request was
        cancelled."""
        return not self._inboxes and self.users == 0

    async def cancel(self, key: RequestKey, reason: str, *, timeout_s: float) -> None:
        """Tell the node that the request lets go. Raises BatonError when it does not answer."""
        request = decode_pb2.CancelRequest(header=self._header(), reason=reason)
        request.key.request, request.key.attempt = key.request, key.attempt
        with rpc_errors(self.name):
            await self._stub.Cancel(request, timeout=timeout_s)

    async def resolve(self, key: RequestKey, *, timeout_s: float) -> bool:
        """Whether the attempt has committed there; if not, it never will. Raises BatonError when there is no answer."""
        request = decode_pb2.ResolveRequest(header=self._header())
        request.key.request, request.key.attempt = key.request, key.attempt
        with rpc_errors(self.name):
            reply = await self._stub.Resolve(request, timeout=timeout_s)
        return bool(reply.committed)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def fail_all(self, error: BatonError) -> None:
        for inbox in list(self._inboxes.values()):
            inbox.lose(error)
        self._inboxes.clear()

    def restarted(self) -> None:
        """Another process has this one's address, by the directory's word or by its own."""
        self._gone("it has restarted")

    async def _run(self) -> None:
        """Stream until closed. Lost, or another process by now: every request here fails."""
        while True:
            wake = self._wake
            settling: asyncio.TimerHandle | None = None
            try:
                with rpc_errors(self.name):
                    call = self._stub.Subscribe(self._requests(wake))
                    await self._reach.connected(call)
                    if self._reach.doubted:
                        wait_s = self._liveness.failed_stream_ms_max / 1000
                        settling = asyncio.get_running_loop().call_later(wait_s, self._heard)
                    else:
                        self._reached()
                    async for batch in call:
                        self._heard()
                        self._take(batch)
            except BatonError as error:
                if error.reason is Reason.INCARNATION_MISMATCH:
                    self.restarted()
                    return
                if not self.out_of_reach:
                    log.info("stream broken", node=self.name, error=error.message)
            except Exception:
                # A bug of ours ends the requests of this stream, and says so.
                log.exception("stream broke off", node=self.name)
                self.fail_all(BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details."))
                return
            finally:
                if settling is not None:
                    settling.cancel()
                # A broken stream's writer ends here, or it would wake up for, and lose, what the next one has to say.
                self._wake = asyncio.Event()
                wake.set()
            if await self._reach.lost():
                if not self.out_of_reach:
                    log.warning("node lost", node=self.name, why=self._reach.why)
                self._gone(self._reach.why)
                return

    def _reached(self) -> None:
        if self.out_of_reach:
            log.info("node reached again", node=self.name)
            self._repeats.over(self.name, "it is reached again")
        self.out_of_reach = False
        for inbox in self._inboxes.values():
            inbox.lost_before = False

    def _heard(self) -> None:
        """Tokens have come, or the stream has stayed: the node is of use, whatever it did before."""
        self._reach.heard()
        self._reached()

    def _gone(self, why: str) -> None:
        self.out_of_reach = True
        self.lost_s = self._clock.monotonic_s()
        self.fail_all(_lost(self.name, why))

    def _take(self, batch: decode_pb2.TokenBatch) -> None:
        for message in batch.requests:
            key = RequestKey(request=RequestId(message.key.request), attempt=Attempt(message.key.attempt))
            inbox = self._live.get(key)
            if inbox is None:
                # A request that this router has dropped: the node is to let go of it.
                self._dones.append(key)
                self._wake.set()
                continue
            inbox.put(message.first_index, list(message.ids), message.logprobs)
            if message.HasField("finish"):
                inbox.end(message.finish)
            elif message.HasField("error"):
                inbox.give_up(_given_up(self.name, message))

    async def _requests(self, wake: asyncio.Event) -> AsyncIterator[decode_pb2.SubscribeRequest]:
        """What this router says on one stream, until another stream has taken over."""
        opening = decode_pb2.SubscribeOpen(header=self._header())
        for key, inbox in self._inboxes.items():
            cursor = opening.cursors.add(next_index=inbox.next_index)
            cursor.key.request, cursor.key.attempt = key.request, key.attempt
        yield decode_pb2.SubscribeRequest(open=opening)
        while True:
            if self._dones:
                dones, self._dones = self._dones, []
                message = decode_pb2.SubscribeDone()
                for key in dones:
                    message.keys.add(request=key.request, attempt=key.attempt)
                yield decode_pb2.SubscribeRequest(done=message)
            await wake.wait()
            if wake is not self._wake:
                return
            wake.clear()

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(sender=self._own, receiver=self.incarnation)


def _given_up(name: str, message: decode_pb2.RequestTokens) -> BatonError:
    if message.error_reason == Reason.SCORES_NOT_FINITE.value:
        return BatonError(Reason.SCORES_NOT_FINITE, message.error)
    return BatonError(Reason.HANDOFF_FAILED, f"{name} gave the request up: {message.error}.")


def _lost(name: str, why: str) -> BatonError:
    return BatonError(Reason.PEER_UNREACHABLE, f"The decode node {name} was lost: {why}. Send the request again.")


LOST_RETRY_MS: Final = 1_000
"""Between two tries at a lost stream that no news of the directory calls for."""


class DecodeStreams:
    """Lives on the router's loop, whose tasks it uses."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        own: Incarnation,
        channels: Channels,
        inboxes: Mapping[RequestKey, Inbox],
        tasks: Tasks,
        clock: Clock,
        repeats: RepeatLog,
        dropped: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        """`inboxes` has that of each attempt that goes on. `dropped(endpoint)` is called behind a stream's end, for
        what else the router has at that endpoint."""
        self._config = config
        self._own = own
        self._channels = channels
        self._inboxes = inboxes
        self._tasks = tasks
        self._clock = clock
        self._repeats = repeats
        self._dropped = dropped
        self._subscriptions: dict[Incarnation, DecodeSubscription] = {}

    @property
    def subscriptions(self) -> tuple[DecodeSubscription, ...]:
        return tuple(self._subscriptions.values())

    def get(self, name: str, endpoint: str, incarnation: Incarnation) -> DecodeSubscription:
        """The stream of this process."""
        subscription = self._subscriptions.get(incarnation)
        if subscription is None:
            subscription = self._subscriptions[incarnation] = DecodeSubscription(
                name=name,
                endpoint=endpoint,
                incarnation=incarnation,
                own=self._own,
                channels=self._channels,
                liveness=self._config.liveness,
                clock=self._clock,
                live=self._inboxes,
                repeats=self._repeats,
            )
        return subscription

    def use(self, endpoint: str) -> bool:
        """Whether one of them goes there."""
        return any(subscription.endpoint == endpoint for subscription in self._subscriptions.values())

    def out_of_reach(self) -> set[Incarnation]:
        """Processes that this router has lost and not reached since: what is sent there may well be lost too.

        Their streams are tried again at each news of the directory, and by this question `LOST_RETRY_MS` apart:
        without a directory nobody else would.
        """
        now_s = self._clock.monotonic_s()
        for stream in self._subscriptions.values():
            if stream.out_of_reach and stream.lost and now_s - stream.lost_s >= LOST_RETRY_MS / 1000:
                stream.open()
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.out_of_reach}

    def silent(self) -> set[Incarnation]:
        """Those of `out_of_reach` that answer nothing; the others take calls, and fail their streams only."""
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.silent}

    def follow(self, records: Sequence[NodeRecord]) -> None:
        """What the directory says: streams are opened to all that are there; those to processes that are gone and serve
        nothing are dropped."""
        alive = {record.incarnation for record in records}
        decode_nodes = [record for record in records if record.role.serves(Role.DECODE)]
        owners = {record.endpoint: record.incarnation for record in decode_nodes}
        for record in decode_nodes:
            self.get(record.name, record.endpoint, record.incarnation).open()
        for incarnation, subscription in list(self._subscriptions.items()):
            if incarnation not in alive and owners.get(subscription.endpoint, incarnation) != incarnation:
                subscription.restarted()
            if incarnation not in alive and subscription.idle:
                del self._subscriptions[incarnation]
                self._tasks.spawn(self._drop(subscription))

    async def has_committed(self, subscription: DecodeSubscription, key: RequestKey) -> bool:
        """Whether the decode node says that the attempt goes on there. Bounded tries; no answer is a no."""
        limits = self._config.retries
        for _ in range(limits.resolve_tries_max):
            try:
                return await subscription.resolve(key, timeout_s=limits.resolve_ms_max / 1000)
            except BatonError as error:
                self._repeats.info("resolve unanswered", peer=subscription.name, request=key.request, why=error.message)
                if error.reason is Reason.INCARNATION_MISMATCH:
                    break
        return False

    def let_go(self, subscription: DecodeSubscription, inbox: Inbox) -> None:
        """The attempt is over: the decode node forgets a finished answer, and is told to stop an unfinished one."""
        subscription.remove(inbox)
        if inbox.finish is None:
            self._tasks.spawn(self._cancel(subscription, inbox.key))
        else:
            subscription.users -= 1

    async def close(self) -> None:
        for subscription in self._subscriptions.values():
            await subscription.close()

    async def _cancel(self, subscription: DecodeSubscription, key: RequestKey) -> None:
        """Bounded tries; a node that answers none of them is left to its own timers."""
        limits, why = self._config, ""
        try:
            for _ in range(limits.cancel_tries_max):
                try:
                    await subscription.cancel(key, "the router let go", timeout_s=limits.cancel_ms_max / 1000)
                    return
                except BatonError as error:
                    if error.reason is Reason.INCARNATION_MISMATCH:
                        return
                    why = error.message
            tell = self._repeats.info if subscription.out_of_reach else self._repeats.warning
            tell(
                "cancel unanswered", peer=subscription.name, request=key.request, tries=limits.cancel_tries_max, why=why
            )
        finally:
            subscription.users -= 1

    async def _drop(self, subscription: DecodeSubscription) -> None:
        self._repeats.over(subscription.name, "it is gone")
        await subscription.close()
        await self._dropped(subscription.endpoint)
