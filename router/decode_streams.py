"""Token streams from decode nodes: one for each decode process, shared by all requests that run there.

A stream is opened on first use, and dropped when nobody needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.liveness import Reach
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role
from router.config import RouterConfig

log = get_log("subscriptions")

RESTARTED: Final = "it has restarted"
"""Another process has its address, by the directory's word or by its own."""


@dataclass(slots=True, eq=False, kw_only=True)
class Inbox:
    """What one attempt has received: its grant, and its tokens, each index once. Those already here are dropped.

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
    """This router has lost the decode node's stream. Others may still reach the node."""
    lost_before: bool = False
    """It had when the node granted, and has not reached the node since."""
    never_reached: bool = False
    """The attempt failed because of that."""
    queued_s: float | None = None
    """When the prefill node said that it has the request. None: it did not."""
    granted: bool = False
    """The prefill node has said that a decode node has taken the attempt, or that none is needed."""
    subscription: DecodeSubscription | None = None
    """Where its tokens come from once a decode node has granted."""
    resolved: int = 0
    """How often the decode node was asked whether it goes on."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0
    """Tokens that the client has taken."""
    writing_s: float | None = None
    """Since when the client is being given what it has not taken."""
    on_put: Callable[[Inbox], None] | None = None
    """Called after each `put`."""

    @property
    def taken(self) -> bool:
        """A decode node has the attempt, or none is needed. Tokens take another way than news of the grant, and may
        come first."""
        return self.granted or bool(self.tokens)

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.read

    def put(self, first_index: int, ids: list[int], logprobs: Sequence[common_pb2.TokenLogprobs] = ()) -> None:
        """Take tokens in, and their log-probabilities if there are any.

        A gap is a bug of the sender: the request fails rather than skips a token.
        """
        have = self.next_index
        if first_index > have:
            text = f"Tokens {have} to {first_index - 1} of the answer were never received."
            self.fail(BatonError(Reason.INTERNAL, text))
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
        """The decode node has answered: the failure was another's."""
        self.error = None
        self.lost_before = self.never_reached = False

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.tokens)


