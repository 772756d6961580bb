"""Asking decode nodes for a grant, one after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.wire import NodeRecord
from kvtransfer.link import differences
from kvtransfer.writer import Handoff, WriterPeer
from node.pool import DevicePool
from prefill_node.config import PrefillConfig
from prefill_node.job import Job
from prefill_node.placement import (
    NOBODY_TO_ASK,
    DecodeAffinity,
    blocks_needed,
    may_hold,
    order_decode_nodes,
    ready_nodes,
)

log = get_log("prefill")

ASK_ELSEWHERE = frozenset(
    {
        Reason.DECODE_FULL,
        Reason.PEER_UNREACHABLE,
        Reason.PAIR_FENCING,
        Reason.DEADLINE,
        Reason.INCARNATION_MISMATCH,
        Reason.INCOMPATIBLE_NODE,
        Reason.HANDOFF_FAILED,
        Reason.PROMPT_TOO_LONG,
        Reason.NODE_DRAINING,
        Reason.TOO_MANY_PEERS,
        Reason.TOO_MANY_CALLS,
    }
)
"""What one decode node may answer without ending the request: the next one is asked."""
NOT_REACHED = frozenset({Reason.DEADLINE, Reason.PEER_UNREACHABLE, Reason.INCARNATION_MISMATCH, Reason.NODE_DRAINING})
"""Of a decode node (DEADLINE: the call's own, not the client's). Passed on as they are, the router would take them for
this node's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nobody has granted: the error for the router, and all that was answered."""

    error: BatonError
    reasons: frozenset[Reason]
    full: Sequence[NodeRecord] = ()
    """Those that had no room."""


