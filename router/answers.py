"""Where an answer goes: `AnswerSink`, which each door implements for its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batonpb import common_pb2, inference_pb2

from router.resume import Place


@dataclass(slots=True, eq=False)
class AnswerPart:
    """Tokens that have come at once, and the text that has become whole with them. Nobody changes it."""

    first_index: int
    """Of `ids` in the answer; where there are none (text that was held back to the end), of what would follow."""
    ids: Sequence[int]
    text: str
    logprobs: Sequence[common_pb2.TokenLogprobs]
    """One for each id, or none at all."""
    place: Place | None
    """Of a resumable request: what its client has with this part. None: it is not resumable."""


class AnswerSink(Protocol):
    """The client's side of one answer; one of its own for each. The router's node calls it on the loop, in the middle
    of a decode node's message: nothing here waits, and nothing raises. A sink whose client has gone takes what comes
    and drops it.

    `started` comes once and first, `finished` once and last, or not at all where `RouterNode.run` raises: the caller of
    that tells the client. Nothing is called once `run` has returned. A client that attaches gets only what it does not
    have yet; of an answer that it has to its end that may be `started` alone.
    """

    on_open: Callable[[], None] | None
    """The node's, from `run`'s beginning to its end, which sets it back to None. The sink calls it on the loop when it
    is open again, never from within a call of the node's; what waited may come from within `on_open` at once."""

    @property
    def is_open(self) -> bool:
        """Whether more may be given. While the client has not taken what was given, tokens wait in the node's inbox,
        count as unread, and come in one part when `on_open` was called. What ends an answer comes all the same: a last
        part and `finished`."""

    def started(self, started: inference_pb2.Started, place: Place | None) -> None: ...

    def tokens(self, part: AnswerPart) -> None: ...

    def token(self, index: int, token: int, text: str) -> None:
        """The same of a part that has this token, its text, and nothing else to say: most have."""

    def finished(self, finished: inference_pb2.Finished, place: Place | None) -> None: ...


@dataclass(slots=True, eq=False)
class Collected:
    """A sink that keeps the whole answer, for who wants it in one piece."""

    parts: list[AnswerPart] = field(default_factory=list)
    start: inference_pb2.Started = field(default_factory=inference_pb2.Started)
    end: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)
    on_open: Callable[[], None] | None = None
    is_open: bool = True

    @property
    def logprobs(self) -> int:
        """How many it has, the prompt's with them."""
        return sum(len(part.logprobs) for part in self.parts) + len(self.end.prompt_logprobs)

    def started(self, started: inference_pb2.Started, _place: Place | None) -> None:
        self.start = started

    def tokens(self, part: AnswerPart) -> None:
        self.parts.append(part)

    def token(self, index: int, token: int, text: str) -> None:
        self.parts.append(AnswerPart(index, (token,), text, (), None))

    def finished(self, finished: inference_pb2.Finished, _place: Place | None) -> None:
        self.end = finished
