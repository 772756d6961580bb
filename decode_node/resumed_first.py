"""Room goes to requests in the middle of their answer before new ones. Pure: times are passed in.

A decode node has no queue: whoever it refuses asks again after a pause. Among many new requests, one that has lost its
node would find the room taken each time, until its wait is over and half an answer lost.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from baton.ids import RequestId

WAITING_MAX: Final = 1_024
"""Beyond so many the one that asked longest ago is forgotten."""


class ResumedFirst:
    """Which resumed requests were refused here for want of room within the last `wait_ms`. Control thread only."""

    def __init__(self, *, wait_ms: int) -> None:
        self._wait_s = wait_ms / 1000
        self._asked_s: OrderedDict[RequestId, float] = OrderedDict()

    def refused(self, request: RequestId, now_s: float) -> None:
        """A resumed request found no room: new ones stand back until it has asked again, or its time is over."""
        self._asked_s[request] = now_s
        self._asked_s.move_to_end(request)
        if len(self._asked_s) > WAITING_MAX:
            self._asked_s.popitem(last=False)

    def granted(self, request: RequestId) -> None:
        """It waits no more, if it did."""
        self._asked_s.pop(request, None)

    def waiting(self, now_s: float) -> bool:
        """Whether new requests are to stand back."""
        while self._asked_s and next(iter(self._asked_s.values())) + self._wait_s <= now_s:
            self._asked_s.popitem(last=False)
        return bool(self._asked_s)
