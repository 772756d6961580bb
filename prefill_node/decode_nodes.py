"""Which decode nodes are asked for a grant, in which order, and how their refusals end the request."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.wire import ModelInfo, NodeRecord
from kvtransfer.link import differences
from kvtransfer.writer import Handoff
from node.peers import Peers
from node.pool import DevicePool
from prefill_node.config import PrefillConfig
from prefill_node.job import Job
from prefill_node.local_policy import NOT_THERE, TAKES_NONE_NOW

log = get_log("prefill")

ASK_ELSEWHERE: Final = NOT_THERE | TAKES_NONE_NOW
"""After such an answer the next decode node is asked."""
NOT_REACHED: Final = frozenset(
    {Reason.DEADLINE, Reason.PEER_UNREACHABLE, Reason.INCARNATION_MISMATCH, Reason.NODE_DRAINING}
)
"""Reasons why a decode node was not reached (DEADLINE: the call's own). Passed on unchanged, they would mean to the
router that this prefill node is gone."""
ROOM_SHARE_MIN: Final = 0.9
"""A node that has the prefix goes first while it has at least this share of the best node's room. A smaller share
would pile up the requests of a popular prefix on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No node has granted: the error for the router, and the reasons of all refusals."""

    error: BatonError
    reasons: frozenset[Reason]
    full: Sequence[NodeRecord] = ()
    """The nodes without room."""


class DecodeNodes:
    """The decode nodes that a prefill node knows, and how to reach them. Control thread only."""

    def __init__(self, *, config: PrefillConfig, pool: DevicePool, peers: Peers) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._peers = peers
        self._tries_max = config.decode_tries_max
        self.affinity = DecodeAffinity(blocks_max=config.affinity_blocks_max)
        self._loop = asyncio.get_running_loop()
        self._repeats = RepeatLog(log, self._loop.time, key="node")

    def upkeep(self) -> None:
        """Called every second."""
        self._repeats.upkeep()

    @property
    def ready(self) -> int:
        """How many decode nodes are ready, by the directory."""
        return len(ready_nodes(self._peers.records()))

    def ready_for(self, job: Job, *, avoided_too: bool) -> int:
        """How many decode nodes are ready; without `avoided_too` only those that the request's router reaches and that
        may hold the request, by their reports."""
        if avoided_too:
            return self.ready
        reached = [r for r in ready_nodes(self._peers.records()) if r.incarnation not in job.request.avoid_decode]
        return len(self._may_take(job, reached))

    def may_be_held(self, job: Job) -> bool:
        """Whether any node's region, ready or not, may hold the request, by their reports."""
        return bool(self._may_take(job, self._peers.records()))

    def _may_take(self, job: Job, records: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Those with the same model and a large enough region, whatever is free there now."""
        blocks = job.footprint(self._pool)
        own = self._pool.model
        return [r for r in records if may_hold(r, blocks) and r.model is not None and not differences(own, r.model)]

    async def reserve(
        self, job: Job, *, sources_released: Callable[[], None], avoided_too: bool = True
    ) -> Handoff | Refused:
        """Ask some nodes, best first, until one grants; `avoided_too` as for `order_decode_nodes`.

        Raises BatonError: an answer that ends the request.
        """
        behind: list[NodeRecord] = []
        records = self._peers.records()
        chain = self._blocks.prefix_cache.chain(job.tokens, job.request.cache_salt)
        try:
            candidates = order_decode_nodes(
                records,
                own=self._pool.model,
                may_place=lambda record: self._may_place(record, behind),
                rng=self._peers.runtime.rng,
                tries_max=self._tries_max,
                affinity=self.affinity,
                chain=chain,
                avoid=job.request.avoid_decode,
                blocks=job.footprint(self._pool),
                avoided_too=avoided_too,
            )
        except BatonError as error:
            # The directory still lists processes that have ended: they are unreachable, not full.
            lost = error.reason is Reason.DECODE_FULL and not behind
            reasons = frozenset({Reason.PEER_UNREACHABLE if lost else error.reason})
            return Refused(error=_nobody_reached(error) if lost else error, reasons=reasons)
        self.affinity.keep_only({record.incarnation for record in records})
        refusals: list[BatonError] = []
        without_room: list[NodeRecord] = []
        for record in candidates:
            try:
                handoff = await self._peers.for_record(record).reserve(
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
        """It has room elsewhere: nodes that refused it as a resumed request may admit new ones again."""
        for record in full if job.resumed else ():
            with suppress(BatonError):  # out of reach by now
                self._peers.for_record(record).cancel_request(job.key)

    def _request(self, job: Job) -> transfer_pb2.ReserveRequest:
        return transfer_pb2.ReserveRequest(
            key=job.request.key,
            prompt=job.request.prompt,
            output=job.request.output,
            sampling=job.request.sampling,
            router=job.request.router,
            cache_salt=job.request.cache_salt,
            deadline_left_ms=max(0, int((job.deadline_s - self._loop.time()) * 1000)),
            resumable=job.request.resumable if job.request.HasField("resumable") else None,
            whole=job.request.whole,
        )

    def _may_place(self, record: NodeRecord, behind: list[NodeRecord]) -> bool:
        """Whether a new request may be placed there. If it has to accept earlier writes first, `behind` gets it."""
        try:
            has_room = self._peers.for_record(record).has_room()
        except BatonError:
            return False
        if not has_room:
            behind.append(record)
        return has_room


def order_decode_nodes(
    records: Sequence[NodeRecord],
    *,
    own: ModelInfo,
    may_place: Callable[[NodeRecord], bool],
    rng: random.Random,
    tries_max: int,
    affinity: DecodeAffinity,
    chain: Sequence[bytes] = (),
    avoid: Collection[int] = (),
    blocks: int = 0,
    avoided_too: bool = True,
) -> list[NodeRecord]:
    """At most `tries_max` nodes, best first: repeatedly the roomier of two drawn at random (power of two choices).

    Reports are hints: all prefill nodes would choose the best one at once. Nodes whose region cannot hold `blocks` are
    asked only if no other is known. `affinity` may put a node that has the prompt's `chain` first. Nodes whose
    incarnation is in `avoid` are asked only if there is no other, and never without `avoided_too`. `may_place`: whether
    this process may place anything new there (limits of unacknowledged writes).

    Raises BatonError NO_DECODE_NODE, INCOMPATIBLE_NODE or DECODE_FULL: there is no node to ask.
    """
    ready = ready_nodes(records)
    if not ready:
        raise BatonError(
            Reason.NO_DECODE_NODE,
            f"No decode node is ready ({len(records)} known). Start one, or wait for one to come up.",
            retry_after_ms=1_000,
        )
    unfit = {r.name: differences(own, r.model) for r in ready if r.model is not None}
    fit = [r for r in ready if not unfit[r.name]]
    if not fit:
        differing = "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(unfit.items()))
        raise BatonError(Reason.INCOMPATIBLE_NODE, f"No decode node fits this prefill node. {differing}.")
    large = [r for r in fit if may_hold(r, blocks)] or fit
    left = [r for r in large if may_place(r)]
    if not left:
        who = f"All {len(fit)} decode nodes"
        if len(large) < len(fit):
            names = ", ".join(sorted(r.name for r in large))
            who = f"The decode nodes that are large enough for the request ({names}; {len(large)} of {len(fit)})"
        raise BatonError(
            Reason.DECODE_FULL,
            f"{who} are behind with accepting writes, or out of reach.",
            retry_after_ms=200,
        )
    wanted = [r for r in left if r.incarnation not in avoid]
    if not wanted and not avoided_too:
        raise BatonError(
            Reason.NO_DECODE_NODE,
            f"This node reaches {len(left)} decode nodes; the router reaches none of them.",
            retry_after_ms=1_000,
        )
    left = wanted or left
    order: list[NodeRecord] = []
    while left and len(order) < tries_max:
        best = max(rng.sample(left, min(2, len(left))), key=affinity.room)
        if not order:
            best = affinity.first(chain, left, best)
        left.remove(best)
        order.append(best)
    return order


def room(record: NodeRecord) -> int:
    """Blocks that the node could give to a new request, by its last report."""
    blocks = record.load.blocks
    return blocks.free + blocks.cached - blocks.pinned - blocks.promised


def may_hold(record: NodeRecord, blocks: int) -> bool:
    """Whether one request may have so many blocks there; pinned blocks do not count. True if the region is unknown."""
    region = record.load.blocks
    return region.total == 0 or blocks <= region.total - region.pinned


def ready_nodes(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The nodes that take requests, by their records."""
    return [r for r in records if r.lifecycle is Lifecycle.READY and r.model is not None]


class DecodeAffinity:
    """Which prompts decode nodes have. Control thread only. Remembers `blocks_max` blocks over all processes, in about
    220 bytes each."""

    def __init__(self, *, blocks_max: int) -> None:
        assert blocks_max > 0, blocks_max
        self._blocks_max = blocks_max
        self._sent: OrderedDict[tuple[Incarnation, bytes], None] = OrderedDict()
        """Least recently used first."""
        self._taken: dict[Incarnation, tuple[int, int]] = {}
        """By process: the sequence of its last report, and the blocks granted to us since."""

    def granted(self, record: NodeRecord, chain: Sequence[bytes], blocks: int) -> None:
        """The process has granted a prompt with this chain, and reserved `blocks` for it and its answer."""
        sequence, taken = self._taken.get(record.incarnation, (record.sequence, 0))
        self._taken[record.incarnation] = (record.sequence, blocks + (taken if sequence == record.sequence else 0))
        for digest in reversed(chain):  # the start of a chain is forgotten last
            self._sent[record.incarnation, digest] = None
            self._sent.move_to_end((record.incarnation, digest))
        while len(self._sent) > self._blocks_max:
            self._sent.popitem(last=False)

    def cached(self, incarnation: Incarnation, chain: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks the process probably has."""
        for count, digest in enumerate(chain):
            if (incarnation, digest) not in self._sent:
                return count
        return len(chain)

    def keep_only(self, present: set[Incarnation]) -> None:
        """Forget the reports of processes that are gone."""
        self._taken = {incarnation: taken for incarnation, taken in self._taken.items() if incarnation in present}

    def first(self, chain: Sequence[bytes], nodes: Sequence[NodeRecord], best: NodeRecord) -> NodeRecord:
        """The node with most of the chain, if it has about as much room as `best`; else `best`."""
        enough = ROOM_SHARE_MIN * self.room(best)
        fit = [node for node in nodes if node is best or self.room(node) >= enough]
        return max(fit, key=lambda node: (self.cached(node.incarnation, chain), node is best, self.room(node)))

    def room(self, record: NodeRecord) -> int:
        """By its last report, less what it has granted to us since."""
        sequence, taken = self._taken.get(record.incarnation, (0, 0))
        return room(record) - (taken if sequence == record.sequence else 0)


def most_hopeful(refusals: Sequence[BatonError]) -> BatonError:
    """The refusal for the router, of at least one.

    A full node is worth another try; of several, the one that expects room first. "Too long" is final only if all nodes
    say so: one that did not answer may hold the request.
    """
    full = [e for e in refusals if e.reason is Reason.DECODE_FULL]
    if full:
        return min(full, key=lambda e: e.retry_after_ms or 0)
    hopeful = [e for e in refusals if e.reason is not Reason.PROMPT_TOO_LONG]
    return (hopeful or refusals)[-1]


def _nobody_reached(error: BatonError) -> BatonError:
    """This node reaches no decode node. Another prefill node may."""
    return BatonError(
        Reason.NO_DECODE_NODE,
        f"This prefill node found no decode node for the request. {error.message}",
        retry_after_ms=error.retry_after_ms,
    )


def _named(record: NodeRecord, error: BatonError) -> BatonError:
    """The same refusal, with the node's name."""
    text = error.message
    if record.name not in text:
        text = f"The decode node {record.name} did not grant: {text}"
    return error.reworded(text)
