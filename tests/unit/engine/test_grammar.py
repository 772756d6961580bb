"""Answers with a grammar, from an engine over a small random model: what comes is what the grammar allows."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLExecutor
from tokenizers import Tokenizer

import engine.grammar as engine_grammar
from baton.ids import Attempt, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine
from engine.demo_model import EOS_ID, DemoModelParams, write_demo_model
from engine.grammar import GrammarCompiler, GrammarError, Matcher
from engine.runner import TorchRunner
from engine.scheduler import SchedulerConfig, Sequence, SequenceMode
from engine.types import FinishReason, Grammar, GrammarKind, NullSink, SamplingParams
from tests.support.schemas import TOKENS_MAX, check_answer, draw_schema, write_byte_tokenizer

NUM_BLOCKS = 2_048
BLOCK_SIZE = 16
DRAWN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0, max_tokens=TOKENS_MAX)


class Model:
    """A random model, its tokenizer, and an engine over both."""

    def __init__(self, folder: Path) -> None:
        sizes = DemoModelParams(
            num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, vocab_size=600
        )
        write_demo_model(folder, sizes)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.compiler = GrammarCompiler(
            folder / "tokenizer.json", vocab_size=sizes.vocab_size, eos_token_ids=frozenset({EOS_ID})
        )
        self.runner = TorchRunner.load(folder, block_size=BLOCK_SIZE)
        self.runner.bind(np.zeros(self.runner.layout.region_bytes(NUM_BLOCKS), dtype=np.uint8), NUM_BLOCKS)
        self.blocks = BlockManager(Ledger(NUM_BLOCKS), BLOCK_SIZE, b"model")
        limits = SchedulerConfig(tokens_per_step_max=256, sequences_max=16, waiting_max=2_000)
        self.engine = Engine(self.runner, self.blocks, limits)
        self.finishes: dict[str, FinishReason | None] = {}

    def submit(
        self, name: str, params: SamplingParams, *, prompt: list[int] | None = None, output: list[int] | None = None
    ) -> Sequence:
        prompt = prompt or self.tokenizer.encode(f"the answer {name} is").ids
        tokens, prompt_len = [*prompt, *(output or [])], len(prompt)
        held = self.blocks.blocks_for(len(tokens))
        growth = growth_blocks(
            prompt_len=prompt_len,
            known_len=len(tokens),
            max_tokens=params.max_tokens,
            context_len_max=self.runner.context_len_max,
            block_size=BLOCK_SIZE,
            blocks_held=held,
        )
        seq = Sequence(
            key=RequestKey(request=RequestId(name), attempt=Attempt(0)),
            params=params,
            tokens=tokens,
            prompt_len=prompt_len,
            computed=0,
            block_table=self.blocks.admit([], held, promise_key=name, promise=growth),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
            grammar=None if params.grammar is None else self.compiler.compile(params.grammar),
        )
        self.engine.submit(seq)
        return seq

    def run(self) -> None:
        while (batch := self.engine.schedule()) is not None:
            for event in self.engine.postprocess(batch, self.engine.run(batch, NullSink())):
                if event.finish is not None:
                    self.finishes[event.seq.key.request] = event.finish
        assert self.blocks.ledger.available == NUM_BLOCKS

    def answer(self, seq: Sequence) -> str:
        """Without the end token."""
        tokens = seq.tokens[seq.prompt_len :]
        text: str = self.tokenizer.decode([each for each in tokens if each != EOS_ID], skip_special_tokens=False)
        return text

    def ask(self, grammar: Grammar, **changes: object) -> tuple[str, FinishReason | None]:
        seq = self.submit("one", replace(DRAWN, grammar=grammar, **changes))  # type: ignore[arg-type]
        self.run()
        return self.answer(seq), self.finishes["one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("grammar") / "model")


def schema(value: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def rules(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.RULES, text=text)


def answers_are_valid(model: Model, seeds: range) -> None:
    """Sixteen at a time, every fourth greedy, every fifth cut; some beside free text."""
    schemas = {seed: draw_schema(random.Random(seed)) for seed in seeds}
    seqs = {}
    for first in range(0, len(schemas), 16):
        for seed in list(schemas)[first : first + 16]:
            params = replace(DRAWN, seed=seed, temperature=0.0 if seed % 4 == 0 else 1.0, top_k=20 * (seed % 3))
            seqs[seed] = model.submit(f"{seed}", replace(params, grammar=schema(schemas[seed])))
        model.submit("free", replace(DRAWN, max_tokens=20))
        model.run()
    for seed, seq in seqs.items():
        assert model.finishes[f"{seed}"] is FinishReason.STOP, seed
        assert seq.tokens[-1] == EOS_ID, seed
        check_answer(schemas[seed], model.answer(seq))
    cut = {seed: seq for seed, seq in seqs.items() if seed % 5 == 0 and seq.output_count > 2}
    for seed, seq in cut.items():
        params = replace(seq.params, max_tokens=seq.output_count // 2)
        shorter = model.submit(f"cut {seed}", params, prompt=seq.tokens[: seq.prompt_len])
        model.run()
        assert model.finishes[f"cut {seed}"] is FinishReason.LENGTH
        assert shorter.tokens == seq.tokens[: len(shorter.tokens)], seed


def test_answers_to_schemas_are_valid(model: Model) -> None:
    """Fifty drawn schemas; an answer that max_tokens cuts is the beginning of a valid one."""
    answers_are_valid(model, range(50))


@pytest.mark.slow
def test_answers_to_a_thousand_schemas_are_valid(model: Model) -> None:
    """As above, with others."""
    answers_are_valid(model, range(1_000, 2_000))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex(r"[0-9]{3}-[a-f]{2,4}"), r"[0-9]{3}-[a-f]{2,4}"),
        (rules('start: "left" | "right" | "don\'t know"'), "left|right|don't know"),
        (rules('root ::= item ("," item)? ";"\nitem ::= [a-c] [0-9]'), r"[a-c][0-9](,[a-c][0-9])?;"),
    ],
    ids=["regex", "Lark", "GBNF"],
)
def test_the_answer_is_what_the_grammar_derives(model: Model, grammar: Grammar, pattern: str) -> None:
    """A regular expression, and rules in both notations."""
    for seed in range(5):
        text, finish = model.ask(grammar, seed=seed)
        assert (bool(re.fullmatch(pattern, text)), finish) == (True, FinishReason.STOP), text


def test_an_answer_goes_on_behind_any_of_its_tokens(model: Model) -> None:
    """As on a node that takes over: the matcher is given the tokens so far, and the rest is the same."""
    wanted = schema({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3})
    whole = model.submit("whole", replace(DRAWN, grammar=wanted, seed=3))
    model.run()
    prompt, answer = whole.tokens[: whole.prompt_len], whole.tokens[whole.prompt_len :]
    for known in range(1, len(answer)):
        seq = model.submit("whole", replace(DRAWN, grammar=wanted, seed=3), output=answer[:known])
        assert seq.tokens == [*prompt, *answer[:known]]
        model.run()
        assert seq.tokens == whole.tokens


def test_biases_and_penalties_choose_among_what_is_allowed(model: Model) -> None:
    """A bias of -100 against the one thing that is allowed changes nothing; log-probabilities are the model's own."""
    against = tuple((token, -100.0) for token in range(600))
    text, finish = model.ask(regex("yes"), logit_bias=against, repetition_penalty=5.0, frequency_penalty=2.0)
    assert (text, finish) == ("yes", FinishReason.STOP)
    seq = model.submit("one", replace(DRAWN, grammar=regex("yes"), logprobs=1))
    batch = model.engine.schedule()
    assert batch is not None
    result = model.engine.run(batch, NullSink())
    found = result.logprobs[seq.key]
    assert np.isfinite(found.logprob) and found.top[0][0] != result.sampled[seq.key]
    model.engine.postprocess(batch, result)
    model.run()


