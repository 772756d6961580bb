"""Log lines about a problem that repeats: the first is logged, the repeats are counted and summed up in one line.

repeats = RepeatLog(log, clock.monotonic_s)
repeats.warning("revoke unanswered", peer="prefill-0", number=7)      # logs the first and counts the others
repeats.over("prefill-0", "it has answered")                          # one line: how often, and for how long
repeats.upkeep()                                                      # every second; one line per interval
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.errors import check_positive
from baton.log import Log

OTHERS: Final = "others"
"""The peer of all further problems once `kept_max` are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatLimits:
    """How many lines one problem may take."""

    interval_ms: int = 60_000
    """Time between two lines about a problem that goes on."""
    full_max: int = 1
    """Logged one by one in an interval; the others are counted. Counting goes on while an interval has more."""
    pause_ms: int = 1_000
    """A problem is reported as over no sooner than this after its last line: it may come and go very fast."""
    kept_max: int = 4_096
    """Problems known at the same time."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)


_LIMITS: Final = RepeatLimits()


@dataclass(slots=True, kw_only=True)
class _Problem:
    began_s: float
    logged_s: float
    """Time of its last line."""
    shown: int = 0
    times: int = 0
    """How often it was counted since its last line."""
    ended: str = ""
    """Why it is over; empty while it goes on."""
    level: int = logging.INFO
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the newest repeat."""


class RepeatLog:
    """Used from one thread. Call `upkeep` every second or so, and `close` at the end."""

    def __init__(
        self, log: Log, now_s: Callable[[], float], limits: RepeatLimits = _LIMITS, *, key: str = "peer"
    ) -> None:
        """`now_s` never goes back. `key` is what the lines call a peer."""
        self._log = log
        self._now_s = now_s
        self._limits = limits
        self._key = key
        self._problems: dict[str, dict[str, _Problem]] = {}
        """By peer, then by text."""
        self._kept = 0

    def error(self, what: str, *, peer: str, **fields: Any) -> None:
        self._seen(logging.ERROR, what, peer, fields)

    def warning(self, what: str, *, peer: str, **fields: Any) -> None:
        self._seen(logging.WARNING, what, peer, fields)

    def info(self, what: str, *, peer: str, **fields: Any) -> None:
        self._seen(logging.INFO, what, peer, fields)

    def over(self, peer: str, why: str, *, what: str | None = None) -> None:
        """The peer answers again or is gone: all its problems are over, or only `what`. Cheap if it has none."""
        now_s = self._now_s()
        for each, problem in list(self._problems.get(peer, {}).items()):
            if what in (None, each):
                problem.ended = why
                if now_s - problem.logged_s >= self._limits.pause_ms / 1000:
                    self._forget(peer, each)

    def upkeep(self) -> None:
        """Log the problems whose interval has passed, and those that are over and not logged yet."""
        now_s, limits = self._now_s(), self._limits
        for peer, what, problem in self._all():
            age_ms = (now_s - problem.logged_s) * 1000
            if age_ms >= limits.interval_ms and problem.times > limits.full_max:
                self._sum_up(peer, what, problem)
                problem.times, problem.logged_s = 0, now_s
            elif age_ms >= (limits.pause_ms if problem.ended else limits.interval_ms):
                self._forget(peer, what)

    def close(self) -> None:
        """Log what has been counted so far. Idempotent."""
        for peer, what, _ in self._all():
            self._forget(peer, what)

    def _all(self) -> list[tuple[str, str, _Problem]]:
        return [(peer, what, each) for peer, known in self._problems.items() for what, each in known.items()]

    def _seen(self, level: int, what: str, peer: str, fields: Mapping[str, Any]) -> None:
        now_s, owner = self._now_s(), peer
        if what not in self._problems.get(peer, {}) and self._kept >= self._limits.kept_max:
            owner = OTHERS
        known = self._problems.setdefault(owner, {})
        problem = known.get(what)
        if problem is None:
            problem = known[what] = _Problem(began_s=now_s, logged_s=now_s)
            self._kept += 1
        problem.ended, problem.level, problem.fields = "", level, fields
        if problem.shown < self._limits.full_max:
            problem.shown += 1
            line: dict[str, Any] = {self._key: peer, **fields}
            self._log.log(level, what, **line)
        else:
            problem.times += 1

    def _forget(self, peer: str, what: str) -> None:
        problem = self._problems[peer].pop(what)
        self._kept -= 1
        if not self._problems[peer]:
            del self._problems[peer]
        self._sum_up(peer, what, problem)

    def _sum_up(self, peer: str, what: str, problem: _Problem) -> None:
        if not problem.times:
            return
        now_s = self._now_s()
        over_s = round(now_s - problem.logged_s, 1)
        line: dict[str, Any] = {self._key: peer, "times": problem.times, "over_s": over_s}
        if problem.ended:
            lasted_s = round(now_s - problem.began_s, 1)
            self._log.info(f"{what}: no more", **line, lasted_s=lasted_s, because=problem.ended)
        else:
            # A field named as one of the sum's own gives way to it, in its place.
            self._log.log(problem.level, f"{what}: repeated", **{**line, **problem.fields, **line})
