"""Prompts of both APIs and of pins to token ids: texts through the tokenizer, chats through the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batonpb import inference_pb2, resume_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.log import get_log
from router.answer_forms import AnswerForm, ToolForm
from router.openai_tools import arguments_object, check_calls
from router.request import check_counts, check_role
from router.special_tokens import ChatText, SpecialTokens, without_letters
from router.text import TextCodec

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate
    from router.config import PinnedPrefix

log = get_log("router")

_MAY_BE_EMPTY: Final = "assistant"
"""An answer may have ended before its first character."""
_ASK: Final[Mapping[str, Any]] = {"add_generation_prompt": True}
_USERS: Final = ("0", "Z")
"""Two chats that differ from the first character of the user's message on."""
_SIGN: Final = re.compile(r"[^\w\s]")
_CHAT_OF: Final = "The messages make a prompt of"
_USUAL: Final = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))
"""Roles of chats that show what a template writes between messages."""
_TAIL_TOKENS: Final = 16
"""Of a prompt, in which it opens the reasoning."""
_NAME: Final = "baton_probe"
_PROBE_TOOL: Final = {"type": "function", "function": {"name": _NAME, "description": "0", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "0"}}, "required": ["a"]}}}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallShape:
    """What a template wants of the calls in an assistant's message."""

    objects: bool
    """Arguments as an object; else as JSON text."""
    content: str | None
    """Of a message that has calls only."""

    def of(self, message: Mapping[str, Any], i: int) -> Mapping[str, Any]:
        """The message `i` in this shape. Raises BatonError."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.objects:
            calls = [
                {
                    **call,
                    "function": {**call["function"], "arguments": arguments_object(call["function"]["arguments"], i)},
                }
                for call in calls
            ]
        return {**message, "tool_calls": calls, "content": message["content"] or self.content}


_SHAPES: Final = tuple(
    _CallShape(objects=objects, content=content) for content in ("", None) for objects in (True, False)
)


class PromptEncoder:
    """A tokenizer and a chat template, either of which may be missing. Immutable; safe on any thread.

    Long prompts take seconds to encode: not for the event loop.
    """

    def __init__(
        self,
        *,
        codec: TextCodec | None = None,
        template: ChatTemplate | None = None,
        chars_max: int,
        tool_form: ToolForm | None = None,
    ) -> None:
        """`chars_max` bounds the characters of a text, of the messages of a chat, and of the prompt that they make.
        `tool_form` is how the model writes calls of tools; None: as its template says."""
        self.codec = codec
        self.folder: Path | None = None
        """Where they are from."""
        self._template: ChatTemplate | None = None
        self.chars_max = chars_max
        self.tool_form = tool_form
        """As the configuration names it."""
        self.form = AnswerForm()
        self._shown_with_tools: frozenset[int] = frozenset()
        self._shown: frozenset[int] = frozenset()
        if codec is not None and template is not None:
            self._special = _special_tokens(codec, template)
            self._template = template.marked(self._special.of_template)
            self._takes_tools, self._call_shape = _takes_tools(template), _call_shape(template)
            tokens = {*codec.special.values(), *codec.added.values()}
            self.form = AnswerForm.of(template.source, tokens, tools=tool_form)
            special = codec.special.items()
            self._shown_with_tools = frozenset(id_ for id_, text in special if text in self.form.markers())
            self._shown = frozenset(id_ for id_, text in special if text in self.form.markers(tools=False))

    @classmethod
    def load(cls, folder: Path | None, *, chars_max: int, tool_form: ToolForm | None = None) -> PromptEncoder:
        """Those of a model folder; None: neither. A template that cannot be used only gets a warning.

        Raises BatonError MODEL_MISSING, MODEL_BROKEN or MODEL_UNSUPPORTED of the tokenizer.
        """
        if folder is None:
            return cls(chars_max=chars_max, tool_form=tool_form)
        from router.chat_template import ChatTemplate

        codec, template = TextCodec.load(folder), None
        try:
            template = ChatTemplate.load(folder)
        except BatonError as error:
            log.warning("chats are refused: the model's template cannot be used", why=error.message)
        encoder = cls(codec=codec, template=template, chars_max=chars_max, tool_form=tool_form)
        encoder.folder = folder
        return encoder

    def encode(self, request: inference_pb2.GenerateRequest, special_tokens: bool = False) -> Sequence[int]:
        """A request's text, or its messages, checked; nothing for a text without a tokenizer. Raises BatonError."""
        check_counts(request)
        if request.WhichOneof("prompt") == "chat":
            messages = self._checked(request.chat)
            return self.encode_chat(messages, _ASK, field="chat.messages", special_tokens=special_tokens)
        return () if self.codec is None else self.encode_text(request.text)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Raises BatonError NO_TOKENIZER or PROMPT_TOO_LONG."""
        if self.codec is None:
            why = "This router was started without a tokenizer: send token ids, or start it with --model."
            raise BatonError(Reason.NO_TOKENIZER, why, field="text")
        self._check_chars(len(text), "The prompt has", "text")
        return self.codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt's tokens; "" without a tokenizer, or for ids that no token has."""
        try:
            return "" if self.codec is None else self.codec.decode(ids)
        except OverflowError:
            return ""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        field: str = "messages",
        special_tokens: bool = False,
    ) -> Sequence[int]:
        """`extra` are further variables of the template; `field` is where errors point to. A special token that a
        message spells out is text, but with `special_tokens`.

        Raises BatonError NO_CHAT_TEMPLATE, PROMPT_TOO_LONG, or BAD_FIELD where the template refuses the messages, or
        knows no tools.
        """
        if self.codec is None or self._template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The router has no chat template: send a plain prompt, or start the router with --model and a model "
                "that has a chat_template.jinja.",
                field=field,
            )
        if tools:
            self._check_tools()
        if any(message.get("tool_calls") for message in messages):
            messages = self._shaped(messages)
        chat = self._render(self._template, messages, extra, tools, field=field, special_tokens=special_tokens)
        ids = self.codec.encode_chat(*chat.pieces)
        if not special_tokens:
            self._special.check(ids, chat, field=field)
        return ids

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        field: str,
        special_tokens: bool = False,
    ) -> ChatText:
        special, most = self._special, self.chars_max
        if not template.knows_developer:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

        def render(change: Callable[[Any], Any]) -> ChatText:
            own = change(messages), change(extra), change(tools)
            return special.read(template.render(own[0], own[1], tools=own[2], field=field, chars_max=most))

        if special_tokens:
            chat = render(lambda value: value)
        else:
            chat = render(special.as_text)
            if chat.loose:
                # Some templates put a token together of the role; a request's own letters must not make one.
                special.refuse(chat.loose - render(without_letters).loose, field=field)
        self._check_chars(chat.chars, _CHAT_OF, field)
        return chat

    def _check_tools(self) -> None:
        """Raises BatonError BAD_FIELD."""
        if not self._takes_tools or self.form.tools is None:
            what = "in which the model writes calls is not known" if self._takes_tools else "knows no tools"
            how = "start the router with --tool-parser" if self._takes_tools else "leave tools out"
            subject = "The form" if self._takes_tools else "The model's chat template"
            raise bad_field("tools", f"{subject} {what}: {how}.")

    def _shaped(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Their calls as the template wants them. Raises BatonError BAD_FIELD."""
        shape = self._call_shape
        if shape is None:
            text = "The model's chat template knows no calls of tools: leave tool_calls out of the messages."
            raise bad_field("messages", text)
        check_calls(messages)
        return [shape.of(message, i) for i, message in enumerate(messages)]

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt of a chat ends in the middle of reasoning, which its answer goes on with."""
        if self.codec is None or self.form.think is None:
            return False
        text = "".join(map(self.codec.token_text, ids[-_TAIL_TOKENS:]))
        return text.rstrip().endswith(self.form.think[0])

    def shown(self, reading: resume_pb2.AnswerReading | None) -> frozenset[int]:
        """Special tokens that the parser of an answer must see. None: it is not read."""
        if reading is None:
            return frozenset()
        return self._shown_with_tools if reading.tools else self._shown

    def may_not_say(self, ids: Sequence[int]) -> bool:
        """Whether one of these tokens is special, so that a chat's messages cannot spell it."""
        return self.codec is not None and self._template is not None and self._special.among(ids)

    def encode_pin(self, prefix: PinnedPrefix) -> Sequence[int]:
        """Raises BatonError NO_TOKENIZER, NO_CHAT_TEMPLATE or PROMPT_TOO_LONG."""
        if prefix.token_ids is not None:
            return prefix.token_ids
        text = prefix.text if prefix.text is not None else prefix.system
        assert text is not None
        pin = f"The pin '{prefix.name}'"
        if self.codec is None:
            raise BatonError(
                Reason.NO_TOKENIZER,
                f"{pin} is text and this router was started without a tokenizer: give token_ids, or start it with "
                "--model.",
                field="text",
            )
        self._check_chars(len(text), f"{pin} has", "text")
        return self.codec.encode(text) if prefix.text is not None else self._encode_system(text)

    def _encode_system(self, system: str) -> Sequence[int]:
        """What all chats with this system message begin with, whatever the template puts around it."""
        if self._template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The model has no chat template: pin the start of the prompt as text or token ids.",
                field="system",
            )
        begins = {"role": "system", "content": system}
        chats = [[begins, {"role": "user", "content": user}] for user in _USERS]
        first, second = (self.encode_chat(chat, _ASK, field="system") for chat in chats)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return [token for token, _ in same]

    def _checked(self, chat: inference_pb2.Chat) -> list[dict[str, str]]:
        """Each message with its role and content. Raises BatonError naming the first wrong one."""
        if not chat.messages:
            text = "The conversation is empty: it must have at least one message."
            raise bad_field("chat.messages", text, reason=Reason.EMPTY_PROMPT)
        self._check_chars(sum(len(message.content) for message in chat.messages), _CHAT_OF, "chat.messages")
        for i, message in enumerate(chat.messages):
            place = f"chat.messages.{i}"
            check_role(message.role, i, field=f"{place}.role")
            if not message.content and message.role != _MAY_BE_EMPTY:
                raise bad_field(f"{place}.content", f"messages[{i}] is empty; only an {_MAY_BE_EMPTY}'s may be.")
        return [{"role": message.role, "content": message.content} for message in chat.messages]

    def _check_chars(self, chars: int, what: str, field: str) -> None:
        if chars > self.chars_max:
            text = f"{what} more than {self.chars_max} characters, the limit."
            raise bad_field(field, text, reason=Reason.PROMPT_TOO_LONG)


