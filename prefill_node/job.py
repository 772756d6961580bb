"""One request in a prefill node, and what the router is told of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from batonpb import common_pb2, prefill_pb2

from baton.errors import BatonError, Reason
from baton.ids import BlockId, Incarnation, RequestKey
from baton.wire import LOCAL_TRANSPORT
from engine.core import TokenEvent
from engine.sequence import Sequence
from engine.types import SamplingParams
from engine.wire import FINISH_TO_PROTO, logprobs_to_proto
from kvtransfer.protocol.writer import HandoffEnd
from kvtransfer.writer import Handoff, Metadata
from prefill_node.local import LocalRun


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in this node. Changed by its `PrefillNode` only."""

    key: RequestKey
    tokens: list[int]
    """Prompt, and what the client has of the answer already."""
    prompt_len: int
    params: SamplingParams
    router: Incarnation
    cache_salt: bytes
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
    local: LocalRun | None = None
    """It does run here. The other half then owns its blocks."""
    seq: Sequence | None = None
    pinned: list[BlockId] = field(default_factory=list)
    """Blocks that the writer holds on top of the engine, until the transport has let go of them."""
    next_block: int = 0
    """First block of the prompt that has not been posted (and that decode lacks)."""
    overtaken: int = 0
    """See `prefill_node.waiting`."""
    grant_slow: bool = False
    """Its grant has been asked for so long that nobody waits for it to be computed first."""
    computed_s: float = 0.0
    told: bool = False
    """The router is told that it has failed here, and itself asks the decode node whether it has committed."""
    over: bool = False
    """Its life here went to the end. Otherwise the decode node must not run it."""

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


_END_REASONS: Final = {HandoffEnd.PEER_GONE: Reason.PEER_UNREACHABLE, HandoffEnd.CORRUPT: Reason.DATA_CORRUPT}
NOBODY: Final = prefill_pb2.Granted()
"""No decode node is needed. Told before anything is computed, as a grant is: a request whose attempt ends with the
node's death from here on may be what kills nodes."""


def granted_event(handoff: Handoff) -> prefill_pb2.PrefillEvent:
    address = handoff.peer.address
    return prefill_pb2.PrefillEvent(
        granted=prefill_pb2.Granted(
            decode_node=address.name,
            decode_incarnation=address.pair.receiver,
            decode_endpoint=address.endpoint,
        )
    )


def first_token_event(job: Job, first: TokenEvent) -> prefill_pb2.PrefillEvent:
    assert job.seq is not None and first.token is not None
    event = prefill_pb2.FirstToken(
        token=first.token, prompt_tokens_cached=job.seq.cached_tokens, logprobs=first_logprobs(first)
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


def first_logprobs(event: TokenEvent) -> common_pb2.TokenLogprobs | None:
    return None if event.logprobs is None else logprobs_to_proto(event.logprobs)


def handoff_failed(handoff: Handoff, end: HandoffEnd) -> BatonError:
    """What the router is told of one that has ended without a commit."""
    transport = handoff.peer.link.transport
    return BatonError(
        _END_REASONS.get(end, Reason.HANDOFF_FAILED),
        f"The handoff to {handoff.peer.address.name} ended: {end.value}. Send the request again.",
        metadata={"transport": transport.value if transport is not None else ""},
    )