def test_a_token_that_the_grammar_does_not_allow_ends_the_request(model: Model) -> None:
    """It cannot come from us; the answer has no end by the grammar then, and says so."""
    seq = model.submit("lost", replace(DRAWN, grammar=regex("[a-z]{5}")), output=model.tokenizer.encode("123").ids)
    model.run()
    assert model.finishes["lost"] is FinishReason.GRAMMAR
    assert isinstance(seq.grammar, Matcher) and "doesn't satisfy the grammar" in seq.grammar.problem
    assert model.engine.counters.not_finite == 0


def test_an_answer_whose_masks_take_too_long_ends(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It owes what its masks take beyond what is free; beside it, an answer of the same steps goes on."""
    monkeypatch.setattr(engine_grammar, "MASK_MS_FREE", -10.0)
    seq = model.submit("slow", replace(DRAWN, grammar=regex("[a-z]{500}")))
    free = model.submit("free", replace(DRAWN, max_tokens=60, ignore_eos=True))
    model.run()
    assert (model.finishes["slow"], model.finishes["free"]) == (FinishReason.GRAMMAR, FinishReason.LENGTH)
    assert 15 <= seq.output_count <= 21  # of 200 ms, 10 and more a mask
    assert seq.grammar is not None and "ms a token" in seq.grammar.problem
    assert free.output_count == 60


@pytest.mark.parametrize("fast", [True, False])
def test_masks_that_are_computed_together_are_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch, *, fast: bool
) -> None:
    """Three answers, each mask by itself, and then all at a time. If that is slow each of them owes something, is
    computed by itself from the next step on, and is with the others again once it has paid back."""
    texts, together = {}, []
    fill_together = engine_grammar._fill_together

    def watched(executor: LLExecutor, pairs: list[tuple[Matcher, int]], allowed_RI: np.ndarray) -> None:
        fill_together(executor, pairs, allowed_RI)
        together.append({each.owed_ms for each, _ in pairs})

    monkeypatch.setattr(engine_grammar, "_fill_together", watched)
    executor = LLExecutor(2)
    monkeypatch.setattr(engine_grammar, "_executor", lambda: executor)
    monkeypatch.setattr(engine_grammar, "_mask_threads", lambda: 2)
    monkeypatch.setattr(engine_grammar, "MASK_MS_FREE", 1e9)
    for shared in (False, True):
        monkeypatch.setattr(engine_grammar, "ALONE_MS_MAX", 0.0 if shared else 1e9)
        monkeypatch.setattr(engine_grammar, "ROW_MS_MAX", 0.0 if fast else -1e10)
        seqs = [model.submit(f"{i}", replace(DRAWN, seed=i, grammar=regex("[a-z]{9}-[0-9]{9}"))) for i in range(3)]
        model.run()
        assert all(isinstance(seq.grammar, Matcher) and seq.grammar.mask_ms > 0 for seq in seqs)
        texts[shared] = [model.answer(seq) for seq in seqs]
        assert shared or not together
    assert texts[False] == texts[True]
    owed = 0.0 if fast else 10
    assert together and all(each == {owed} for each in together), together


def test_masks_that_take_long_are_computed_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 1 ms by the thread's clock: those of one or two rows are computed by the engine's thread, and of three
    together from the second step on."""
    together: list[int] = []
    fill_together = engine_grammar._fill_together

    def watched(executor: LLExecutor, pairs: list[tuple[Matcher, int]], allowed_RI: np.ndarray) -> None:
        fill_together(executor, pairs, allowed_RI)
        together.append(len(pairs))
        for each, _ in pairs:
            each.mask_ms = 1.0

    clock = count()
    clocks = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: next(clock) / 1e3)
    monkeypatch.setattr(engine_grammar, "time", clocks)
    monkeypatch.setattr(engine_grammar, "_fill_together", watched)
    executor = LLExecutor(2)
    monkeypatch.setattr(engine_grammar, "_executor", lambda: executor)
    for rows, wanted in ((2, []), (3, [3] * 3)):
        for i in range(rows):
            model.submit(f"{rows} {i}", replace(DRAWN, seed=i, max_tokens=4, grammar=regex("[a-z]{40}")))
        model.run()
        assert together == wanted


