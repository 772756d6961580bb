"""What the router logs of its requests: tried again, failed, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from baton.errors import BatonError, Code, Reason
from baton.ids import RequestId
from baton.log import get_log
from baton.repeats import RepeatLimits, RepeatLog
from router.job import Job
from router.request import ClientCall
from router.retries import Verdict

log = get_log("router")

LIMITS: Final = RepeatLimits(interval_ms=10_000, full_max=20)
"""For each reason: lines in an interval before the rest is counted."""
_CLIENTS_OWN_CODES: Final = frozenset({Code.INVALID_ARGUMENT, Code.NOT_FOUND})
_CLIENTS_OWN_REASONS: Final = frozenset({Reason.NO_TOKENIZER, Reason.NO_CHAT_TEMPLATE})
"""It asks for what this model or router does not have, whatever state the cluster is in."""
_KEYS_OWN_REASONS: Final = frozenset(
    {Reason.INVALID_API_KEY, Reason.RATE_LIMIT_EXCEEDED, Reason.PERMISSION_DENIED, Reason.TAKEN_OVER, Reason.CANCELLED}
)
"""Nothing is wrong here: whoever watches for warnings is not to be woken by strangers."""


class RequestLog(RepeatLog):
    """How failed requests are tried again, how they end, and which are refused at the door; never their text. One line
    each; where too many have one reason, the others are counted and summed up. Control thread only."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__(log, now_s, LIMITS, key="reason")

    def tried_again(self, verdict: Verdict, error: BatonError, job: Job, *, attempt: int) -> None:
        """An attempt has failed, another one follows: the first of those that look for a node, and each resumption."""
        self.info(
            verdict.name.lower(),
            peer=error.reason.value,
            request=job.id,
            attempt=attempt,
            tokens=len(job.output),
            why=error.message,
        )

    def failed(self, error: BatonError, *, call: ClientCall, job: Job | None, began_s: float) -> None:
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
        if call.key_name is not None:
            fields["api_key"] = call.key_name
        self._ended("request failed", error, call.id, fields)

    def refused(self, error: BatonError, *, door: str, request_id: RequestId | None = None) -> None:
        """The client has this error in place of a request: none has begun. `door` is where it came to."""
        self._ended("request refused", error, request_id, {"door": door})

    def _ended(self, what: str, error: BatonError, request_id: RequestId | None, fields: dict[str, Any]) -> None:
        clients_own = error.code in _CLIENTS_OWN_CODES or error.reason in _CLIENTS_OWN_REASONS
        # The message of such an error may quote the request.
        why = {"field": error.field or "none"} if clients_own else {"why": error.message}
        report = self.info if clients_own or error.reason in _KEYS_OWN_REASONS else self.warning
        report(what, peer=error.reason.value, request=request_id or "none", **fields, **why)
