"""What a decode node answers to a Reserve: a grant of blocks, that there is no room now, or that there never is.

A decode node has no queue: whoever it refuses asks again after a pause. New requests wait for one in the middle of its
answer (`ResumedFirst`), or it would find the room taken each time; but not for good, or one that is too large would
keep the memory idle for as long as it asks.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from batonpb import transfer_pb2

from baton.ids import Attempt, GrantId, Pair, RequestId, RequestKey, ReserveNumber
from baton.retry_time import retry_after_ms, spread_of, wait_s
from baton.wire import key_from_proto
from decode_node.config import DecodeConfig
from decode_node.job import Job, why_never
from engine.scheduler import Sequence, SequenceMode
from engine.types import params_from_proto
from kvtransfer.protocol.receiver import AnswerGranted, AnswerRefused, Refusal, ReserveAsked
from kvtransfer.receiver import Receiver
from node.pool import DevicePool

WAITING_MAX: Final = 1_024
"""Beyond so many the one that asked longest ago is forgotten."""
ENDS_KEPT_MAX: Final = 32


class LeaveRate:
    """How fast something leaves, over the last `ENDS_KEPT_MAX` times. Falls while nothing leaves. Of one thread."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, float]] = deque(maxlen=ENDS_KEPT_MAX)

    def left(self, amount: float, now_s: float) -> None:
        """`amount` has left now. Times do not go back."""
        self._ends.append((now_s, amount))

    def per_s(self, now_s: float) -> float:
        """0 while unknown: fewer than two times, or all at `now_s`. The first one's amount left before the span."""
        if len(self._ends) < 2 or now_s <= self._ends[0][0]:
            return 0.0
        return sum(amount for _, amount in list(self._ends)[1:]) / (now_s - self._ends[0][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """One search for room. Kept when its hold is over: by it the request is known when it asks again."""

    attempt: Attempt
    """That asked last."""
    output_tokens: int
    first_s: float
    until_s: float


class ResumedFirst:
    """Which resumed requests were refused here for want of room, and how long new ones wait. Control thread only.

    They wait for `wait_ms` after each refusal, and at most `hold_ms_max` after the first one of a search. A request
    that comes with more of its answer begins another search.
    """

    def __init__(self, *, wait_ms: int, hold_ms_max: int) -> None:
        assert 0 < wait_ms <= hold_ms_max, (wait_ms, hold_ms_max)
        self._wait_s = wait_ms / 1000
        self._hold_s_max = hold_ms_max / 1000
        self._waits: OrderedDict[RequestId, _Wait] = OrderedDict()
        self._until_s = -math.inf
        """The latest of all their `until_s`."""

    def refused(self, key: RequestKey, output_tokens: int, now_s: float) -> None:
        """A resumed request found no room: new ones wait until it has asked again, or its time is over.

        An attempt asks once: its Reserve may be here twice, and behind that of a later one.
        """
        known = self._waits.get(key.request)
        if known is not None and known.attempt >= key.attempt:
            return
        first_s = known.first_s if known is not None and known.output_tokens == output_tokens else now_s
        until_s = min(now_s + self._wait_s, first_s + self._hold_s_max)
        self._waits[key.request] = _Wait(
            attempt=key.attempt, output_tokens=output_tokens, first_s=first_s, until_s=until_s
        )
        self._waits.move_to_end(key.request)
        self._until_s = max(self._until_s, until_s)
        if len(self._waits) > WAITING_MAX:
            self._forget(next(iter(self._waits)))

    def waits_no_more(self, key: RequestKey) -> None:
        """This attempt has its room, here or on another node, or wants none any more: it waits no longer, if it did."""
        known = self._waits.get(key.request)
        if known is not None and known.attempt <= key.attempt:
            self._forget(key.request)

    def waiting(self, now_s: float) -> bool:
        """Whether new requests are to wait."""
        return now_s < self._until_s

    def _forget(self, request: RequestId) -> None:
        if self._waits.pop(request).until_s == self._until_s:
            self._until_s = max((wait.until_s for wait in self._waits.values()), default=-math.inf)


NO_BLOCKS = "its blocks are set aside for other requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    answer: AnswerGranted
    seq: Sequence | None
    """Not in the engine yet, without blocks. None: the grant was given to an earlier Reserve, of which this is a
    repeat."""
    footprint: int
    """Blocks that the request may come to hold in all."""


class Reserving:
    """Of one decode node; control thread only. Grants are the receiver's."""

    def __init__(self, *, config: DecodeConfig, pool: DevicePool, jobs: Collection[Job]) -> None:
        """`jobs` is a view of the node's requests. Under overcommit this answers the prefix cache about pins too."""
        self.closed = False
        """The node is about to end: no place for anybody."""
        self._config = config
        self._pool = pool
        self._ledger = pool.ledger
        self._blocks = pool.blocks
        self._spill = None if pool.host is None else pool.host.spill
        self._host_backed = self._spill is not None
        """Whether promises may be covered by host memory."""
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self.resumed_first = ResumedFirst(wait_ms=config.resumed_wait_ms, hold_ms_max=config.resumed_hold_ms_max)
        self._blocks_freed, self.requests_ended = LeaveRate(), LeaveRate()
        if self._spill is not None:
            pool.blocks.prefix_cache.may_pin = lambda: self._all_fit(pins_more=self._blocks.groups)

    def ask(
        self, request: transfer_pb2.ReserveRequest, pair: Pair, receiver: Receiver
    ) -> Granted | transfer_pb2.ReserveReply:
        """Have `receiver` grant blocks and set the growth aside. A reply says why it does not. Whatever raises, raises
        before the grant is given: nobody but its lease would take it back."""
        key, number = key_from_proto(request.key), ReserveNumber(request.number)
        tokens, prompt_len = [*request.prompt, *request.output], len(request.prompt)
        repeated = receiver.grants.has_answered(pair, number)
        reject = why_never(tokens, prompt_len, request.sampling, self._pool)
        if reject is not None and not repeated:
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=reject))
        known_blocks = self._blocks.blocks_for(len(tokens))
        prefix = self._blocks.prefix_cache.match(tokens, request.cache_salt, known_blocks)
        footprint = self._pool.footprint(len(tokens), prompt_len, request.sampling.max_tokens)
        self._blocks.ledger.hold(prefix)  # so that making room does not evict what was just matched
        try:
            new = known_blocks - len(prefix)
            why_not = None
            if not self.has_place:
                why_not = "its request limit is reached"
            elif self.yields(resumed=bool(request.output)):
                why_not = "answers that have lost their node go first"
            room = why_not is None and self.has_room(prefix=len(prefix), new=new, footprint=footprint)
            grant = GrantId(secrets.token_bytes(16))
            seq = None
            if room and not repeated:
                seq = Sequence(
                    key=key,
                    params=params_from_proto(request.sampling),
                    tokens=tokens,
                    prompt_len=prompt_len,
                    computed=0,
                    block_table=[],
                    promise_key=grant,
                    mode=SequenceMode.COMPLETE,
                    cache_salt=request.cache_salt,
                    cached_tokens=self._blocks.tokens_in(len(prefix)),
                )
                self._blocks.prefix_cache.evict_until(new)
            answer = receiver.reserve(
                ReserveAsked(
                    pair=pair,
                    number=number,
                    lowest_live=ReserveNumber(request.lowest_live),
                    key=key,
                    grant=grant,
                    blocks_new=new,
                    prefix=tuple(prefix),
                    promise=footprint - known_blocks,
                    host_backed=self._host_backed,
                    room=room,
                )
            )
        finally:
            self._blocks.release(prefix)
        if isinstance(answer, AnswerRefused):
            if answer.refusal is Refusal.BUSY:
                if request.output and not repeated:
                    self.resumed_first.refused(key, len(request.output), self._loop.time())
                return self._busy(key, why_not or NO_BLOCKS, blocks_lacking=footprint - self._ledger.available)
            if answer.refusal in (Refusal.FENCING, Refusal.SPAN):
                return self._busy(key, answer.refusal.value, blocks_lacking=0)
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=answer.refusal.value))
        self.resumed_first.waits_no_more(key)
        return Granted(answer=answer, seq=seq, footprint=footprint)

    @property
    def has_place(self) -> bool:
        """Within the limit of requests, and not about to end."""
        return len(self._jobs) < self._config.requests_max and not self.closed

    def yields(self, *, resumed: bool) -> bool:
        """Whether what room there is goes to requests in the middle of their answer, and this is none."""
        return not resumed and self.resumed_first.waiting(self._loop.time())

    def ended(self, footprint: int) -> None:
        """A request has ended that might have come to hold so many blocks."""
        self._blocks_freed.left(footprint, self._loop.time())
        self.requests_ended.left(1, self._loop.time())

    def has_room(self, *, prefix: int, new: int, footprint: int) -> bool:
        """The request would hold `prefix` blocks that are here, take `new` ones, and may come to `footprint` in all.

        Under overcommit also: nobody is swapped out, runners have their headroom, and each could grow to its full size.
        """
        if not self._ledger.can_give(new, footprint - prefix - new, host_backed=self._host_backed):
            return False
        if self._spill is None:
            return True
        if self._spill.busy or self._ledger.growable - new < self._spill.headroom():
            return False
        cache = self._blocks.prefix_cache
        pins_to_come = cache.pinned_blocks_wanted - cache.pinned_blocks  # they wait for those before it, not for it
        return self._all_fit((footprint + pins_to_come, prefix + new))

    def _all_fit(self, *asking: tuple[int, int], pins_more: int = 0) -> bool:
        """Whether each request could still grow to its full size, with so many blocks more pinned.

        `asking`: of a request that is to come, all blocks that it may come to hold, and those that cannot be moved
        before it runs. Pins, padding, and what writers of revoked grants have not let go of are never moved.
        """
        of_each = [(job.footprint, 0 if job.resumed else len(job.prefix) + len(job.blocks)) for job in self._jobs]
        claims = [*asking, *of_each]
        counts = self._ledger.books()
        of_jobs = sum(len(job.blocks) for job in self._jobs if not job.committed.done())
        immovable = counts.writer_owned + counts.quarantined - of_jobs + sum(own for _, own in claims)
        kept = self._blocks.padding_blocks + self._blocks.prefix_cache.pinned_blocks + pins_more
        return all(immovable - own + footprint <= self._ledger.num_blocks - kept for footprint, own in claims)

    def _busy(self, key: RequestKey, reason: str, *, blocks_lacking: int) -> transfer_pb2.ReserveReply:
        """Blocks and promises leave with the requests that end; a place among the requests does with any of them."""
        now_s = self._loop.time()
        waits = [wait_s(max(0, blocks_lacking), self._blocks_freed.per_s(now_s))]
        if not self.has_place:
            waits.append(wait_s(1, self.requests_ended.per_s(now_s)))
        known = [wait for wait in waits if wait is not None]
        retry_ms = retry_after_ms(
            max(known, default=None), ms_min=self._config.busy_retry_ms, spread=spread_of(key.request)
        )
        return transfer_pb2.ReserveReply(busy=transfer_pb2.Busy(retry_after_ms=retry_ms, reason=reason))
