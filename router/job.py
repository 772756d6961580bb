"""One client request: what its last attempt has received, how that gets to the client, and what becomes of the
attempt. Pure.

Tokens go all the way in the call that brings them: inbox, text, what the client has already, its sink. While that is
not open they wait in the inbox.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from batonpb import common_pb2, decode_pb2, inference_pb2, resume_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.log import get_log
from baton.wire import RESUME_STATE_BYTES_MAX
from router.answers import AnswerPart, AnswerSink
from router.config import RouterConfig
from router.line import Place, Turns
from router.request import CheckedRequest, ClientCall, ObservedRequest
from router.resume import Place as ResumePlace
from router.resume import Unseen
from router.retries import Retries
from router.text import AnswerText

log = get_log("router")

TOKENS_AT_ONCE_MAX: Final = 256
"""Of an answer that comes with many at once: their text is made, and then others have their turn. Clients refuse large
messages, too."""


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
    """It has ended, or failed; or nothing of what came until then waits for the client any more."""
    given: int = 0
    """Tokens that the client's sink has."""
    read: int = 0
    """Tokens that the client has taken."""
    on_put: Callable[[], None] | None = None
    """Called after each `put`."""

    @property
    def taken(self) -> bool:
        """A decode node has the attempt, or none is needed. Tokens take another way than news of the grant, and may
        come first."""
        return self.granted or bool(self.tokens)

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.read

    @property
    def empty(self) -> bool:
        """Nothing in it waits for the client."""
        return self.given == len(self.tokens)

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
        if self.on_put is not None:
            self.on_put()

    def put_next(self, index: int, token: int) -> None:
        """The same of one token that has no log-probabilities."""
        if index != self.first_index + len(self.tokens) or self.begun_logprobs is not None:
            self.put(index, [token])
            return
        self.tokens.append(token)
        if self.on_put is not None:
            self.on_put()

    def all_given(self, *, ended: bool) -> None:
        """Its tokens are given. `ended`: a stop string has ended the answer with them."""
        if ended or self.finish is not None or self.error is not None:
            self.news.set()

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
        """Fail, by the decode node's own word. That another router has the request holds whatever failed before: this
        one neither cancels it nor tries again."""
        self.given_up = True
        if error.reason is Reason.TAKEN_OVER and self.finish is None:
            self.error = None
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
    sink: AnswerSink
    text: AnswerText
    config: RouterConfig
    turns: Turns
    now_s: Callable[[], float]
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
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens_received: int = 0
    """Those whose times these are."""
    block_size: int = 0
    observed: ObservedRequest = field(default_factory=ObservedRequest)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Of a resumable request: those of `output`, if it asks for them."""
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    """Of the prompt, if the request asks for them."""
    inbox: Inbox | None = None
    """The last attempt's."""
    taken_over: bool = False
    """Its attempt was another router's."""
    unseen: Unseen | None = None
    """Of a resumable request: what the client has."""
    text_ended: bool = False
    """A stop string has ended the answer."""
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    """Around all that is done for it, so that it can be cut off."""
    cut_off_with: BatonError | None = None
    """The error for its client."""
    _closed_s: float | None = None
    """Since when tokens wait because the client does not take what it was given."""
    _deferred: bool = False
    """What waits in the inbox has its turn later."""

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

    def cut_off(self, error: BatonError) -> None:
        """From outside, at any stage: its client gets this error. The first one counts."""
        if self.cut_off_with is None:
            self.cut_off_with = error
            self.scope.reschedule(self.now_s())

    def over(self) -> None:
        """It refers to itself no more, by its task or by the frames in an error's traceback."""
        self.cut_off_with = None
        del self.scope

    def start(self) -> None:
        """The answer begins. Until `end` the sink calls this when it is open again."""
        started = inference_pb2.Started(request_id=self.call.id, prompt_tokens=self.stats.prompt_tokens)
        self.sink.on_open = self._opened
        self.sink.started(started, self._place())

    def came(self) -> None:
        """Something has come into the inbox. A client that reads may get many tokens at once, so time counts too."""
        if self.sink.is_open:
            if not self._deferred:
                if self.turns.begin():
                    self._give()
                else:
                    self._deferred = True
                    self.turns.later(self._give)
            return
        inbox = self.inbox
        assert inbox is not None
        if self._closed_s is None:
            self._closed_s = self.now_s()
        elif (
            inbox.unread > self.config.client_tokens_unread_max
            and (self.now_s() - self._closed_s) * 1000 > self.config.client_stall_ms
            and self.cut_off_with is None
        ):
            log.warning("client cut off", request=self.call.id, key=self.id, unread=inbox.unread)
            self.cut_off(_slow_client(inbox.unread))

    def _opened(self) -> None:
        """The client has taken all that it was given."""
        self._closed_s = None
        if self.inbox is not None:
            self.inbox.read = self.inbox.given
            if not self.inbox.empty:
                self.came()

    def _give(self) -> None:
        """Give the client what waits in the inbox. A bug ends this request, and nothing else in the message that its
        tokens came with."""
        self._deferred = False
        inbox, sink = self.inbox, self.sink
        if inbox is None or inbox.over or self.text_ended or self.cut_off_with or not sink.is_open:
            return
        tokens, logprobs = inbox.tokens, inbox.logprobs
        begin, count = inbox.given, len(tokens)
        if begin == count:
            return
        end = count if count - begin <= TOKENS_AT_ONCE_MAX else begin + TOKENS_AT_ONCE_MAX
        try:
            if end - begin == 1 and begin and not logprobs and self.unseen is None and not self.text.may_stop:
                self._take_one(inbox.first_index + begin, tokens[begin])
            else:
                self._take(inbox.first_index + begin, tokens[begin:end], logprobs[begin:end] if logprobs else ())
        except BatonError as error:
            self.cut_off(error)
        except Exception:
            log.exception("an answer broke off", request=self.id)
            self.cut_off(internal_error())
        inbox.given = end
        if sink.is_open:
            inbox.read = end
        if self.text_ended or end == count:
            inbox.all_given(ended=self.text_ended)
        elif sink.is_open:
            self._deferred = True
            self.turns.later(self._give)

    def _take_one(self, index: int, token: int) -> None:
        """As `_take`, with all that it calls, of a token behind the first that has nothing but its text to say: most
        have. Nobody goes on with the request elsewhere, and no stop string ends it."""
        now_s = self.last_token_s = self.turns.looked_s
        self.tokens_received += 1
        self.output.append(token)
        text = self.text.push_one(token)
        self.call.take_output(1)
        self.observed.tokens(now_s, 1)
        self.sink.token(index, token, text)

    def _take(self, first_index: int, ids: list[int], logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """New tokens of the answer."""
        now_s = self.last_token_s = self.turns.looked_s
        if not self.tokens_received:
            self.first_token_s = now_s
        self.tokens_received += len(ids)
        self.output += ids
        if self.unseen is not None:
            self.logprobs += logprobs
        self.pass_on(first_index, ids, logprobs, now_s)

    def pass_on(
        self, first_index: int, ids: list[int], logprobs: Sequence[common_pb2.TokenLogprobs], now_s: float
    ) -> None:
        """Tokens that are part of `output`, on to the client. Raises BatonError NOT_RESUMABLE."""
        taken, text = self.text.push(ids)
        if self.text.found is not None:
            self.text_ended = True
            ids, logprobs = ids[:taken], logprobs[:taken]
        self._send(first_index, ids, text, logprobs, now_s)

    def end(self) -> None:
        """All tokens have been passed on. Raises BatonError NOT_RESUMABLE."""
        stats, text = self.stats, self.text
        if rest := text.flush():
            self._send(text.tokens, [], rest, (), self.last_token_s)
        if text.found is not None:
            self.finish = common_pb2.FINISH_REASON_STOP
        stats.output_tokens = text.tokens
        count = min(self.tokens_received, text.tokens)  # behind a stop string there may be more
        stats.ttft_ms = (self.first_token_s - self.began_s) * 1000 if count else 0.0
        stats.itl_mean_ms = (self.last_token_s - self.first_token_s) / (count - 1) * 1000 if count > 1 else 0.0
        self.observed.finished(self.finish, stats)
        if self.unseen is None or self.unseen.end():
            self.sink.finished(self._finished(), self._place())

    def _finished(self) -> inference_pb2.Finished:
        finished = inference_pb2.Finished(reason=self.finish, stats=self.stats, prompt_logprobs=self.prompt_logprobs)
        if self.text.found is not None:
            finished.stop_text = self.text.found
        elif self.finish == common_pb2.FINISH_REASON_STOP and self.output[-1] in self.checked.sampling.stop_token_ids:
            finished.stop_token = self.output[-1]
        return finished

    def _send(
        self, first_index: int, ids: list[int], text: str, logprobs: Sequence[common_pb2.TokenLogprobs], now_s: float
    ) -> None:
        """To the client, what it does not have of it. Raises BatonError NOT_RESUMABLE."""
        if ids and not self.taken_over:
            self.call.take_output(len(ids))  # what the client had is computed again for it
        if self.unseen is not None:
            known = self.unseen.take(first_index, ids, text)
            if self.call.had is not None:
                self.call.had(text if known is None else text[: known[1]])
            if known is None:
                return
            seen, chars = known
            first_index, ids, text, logprobs = first_index + seen, ids[seen:], text[chars:], logprobs[seen:]
            if ids and self.taken_over:
                self.call.take_output(len(ids))
        if ids:
            self.observed.tokens(now_s, len(ids))
        place = None if self.unseen is None else self._place()
        self.sink.tokens(AnswerPart(first_index, ids, text, logprobs, place))

    def _place(self) -> ResumePlace | None:
        """What the client of a resumable request has with what it gets now, and where the rest is."""
        if self.unseen is None:
            return None
        inbox = self.inbox
        if inbox is None:
            return self.unseen.place(self.id, Attempt(0), Incarnation(0))
        inbox.told = True
        return self.unseen.place(inbox.key.request, inbox.key.attempt, inbox.decode)

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
            stop_token_ids=sampling.stop_token_ids,
            grammar=sampling.HasField("grammar"),
        )
        state.MergeFrom(resume.state)
        if state.ByteSize() > RESUME_STATE_BYTES_MAX:
            state.ClearField("output_logprobs")  # most clients have them by now
        return common_pb2.Resumable(tag=resume.tag(self.call.key_name), state=state.SerializeToString())


def _slow_client(unread: int) -> BatonError:
    text = (
        f"The client has left {unread} tokens unread, more than are kept for it (client_tokens_unread_max); the "
        "request was cancelled. Read faster, or ask for fewer tokens."
    )
    return BatonError(Reason.SLOW_CLIENT, text, metadata={"unread": str(unread)})


def internal_error() -> BatonError:
    return BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details.")


def taken_over_error() -> BatonError:
    text = "The client has gone on with this request by another call, at this router or another one."
    return BatonError(Reason.TAKEN_OVER, text)


def foreign_error() -> BatonError:
    text = "The resume token is another API key's, or of no request: only who began a request may go on with it."
    return BatonError(Reason.PERMISSION_DENIED, text)