class DecodeNodes:
    """The decode nodes that a prefill node knows, and how to reach them. Control thread only."""

    def __init__(
        self,
        *,
        config: PrefillConfig,
        pool: DevicePool,
        records: Callable[[], Sequence[NodeRecord]],
        peer_for: Callable[[NodeRecord], WriterPeer],
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        self._model = pool.model
        self._records = records
        self._peer_for = peer_for
        self._blocks = pool.blocks
        self.affinity = DecodeAffinity(blocks_max=config.affinity_blocks_max)
        self._tries_max = config.decode_tries_max
        self._loop = loop
        self._rng = rng
        self._repeats = RepeatLog(log, loop.time, key="node")

    def upkeep(self) -> None:
        """Called every second."""
        self._repeats.upkeep()

    @property
    def ready(self) -> int:
        """How many are ready, by the directory."""
        return len(ready_nodes(self._records()))

    def ready_for(self, job: Job, *, avoided_too: bool) -> int:
        """How many ready ones are there for the request: with `avoided_too` all, since any may have to refuse it; else
        those that its router reaches and that may come to hold it, by what they have said of themselves."""
        if avoided_too:
            return self.ready
        reached = [r for r in ready_nodes(self._records()) if r.incarnation not in job.request.avoid_decode]
        return len(self._may_take(job, reached))

    def may_be_held(self, job: Job) -> bool:
        """Whether one of these, ready or not, may come to hold the request, by what it has said of itself."""
        return bool(self._may_take(job, self._records()))

    def _may_take(self, job: Job, records: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Those of the same model with a region that is large enough, whatever is free there now."""
        blocks = self._blocks_needed(job)
        large = [record for record in records if may_hold(record, blocks)]
        return [record for record in large if record.model is not None and not differences(self._model, record.model)]

    def _blocks_needed(self, job: Job) -> int:
        return blocks_needed(len(job.tokens), job.prompt_len, job.params.max_tokens, self._model)

    async def reserve(
        self, job: Job, *, sources_released: Callable[[], None], avoided_too: bool = True
    ) -> Handoff | Refused:
        """Ask some of them, best first, until one grants; with `avoided_too` those, where no other is left, that the
        router does not reach. Raises BatonError for what ends the request itself."""
        behind: list[NodeRecord] = []
        records = self._records()
        chain = self._blocks.prefix_cache.chain(job.tokens, job.cache_salt)
        try:
            candidates = order_decode_nodes(
                records,
                own=self._model,
                may_place=lambda record: self._may_place(record, behind),
                rng=self._rng,
                tries_max=self._tries_max,
                room_of=self.affinity.room,
                instead=self.affinity.instead(chain),
                avoid=job.request.avoid_decode,
                blocks=self._blocks_needed(job),
                avoided_too=avoided_too,
            )
        except BatonError as error:
            if error.reason not in NOBODY_TO_ASK:
                raise
            # Processes that are known to have ended are in the directory for a while yet: nobody there is full.
            lost = error.reason is Reason.DECODE_FULL and not behind
            reasons = frozenset({Reason.PEER_UNREACHABLE if lost else error.reason})
            return Refused(error=_nobody_reached(error) if lost else error, reasons=reasons)
        self.affinity.keep_only({record.incarnation for record in records})
        refusals: list[BatonError] = []
        without_room: list[NodeRecord] = []
        for record in candidates:
            try:
                handoff = await self._peer_for(record).reserve(
                    job.key, self._request(job), metadata=job.metadata, sources_released=sources_released
                )
                room = self._blocks.blocks_for(job.prompt_len + job.params.max_tokens)
                self.affinity.granted(record, chain, room)
                self.wants_no_more(job, without_room)
                return handoff
            except BatonError as error:
                if error.reason not in ASK_ELSEWHERE:
                    raise
                self._repeats.info(
                    f"not granted: {error.reason.value}",
                    peer=record.name,
                    request=job.key.request,
                    why=error.message,
                )
                refusals.append(_named(record, error))
                if error.reason is Reason.DECODE_FULL:
                    without_room.append(record)
        refusal = most_hopeful(refusals)
        if refusal.reason in NOT_REACHED:
            refusal = _nobody_reached(refusal)
        return Refused(error=refusal, reasons=frozenset(e.reason for e in refusals), full=without_room)

    def wants_no_more(self, job: Job, full: Sequence[NodeRecord]) -> None:
        """It has its room elsewhere: nodes that refused a resumed request need not keep new ones waiting for it."""
        for record in full if job.resumed else ():
            with suppress(BatonError):  # out of reach by now
                self._peer_for(record).cancel_request(job.key)

    def _request(self, job: Job) -> transfer_pb2.ReserveRequest:
        return transfer_pb2.ReserveRequest(
            key=job.request.key,
            prompt=job.request.prompt,
            output=job.request.output,
            sampling=job.request.sampling,
            router=job.router,
            cache_salt=job.cache_salt,
            deadline_left_ms=max(0, int((job.deadline_s - self._loop.time()) * 1000)),
        )

    def _may_place(self, record: NodeRecord, behind: list[NodeRecord]) -> bool:
        """Whether a new request may be placed there; adds it to `behind` where it must take in earlier writes first."""
        try:
            has_room = self._peer_for(record).has_room()
        except BatonError:
            return False
        if not has_room:
            behind.append(record)
        return has_room


def most_hopeful(refusals: Sequence[BatonError]) -> BatonError:
    """Of the answers of several decode nodes, at least one, the one for the router.

    A full node is worth another try later; of several, the one that expects room first. "Too long" is final, and true
    only where every node has said so: one that did not answer may hold the request.
    """
    full = [e for e in refusals if e.reason is Reason.DECODE_FULL]
    if full:
        return min(full, key=lambda e: e.retry_after_ms or 0)
    hopeful = [e for e in refusals if e.reason is not Reason.PROMPT_TOO_LONG]
    return (hopeful or refusals)[-1]


def _nobody_reached(error: BatonError) -> BatonError:
    """It is this node that reaches no decode node. Another one may."""
    return BatonError(
        Reason.NO_DECODE_NODE,
        f"No decode node takes it from here. {error.message}",
        retry_after_ms=error.retry_after_ms,
    )


def _named(record: NodeRecord, error: BatonError) -> BatonError:
    """The same refusal, which says whose it is."""
    text = (
        error.message
        if record.name in error.message
        else f"The decode node {record.name} did not grant: {error.message}"
    )
    return BatonError(
        error.reason,
        text,
        code=error.code,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )
