"""What happens to a request whose attempt has failed: placed again, resumed elsewhere, or ended with an error. Pure.

An attempt that no decode node has granted is placed again while there is time. After the grant the request is resumed:
prompt and the tokens that the client has are computed again, a few times only (it may be what kills nodes). The whole
cluster's resumptions are paced: retry budgets as in gRPC's A6 proposal and in Finagle, but work over budget waits its
turn instead of failing, because its client holds half an answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from baton.config import fixed, setting
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.retry_time import RESUMED_PAUSE_MS_MAX

RESOLVES_MAX = 4
"""How often one attempt may go on because its decode node has committed it."""
PLACEMENT_DOUBLINGS_MAX = 4
"""How often the pause between two looks for a node doubles."""
RESUMED_DOUBLINGS_MAX = 2
"""The same for a request in the middle of its answer: decode nodes keep room for one that comes again soon."""
GONE = frozenset({Reason.NODE_DRAINING, Reason.PEER_UNREACHABLE, Reason.INCARNATION_MISMATCH})
"""The node is gone, which says nothing about the load of the others: the next one is asked without a longer pause.
Otherwise a request's time could run out on dead nodes of a list that no directory keeps up to date."""
_PREFILL_FULL = frozenset({Reason.QUEUE_FULL, Reason.TOO_MANY_CALLS})
FULL = _PREFILL_FULL | {Reason.DECODE_FULL}
"""The nodes are there and have no room: a request without a token waits in line, for as long as its client does."""
PLACE_AGAIN = GONE | FULL | {
    Reason.HANDOFF_FAILED,  # before it began: its link ended while the grant was on its way
    Reason.NO_PREFILL_NODE,
    Reason.NO_DECODE_NODE,
    Reason.PAIR_FENCING,
}  # fmt: skip
"""Nobody has taken the request yet and somebody may soon."""
ASK_ANOTHER = GONE | _PREFILL_FULL | {
    Reason.NO_DECODE_NODE,  # that it knows of; one may have come up while the directory was lost
    Reason.DATA_CORRUPT,  # by it or by the decode node: both are avoided
}  # fmt: skip
"""The prefill node's own trouble: the next try goes to another one where there is one."""
LOST_WAITING = frozenset({
    Reason.NODE_DRAINING,
    Reason.HANDOFF_FAILED,
    Reason.PAIR_FENCING,
    Reason.PEER_UNREACHABLE,
    Reason.NO_DECODE_NODE,  # the prefill node is there, and those that it would have handed over to are not
})  # fmt: skip
"""The node that had queued the request can no longer serve it. Its wait there was no search for a node."""
RESUMABLE = GONE | {Reason.HANDOFF_FAILED, Reason.DATA_CORRUPT, Reason.GRANT_REVOKED, Reason.INTERNAL}
"""A node's trouble after the grant, never the client's own error."""
DEATHS = frozenset({Reason.PEER_UNREACHABLE, Reason.INCARNATION_MISMATCH, Reason.INTERNAL})
"""Those that may be the request's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """Raises InvalidField where a limit is not positive."""

    deaths_max: int = setting(
        2,
        "attempts of one request that may end with the death of a node before it is given up",
        "Raise it where nodes die often for reasons of their own. It protects the cluster from a request that "
        "kills nodes.",
    )
    resumptions_max: int = setting(
        8,
        "resumptions of one request, for whatever reason",
        "Long answers must survive more node failures or rolling upgrades.",
    )
    resume_wait_ms_max: int = setting(
        30_000,
        "how long a request that has begun its answer may look for nodes to resume on",
        "Replacements of lost nodes take longer to start, or clients should get an error sooner.",
    )
    resumptions_per_s: int = fixed(100)
    """Resumptions per second of the whole cluster, shared among its routers."""
    resumptions_burst: int = fixed(256)
    """Resumptions of the whole cluster that may start at once, before the rate applies."""
    resume_jitter_ms_max: int = fixed(50)
    """A random time up to this is added to each turn; 0 for none."""
    resumptions_waiting_max: int = fixed(1_024)
    """Resumptions that wait for their turn in one router; one more is refused."""
    resolve_ms_max: int = fixed(500)
    """How long a decode node may take to say whether an attempt has committed."""
    resolve_tries_max: int = fixed(2)
    """Such questions left unanswered before the attempt is dropped."""

    def __post_init__(self) -> None:
        check_positive(self, *(name for name in self.__slots__ if name != "resume_jitter_ms_max"))
        if self.resume_jitter_ms_max < 0:
            raise InvalidField("resume_jitter_ms_max", f"must be 0 or more, not {self.resume_jitter_ms_max}")


class Verdict(Enum):
    """What to do with a request whose attempt has failed."""

    WAIT = "nobody has room for it: it waits in line"
    PLACE_AGAIN = "nobody had taken it"
    RESUME = "it is taken up where the client's answer ends"


@dataclass(slots=True, kw_only=True)
class Retries:
    """The failures of one request so far."""

    config: RetryConfig
    search_ms_max: int
    """How long it may look for a node that is there."""
    give_up_s: float | None = None
    """Until then it may look. None: no look since the last answer of a node has failed."""
    deaths: int = 0
    resumptions: int = 0

    def judge(
        self,
        error: BatonError,
        *,
        granted: bool,
        now_s: float,
        queued_s: float | None = None,
        lost_before: bool = False,
        in_answer: bool = False,
    ) -> Verdict:
        """Count the failure of an attempt. Raises the client's error where nothing more is tried.

        `in_answer`: the client has a part of the answer, so the request does not wait in line.
        `queued_s` is when a prefill node said that it has the request, None if none did: waiting for a node that is not
        reached is a part of the search. `lost_before`: this router had already lost the decode node before it granted,
        and nothing else has failed, so the attempt does not count as a death.
        """
        try:
            if not granted:
                if error.reason in FULL and not in_answer:
                    self.give_up_s = None
                    return Verdict.WAIT
                if self.give_up_s is None:
                    self.give_up_s = now_s + self.search_ms_max / 1000
                elif error.reason in LOST_WAITING and queued_s is not None:
                    self.give_up_s += now_s - queued_s
                if error.reason in PLACE_AGAIN and now_s < self.give_up_s:
                    return Verdict.PLACE_AGAIN
                raise error
            if error.reason not in RESUMABLE:
                raise error
            self.deaths += error.reason in DEATHS and not lost_before
            if self.deaths >= self.config.deaths_max or self.resumptions >= self.config.resumptions_max:
                blame = ", perhaps because of the request" if self.deaths >= self.config.deaths_max else ""
                raise BatonError(
                    Reason.ATTEMPTS_SPENT,
                    f"{self.resumptions + 1} attempts at this request have failed, {self.deaths} of them with the "
                    f"death of a node{blame}. The last one: {error.message}",
                ) from error
        finally:
            del error  # or it would refer to itself, by this frame in its traceback
        self.resumptions += 1
        self.give_up_s = now_s + self.config.resume_wait_ms_max / 1000
        return Verdict.RESUME


def pause_ms(retry_ms: int, rounds: int, *, resumed: bool, spread: float) -> float:
    """Pause before the next look for a node, after `rounds` of them; `spread` is drawn from 0 to 1.

    At most RESUMED_PAUSE_MS_MAX for a request in the middle of its answer: decode nodes count on that.
    """
    doublings_max = RESUMED_DOUBLINGS_MAX if resumed else PLACEMENT_DOUBLINGS_MAX
    drawn_ms = (retry_ms << min(rounds, doublings_max)) * (0.5 + spread)
    return min(drawn_ms, RESUMED_PAUSE_MS_MAX) if resumed else drawn_ms


class ResumptionPace:
    """A bucket of `resumptions_burst` turns that fills at `resumptions_per_s`, one router's share of both.

    The requests of a lost node fail at once; a random time keeps them from reaching the other nodes at once too.
    """

    def __init__(self, config: RetryConfig, *, now_s: float, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._turns = float(config.resumptions_burst)
        self._counted_s = now_s
        self.routers = 1
        """In the cluster, this one counted."""

    def take_turn(self, now_s: float) -> float:
        """Seconds that the caller waits for its turn. Raises BatonError ATTEMPTS_SPENT where too many are waiting."""
        rate = self._config.resumptions_per_s / self.routers
        burst = max(1.0, self._config.resumptions_burst / self.routers)
        self._turns = min(burst, self._turns + (now_s - self._counted_s) * rate)
        self._counted_s = now_s
        if self._turns - 1 < -self._config.resumptions_waiting_max:
            raise BatonError(
                Reason.ATTEMPTS_SPENT,
                f"The node of this request was lost, and {self._config.resumptions_waiting_max} other requests already "
                "wait to be resumed (resumptions_waiting_max).",
                retry_after_ms=int(-self._turns / rate * 1000) + 1,
            )
        self._turns -= 1
        return max(0.0, -self._turns / rate) + self._rng.uniform(0, self._config.resume_jitter_ms_max / 1000)
