"""When to try again: at what is full by how fast it empties, at what has failed after growing pauses. Pure."""

from __future__ import annotations

import random
import zlib

RETRY_MS_MAX = 30_000
"""The longest retry time that a client gets: the load now says little about a later time."""
ROOM_SHARE = 0.125
"""The share of a full queue that must have left before the refused requests come back: they come together."""
SPREAD = 0.5
"""Retry times are longer by up to this share, so that not all come back at once."""
RESUMED_PAUSE_MS_MAX = 400
"""The longest pause after which a router looks again for room for a request in the middle of its answer."""
RESUMED_WAIT_MS_MIN = 2 * RESUMED_PAUSE_MS_MAX
"""The least time that a full node keeps room for such a request to ask again: the pause and its way there."""


def retry_after_ms(wait_s: float | None, *, ms_min: int, spread: float) -> int:
    """The retry time to return, at least `ms_min` and at most RETRY_MS_MAX if that is larger.

    `wait_s` is the expected time, None if unknown; `spread` is the asker's place from 0 to 1.
    """
    assert ms_min > 0 and 0 <= spread <= 1, (ms_min, spread)
    most = max(ms_min, RETRY_MS_MAX)
    wait_ms = ms_min if wait_s is None else min(max(wait_s * 1000, ms_min), most)
    return min(most, int(wait_ms * (1 + SPREAD * spread)))


def whole_seconds_ms(spread: float) -> int:
    """A retry time of a second or two. HTTP's Retry-After has whole seconds, and all forms are to say the same."""
    return 1_000 if spread < 0.5 else 2_000


def backoff_s(attempt: int, ms_min: int, ms_max: int, rng: random.Random) -> float:
    """The pause before the next try, `attempt` from 0: doubled each time, capped, with jitter since many may retry."""
    return rng.uniform(0.5, 1.0) * min(ms_max, ms_min << min(attempt, 16)) / 1e3


def wait_s(amount: float, per_s: float) -> float | None:
    """How long until `amount` has left; None while the rate is unknown."""
    return amount / per_s if per_s > 0 else None


def spread_of(name: str) -> float:
    """A place from 0 to 1 for this name (a request's id), always the same."""
    return zlib.crc32(name.encode()) / 0xFFFFFFFF
