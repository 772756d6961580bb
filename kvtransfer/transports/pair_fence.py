"""Which connections of one pair may still write, and which fences wait for them. Pure: no sockets, no clock.

A connection is *open* from the moment that it may write (shm: that the region's descriptor may have left for the
writer), and stays so until there is evidence that it cannot any more. Nothing else closes it here (DESIGN I2, I3).
`port_fences` keeps the books of all pairs of one port.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.ids import Epoch


class Evidence(Enum):
    """Why a connection can no longer write."""

    ACKNOWLEDGED = "acknowledged"
    DEAD = "dead, by pidfd"
    JOINED = "closed, its receive thread joined"
    DESTROYED = "reset, its queue pairs destroyed"
    WORKER = "closed, its receiving worker destroyed"


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Connections of one epoch that were closed with evidence."""

    counts: dict[Evidence, int] = field(default_factory=lambda: dict.fromkeys(Evidence, 0))
    pids_dead: set[int] = field(default_factory=set)


class PairFence:
    """The receiver's book of one pair. Connections are named by integers of the caller's choice."""

    def __init__(self) -> None:
        self._expected: tuple[Epoch, bytes] | None = None
        self._fenced_epoch = -1
        self._open: dict[int, Epoch] = {}
        self._waiting: set[Epoch] = set()
        self._tallies: dict[Epoch, _Tally] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing is expected, open or waiting: the book may be forgotten."""
        return self._expected is None and not self._open and not self._waiting

    @property
    def fences_waiting(self) -> int:
        return len(self._waiting)

    def is_fencing(self, epoch: Epoch) -> bool:
        """A fence that covers `epoch` waits for its evidence."""
        return any(waiting >= epoch for waiting in self._waiting)

    def has_fenced(self, epoch: Epoch) -> bool:
        """`epoch` can be expected no more: a fence that covers it has begun."""
        return epoch <= self._fenced_epoch

    @property
    def expected_epoch(self) -> Epoch | None:
        """The epoch whose connections may be opened now; None: no connection may."""
        return self._expected[0] if self._expected is not None else None

    def secret(self, epoch: Epoch) -> bytes | None:
        """The secret that `expect` set for this epoch, if it still holds."""
        return self._expected[1] if self._expected is not None and self._expected[0] == epoch else None

    def expect(self, epoch: Epoch, secret: bytes) -> None:
        """From now on connections must show this epoch and secret; connections already open are not touched."""
        assert epoch > self._fenced_epoch, (epoch, self._fenced_epoch, "this epoch is fenced")
        assert self._expected is None or epoch > self._expected[0], (epoch, "epochs only rise")
        self._expected = (epoch, secret)

    def opened(self, connection: int, epoch: Epoch) -> None:
        """From now on it may be able to write. The caller has just seen that it knows this epoch's secret."""
        assert connection not in self._open, connection
        assert epoch > self._fenced_epoch, (epoch, self._fenced_epoch)
        self._open[connection] = epoch

    def closed(self, connection: int, evidence: Evidence, pid: int) -> None:
        """There is evidence that this connection can no longer write."""
        tally = self._tallies.setdefault(self._open.pop(connection), _Tally())
        tally.counts[evidence] += 1
        if evidence is Evidence.DEAD:
            tally.pids_dead.add(pid)

    def fence(self, epoch: Epoch) -> list[int]:
        """Open no connection of `epoch` or older any more; returns those still open. `settled` will name the epoch."""
        self._fenced_epoch = max(self._fenced_epoch, epoch)
        if self._expected is not None and self._expected[0] <= epoch:
            self._expected = None
        self._waiting.add(epoch)
        return [connection for connection, its_epoch in self._open.items() if its_epoch <= epoch]

    def settled(self) -> tuple[Epoch, str] | None:
        """The oldest fenced epoch up to which no connection is open, with the evidence; each is told once per fence."""
        if not self._waiting:
            return None
        epoch = min(self._waiting)
        if any(its_epoch <= epoch for its_epoch in self._open.values()):
            return None
        self._waiting.discard(epoch)
        return epoch, self._evidence(epoch)

    def _evidence(self, epoch: Epoch) -> str:
        tallies = [self._tallies.pop(e) for e in sorted(self._tallies) if e <= epoch]
        if not tallies:
            return "no connection that could write"
        parts = []
        for evidence in Evidence:
            count = sum(tally.counts[evidence] for tally in tallies)
            if count:
                parts.append(f"{count} {evidence.value}")
        pids = sorted(set().union(*(tally.pids_dead for tally in tallies)))
        return ", ".join(parts) + (f" (pid {', '.join(map(str, pids))})" if pids else "")
