"""One answer as its client reads it, over all the calls that bring parts of it, judged by the mock engine's definition.

Every token says which attempt drew it (`engine.ATTEMPTS`), and its log-probability, where asked, says so again:
attempts may only rise along an answer, until another router runs the request under another id. What a resume token says
of the place behind its event must be so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

from batonpb import common_pb2, inference_pb2

from baton.ids import RequestId
from router.resume import Place, ResumeToken, tokens_crc
from tests.sim.engine import ATTEMPTS, SEED_PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: tuple[int, ...]
    output_tokens: int
    seed: int
    logprobs: bool = False
    resumable: bool = False
    whole: bool = False
    """The client wants the answer in one piece."""
    leaves_after: int = 0
    """The client goes away after so many tokens, or before its answer comes; 0: it stays."""
    reads_slowly_s: float = 0.0

    @property
    def plain(self) -> bool:
        """Its tokens do not depend on the attempt that draws them: a router may compute it again."""
        return self.seed >= SEED_PLAIN

    def message(self) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.Sampling(temperature=0.0, seed=self.seed, max_tokens=self.output_tokens)
        if self.logprobs:
            sampling.logprobs = 0
        ids = inference_pb2.TokenIds(ids=self.prompt)
        return inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling, resumable=self.resumable)


def events_of(response: inference_pb2.GenerateResponse) -> Sequence[inference_pb2.GenerateEvent]:
    """Those of a stream that brings all at once."""
    tokens = inference_pb2.Tokens(ids=response.ids, text=response.text, logprobs=response.logprobs)
    return (
        inference_pb2.GenerateEvent(started=inference_pb2.Started(request_id=response.request_id)),
        inference_pb2.GenerateEvent(tokens=tokens),
        inference_pb2.GenerateEvent(finished=inference_pb2.Finished(reason=response.reason, stats=response.stats)),
    )


@dataclass(slots=True, kw_only=True)
class Reader:
    """What its client has of one answer."""

    question: Question
    right: Callable[[Question, list[int], int], list[int]]
    """The right answer where attempts have drawn the first tokens and one attempt all others."""
    tokens: list[int] = field(default_factory=list)
    wrong: str = ""
    finished: bool = False
    attempts: int = 0
    """How many have drawn tokens of it."""
    runs: tuple[RequestId, ...] = ()
    """The ids under which routers have run it, in the order in which the client has heard of them."""
    token: str = ""
    """The resume token of the last event."""
    place: Place = field(default_factory=Place)
    _secret: bytes = b""
    _crc: int = 0
    """Of the ids of the first `_summed` tokens."""
    _summed: int = 0
    _started: bool = False
    _attempt: int = -1
    _answer: list[int] = field(default_factory=list)
    """What is right from here on, if this attempt draws it."""

    def fork(self) -> Reader:
        """For another call that begins here."""
        other = copy(self)
        other.tokens, other._started = list(self.tokens), False
        return other

    def take(self, event: inference_pb2.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if bool(event.resume_token) is not self.question.resumable:
            self.wrong = f"{kind} with the resume token {event.resume_token!r}"
        elif self.finished:
            self.wrong = f"{kind} after `finished`"
        elif kind == "started":
            self.wrong = "`started` twice" if self._started else ""
            self._started = True
            self._take_resume_token(event)
        elif not self._started:
            self.wrong = f"{kind} before `started`"
        else:
            self._take_resume_token(event)
            if kind == "tokens":
                self._take_tokens(event.tokens)
            else:
                self.finished = True
                self._check_whole(event.finished)
        if self.question.resumable and not self.wrong:
            self._check_place()

    def _take_resume_token(self, event: inference_pb2.GenerateEvent) -> None:
        if not self.question.resumable:
            return
        said = ResumeToken.decode(event.resume_token)
        if len(said.places) != 1 or self._secret not in (b"", said.secret):
            self.wrong = f"a resume token of {len(said.places)} answers, or of another call"
            return
        self.token, self._secret, self.place = event.resume_token, said.secret, said.places[0]
        run = self.place.request
        if run and self.runs[-1:] != (run,):
            if run in self.runs:
                self.wrong = "a run that another has followed is back"
            self.runs += (run,)
            self._attempt, self._answer = -1, []

    def _check_place(self) -> None:
        place, count = self.place, len(self.tokens)
        self._crc, self._summed = tokens_crc(self.tokens[self._summed :], self._crc), count
        if (place.tokens, place.finished) != (count, self.finished) or place.crc != self._crc:
            self.wrong = f"the client has {count} tokens, finished {self.finished}; its place says {place}"

    def _take_tokens(self, message: inference_pb2.Tokens) -> None:
        at, ids = len(self.tokens), list(message.ids)
        if message.first_index != at:
            self.wrong = f"token index {message.first_index} where {at} is next"
        elif ids != self._answer[at : at + len(ids)]:
            for token in ids:
                self._take_token(token)
        else:
            self.tokens += ids
        if self.question.logprobs and not self.wrong:
            reported = [round(-1 - logprob.logprob) for logprob in message.logprobs]
            if reported != [token % ATTEMPTS for token in ids]:
                self.wrong = f"log-probabilities by the attempts {reported} for tokens {ids}"

    def _take_token(self, token: int) -> None:
        """A token that is not the next one of the attempt so far."""
        at, attempt = len(self.tokens), token % ATTEMPTS
        if attempt < self._attempt:
            self.wrong = f"token {at} is of attempt {attempt}, the one before it of attempt {self._attempt}"
        elif attempt > self._attempt:
            self._attempt = attempt
            self.attempts += 1
            self._answer = self.right(self.question, [token % ATTEMPTS for token in self.tokens], attempt)
        self.tokens.append(token)
        if self._answer[at : at + 1] != [token]:
            self.wrong = self.wrong or f"token {token} at index {at}, by definition {self._answer[at : at + 1]}"

    def _check_whole(self, finished: inference_pb2.Finished) -> None:
        if len(self.tokens) != self.question.output_tokens:
            self.wrong = f"{len(self.tokens)} tokens of {self.question.output_tokens}"
        elif finished.reason != common_pb2.FINISH_REASON_LENGTH:
            self.wrong = f"finished with reason {finished.reason}"
        elif finished.stats.output_tokens != len(self.tokens):
            self.wrong = f"the statistics count {finished.stats.output_tokens} tokens of {len(self.tokens)}"
