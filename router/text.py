"""Text to tokens and back, in the router: `tokenizers` only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.errors import BatonError, Reason

_REPLACEMENT = "\ufffd"


class TextCodec:
    """The tokenizer of a model folder. Immutable; `encode` is safe on any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read `tokenizer.json`. Raises BatonError MODEL_MISSING or MODEL_BROKEN."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BatonError(
                Reason.MODEL_MISSING,
                f"{path} does not exist: name a model folder with a tokenizer.json, or none to serve token ids only.",
                field="model",
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:
            raise BatonError(
                Reason.MODEL_BROKEN, f"{path} is not a usable tokenizer: {error}.", field="model"
            ) from error

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)


class TextStream:
    """Turns the tokens of one answer into text as they come, never half a character.

    Decodes from the last point where the text was whole, so that each token is decoded a bounded number of times and
    tokens that only read right after their predecessor (a leading space) do.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """Text that became whole with these tokens; what ends in half a character is held back."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
