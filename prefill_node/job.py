"""One request in a prefill node, the messages to its router, and the decode half of a mixed node, which may keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Final, Protocol

from batonpb import common_pb2, prefill_pb2

from baton.errors import REGION_BLOCKS_KEY, BatonError, Reason, bad_field
from baton.ids import BlockId, Incarnation, RequestKey
from baton.wire import LOCAL_TRANSPORT
from cachestore.block_manager import BlockManager
from cachestore.layout import Layout
from engine.core import TokenEvent
from engine.scheduler import Sequence, SequenceMode
from engine.types import FINISH_TO_PROTO, GrammarMatcher, SamplingParams, logprobs_to_proto
from kvtransfer.protocol.writer import HandoffEnd
from kvtransfer.writer import Handoff, Metadata
from node.pool import DevicePool, check_request
from node.sources import Gathered, SourceKind
from prefill_node.local_policy import LocalPolicy


class LocalRunner(Protocol):
    """The decode half of a mixed node, as its prefill half sees it. Control thread only."""

    policy: LocalPolicy

    @property
    def requests(self) -> int:
        """Requests of that half, kept ones included: each has or will have a place in the engine."""
        ...

    @property
    def has_place(self) -> bool:
        """Whether it may take one more request."""
        ...

    def yields(self, job: Job) -> bool:
        """Whether requests in the middle of their answer get the room first. When that ends is not reported."""
        ...

    def never(self, job: Job) -> str | None:
        """Why the request can never run here, if so."""
        ...

    def start(self, job: Job) -> Sequence | None:
        """Compute it from the start, with its own blocks and promise. None: there is no room.

        `job.drawn` gets its first token, or the ABORTED event. Raises BatonError REQUEST_EXISTS; CANCELLED: the router
        has already given up this attempt; TAKEN_OVER.
        """
        ...

    def commit(self, key: RequestKey) -> None:
        """The first token is on its way to the router: the request now belongs to the decode half."""
        ...

    def cancel(self, key: RequestKey) -> None:
        """Give it up. Idempotent."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in this node. Changed by its `PrefillNode` only."""

    key: RequestKey
    tokens: list[int]
    """The prompt, and the part of the answer that the client already has."""
    params: SamplingParams
    request: prefill_pb2.PrefillRequest
    deadline_s: float
    metadata: Metadata
    turn: asyncio.Future[None]
    drawn: asyncio.Future[TokenEvent]
    """The first token, or the ABORTED event."""
    chain: tuple[bytes, ...] | None = None
    """Digests of the blocks that may come from the prefix cache. Computed when first needed."""
    gathered: Gathered | None = None
    """What tiers and other nodes brought; None: nobody was asked."""
    grammar: GrammarMatcher | None = None
    handoff: Handoff | None = None
    kept: bool = False
    """It is to run here: its promise includes the answer's growth."""
    local: bool = False
    """It runs here, and the decode half owns its blocks."""
    seq: Sequence | None = None
    pinned: list[BlockId] = field(default_factory=list)
    """Blocks that are held, besides by the engine, until the transport no longer reads them."""
    next_block: int = 0
    """The prompt's first block that decode lacks and that is not posted yet."""
    bypassed: int = 0
    """See `prefill_node.request_queue`."""
    grant_slow: bool = False
    """Its grant takes so long that the requests behind it no longer wait."""
    computed_s: float = 0.0
    failed: bool = False
    """The router knows that it has failed here; it asks the decode node itself whether that has committed."""
    over: bool = False
    """It was completed here. Otherwise the decode node must not run it."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    def footprint(self, pool: DevicePool) -> int:
        """Blocks that it needs in the node that writes its answer."""
        return pool.footprint(len(self.tokens), self.prompt_len, self.params.max_tokens)

    @property
    def needs_decode(self) -> bool:
        """Whether its answer may have more tokens than the one that is drawn here."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_len) > 1

    @property
    def tokens_ahead(self) -> int:
        """Tokens left to compute: none while its grant is slow, the cached ones too until it is in the engine."""
        if self.seq is not None:
            return max(0, len(self.tokens) - self.seq.computed)
        return 0 if self.grant_slow else len(self.tokens)

    @property
    def resumed(self) -> bool:
        """Whether the client has a part of its answer: it goes before requests without."""
        return len(self.tokens) > self.prompt_len

    @property
    def is_scored(self) -> bool:
        """Whether its prompt's tokens are to have log-probabilities: then it is computed from its first one on."""
        return self.params.prompt_logprobs is not None

    @property
    def rank(self) -> int:
        """The smaller goes first in the queue: those that are resumed, then by class."""
        return 0 if self.resumed else self.request.priority or common_pb2.PRIORITY_NORMAL

    def sequence(
        self, table: list[BlockId], *, cached_tokens: int, promise_key: Hashable, mode: SequenceMode
    ) -> Sequence:
        """For this node's engine, from the first token that is not cached."""
        return Sequence(
            key=self.key,
            params=self.params,
            tokens=list(self.tokens),
            prompt_len=self.prompt_len,
            computed=cached_tokens,
            block_table=table,
            promise_key=promise_key,
            mode=mode,
            cache_salt=self.request.cache_salt,
            cached_tokens=cached_tokens,
            grammar=self.grammar,
        )