def test_one_processor_computes_no_masks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two do."""
    for processors, has_threads in ((1, False), (2, True)):
        engine_grammar._executor.cache_clear()
        engine_grammar._mask_threads.cache_clear()
        here = SimpleNamespace(sched_getaffinity=lambda _, count=processors: set(range(count)))
        monkeypatch.setattr(engine_grammar, "os", here)
        assert (engine_grammar._executor() is not None) == has_threads
    engine_grammar._executor.cache_clear()
    engine_grammar._mask_threads.cache_clear()


def test_a_machine_that_is_busy_makes_no_answer_owe(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall runs a second with each look at it, a thread's own does not: no row is slower than it
    may."""
    clock = count()
    clocks = SimpleNamespace(perf_counter=lambda: float(next(clock)), thread_time=lambda: 0.0)
    monkeypatch.setattr(engine_grammar, "time", clocks)
    seqs = [model.submit(f"busy {i}", replace(DRAWN, seed=i, grammar=regex("[a-z]{40}"))) for i in range(4)]
    model.run()
    assert [model.finishes[f"busy {i}"] for i in range(4)] == [FinishReason.STOP] * 4
    assert all(isinstance(seq.grammar, Matcher) and seq.grammar.owed_ms == 0 for seq in seqs)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "EOF while parsing"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"a":' * 500 + "1" + "}" * 500), "recursion limit"),
        (regex("(a"), "unclosed group"),
        (rules("start: nothing"), "nothing"),
        (rules('root ::= ("a"'), "Expected ')'"),
        (
            schema({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}),
            "schema too large",
        ),
        (schema({"$ref": "#"}), "no text follows it"),
        (schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf constraints are not supported"),
        (rules("  "), "No 'root' rule found"),
        (rules('root ::= "\\'), "string index out of range"),
        (rules("root ::= " + "(" * 20_000), "maximum recursion depth"),
        (rules('start: a "x"\na[lazy]: /.*/'), "panic: assertion failed"),
    ],
    ids=[
        "type",
        "keyword",
        "no JSON",
        "nested",
        "regex",
        "Lark",
        "GBNF",
        "exponential",
        "loop",
        "oneOf",
        "no rule",
        "no end",
        "deep",
        "panic",
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(model: Model, grammar: Grammar, problem: str) -> None:
    """Mistakes, keywords that are not supported, and what takes too much to compile."""
    with pytest.raises(GrammarError, match=re.escape(problem)) as caught:
        model.compiler.compile(grammar)
    assert "backtrace" not in str(caught.value)


def test_a_model_without_end_or_tokenizer_takes_no_grammar(tmp_path: Path) -> None:
    """Nothing could end the answer, or say what its tokens spell."""
    eos = write_byte_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=eos + 1, eos_token_ids=frozenset())
    with pytest.raises(GrammarError, match="cannot be used"):
        GrammarCompiler(tmp_path / "missing.json", vocab_size=eos + 1, eos_token_ids=frozenset({eos}))
