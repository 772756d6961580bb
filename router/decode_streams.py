"""Token streams from decode nodes: one for each decode process, shared by all requests that run there.

A stream is opened on first use, and dropped when nobody needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, resume_pb2

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestKey
from baton.liveness import Reach
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role, key_from_proto, key_to_proto
from router.config import RouterConfig
from router.job import Inbox, Parting, foreign_error, internal_error, taken_over_error

log = get_log("subscriptions")

_T = TypeVar("_T")

RESTARTED: Final = "it has restarted"
"""Another process has its address, by the directory's word or by its own."""
FORGET_RETRY_MS: Final = 1_000
DONE_MS: Final = 20
"""How long the word that a finished answer has come waits for others."""
LAST_WORDS_MS_MAX: Final = 500
"""How long a stream that closes takes to tell its node what this router no longer serves."""


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
        self._numbered: dict[int, tuple[Inbox, int]] = {}
        """What the stream calls inboxes in arrays, each with the epoch that this is said of."""
        self._dones: list[common_pb2.RequestKey] = []
        self._leaves: list[decode_pb2.LeftRequest] = []
        self._wake = asyncio.Event()
        self._all_said = asyncio.Event()
        self._all_said.set()
        self._saying: asyncio.TimerHandle | None = None
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

    def let_go(self, inbox: Inbox, parting: Parting = Parting.DROP) -> None:
        """This router no longer serves the attempt."""
        known = self._inboxes.get(inbox.key) is inbox
        self._call(inbox, 0, 0)
        if known:
            del self._inboxes[inbox.key]
        if parting in (Parting.LEAVE, Parting.LEAVE_ENDED):
            self._leave(key_to_proto(inbox.key, inbox.epoch), ended=parting is Parting.LEAVE_ENDED)
        elif parting is Parting.DROP and known:
            self._dones.append(key_to_proto(inbox.key, inbox.epoch))
            self._say(soon=inbox.finish is not None)
        if parting is Parting.DROP and inbox.finish is None:
            self._streams.tasks.spawn(self._cancel(inbox))
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

    async def has_committed(self, inbox: Inbox) -> bool:
        """Whether the node says that the attempt goes on there; if not, it never will. Bounded tries; no answer is a
        no."""
        request = decode_pb2.ResolveRequest(header=self._header(), key=key_to_proto(inbox.key, inbox.epoch))
        reply = await self._ask(lambda s: self._stub.Resolve(request, timeout=s), "resolve unanswered", inbox.key)
        if reply is not None and reply.taken_over:
            inbox.error = taken_over_error()
        return reply is not None and reply.committed and not reply.taken_over

    async def take_over(self, inbox: Inbox, tag: bytes, *, left_s: float) -> resume_pb2.ResumeState | None:
        """Make the attempt this router's: its tokens come into the inbox, from index 0, until `let_go`. Returns what
        its former router has left with it, or None where the node does not have it or does not answer.

        Raises BatonError CANCELLED, PERMISSION_DENIED or TAKEN_OVER.
        """
        self._streams.inboxes[inbox.key] = inbox
        inbox.early, inbox.decode = [], self.incarnation
        self.users += 1
        try:
            reply = await self._take_over(inbox.key, tag, left_s=left_s)
            if self._streams.inboxes.get(inbox.key) is not inbox:
                raise taken_over_error()  # by a later call at this router
            if reply is None or reply.outcome != decode_pb2.TAKE_OVER_OUTCOME_TAKEN:
                return None
            state = resume_pb2.ResumeState.FromString(reply.state)
            inbox.epoch, early, inbox.early = reply.epoch, inbox.early, None
        finally:
            if inbox.early is not None:
                self._streams.remove(inbox)
                self.users -= 1
        inbox.granted = inbox.committed = True
        inbox.begun_logprobs = state.output_logprobs if state.logprobs else None
        self.add(inbox)
        for message in early:
            self._put(inbox, message)
        return state

    async def forget(self, key: RequestKey, tag: bytes) -> None:
        """The client wants no more of the request. Raises BatonError PERMISSION_DENIED, or PEER_UNREACHABLE."""
        try:
            reply = await self._take_over(key, tag, left_s=0, forget=True)
        except BatonError as error:
            if error.reason is Reason.CANCELLED:
                return
            raise
        if reply is None:
            text = f"The node {self.name}, which has the request, does not answer. Send this again."
            raise BatonError(Reason.PEER_UNREACHABLE, text, retry_after_ms=FORGET_RETRY_MS)

    async def _take_over(
        self, key: RequestKey, tag: bytes, *, left_s: float, forget: bool = False
    ) -> decode_pb2.TakeOverReply | None:
        """None: no answer. Raises BatonError CANCELLED or PERMISSION_DENIED."""
        request = decode_pb2.TakeOverRequest(
            header=self._header(),
            key=key_to_proto(key),
            tag=tag,
            deadline_left_ms=max(0, int(left_s * 1000)),
            forget=forget,
        )
        reply = await self._ask(lambda s: self._stub.TakeOver(request, timeout=s), "take-over unanswered", key)
        if reply is not None and reply.outcome == decode_pb2.TAKE_OVER_OUTCOME_FOREIGN:
            raise foreign_error()
        if reply is not None and reply.outcome == decode_pb2.TAKE_OVER_OUTCOME_OVER:
            raise BatonError(Reason.CANCELLED, "The client has ended this request itself: there is nothing left of it.")
        return reply

    async def _ask(self, ask: Callable[[float], Awaitable[_T]], unanswered: str, key: RequestKey) -> _T | None:
        """Ask the node, with a timeout in seconds. Bounded tries; None: no answer."""
        limits = self._streams.config.retries
        for _ in range(limits.resolve_tries_max):
            try:
                with rpc_errors(self.name):
                    return await ask(limits.resolve_ms_max / 1000)
            except BatonError as error:
                self._streams.repeats.info(unanswered, peer=self.name, request=key.request, why=error.message)
                if error.reason is Reason.INCARNATION_MISMATCH:
                    break
        return None

    async def _cancel(self, inbox: Inbox) -> None:
        """Bounded tries; a node that answers none of them is left to its own timers."""
        limits, why, key = self._streams.config, "", inbox.key
        request = decode_pb2.CancelRequest(
            header=self._header(), key=key_to_proto(key, inbox.epoch), reason="the router let go"
        )
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
        if self._saying is not None:
            self._saying.cancel()
            self._say_now()
        if self._task is not None:
            if not self._task.done() and not self.out_of_reach:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_MS_MAX / 1000):
                        await self._all_said.wait()
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
        if not self.out_of_reach:  # no inbox has come while it was
            return
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
            self._take_message(message)
        for number, index, token in zip(batch.numbers, batch.indices, batch.tokens, strict=True):
            called = self._numbered.get(number)
            if called is None:
                # This router has let go of it, and has said so. No token can be lost unseen here: an end is a message,
                # which has its index.
                continue
            inbox, epoch = called
            if epoch == inbox.epoch and inbox.early is None and not inbox.over:
                inbox.put_next(index, token)
            else:  # its key is another inbox's, or its epoch is to be looked at
                key = key_to_proto(inbox.key, epoch)
                self._take_message(decode_pb2.RequestTokens(key=key, number=number, first_index=index, ids=[token]))

    def _take_message(self, message: decode_pb2.RequestTokens) -> None:
        key = key_from_proto(message.key)
        # Not of this stream's inboxes: tokens may come before the prefill node's word of the grant.
        inbox = self._streams.inboxes.get(key)
        if inbox is None:
            self._numbered.pop(message.number, None)
            self._leave(message.key)  # the router has dropped the request, or left it: so is the node to
            return
        if message.HasField("finish") or message.HasField("error"):
            self._numbered.pop(message.number, None)
        elif message.number:
            self._call(inbox, message.number, message.key.epoch)
        if inbox.early is not None:
            inbox.early.append(message)
        else:
            self._put(inbox, message)

    def _call(self, inbox: Inbox, number: int, epoch: int) -> None:
        """The stream's name for it is this one, and no other. 0: none."""
        if self._is_called(inbox):
            del self._numbered[inbox.number]
        inbox.number = number
        if number:
            self._numbered[number] = (inbox, epoch)

    def _is_called(self, inbox: Inbox) -> bool:
        """Whether its number is this stream's name for it, and not an earlier one's."""
        called = self._numbered.get(inbox.number)
        return called is not None and called[0] is inbox

    def _put(self, inbox: Inbox, message: decode_pb2.RequestTokens) -> None:
        if message.key.epoch < inbox.epoch:
            return  # to this router too, which had the attempt before
        inbox.epoch, inbox.committed = message.key.epoch, True  # higher: a repeat of its TakeOver has come late
        inbox.put(message.first_index, list(message.ids), message.logprobs)
        if message.HasField("finish"):
            inbox.end(message.finish)
        elif message.HasField("error"):
            inbox.give_up(_given_up(self.name, message))

    def _leave(self, key: common_pb2.RequestKey, *, ended: bool = False) -> None:
        self._leaves.append(decode_pb2.LeftRequest(key=key, ended=ended))
        self._say()

    def _say(self, *, soon: bool = False) -> None:
        """The stream tells the node what has been added to be told: at once, or `soon`."""
        self._all_said.clear()
        if not soon:
            self._wake.set()
        elif self._saying is None:
            self._saying = asyncio.get_running_loop().call_later(DONE_MS / 1000, self._say_now)

    def _say_now(self) -> None:
        self._saying = None
        self._wake.set()

    async def _requests(self, wake: asyncio.Event) -> AsyncIterator[decode_pb2.SubscribeRequest]:
        """What this router says on one stream, until another stream has taken over."""
        opening = decode_pb2.SubscribeOpen(header=self._header(), packed=True)
        self._numbered.clear()
        for key, inbox in self._inboxes.items():
            opening.cursors.add(key=key_to_proto(key, inbox.epoch), next_index=inbox.next_index)
        yield decode_pb2.SubscribeRequest(open=opening)
        while True:
            if self._dones:
                dones, self._dones = self._dones, []
                yield decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=dones))
            if self._leaves:
                leaves, self._leaves = self._leaves, []
                yield decode_pb2.SubscribeRequest(leave=decode_pb2.SubscribeLeave(requests=leaves))
            if not self._dones and not self._leaves:
                self._all_said.set()  # the last message is on its way: gRPC asks for the next one
            await wake.wait()
            if wake is not self._wake:
                return
            wake.clear()

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(sender=self._streams.own, receiver=self.incarnation)


def _given_up(name: str, message: decode_pb2.RequestTokens) -> BatonError:
    if message.error_reason == Reason.TAKEN_OVER.value:
        return taken_over_error()
    for reason in (Reason.SCORES_NOT_FINITE, Reason.GRAMMAR_TOO_COMPLEX):
        if message.error_reason == reason.value:
            return BatonError(reason, message.error)
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

    def find(self, incarnation: Incarnation) -> DecodeSubscription | None:
        return self._subscriptions.get(incarnation)

    def remove(self, inbox: Inbox) -> None:
        """It takes nothing any more. Another one of the same attempt, which this router has taken over from itself,
        stays."""
        if self.inboxes.get(inbox.key) is inbox:
            del self.inboxes[inbox.key]

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
        await asyncio.gather(*(subscription.close() for subscription in self._subscriptions.values()))
