"""Promises that only a memory of their own can check: what a node has said, and what it does afterwards."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from baton.ids import Attempt, GrantId, Pair, RequestId, RequestKey, ReserveNumber
from decode_node.node import DecodeNode
from kvtransfer.protocol.receiver import AnswerGranted, AnswerRefused, ReserveAsked
from kvtransfer.receiver import Receiver

if TYPE_CHECKING:
    from tests.sim.cluster import Process

REMEMBERED_MAX = 20_000


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
