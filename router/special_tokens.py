"""Special tokens in chats: those that the template writes are tokens, those that a request's strings spell are text.

While a template runs, a mark, one character, stands for each special token: a mark of one kind in the template's own
text, of the other kind in the request's strings. So whatever the template cuts, joins and replaces, its own tokens are
known from those that come of a request's letters. At the end the ids are counted: nothing that normalises text or finds
a special token among its pieces makes one more of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import BatonError, Reason, bad_field
from router.request import ROLES

JSON_DEPTH_MAX: Final = 64
SPELT_MAX: Final = 4_096
"""Special tokens that the strings of one chat may spell: behind each the text is encoded anew."""
_TEMPLATES_FROM: Final = 0xC0000
_REQUESTS_FROM: Final = 0xD0000
"""Marks. Unicode's planes 12 and 13 have no characters, and nobody's text any."""
_MARKS: Final = "[\U000c0000-\U000dffff]"
_NO_CHARACTER: Final = "\ufffd"
_WINDOW_CHARS: Final = 65_536
"""Searched at a time: a search keeps the interpreter's lock."""
_STAYS: Final = frozenset({"role", "type"})
_TYPES: Final = frozenset(
    {*ROLES, "text", "function", "object", "array", "string", "number", "integer", "boolean", "null"}
)
_KEYS: Final = frozenset(
    {"role", "type", "content", "text", "name", "id", "tool_calls", "tool_call_id", "function", "arguments"}
    | {"description", "parameters", "properties", "required", "items", "enum", "reasoning_content"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatText:
    """What a template has made of a chat."""

    pieces: Sequence[str]
    """To be encoded one by one: each special token that the request spells is cut in two."""
    own: Counter[str]
    """Special tokens that the template has written, or put together."""
    loose: Counter[str]
    """Of these, those that were put together while it ran, of its letters or of the request's."""

    @property
    def chars(self) -> int:
        return sum(map(len, self.pieces))


class SpecialTokens:
    """Those of one model. Immutable."""

    def __init__(self, tokens: Mapping[int, str], *, unknown: int | None = None) -> None:
        """Texts by ids; `unknown` is the token that stands for what the tokenizer has no other for. Raises BatonError
        MODEL_UNSUPPORTED: they are more than there are marks."""
        # A single character is a letter, whatever it is called; a role's name is what templates compare with.
        self._tokens = {id_: text for id_, text in tokens.items() if len(text) > 1 and text not in ROLES}
        texts = sorted(set(self._tokens.values()))
        if len(texts) > _REQUESTS_FROM - _TEMPLATES_FROM:
            text = f"The model's tokenizer has {len(texts)} special tokens, more than chats can have."
            raise BatonError(Reason.MODEL_UNSUPPORTED, text, field="model")
        self._unknown = unknown
        self._templates = {text: chr(_TEMPLATES_FROM + i) for i, text in enumerate(texts)}
        self._requests = {text: chr(_REQUESTS_FROM + i) for i, text in enumerate(texts)}
        self._text_of = {mark: text for marks in (self._templates, self._requests) for text, mark in marks.items()}
        self._longest = max(map(len, texts), default=1)
        self._find = re.compile(f"{_MARKS}|{_any_of(texts)}" if texts else _MARKS)

    def of_template(self, text: str) -> str:
        """A text of the template, with its marks."""
        return self._marked(text, self._templates)

    def as_text(self, value: Any, *, depth: int = 0) -> Any:
        """The JSON of a request, with its marks. Keys count too: templates write arguments of tools as JSON.

        Raises BatonError BAD_FIELD: it is nested deeper than JSON_DEPTH_MAX.
        """
        check_depth(depth)
        if isinstance(value, str):
            return self._marked(value, self._requests)
        if isinstance(value, Mapping):
            return {self.as_text(key): self.as_text(each, depth=depth + 1) for key, each in value.items()}
        return [self.as_text(each, depth=depth + 1) for each in value] if isinstance(value, list | tuple) else value

    def read(self, text: str) -> ChatText:
        """Raises BatonError BAD_FIELD: the request spells too many special tokens."""
        pieces: list[str] = []
        parts: list[str] = []
        own: Counter[str] = Counter()
        loose: Counter[str] = Counter()
        at = 0
        for begin, end, found in self._matches(text):
            parts.append(text[at:begin])
            at = end
            token = self._text_of.get(found)
            if token is not None and found >= chr(_REQUESTS_FROM):
                pieces.append("".join([*parts, token[:1]]))
                parts = [token[1:]]
                if len(pieces) > SPELT_MAX:
                    raise bad_field("messages", f"The messages spell more than {SPELT_MAX} special tokens, the limit.")
                continue
            if token is None:
                token = found if found in self._templates else _NO_CHARACTER
                loose[token] += 1
            own[token] += 1
            parts.append(token)
        pieces.append("".join([*parts, text[at:]]))
        return ChatText(pieces=pieces, own=own, loose=loose)

    def check(self, ids: Sequence[int], chat: ChatText, *, field: str) -> None:
        """Whether `ids`, of `chat`, has no special token but the template's. Raises BatonError of `field`."""
        made = Counter(self._tokens[id_] for id_ in ids if id_ in self._tokens and id_ != self._unknown)
        self.refuse(made - chat.own, field=field)

    def among(self, ids: Sequence[int]) -> bool:
        return any(id_ in self._tokens for id_ in ids)

    def refuse(self, tokens: Counter[str], *, field: str) -> None:
        """Raises BatonError where there are any."""
        if tokens:
            texts = ", ".join(sorted(tokens)[:3])
            text = f"Letters of the messages would be read as special tokens ({texts}): write them in another way."
            raise bad_field(field, text)

    def _marked(self, text: str, marks: Mapping[str, str]) -> str:
        parts: list[str] = []
        at = 0
        for begin, end, found in self._matches(text):
            parts += (text[at:begin], marks.get(found, _NO_CHARACTER))
            at = end
        return "".join([*parts, text[at:]]) if parts else text

    def _matches(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Marks and special tokens in it: begin, end and text of each."""
        at = 0
        for window in range(0, len(text), _WINDOW_CHARS):
            end = window + _WINDOW_CHARS
            for found in self._find.finditer(text, max(at, window), end + self._longest):
                if found.start() >= end:
                    break
                at = found.end()
                yield found.start(), at, found[0]


def check_depth(depth: int) -> None:
    if depth > JSON_DEPTH_MAX:
        text = f"The messages, or variables of their template, are nested deeper than {JSON_DEPTH_MAX}, the limit."
        raise bad_field("messages", text)


def without_letters(value: Any, *, key: str = "", depth: int = 0) -> Any:
    """JSON of a request, its texts and unusual keys replaced: what a template still puts together of it is of the
    template's letters and of roles."""
    check_depth(depth)
    if isinstance(value, str):
        return value if key in _STAYS and value in _TYPES else value and "0"
    if isinstance(value, Mapping):
        return {
            (name if name in _KEYS else "0"): without_letters(each, key=name, depth=depth + 1)
            for name, each in value.items()
        }
    return [without_letters(each, depth=depth + 1) for each in value] if isinstance(value, list | tuple) else value


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of the longest of them that is there. Shared beginnings are looked at once: a pattern of plain
    alternatives takes a thousand times as long where a text has many beginnings of them."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(tree: Mapping[str, Any]) -> str:
    ways = [re.escape(char) + _pattern(rest) for char, rest in tree.items() if char]
    if len(ways) == 1 and "" not in tree:
        return ways[0]
    return f"(?:{'|'.join(ways)}){'?' if '' in tree else ''}" if ways else ""
