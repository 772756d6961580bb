"""What computing a part of a prompt takes, as this node has measured it lately. Pure.

A step costs a fixed time, a time for each token, and a time for each earlier token that one attends to. The last part
makes long prompts dear: a line through steps of all lengths would say twice too much of a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

STEPS_KEPT: Final = 32
"""How many steps are remembered, about."""
STEP_TIMES_MAX: Final = 4
"""A step counts as at most so many times what was expected of it, and no less than that part of it: one odd step says
little of those to come. Only the first one may be dearer: nothing is known of the machine before."""
BELIEF_WEIGHT: Final = 0.01
"""Of what is believed of each part before the first step, beside one step."""
LEAST_TOKEN_SHARE: Final = 0.01
"""Of the mean time of a token: a token that costs nothing would never be worth a fetch."""
BELIEVED_TOKENS: Final = 4_096
"""While steps do not tell the parts apart, attending to so many tokens counts as one token. It is believed to take
nothing before the first step."""
PARTS: Final = range(3)
SUBSETS: Final = tuple(subset for count in (3, 2, 1) for subset in combinations(PARTS, count))


def attended(first: int, end: int) -> float:
    """Pairs of a token in this part of a sequence and one before it."""
    return (end * end - first * first) / 2


class ComputingCost:
    """Least squares over the last steps, each weighed by what was expected of it, in sums: it is asked at each prompt's
    beginning."""

    def __init__(self, *, fixed_s: float, token_s: float) -> None:
        """What is believed before the first step. The first one says how fast the machine is: it scales all of it."""
        assert token_s > 0, token_s
        self._believed = (1.0 if fixed_s else 0.0, 1.0, 0.0)
        self._parts_s = (fixed_s, token_s, 0.0)
        self._units_s = tuple(max(1e-9, part_s) for part_s in (fixed_s, token_s, token_s / BELIEVED_TOKENS))
        """Parts are counted in these, so that sums are of one size."""
        self._squares = [[0.0] * 3 for _ in PARTS]
        self._products = [0.0] * 3
        self._is_new = True
        self._stale = False

    def measured(self, tokens: int, pairs: float, seconds: float) -> None:
        """A step of so many tokens, which attended to so many `attended` pairs in all."""
        amounts = (1, tokens, pairs)
        expected_s = sum(amount * part_s for amount, part_s in zip(amounts, self._parts(), strict=True))
        seconds = max(seconds, expected_s / STEP_TIMES_MAX)
        if self._is_new:
            self._is_new = False
            self._units_s = tuple(unit_s * seconds / expected_s for unit_s in self._units_s)
            expected_s = seconds
        seconds = min(seconds, expected_s * STEP_TIMES_MAX)
        keep = 1 - 1 / STEPS_KEPT
        row = [amount * unit_s / expected_s for amount, unit_s in zip(amounts, self._units_s, strict=True)]
        for i in PARTS:
            self._products[i] = keep * self._products[i] + row[i] * seconds / expected_s
            self._squares[i] = [keep * self._squares[i][j] + row[i] * row[j] for j in PARTS]
        self._stale = True

    def of(self, first: int, end: int) -> float:
        """Seconds for the tokens of a prompt from `first` on, those before it being there."""
        return self._parts()[0] + self.saved(first, end)

    def saved(self, first: int, end: int) -> float:
        """Seconds that a prompt takes less where these tokens need not be computed, and others are."""
        _, token_s, pair_s = self._parts()
        return token_s * (end - first) + pair_s * attended(first, end)

    def _parts(self) -> tuple[float, float, float]:
        if self._stale:
            self._stale = False
            self._parts_s = self._fit()
        return self._parts_s

    def _fit(self) -> tuple[float, float, float]:
        """No part is less than nothing: of the fits without such ones, that with the smallest error."""
        squares = [[self._squares[i][j] + BELIEF_WEIGHT * (i == j) for j in PARTS] for i in PARTS]
        products = [self._products[i] + BELIEF_WEIGHT * self._believed[i] for i in PARTS]
        best, most = (0.0, 0.0, 0.0), -1.0
        for subset in SUBSETS:
            found = _solve([[squares[i][j] for j in subset] for i in subset], [products[i] for i in subset])
            if found is None or min(found) < 0:
                continue
            explained = sum(part * products[i] for part, i in zip(found, subset, strict=True))
            if explained > most:
                parts = dict(zip(subset, found, strict=True))
                most, best = explained, tuple(parts.get(i, 0.0) * self._units_s[i] for i in PARTS)  # type: ignore[assignment]
        fixed_s, token_s, pair_s = best
        mean_s = self._products[0] / self._squares[0][1] * self._units_s[1]
        return fixed_s, max(token_s, LEAST_TOKEN_SHARE * mean_s), pair_s


def _solve(rows: list[list[float]], wanted: Sequence[float]) -> list[float] | None:
    """Of a symmetric positive matrix; None: it is nearly singular."""
    rows = [[*row, value] for row, value in zip(rows, wanted, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= 1e-12:
            return None
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i:
                factor = rows[j][i]
                rows[j] = [value - factor * own for value, own in zip(rows[j], rows[i], strict=True)]
    return [row[size] for row in rows]
