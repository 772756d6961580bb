"""Log lines about a problem that repeats: the first is logged, repeats are counted and summed up in one line.

repeats = RepeatLog(log, clock.monotonic_s)
repeats.warning("revoke unanswered", peer="prefill-0", number=7)      # the first of them; the others are counted
repeats.over("prefill-0", "it has answered")                          # one line: how often, and for how long
repeats.upkeep()                                                      # every second: one line an interval
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import check_positive
from baton.log import Log

OTHERS: Final = "others"
"""Whom troubles are put down to once `kept_max` are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatLimits:
    """How many lines one trouble may take."""

    interval_ms: int = 60_000
    """Between two lines about a trouble that goes on."""
    full_max: int = 1
    """Told one by one in an interval before the others are counted. More than that in an interval stay counted."""
    pause_ms: int = 1_000
    """A problem is reported as over only this long after its last line: it may come and go very fast."""
    kept_max: int = 4_096
    """Troubles known at a time."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What has been counted of one trouble since its last line."""

    peer: str
    what: str
    times: int
    over_s: float
    """Since that line."""
    lasted_s: float
    """Since the first line of all."""
    ended: str
    """Why it is over; empty while it may go on."""
    last: Mapping[str, Any]
    """Of the newest one."""


@dataclass(slots=True, kw_only=True)
class _Trouble:
    began_s: float
    told_s: float
    shown: int = 1
    times: int = 0
    ended: str = ""
    last: Mapping[str, Any]

    def summary(self, peer: str, what: str, now_s: float) -> Summary:
        return Summary(
            peer=peer,
            what=what,
            times=self.times,
            over_s=now_s - self.told_s,
            lasted_s=now_s - self.began_s,
            ended=self.ended,
            last=self.last,
        )


class Repeats:
    """The counts: pure, except for the clock that it reads. The caller logs what is returned at once."""

    def __init__(self, now_s: Callable[[], float], limits: RepeatLimits | None = None) -> None:
        """`now_s` never goes back."""
        self._now_s = now_s
        self._limits = limits or RepeatLimits()
        self._peers: dict[str, dict[str, _Trouble]] = {}
        self._kept = 0

    def seen(self, what: str, peer: str, fields: Mapping[str, Any]) -> bool:
        """It has happened (again). True: log it by itself; False: it is counted."""
        now_s, limits = self._now_s(), self._limits
        trouble = self._peers.get(peer, {}).get(what)
        if trouble is None and self._kept >= limits.kept_max:
            peer = OTHERS
            trouble = self._peers.get(peer, {}).get(what)
        if trouble is None:
            self._peers.setdefault(peer, {})[what] = _Trouble(began_s=now_s, told_s=now_s, last=fields)
            self._kept += 1
            return True
        trouble.ended = ""
        if trouble.shown < limits.full_max:
            trouble.shown += 1
            return True
        trouble.times += 1
        trouble.last = fields
        return False

    def over(self, peer: str, why: str, *, what: str | None = None) -> list[Summary]:
        """The peer answers again, or is gone: all its troubles are over, or one of them."""
        known = self._peers.get(peer)
        if known is None:
            return []
        now_s, told = self._now_s(), []
        for name in [what] if what is not None else list(known):
            trouble = known.get(name)
            if trouble is None:
                continue
            trouble.ended = why
            if now_s - trouble.told_s >= self._limits.pause_ms / 1000:
                told += self._forget(peer, name, now_s)
        return told

    def due(self) -> list[Summary]:
        """Those whose interval has passed, and those that are over and not logged yet."""
        now_s, limits, told = self._now_s(), self._limits, []
        for peer, known in list(self._peers.items()):
            for what, trouble in list(known.items()):
                age_ms = (now_s - trouble.told_s) * 1000
                if age_ms >= limits.interval_ms and trouble.times > limits.full_max:
                    told.append(trouble.summary(peer, what, now_s))
                    trouble.times, trouble.told_s = 0, now_s
                elif age_ms >= (limits.pause_ms if trouble.ended else limits.interval_ms):
                    told += self._forget(peer, what, now_s)
        return told

    def close(self) -> list[Summary]:
        """Everything counted and not logged yet."""
        now_s = self._now_s()
        kept = [(peer, what) for peer, known in self._peers.items() for what in known]
        return [summary for peer, what in kept for summary in self._forget(peer, what, now_s)]

    def _forget(self, peer: str, what: str, now_s: float) -> list[Summary]:
        known = self._peers[peer]
        trouble = known.pop(what)
        self._kept -= 1
        if not known:
            del self._peers[peer]
        return [trouble.summary(peer, what, now_s)] if trouble.times else []


class RepeatLog:
    """`Repeats` in front of a log. Of one thread; `upkeep` every second or so, `close` at the end."""

    def __init__(
        self, log: Log, now_s: Callable[[], float], limits: RepeatLimits | None = None, *, key: str = "peer"
    ) -> None:
        """`key` is what a peer is called in the lines."""
        self._log = log
        self._repeats = Repeats(now_s, limits)
        self._key = key
        self._levels: dict[str, int] = {}

    def error(self, what: str, *, peer: str, **fields: Any) -> None:
        self._tell(logging.ERROR, what, peer, fields)

    def warning(self, what: str, *, peer: str, **fields: Any) -> None:
        self._tell(logging.WARNING, what, peer, fields)

    def info(self, what: str, *, peer: str, **fields: Any) -> None:
        self._tell(logging.INFO, what, peer, fields)

    def over(self, peer: str, why: str, *, what: str | None = None) -> None:
        """See `Repeats.over`. Costs next to nothing where there was no trouble."""
        self._sum_up(self._repeats.over(peer, why, what=what))

    def upkeep(self) -> None:
        self._sum_up(self._repeats.due())

    def close(self) -> None:
        """Tell what has been counted so far. Idempotent."""
        self._sum_up(self._repeats.close())

    def _tell(self, level: int, what: str, peer: str, fields: Mapping[str, Any]) -> None:
        self._levels[what] = level
        if self._repeats.seen(what, peer, fields):
            named: dict[str, Any] = {self._key: peer, **fields}
            self._log.log(level, what, **named)

    def _sum_up(self, summaries: list[Summary]) -> None:
        for summary in summaries:
            told: dict[str, Any] = {self._key: summary.peer, "times": summary.times, "over_s": round(summary.over_s, 1)}
            if summary.ended:
                self._log.info(
                    f"{summary.what}: no more", **told, lasted_s=round(summary.lasted_s, 1), because=summary.ended
                )
            else:
                newest = {name: value for name, value in summary.last.items() if name not in told}
                self._log.log(self._levels[summary.what], f"{summary.what}: repeated", **told, **newest)
