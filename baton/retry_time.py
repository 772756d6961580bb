"""When to come back to what is full: from how much has to leave first, and how fast it has been leaving. Pure."""

from __future__ import annotations

import random
import zlib
from collections import deque

RETRY_MS_MAX = 30_000
"""The longest retry time that a client gets: the present load says little about a later time."""
ROOM_SHARE = 0.125
"""Of a full queue, what is to have left when those come back that were refused: they come together."""
SPREAD = 0.5
"""At most so much later, as a share of the time, so that they do not come at once."""
ENDS_KEPT_MAX = 32
RESUMED_PAUSE_MS_MAX = 400
"""A router looks again for room for a request in the middle of its answer after no longer pause than this."""
RESUMED_WAIT_MS_MIN = 2 * RESUMED_PAUSE_MS_MAX
"""So long at least a full node has to keep room for such a request to ask again: the pause, and its way there."""


def retry_after_ms(wait_s: float | None, *, ms_min: int, spread: float) -> int:
    """The retry time to return, from `ms_min` to RETRY_MS_MAX (or `ms_min`, where that is larger).

    `wait_s` is the time expected, None where nothing is known yet; `spread` is the asker's place from 0 to 1.
    """
    assert ms_min > 0 and 0 <= spread <= 1, (ms_min, spread)
    most = max(ms_min, RETRY_MS_MAX)
    wait_ms = ms_min if wait_s is None else min(max(wait_s * 1000, ms_min), most)
    return min(most, int(wait_ms * (1 + SPREAD * spread)))


def backoff_s(attempt: int, ms_min: int, ms_max: int, rng: random.Random) -> float:
    """The pause before the next try, `attempt` from 0: doubled each time, capped, with jitter since many may retry."""
    return rng.uniform(0.5, 1.0) * min(ms_max, ms_min << min(attempt, 16)) / 1e3


def wait_s(amount: float, per_s: float) -> float | None:
    """How long until so much has left. None while the rate is not known."""
    return amount / per_s if per_s > 0 else None


def spread_of(name: str) -> float:
    """A place from 0 to 1 for whoever has this name (a request's id), always the same."""
    return zlib.crc32(name.encode()) / 0xFFFFFFFF


class LeaveRate:
    """How fast something leaves: the amounts of the last `ENDS_KEPT_MAX` times, over the time since the first of them.

    It falls by itself while nothing leaves. Owned by one thread.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[float, float]] = deque(maxlen=ENDS_KEPT_MAX)

    def left(self, amount: float, now_s: float) -> None:
        """So much has left now. Times do not go back."""
        self._ends.append((now_s, amount))

    def per_s(self, now_s: float) -> float:
        """0 while it is not known: fewer than two times, or all of them in the same moment as now.

        What left at the first time had been leaving before it, so it does not count.
        """
        if len(self._ends) < 2 or now_s <= self._ends[0][0]:
            return 0.0
        return sum(amount for _, amount in list(self._ends)[1:]) / (now_s - self._ends[0][0])
