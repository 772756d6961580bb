"""Prompts of both APIs and of pins to token ids: texts through the tokenizer, chats through the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batonpb import inference_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.log import get_log
from router.config import PinnedPrefix
from router.request import MESSAGES_MAX, check_role
from router.text import TextCodec

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate

log = get_log("router")

_MAY_BE_EMPTY: Final = "assistant"
"""An answer may have ended before its first character."""
_ASK: Final[Mapping[str, Any]] = {"add_generation_prompt": True}
_USERS: Final = ("0", "Z")
"""Two chats that differ from the first character of the user's message on."""
_CHAT_OF: Final = "The messages make a prompt of"


class PromptEncoder:
    """A tokenizer and a chat template, either of which may be missing. Immutable; safe on any thread.

    Long prompts take seconds to encode: not for the event loop.
    """

    def __init__(self, *, codec: TextCodec | None = None, template: ChatTemplate | None = None, chars_max: int) -> None:
        """`chars_max` bounds the characters of a text, of the messages of a chat, and of the prompt that they make."""
        self.codec = codec
        self._template = template
        self._chars_max = chars_max

    @classmethod
    def load(cls, folder: Path | None, *, chars_max: int) -> PromptEncoder:
        """Those of a model folder; None: neither. A template that cannot be used only gets a warning.

        Raises BatonError MODEL_MISSING or MODEL_BROKEN of the tokenizer.
        """
        if folder is None:
            return cls(chars_max=chars_max)
        from router.chat_template import ChatTemplate

        codec, template = TextCodec.load(folder), None
        try:
            template = ChatTemplate.load(folder)
        except BatonError as error:
            log.warning("chats are refused: the model's template cannot be used", why=error.message)
        return cls(codec=codec, template=template, chars_max=chars_max)

    def encode(self, request: inference_pb2.GenerateRequest, special_tokens: bool = False) -> Sequence[int]:
        """A request's text, or its messages, checked; nothing for a text without a tokenizer. Raises BatonError."""
        if request.WhichOneof("prompt") == "chat":
            messages = self._checked(request.chat)
            return self.encode_chat(messages, _ASK, field="chat.messages", special_tokens=special_tokens)
        if self.codec is None:
            return ()
        self._check_chars(len(request.text), "The prompt has", "text")
        return self.codec.encode(request.text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        field: str = "messages",
        special_tokens: bool = False,
    ) -> Sequence[int]:
        """`extra` are further variables of the template; `field` is where errors point to. A special token that a
        message spells out is text, but with `special_tokens`.

        Raises BatonError NO_CHAT_TEMPLATE, PROMPT_TOO_LONG, or BAD_FIELD where the template refuses the messages.
        """
        if self.codec is None or self._template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The router has no chat template: send a plain prompt, or start the router with --model and a model "
                "that has a chat_template.jinja.",
                field=field,
            )
        codec = self.codec
        if not special_tokens:
            messages, extra = codec.as_text(messages), codec.as_text(extra)
        text = self._template.render(messages, extra, field=field)
        self._check_chars(len(text), _CHAT_OF, field)
        return codec.encode_chat(text)

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
        return self.codec.encode(text) if prefix.text is not None else self._encode_system(self.codec, text)

    def _encode_system(self, codec: TextCodec, system: str) -> Sequence[int]:
        """What all chats with this system message begin with, whatever the template puts around it."""
        if self._template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The model has no chat template: pin the start of the prompt as text or token ids.",
                field="system",
            )
        begins = {"role": "system", "content": codec.as_text(system)}
        chats = [self._template.render([begins, {"role": "user", "content": user}], _ASK) for user in _USERS]
        first, second = map(codec.encode_chat, chats)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return [token for token, _ in same]

    def _checked(self, chat: inference_pb2.Chat) -> list[dict[str, str]]:
        """Each message with its role and content. Raises BatonError naming the first wrong one."""
        count = len(chat.messages)
        if count == 0:
            text = "The conversation is empty: it must have at least one message."
            raise bad_field("chat.messages", text, reason=Reason.EMPTY_PROMPT)
        if count > MESSAGES_MAX:
            text = f"The conversation has {count} messages; at most {MESSAGES_MAX} are taken."
            raise bad_field("chat.messages", text, reason=Reason.PROMPT_TOO_LONG)
        self._check_chars(sum(len(message.content) for message in chat.messages), _CHAT_OF, "chat.messages")
        for i, message in enumerate(chat.messages):
            place = f"chat.messages.{i}"
            check_role(message.role, i, field=f"{place}.role")
            if not message.content and message.role != _MAY_BE_EMPTY:
                raise bad_field(f"{place}.content", f"messages[{i}] is empty; only an {_MAY_BE_EMPTY}'s may be.")
        return [{"role": message.role, "content": message.content} for message in chat.messages]

    def _check_chars(self, chars: int, what: str, field: str) -> None:
        if chars > self._chars_max:
            text = f"{what} {chars} characters; at most {self._chars_max} are taken."
            raise bad_field(field, text, reason=Reason.PROMPT_TOO_LONG)
