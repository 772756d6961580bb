"""From a pinned prefix as it was given to the token ids that prompts will begin with. Blocking: call it on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.errors import BatonError, Reason, bad_field
from router.pin_config import PinnedPrefix
from router.text import TextCodec

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate

_USERS = ("0", "Z")
"""Two chats that differ from the first character of the user's message on."""


class PrefixEncoder:
    """A tokenizer and a chat template, either of which may be missing. Immutable."""

    def __init__(self, codec: TextCodec | None, template: ChatTemplate | None, *, chars_max: int) -> None:
        self._codec = codec
        self._template = template
        self._chars_max = chars_max

    def encode(self, prefix: PinnedPrefix) -> Sequence[int]:
        """Raises BatonError NO_TOKENIZER, NO_CHAT_TEMPLATE or PROMPT_TOO_LONG."""
        if prefix.token_ids is not None:
            return prefix.token_ids
        text = prefix.text if prefix.text is not None else prefix.system
        assert text is not None
        if self._codec is None:
            raise BatonError(
                Reason.NO_TOKENIZER,
                f"The pin '{prefix.name}' is text and this router was started without a tokenizer: give token_ids, or "
                "start it with --model.",
                field="text",
            )
        if len(text) > self._chars_max:
            raise bad_field(
                "text",
                f"The pin '{prefix.name}' has {len(text)} characters; at most {self._chars_max} are taken.",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return self._codec.encode(text) if prefix.text is not None else self._system(self._codec, text)

    def _system(self, codec: TextCodec, system: str) -> Sequence[int]:
        """What all chats with this system message begin with, whatever the template puts around it."""
        template = self._template
        if template is None:
            raise BatonError(
                Reason.NO_CHAT_TEMPLATE,
                "The model has no chat template: pin the start of the prompt as text or token ids.",
                field="system",
            )
        chats = [
            template.render(
                [{"role": "system", "content": system}, {"role": "user", "content": user}],
                {"add_generation_prompt": True},
            )
            for user in _USERS
        ]
        first, second = (codec.encode_rendered(chat) for chat in chats)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return [token for token, _ in same]