def check_fits(request: prefill_pb2.PrefillRequest, pool: DevicePool) -> None:
    """Raises BatonError EMPTY_PROMPT, PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE, SAMPLING_OUT_OF_RANGE or BAD_FIELD."""
    if not request.prompt:
        raise bad_field("prompt", "The prompt is empty.", reason=Reason.EMPTY_PROMPT)
    tokens = [*request.prompt, *request.output]
    check_request(tokens, len(request.prompt), request.sampling, pool.runner)
    if pool.blocks.blocks_for(len(tokens)) > pool.blocks.blocks_usable:
        raise no_room(tokens, pool.blocks)


def no_room(tokens: Several[int], blocks: BlockManager) -> BatonError:
    """The error for tokens that exceed the region without its pinned blocks. Another node's region may hold them."""
    has = f"{blocks.ledger.num_blocks}{blocks.less_others}"
    text = (
        f"The prompt's {len(tokens)} tokens need {blocks.blocks_for(len(tokens))} blocks; this node's region has {has}."
    )
    return BatonError(
        Reason.PROMPT_TOO_LONG, text, field="prompt", metadata={REGION_BLOCKS_KEY: str(blocks.blocks_usable)}
    )


_END_REASONS: Final = {HandoffEnd.PEER_GONE: Reason.PEER_UNREACHABLE, HandoffEnd.CORRUPT: Reason.DATA_CORRUPT}
NOBODY: Final = prefill_pb2.Granted()
"""No decode node is needed. Sent like a grant, before anything is computed: if the node dies after it, this request may
be the cause."""


def granted_event(name: str, incarnation: Incarnation, endpoint: str) -> prefill_pb2.PrefillEvent:
    """The node that writes the answer, for the router."""
    granted = prefill_pb2.Granted(decode_node=name, decode_incarnation=incarnation, decode_endpoint=endpoint)
    return prefill_pb2.PrefillEvent(granted=granted)


def prompt_sources(job: Job, *, block_size: int) -> common_pb2.PromptSources:
    """Where the KV of its tokens came from. What was brought and evicted again before its turn is computed."""
    assert job.seq is not None
    brought = Gathered() if job.gathered is None else job.gathered
    left = cached = job.seq.cached_tokens
    tokens = {}
    for kind in (SourceKind.PEER, SourceKind.DISK, SourceKind.HOST):
        tokens[kind] = min(left, brought.blocks.get(kind, 0) * block_size)
        left -= tokens[kind]
    return common_pb2.PromptSources(
        computed=len(job.tokens) - cached,
        cached_device=left,
        cached_host=tokens[SourceKind.HOST],
        cached_disk=tokens[SourceKind.DISK],
        fetched=tokens[SourceKind.PEER],
        fetched_from=", ".join(brought.origins) if tokens[SourceKind.PEER] else "",
    )


def first_token(job: Job, first: TokenEvent, *, block_size: int) -> prefill_pb2.FirstToken:
    assert job.seq is not None and first.token is not None
    # Of a request that goes on behind a part of its answer, that part has log-probabilities here too.
    prompt = first.seq.prompt_logprobs[: job.prompt_len - 1]
    message = prefill_pb2.FirstToken(
        token=first.token,
        prompt_tokens_cached=job.seq.cached_tokens,
        logprobs=logprobs_to_proto(first.logprobs),
        sources=prompt_sources(job, block_size=block_size),
        prompt_logprobs=[made for found in prompt if (made := logprobs_to_proto(found)) is not None],
    )
    if first.finish is not None:
        message.finish = FINISH_TO_PROTO[first.finish]
    return message


def handed_off(job: Job, *, layout: Layout, now_s: float) -> prefill_pb2.HandedOff:
    if job.handoff is None:
        return prefill_pb2.HandedOff(transport=LOCAL_TRANSPORT)
    handoff, transport = job.handoff, job.handoff.peer.link.transport
    return prefill_pb2.HandedOff(
        transport=transport.value if transport is not None else "",
        # A position counts once, however many layer groups have a block for it.
        blocks_written=handoff.writes // layout.num_layers,
        blocks_skipped=handoff.prefix_skip // layout.num_groups,
        bytes_written=handoff.bytes_written,
        handoff_exposed_ms=(now_s - job.computed_s) * 1000,
    )


def handoff_failed(handoff: Handoff, end: HandoffEnd) -> BatonError:
    """The router's error for a handoff that has ended without a commit."""
    transport = handoff.peer.link.transport
    return BatonError(
        _END_REASONS.get(end, Reason.HANDOFF_FAILED),
        f"The handoff to {handoff.peer.address.name} ended: {end.value}. Send the request again.",
        metadata={"transport": transport.value if transport is not None else ""},
    )
