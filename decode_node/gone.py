"""What a node remembers of requests that it has no longer, for routers that ask late. Control thread only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from baton.ids import RequestId

GONE_MAX: Final = 4_096
"""Beyond so many the oldest is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    tag: bytes
    epoch: int
    """By which it was had last: a router with a lower one has lost it to another."""
    over: bool
    """Its client wants no more of it."""
    until_s: float


class GoneRequests:
    """Resumable requests that another router has taken over, or whose client wants no more of them."""

    def __init__(self, *, keep_ms: int) -> None:
        self._keep_s = keep_ms / 1000
        self._gone: OrderedDict[RequestId, Gone] = OrderedDict()
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._gone)

    def add(self, request: RequestId, *, tag: bytes, epoch: int, over: bool, now_s: float) -> None:
        """What was over stays over."""
        known = self._gone.pop(request, None)
        over = over or (known is not None and known.over)
        self._gone[request] = Gone(tag=tag, epoch=epoch, over=over, until_s=now_s + self._keep_s)
        if len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

    def find(self, request: RequestId, now_s: float) -> Gone | None:
        """By any of its attempts: they have one tag, and one client."""
        known = self._gone.get(request)
        return known if known is not None and now_s < known.until_s else None

    def upkeep(self, now_s: float) -> None:
        while self._gone and next(iter(self._gone.values())).until_s <= now_s:
            self._gone.popitem(last=False)
