"""Tokens that say when they were drawn, and the tokenizer that shows them: " 01234" is a time in TICK_S, modulo
VOCABULARY. All processes of one machine have the same clock."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TICK_S: Final = 0.0002
VOCABULARY: Final = 20_000
DIGITS: Final = 5
_FIRST: Final = 3
"""Tokens below are special ones in many models, and the mock engine's end."""


def stamp(now_s: float) -> int:
    """The token of a time of `time.monotonic`."""
    return _FIRST + int(now_s / TICK_S) % (VOCABULARY - _FIRST)


def age_ms(token: int, now_s: float) -> float:
    """Of a token that is younger than VOCABULARY ticks (four seconds)."""
    return 1e3 * TICK_S * ((now_s / TICK_S - (token - _FIRST)) % (VOCABULARY - _FIRST))


def first_step_s(now_s: float, step_s: float, share: float) -> float:
    """When a server steps first whose steps are `share` of a step behind those of the one with 0, so that the steps
    of several do not fall together."""
    due_s = now_s - now_s % step_s + share * step_s
    return due_s if due_s >= now_s else due_s + step_s


def text_of(token: int) -> str:
    return f" {token:0{DIGITS}}"


def write_tokenizer(folder: Path) -> None:
    """Of the kind that most models have: bytes."""
    vocabulary = {f"Ġ{token:0{DIGITS}}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
