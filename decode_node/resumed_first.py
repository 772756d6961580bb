"""Room goes to requests in the middle of their answer before new ones. Pure: times are passed in.

A decode node has no queue: whoever it refuses asks again after a pause. Among many new requests, one that has lost its
node would find the room taken each time, until its wait is over and half an answer lost. So new ones wait for it,
but not for good: one that is too large for the room that comes would keep a node's memory idle for as long as it asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from baton.ids import Attempt, RequestId, RequestKey

WAITING_MAX: Final = 1_024
"""Beyond so many the one that asked longest ago is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """One search for room. Kept when its hold is over: by it the request is known when it asks again."""

    attempt: Attempt
    """That asked last."""
    output_tokens: int
    first_s: float
    until_s: float


class ResumedFirst:
    """Which resumed requests were refused here for want of room, and how long new ones wait. Control thread only.

    They do for `wait_ms` after each refusal, and no longer than `hold_ms_max` after the first one of a search. A
    request that comes with more of its answer has had a node meanwhile: that is another search.
    """

    def __init__(self, *, wait_ms: int, hold_ms_max: int) -> None:
        assert 0 < wait_ms <= hold_ms_max, (wait_ms, hold_ms_max)
        self._wait_s = wait_ms / 1000
        self._hold_s_max = hold_ms_max / 1000
        self._waits: OrderedDict[RequestId, _Wait] = OrderedDict()
        self._until_s = -math.inf
        """The latest of all their `until_s`."""

    def refused(self, key: RequestKey, output_tokens: int, now_s: float) -> None:
        """A resumed request found no room: new ones wait until it has asked again, or its time is over.

        An attempt asks once: its Reserve may be here twice, and behind that of a later one.
        """
        known = self._waits.get(key.request)
        if known is not None and known.attempt >= key.attempt:
            return
        first_s = known.first_s if known is not None and known.output_tokens == output_tokens else now_s
        until_s = min(now_s + self._wait_s, first_s + self._hold_s_max)
        self._waits[key.request] = _Wait(
            attempt=key.attempt, output_tokens=output_tokens, first_s=first_s, until_s=until_s
        )
        self._waits.move_to_end(key.request)
        self._until_s = max(self._until_s, until_s)
        if len(self._waits) > WAITING_MAX:
            self._forget(next(iter(self._waits)))

    def granted(self, key: RequestKey) -> None:
        """This attempt has its room, here or on another node, or wants none any more: it waits no longer, if it did."""
        known = self._waits.get(key.request)
        if known is not None and known.attempt <= key.attempt:
            self._forget(key.request)

    def waiting(self, now_s: float) -> bool:
        """Whether new requests are to wait."""
        return now_s < self._until_s

    def _forget(self, request: RequestId) -> None:
        if self._waits.pop(request).until_s == self._until_s:
            self._until_s = max((wait.until_s for wait in self._waits.values()), default=-math.inf)
