"""One client request in the router, one try at it, and what its client is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError
from baton.ids import Incarnation, RequestId
from baton.tracing import Traceparent
from router.observer import ObservedRequest
from router.request import CheckedRequest
from router.retries import Retries
from router.subscriptions import DecodeSubscription, Inbox

TokenPart = tuple[int, list[int], list[common_pb2.TokenLogprobs]]
"""Index of the first token, token ids, and their log-probabilities (one each, or none at all)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One client request."""

    id: RequestId
    """Ours, random: what a client calls its request may be used twice, and grants and tombstones are keyed by this."""
    client_id: RequestId
    trace: Traceparent
    checked: CheckedRequest
    began_s: float
    deadline_s: float
    retries: Retries
    stats: inference_pb2.RequestStats
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    output: list[int] = field(default_factory=list)
    """What the client has, whichever attempt it came from: the next attempt goes on behind it."""
    avoid: set[Incarnation] = field(default_factory=set)
    """Prefill processes that did not answer this request, or had no decode node for it."""
    too_small: set[Incarnation] = field(default_factory=set)
    """Prefill processes that said that their regions can never hold it, whatever their records say."""
    avoid_decode: set[Incarnation] = field(default_factory=set)
    """Decode processes that this router could not reach with this request; a prefill node may."""
    attempts: int = 0
    nodes: dict[str, None] = field(default_factory=dict)
    """Names of those that it was placed on, in order."""
    cut_off: BatonError | None = None
    """Its client was cut off, with this."""
    token_times_s: list[float] = field(default_factory=list)
    block_size: int = 0
    observed: ObservedRequest = field(default_factory=ObservedRequest)
    on_put: Callable[[Inbox], None] | None = None

    @property
    def tokens(self) -> int:
        """That the next attempt computes: the prompt, and what the client has of the answer."""
        return len(self.checked.prompt) + len(self.output)


@dataclass(slots=True, eq=False, kw_only=True)
class Try:
    """One try: its inbox, and where its tokens come from once a decode node has granted."""

    inbox: Inbox
    queued_s: float | None = None
    """When the prefill node's word that it has the request was here. None: it never was."""
    granted: bool = False
    """The prefill node has said that a decode node has taken it, or that it needs none."""
    subscription: DecodeSubscription | None = None
    resolved: int = 0
    """How often the decode node was asked whether it goes on."""

    @property
    def taken(self) -> bool:
        """A decode node has it, or none is needed. Its tokens come by another way than the word of the grant, and may
        be here first."""
        return self.granted or bool(self.inbox.tokens)


def started_event(job: Job) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        started=inference_pb2.Started(request_id=job.client_id, prompt_tokens=len(job.checked.prompt))
    )


def tokens_event(
    first_index: int, ids: list[int], text: str, logprobs: list[common_pb2.TokenLogprobs]
) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        tokens=inference_pb2.Tokens(first_index=first_index, ids=ids, text=text, logprobs=logprobs)
    )


def finished_event(job: Job) -> inference_pb2.GenerateEvent:
    times = job.token_times_s[: job.stats.output_tokens]
    job.stats.ttft_ms = (times[0] - job.began_s) * 1000 if times else 0.0
    job.stats.itl_mean_ms = (times[-1] - times[0]) / (len(times) - 1) * 1000 if len(times) > 1 else 0.0
    return inference_pb2.GenerateEvent(finished=inference_pb2.Finished(reason=job.finish, stats=job.stats))
