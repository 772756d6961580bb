"""How fast the bytes of a pair move, from what is posted and what completes. Pure: the caller brings the time (seconds
of a clock that never goes back) and the lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

RECENT_S: Final = 10
"""What counts as recent: this second of the clock and those before it, so many in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes, and how long it took to move them."""

    nbytes: int
    moving_s: float

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing has moved."""
        return self.nbytes / self.moving_s if self.moving_s > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class _Second:
    number: int
    nbytes: int = 0
    moving_s: float = 0.0


class RecentSums:
    """Bytes and times of the last RECENT_S seconds, at most one entry for each."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=RECENT_S)

    def add(self, now_s: float, nbytes: int, moving_s: float = 0.0) -> None:
        number = int(now_s // 1)
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_Second(number=number))
        newest = self._seconds[-1]
        newest.nbytes += nbytes
        newest.moving_s += moving_s

    def sums(self, now_s: float) -> Moved:
        oldest = now_s // 1 - RECENT_S
        recent = [second for second in self._seconds if second.number > oldest]
        return Moved(nbytes=sum(s.nbytes for s in recent), moving_s=sum(s.moving_s for s in recent))


class PairSpeed:
    """Bytes that were copied, over the time with a posted batch outstanding: what the path does while it has work.

    A batch counts with its completion, and the time since the last event with it, so that both are always of the same
    batches. Where nothing completes the time goes on, and the rate falls.
    """

    def __init__(self) -> None:
        self._outstanding_bytes = 0
        self._counted_to_s = 0.0
        """Of the time with something outstanding; without meaning while there is nothing."""
        self.restart(0.0)

    def posted(self, nbytes: int, now_s: float) -> None:
        """They are about to be posted: a completion may come at once."""
        if self._outstanding_bytes == 0:
            self._counted_to_s = now_s
        self._outstanding_bytes += nbytes

    def completed(self, nbytes: int, now_s: float, *, copied: bool) -> None:
        """So many of the posted bytes are outstanding no more; not `copied`: they have not moved."""
        moving_s = self._uncounted_s(now_s)
        # A statistic is never what ends a node: a completion too many is worth no more than nothing.
        self._outstanding_bytes = max(0, self._outstanding_bytes - nbytes)
        self._counted_to_s = now_s
        moved_bytes = nbytes if copied else 0
        self._bytes += moved_bytes
        self._moving_s += moving_s
        self._recent.add(now_s, moved_bytes, moving_s)

    def restart(self, now_s: float) -> None:
        """From here on another path is measured. What is outstanding completes all the same."""
        self._bytes = 0
        self._moving_s = 0.0
        self._counted_to_s = now_s
        self._recent = RecentSums()

    def in_all(self, now_s: float) -> Moved:
        """Since the path was last changed."""
        return Moved(nbytes=self._bytes, moving_s=self._moving_s + self._uncounted_s(now_s))

    def recent(self, now_s: float) -> Moved:
        """Of the last RECENT_S seconds, and the whole time that what is outstanding has taken so far."""
        sums = self._recent.sums(now_s)
        return Moved(nbytes=sums.nbytes, moving_s=sums.moving_s + self._uncounted_s(now_s))

    def _uncounted_s(self, now_s: float) -> float:
        return now_s - self._counted_to_s if self._outstanding_bytes else 0.0


class LandedBytes:
    """What seals vouch for at a receiver. It sees no single write, so the rate is one of the clock's time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._recent = RecentSums()

    def add(self, nbytes: int, now_s: float) -> None:
        self.nbytes += nbytes
        self._recent.add(now_s, nbytes)

    def per_s(self, now_s: float) -> float:
        """Over the last RECENT_S seconds, pauses included."""
        return self._recent.sums(now_s).nbytes / (RECENT_S - 1 + now_s % 1) if self.nbytes else 0.0
