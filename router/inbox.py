"""What one attempt at a request has received, and what becomes of it. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from batonpb import common_pb2, decode_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestKey


class Parting(Enum):
    """What becomes of an attempt that this router no longer serves."""

    DROP = auto()
    """The node forgets a finished one, and stops an unfinished one."""
    LEAVE = auto()
    """The node keeps it for a while, for a router that takes it over."""
    LEAVE_ENDED = auto()
    """The same, and a stop string has ended the answer: no more of it is computed."""
    NOTHING = auto()
    """Another router has it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Inbox:
    """What one attempt has received: its grant, and its tokens, each index once. Those already here are dropped.

    Filled by the prefill call (index 0) and by the decode node's stream (0 to the end). Bounded by max_tokens.
    """

    key: RequestKey
    epoch: int = 0
    """How often routers have taken the attempt over; what its node says of an older epoch is not for this one."""
    early: list[decode_pb2.RequestTokens] | None = None
    """What has come before the node's reply to TakeOver said its epoch. None: that is known."""
    first_index: int = 0
    """Index of `tokens[0]` in the answer: what is before it came from earlier attempts."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One for each token where the request asks for them, else empty."""
    begun_logprobs: Sequence[common_pb2.TokenLogprobs] | None = None
    """Of an attempt that is taken over, and asks for them: those of the tokens that it began with."""
    finish: common_pb2.FinishReason | None = None
    error: BatonError | None = None
    given_up: bool = False
    """The decode node itself has said that it will not go on."""
    out_of_reach: bool = False
    """This router has lost the decode node's stream. Others may still reach the node."""
    lost_before: bool = False
    """It had when the node granted, and has not reached the node since."""
    never_reached: bool = False
    """The attempt failed because of that."""
    queued_s: float | None = None
    """When the prefill node said that it has the request. None: it did not."""
    granted: bool = False
    """The prefill node has said that a decode node has taken the attempt, or that none is needed."""
    committed: bool = False
    """A decode node runs it, or has done so."""
    told: bool = False
    """The client has been told where it is, so it may come back to it."""
    over: bool = False
    """This router serves it no more."""
    decode: Incarnation = Incarnation(0)
    """The process that has the attempt, whose stream brings its tokens; 0: none that is known."""
    resolved: int = 0
    """How often the decode node was asked whether it goes on."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0
    """Tokens that the client has taken."""
    writing_s: float | None = None
    """Since when the client is being given what it has not taken."""
    on_put: Callable[[Inbox], None] | None = None
    """Called after each `put`."""

    @property
    def taken(self) -> bool:
        """A decode node has the attempt, or none is needed. Tokens take another way than news of the grant, and may
        come first."""
        return self.granted or bool(self.tokens)

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.read

    def put(self, first_index: int, ids: list[int], logprobs: Sequence[common_pb2.TokenLogprobs] = ()) -> None:
        """Take tokens in, and their log-probabilities if there are any.

        A gap is a bug of the sender: the request fails rather than skips a token.
        """
        have = self.next_index
        if first_index > have:
            text = f"Tokens {have} to {first_index - 1} of the answer were never received."
            self.fail(BatonError(Reason.INTERNAL, text))
            return
        if self.begun_logprobs is not None and not logprobs:
            known = [*self.begun_logprobs[first_index : first_index + len(ids)]]
            logprobs = known + [common_pb2.TokenLogprobs()] * (len(ids) - len(known))
        self.tokens.extend(ids[have - first_index :])
        self.logprobs.extend(logprobs[have - first_index :])
        self.news.set()
        if self.on_put is not None:
            self.on_put(self)

    def end(self, finish: common_pb2.FinishReason) -> None:
        self.finish = finish
        self.news.set()

    def fail(self, error: BatonError) -> None:
        if self.error is None and self.finish is None:
            self.error = error
            self.news.set()

    def lose(self, error: BatonError) -> None:
        """Fail with the decode node's stream."""
        self.out_of_reach = True
        self.never_reached = self.lost_before and self.error is None and self.finish is None
        self.fail(error)

    def give_up(self, error: BatonError) -> None:
        """Fail, by the decode node's own word."""
        self.given_up = True
        self.fail(error)

    def go_on(self) -> None:
        """The decode node has answered: the failure was another's."""
        self.error = None
        self.lost_before = self.never_reached = False

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.tokens)


def internal_error() -> BatonError:
    return BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details.")


def taken_over_error() -> BatonError:
    text = "The client has gone on with this request by another call, at this router or another one."
    return BatonError(Reason.TAKEN_OVER, text)


def foreign_error() -> BatonError:
    text = "The resume token is another API key's, or of no request: only who began a request may go on with it."
    return BatonError(Reason.PERMISSION_DENIED, text)
