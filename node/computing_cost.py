"""What computing a part of a prompt takes, as this node has measured it lately. Pure.

A step costs a fixed time, a time for each token, and a time for each earlier token that one attends to. The last part
makes long prompts dear: a line through steps of all lengths would say twice too much of a short one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

SAMPLES_MAX: Final = 48
"""Steps that are remembered."""
BELIEF_WEIGHT: Final = 0.1
"""Of what is believed before the first step, beside one step: shares of each that the fit may be wrong by count."""
BELIEVED_TOKENS: Final = 4_096
"""Attending to so many tokens is believed to take no longer than computing one without any."""


def attended(first: int, end: int) -> float:
    """Pairs of a token in this part of a sequence and one before it."""
    return (end * end - first * first) / 2


class ComputingCost:
    """Least squares of relative errors over the last steps."""

    def __init__(self, *, fixed_s: float, token_s: float) -> None:
        """What is believed before the first step."""
        self._parts_s = self._believed_s = np.array([fixed_s, token_s, 0.0])
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=SAMPLES_MAX)
        self._stale = False

    def measured(self, tokens: int, attended: float, seconds: float) -> None:
        """A step of so many tokens, which attended to so many pairs in all."""
        if seconds > 0:
            self._steps.append((1.0, tokens, attended, seconds))
            self._stale = True

    def of(self, first: int, end: int) -> float:
        """Seconds for the tokens of a prompt from `first` on, those before it being there."""
        return float(self._parts() @ (1.0, end - first, attended(first, end)))

    def saved(self, first: int, end: int) -> float:
        """Seconds that a prompt takes less where these tokens need not be computed, and others are."""
        return float(self._parts()[1:] @ (end - first, attended(first, end)))

    def _parts(self) -> npt.NDArray[np.float64]:
        if self._stale:
            self._stale = False
            self._parts_s = self._fit()
        return self._parts_s

    def _fit(self) -> npt.NDArray[np.float64]:
        """None of the three is less than nothing: one that would be is left out."""
        steps = np.array(self._steps)
        fixed_s, token_s, _ = self._believed_s
        least_s = 1e-9
        believed = np.array([fixed_s, token_s, token_s / BELIEVED_TOKENS])
        scale = BELIEF_WEIGHT / np.maximum(believed, least_s)
        rows = np.concatenate([steps[:, :3] / steps[:, 3:], np.diag(scale)])
        wanted = np.concatenate([np.ones(len(steps)), scale * self._believed_s])
        kept, parts_s = [0, 1, 2], np.zeros(3)
        while kept:
            found = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)[0]
            if (found >= 0).all():
                parts_s[kept] = found
                break
            del kept[int(np.argmin(found * np.abs(rows[:, kept]).max(axis=0)))]
        return parts_s
