"""What a client says its answer has to be. Another's library reads it: it takes it, or refuses it in a line."""

from __future__ import annotations

import random
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from engine.grammar import ERROR_CHARS_MAX, GrammarCompiler, GrammarError
from engine.types import Grammar, GrammarKind
from tests.fuzz.target import Target, jsons, written
from tests.support.schemas import write_byte_tokenizer

KINDS: Final = tuple(GrammarKind)
TOKENS_MAX: Final = 12


@cache
def _compiler() -> tuple[GrammarCompiler, int]:
    """With its end token."""
    with tempfile.TemporaryDirectory() as folder:
        eos = write_byte_tokenizer(Path(folder) / "tokenizer.json")
        compiler = GrammarCompiler(Path(folder) / "tokenizer.json", vocab_size=eos + 1, eos_token_ids=frozenset({eos}))
    return compiler, eos


def check_grammar(data: bytes) -> None:
    """A kind and a text. What is taken lets an answer go on by any token that it allows, or says why not."""
    compiler, eos = _compiler()
    kind, rng = KINDS[data[0] % len(KINDS)] if data else KINDS[0], random.Random(zlib.crc32(data))
    try:
        matcher = compiler.compile(Grammar(kind=kind, text=data[1:].decode("utf-8", "replace")))
    except GrammarError as error:
        assert len(str(error)) <= ERROR_CHARS_MAX and "\n" not in str(error), str(error)
        return
    matcher, answer = matcher.copy(), list[int]()
    for _ in range(TOKENS_MAX):
        mask = np.frombuffer(matcher.matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.problem:
            return  # beyond a limit
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert len(allowed) and (eos in allowed) == matcher.accepts, (answer, allowed[:5])
        token = int(rng.choice(allowed))
        if token == eos:
            return
        answer.append(token)
        matcher.follow(answer, 0, len(answer))
        assert "satisfy" not in matcher.problem, (answer, matcher.problem)


_names: Final = st.sampled_from(
    ["type", "properties", "required", "items", "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "allOf",
     "not", "$ref", "$defs", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf",
     "prefixItems", "additionalProperties", "patternProperties", "x-guidance", "a", "é"]
)  # fmt: skip
_leaves: Final = st.sampled_from(
    ["object", "array", "string", "integer", "number", "null", "date", "uuid", "#", "#/$defs/a", "^a+$", "(", "é\0"]
) | st.sampled_from([0, 1, 3, -1, 10**6, 10**20, 0.1, True, False, None])  # fmt: skip
_schemas: Final = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=5),
    max_leaves=12,
).map(written)
_regexes: Final = st.lists(
    st.sampled_from(
        [*"ab.^$|()[]*+?-", "é", r"\d", r"\p{L}", r"\x", "{2,}", "{9}", "{1,999}", "(?i)", "(?=", "(?:", "[^", r"\b"]
    ),
    max_size=14,
).map("".join)  # fmt: skip
_rules: Final = st.lists(
    st.sampled_from(
        ["start: ", "root ::= ", "a", "A", "a: ", "A: ", "a ::= ", "\n", " | ", '"x"', '"é"', "/a+/", "[a-c]", "(", ")",
         "*", "+", "?", "{2,5}", "~", "&", "%import common.INT\n", "%ignore / /\n", '%json {"type": "null"}', "[lazy]",
         "#", " ", "%llguidance {}\n", "<[5]>", '[max_tokens=3]: "a"', "\\", '"']
    ),
    max_size=14,
).map("".join)  # fmt: skip


def _of(kind: GrammarKind, text: bytes) -> bytes:
    return bytes([KINDS.index(kind)]) + text


_SCHEMA: Final[Any] = {
    "type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}}, "required": ["a"],
    "$defs": {"b": {"enum": ["x", 1, None]}}, "additionalProperties": False,
}  # fmt: skip
GRAMMARS: Final = Target(
    name="grammar",
    check=check_grammar,
    inputs=st.one_of(
        (_schemas | jsons(_leaves).map(written)).map(lambda text: _of(GrammarKind.JSON_SCHEMA, text)),
        _regexes.map(lambda text: _of(GrammarKind.REGEX, text.encode())),
        _rules.map(lambda text: _of(GrammarKind.RULES, text.encode())),
    ),
    samples=[
        _of(GrammarKind.JSON_SCHEMA, written(_SCHEMA)),
        _of(GrammarKind.REGEX, rb"[0-9]{3}-(a|\p{L}+)?"),
        _of(GrammarKind.RULES, b'start: a "," B\na: "x" | "y" a\nB: /[0-9]+/\n%ignore / /\n'),
        _of(GrammarKind.RULES, b'# c\nroot ::= item ("," item)*\nitem ::= [a-c] "\\x41" | "\\u00e9"{2,3}\n'),
        _of(GrammarKind.RULES, b"  "),
        _of(GrammarKind.RULES, b'start: a "x"\na[lazy]: /.*/'),
    ],
)
