"""JSON of the OpenAI endpoints' answers, whole and in chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Code, Reason
from baton.wire import ModelInfo

LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""
STATUS_OF: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.ABORTED: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""HTTP status; 500 for the rest. ABORTED asks to send the request again, which 503 does too."""
_OF_THE_CLUSTER: Final = frozenset({Reason.INCARNATION_MISMATCH, Reason.INCOMPATIBLE_NODE})
"""Preconditions that nodes fail, not the request: 503."""
_FINISH: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}

TokenText = Callable[[int], str]
Json = dict[str, Any]


def error_status(error: BatonError) -> int:
    return 503 if error.reason in _OF_THE_CLUSTER else STATUS_OF.get(error.code, 500)


def error_headers(error: BatonError) -> dict[str, str]:
    """When to try again, in whole seconds as the standard has it, and in milliseconds as OpenAI's clients read it."""
    if error.retry_after_ms is None:
        return {"retry-after": "1"} if error_status(error) == 429 else {}
    return {"retry-after": str(math.ceil(error.retry_after_ms / 1000)), "retry-after-ms": str(error.retry_after_ms)}


def error_json(error: BatonError, *, chat: bool = False) -> Json:
    status = error_status(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    param = None if error.field is None else error.field.removeprefix("sampling.")
    if param in ("text", "token_ids"):
        param = "messages" if chat else "prompt"
    elif chat and error.field == "sampling.logprobs":
        param = "top_logprobs"
    code = "model_not_found" if error.reason is Reason.UNKNOWN_MODEL else error.reason.value.lower()
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def model_json(model: ModelInfo, *, created: int, tokens_max: int) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": tokens_max,
    }


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counts over all answers of a call; a prompt counts once however many answers it has."""

    n: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def take(self, index: int, event: inference_pb2.GenerateEvent) -> None:
        first = index % self.n == 0
        if event.HasField("started") and first:
            self.prompt_tokens += event.started.prompt_tokens
        elif event.HasField("finished"):
            self.completion_tokens += event.finished.stats.output_tokens
            self.cached_tokens += event.finished.stats.prompt_tokens_cached if first else 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True, kw_only=True)
class Replies:
    """Makes the answers of one call. Mutable: knows which choices have said their role, and how long their text is."""

    id: str
    chat: bool
    model: str
    created: int
    logprobs: bool
    token_text: TokenText
    usage_in_chunks: bool
    _offsets: dict[int, int] = field(default_factory=dict)

    def chunk(self, index: int, event: inference_pb2.GenerateEvent) -> Json | None:
        """The chunk for one event of a stream, or None where it has nothing to say."""
        if event.HasField("started"):
            return None
        first = index not in self._offsets
        if event.HasField("finished"):
            return self._chunk([self._piece(index, "", [], first=first, finish=_FINISH[event.finished.reason])])
        tokens = event.tokens
        if not (tokens.text or first or (self.logprobs and tokens.ids)):
            return None
        return self._chunk([self._piece(index, tokens.text, [tokens], first=first, finish=None)])

    def usage_chunk(self, usage: Usage) -> Json:
        """The last one of a stream that asked for it."""
        return {**self._chunk([]), "usage": usage.json()}

    def whole(
        self, answers: Sequence[tuple[list[inference_pb2.Tokens], common_pb2.FinishReason]], usage: Usage
    ) -> Json:
        """The answer of a call that is no stream."""
        choices = []
        for index, (tokens, reason) in enumerate(answers):
            text = "".join(each.text for each in tokens)
            content: Json = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = self._logprobs(index, tokens)
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": _FINISH[reason]})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.json()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        return {**chunk, "usage": None} if self.usage_in_chunks else chunk

    def _head(self, chat_object: str) -> Json:
        kind = chat_object if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _piece(
        self, index: int, text: str, tokens: list[inference_pb2.Tokens], *, first: bool, finish: str | None
    ) -> Json:
        content: Json = {"text": text}
        if self.chat:
            role = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
            content = {"delta": role}
        logprobs = self._logprobs(index, tokens)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Iterable[inference_pb2.Tokens]) -> Json | None:
        offset = self._offsets.setdefault(index, 0)
        pairs = [pair for each in tokens for pair in zip(each.ids, each.logprobs, strict=False)]
        if not self.logprobs or not pairs:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token, found) for token, found in pairs], "refusal": None}
        texts = [self.token_text(token) for token, _ in pairs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [_finite(found.logprob) for _, found in pairs],
            "top_logprobs": [self._top(token, found) for token, found in pairs],
            "text_offset": offsets,
        }

    def _top(self, token: int, found: common_pb2.TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the drawn one whether it is among them or not. Of equal texts the best one counts."""
        top = {self.token_text(token): _finite(found.logprob)}
        for other, value in zip(found.top_ids, found.top_logprobs, strict=True):
            top[self.token_text(other)] = max(_finite(value), top.get(self.token_text(other), LOGPROB_MIN))
        return top

    def _chat_logprob(self, token: int, found: common_pb2.TokenLogprobs) -> Json:
        pairs = zip(found.top_ids, found.top_logprobs, strict=True)
        return {**self._entry(token, found.logprob), "top_logprobs": [self._entry(*pair) for pair in pairs]}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self.token_text(token)
        whole = "\ufffd" not in text
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
