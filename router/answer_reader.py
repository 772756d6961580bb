"""Reads the text of one answer as it comes and says what of it is content, reasoning or a call of a tool. Pure.

A form of answers (`router/answer_forms.py`) is a generator over a `Reader`: it takes text from it and yields where it
needs more. Each step takes all that the text so far decides, so what has been said depends on the text only, never on
how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

CALLS_MAX: Final = 128
"""Of one answer; the text of further calls is dropped."""
ARGUMENTS_CHARS_MAX: Final = 1 << 18
"""Of one call: it is cut there. Also what is held of an object before it is known to be a call."""
HEAD_CHARS_MAX: Final = 256
"""Of what stands before the arguments of a call, or before a message: text without an end of it is content."""
HELD_SPACES_MAX: Final = 256
"""White space before a call is no content: so much is held until it is known what follows."""

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Yields where it needs more text."""
_STRUCTURE: Final = re.compile(r'["{}\[\]]|[^\s\w+\-.,:]', re.ASCII)
"""Outside of strings of JSON: what opens and closes, and what no JSON has there."""
_QUOTED: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r"[^\w+\-.]", re.ASCII)


class PieceKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """A call begins: the text is its function's name, whole."""
    ARGUMENTS = auto()
    """Goes on with the arguments of the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer. Those of one kind are joined, and those of a call's arguments."""

    kind: PieceKind
    text: str
    call: int = 0
    """Number of the call, from 0."""