class DecodeSubscription:
    """The stream of one decode process, made with the first request there; reconnects from the inboxes' own indices."""

    def __init__(self, streams: DecodeStreams, name: str, endpoint: str, incarnation: Incarnation) -> None:
        self.name = name
        self.endpoint = endpoint
        self.incarnation = incarnation
        self._streams = streams
        self._stub = decode_pb2_grpc.DecodeStub(streams.channels.get(endpoint))
        self._reach = Reach(endpoint, streams.config.liveness, streams.clock)
        self._inboxes: dict[RequestKey, Inbox] = {}
        self._dones: list[RequestKey] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.out_of_reach = False
        """Lost, and not connected since. The log says so once; streams to a dead process are tried until the directory
        drops it."""
        self.lost_s = 0.0
        """When the last stream ended for good, by the clock's monotonic time."""
        self.users = 0
        """Attempts that may still call the node."""

    def add(self, inbox: Inbox) -> None:
        self._inboxes[inbox.key] = inbox
        self._open()

    def open(self) -> None:
        """Have the stream before there is a request: it brings the node's answers to requests that were dropped, and
        shows its death. A node that ends its streams at once is left alone for a while first."""
        if self._streams.clock.monotonic_s() >= self.lost_s + self._reach.doubt_pause_s:
            self._open()

    def _open(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"subscribe-{self.name}")

    def let_go(self, inbox: Inbox) -> None:
        """The attempt is over: the node forgets a finished answer, and stops an unfinished one."""
        if self._inboxes.pop(inbox.key, None) is not None:
            self._done(inbox.key)
        if inbox.finish is None:
            self._streams.tasks.spawn(self._cancel(inbox.key))
        else:
            self.users -= 1

    @property
    def lost(self) -> bool:
        """Out of reach, or another process by now: asking it is of no use."""
        return self._task is not None and self._task.done()

    @property
    def silent(self) -> bool:
        """Out of reach, and not for streams that came to nothing: no other call is answered either."""
        return self.out_of_reach and not self._reach.doubted

    @property
    def idle(self) -> bool:
        """Nobody needs it, nor its channel. Closing a channel ends the calls on it as if they were cancelled."""
        return not self._inboxes and self.users == 0

    async def has_committed(self, key: RequestKey) -> bool:
        """Whether the node says that the attempt goes on there; if not, it never will. Bounded tries; no answer is a
        no."""
        limits = self._streams.config.retries
        request = decode_pb2.ResolveRequest(header=self._header(), key=_key_proto(key))
        for _ in range(limits.resolve_tries_max):
            try:
                with rpc_errors(self.name):
                    reply = await self._stub.Resolve(request, timeout=limits.resolve_ms_max / 1000)
                return bool(reply.committed)
            except BatonError as error:
                self._streams.repeats.info("resolve unanswered", peer=self.name, request=key.request, why=error.message)
                if error.reason is Reason.INCARNATION_MISMATCH:
                    break
        return False

    async def _cancel(self, key: RequestKey) -> None:
        """Bounded tries; a node that answers none of them is left to its own timers."""
        limits, why = self._streams.config, ""
        request = decode_pb2.CancelRequest(header=self._header(), key=_key_proto(key), reason="the router let go")
        try:
            for _ in range(limits.cancel_tries_max):
                try:
                    with rpc_errors(self.name):
                        await self._stub.Cancel(request, timeout=limits.cancel_ms_max / 1000)
                    return
                except BatonError as error:
                    if error.reason is Reason.INCARNATION_MISMATCH:
                        return
                    why = error.message
            repeats = self._streams.repeats
            report = repeats.info if self.out_of_reach else repeats.warning
            report("cancel unanswered", peer=self.name, request=key.request, tries=limits.cancel_tries_max, why=why)
        finally:
            self.users -= 1

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def fail_all(self, error: BatonError) -> None:
        for inbox in list(self._inboxes.values()):
            inbox.lose(error)
        self._inboxes.clear()

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
                        wait_s = self._streams.config.liveness.failed_stream_ms_max / 1000
                        settling = asyncio.get_running_loop().call_later(wait_s, self._heard)
                    else:
                        self._reached()
                    async for batch in call:
                        self._heard()
                        self._take(batch)
            except BatonError as error:
                if error.reason is Reason.INCARNATION_MISMATCH:
                    self.gone(RESTARTED)
                    return
                if not self.out_of_reach:
                    log.info("stream broken", node=self.name, error=error.message)
            except Exception:
                # A bug of ours ends the requests of this stream, and says so.
                log.exception("stream broke off", node=self.name)
                self.fail_all(internal_error())
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
                self.gone(self._reach.why)
                return

    def _reached(self) -> None:
        if self.out_of_reach:
            log.info("node reached again", node=self.name)
            self._streams.repeats.over(self.name, "it is reached again")
        self.out_of_reach = False
        for inbox in self._inboxes.values():
            inbox.lost_before = False

    def _heard(self) -> None:
        """Tokens have come, or the stream has stayed: the node works again."""
        self._reach.heard()
        self._reached()

    def gone(self, why: str) -> None:
        self.out_of_reach = True
        self.lost_s = self._streams.clock.monotonic_s()
        text = f"The decode node {self.name} was lost: {why}. Send the request again."
        self.fail_all(BatonError(Reason.PEER_UNREACHABLE, text))

    def _take(self, batch: decode_pb2.TokenBatch) -> None:
        for message in batch.requests:
            key = RequestKey(request=RequestId(message.key.request), attempt=Attempt(message.key.attempt))
            # Not of this stream's inboxes: tokens may come before the prefill node's word of the grant.
            inbox = self._streams.inboxes.get(key)
            if inbox is None:
                self._done(key)  # the router has dropped the request: the node is to let go of it
                continue
            inbox.put(message.first_index, list(message.ids), message.logprobs)
            if message.HasField("finish"):
                inbox.end(message.finish)
            elif message.HasField("error"):
                inbox.give_up(_given_up(self.name, message))

    def _done(self, key: RequestKey) -> None:
        """Nothing more is wanted of this request; the stream says so to the node."""
        self._dones.append(key)
        self._wake.set()

    async def _requests(self, wake: asyncio.Event) -> AsyncIterator[decode_pb2.SubscribeRequest]:
        """What this router says on one stream, until another stream has taken over."""
        opening = decode_pb2.SubscribeOpen(header=self._header())
        for key, inbox in self._inboxes.items():
            opening.cursors.add(key=_key_proto(key), next_index=inbox.next_index)
        yield decode_pb2.SubscribeRequest(open=opening)
        while True:
            if self._dones:
                dones, self._dones = self._dones, []
                yield decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=map(_key_proto, dones)))
            await wake.wait()
            if wake is not self._wake:
                return
            wake.clear()

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(sender=self._streams.own, receiver=self.incarnation)


