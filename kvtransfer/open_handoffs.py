"""The handoffs of one writer that are not over, found by the two names that they go by."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from baton.ids import GrantId, ReserveNumber
from kvtransfer.handoff import Handoff


class OpenHandoffs:
    """By number from the beginning, by grant once there is one. Control thread only."""

    def __init__(self) -> None:
        self._by_number: dict[ReserveNumber, Handoff] = {}
        self._by_grant: dict[GrantId, Handoff] = {}
        self._fewer = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Handoff]:
        """Of those there are now: some may end on the way."""
        return iter(list(self._by_number.values()))

    def __contains__(self, number: ReserveNumber) -> bool:
        return number in self._by_number

    def __getitem__(self, number: ReserveNumber) -> Handoff:
        return self._by_number[number]

    def get(self, number: ReserveNumber) -> Handoff | None:
        """None: it is over."""
        return self._by_number.get(number)

    def of_grant(self, grant: GrantId) -> Handoff:
        return self._by_grant[grant]

    def enter(self, handoff: Handoff) -> None:
        self._by_number[handoff.number] = handoff

    def granted(self, handoff: Handoff) -> None:
        """Its `grant` is set."""
        self._by_grant[handoff.grant] = handoff

    def strike_out(self, handoff: Handoff) -> None:
        del self._by_number[handoff.number]
        self._by_grant.pop(handoff.grant, None)
        self._fewer.set()

    @property
    def bytes_outstanding(self) -> int:
        """Posted, and not completed."""
        return sum(handoff.bytes_outstanding for handoff in self._by_number.values())

    @property
    def pinned_blocks(self) -> int:
        return sum(handoff.pinned_blocks for handoff in self._by_number.values())

    def stalled(self, now_s: float, stall_ms_max: int) -> list[Handoff]:
        """Those whose posted writes have made no progress for so long."""
        return [h for h in self if h.writes_outstanding and (now_s - h.progress_s) * 1000 > stall_ms_max]

    async def wait_until_over(self, timeout_ms: int) -> None:
        """All of them, or at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while self._by_number:
                    self._fewer.clear()
                    await self._fewer.wait()
