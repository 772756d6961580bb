"""Stop strings: where an answer's text ends, and what of it may be sent before that is known. Pure.

The answer ends at the first character with which its text ends in a stop string; of several that end there, the longest
counts. So the outcome depends on the text only, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The text of one answer on its way to the client. Mutable; after `found` is true nothing more may be pushed.

    Without `include`, text that may turn out to be the beginning of a stop string is held back, and nothing else is.
    With it the stop string is sent too, so nothing need be held.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        assert all(stops), "an empty stop string ends every answer"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""  # the longest end of the text so far that is the beginning of a stop string
        self.found = False

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What may be sent now that `text` has come; sets `found` where the answer ends within it.

        Without `may_end` a stop string that ends within `text` is text like any other.
        """
        assert not self.found
        known, now = len(self._tail), self._tail + text
        sent = known if self._include else 0
        if may_end and (match := self._first(now, known)) is not None:
            self.found = True
            begin, end = match
            self._tail = ""
            return now[sent : end if self._include else begin]
        self._tail = now[len(now) - self._beginning_at_end(now) :]
        return now[sent:] if self._include else now[: len(now) - len(self._tail)]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held = "" if self._include else self._tail
        self._tail = ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, int] | None:
        """Begin and end of the stop string that ends first, past the first `known` characters."""
        matches = []
        for stop in self._stops:
            begin = text.find(stop, max(0, known - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin))
        if not matches:
            return None
        end, begin = min(matches)
        return begin, end

    def _beginning_at_end(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
