"""Is there an excuse for an error? One call of a client, when it was last heard of, and what it may end with."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import BatonError, Reason
from tests.sim.excuses import CLOCK_SHARE, Excuses

DEADLINE_S = 60.0

OVERLOAD = frozenset({Reason.TOO_MANY_CALLS})
"""What a healthy cluster may answer too: its router's line is full."""
WRONG_AT_ALL_TIMES = frozenset(
    {
        Reason.INTERNAL,
        Reason.UNRECOGNISED,
        Reason.BAD_FIELD,
        Reason.REQUEST_EXISTS,
        Reason.PROMPT_TOO_LONG,
        Reason.EMPTY_PROMPT,
        Reason.NO_DEADLINE,
        Reason.UNIMPLEMENTED,
        Reason.SAMPLING_OUT_OF_RANGE,
        Reason.PERMISSION_DENIED,
        Reason.DATA_CORRUPT,
    }
)
"""No fault explains these."""


class Hearing:
    """When a call began and was last heard of, by the world's clock, and how far its router's had leapt by then."""

    def __init__(self, router: str, now_s: float, leapt_s: float, timeout_s: float) -> None:
        self.router = router
        self.timeout_s = timeout_s
        self.began_s = self.heard_s = now_s
        self.began_leapt_s = self.heard_leapt_s = leapt_s


class Judge:
    """Asks `Excuses`, for calls at routers."""

    def __init__(self, excuses: Excuses, now_s: Callable[[], float], *, lost_allowed: bool) -> None:
        self.disturbed_s = -1.0
        """When the last fault was at work; `faults` keeps it."""
        self.disturbed = False
        self.lost_allowed = lost_allowed
        self.excuses = excuses
        self.now_s = now_s

    def hearing(self, router: str, timeout_s: float = DEADLINE_S) -> Hearing:
        return Hearing(router, self.now_s(), self.excuses.leaps_s(router), timeout_s)

    def heard(self, hearing: Hearing) -> None:
        hearing.heard_s, hearing.heard_leapt_s = self.now_s(), self.excuses.leaps_s(hearing.router)

    def deadline_passed(self, hearing: Hearing) -> bool:
        leapt_s = self.excuses.leaps_s(hearing.router) - hearing.began_leapt_s
        return self.now_s() - hearing.began_s >= hearing.timeout_s * CLOCK_SHARE - leapt_s

    def excused(self, failure: BatonError, hearing: Hearing, *, tokens: int, wire: bool) -> bool:
        """`wire`: no node has written the error."""
        if self.lost_allowed:
            return self.disturbed or self.disturbed_s >= hearing.began_s
        excuses, router = self.excuses, hearing.router
        if excuses.ends(router, hearing.began_s):
            return True
        if wire and excuses.way_lost(router, hearing.began_s):
            return True
        if failure.reason is Reason.DEADLINE:
            return self.deadline_passed(hearing)
        if wire:
            return False
        if failure.reason is Reason.ATTEMPTS_SPENT:
            return excuses.spent(router, hearing.began_s)
        leapt_s = excuses.leaps_s(router) - hearing.heard_leapt_s
        return excuses.nowhere(failure, router, since_s=hearing.heard_s, leapt_s=leapt_s, tokens=tokens)

    def unexplained(self, failure: BatonError, hearing: Hearing, *, tokens: int) -> str:
        now_s = self.now_s()
        return (
            f"an error without an excuse: {failure!r} after {tokens} tokens and {now_s - hearing.began_s:.3f} s, "
            f"{now_s - hearing.heard_s:.3f} s after the last of them"
        )