class Reader:
    """The text of one answer that has come and is not read yet, and the pieces that were made of what was read."""

    def __init__(self, *, calls_max: int = CALLS_MAX, reasoning: bool = True) -> None:
        """Without `reasoning` its pieces are dropped."""
        self._text = ""
        self._at = 0
        self._ended = False
        self._pieces: list[Piece] = []
        self._calls_max = calls_max
        self._reasoning = reasoning
        self._dropping = False
        """The last call was one too many."""
        self.calls = 0
        """That have begun."""
        self._kind = PieceKind.CONTENT
        self._leads = False
        """What comes is the beginning of a part, whose leading white space is none of it."""
        self._spaces = ""
        """At the end of the part so far."""

    def feed(self, text: str) -> None:
        self._text = text if self._at == len(self._text) else self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # What a form says.

    def turn(self, kind: PieceKind) -> None:
        """What is said from now on is a part of this kind, without the white space around it."""
        self._kind, self._leads, self._spaces = kind, True, ""

    def say(self, text: str, *, hold: bool = True) -> None:
        """More of the part, but for white space at its end with `hold`."""
        if not (self._leads or self._spaces or text[-1:].isspace()):  # most tokens
            self._put(self._kind, text)
            return
        text = self._spaces + text
        if self._leads:
            text = text.lstrip()
            self._leads = not text
        body = text.rstrip() if hold else text
        body = text[: max(len(body), len(text) - HELD_SPACES_MAX)]
        self._spaces = text[len(body) :]
        self._put(self._kind, body)

    def call(self, name: str) -> None:
        """A call begins."""
        self._dropping = self.calls >= self._calls_max
        if not self._dropping:
            self.calls += 1
            self._put(PieceKind.CALL, name)

    def arguments(self, text: str) -> None:
        """Of the call that has begun last."""
        if not self._dropping:
            self._put(PieceKind.ARGUMENTS, text)

    def over(self) -> None:
        """All is read: white space at the end counts, unless the answer has calls."""
        if not self.calls and self._kind is PieceKind.CONTENT:
            self._put(self._kind, self._spaces)

    def _put(self, kind: PieceKind, text: str) -> None:
        if not text or (kind is PieceKind.REASONING and not self._reasoning):
            return
        call = max(0, self.calls - 1) if kind in (PieceKind.CALL, PieceKind.ARGUMENTS) else 0
        if self._pieces and (last := self._pieces[-1]).kind is kind and kind is not PieceKind.CALL:
            self._pieces[-1] = Piece(kind=kind, text=last.text + text, call=call)
        else:
            self._pieces.append(Piece(kind=kind, text=text, call=call))

    # What a form reads.

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def next(self) -> str:
        """The character that was peeked at."""
        self._at += 1
        return self._text[self._at - 1]

    def run(self, letters: Collection[str]) -> Steps[str]:
        """The characters that are among these, at most HEAD_CHARS_MAX."""
        run = ""
        while len(run) < HEAD_CHARS_MAX and (char := (yield from self.peek())) and char in letters:
            run += self.next()
        return run

    def space(self) -> Steps[str]:
        return self.run(" \t\r\n")

    def optional(self, marker: str) -> Steps[bool]:
        """Whether the marker comes next; then it is read."""
        while True:
            there = self._text[self._at : self._at + len(marker)]
            if there == marker:
                self._at += len(marker)
                return True
            if self._ended or not marker.startswith(there):
                return False
            yield

    def until(self, *markers: str, say: Callable[[str], object] | None = None) -> Steps[str]:
        """Say what comes before the first of the markers, read it and return it; "" at the end."""
        say = say or self.say
        longest = max(map(len, markers))
        find = re.compile("|".join(map(re.escape, markers)))
        first = re.compile("|".join({re.escape(marker[0]) for marker in markers}))
        while True:
            text = self._text
            end = len(text)
            if first.search(text, self._at):
                if found := find.search(text, self._at):
                    say(text[self._at : found.start()])
                    self._at = found.end()
                    return found[0]
                if not self._ended:
                    begins = range(max(self._at, end - longest + 1), end)
                    held = (at for at in begins if any(marker.startswith(text[at:]) for marker in markers))
                    end = next(held, end)
            if end > self._at:
                say(text[self._at : end])
                self._at = end
            if self._ended:
                return ""
            yield

    def skip(self, *markers: str) -> Steps[None]:
        """Drop what comes before the first of the markers."""
        marker = yield from self.until(*markers, say=lambda _: None)
        self._at -= len(marker)

    def rest(self) -> Steps[None]:
        """Say all that comes."""
        while True:
            if self._at < len(self._text):
                self.say(self._text[self._at :], hold=False)
                self._at = len(self._text)
            if self._ended:
                return
            yield

    def head(self, marker: str) -> Steps[tuple[str, bool]]:
        """What comes before the marker, which is read, and whether it was found within HEAD_CHARS_MAX."""
        while True:
            most = self._at + HEAD_CHARS_MAX + len(marker)
            end = self._text.find(marker, self._at, most)
            if end >= 0:
                head, self._at = self._text[self._at : end], end + len(marker)
                return head, True
            if self._ended or len(self._text) >= most:
                head = self._text[self._at : self._at + HEAD_CHARS_MAX]
                self._at += len(head)
                return head, False
            yield

    def json(self, take: Callable[[str], object]) -> Steps[bool]:
        """A string, list or object, which begins with the next character: each part of its text goes to `take`, at most
        ARGUMENTS_CHARS_MAX. Whether it was whole; else it ends where it cannot go on."""
        depth, quoted, left = 0, False, ARGUMENTS_CHARS_MAX
        while True:
            text, begin, at = self._text, self._at, self._at
            last = min(len(text), begin + left)
            going = True
            while going and (found := (_QUOTED if quoted else _STRUCTURE).search(text, at, last)):
                char, at = found[0], found.end()
                if char == "\\" and quoted:
                    going = at < last
                    at += 1 if going else -1
                elif char == '"':
                    quoted = not quoted
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                else:
                    at -= 1
                    take(text[begin:at])
                    self._at = at
                    return False
                if not depth and not quoted:
                    take(text[begin:at])
                    self._at = at
                    return True
            self._at = at = at if not going else last
            take(text[begin:at])
            left -= at - begin
            if self._ended or last < len(text) or not left:
                return False
            yield

    def value(self) -> Steps[tuple[str, bool]]:
        """The text of a value of JSON, and whether it was whole."""
        if (yield from self.peek()) in ('"', "{", "["):
            parts: list[str] = []
            whole = yield from self.json(parts.append)
            return "".join(parts), whole
        scalar = ""
        while len(scalar) < HEAD_CHARS_MAX and (char := (yield from self.peek())):
            if _SCALAR_END.match(char):
                return scalar, bool(scalar)
            scalar += self.next()
        return scalar, False