def internal_error() -> BatonError:
    return BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details.")


def _key_proto(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=key.request, attempt=key.attempt)


def _given_up(name: str, message: decode_pb2.RequestTokens) -> BatonError:
    if message.error_reason == Reason.SCORES_NOT_FINITE.value:
        return BatonError(Reason.SCORES_NOT_FINITE, message.error)
    return BatonError(Reason.HANDOFF_FAILED, f"{name} gave the request up: {message.error}.")


LOST_RETRY_MS: Final = 1_000
"""Between two tries at a lost stream that no news of the directory calls for."""


class DecodeStreams:
    """The streams of one router, by decode process. Lives on the router's loop, whose tasks it uses."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        own: Incarnation,
        channels: Channels,
        tasks: Tasks,
        clock: Clock,
        repeats: RepeatLog,
    ) -> None:
        """`repeats` ends a problem when its node is reached again."""
        self.config = config
        self.own = own
        self.channels = channels
        self.tasks = tasks
        self.clock = clock
        self.repeats = repeats
        self.inboxes: dict[RequestKey, Inbox] = {}
        """Of each attempt that goes on, whether a decode node has granted it or not."""
        self._subscriptions: dict[Incarnation, DecodeSubscription] = {}

    def get(self, name: str, endpoint: str, incarnation: Incarnation) -> DecodeSubscription:
        """The stream of this process."""
        subscription = self._subscriptions.get(incarnation)
        if subscription is None:
            subscription = DecodeSubscription(self, name, endpoint, incarnation)
            self._subscriptions[incarnation] = subscription
        return subscription

    def use(self, endpoint: str) -> bool:
        """Whether one of them goes there."""
        return any(subscription.endpoint == endpoint for subscription in self._subscriptions.values())

    def out_of_reach(self) -> set[Incarnation]:
        """Processes that this router has lost and not reached since: what is sent there may well be lost too.

        Their streams are tried again at each news of the directory, and by this question `LOST_RETRY_MS` apart:
        without a directory nobody else would.
        """
        now_s = self.clock.monotonic_s()
        for stream in self._subscriptions.values():
            if stream.out_of_reach and stream.lost and now_s - stream.lost_s >= LOST_RETRY_MS / 1000:
                stream.open()
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.out_of_reach}

    def silent(self) -> set[Incarnation]:
        """Those of `out_of_reach` that answer nothing; the others take calls, and fail their streams only."""
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.silent}

    def follow(self, records: Sequence[NodeRecord]) -> list[DecodeSubscription]:
        """What the directory says: streams are opened to all that are there. Returns those to processes that are gone
        and serve nothing: they are dropped, and the caller closes them."""
        alive = {record.incarnation for record in records}
        decode_nodes = [record for record in records if record.role.serves(Role.DECODE)]
        owners = {record.endpoint: record.incarnation for record in decode_nodes}
        for record in decode_nodes:
            self.get(record.name, record.endpoint, record.incarnation).open()
        dropped = []
        for incarnation, subscription in list(self._subscriptions.items()):
            if incarnation not in alive and owners.get(subscription.endpoint, incarnation) != incarnation:
                subscription.gone(RESTARTED)
            if incarnation not in alive and subscription.idle:
                dropped.append(self._subscriptions.pop(incarnation))
        return dropped

    async def close(self) -> None:
        for subscription in self._subscriptions.values():
            await subscription.close()
