"""What following a grammar costs: llguidance beside xgrammar, and a decode step with grammars beside one of free text.

    python -m benchmarks.structured libraries               # two minutes; xgrammar and apache-tvm-ffi have to be there
    python -m benchmarks.structured hostile                 # seconds
    python -m benchmarks.structured steps --threads 2 --vllm ENV/bin/python     # an idle machine of 16 GiB

libraries: for each vocabulary, made up of bytes and random byte strings, and each grammar: the time to read the
vocabulary and to compile, the time of a mask (mean and longest over a text of the grammar, one row; mean of 16 rows in
one call, each at another place of its text), and what the process's memory has grown by. Each library in a process of
its own. hostile: what schemas that are made to be slow cost before they are refused, over random answers of 150 tokens.
steps: milliseconds of a decode step, the median, of the fastest of the rounds, free text and grammars in turn;
the model is "473m" of `benchmarks.engine` with a vocabulary of 150,000. Of Baton's steps also what of them is
not the model's: masks, the scores of what they forbid, and drawing. That says what grammars add where a machine's own
changes are larger.
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
from collections import defaultdict
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
        from engine.grammar import GrammarCompiler

        self._masks = np.zeros((ROWS, -(-len(tokens) // 32)), dtype=np.int32)
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder) / "tokenizer.json", tokens)
            self._began_s = time.perf_counter()
            self._compiler = GrammarCompiler(
                Path(folder) / "tokenizer.json", vocab_size=len(tokens), eos_token_ids=frozenset({len(tokens) - 1})
            )
        self.read_s = time.perf_counter() - self._began_s

    @property
    def mask_U8(self) -> np.ndarray:
        """Of the one matcher of the last `fill`."""
        mask_U8: np.ndarray = self._masks[0].view(np.uint8)
        return mask_U8

    def compile(self, kind: str, grammar: Any) -> Any:
        from engine.types import Grammar, GrammarKind

        if kind == "regex":
            return self._compiler.compile(Grammar(kind=GrammarKind.REGEX, text=grammar))
        return self._compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(grammar)))

    def start(self, compiled: Any) -> Any:
        return compiled.copy()

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.matcher.consume_token(token))

    def fill(self, matchers: Sequence[Any]) -> None:
        from engine.grammar import fill_masks

        fill_masks(matchers, self._masks)


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


HOSTILE: Final[Mapping[str, tuple[str, Any]]] = {
    "2,000 optional fields": ("json", {"properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}),
    "1,000 patterns at once": (
        "json", {"anyOf": [{"type": "string", "pattern": f"^.*{i}.*{i + 7}.*$"} for i in range(1_000)]}
    ),
    "20 choices of 2, all of them": (
        "json", {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}
    ),
    "multiple of 99,991": ("json", {"type": "integer", "multipleOf": 99_991}),
    "repetitions in repetitions": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "(a|b)*a(a|b){300}": ("regex", "(a|b)*a(a|b){300}"),
    "(.*a.{40})+(.*b.{50})+(.*c.{60})+": ("regex", "(.*a.{40})+(.*b.{50})+(.*c.{60})+"),
}  # fmt: skip


def measure_hostile() -> None:
    from engine.grammar import GrammarError

    library, rng = Ours(vocabulary(VOCABULARIES[-1])), random.Random(1)
    end = VOCABULARIES[-1] - 1
    print("| grammar | compile, ms | masks | mean, ms | longest, ms | all, ms | |\n|" + " --- |" * 7)
    for title, (kind, grammar) in HOSTILE.items():
        began_s, masks, said = time.perf_counter(), [], ""
        try:
            compiled = library.compile(kind, grammar)
        except GrammarError as error:
            said = f"refused: {error}"
        compile_s = time.perf_counter() - began_s
        matcher = None if said else library.start(compiled)
        while matcher is not None and len(masks) < 150:
            masks.append(elapsed_s(partial(library.fill, [matcher])))
            if matcher.problem:
                said = f"ended: {matcher.problem}"
                break
            allowed = np.flatnonzero(np.unpackbits(library.mask_U8, bitorder="little"))
            token = rng.choice(allowed[allowed != end].tolist() or [end])
            if token == end:
                break
            library.accept(matcher, token)
        times = masks or [0.0]
        numbers = f"{len(masks)} | {mean(times) * 1e3:.2f} | {max(times) * 1e3:.1f} | {sum(times) * 1e3:.0f}"
        print(f"| {title} | {compile_s * 1e3:.0f} | {numbers} | {said} |", flush=True)


ENDLESS: Final = {"type": "array", "items": _PERSON, "minItems": 1_000}
Generate = Callable[[list[list[int]], int, bool], Any]
"""(prompts, tokens to write, whether they follow the grammar) -> the steps."""


def measure_steps(generate: Generate, batches: Sequence[int], steps: int, rounds: int) -> dict[str, list[float]]:
    """Of each batch: milliseconds of a step that writes to all of its answers, of free text, and with grammars. Most
    steps must be such: vLLM begins some answers later, while it compiles their grammars, and none may end early."""
    from benchmarks.engine_cases import full_steps

    taken = {}
    for batch in batches:
        rng = random.Random(0)
        prompts = [[rng.randrange(2, VOCABULARIES[-1]) for _ in range(64)] for _ in range(batch)]
        least = [float("inf"), float("inf")]
        for _ in range(rounds):
            for follows in (False, True):
                full_s = full_steps(generate(prompts, 1 + steps, follows), batch)
                assert 2 * len(full_s) > steps, f"an answer of {batch} has ended: {len(full_s)} full steps of {steps}"
                least[follows] = min(least[follows], 1e3 * median(full_s))
        taken[str(batch)] = least
    return taken


def write_model(folder: Path, layers: int) -> Path:
    from benchmarks.engine_cases import MODELS

    size = VOCABULARIES[-1]
    config = MODELS["473m"] | {"num_hidden_layers": layers, "vocab_size": size, "eos_token_id": size - 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json", vocabulary(size))
    return folder


PARTS: Final = ("compute_masks", "allow_only", "sample")
"""Of `engine.runner`, around which clocks are put."""


class Clocks:
    """How long the parts of each step take."""

    def __init__(self) -> None:
        from engine import runner

        self._now_s = dict.fromkeys(PARTS, 0.0)
        self._steps_s: list[dict[str, float]] = []
        for name in PARTS:
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._now_s[name] += time.perf_counter() - began_s

        return timed

    def step_ended(self, _: int) -> None:
        self._steps_s.append(self._now_s)
        self._now_s = dict.fromkeys(PARTS, 0.0)

    def take_ms(self, steps: int) -> dict[str, float]:
        """Medians over the last `steps` steps. What was before them is forgotten with them."""
        last, self._steps_s = self._steps_s[-steps:], []
        return {name: 1e3 * median(each[name] for each in last) for name in PARTS}


def own_steps(args: argparse.Namespace) -> dict[str, list[float]]:
    import torch

    from benchmarks.engine_own import OwnEngine
    from engine.grammar import GrammarCompiler
    from engine.types import Grammar, GrammarKind

    torch.set_num_threads(args.threads)
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(ENDLESS))
    with tempfile.TemporaryDirectory() as name:
        folder, size = write_model(Path(name), args.layers), VOCABULARIES[-1]
        compiler = GrammarCompiler(folder / "tokenizer.json", vocab_size=size, eos_token_ids=frozenset({size - 1}))
        engine = OwnEngine(folder)
    pair, clocks = (grammar, compiler.compile(grammar)), Clocks()
    found: dict[tuple[int, bool], list[dict[str, float]]] = defaultdict(list)

    def generate(prompts: list[list[int]], tokens: int, follows: bool) -> Any:
        bound = pair if follows else None
        steps = engine.generate(prompts, tokens, temperature=1.0, grammar=bound, step_ended=clocks.step_ended)
        found[len(prompts), follows].append(clocks.take_ms(args.steps))
        return steps

    taken = measure_steps(generate, args.batch, args.steps, args.rounds)
    for (batch, follows), rounds in found.items():
        parts = {name: median(each[name] for each in rounds) for name in PARTS}
        told = " + ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        print(f"{batch} answers, {'grammars' if follows else 'free text'}: {told} = {sum(parts.values()):.2f} ms")
    return taken


def vllm_steps(args: argparse.Namespace) -> dict[str, list[float]]:
    """By the interpreter of vLLM's environment."""
    from itertools import count

    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found]

    numbers, backend = count(), args.rest[0]
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(write_model(Path(folder), args.layers)), load_format="dummy", dtype="bfloat16",
            max_model_len=2048, max_num_seqs=ROWS, max_num_batched_tokens=2048, enable_prefix_caching=False,
            disable_log_stats=True, structured_outputs_config={"backend": backend},
        )  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int, follows: bool) -> Any:
        form = StructuredOutputsParams(json=json.dumps(ENDLESS)) if follows else None
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=not follows, structured_outputs=form)
        started, steps = time.perf_counter(), []
        for prompt in prompts:
            llm.llm_engine.add_request(f"r{next(numbers)}", {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            answers = len(llm.llm_engine.step())
            steps.append((time.perf_counter() - started, answers))
        return steps

    return measure_steps(generate, args.batch, args.steps, args.rounds)


def compare_steps(args: argparse.Namespace) -> None:
    own = own_steps(args)
    print("| engine | batch | free text, ms | with grammars, ms | longer by | |\n|" + " --- |" * 6)
    print_steps("Baton", own)
    for backend in ("xgrammar", "guidance") if args.vllm else ():
        options = [f"--{name}={getattr(args, name)}" for name in ("layers", "steps", "rounds")]
        batches = ["--batch", *map(str, args.batch)]
        command = [args.vllm, "-m", "benchmarks.structured", "vllm", backend, *options, *batches]
        at = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | at)
        print_steps(f"vLLM, {backend}", json.loads(done.stdout.strip().splitlines()[-1]))


def print_steps(name: str, taken: Mapping[str, Sequence[float]]) -> None:
    for batch, (free, bound) in taken.items():
        verdict = "" if bound <= free * (1 + LIMIT) else f"over the limit of {LIMIT:.0%}"
        cells = f"{name} | {batch} | {free:.2f} | {bound:.2f} | {bound - free:.2f} ms, {bound / free - 1:.1%}"
        print(f"| {cells} | {verdict} |", flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["libraries", "library", "hostile", "steps", "vllm"])
    parser.add_argument("rest", nargs="*", help="of library: name and size of the vocabulary; of vllm: a backend")
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM: its steps too, in the same run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, ROWS])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "libraries":
        compare_libraries()
    elif args.what == "hostile":
        measure_hostile()
    elif args.what == "library":
        print(json.dumps(measure_library(args.rest[0], int(args.rest[1]))))
    elif args.what == "vllm":
        print(json.dumps(vllm_steps(args)))
    else:
        compare_steps(args)


if __name__ == "__main__":
    main()
