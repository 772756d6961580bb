"""What a decode node answers to a Reserve: a grant of blocks, that there is no room now, or that there never is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from batonpb import transfer_pb2

from baton.ids import GrantId, Pair, RequestKey, ReserveNumber
from baton.retry_time import LeaveRate, retry_after_ms, spread_of, wait_s
from cachestore.block_manager import BlockManager
from cachestore.ledger import Ledger
from cachestore.spill_policy import Claim, each_fits
from decode_node.config import DecodeConfig
from decode_node.job import Job, answer_growth, why_never
from decode_node.resumed_first import ResumedFirst
from engine.types import key_from_proto
from kvtransfer.protocol.receiver import AnswerGranted, AnswerRefused, Refusal, ReserveAsked
from kvtransfer.receiver import Receiver
from node.pool import DevicePool
from node.spill import Spill


class Admission:
    """Of one decode node; reads only. Under overcommit (`spill`) it answers the prefix cache about pins too."""

    def __init__(self, spill: Spill | None, ledger: Ledger, blocks: BlockManager, jobs: Collection[Job]) -> None:
        """`jobs` is a view: the node's requests as they are at each question."""
        self._spill = spill
        self._ledger = ledger
        self._blocks = blocks
        self._jobs = jobs
        self.host_backed = spill is not None
        """Whether promises may be covered by host memory."""
        if spill is not None:
            blocks.prefix_cache.may_pin = self._may_pin

    def has_room(self, *, prefix: int, new: int, footprint: int) -> bool:
        """The request would hold `prefix` blocks that are here, take `new` ones, and may come to `footprint` in all.

        Under overcommit, beside the sum of blocks and promises: nobody waits in host memory, those who run find their
        headroom, and each request could still grow to its full size.
        """
        if not self._ledger.can_give(new, footprint - prefix - new, host_backed=self.host_backed):
            return False
        if self._spill is None:
            return True
        if self._spill.busy or self._ledger.growable - new < self._spill.headroom():
            return False
        cache = self._blocks.prefix_cache
        pins_to_come = cache.pinned_blocks_wanted - cache.pinned_blocks  # they wait for those before it, not for it
        return self._all_fit(Claim(footprint=footprint + pins_to_come, immovable=prefix + new))

    def _may_pin(self) -> bool:
        """Whether each request could still grow to its full size with one more block pinned, which cannot be moved."""
        return self._all_fit(pins_more=1)

    def _all_fit(self, *more: Claim, pins_more: int = 0) -> bool:
        counts = self._ledger.books()
        of_jobs = sum(len(job.blocks) for job in self._jobs if not job.committed.done())
        claims = [*more]
        for job in self._jobs:
            immovable = 0 if job.resumed else len(job.prefix) + len(job.blocks)
            claims.append(Claim(footprint=job.footprint, immovable=immovable))
        kept = self._blocks.padding_blocks + self._blocks.prefix_cache.pinned_blocks + pins_more
        return each_fits(
            claims,
            others_immovable=counts.writer_owned + counts.quarantined - of_jobs,
            blocks_usable=self._ledger.num_blocks - kept,
        )


NO_BLOCKS = "its blocks are set aside for other requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """By this Reserve, or by an earlier one of which it is a repeat."""

    answer: AnswerGranted
    tokens: list[int]
    """Prompt, and what the client has of the answer."""
    footprint: int
    """Blocks that the request may come to hold in all."""


class Reserving:
    """Of one decode node; control thread only. Grants are the receiver's: nothing here outlives an answer but how fast
    requests end, and who goes first."""

    def __init__(
        self,
        *,
        config: DecodeConfig,
        pool: DevicePool,
        admission: Admission,
        requests: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
    ) -> None:
        """`requests` is how many the node has now."""
        self.closed = False
        """The node is about to end: no place for anybody."""
        self._config = config
        self._runner = pool.runner
        self._ledger = pool.ledger
        self._blocks = pool.blocks
        self._admission = admission
        self._requests = requests
        self._loop = loop
        self._randomness = randomness
        self._resumed_first = ResumedFirst(wait_ms=config.resumed_wait_ms, hold_ms_max=config.resumed_hold_ms_max)
        self._blocks_freed, self.requests_ended = LeaveRate(), LeaveRate()

    def ask(
        self, request: transfer_pb2.ReserveRequest, pair: Pair, receiver: Receiver
    ) -> Granted | transfer_pb2.ReserveReply:
        """Have `receiver` grant blocks for the prompt and set the answer's growth aside. A reply says why it does not.

        A repeat gets the first one's answer, even where this node could not give it any more.
        """
        key, number = key_from_proto(request.key), ReserveNumber(request.number)
        tokens, prompt_len = [*request.prompt, *request.output], len(request.prompt)
        repeated = receiver.grants.has_answered(pair, number)
        reject = why_never(tokens, prompt_len, request.sampling, runner=self._runner, blocks=self._blocks)
        if reject is not None and not repeated:
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=reject))
        known_blocks = self._blocks.blocks_for(len(tokens))
        prefix = self._blocks.match(tokens, request.cache_salt, known_blocks)
        promise = answer_growth(self._runner, tokens, prompt_len, request.sampling.max_tokens)
        self._blocks.hold(prefix)  # so that making room does not evict what was just matched
        try:
            new = known_blocks - len(prefix)
            footprint = known_blocks + promise
            why_not = self._why_not_now(resumed=bool(request.output))
            room = why_not is None and self._admission.has_room(prefix=len(prefix), new=new, footprint=footprint)
            if room and not repeated:
                self._blocks.make_room(new)
            answer = receiver.reserve(
                ReserveAsked(
                    pair=pair,
                    number=number,
                    lowest_live=ReserveNumber(request.lowest_live),
                    key=key,
                    grant=GrantId(self._randomness(16)),
                    blocks_new=new,
                    prefix=tuple(prefix),
                    promise=promise,
                    host_backed=self._admission.host_backed,
                    room=room,
                )
            )
        finally:
            self._blocks.release(prefix)
        if isinstance(answer, AnswerRefused):
            if answer.refusal is Refusal.BUSY:
                if request.output and not repeated:
                    self._resumed_first.refused(key, len(request.output), self._loop.time())
                return self._busy(key, why_not or NO_BLOCKS, blocks_lacking=footprint - self._ledger.available)
            if answer.refusal in (Refusal.FENCING, Refusal.SPAN):
                return self._busy(key, answer.refusal.value, blocks_lacking=0)
            return transfer_pb2.ReserveReply(reject=transfer_pb2.Reject(reason=answer.refusal.value))
        self.waits_no_more(key)
        return Granted(answer=answer, tokens=tokens, footprint=footprint)

    @property
    def has_place(self) -> bool:
        """Within the limit of requests, and not about to end."""
        return self._requests() < self._config.requests_max and not self.closed

    def yields(self, *, resumed: bool) -> bool:
        """Whether what room there is goes to requests in the middle of their answer, and this is none."""
        return not resumed and self._resumed_first.waiting(self._loop.time())

    def waits_no_more(self, key: RequestKey) -> None:
        """The request has its room, or wants none any more."""
        self._resumed_first.granted(key)

    def ended(self, footprint: int) -> None:
        """A request has ended that might have come to hold so many blocks."""
        self._blocks_freed.left(footprint, self._loop.time())
        self.requests_ended.left(1, self._loop.time())

    def _why_not_now(self, *, resumed: bool) -> str | None:
        """What keeps any request out at the moment, whatever its size."""
        if not self.has_place:
            return "its request limit is reached"
        if self.yields(resumed=resumed):
            return "answers that have lost their node go first"
        return None

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
