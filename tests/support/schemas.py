"""JSON schemas whose texts are all short, drawn from a seed, and what is checked of an answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import jsonschema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Json = Any
TOKENS_MAX: Final = 1_500
"""Enough for every text of a drawn schema, white space included."""


def draw_schema(chance: random.Random, depth: int = 3) -> dict[str, Json]:
    """An object or a list at the top."""
    return (_object if chance.random() < 0.7 else _array)(chance, depth)


def _any(chance: random.Random, depth: int) -> dict[str, Json]:
    kinds = [_integer, _string, _literal, *([_object, _array, _either] if depth else [])]
    return chance.choice(kinds)(chance, depth)


def _integer(chance: random.Random, _depth: int) -> dict[str, Json]:
    low = chance.randrange(-2_000, 2_000)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(1, 5_000)}


def _string(chance: random.Random, _depth: int) -> dict[str, Json]:
    shortest = chance.randrange(3)
    return chance.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + chance.randrange(1, 8)},
            {"type": "string", "pattern": f"^[a-z]{{1,{chance.randrange(2, 6)}}}(-[0-9]{{2}})?$"},
            {"type": "string", "format": "date"},
        ]
    )


def _literal(chance: random.Random, _depth: int) -> dict[str, Json]:
    values: list[Json] = ["red", 'a "quoted" word', "é, ß and 漢", 17, -3, True, False, None, {"x": [1, 2]}]
    return chance.choice(
        [{"enum": chance.sample(values, 3)}, {"const": chance.choice(values)}, {"type": "boolean"}, {"type": "null"}]
    )


def _object(chance: random.Random, depth: int) -> dict[str, Json]:
    names = chance.sample(["name", "age", "tags", "x y", "über", "$ref", "a"], chance.randrange(4))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Json]:
    fewest = chance.randrange(3)
    items = _any(chance, depth - 1)
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + chance.randrange(3)}


def _either(chance: random.Random, depth: int) -> dict[str, Json]:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(2)]}


def check_answer(schema: dict[str, Json], text: str) -> None:
    """Raises ValueError, jsonschema.ValidationError."""
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def write_byte_tokenizer(path: Path, *, eos: str = "<end>") -> int:
    """A token for each byte, for a few pieces of JSON, and `eos`, which is the last one -> its id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ['{"', '":', '",', "[]", "},", "12", "tr", "ue"]
    merges = [(piece[0], piece[1]) for piece in pieces]
    vocab = {token: i for i, token in enumerate([*letters, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos])
    tokenizer.save(str(path))
    eos_id = tokenizer.token_to_id(eos)
    assert eos_id is not None
    return eos_id
