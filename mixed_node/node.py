"""Life of a request in this node: handed over, or kept. Both halves share one region, ledger and engine.

A request that is handed over, from here or to here, lives as on a node of its own (`PrefillNode.prefill`,
`DecodeNode.live`). This node never asks itself for a grant. For one that is kept, `PrefillNode.prefill` calls
`MixedNode.start` in its turn: the one ledger gives its blocks and the promise of its growth, the sequence enters the
engine to stay, and `DecodeNode.live` begins. The first token goes to the router by the prefill call, which commits the
request and ends; all tokens go by the decode half's stream, from index 0. Before the commit, the end of the prefill
call cancels the request; afterwards the decode half decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

from baton.drain import Holdings
from baton.errors import BatonError, Reason
from baton.ids import GrantId, RequestKey
from baton.wire import NodeLoad
from decode_node.job import check_resumable, why_never
from decode_node.node import DecodeNode
from engine.core import TokenEvent
from engine.scheduler import EngineFullError, Sequence, SequenceMode
from engine.types import Batch, KvSink
from node.pool import DevicePool
from prefill_node.job import Job
from prefill_node.local_policy import LocalPolicy
from prefill_node.node import PrefillNode


class MixedNode:
    """What the two halves are to each other; control thread only.

    Implements node.engine_loop.StepHost and prefill_node.job.LocalRunner. `prefill` is set before the first call.
    """

    prefill: PrefillNode

    def __init__(self, *, policy: LocalPolicy, decode: DecodeNode, pool: DevicePool) -> None:
        self.policy = policy
        self.decode = decode
        self._pool = pool
        self._engine = pool.engine
        self._blocks = pool.blocks
        self._first: dict[RequestKey, asyncio.Future[TokenEvent]] = {}
        """Of kept requests without their first token, where it goes."""
        self._kept = 0
        """Requests, ever: both halves have taken each of them."""
        self._looking = False
        decode.room_changed = self._room_changed

    # What the prefill half asks (LocalRunner).

    @property
    def requests(self) -> int:
        return self.decode.requests

    @property
    def has_place(self) -> bool:
        return self.decode.reserving.has_place

    def yields(self, job: Job) -> bool:
        return self.decode.reserving.yields(resumed=job.resumed)

    def never(self, job: Job) -> str | None:
        return why_never(job.tokens, job.prompt_len, job.request.sampling, self._pool)

    def start(self, job: Job) -> Sequence | None:
        if job.request.HasField("resumable"):
            check_resumable(job.request.resumable)
        self._check_new(job.key)
        prefix = [] if job.is_scored else self._blocks.match_prompt(job.tokens, job.request.cache_salt)
        known = self._blocks.blocks_for(len(job.tokens))
        new, growth = known - len(prefix), job.footprint(self._pool) - known
        if not (self.has_place and self._blocks.can_admit(prefix, new, growth)):
            return None
        promise = GrantId(secrets.token_bytes(16))
        table = self._blocks.admit(prefix, new, promise_key=promise, promise=growth)
        cached_tokens = self._blocks.tokens_in(len(prefix))
        seq = job.sequence(table, cached_tokens=cached_tokens, promise_key=promise, mode=SequenceMode.COMPLETE)
        try:
            self._engine.submit(seq)
        except EngineFullError:
            self._blocks.release(table)
            self._blocks.ledger.unpromise(promise)
            return None
        self._first[job.key] = job.drawn
        self.decode.keep(seq, job.request, deadline_s=job.deadline_s)
        self._kept += 1
        return seq

    def commit(self, key: RequestKey) -> None:
        self.decode.commit_kept(key)

    def cancel(self, key: RequestKey) -> None:
        self.decode.cancel(key, "its prefill call has ended")

    def _check_new(self, key: RequestKey) -> None:
        """A Cancel or Resolve may have come first, and it wins."""
        self.decode.check_not_taken_over(key)
        if key in self.decode.streams:
            raise BatonError(Reason.REQUEST_EXISTS, f"Attempt {key.attempt} of request {key.request} is here already.")
        if self.decode.receiver.grants.is_over(key):
            raise BatonError(Reason.CANCELLED, f"Attempt {key.attempt} of request {key.request} is over already.")

    # What the engine loop calls (StepHost).

    def step_begins(self, batch: Batch) -> KvSink:
        return self.prefill.step_begins(batch)

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        to_hand_over = [event for event in events if event.seq.mode is SequenceMode.PREFILL_ONLY]
        to_stay = [event for event in events if event.seq.mode is SequenceMode.COMPLETE]
        self.decode.step_ended(sink, to_stay, is_timed=is_timed)
        for event in to_stay:
            first = self._first.pop(event.seq.key, None)
            if first is not None:
                first.set_result(event)
        self.prefill.step_ended(sink, to_hand_over, is_timed=is_timed)

    def load(self) -> NodeLoad:
        """Each request once: a kept one is the decode half's."""
        prefill, decode = self.prefill.load(), self.decode.load()
        return dataclasses.replace(
            prefill,
            running_requests=prefill.running_requests + decode.running_requests,
            requests_taken=prefill.requests_taken + decode.requests_taken - self._kept,
        )

    def holds(self) -> Holdings:
        prefill, decode = self.prefill.holds(), self.decode.holds()
        return dataclasses.replace(decode, requests=prefill.requests + decode.requests)

    def _room_changed(self) -> None:
        """Not at once: the caller may be in the middle of giving the room to somebody else."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.prefill.look_again()
