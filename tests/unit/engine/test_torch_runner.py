"""The real engine against transformers: tiny random models in float32 over scattered blocks of a poisoned region."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.demo_model import DemoModelParams, write_demo_model
from engine.runner import TorchRunner
from engine.types import Batch, NullSink, Runner, SamplingParams, SequenceSlice
from tests.support.every_row import score

BLOCK_SIZE = 4
NUM_BLOCKS = 64
POISON = 0xFF  # four of these bytes are a NaN
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
TOLERANCE = 1e-4  # of the largest reference score

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 128, "bos_token_id": None}
MODELS: dict[str, Callable[[], Any]] = {
    "llama_grouped_biased": lambda: transformers.LlamaConfig(
        **SIZES | {"vocab_size": 97, "hidden_size": 42, "intermediate_size": 51, "eos_token_id": None},
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama_llama3_rope_tied": lambda: transformers.LlamaConfig(
        **SIZES | {"vocab_size": 101, "hidden_size": 40, "intermediate_size": 64, "eos_token_id": None},
        num_attention_heads=5,
        num_key_value_heads=5,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "qwen3_tied": lambda: transformers.Qwen3Config(
        **SIZES | {"vocab_size": 89, "hidden_size": 36, "intermediate_size": 55},
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen3_biased": lambda: transformers.Qwen3Config(
        **SIZES | {"vocab_size": 103, "hidden_size": 48, "intermediate_size": 33},
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        attention_bias=True,
    ),
}


@dataclass
class Running:
    """One sequence as a scheduler would keep it."""

    name: str
    tokens: list[int]
    block_table: list[BlockId]
    computed: int = 0
    num_prompt: int = field(init=False)
    params: SamplingParams = GREEDY

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def key(self) -> RequestKey:
        return RequestKey(request=RequestId(self.name), attempt=Attempt(0))

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def slice(self, count: int | None = None) -> SequenceSlice:
        stop = len(self.tokens) if count is None else min(len(self.tokens), self.computed + count)
        num_blocks = -(-stop // BLOCK_SIZE)
        return SequenceSlice(
            key=self.key,
            tokens=tuple(self.tokens),
            start=self.computed,
            stop=stop,
            block_table=tuple(self.block_table[:num_blocks]),
            sample=stop == len(self.tokens),
            output_index=len(self.output),
            params=self.params,
        )


class Engine:
    """A runner over its own poisoned region, with blocks handed out in random order."""

    def __init__(self, runner: TorchRunner, fill: int = POISON) -> None:
        spec = runner.kv_spec
        self.runner = runner
        self.shape = (spec.num_layers, NUM_BLOCKS, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        self.region_U8 = np.full(int(np.prod(self.shape)) * 4, fill, dtype=np.uint8)
        runner.bind(self.region_U8, NUM_BLOCKS)
        self.free = [BlockId(int(b)) for b in np.random.default_rng(5).permutation(NUM_BLOCKS)]

    @property
    def kv_LN2KSD(self) -> np.ndarray:
        return self.region_U8.view(np.float32).reshape(self.shape)

    def add(self, name: str, tokens: Sequence[int], *, max_new: int = 0, params: SamplingParams = GREEDY) -> Running:
        num_blocks = -(-(len(tokens) + max_new) // BLOCK_SIZE)
        table = [self.free.pop() for _ in range(num_blocks)]
        return Running(name=name, tokens=list(tokens), block_table=table, params=params)

    def step(self, *parts: tuple[Running, int | None]) -> None:
        """Run one batch of (sequence, number of tokens or all that are left) and append what is drawn."""
        batch = Batch(slices=tuple(seq.slice(count) for seq, count in parts))
        result = self.runner.run(batch, NullSink())
        assert set(result.sampled) == {s.key for s in batch.slices if s.sample}
        for (seq, _), s in zip(parts, batch.slices, strict=True):
            seq.computed = s.stop
            if s.sample:
                seq.tokens.append(result.sampled[seq.key])

    def score(self, seq: Running, counts: Sequence[int]) -> torch.Tensor:
        """Scores of all tokens of a sequence, computed in chunks of the given lengths."""
        parts = []
        for count in counts:
            s = seq.slice(count)
            parts.append(score(self.runner, Batch(slices=(s,))))
            seq.computed = s.stop
        return torch.cat(parts)

    def generate(self, seq: Running, max_new: int) -> list[int]:
        while len(seq.output) < max_new:
            self.step((seq, None))
        return seq.output


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers has written; every weight is random, norms and biases too."""
    torch.manual_seed(3)
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_config(MODELS[request.param]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=2.5 / parameter.shape[1] ** 0.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    auto_model: Any = transformers.AutoModelForCausalLM
    return auto_model.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchRunner:
    return TorchRunner.load(folder, block_size=BLOCK_SIZE)


def prompt(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 89, size=length)]