def _special_tokens(codec: TextCodec, template: ChatTemplate) -> SpecialTokens:
    """What only the template may write: tokens that are called special, and what it writes between messages."""
    turns = _turn_tokens(codec.added.values(), template)
    own = {id_: text for id_, text in codec.added.items() if text in turns}
    return SpecialTokens({**codec.special, **own}, unknown=codec.unknown)


def _turn_tokens(texts: Iterable[str], template: ChatTemplate) -> set[str]:
    """Of these tokens, those that begin and end messages, as DeepSeek's `<|User|>`, which is not called special.

    What the template cuts off an answer (`</think>`) is a part of answers, and so is what it writes into none of the
    usual chats (`<tool_call>`): messages may spell it.
    """
    written = "".join(_try(template, [{"role": role, "content": "0"} for role in roles]) for roles in _USUAL)
    found = {text for text in texts if text in written and _SIGN.search(text)} | (set(texts) & template.token_texts)

    def kept(text: str) -> bool:
        answer = {"role": "assistant", "content": f"0{text}1"}
        user = {"role": "user", "content": "0"}
        return answer["content"] in _try(template, [user, answer, user])

    return {text for text in found if kept(text)}


def _takes_tools(template: ChatTemplate) -> bool:
    return _NAME in _try(template, [{"role": "user", "content": "0"}], [_PROBE_TOOL])


def _call_shape(template: ChatTemplate) -> _CallShape | None:
    """The first that the template writes calls of. None: it knows none."""
    call = {"id": "a00000000", "type": "function", "function": {"name": _NAME, "arguments": '{"a": "0"}'}}
    user = {"role": "user", "content": "0"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "0", "name": "0", "tool_call_id": call["id"]}
    return next((shape for shape in _SHAPES if _NAME in _try(template, [user, shape.of(answer, 1), result])), None)


def _try(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Nothing where the template does not take such messages."""
    try:
        return template.render(messages, {}, tools=tools)
    except BatonError:
        return ""
