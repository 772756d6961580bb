"""One request in a prefill node, what is sent to its router, and the other half of a mixed node, which may keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Final, Protocol

from batonpb import prefill_pb2

from baton.errors import REGION_BLOCKS_KEY, BatonError, Reason, bad_field
from baton.ids import BlockId, Incarnation, RequestKey
from baton.wire import LOCAL_TRANSPORT
from cachestore.block_manager import BlockManager
from engine.core import TokenEvent
from engine.scheduler import Sequence, SequenceMode
from engine.types import FINISH_TO_PROTO, SamplingParams, logprobs_to_proto
from kvtransfer.protocol.writer import HandoffEnd
from kvtransfer.writer import Handoff, Metadata
from node.pool import DevicePool, check_request
from prefill_node.local_policy import LocalPolicy


class LocalRunner(Protocol):
    """The decode half of a mixed node, as its prefill half sees it. Control thread only."""

    policy: LocalPolicy

    @property
    def requests(self) -> int:
        """Of that half, kept ones too: each has or will have a place in the engine."""
        ...

    @property
    def has_place(self) -> bool:
        """Within its limit of requests."""
        ...

    def yields(self, job: Job) -> bool:
        """Whether requests in the middle of their answer get the room before it. The end of that is not reported."""
        ...

    def never(self, job: Job) -> str | None:
        """Why the request can never run here, whatever is free."""
        ...

    def start(self, job: Job) -> Sequence | None:
        """Run it from its prompt on, with blocks and a promise of its own. None: there is no room.

        `job.drawn` gets its first token, or the ABORTED event. Raises BatonError REQUEST_EXISTS; CANCELLED where the
        router has let go of this attempt already.
        """
        ...

    def commit(self, key: RequestKey) -> None:
        """The first token is on its way to the router: from here on the request is the other half's."""
        ...

    def cancel(self, key: RequestKey) -> None:
        """Give it up, wherever it is. Idempotent."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in this node. Changed by its `PrefillNode` only."""

    key: RequestKey
    tokens: list[int]
    """Prompt, and what the client has of the answer already."""
    params: SamplingParams
    request: prefill_pb2.PrefillRequest
    deadline_s: float
    metadata: Metadata
    turn: asyncio.Future[None]
    drawn: asyncio.Future[TokenEvent]
    """The first token, or the ABORTED event."""
    chain: tuple[bytes, ...] | None = None
    """Digests of the full blocks that may come from the prefix cache. Computed when first needed."""
    handoff: Handoff | None = None
    kept: bool = False
    """It is to run here: its promise has the answer's growth in it."""
    local: bool = False
    """It does run here. The other half then owns its blocks."""
    seq: Sequence | None = None
    pinned: list[BlockId] = field(default_factory=list)
    """Blocks that the writer holds on top of the engine, until the transport has let go of them."""
    next_block: int = 0
    """First block of the prompt that has not been posted (and that decode lacks)."""
    bypassed: int = 0
    """See `prefill_node.request_queue`."""
    grant_slow: bool = False
    """Its grant has been asked for so long that nobody waits for it to be computed first."""
    computed_s: float = 0.0
    failed: bool = False
    """The router knows that it has failed here, and itself asks the decode node whether it has committed."""
    over: bool = False
    """Its life here went to the end. Otherwise the decode node must not run it."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    def footprint(self, pool: DevicePool) -> int:
        """Blocks that it comes to hold in the node that writes its answer."""
        return pool.footprint(len(self.tokens), self.prompt_len, self.params.max_tokens)

    @property
    def needs_decode(self) -> bool:
        """Its answer has more tokens than the one that is drawn here."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_len) > 1

    @property
    def tokens_ahead(self) -> int:
        """Of the prompt, that are not computed yet; what is cached is known from when it enters the engine."""
        if self.seq is not None:
            return max(0, len(self.tokens) - self.seq.computed)
        return 0 if self.grant_slow else len(self.tokens)

    @property
    def resumed(self) -> bool:
        """The client is in the middle of its answer: it goes before those that have none yet."""
        return len(self.tokens) > self.prompt_len

    def sequence(
        self, table: list[BlockId], *, cached_tokens: int, promise_key: Hashable, mode: SequenceMode
    ) -> Sequence:
        """For the engine of this node, from its first token that is not cached."""
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
    """They do not fit into the region, less what pins ask for, whatever else is free. Another node's may hold them."""
    has = f"{blocks.ledger.num_blocks}{blocks.less_others}"
    text = (
        f"The prompt's {len(tokens)} tokens need {blocks.blocks_for(len(tokens))} blocks; this node's region has {has}."
    )
    return BatonError(
        Reason.PROMPT_TOO_LONG, text, field="prompt", metadata={REGION_BLOCKS_KEY: str(blocks.blocks_usable)}
    )


_END_REASONS: Final = {HandoffEnd.PEER_GONE: Reason.PEER_UNREACHABLE, HandoffEnd.CORRUPT: Reason.DATA_CORRUPT}
NOBODY: Final = prefill_pb2.Granted()
"""No decode node is needed. Sent before anything is computed, as a grant is: a request whose attempt ends with the
node's death from here on may be what kills nodes."""


def granted_event(name: str, incarnation: Incarnation, endpoint: str) -> prefill_pb2.PrefillEvent:
    """The node that writes the answer, for the router."""
    granted = prefill_pb2.Granted(decode_node=name, decode_incarnation=incarnation, decode_endpoint=endpoint)
    return prefill_pb2.PrefillEvent(granted=granted)


def first_token_event(job: Job, first: TokenEvent) -> prefill_pb2.PrefillEvent:
    assert job.seq is not None and first.token is not None
    event = prefill_pb2.FirstToken(
        token=first.token, prompt_tokens_cached=job.seq.cached_tokens, logprobs=logprobs_to_proto(first.logprobs)
    )
    if first.finish is not None:
        event.finish = FINISH_TO_PROTO[first.finish]
    return prefill_pb2.PrefillEvent(first_token=event)


def handed_off_event(job: Job, *, num_layers: int, now_s: float) -> prefill_pb2.PrefillEvent:
    if job.handoff is None:
        return prefill_pb2.PrefillEvent(handed_off=prefill_pb2.HandedOff(transport=LOCAL_TRANSPORT))
    handoff, transport = job.handoff, job.handoff.peer.link.transport
    return prefill_pb2.PrefillEvent(
        handed_off=prefill_pb2.HandedOff(
            transport=transport.value if transport is not None else "",
            blocks_written=handoff.writes // num_layers,
            blocks_skipped=handoff.prefix_skip,
            bytes_written=handoff.bytes_written,
            handoff_exposed_ms=(now_s - job.computed_s) * 1000,
        )
    )


def handoff_failed(handoff: Handoff, end: HandoffEnd) -> BatonError:
    """The router's error for a handoff that has ended without a commit."""
    transport = handoff.peer.link.transport
    return BatonError(
        _END_REASONS.get(end, Reason.HANDOFF_FAILED),
        f"The handoff to {handoff.peer.address.name} ended: {end.value}. Send the request again.",
        metadata={"transport": transport.value if transport is not None else ""},
    )
