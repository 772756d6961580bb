"""`/v1/responses`, stateless: its body as that of a chat, and a chat's answer as items and events. Pure.

API: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from batonpb import inference_pb2

from baton.errors import BatonError, bad_field
from router.answer_reader import Piece, PieceKind
from router.answers import AnswerPart, Collected
from router.openai import Json, refuse, typed
from router.replies import Replies
from router.request import MESSAGES_MAX, check_role

PATH: Final = "/v1/responses"
_STATELESS: Final = "nothing is stored here: send the whole conversation as input"
_REFUSED: Final[Mapping[tuple[str, ...], tuple[tuple[object, ...], str]]] = {
    ("store", "background"): ((False,), _STATELESS),
    ("previous_response_id", "conversation"): ((), _STATELESS),
    ("prompt",): ((), "prompts are sent, not stored"),
    ("truncation",): (("disabled",), "an input that is too long is refused"),
    ("context_management", "moderation"): ((), "nobody changes or judges an input here"),
    ("top_logprobs", "logprobs"): ((0, False), "/v1/chat/completions has log-probabilities"),
    ("messages",): ((), "input is what it became"),
    ("response_format",): ((), "text.format is what it became"),
    ("max_tokens", "max_completion_tokens"): ((), "max_output_tokens is what it became"),
    ("n",): ((1,), "a response is one answer"),
    ("resumable", "return_token_ids"): ((False,), "/v1/chat/completions has it"),
    ("previous_input_messages",): (([],), "input is the whole conversation"),
    ("enable_response_messages",): ((False,), "/tokenize and /detokenize show a prompt"),
}
_OWN: Final = frozenset({
    "input", "instructions", "text", "max_output_tokens", "stream_options", "include", "metadata", "reasoning", "store",
    "background", "truncation", "top_logprobs", "logprobs", "user",
})  # fmt: skip
"""Fields that a chat has not, or means something else by."""
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_NAMES: Final = {
    "messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens", "token_ids": "input", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
"""Of a chat's fields, in errors."""


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` as `parse_body` gives it. Raises BatonError naming the field."""
    refuse(body, _REFUSED)
    include = body.get("include", [])
    if not isinstance(include, list):
        raise bad_field("include", "include must be a list.")
    if "message.output_text.logprobs" in include:
        raise bad_field("include", "include asks for log-probabilities: /v1/chat/completions has them.")
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat["messages"] = _messages(body)
    if (effort := typed(body, "reasoning", {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if "tools" in body:
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    text = body.get("text", {})
    if not isinstance(text, dict):
        raise bad_field("text.format", "text must be an object.")
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": wanted}
    if wanted is not None:
        chat["response_format"] = wanted
    return chat


def echo_of(body: Mapping[str, Any]) -> Json:
    """What a response repeats of its call, as clients' types want it."""
    text = typed(body, "text", {})
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": typed(body, "metadata", {}),
        "parallel_tool_calls": typed(body, "parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": typed(body, "reasoning", {}),
        "store": False,
        "temperature": body.get("temperature"),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }


def renamed(error: BatonError) -> BatonError:
    """An error of the chat, naming the field of the response's call."""
    head, dot, rest = (error.field or "").removeprefix("sampling.").partition(".")
    if head in _NAMES:
        message = error.message.replace("response_format.json_schema", "text.format")
        name = "^messages\\b(?!\\[)" if head == "messages" else rf"\b{head}\b"  # elsewhere it is a word
        changed = error.reworded(re.sub(name, _NAMES[head], message))
        # Which message it was is no place in the input.
        changed.field = (
            _NAMES[head] if head == "messages" else f"{_NAMES[head]}{dot}{rest.removeprefix('json_schema.')}"
        )
        return changed
    if head == "tools":
        changed = error.reworded(error.message)
        changed.field = f"{head}{dot}{rest.replace('.function', '', 1)}"
        return changed
    return error


def _tools(tools: object) -> object:
    """As a chat has them, whose checks are for what else is wrong."""
    if not isinstance(tools, list):
        return tools
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") != "function":
            kind = str(tool.get("type"))[:40]
            raise bad_field(f"tools.{i}", f"tools[{i}] is of type {kind!r}: only functions of the client's are known.")
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def _messages(body: Mapping[str, Any]) -> list[Json]:
    """Raises BatonError naming the place in the input."""
    messages: list[Json] = []
    if instructions := typed(body, "instructions", ""):
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not 0 < len(items) <= MESSAGES_MAX:
        raise bad_field("input", f"input must be a string, or a list of 1 to {MESSAGES_MAX} items.")
    thought = ""
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise bad_field(f"input.{i}", f"input[{i}] must be an object.")
        if item.get("type") == "reasoning":
            thought += _text(item.get("content") or [], f"input.{i}.content", {"reasoning_text": "text"})
            continue
        message = _message(item, i)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant":
            if thought:
                message["reasoning_content"], thought = thought, ""
            if "tool_calls" in message and last.get("role") == "assistant":
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
        messages.append(message)
    return messages


def _message(item: Json, i: int) -> Json:
    kind, place = item.get("type", "message"), f"input.{i}"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise bad_field(place, f"input[{i}] must have a role.")
        check_role(role, i, field=f"{place}.role", of="input")
        return {"role": role, "content": _text(item.get("content"), f"{place}.content", _TEXT_PARTS)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not all(isinstance(each, str) for each in (call["id"], *function.values())):
            raise bad_field(place, f"input[{i}] must have a call_id, a name and arguments, all strings.")
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{place}.output", _TEXT_PARTS)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    why = f" {_STATELESS[0].upper()}{_STATELESS[1:]}." if kind == "item_reference" else ""
    raise bad_field(place, f"input[{i}] is of type {str(kind)[:40]!r}, which is not known here.{why}")


def _text(content: object, place: str, kinds: Mapping[str, str]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get(kinds.get(str(part.get("type")), "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_field(place, f"{place} must be text; it has a part of type {str(kind)[:40]!r}.")
        texts.append(text)
    return "\n".join(texts)


@dataclass(slots=True, kw_only=True)
class ResponseReplies(Replies):
    """Makes the events of one response, and the whole of it: what it has at its last event."""

    done: ClassVar[str] = ""
    _sequence: int = 0
    _output: list[Json] = field(default_factory=list)
    """Items; the last one is open."""
    _is_open: bool = False
    _events: list[str] = field(default_factory=list)
    """That were not taken yet."""
    _response: Json = field(default_factory=dict)
    """As it was told last."""

    @property
    def id(self) -> str:
        return f"resp_{self.request_id}"

    def framed(self, data: str) -> str:
        return data

    def renamed(self, error: BatonError) -> BatonError:
        return renamed(Replies.renamed(self, error))

    def chunk(self, _index: int, part: AnswerPart) -> str | None:
        self._begin()
        self._add(self._pieces(part.text))
        return self._take() or None

    def last(self, _index: int, finished: inference_pb2.Finished) -> str:
        self._begin()
        if self.call.reading is not None:
            self._add(self._parser(0).end())
        complete = self._finish(0, finished.reason) != "length"
        if not self._output and complete:
            self._open(PieceKind.CONTENT, "")
        self._close("completed" if complete else "incomplete")
        self._tell_response("completed" if complete else "incomplete", usage=self._usage())
        return self._take()

    def failure(self, error: BatonError) -> str:
        """In the middle of a stream."""
        self._close("incomplete")
        self._tell_response("failed", error={"code": "server_error", "message": error.message})
        return self._take()

    def whole(self, answers: Sequence[Collected]) -> Json:
        (answer,) = answers
        self.started(0, answer.start)
        self.finished(0, answer.end)
        self._add(self._pieces("".join(part.text for part in answer.parts)))
        self.last(0, answer.end)
        return self._response

    def _begin(self) -> None:
        if not self._sequence:
            self._tell_response("created", status="in_progress")
            self._tell_response("in_progress")

    def _pieces(self, text: str) -> Sequence[Piece]:
        if self.call.reading is not None:
            return self._parser(0).feed(text)
        return [Piece(kind=PieceKind.CONTENT, text=text)] if text else []

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                self._open(piece.kind, piece.text, call=piece.call)
                continue
            form = _FORMS[piece.kind]
            if not self._is_open or self._output[-1]["type"] != form.item:
                self._open(piece.kind, "")
            item = self._output[-1]
            if form.part:
                item["content"][0]["text"] += piece.text
            else:
                item["arguments"] += piece.text
            self._tell_text(form, "delta", delta=piece.text)

    def _open(self, kind: PieceKind, name: str, *, call: int = 0) -> None:
        """An item; the one before is over."""
        self._close("completed")
        form, number = _FORMS[kind], len(self._output)
        item: Json = {"id": f"{form.prefix}_{self.request_id}_{number}", "type": form.item, "status": "in_progress"}
        if kind is PieceKind.CONTENT:
            item |= {"role": "assistant", "content": []}
        elif kind is PieceKind.REASONING:
            item |= {"summary": [], "content": []}
        else:
            item |= {"name": name, "call_id": self._call_id(0, call), "arguments": ""}
        self._output.append(item)
        self._is_open = True
        self._tell("response.output_item.added", output_index=number, item=item)
        if form.part:
            part: Json = {"type": form.part, "text": ""}
            if kind is PieceKind.CONTENT:
                part |= {"annotations": [], "logprobs": []}
            self._tell_part("added", part)
            item["content"].append(part)

    def _close(self, status: str) -> None:
        """The open item, if any."""
        if not self._is_open:
            return
        self._is_open, item = False, self._output[-1]
        form = next(each for each in _FORMS.values() if each.item == item["type"])
        item["status"] = status
        if form.part:
            part = item["content"][0]
            self._tell_text(form, "done", text=part["text"])
            self._tell_part("done", part)
        else:
            self._tell_text(form, "done", name=item["name"], arguments=item["arguments"])
        self._tell("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _tell_part(self, what: str, part: Json) -> None:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        self._tell(f"response.content_part.{what}", **place, part=part)

    def _tell_text(self, form: _ItemForm, what: str, **values: Any) -> None:
        place: Json = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        if form.part:
            place["content_index"] = 0
        if form.part == "output_text":
            place["logprobs"] = []
        self._tell(f"response.{form.text}.{what}", **place, **values)

    def _tell_response(
        self, event: str, *, status: str = "", error: Json | None = None, usage: Json | None = None
    ) -> None:
        status = status or event
        self._response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": self._output,
            **(self.call.echo or {}),
            "usage": usage,
        }
        self._tell(f"response.{event}", response=self._response)

    def _tell(self, kind: str, **values: Any) -> None:
        data = json.dumps({"type": kind, "sequence_number": self._sequence, **values})
        self._events.append(f"event: {kind}\ndata: {data}\n\n")
        self._sequence += 1

    def _take(self) -> str:
        text = "".join(self._events)
        self._events.clear()
        return text

    def _usage(self) -> Json:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class _ItemForm:
    item: str
    """Its type."""
    prefix: str
    """Of its id."""
    text: str
    """In the names of the events that bring its text."""
    part: str
    """Type of the part that has its text; empty: it has no parts."""


_CALL: Final = _ItemForm("function_call", "fc", "function_call_arguments", "")
_FORMS: Final = {
    PieceKind.CONTENT: _ItemForm("message", "msg", "output_text", "output_text"),
    PieceKind.REASONING: _ItemForm("reasoning", "rs", "reasoning_text", "reasoning_text"),
    PieceKind.CALL: _CALL,
    PieceKind.ARGUMENTS: _CALL,
}
