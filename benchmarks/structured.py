"""What following a grammar costs: llguidance beside xgrammar, and a decode step with grammars beside one of free text.

    python -m benchmarks.structured libraries               # two minutes; xgrammar and apache-tvm-ffi have to be there
    python -m benchmarks.structured steps --threads 2       # an idle machine of 16 GiB

libraries: for each vocabulary, made up of bytes and random byte strings, and each grammar: the time to read the
vocabulary and to compile, the time of a mask (mean and longest over a text of the grammar, one row; mean of 16 rows in
one call, each at another place of its text), and what the process's memory has grown by. Each library in a process of
its own. steps: milliseconds of a decode step, the median, of the fastest of the rounds, free text and grammars in turn;
the model is "473m" of `benchmarks.engine` with a vocabulary of 150,000.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARIES: Final = (2_048, 150_000)
ROWS: Final = 16
LIMIT: Final = 0.05
_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "country": {"enum": ["de", "fr", "it", "es"]}},
            "required": ["street", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
_TEXT: Final = json.dumps(
    {
        "name": "Ada Lovelace, Countess",
        "age": 36,
        "email": "ada@example.org",
        "tags": ["mathematics", "engines", "poetry of numbers"],
        "address": {"street": "12 St James's Square, London", "country": "fr"},
    }
)
_WIDE: Final = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string", "maxLength": 40} for i in range(60)},
    "additionalProperties": False,
}
GRAMMARS: Final[Mapping[str, tuple[str, Any, str]]] = {
    "any object": ("json", {"type": "object"}, _TEXT),
    "person": ("json", _PERSON, _TEXT),
    "60 optional fields": ("json", _WIDE, json.dumps({f"field_{i}": "a value " * 3 for i in range(0, 60, 9)})),
    "regex": ("regex", r"([0-9]{4}-[0-9]{2}-[0-9]{2} [A-Z][a-z]{2,30}(, |\.)){1,20}", "2026-11-23 Monday, " * 6),
}
"""Kind, schema or expression, and a text to follow."""


def vocabulary(size: int) -> list[bytes]:
    """Every byte, then strings that look like words, numbers and pieces of JSON; the last one ends an answer."""
    rng = random.Random(size)
    letters = "etaoinshrdlcumwfgypbvk"
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    for piece in ('{"', '":', '": "', '", "', "},", "]}", '":[', "true", "null", '"}'):
        found[piece.encode()] = None
    while len(found) < size - 1:
        kind = rng.random()
        word = "".join(rng.choices(letters, k=rng.randrange(2, 10)))
        if kind < 0.5:
            word = " " + word
        elif kind < 0.6:
            word = str(rng.randrange(10_000))
        elif kind < 0.7:
            word = rng.choice('",.:;-_/()[]{}') + word
        elif kind < 0.8:
            word = "".join(chr(rng.randrange(0x400, 0x460)) for _ in range(3))
        found[word.encode()] = None
    return [*found, b"<|end|>"]


def tokens_of(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Always the longest token that fits."""
    ids, raw, found, at = {token: i for i, token in enumerate(tokens[:-1])}, text.encode(), [], 0
    while at < len(raw):
        length = next(n for n in range(12, 0, -1) if raw[at : at + n] in ids)
        found.append(ids[raw[at : at + length]])
        at += length
    return found


