"""The order of requests that wait for a prefill node's engine, and the engine's rate. Pure.

The queue is in order of arrival, except that requests in the middle of their answer (`resumed`) go before those without
a token, and among these a higher class before a lower one. Each is bypassed at most `bypasses_max` times.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefill_node.job import Job


class RequestQueue(deque["Job"]):
    """Control thread only."""

    def __init__(self, *, bypasses_max: int) -> None:
        super().__init__()
        self._bypasses_max = bypasses_max

    def add(self, job: Job) -> None:
        """At the end, but before those of lower ranks that may still be bypassed."""
        place = len(self)
        while place and job.rank < self[place - 1].rank and self[place - 1].bypassed < self._bypasses_max:
            place -= 1
            self[place].bypassed += 1
        self.insert(place, job)


class PrefillRate:
    """The node's control thread owns it. Times are of one monotonic clock."""

    def __init__(self, *, tokens_per_step_max: int, age_ms_max: int) -> None:
        """A rate expires after `age_ms_max`: otherwise a node that was slow once would never get requests again."""
        self._tokens_per_step_max = tokens_per_step_max
        self._age_s_max = age_ms_max / 1000
        self._measured_s = 0.0
        self.ended_s = 0.0
        """When the last step ended."""
        self.last_per_s = 0.0
        """Tokens a second by the last measurement, however old; 0 before the first."""

    def step_ended(self, tokens: int, *, began_s: float, now_s: float) -> None:
        """A step has computed so many prompt tokens. The rate is smoothed over about ten steps.

        A step that was launched behind another one counts from the end of that. Steps that fill less than half their
        budget do not count: they take nearly as long, and would make the node look slow.
        """
        ended_before_s, self.ended_s = self.ended_s, now_s
        if 2 * tokens < self._tokens_per_step_max:
            return
        per_s = tokens / max(now_s - max(began_s, ended_before_s), 1e-6)
        afresh = self.last_per_s == 0 or self._is_old(now_s)
        self.last_per_s = per_s if afresh else 0.9 * self.last_per_s + 0.1 * per_s
        self._measured_s = now_s

    def per_s(self, now_s: float) -> float:
        """Tokens a second; 0 if unknown."""
        return 0.0 if self._is_old(now_s) else self.last_per_s

    def _is_old(self, now_s: float) -> bool:
        return now_s - self._measured_s > self._age_s_max
