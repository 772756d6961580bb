"""Which connections of a pair may still write, and which fences wait for them. `PairFence` has no I/O and no clock.

A connection is *open* from the moment that it may write (shm: that the region's descriptor may have left for the
writer), and stays so until there is evidence that it cannot any more. Nothing else closes it here (I2, I3).
`PortFences` has those of all pairs of one port, and reports a fence that has its evidence.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.ids import Epoch, Pair
from kvtransfer.transport import PairBeingFenced, ReceiverEvents, TooManyPairs, TransportName
from kvtransfer.transports.control_channel import RefusalReason

SECRET_BYTES: Final = 16


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
    """Of one pair, at the receiver. Connections are named by integers of the caller's choice."""

    def __init__(self) -> None:
        self._expected: tuple[Epoch, bytes] | None = None
        self._fenced_epoch = -1
        self._open: dict[int, Epoch] = {}
        self._waiting: set[Epoch] = set()
        self._tallies: dict[Epoch, _Tally] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing is expected, open or waiting: this may be forgotten."""
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
        """The oldest fenced epoch up to which no connection is open, and the evidence; each once per fence."""
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


class PortFences:
    """All pairs that one port expects, has connections of, or fences. Runs on `loop`'s thread."""

    def __init__(
        self,
        *,
        transport: TransportName,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        pairs_max: int,
    ) -> None:
        self._transport = transport
        self._events = events
        self._loop = loop
        self._pairs_max = pairs_max
        self._pairs: dict[Pair, PairFence] = {}
        self._closed = False
        self.ended = 0
        """Fences that have had their evidence."""

    @property
    def waiting(self) -> int:
        """Fences that have no evidence yet."""
        return sum(fence.fences_waiting for fence in self._pairs.values())

    def book(self, pair: Pair) -> PairFence | None:
        return self._pairs.get(pair)

    def expect(self, pair: Pair, epoch: Epoch) -> bytes:
        """Allow connections of this pair in this epoch, and no longer in an older one: the secret to be shown.

        Raises:
            PairBeingFenced: a fence of this epoch has begun.
            TooManyPairs: `pairs_max` pairs are expected, connected or being fenced.
        """
        assert not self._closed
        fence = self._pairs.get(pair)
        if fence is not None and fence.has_fenced(epoch):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        if fence is None:
            if len(self._pairs) >= self._pairs_max:
                raise TooManyPairs(
                    f"{len(self._pairs)} pairs use this region's {self._transport.value} port, pairs_max is reached"
                )
            fence = self._pairs[pair] = PairFence()
        secret = fence.secret(epoch)
        if secret is None:
            secret = secrets.token_bytes(SECRET_BYTES)
            fence.expect(epoch, secret)
        return secret

    def secret(self, pair: Pair, epoch: Epoch) -> bytes | RefusalReason:
        """What a connection of this pair and epoch has to prove, or why none is accepted: no epoch of the pair is
        expected, or another one. To be asked again before it is opened: a fence, or a newer epoch, may have come."""
        fence = self._pairs.get(pair)
        if fence is None or fence.expected_epoch is None:
            return RefusalReason.NOT_EXPECTED
        return fence.secret(epoch) or RefusalReason.EPOCH

    def opened(self, pair: Pair, connection: int, epoch: Epoch) -> None:
        """See `PairFence.opened`."""
        self._pairs[pair].opened(connection, epoch)

    def closed(self, pair: Pair, connection: int, evidence: Evidence, pid: int = 0) -> None:
        """See `PairFence.closed`. Fences that waited for it are reported soon."""
        self._pairs[pair].closed(connection, evidence, pid)
        self._loop.call_soon(self._settle, pair)

    def is_fencing(self, pair: Pair, epoch: Epoch) -> bool:
        """See `PairFence.is_fencing`."""
        return self._pairs[pair].is_fencing(epoch)

    def fence(self, pair: Pair, epoch: Epoch) -> list[int]:
        """Begin a fence: `writer_gone` comes when it has its evidence. The connections that are still open."""
        assert not self._closed
        still_open = self._pairs.setdefault(pair, PairFence()).fence(epoch)
        self._loop.call_soon(self._settle, pair)
        return still_open

    def close(self) -> None:
        """Report nothing any more."""
        self._closed = True
        self._pairs.clear()

    def _settle(self, pair: Pair) -> None:
        """Report every fence of the pair that has its evidence; the callback may call back into this port."""
        while not self._closed and (fence := self._pairs.get(pair)) is not None:
            settled = fence.settled()
            if settled is None:
                if fence.is_idle:
                    del self._pairs[pair]
                return
            self.ended += 1
            self._events.writer_gone(pair, *settled)