def write_tokenizer(path: Path, tokens: Sequence[bytes]) -> None:
    """As models have it. Nothing is ever encoded by it."""
    plain = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
    letters = {b: chr(b) for b in plain}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    vocab = {"".join(letters[b] for b in token): i for i, token in enumerate(tokens[:-1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path))


class Library(Protocol):
    def compile(self, kind: str, grammar: Any) -> Any: ...

    def start(self, compiled: Any) -> Any:
        """A matcher at the beginning of an answer."""
        ...

    def accept(self, matcher: Any, token: int) -> bool: ...

    def fill(self, matchers: Sequence[Any]) -> None:
        """One mask for each."""
        ...


class Ours:
    """llguidance, as `engine.grammar` uses it."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        from engine.grammar import GrammarCompiler, _executor

        self._executor = _executor()
        self._masks = np.zeros((ROWS, -(-len(tokens) // 32)), dtype=np.int32)
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder) / "tokenizer.json", tokens)
            self._began_s = time.perf_counter()
            self._compiler = GrammarCompiler(
                Path(folder) / "tokenizer.json", vocab_size=len(tokens), eos_token_ids=frozenset({len(tokens) - 1})
            )
        self.read_s = time.perf_counter() - self._began_s

    def compile(self, kind: str, grammar: Any) -> Any:
        from engine.types import Grammar, GrammarKind

        if kind == "regex":
            return self._compiler.compile(Grammar(kind=GrammarKind.REGEX, text=grammar))
        return self._compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(grammar)))

    def start(self, compiled: Any) -> Any:
        return compiled.copy().matcher

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))

    def fill(self, matchers: Sequence[Any]) -> None:
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(self._masks.ctypes.data, self._masks[0].nbytes)
            return
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, self._masks.ctypes.data, self._masks[0].nbytes, ROWS)


class XGrammar:
    """As its documentation has it, white space as bounded as ours."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        import xgrammar

        self._library = xgrammar
        self._masks = xgrammar.allocate_token_bitmask(ROWS, len(tokens))
        began_s = time.perf_counter()
        info = xgrammar.TokenizerInfo(list(tokens), vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=2)
        self.read_s = time.perf_counter() - began_s

    def compile(self, kind: str, grammar: Any) -> Any:
        if kind == "regex":
            return self._compiler.compile_regex(grammar)
        return self._compiler.compile_json_schema(json.dumps(grammar), any_whitespace=True, max_whitespace_cnt=32)

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def fill(self, matchers: Sequence[Any]) -> None:
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(self._masks, 0)
        else:
            self._batch.batch_fill_next_token_bitmask(list(matchers), self._masks)


LIBRARIES: Final[Mapping[str, Callable[[Sequence[bytes]], Any]]] = {"llguidance": Ours, "xgrammar": XGrammar}


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def elapsed_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure_library(name: str, size: int) -> dict[str, Any]:
    tokens = vocabulary(size)
    warm = LIBRARIES[name](vocabulary(300))
    warm.compile("regex", "a")  # loads the library
    before = memory_bytes()
    library = LIBRARIES[name](tokens)
    rows = {}
    for title, (kind, grammar, text) in GRAMMARS.items():
        began_s = time.perf_counter()
        compiled = library.compile(kind, grammar)
        compile_s = time.perf_counter() - began_s
        path = tokens_of(text, tokens)
        singles: list[float] = []
        for repeat in range(5):
            matcher = library.start(compiled)
            for token in path:
                singles.append(elapsed_s(partial(library.fill, [matcher])))
                assert library.accept(matcher, token), (title, token, repeat)
        many = [library.start(compiled) for _ in range(ROWS)]
        for row, matcher in enumerate(many):
            for token in path[:row]:
                assert library.accept(matcher, token)
        batches = []
        for step in range(len(path) - ROWS):
            batches.append(elapsed_s(partial(library.fill, many)))
            for row, matcher in enumerate(many):
                assert library.accept(matcher, path[row + step])
        first = singles[: len(path)]
        rows[title] = [compile_s * 1e3, mean(singles) * 1e6, max(first) * 1e6, mean(batches) * 1e6]
    return {"read_ms": library.read_s * 1e3, "memory_mb": (memory_bytes() - before) / 1e6, "rows": rows}


def compare_libraries() -> None:
    for size in VOCABULARIES:
        found = {}
        for name in LIBRARIES:
            command = [sys.executable, "-m", "benchmarks.structured", "library", name, str(size)]
            found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        facts = ", ".join(
            f"{name}: vocabulary read in {each['read_ms']:.0f} ms, {each['memory_mb']:.0f} MB"
            for name, each in found.items()
        )
        print(f"\n{size:,} tokens ({facts})\n")
        print("| grammar | compile, ms | a mask, µs | longest, µs | 16 masks, µs |\n|" + " --- |" * 5)
        for title in GRAMMARS:
            mine, theirs = (found[name]["rows"][title] for name in LIBRARIES)
            cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(mine, theirs, strict=True)]
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{' / '.join(LIBRARIES)}")


def compare_steps(threads: int, layers: int, steps: int, rounds: int) -> None:
    import torch

    from benchmarks.engine_cases import MODELS, full_steps
    from benchmarks.engine_own import OwnEngine
    from engine.grammar import GrammarCompiler
    from engine.types import Grammar, GrammarKind

    torch.set_num_threads(threads)
    size = VOCABULARIES[-1]
    tokens, endless = vocabulary(size), {"type": "array", "items": _PERSON, "minItems": 10_000}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(endless))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = MODELS["473m"] | {"num_hidden_layers": layers, "vocab_size": size}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_tokenizer(folder / "tokenizer.json", tokens)
        compiler = GrammarCompiler(folder / "tokenizer.json", vocab_size=size, eos_token_ids=frozenset({size - 1}))
        engine = OwnEngine(folder)
    matcher = compiler.compile(grammar)
    print("| batch | free text, ms | with grammars, ms | longer by |\n|" + " --- |" * 4)
    for batch in (1, ROWS):
        rng = random.Random(0)
        prompts = [[rng.randrange(2, size) for _ in range(64)] for _ in range(batch)]
        least = {False: float("inf"), True: float("inf")}
        for _ in range(rounds):
            for follows in least:
                found = engine.generate(
                    prompts, 1 + steps, temperature=1.0, grammar=(grammar, matcher) if follows else None
                )
                least[follows] = min(least[follows], 1e3 * median(full_steps(found, batch)))
        free, bound = least[False], least[True]
        verdict = "" if bound <= free * (1 + LIMIT) else f" (over the limit of {LIMIT:.0%})"
        print(f"| {batch} | {free:.2f} | {bound:.2f} | {bound / free - 1:.1%}{verdict} |", flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["libraries", "library", "steps"])
    parser.add_argument("rest", nargs="*", help="of library: its name and the size of the vocabulary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "libraries":
        compare_libraries()
    elif args.what == "library":
        print(json.dumps(measure_library(args.rest[0], int(args.rest[1]))))
    else:
        compare_steps(args.threads, args.layers, args.steps, args.rounds)


if __name__ == "__main__":
    main()
