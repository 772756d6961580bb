"""Conversations: messages checked, and turned into token ids through the model's chat template.

Both APIs of the router come here. The template itself (`router.chat_template`) is imported only where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from batonpb import inference_pb2

from baton.errors import BatonError, Reason, bad_field
from router.text import TextCodec

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate

MESSAGES_MAX: Final = 4_096
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_EMPTY: Final = "assistant"
"""An answer may have ended before its first character."""
_ASK: Final[Mapping[str, Any]] = {"add_generation_prompt": True}


class ChatEncoder:
    """A tokenizer and a chat template, either of which may be missing. Immutable; safe on any thread."""

    def __init__(self, *, codec: TextCodec | None, template: ChatTemplate | None, chars_max: int) -> None:
        """`chars_max` bounds the characters of the messages together, and of the prompt that they make."""
        self._codec = codec
        self._template = template
        self._chars_max = chars_max

    def encode(
        self, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any], *, field: str = "messages"
    ) -> Sequence[int]:
        """Token ids of the prompt. `told` are further variables of the template; `field` is where errors point to.

        Takes long for long chats: not for the event loop. Raises BatonError NO_CHAT_TEMPLATE, PROMPT_TOO_LONG, or
        BAD_FIELD where the template refuses the messages.
        """
        if self._codec is None or self._template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The router has no chat template: send a plain prompt, or start the router with --model and a model "
                "that has a chat_template.jinja.",
                field=field,
            )
        text = self._template.render(messages, told, field=field)
        if len(text) > self._chars_max:
            raise _too_long(len(text), self._chars_max, field)
        return self._codec.encode_rendered(text)

    def encode_proto(self, chat: inference_pb2.Chat) -> Sequence[int]:
        """The messages of a gRPC request, checked. Takes long, as `encode` does. Raises BatonError."""
        return self.encode(_checked(chat, self._chars_max), _ASK, field="chat.messages")


def _checked(chat: inference_pb2.Chat, chars_max: int) -> list[dict[str, str]]:
    """Each message with its role and content. Raises BatonError naming the first wrong one."""
    count = len(chat.messages)
    if count == 0:
        text = "The conversation is empty: it must have at least one message."
        raise bad_field("chat.messages", text, reason=Reason.EMPTY_PROMPT)
    if count > MESSAGES_MAX:
        text = f"The conversation has {count} messages; at most {MESSAGES_MAX} are taken."
        raise bad_field("chat.messages", text, reason=Reason.PROMPT_TOO_LONG)
    chars = sum(len(message.content) for message in chat.messages)
    if chars > chars_max:
        raise _too_long(chars, chars_max, "chat.messages")
    for i, message in enumerate(chat.messages):
        place = f"chat.messages.{i}"
        if message.role not in ROLES:
            raise bad_field(f"{place}.role", f"messages[{i}] has the role {message.role[:40]!r}; roles are {_AS_TEXT}.")
        if not message.content and message.role != _MAY_BE_EMPTY:
            raise bad_field(f"{place}.content", f"messages[{i}] is empty; only an {_MAY_BE_EMPTY}'s may be.")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


_AS_TEXT: Final = ", ".join(ROLES)


def _too_long(chars: int, chars_max: int, field: str) -> BatonError:
    text = f"The messages make a prompt of {chars} characters; at most {chars_max} are taken."
    return bad_field(field, text, reason=Reason.PROMPT_TOO_LONG)
