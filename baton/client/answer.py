"""What a client says and gets: prompts, sampling, the pieces of an answer, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypedDict

from batonpb import common_pb2, inference_pb2

Grammar = common_pb2.Grammar
TokenLogprobs = common_pb2.TokenLogprobs
"""`logprob` of the drawn token; `top_ids` and `top_logprobs` of the best ones, best first. Natural logarithms."""
Stats = inference_pb2.RequestStats
"""What happened to the request: its nodes, its times, its tokens."""
_FINISHES: Final[Mapping[int, str]] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    """system, developer, user, assistant or tool."""
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation, which the router renders with the model's chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is drawn. None is the model's default, or that of docs/sampling.md."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 always takes the best token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the score of a token id."""
    seed: int | None = None
    choice: int = 0
    """Number of this answer among several to one prompt with one seed."""
    stop: Sequence[str] = ()
    include_stop: bool | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    """Log-probabilities of each token and of this many of the best ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second one on. The prompt is computed as a whole for it."""
    grammar: Grammar | None = None
    """What the text has to be: `Grammar(json_schema=...)`, `Grammar(regex=...)` or `Grammar(rules=...)`."""

    def message(self) -> inference_pb2.Sampling:
        return inference_pb2.Sampling(**{name: getattr(self, name) for name in self.__slots__})


def request_message(
    prompt: Prompt, sampling: Sampling | None, model: str | None, cache_salt: str | None, *, resumable: bool
) -> inference_pb2.GenerateRequest:
    """Raises TypeError or ValueError for what is no prompt."""
    request = inference_pb2.GenerateRequest(
        sampling=None if sampling is None else sampling.message(),
        model=model,
        cache_salt=cache_salt,
        resumable=resumable,
    )
    if isinstance(prompt, bytes):
        raise TypeError("The prompt is bytes: decode it to text.")
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.messages.extend([inference_pb2.ChatMessage(**message) for message in prompt])  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    return request


class Piece(NamedTuple):
    """Some tokens of an answer. Each index comes once, in order."""

    ids: Sequence[int] = ()
    """Empty where the end of a text comes without a token."""
    text: str = ""
    """What became complete with these tokens; empty where the router has no tokenizer."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each id if the request asks for them."""
    first_index: int = 0
    """Of `ids[0]` in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, or the part of it that there is."""

    request_id: str = ""
    """As the router's log has it; empty before a router has taken the request."""
    ids: Sequence[int] = ()
    text: str = ""
    """Empty where the router has no tokenizer."""
    finish: str = ""
    """stop: the model, or a stop string, has ended it; length: `max_tokens` has. Empty: it is not whole."""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    stats: Stats = field(default_factory=Stats)
    attaches: int = 0
    """How often the client has gone on with it at a router."""


class AnswerBuilder:
    """Puts an answer together from its events.

    Asserts what every client is promised: each token index once and in order, one end.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.resume_token = ""
        """Of the last event; empty where the request is not resumable."""
        self.complete = False
        self.attaching = False
        """The next beginning is that of an attach."""
        self._attaches = 0
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._request_id = self._finish = ""
        self._stats = Stats()

    def push(self, event: inference_pb2.GenerateEvent) -> Piece | None:
        """What the event adds to the answer."""
        assert not self.complete, "an event after the end"
        if event.resume_token:
            self.resume_token = event.resume_token
        kind = event.WhichOneof("event")
        if kind == "tokens":
            tokens = event.tokens
            piece = Piece(list(tokens.ids), tokens.text, list(tokens.logprobs), tokens.first_index)
            assert piece.first_index == len(self.ids), (piece.first_index, len(self.ids))
            self.ids += piece.ids
            self._logprobs += piece.logprobs
            if piece.text:
                self._texts.append(piece.text)
            return piece
        if kind == "started":
            self._request_id = event.started.request_id
            self._attaches += self.attaching
        elif kind == "finished":
            self._finish = _FINISHES.get(event.finished.reason, "unknown")
            self._stats = event.finished.stats
            self._prompt_logprobs = list(event.finished.prompt_logprobs)
            self.complete = True
        return None

    def answer(self) -> Answer:
        """What there is so far."""
        return Answer(
            request_id=self._request_id,
            ids=list(self.ids),
            text="".join(self._texts),
            finish=self._finish,
            logprobs=list(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            stats=self._stats,
            attaches=self._attaches,
        )
