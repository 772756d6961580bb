"""The course of one request: which router is called next, how, after what pause, and when to give up. Pure.

The client tells a `Course` what happens, and does what it answers. A `RouterBook` is what the requests of one client
know of its routers together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Final

from baton.errors import BatonError, Code, Reason
from baton.retry_time import backoff_s

PAUSE_MS_MIN: Final = 50
"""The first pause of a request that has no other router to turn to; doubled each time."""
PAUSE_MS_MAX: Final = 2_000
REFUSALS_MAX: Final = 30
"""Times in a row that routers may refuse a request, with nothing of its answer in between."""
REST_MS_MIN: Final = 200
"""For so long a router that was lost gets no call if there is another one; doubled each time."""
REST_MS_MAX: Final = 5_000
TRIED_MS_MAX: Final = 1_000
"""For so long one request tries a router that was lost before another one does."""


class Verdict(Enum):
    """What a failed call means for its request."""

    LOST = "lost"
    """The router is gone, or wants no calls: another one will answer."""
    REFUSED = "refused"
    """The cluster cannot, for now."""
    FINAL = "final"


_LOST_CODES: Final = frozenset({Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN})
"""Statuses that gRPC itself makes of a connection or a server that ends under a call."""
_REFUSED_CODES: Final = frozenset({Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED})
_FINAL_REASONS: Final = frozenset({Reason.TAKEN_OVER, Reason.ATTEMPTS_SPENT, Reason.NOT_RESUMABLE})
"""Of a request that ABORTED ends for good: another client has it, or nothing can go on with it."""


def judge(error: BatonError, *, by_router: bool) -> Verdict:
    """`by_router`: the status is one that a router made, and not gRPC."""
    if not by_router:
        return Verdict.LOST if error.code in _LOST_CODES else _refused_or_final(error)
    return Verdict.LOST if error.reason is Reason.NODE_DRAINING else _refused_or_final(error)


def _refused_or_final(error: BatonError) -> Verdict:
    refused = error.code in _REFUSED_CODES and error.reason not in _FINAL_REASONS
    return Verdict.REFUSED if refused else Verdict.FINAL


class RouterBook:
    """Routers by number, in turn; those that were lost just now last."""

    def __init__(self, count: int, *, first: int = 0, changing: bool = False) -> None:
        """`changing`: a number stands for several routers, and another call reaches another one."""
        assert count > 0, count
        self.count = count
        self.several = count > 1 or changing
        self._next = first % count
        self._rests_until_s = [0.0] * count
        self._losses = [0] * count
        self._tried = [False] * count
        """One request has been sent there to see whether a lost router is back; the others go elsewhere."""

    def pick(self, now_s: float, *, not_again: int | None = None) -> int:
        """`not_again` only where there is no other."""
        turn = [(self._next + i) % self.count for i in range(self.count)]
        others = [router for router in turn if router != not_again] or turn
        rested = [router for router in others if self._rests_until_s[router] <= now_s]
        picked = rested[0] if rested else min(others, key=lambda router: self._rests_until_s[router])
        self._next = (picked + 1) % self.count
        if self._losses[picked] and rested:
            self._tried[picked] = True
            self._rests_until_s[picked] = now_s + TRIED_MS_MAX / 1e3
        return picked

    def lost(self, router: int, now_s: float) -> None:
        """Counts once for all the calls that one loss ends."""
        if now_s < self._rests_until_s[router] and not self._tried[router]:
            return
        self._tried[router] = False
        rest_ms = min(REST_MS_MAX, REST_MS_MIN << min(self._losses[router], 16))
        self._rests_until_s[router] = now_s + rest_ms / 1e3
        self._losses[router] += 1

    def heard(self, router: int) -> None:
        if self._losses[router]:
            self._rests_until_s[router], self._losses[router], self._tried[router] = 0.0, 0, False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call this router, after a pause."""

    router: int
    attach: bool = False
    """Go on behind what there is; else the request anew."""
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The request ends with this error."""

    error: BatonError
    over: bool
    """For every router: there is nothing to forget."""


class Course:
    """One request, from its first call on. After each call that has failed: `failed`."""

    def __init__(
        self,
        book: RouterBook,
        *,
        began_s: float,
        timeout_s: float,
        rng: random.Random,
        connect_timeout_s: float | None = None,
        retries_max: int | None = None,
    ) -> None:
        """`connect_timeout_s`: how long to look for a router before one has answered, but each is tried; None: as long
        as the request may take. `retries_max`: failures in a row to survive, of any kind; None: those of connections
        as long as the request may take, and REFUSALS_MAX refusals."""
        self.deadline_s = began_s + timeout_s
        self._timeout_s = timeout_s
        self._connect_until_s = self.deadline_s if connect_timeout_s is None else began_s + connect_timeout_s
        self._retries_max = retries_max
        self._book = book
        self._rng = rng
        self._call = Call(router=book.pick(began_s))
        self._answered = False
        """Some router has answered something."""
        self._attachable = False
        self._begun = False
        """There is a part of the answer."""
        self._losses = self._refusals = 0
        """In a row, with nothing of the answer in between."""
        self._refusal: BatonError | None = None
        self._ghosts = 0
        """Attaches that were lost: their routers may still carry them out, and take the answer from a later one."""

    @property
    def call(self) -> Call:
        """What to do now."""
        return self._call

    def heard(self, *, attachable: bool, new: bool) -> None:
        """An event has come: whether the client now has a resume token, and whether the event is a part of the answer
        (and not its beginning, which comes with each attach)."""
        self._answered, self._attachable = True, attachable
        if new:
            self._begun, self._refusal = True, None
            self._losses = self._refusals = 0
        self._book.heard(self._call.router)

    def failed(self, error: BatonError, *, by_router: bool, now_s: float) -> Call | GiveUp:
        """The call is over, and the answer is not whole."""
        verdict = judge(error, by_router=by_router)
        if by_router:
            self._answered = True
        elif self._call.attach:
            self._ghosts += 1
        if error.reason is Reason.TAKEN_OVER and self._ghosts:
            self._ghosts -= 1
            verdict = Verdict.REFUSED
        if error.reason is Reason.DEADLINE and not by_router:
            text = f"There was no whole answer within {self._timeout_s:g} s."
            return GiveUp(error=BatonError(Reason.DEADLINE, text, metadata=error.metadata), over=False)
        if verdict is Verdict.FINAL:
            # What a refused request is cancelled by says less than the refusal.
            refusal = self._refusal if error.reason is Reason.CANCELLED else None
            return GiveUp(error=refusal or error, over=by_router)
        if verdict is Verdict.LOST:
            self._losses += 1
            self._book.lost(self._call.router, now_s)
        else:
            self._refusals += 1
            self._refusal = error
            self._book.heard(self._call.router)
        if self._ends(verdict, now_s):
            return GiveUp(error=error, over=False)
        after_s = self._pause_s(error, verdict)
        left_s = self.deadline_s - now_s
        if verdict is Verdict.LOST:
            after_s = min(after_s, left_s / 2)  # as long as there is time, there is another try
        if left_s <= PAUSE_MS_MIN / 1e3 or after_s >= left_s:
            return GiveUp(error=error if verdict is Verdict.REFUSED else self._too_late(error), over=False)
        router = self._book.pick(now_s, not_again=self._call.router)
        self._call = Call(router=router, attach=self._attachable, after_s=after_s)
        return self._call

    def _ends(self, verdict: Verdict, now_s: float) -> bool:
        """Whether this failure is one too many."""
        if self._begun and not self._attachable:
            return True
        if not self._answered and now_s >= self._connect_until_s and self._losses >= self._book.count:
            return True
        if self._retries_max is not None:
            return self._losses + self._refusals > self._retries_max
        return verdict is Verdict.REFUSED and self._refusals > REFUSALS_MAX

    def _pause_s(self, error: BatonError, verdict: Verdict) -> float:
        tries = self._losses + self._refusals
        if verdict is Verdict.LOST and tries < self._book.count:
            return 0.0  # there is a router that was not asked yet
        growing_s = backoff_s(max(0, tries - self._book.count), PAUSE_MS_MIN, PAUSE_MS_MAX, self._rng)
        if error.retry_after_ms is None or (verdict is Verdict.LOST and self._book.several):
            return growing_s
        return max(growing_s, error.retry_after_ms / 1e3)

    def _too_late(self, error: BatonError) -> BatonError:
        text = f"There was no whole answer within {self._timeout_s:g} s. The last try: {error.message}"
        return BatonError(Reason.DEADLINE, text, metadata=error.metadata)
