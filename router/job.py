"""One client request in the router, one attempt at it, what its client receives, and what the log says of it.

The log has how failed requests are tried again, how they end, and which are refused at the door; never their text. One
line each; where too many have one reason, the others are counted and summed up (`baton.repeats`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Code, Reason
from baton.ids import Incarnation, RequestId
from baton.log import get_log
from baton.repeats import RepeatLimits, RepeatLog
from baton.tracing import Traceparent
from router.decode_streams import DecodeSubscription, Inbox
from router.observer import ObservedRequest
from router.request import CheckedRequest
from router.retries import Retries, Verdict

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


log = get_log("router")

LIMITS: Final = RepeatLimits(interval_ms=10_000, full_max=20)
"""For each reason: lines in an interval before the rest is counted."""
_CLIENTS_OWN_CODES: Final = frozenset({Code.INVALID_ARGUMENT, Code.NOT_FOUND})
_CLIENTS_OWN_REASONS: Final = frozenset({Reason.NO_TOKENIZER, Reason.NO_CHAT_TEMPLATE})
"""It asks for what this model or router does not have, whatever state the cluster is in."""


class RequestLog:
    """One router's. Control thread only; `upkeep` every second."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._repeats = RepeatLog(log, now_s, LIMITS, key="reason")
        self._now_s = now_s

    def tried_again(self, verdict: Verdict, error: BatonError, job: Job, *, attempt: int) -> None:
        """An attempt has failed, another one follows: the first of those that look for a node, and each resumption."""
        self._repeats.info(
            verdict.name.lower(),
            peer=error.reason.value,
            request=job.id,
            attempt=attempt,
            tokens=len(job.output),
            why=error.message,
        )

    def failed(self, error: BatonError, *, request_id: RequestId, job: Job | None, began_s: float) -> None:
        """The client has this error. `job` is None for a request that was refused before anything was done for it."""
        fields: dict[str, Any] = {"took_ms": round((self._now_s() - began_s) * 1000)}
        if job is not None:
            fields.update(
                key=job.id,
                attempts=job.attempts,
                resumptions=job.stats.resumptions,
                tokens=len(job.output),
                nodes=",".join(job.nodes) or "none",
            )
        self._tell("request failed", error, request_id, fields)

    def refused(self, error: BatonError, *, door: str, request_id: RequestId | None) -> None:
        """The client has this error in place of a request: none has begun. `door` is where it came to."""
        self._tell("request refused", error, request_id, {"door": door})

    def _tell(self, what: str, error: BatonError, request_id: RequestId | None, fields: dict[str, Any]) -> None:
        clients_own = error.code in _CLIENTS_OWN_CODES or error.reason in _CLIENTS_OWN_REASONS
        # The message of such an error may quote the request.
        told = {"field": error.field or "none"} if clients_own else {"why": error.message}
        tell = self._repeats.info if clients_own else self._repeats.warning
        tell(what, peer=error.reason.value, request=request_id or "none", **fields, **told)

    def upkeep(self) -> None:
        self._repeats.upkeep()

    def close(self) -> None:
        self._repeats.close()
