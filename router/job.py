"""One client request, what its last attempt has received, and what becomes of that attempt. Pure."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from batonpb import common_pb2, decode_pb2, inference_pb2, resume_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.wire import RESUME_STATE_BYTES_MAX
from router.line import Place
from router.request import CheckedRequest, ClientCall, ObservedRequest
from router.resume import Unseen
from router.retries import Retries


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
    number: int = 0
    """What its node's stream calls it in arrays, or an earlier stream called it. 0: nothing."""
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


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One client request, from its check to its last token."""

    id: RequestId
    """Ours, random: what a client calls its request may be used twice, and grants and tombstones are keyed by this.
    That of another router's, until the attempt is lost that was taken over from it."""
    call: ClientCall
    checked: CheckedRequest
    """Of an attempt that was taken over only what its text needs."""
    began_s: float
    place: Place
    """In the line."""
    retries: Retries
    stats: inference_pb2.RequestStats
    request: inference_pb2.GenerateRequest | None = None
    """As it came; None: the client attaches and did not repeat it."""
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    output: list[int] = field(default_factory=list)
    """What the client has, whichever attempt it came from: the next attempt goes on behind it."""
    avoid: set[Incarnation] = field(default_factory=set)
    """Prefill processes that did not answer this request, or had no decode node for it."""
    too_small: set[Incarnation] = field(default_factory=set)
    """Prefill processes that said that their regions can never hold it, whatever their records say."""
    avoid_decode: set[Incarnation] = field(default_factory=set)
    """Decode processes that this router could not reach with this request; a prefill node may."""
    full_in_a_row: int = 0
    """How often prefill nodes have found all decode nodes full since the last other answer."""
    attempts: int = 0
    nodes: dict[str, None] = field(default_factory=dict)
    """Names of those that it was placed on, in order."""
    token_times_s: list[float] = field(default_factory=list)
    block_size: int = 0
    observed: ObservedRequest = field(default_factory=ObservedRequest)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Of a resumable request: those of `output`, if it asks for them."""
    inbox: Inbox | None = None
    """The last attempt's."""
    taken_over: bool = False
    """Its attempt was another router's."""
    unseen: Unseen | None = None
    """Of a resumable request: what the client has."""
    text_ended: bool = False
    """A stop string has ended the answer."""
    cut_off_with: BatonError | None = None
    """The error that `call.cut_off` was called with."""

    @property
    def tokens(self) -> int:
        """That the next attempt computes: the prompt, and what the client has of the answer."""
        return len(self.checked.prompt) + len(self.output)

    def take_said(self) -> list[int]:
        """What the client has and this router has not seen yet: it counts as output from now on."""
        new = list(self.checked.said[len(self.output) :])
        self.output += new
        if self.checked.sampling.HasField("logprobs"):
            self.logprobs += [common_pb2.TokenLogprobs()] * len(new)  # the client has them; nobody asks for them again
        return new

    def is_tagged(self, tag: bytes) -> bool:
        """Whether who shows this tag may go on with it, or end it. It is resumable."""
        assert self.call.resume is not None, self.id
        return hmac.compare_digest(self.call.resume.tag(self.call.key_name), tag)

    def for_client(self, event: inference_pb2.GenerateEvent) -> inference_pb2.GenerateEvent | None:
        """What is sent of an event of the answer, if anything. Raises BatonError NOT_RESUMABLE."""
        resume, inbox = self.call.resume, self.inbox
        if resume is None or self.unseen is None:
            return event
        new = self.unseen.take(event)
        if new is not None:
            request, attempt = (self.id, Attempt(0)) if inbox is None else inbox.key
            decode = Incarnation(0) if inbox is None else inbox.decode
            if inbox is not None:
                inbox.told = True
            new.resume_token = resume.token(self.unseen.place(request, attempt, decode)).encode()
        return new

    def for_another_router(self) -> common_pb2.Resumable | None:
        """What the node that writes the answer keeps of a resumable request."""
        if (resume := self.call.resume) is None:
            return None
        checked, sampling = self.checked, self.checked.sampling
        state = resume_pb2.ResumeState(
            call=self.call.id,
            stop=checked.stop,
            include_stop=checked.include_stop,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.HasField("logprobs"),
            prompt_tokens=len(checked.prompt),
            output_logprobs=self.logprobs,
            request_digest=resume.digest,
        )
        state.MergeFrom(resume.state)
        if state.ByteSize() > RESUME_STATE_BYTES_MAX:
            state.ClearField("output_logprobs")  # most clients have them by now
        return common_pb2.Resumable(tag=resume.tag(self.call.key_name), state=state.SerializeToString())


def internal_error() -> BatonError:
    return BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details.")


def taken_over_error() -> BatonError:
    text = "The client has gone on with this request by another call, at this router or another one."
    return BatonError(Reason.TAKEN_OVER, text)


def foreign_error() -> BatonError:
    text = "The resume token is another API key's, or of no request: only who began a request may go on with it."
    return BatonError(Reason.PERMISSION_DENIED, text)