@torch.inference_mode()
def reference_scores(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    scores: torch.Tensor = reference(torch.tensor([list(tokens)])).logits[0]
    return scores


def reference_generate(reference: Any, tokens: Sequence[int], max_new: int) -> list[int]:
    """Greedy tokens of transformers, after making sure that rounding could not decide any of them."""
    ids = torch.tensor([list(tokens)])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new, do_sample=False)
    best_two = reference_scores(reference, out[0, :-1].tolist())[len(tokens) - 1 :].topk(2).values
    assert (best_two[:, 0] - best_two[:, 1]).min() > 1e-3, "the reference's own choice is too close to call"
    generated: list[int] = out[0, len(tokens) :].tolist()
    return generated


def assert_close(scores: torch.Tensor, expected: torch.Tensor) -> None:
    assert scores.shape == expected.shape
    assert (scores - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_scores_equal_the_reference_at_every_chunk_boundary(runner: TorchRunner, reference: Any) -> None:
    """A prompt of 19 tokens is split in two at every place, on and off block boundaries; the scores stay the same."""
    tokens = prompt(19, seed=1)
    expected = reference_scores(reference, tokens)
    for split in range(1, len(tokens)):
        engine = Engine(runner)
        assert_close(engine.score(engine.add("a", tokens), (split, len(tokens) - split)), expected)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 60])
