"""The JSON of the OpenAI endpoints' answers, whole and in chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from typing import ClassVar, Final

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError
from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_reader import Piece, PieceKind
from router.answers import AnswerPart, Collected
from router.openai import Json, OpenAiCall, error_json
from router.resume import Place

LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""
_FINISH: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
_NAMES: Final = {PieceKind.CONTENT: "content", PieceKind.REASONING: "reasoning_content"}

_MARK: Final = "\0"
"""Stands for the text where a frame is cut."""


def chunks_id(request_id: str, *, chat: bool) -> str:
    """What answers have as their id."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"


@dataclass(slots=True, kw_only=True)
class Replies:
    """Makes the JSON of one call's answers. Mutable: knows which choices have begun, and how long each is."""

    done: ClassVar[str] = "[DONE]"
    """The last event of a stream; empty: there is none."""
    request_id: str
    call: OpenAiCall
    model: str
    created: int
    token_text: Callable[[int], str]
    form: AnswerForm = AnswerForm()
    """The model's."""
    secret: bytes = b""
    """The ids of calls are made of it: whoever goes on with a stream makes the same."""
    fingerprint: str | None = None
    """Of the model."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Over all answers."""
    _prompts: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt, which counts once however many answers it has."""
    _tokens: dict[int, int] = field(default_factory=dict)
    """Of each answer, so far."""
    _offsets: dict[int, int] = field(default_factory=dict)
    _frames: dict[int, tuple[str, str]] = field(default_factory=dict)
    """What stands before and behind the text in an answer's chunks that have nothing else to say."""
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)
    """Of answers that are split into content, reasoning and calls."""
    _piece_frames: dict[tuple[int, PieceKind, int], tuple[str, str]] = field(default_factory=dict)
    """The same as `_frames`, for each kind of piece."""

    @property
    def id(self) -> str:
        return chunks_id(self.request_id, chat=self.call.chat)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    def go_on(self, places: Sequence[Place]) -> None:
        """The client has so much of the answers. Those that it has to the end are not heard of again."""
        for index, place in enumerate(places):
            if place.tokens or place.finished:
                self._offsets[index] = place.text_offset
                self._tokens[index] = place.tokens
            if place.finished:
                self._prompts[index // self.call.n] = place.prompt_tokens
                self.completion_tokens += place.tokens

    def offset(self, index: int) -> int:
        """Characters of the answer's tokens so far, where their log-probabilities say it."""
        return self._offsets.get(index, 0)

    def prompt_of(self, index: int) -> int:
        """Tokens of the answer's prompt."""
        return self._prompts.get(index // self.call.n, 0)

    def started(self, index: int, started: inference_pb2.Started) -> None:
        """Counts in the usage."""
        self._prompts[index // self.call.n] = started.prompt_tokens
        self._tokens.setdefault(index, 0)

    def finished(self, index: int, finished: inference_pb2.Finished) -> None:
        """Counts in the usage."""
        self.completion_tokens += 0 if self.call.no_answer else finished.stats.output_tokens
        self.cached_tokens += finished.stats.prompt_tokens_cached if index % self.call.n == 0 else 0

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def chunk(self, index: int, part: AnswerPart) -> str | None:
        """The chunk for one part of a stream, as JSON, or None where it has nothing to say."""
        frame = self._frames.get(index)
        if frame is None:
            first, call = index not in self._offsets, self.call
            if call.reading is not None:
                return self._split_chunk(index, part, first=first)
            if first or call.logprobs or call.token_ids or call.continuous_usage:
                if not first and not part.ids and not part.text:
                    return None
                return self._full_chunk(index, self._content(index, part.text, first=first), part, first=first)
            frame = self._frames[index] = self._frame(index, self._content(index, _MARK, first=False))
        return f"{frame[0]}{encode_basestring_ascii(part.text)}{frame[1]}" if part.text else None

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text of an answer's further chunks, as server-sent events. None: they may
        say more than their text."""
        frame = self._frames.get(index)
        if frame is None:
            return None
        before, _, behind = self.framed(f"{frame[0]}{_MARK}{frame[1]}").partition(_MARK)
        return before.encode(), behind.encode()

    def _split_chunk(self, index: int, part: AnswerPart, *, first: bool) -> str | None:
        """The chunk for one part of an answer that is split: one, as it has one place to go on behind."""
        pieces, call = self._parser(index).feed(part.text), self.call
        told = ((call.logprobs or call.token_ids) and part.ids) or (call.continuous_usage and (part.ids or pieces))
        if first or told or len(pieces) > 1 or any(piece.kind is PieceKind.CALL for piece in pieces):
            return self._full_chunk(index, {"delta": self._delta(index, pieces, first=first)}, part, first=first)
        if not pieces:
            return None
        (piece,) = pieces
        key = (index, piece.kind, piece.call)
        frame = self._piece_frames.get(key)
        if frame is None:
            marked = Piece(kind=piece.kind, text=_MARK, call=piece.call)
            frame = self._frame(index, {"delta": self._delta(index, [marked], first=False)})
            self._piece_frames[key] = frame
        return f"{frame[0]}{encode_basestring_ascii(piece.text)}{frame[1]}"

    def _frame(self, index: int, marked: Json) -> tuple[str, str]:
        whole = json.dumps(self._chunk([self._piece(index, marked, [], finish=None)]))
        before, _, behind = whole.rpartition(json.dumps(_MARK))
        return before, behind

    def _full_chunk(self, index: int, content: Json, part: AnswerPart, *, first: bool) -> str:
        self._tokens[index] = self._tokens.get(index, 0) + len(part.ids)
        chunk = self._chunk([self._piece(index, content, [part], finish=None)])
        return json.dumps(self._with_index(chunk, index, first=first))

    def _with_index(self, chunk: Json, index: int, *, first: bool) -> Json:
        """The chunk, with what it says of its answer beside the choice: usage so far, and the prompt's tokens."""
        if self.call.continuous_usage:
            prompt, answer = self.prompt_of(index), self._tokens.get(index, 0)
            usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
            chunk = {**chunk, "usage": usage}
        if self.call.token_ids and first:
            where = chunk if self.call.chat else chunk["choices"][0]
            where["prompt_token_ids"] = self._prompt_ids(index)
        return chunk

    def _prompt_ids(self, index: int) -> list[int] | None:
        """None where the client attaches without its body."""
        requests = self.call.requests
        return list(requests[index // self.call.n].token_ids.ids) if requests else None

    def had(self, index: int, text: str) -> None:
        """The client, which goes on with the answer, has this text of it already."""
        self._parser(index).feed(text)

    def _parser(self, index: int) -> AnswerParser:
        parser = self._parsers.get(index)
        if parser is None:
            reading = self.call.reading
            assert reading is not None
            parser = self._parsers[index] = AnswerParser(
                self.form,
                tools=reading.tools,
                parallel=reading.parallel,
                begun=reading.reasons,
                reasoning=not reading.unreasoned,
            )
        return parser

    def _delta(self, index: int, pieces: Sequence[Piece], *, first: bool) -> Json:
        """What the pieces add to a message, as streams and whole messages have it but for the calls' numbers."""
        delta: Json = {"role": "assistant", "content": ""} if first else {}
        calls: list[Json] = []
        for piece in pieces:
            if piece.kind in _NAMES:
                name = _NAMES[piece.kind]
                delta[name] = delta.get(name, "") + piece.text
            elif piece.kind is PieceKind.CALL:
                function = {"name": piece.text, "arguments": ""}
                call_id = self._call_id(index, piece.call)
                calls.append({"index": piece.call, "id": call_id, "type": "function", "function": function})
            elif calls:
                calls[-1]["function"]["arguments"] += piece.text
            else:
                calls.append({"index": piece.call, "function": {"arguments": piece.text}})
        return {**delta, "tool_calls": calls} if calls else delta

    def _call_id(self, index: int, call: int) -> str:
        digest = sha256(b"tool call" + self.secret + f"/{index}/{call}".encode()).hexdigest()
        # Templates of Mistral take nine letters and digits, and nothing else.
        return digest[:9] if self.form.tools is ToolForm.MISTRAL else f"call_{digest[:24]}"

    def _finish(self, index: int, reason: common_pb2.FinishReason) -> str:
        finish = _FINISH[reason]
        calls = index in self._parsers and self._parsers[index].calls > 0
        named = self.call.reading is not None and self.call.reading.named  # OpenAI says "stop" then
        return "tool_calls" if calls and finish == "stop" and not named else finish

    def last(self, index: int, finished: inference_pb2.Finished) -> str:
        """The last chunk of an answer, as JSON."""
        return json.dumps(self.last_chunk(index, finished))

    def failure(self, error: BatonError) -> str:
        """What a stream that fails ends with."""
        return json.dumps(error_json(self.renamed(error), chat=self.call.chat))

    def renamed(self, error: BatonError) -> BatonError:
        """The error with the names that the call's fields have."""
        if error.field != "sampling.grammar" or not self.call.grammar_field:
            return error
        changed = error.reworded(error.message)
        changed.field = self.call.grammar_field
        return changed

    def framed(self, data: str) -> str:
        """A chunk as server-sent events."""
        return f"data: {data}\n\n"

    def last_chunk(self, index: int, finished: inference_pb2.Finished) -> Json:
        first = index not in self._offsets
        content = self._content(index, "", first=first)
        if self.call.reading is not None:
            content = {"delta": self._delta(index, self._parser(index).end(), first=first)}
        piece = self._piece(index, content, [], finish=self._finish(index, finished.reason))
        return self._with_index(self._chunk([piece | _stop_reason(finished)]), index, first=first)

    def usage_chunk(self) -> Json:
        """The last one of a stream that asked for it."""
        return {**self._chunk([]), "usage": self.usage()}

    def whole(self, answers: Sequence[Collected]) -> Json:
        """The answer of a call that is no stream."""
        choices = []
        for index, answer in enumerate(answers):
            self.started(index, answer.start)
            self.finished(index, answer.end)
            parts = [] if self.call.no_answer else answer.parts
            text = "".join(part.text for part in parts)
            content = {"message": self._message(index, text)} if self.call.chat else {"text": self._echo(index) + text}
            logprobs = self._logprobs(index, parts, answer.end.prompt_logprobs)
            finish = "length" if self.call.no_answer else self._finish(index, answer.end.reason)
            choice: Json = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
            choice |= self._token_ids(parts) | _stop_reason(
                inference_pb2.Finished() if self.call.no_answer else answer.end
            )
            if self.call.token_ids and not self.call.chat:
                choice["prompt_token_ids"] = self._prompt_ids(index)
            choices.append(choice)
        whole = {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}
        return whole | ({"prompt_token_ids": self._prompt_ids(0)} if self.call.token_ids and self.call.chat else {})

    def _message(self, index: int, text: str) -> Json:
        if self.call.reading is None:
            return {"role": "assistant", "content": text}
        parser = self._parser(index)
        message = self._delta(index, [*parser.feed(text), *parser.end()], first=True)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                del call["index"]
        return message

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        return {**chunk, "usage": None} if self.call.include_usage else chunk

    def _head(self, chat_object: str) -> Json:
        kind = chat_object if self.call.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def _echo(self, index: int) -> str:
        """What the answer begins with, beside its own text."""
        return self.call.echoes[index // self.call.n] if self.call.echoes else ""

    def _content(self, index: int, text: str, *, first: bool) -> Json:
        if not self.call.chat:
            return {"text": self._echo(index) + text if first else text}
        role = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": role}

    def _piece(self, index: int, content: Json, parts: list[AnswerPart], *, finish: str | None) -> Json:
        logprobs = self._logprobs(index, parts)
        piece = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return piece | self._token_ids(parts)

    def _token_ids(self, parts: Iterable[AnswerPart]) -> Json:
        return {"token_ids": [token for part in parts for token in part.ids]} if self.call.token_ids else {}

    def _logprobs(
        self, index: int, parts: Iterable[AnswerPart], prompt: Sequence[common_pb2.TokenLogprobs] = ()
    ) -> Json | None:
        """`prompt` are those of the prompt from its second token on, where they go before the answer's."""
        offset = self._offsets.setdefault(index, 0)
        pairs = [pair for part in parts for pair in zip(part.ids, part.logprobs, strict=False)]
        echoed = self._prompt_ids(index) or [] if self.call.logprobs and self.call.echoes else []
        if not self.call.logprobs or not (pairs or echoed):
            return None
        first, pairs = echoed[:1], [*zip(echoed[1:], prompt, strict=False), *pairs]
        if self.call.chat:
            return {"content": [self._chat_logprob(token, found) for token, found in pairs], "refusal": None}
        texts = [self.token_text(token) for token in (*first, *(token for token, _ in pairs))]
        unknown = [None] * len(first)  # nothing is before the prompt's first token
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=offset)
        return {
            "tokens": [self._name(token) for token in (*first, *(token for token, _ in pairs))],
            "token_logprobs": [*unknown, *(_finite(found.logprob) for _, found in pairs)],
            "top_logprobs": [*unknown, *(self._top(token, found) for token, found in pairs)],
            "text_offset": offsets,
        }

    def _top(self, token: int, found: common_pb2.TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the drawn one whether it is among them or not. Of equal texts the best one counts."""
        top = {self._name(token): _finite(found.logprob)}
        for other, value in zip(found.top_ids, found.top_logprobs, strict=True):
            top[self._name(other)] = max(_finite(value), top.get(self._name(other), LOGPROB_MIN))
        return top

    def _chat_logprob(self, token: int, found: common_pb2.TokenLogprobs) -> Json:
        pairs = zip(found.top_ids, found.top_logprobs, strict=True)
        return {**self._entry(token, found.logprob), "top_logprobs": [self._entry(*pair) for pair in pairs]}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.call.tokens_as_ids else self.token_text(token)

    def _entry(self, token: int, logprob: float) -> Json:
        text = self.token_text(token)
        whole = "\ufffd" not in text
        return {
            "token": self._name(token),
            "logprob": _finite(logprob),
            "bytes": list(text.encode()) if whole else None,
        }


def _stop_reason(finished: inference_pb2.Finished) -> Json:
    kind = finished.WhichOneof("stop")
    return {"stop_reason": getattr(finished, kind) if kind is not None else None}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
