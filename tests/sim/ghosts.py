"""Promises that only a memory of their own can check: what a node has said, and what it does afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batonpb import decode_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, GrantId, Incarnation, Pair, RequestId, RequestKey, ReserveNumber
from baton.wire import key_from_proto
from decode_node.node import DecodeNode
from decode_node.service import DecodeService
from decode_node.streams import RequestOutput, Subscription
from kvtransfer.protocol.receiver import AnswerGranted, AnswerRefused, ReserveAsked
from kvtransfer.receiver import Receiver
from router.decode_streams import DecodeSubscription
from router.job import Inbox, Job
from router.prefill_nodes import PrefillCalls

if TYPE_CHECKING:
    from tests.sim.cluster import Process

REMEMBERED_MAX = 20_000
TAKEN_MAX = 200
"""Requests that a router has lost to another lately."""


def watch_decode(process: Process, node: DecodeNode) -> None:
    """An attempt that was cancelled, or resolved as not committed, never commits here afterwards; nor does an older
    one. At most one attempt of a request is committed at a time."""
    over: OrderedDict[RequestId, Attempt] = OrderedDict()
    cancel, resolve, committed = node.cancel, node.resolve, node.committed

    def bury(key: RequestKey) -> None:
        over[key.request] = max(key.attempt, over.pop(key.request, key.attempt))
        if len(over) > REMEMBERED_MAX:
            over.popitem(last=False)

    def watched_cancel(key: RequestKey, reason: str, *, notify_router: bool = False) -> bool:
        bury(key)
        return cancel(key, reason, notify_router=notify_router)

    def watched_resolve(key: RequestKey) -> bool:
        answer = resolve(key)
        process.cluster.resolves += 1
        if not answer:
            bury(key)
        return answer

    def watched_committed(key: RequestKey, grant: GrantId) -> None:
        if key.attempt <= over.get(key.request, -1):
            process.cluster.violation(f"{process.name}: attempt {key.attempt} of {key.request} commits after its end")
        committed(key, grant)

    replaced: Any = node
    replaced.cancel, replaced.resolve, replaced.committed = watched_cancel, watched_resolve, watched_committed
    _watch_take_overs(process, node, bury)


def _watch_take_overs(process: Process, node: DecodeNode, bury: Callable[[RequestKey], None]) -> None:
    """Epochs only rise. What its client has forgotten stays so: nobody takes it over, no token of it leaves the node,
    and no attempt at it commits. What a router says of a request that another has taken over changes nothing."""
    epochs: OrderedDict[RequestKey, int] = OrderedDict()
    forgotten = process.forgotten
    take_over, done, leave, collect = node.take_over, node.done, node.leave, node.streams.collect
    now_s, kept_s = process.loop.time, node.config.resume_ms / 1000

    def watched_take_over(request: decode_pb2.TakeOverRequest, router: Incarnation) -> decode_pb2.TakeOverReply:
        key = key_from_proto(request.key)
        reply = take_over(request, router)
        said = reply.outcome
        if said == decode_pb2.TAKE_OVER_OUTCOME_FOREIGN:
            _say(process, f"{key} is another's")
        if now_s() < forgotten.get(key, 0.0) and said != decode_pb2.TAKE_OVER_OUTCOME_OVER:
            _say(process, f"{key} was forgotten, and is {decode_pb2.TakeOverOutcome.Name(said)} now")
        if said == decode_pb2.TAKE_OVER_OUTCOME_TAKEN:
            if reply.epoch <= epochs.get(key, 0):
                _say(process, f"{key} is taken over by epoch {reply.epoch} after {epochs.get(key, 0)}")
            _remember(epochs, key, reply.epoch)
        else:
            bury(key)
        if said == decode_pb2.TAKE_OVER_OUTCOME_OVER and key not in forgotten:
            _remember(forgotten, key, now_s() + kept_s)
        return reply

    def watched_done(router: Incarnation, key: RequestKey, epoch: int) -> None:
        with _unchanged_by(process, node, key, epoch):
            done(router, key, epoch)

    def watched_leave(router: Incarnation, key: RequestKey, epoch: int, *, ended: bool) -> None:
        with _unchanged_by(process, node, key, epoch):
            leave(router, key, epoch, ended=ended)

    def watched_collect(subscription: Subscription) -> decode_pb2.TokenBatch:
        batch = collect(subscription)
        for message in batch.requests if forgotten else ():
            if message.ids and key_from_proto(message.key) in forgotten:
                _say(process, f"a token of {message.key} leaves, which its client has forgotten")
        if forgotten and batch.numbers:
            outputs = node.streams._of_router.get(subscription.router, {}).values()
            for key in [output.key for output in outputs if output.number in set(batch.numbers)]:
                if key in forgotten:
                    _say(process, f"a token of {key} leaves in an array, which its client has forgotten")
        return batch

    replaced: Any = node
    replaced.take_over, replaced.done, replaced.leave = watched_take_over, watched_done, watched_leave
    streams: Any = node.streams
    streams.collect = watched_collect


def watch_decode_service(process: Process, service: DecodeService) -> None:
    """A Cancel by a router that has the request no longer changes nothing."""
    cancel = service.Cancel

    async def watched_cancel(request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelReply:
        with _unchanged_by(process, service._node, key_from_proto(request.key), request.key.epoch):
            return await cancel(request, context)

    replaced: Any = service
    replaced.Cancel = watched_cancel


@contextmanager
def _unchanged_by(process: Process, node: DecodeNode, key: RequestKey, epoch: int) -> Iterator[None]:
    job = node._by_key.get(key)
    before = None if job is None or epoch >= job.output.epoch else (job.output, _state(job.output))
    yield
    if before is not None and _state(before[0]) != before[1]:
        _say(process, f"{key} is ended by a router of epoch {epoch}, which has it no longer")


def _state(output: RequestOutput) -> tuple[object, ...]:
    return output.router, output.epoch, output.left, output.ended.is_set(), output.forgotten.is_set()


def _remember(
    book: OrderedDict[RequestKey, Any], key: RequestKey, value: Any, *, at_most: int = REMEMBERED_MAX
) -> None:
    book[key] = value
    if len(book) > at_most:
        book.popitem(last=False)


def _say(process: Process, text: str) -> None:
    process.cluster.violation(f"{process.name}: {text}")


def watched_routers(current: Callable[[], Process]) -> list[tuple[Any, str, Any]]:
    """A router that has lost a request to another neither cancels nor resolves the attempt, nor makes another one.
    Replacements by name: these objects come and go."""
    give_up, cancel, run = Inbox.give_up, DecodeSubscription._cancel, PrefillCalls.run
    resolve = DecodeSubscription.has_committed

    def watched_give_up(self: Inbox, error: BatonError) -> None:
        if error.reason is Reason.TAKEN_OVER:
            _remember(current().taken_over, self.key, self.epoch, at_most=TAKEN_MAX)
        give_up(self, error)

    def check(inbox: Inbox, what: str) -> None:
        if current().taken_over.get(inbox.key, -1) >= inbox.epoch:
            _say(current(), f"{inbox.key} is {what}, which another router has taken over")

    async def watched_cancel(self: DecodeSubscription, inbox: Inbox) -> None:
        check(inbox, "cancelled")
        await cancel(self, inbox)

    async def watched_resolve(self: DecodeSubscription, inbox: Inbox) -> bool:
        check(inbox, "resolved")
        return await resolve(self, inbox)

    async def watched_run(self: PrefillCalls, job: Job, inbox: Inbox) -> None:
        if any(key.request == inbox.key.request for key in current().taken_over):
            _say(current(), f"{inbox.key} is another attempt at what another router has taken over")
        await run(self, job, inbox)

    return [
        (Inbox, "give_up", watched_give_up),
        (DecodeSubscription, "_cancel", watched_cancel),
        (DecodeSubscription, "has_committed", watched_resolve),
        (PrefillCalls, "run", watched_run),
    ]


def watch_receiver(process: Process, receiver: Receiver) -> None:
    """A number that its writer has let go of is never granted afterwards."""
    released: OrderedDict[tuple[Pair, ReserveNumber], None] = OrderedDict()
    reserve, release = receiver.reserve, receiver.release

    async def watched_release(pair: Pair, number: ReserveNumber, lowest_live: ReserveNumber, *, in_doubt: bool) -> None:
        await release(pair, number, lowest_live, in_doubt=in_doubt)
        released[pair, number] = None
        if len(released) > REMEMBERED_MAX:
            released.popitem(last=False)

    def watched_reserve(event: ReserveAsked) -> AnswerGranted | AnswerRefused:
        answer = reserve(event)
        if isinstance(answer, AnswerGranted) and (event.pair, event.number) in released:
            process.cluster.violation(f"{process.name}: {event.number} is granted after its Release was answered")
        return answer

    replaced: Any = receiver
    replaced.release, replaced.reserve = watched_release, watched_reserve