def test_scores_equal_the_reference_in_chunks(runner: TorchRunner, reference: Any, chunk: int) -> None:
    """A prompt longer than the rope scaling's original context, in chunks smaller and larger than a block."""
    tokens = prompt(60, seed=2)
    engine = Engine(runner)
    scores = engine.score(engine.add("a", tokens), [chunk] * -(-len(tokens) // chunk))
    assert_close(scores, reference_scores(reference, tokens))


def test_greedy_answer_equals_generate(runner: TorchRunner, reference: Any) -> None:
    """32 tokens after prompts that end inside, at and just past a block are those of `generate`, token for token."""
    engine = Engine(runner)
    answers = []
    for length in (1, 3, 4, 5, 17):
        tokens = prompt(length, seed=length)
        answers.append(engine.generate(engine.add(str(length), tokens, max_new=32), 32))
        assert answers[-1] == reference_generate(reference, tokens, 32), length
    assert len({token for answer in answers for token in answer}) > 10, (
        "the answers are too monotonous to show anything"
    )


def test_mixed_batches_give_each_sequence_its_own_answer(runner: TorchRunner, reference: Any) -> None:
    """Decodes, a prompt in three chunks and whole prompts share steps; each answer is the reference's for it alone."""
    engine = Engine(runner)
    prompts = {"a": prompt(6, 11), "b": prompt(13, 12), "c": prompt(9, 13), "d": prompt(1, 14)}
    a, b, c, d = (engine.add(name, tokens, max_new=12) for name, tokens in prompts.items())
    engine.step((a, None))
    engine.step((a, None), (b, 5))
    engine.step((b, 3), (a, None), (d, None))
    engine.step((a, None), (c, None), (b, 5), (d, None))
    for _ in range(7):
        engine.step((d, None), (c, None), (b, None), (a, None))
    for seq, tokens in zip((a, b, c, d), prompts.values(), strict=True):
        assert seq.output == reference_generate(reference, tokens, len(seq.output))
    assert [len(seq.output) for seq in (a, b, c, d)] == [11, 8, 8, 9]


def test_a_sequence_reads_blocks_that_another_one_wrote(runner: TorchRunner, reference: Any) -> None:
    """A prefix hit: the second sequence starts behind two full blocks of the first and shares them."""
    engine = Engine(runner)
    shared = prompt(8, 21)
    first = engine.add("a", shared + prompt(3, 22), max_new=4)
    second = engine.add("b", shared + prompt(5, 23), max_new=8)
    engine.step((first, None))
    second.block_table[:2] = first.block_table[:2]
    second.computed = 8
    for _ in range(8):
        engine.step((second, None), (first, None)) if len(first.output) < 4 else engine.step((second, None))
    assert second.output == reference_generate(reference, second.tokens[:13], 8)
    assert first.output == reference_generate(reference, first.tokens[:11], 4)


def test_each_layer_is_announced_once_its_bytes_are_there(runner: TorchRunner) -> None:
    """When the sink hears of layer i, layers up to i hold their final bytes and later layers have not begun."""
    engine = Engine(runner)
    seq = engine.add("a", prompt(10, 31))
    seen: list[tuple[int, np.ndarray]] = []

    class Sink:
        def layer_done(self, layer: int) -> None:
            seen.append((layer, engine.kv_LN2KSD.copy()))

    runner.run(Batch(slices=(seq.slice(),)), Sink())
    final = engine.kv_LN2KSD
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, snapshot in seen:
        np.testing.assert_array_equal(snapshot[: layer + 1], final[: layer + 1])
        assert np.isnan(snapshot[layer + 1 :]).all()


def test_unused_memory_is_neither_read_nor_written(runner: TorchRunner) -> None:
    """Over a region of NaN and over one of zeros the scores are the same bits, and only the new slots have changed."""
    tokens = prompt(10, 41)
    scores = []
    for fill in (POISON, 0):
        engine = Engine(runner, fill=fill)
        seq = engine.add("a", tokens)
        scores.append(engine.score(seq, (7, 2, 1)))
        untouched = np.ones((NUM_BLOCKS, BLOCK_SIZE), dtype=bool)
        for position in range(len(tokens)):
            untouched[seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE] = False
        bytes_NSU = engine.region_U8.reshape(*engine.shape[:-1], -1).transpose(1, 4, 0, 2, 3, 5)
        assert (bytes_NSU[untouched] == fill).all()
        assert np.isfinite(engine.kv_LN2KSD.transpose(1, 4, 0, 2, 3, 5)[~untouched]).all()
    assert torch.equal(scores[0], scores[1])


def test_seeded_sampling_is_the_same_alone_and_in_any_batch(runner: TorchRunner) -> None:
    """A sampled request draws the same 20 tokens alone and beside others that join and leave; another seed differs."""
    params = SamplingParams(temperature=1.3, top_k=30, top_p=0.95, seed=77, max_tokens=64)
    engine = Engine(runner)
    alone = engine.generate(engine.add("a", prompt(7, 51), max_new=20, params=params), 20)

    engine = Engine(runner)
    seq = engine.add("a", prompt(7, 51), max_new=20, params=params)
    other = engine.add("b", prompt(5, 52), max_new=20, params=replace(params, temperature=0.7, top_k=0, seed=78))
    greedy = engine.add("c", prompt(11, 53), max_new=20)
    for step in range(20):
        around = [(other, None)] if step % 3 else []
        engine.step(*around, (seq, None), *([(greedy, None)] if step % 2 else []))
    assert seq.output == alone

    engine = Engine(runner)
    reseeded = engine.add("a", prompt(7, 51), max_new=20, params=replace(params, seed=79))
    assert engine.generate(reseeded, 20) != alone


def test_a_resumed_request_draws_the_same_tokens(runner: TorchRunner) -> None:
    """A retry that prefills the prompt and the first nine answer tokens goes on exactly as the first attempt did."""
    params = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=5, max_tokens=64)
    engine = Engine(runner)
    first = engine.generate(engine.add("a", prompt(6, 61), max_new=20, params=params), 20)
    engine = Engine(runner)
    retry = engine.add("a", prompt(6, 61) + first[:9], max_new=11, params=params)
    retry.num_prompt = 6
    assert engine.generate(retry, 20) == first


@pytest.fixture(scope="module")
def demo_runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=32, num_heads=2, head_dim=16, vocab_size=300))
    return TorchRunner.load(folder, block_size=BLOCK_SIZE)


