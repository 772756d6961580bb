"""How fast a prefill node computes prompts, as its steps show it. Pure."""

from __future__ import annotations


class PrefillRate:
    """Mutable; owned by the node's control thread. Times are of one clock that never goes back."""

    def __init__(self, *, tokens_per_step_max: int, age_ms_max: int) -> None:
        """A rate that was measured longer ago than `age_ms_max` is forgotten: a node that was slow once would be given
        nothing that shows otherwise."""
        self._tokens_per_step_max = tokens_per_step_max
        self._age_s_max = age_ms_max / 1000
        self._measured_s = 0.0
        self._ended_s = 0.0
        self.last_per_s = 0.0
        """Tokens a second, however long ago they were measured; 0 before the first time."""

    def step_ended(self, tokens: int, *, began_s: float, now_s: float) -> None:
        """So many prompt tokens were computed in a step. The rate is smoothed over about ten.

        A step that was launched behind another one counts from that one's end. Only steps that fill half their budget
        count. A step of a few tokens costs nearly as much, and a node that has had nothing else would say that it is
        slow, and then be given nothing that shows otherwise.
        """
        ended_before_s, self._ended_s = self._ended_s, now_s
        if 2 * tokens < self._tokens_per_step_max:
            return
        per_s = tokens / max(now_s - max(began_s, ended_before_s), 1e-6)
        afresh = self.last_per_s == 0 or self._is_old(now_s)
        self.last_per_s = per_s if afresh else 0.9 * self.last_per_s + 0.1 * per_s
        self._measured_s = now_s

    def per_s(self, now_s: float) -> float:
        """Tokens a second; 0 while nothing is known."""
        return 0.0 if self._is_old(now_s) else self.last_per_s

    def _is_old(self, now_s: float) -> bool:
        return now_s - self._measured_s > self._age_s_max