def test_only_sampled_rows_reach_the_output_projection(
    demo_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of two chunks and two ends of prompts scores two rows; a batch that draws nothing scores none."""
    engine = Engine(demo_runner)
    sequences = [engine.add(str(i), prompt(6, 70 + i), max_new=1) for i in range(4)]
    rows: list[int] = []
    original = demo_runner._decoder.logits

    def logits(x_BE: torch.Tensor) -> torch.Tensor:
        rows.append(x_BE.shape[0])
        return original(x_BE)

    monkeypatch.setattr(demo_runner._decoder, "logits", logits)
    engine.step((sequences[0], 4), (sequences[1], None), (sequences[2], 5), (sequences[3], None))
    engine.step((sequences[0], 1))
    assert rows == [2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_draw_are_those_of_a_whole_last_layer(
    folder: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out for the rows that draw is what the same steps give for all rows; K and V of every row are kept.
    Only such rows go through the last layer's feed-forward part, unless the runner is deterministic."""
    runner = TorchRunner.load(folder, block_size=BLOCK_SIZE, deterministic=deterministic)
    rows_seen: list[int] = []
    original = torch.nn.functional.silu

    def silu(x_TX: torch.Tensor) -> torch.Tensor:
        rows_seen.append(len(x_TX))
        return original(x_TX)

    monkeypatch.setattr(torch.nn.functional, "silu", silu)
    engines = (Engine(runner), Engine(runner))
    outputs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for engine, found in zip(engines, outputs, strict=True):
        runner.bind(engine.region_U8, NUM_BLOCKS)
        assert runner._forward is not None
        a, b, c = (engine.add(name, prompt(13, seed)) for name, seed in (("a", 91), ("b", 92), ("c", 93)))
        for step in (((a, 13), (b, 5)), ((b, 1), (c, 12)), ((c, 1), (b, 7))):
            batch = Batch(slices=tuple(seq.slice(count) for seq, count in step))
            rows_seen.clear()
            every_row = engine is engines[1]
            with torch.inference_mode():
                x_WE = runner._forward.forward(
                    Batch(slices=batch.slices, every_row=True) if every_row else batch, NullSink()
                )
            found.append(x_WE[batch.drawing_rows] if every_row else x_WE)
            for (seq, _), s in zip(step, batch.slices, strict=True):
                seq.computed = s.stop
            if not (every_row or deterministic):
                rows = len(batch.drawing_rows)
                assert rows_seen == [batch.num_tokens] * 2 + [rows] * (rows > 0)
    assert [len(few) for few in outputs[0]] == [1, 0, 2]
    for few, every in zip(*outputs, strict=True):
        torch.testing.assert_close(few, every, rtol=0, atol=0 if deterministic else 1e-4)
    np.testing.assert_array_equal(engines[0].kv_LN2KSD, engines[1].kv_LN2KSD)


def test_run_may_change_threads(demo_runner: TorchRunner) -> None:
    """The engine moves to a thread of its own after the first step; inference mode and results go with it."""
    engine = Engine(demo_runner)
    expected = engine.generate(engine.add("a", prompt(5, 81), max_new=6), 6)
    engine = Engine(demo_runner)
    seq = engine.add("a", prompt(5, 81), max_new=6)
    engine.step((seq, None))
    thread = threading.Thread(target=engine.generate, args=(seq, 6))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert seq.output == expected


def test_the_runner_tells_what_the_node_must_know(demo_runner: TorchRunner) -> None:
    """KV shape, vocabulary, context and end tokens come from the checkpoint."""
    contract: Runner = demo_runner
    spec = demo_runner.kv_spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (2, 2, 16, BLOCK_SIZE)
    assert spec.dtype == "float32"
    assert contract.layout == spec.layout
    assert (demo_runner.vocab_size, demo_runner.context_len_max) == (300, 4096)
    assert demo_runner.eos_token_ids == frozenset({1})


def test_misuse_is_caught_before_memory_is_touched(demo_runner: TorchRunner) -> None:
    """Tokens and blocks out of range, a region that is too small or read-only: an assertion, not a crash."""
    engine = Engine(demo_runner)
    seq = engine.add("a", [1, 2, 300])
    with pytest.raises(AssertionError, match="vocabulary"):
        engine.step((seq, None))
    seq = engine.add("b", [1, 2, 3])
    seq.block_table[0] = BlockId(NUM_BLOCKS)
    with pytest.raises(AssertionError, match="outside the region"):
        engine.step((seq, None))
    assert (engine.region_U8 == POISON).all()
    with pytest.raises(AssertionError):
        demo_runner.bind(engine.region_U8[:-4], NUM_BLOCKS)
    read_only = engine.region_U8.copy()
    read_only.flags.writeable = False
    with pytest.raises(AssertionError, match="writable"):
        demo_runner.bind(read_only, NUM_BLOCKS)
