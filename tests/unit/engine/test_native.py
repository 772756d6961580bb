"""The compute kernels against PyTorch's operations: bfloat16, over scattered blocks of a poisoned region."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from baton.cores import Cores
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from baton.native import NativeLibrary
from engine.kernel_sets import KernelSet
from engine.kv_pool import KvPool
from engine.model_config import ModelConfig, Quantisation, UnsupportedModelError, parse_model_config, weight_shapes
from engine.models.decoder import Decoder
from engine.models.matmul import Linear, NativePacking
from engine.native import kernels as kernels_module
from engine.native.kernels import OWN, Epilogue, KernelSetMissing, Workspace, choose_kernels, cpu_sets, own_kernels
from engine.runner import Forward, TorchForward, TorchRunner
from engine.types import NO_TOKEN, Batch, KvSink, NullSink, SamplingParams, SequenceSlice

NUM_BLOCKS = 96
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
CHANGES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "one head of 128": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 128},
    "many of 64": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False},
    "more layers than at once": {"num_hidden_layers": 35, "hidden_size": 32},
    "biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "head_dim": 160},
}


@pytest.fixture(params=OWN, ids=[each.value for each in OWN])
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    """Each set that this CPU has."""
    each: KernelSet = request.param
    if each not in cpu_sets() or own_kernels(each) is None:
        pytest.skip(f"no compiler, or a CPU without {each.value}")
    return each


def model(changes: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Random weights whose scores are some units apart."""
    config = parse_model_config(BASE | CHANGES[changes], source="test", generation={})
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: (
            torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5)
            + (1.0 if name.endswith("norm.weight") else 0.0)
        ).bfloat16()
        for name, shape in weight_shapes(config).items()
    }
    return config, tensors


@pytest.fixture(params=[name for name, changes in CHANGES.items() if "num_hidden_layers" not in changes])
def made(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    return model(request.param)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, so that tasks are shared; the same result whoever takes them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Side:
    """One way of computing, over a region of its own."""

    def __init__(self, runner: TorchRunner, forward: type[TorchForward] | None, decoder: Decoder | None) -> None:
        spec = runner.kv_spec
        record = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * 2
        self.region_U8 = np.full(spec.num_layers * NUM_BLOCKS * record, 0xFF, dtype=np.uint8)
        runner.bind(self.region_U8, NUM_BLOCKS)
        self.forward: Forward
        if forward is None:
            assert runner._forward is not None
            self.forward = runner._forward
        else:
            assert decoder is not None
            self.forward = forward(decoder, KvPool(torch.from_numpy(self.region_U8), NUM_BLOCKS, spec))

    @torch.inference_mode()
    def score(self, *slices: SequenceSlice, sink: KvSink | None = None) -> torch.Tensor:
        """Of every row."""
        return self.forward.logits(self.output(*slices, every_row=True, sink=sink)).float().clone()

    @torch.inference_mode()
    def output(self, *slices: SequenceSlice, every_row: bool = False, sink: KvSink | None = None) -> torch.Tensor:
        """The last layer's."""
        return self.forward.forward(Batch(slices=slices, every_row=every_row), sink or NullSink()).clone()


class Listening:
    """A sink that hears of each layer."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def layer_done(self, layer: int) -> None:
        self.heard.append(layer)


def both(
    config: ModelConfig, tensors: dict[str, torch.Tensor], block_size: int, kernel_set: KernelSet
) -> tuple[Side, Side]:
    runner = TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=block_size)
    assert runner.arithmetic.startswith("compute kernels")
    return Side(runner, None, None), Side(
        TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=block_size),
        TorchForward,
        Decoder(config, tensors),
    )


def piece(number: int, tokens: list[int], start: int, stop: int) -> SequenceSlice:
    order = np.random.default_rng(11).permutation(NUM_BLOCKS)
    return SequenceSlice(
        key=RequestKey(request=RequestId(f"s{number}"), attempt=Attempt(0)),
        tokens=tokens,
        start=start,
        stop=stop,
        block_table=[BlockId(int(b)) for b in order[number * 32 : number * 32 + 32]],
        sample=True,
        output_index=0,
        params=GREEDY,
    )


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what rounding to 8 bits, some dozen times, explains; and no more than a few in all that far."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    error = (found - expected).abs() / expected.abs().max()
    assert error.max() < 0.06
    assert error.square().mean().sqrt() < 0.008


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(331), k=length)


@pytest.mark.parametrize("block_size", [1, 4, 16, 24])
def test_scores_are_those_of_torch(
    made: tuple[ModelConfig, dict[str, torch.Tensor]], block_size: int, kernel_set: KernelSet
) -> None:
    """Whole prompts, chunks behind a prefix and single tokens share steps; unused slots are NaN and stay unread."""
    native, plain = both(*made, block_size, kernel_set)
    length = min(32 * block_size, 300)
    a, b, c = text(length, 1), text(length, 2), text(length, 3)
    cut, late = length // 3, length - 3
    steps = [
        (piece(0, a, 0, length - 1), piece(1, b, 0, cut)),
        (piece(0, a, length - 1, length), piece(1, b, cut, late), piece(2, c, 0, 1)),
        (piece(2, c, 1, 3), piece(1, b, late, length)),
        (piece(2, c, 3, length),),
    ]
    for step in steps:
        assert_near(native.score(*step), plain.score(*step))


def test_the_kv_is_that_of_torch(made: tuple[ModelConfig, dict[str, torch.Tensor]], kernel_set: KernelSet) -> None:
    """The first layer's records, which no attention has gone into, are the same within a rounding; others untouched."""
    native, plain = both(*made, 16, kernel_set)
    native.score(piece(0, text(50, 1), 0, 50))
    plain.score(piece(0, text(50, 1), 0, 50))
    layers = [side.region_U8.view(np.int16).reshape(2, NUM_BLOCKS, -1)[0] for side in (native, plain)]
    values = [torch.from_numpy(layer).view(torch.bfloat16).float() for layer in layers]
    assert torch.equal(values[0].isnan(), values[1].isnan())
    assert_near(values[0].nan_to_num(), values[1].nan_to_num())


def test_a_row_does_not_depend_on_the_batch(kernel_set: KernelSet) -> None:
    """One token alone and among 40 others: the same bits, whichever thread computes which part."""
    native, _ = both(*model("many of 64"), 16, kernel_set)
    tokens = text(90, 1)
    native.score(piece(0, tokens, 0, 89))
    alone = native.score(piece(0, tokens, 89, 90))
    for others in (1, 5, 11, 12, 40):
        among = native.score(piece(1, text(60, 2), 0, others), piece(0, tokens, 89, 90))
        assert torch.equal(among[-1:], alone), others


def test_layers_at_once_are_each_in_two_calls(
    made: tuple[ModelConfig, dict[str, torch.Tensor]], kernel_set: KernelSet
) -> None:
    """Of two runners one goes through all layers in one call, one has a sink to tell of each and so makes two calls
    for it: the same bits, in scores and region."""
    config, tensors = made
    runners = [TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=16) for _ in range(2)]
    whole, heard = (Side(runner, None, None) for runner in runners)
    tokens, other, sink = text(70, 3), text(30, 4), Listening()
    for slices in (
        [piece(0, tokens, 0, 33), piece(1, other, 0, 20)],
        [piece(0, tokens, 33, 34), piece(1, other, 20, 21)],
        [piece(1, other, 21, 22)],
    ):
        scores = whole.score(*slices)
        assert torch.equal(scores, heard.score(*slices, sink=sink))
    assert sink.heard == 3 * [0, 1]
    assert np.array_equal(whole.region_U8, heard.region_U8)


def test_any_number_of_threads_and_layers(kernel_set: KernelSet) -> None:
    """More layers than are gone through at once, by one, two and five threads on however many cores: the same bits."""
    config, tensors = model("more layers than at once")
    tokens = text(40, 5)
    side = Side(TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=16), None, None)
    side.score(piece(0, tokens, 0, 30))
    expected = side.score(piece(0, tokens, 30, 31))
    for number in (1, 5):
        torch.set_num_threads(number)
        side.score(piece(0, tokens, 0, 30))
        assert torch.equal(side.score(piece(0, tokens, 30, 31)), expected), number
    steps = [piece(0, tokens, at, at + 1) for at in range(31, 40)]
    listened = [side.score(step, sink=Listening()) for step in steps]
    assert all(torch.equal(side.score(step), scores) for step, scores in zip(steps, listened, strict=True))


MIXED = (
    ((0, 0, 33, True), (1, 0, 20, False)),
    ((0, 33, 34, True), (1, 20, 21, False), (2, 0, 3, True)),
    ((0, 34, 35, True), (1, 21, 60, True), (2, 3, 5, False)),
    ((0, 35, 36, True), (2, 5, 261, False)),
    ((0, 36, 37, True), (2, 261, 264, True)),
    ((2, 264, 265, False),),
    ((2, 265, 266, True), (0, 37, 299, True), (1, 60, 316, True)),
)
"""Steps of (sequence, start, stop, whether it draws): decoding beside chunks that end, go on, or are one token; at the
end 262 rows, whose last task has six, then 256, whose last task is full."""


def test_rows_that_draw_are_those_of_a_whole_last_layer(
    made: tuple[ModelConfig, dict[str, torch.Tensor]], kernel_set: KernelSet
) -> None:
    """Of the last layer a step computes the rest for rows that draw alone: the same bits as when it does for all rows,
    in scores and region."""
    config, tensors = made
    few, every = (
        Side(TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=16), None, None)
        for _ in range(2)
    )
    texts = [text(320, seed) for seed in range(3)]
    for step in MIXED:
        slices = [
            replace(piece(number, texts[number], start, stop), sample=draws) for number, start, stop, draws in step
        ]
        rows = Batch(slices=tuple(slices)).drawing_rows
        assert torch.equal(few.output(*slices), every.output(*slices, every_row=True)[rows])
    assert np.array_equal(few.region_U8, every.region_U8)


@pytest.mark.parametrize("rows", [257, 258, 259, 260])
def test_the_last_row_of_a_short_task(rows: int, kernel_set: KernelSet) -> None:
    """A chunk's last rows are a task of one to four: the bits are those of the way which they would be computed in."""
    config, tensors = model("many of 64")
    few, every = (
        Side(TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=16), None, None)
        for _ in range(2)
    )
    prompt = piece(0, text(rows, 5), 0, rows)
    assert torch.equal(few.output(prompt), every.output(prompt, every_row=True)[-1:])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_draw_with_rounded_weights(bits: int, kernel_set: KernelSet) -> None:
    """Queries are other panels of a rounded matrix than keys and values, with other scales."""
    config, tensors = model("odd sizes")
    quantisation = {8: Quantisation.INT8, 4: Quantisation.INT4}[bits]
    few, every = (
        Side(
            TorchRunner(kernels=kernel_set, config=config, tensors=tensors, block_size=16, quantisation=quantisation),
            None,
            None,
        )
        for _ in range(2)
    )
    prompt = piece(0, text(70, 6), 0, 70)
    assert torch.equal(few.output(prompt), every.output(prompt, every_row=True)[-1:])
    assert np.array_equal(few.region_U8, every.region_U8)


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 24, 25, 47, 300])
@pytest.mark.parametrize(("outputs", "inner"), [(32, 16), (97, 51), (300, 1030)])
def test_products(rows: int, outputs: int, inner: int, kernel_set: KernelSet) -> None:
    """Rows in groups of every size, columns and inner dimensions that end within a panel: close to float64."""
    kernels = own_kernels(kernel_set)
    assert kernels is not None
    generator = torch.Generator().manual_seed(rows)
    x, w, b = (torch.randn(s, generator=generator).bfloat16() for s in ((rows, inner), (outputs, inner), (outputs,)))
    exact = x.double() @ w.double().T + b.double()
    packing = NativePacking(kernels, Workspace())
    product = packing.matmul("y", Linear(weight=w, bias=b))
    tolerance = 2.0**-8 * exact.abs().max()
    assert (product(x).double() - exact).abs().max() < tolerance
    out = torch.ones_like(product(x))
    kernels.linear(x, product.operand, out, epilogue=Epilogue.ADD, workspace=Workspace())
    assert (out.double() - exact - 1).abs().max() < 2 * tolerance
    up = Linear(weight=w.flip(0), bias=b.flip(0))
    found = packing.gated(Linear(weight=w, bias=b), up)(x).double()
    expected = torch.nn.functional.silu(exact) * exact.flip(1)
    assert (found - expected).abs().max() < 4 * 2.0**-8 * expected.abs().max()


@pytest.mark.parametrize("inner", [51, 1030])
def test_a_row_of_a_product_is_as_by_itself(inner: int, kernel_set: KernelSet) -> None:
    """Among as many rows as fill no group, one and several, and blocks of them: the same bits as alone."""
    kernels = own_kernels(kernel_set)
    assert kernels is not None
    generator = torch.Generator().manual_seed(inner)
    x, w = (torch.randn(s, generator=generator).bfloat16() for s in ((700, inner), (97, inner)))
    product = NativePacking(kernels, Workspace()).matmul("y", Linear(weight=w))
    alone = torch.cat([product(row[None]).clone() for row in x])
    for rows in (2, 7, 13, 16, 17, 31, 33, 48, 250, 700):
        assert torch.equal(product(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 8_192, 31_999])
def test_the_highest_score(columns: int, kernel_set: KernelSet) -> None:
    """Few values, so that nearly every row has ties: the first of the highest, as torch finds it in float32. A row
    with nothing above minus infinity has no token."""
    kernels = own_kernels(kernel_set)
    assert kernels is not None
    rows = torch.randint(-3, 4, (9, columns), generator=torch.Generator().manual_seed(columns)).bfloat16()
    rows[0] = -0.0
    rows[1, : columns // 2] = float("-inf")
    rows[2] = float("-inf")
    expected = [row.index(max(row)) for row in rows.float().tolist()]
    expected[2] = NO_TOKEN
    assert kernels.highest(rows).tolist() == expected


def test_the_barrier_knows_how_many_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told at the start: of eight cores a quota leaves one and a half, with two threads on which it may spin."""
    calls: list[tuple[str, tuple[object, ...]]] = []

    class Library:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def function(*arguments: object) -> int:
                calls.append((name, arguments))
                return 1

            return function

    handle: Any = Library()
    monkeypatch.setattr(kernels_module, "_library", lambda own: NativeLibrary(handle=handle, status="of the test"))
    monkeypatch.setattr(kernels_module, "own_cores", lambda: Cores(allowed=8, quota=1.5))
    assert own_kernels.__wrapped__(KernelSet.AVX512BF16) is not None
    assert calls == [("baton_kernels_cores", (2,))]


def test_a_set_that_is_missing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named set is that one or an error that says what there is; auto takes PyTorch's operations where none fits."""
    config, tensors = model("odd sizes")
    runner = partial(TorchRunner, config=config, tensors=tensors, block_size=16)
    monkeypatch.setattr(kernels_module, "cpu_sets", lambda: frozenset({KernelSet.AVX2, KernelSet.AVX512}))
    wanted = "engine.kernels is avx512bf16, which this CPU lacks: it has avx2, avx512$"
    with pytest.raises(UnsupportedModelError, match=wanted):
        runner(kernels=KernelSet.AVX512BF16)
    monkeypatch.setattr(kernels_module, "cpu_sets", frozenset)
    with pytest.raises(KernelSetMissing, match="it has none of them"):
        choose_kernels(KernelSet.NEON)
    found = runner()
    assert (found.kernel_set, found.kernels_why) == (
        KernelSet.TORCH,
        f"the compute kernels need {' or '.join(each.value for each in reversed(OWN))}, which this CPU lacks",
    )
    assert runner(kernels=KernelSet.TORCH).kernels_why == "engine.kernels names it"


SETS_OF_INTEL = frozenset({KernelSet.AVX2, KernelSet.AVX512, KernelSet.AVX512BF16})


@pytest.mark.parametrize(
    ("here", "slow_pairs", "rounded", "found"),
    [
        (SETS_OF_INTEL, True, False, KernelSet.AVX512),
        (SETS_OF_INTEL, False, False, KernelSet.AVX512BF16),
        (SETS_OF_INTEL | {KernelSet.AMX}, True, False, KernelSet.AMX),
        (SETS_OF_INTEL | {KernelSet.AMX}, True, True, KernelSet.AVX512),
        (SETS_OF_INTEL | {KernelSet.AMX}, False, True, KernelSet.AVX512BF16),
        (frozenset({KernelSet.AVX2}), False, True, KernelSet.AVX2),
        (frozenset({KernelSet.NEON, KernelSet.NEONBF16}), False, True, KernelSet.NEONBF16),
    ],
)
def test_auto_takes_what_is_fastest(
    here: frozenset[KernelSet], slow_pairs: bool, rounded: bool, found: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of bfloat16 are slow on Intel's CPUs and fast on AMD's; tiles multiply no rounded weights."""
    monkeypatch.setattr(kernels_module, "cpu_sets", lambda: here)
    monkeypatch.setattr(kernels_module, "pairs_are_slow", lambda: slow_pairs)
    monkeypatch.setattr(kernels_module, "own_kernels", lambda own: own)
    choice = choose_kernels(KernelSet.AUTO, rounded=rounded)
    assert choice.kernel_set is found


def test_auto_takes_the_next_set_where_the_best_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is too old for tiles: the set behind them is taken, and the choice says why."""
    monkeypatch.setattr(kernels_module, "cpu_sets", lambda: SETS_OF_INTEL | {KernelSet.AMX})
    monkeypatch.setattr(kernels_module, "pairs_are_slow", lambda: True)
    monkeypatch.setattr(kernels_module, "own_kernels", lambda own: None if own is KernelSet.AMX else own)
    monkeypatch.setattr(kernels_module, "_library", lambda own: NativeLibrary(handle=None, status="no tiles"))
    choice = choose_kernels(KernelSet.AUTO)
    assert choice.kernel_set is KernelSet.AVX512
    assert choice.why.endswith("; amx has no library: no tiles")


def test_without_a_compiler_auto_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No set can be built: PyTorch computes, and the choice names each set."""
    monkeypatch.setattr(kernels_module, "cpu_sets", lambda: frozenset({KernelSet.AVX2, KernelSet.AVX512}))
    monkeypatch.setattr(kernels_module, "own_kernels", lambda own: None)
    monkeypatch.setattr(kernels_module, "_library", lambda own: NativeLibrary(handle=None, status="no compiler"))
    choice = choose_kernels(KernelSet.AUTO)
    assert (choice.kernel_set, choice.kernels) == (KernelSet.TORCH, None)
    assert choice.why == ("no compute kernels: avx512 has no library: no compiler; avx2 has no library: no compiler")


def test_rounded_weights_where_tiles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best set that multiplies by them, and the choice says why it is not the one that was named."""
    monkeypatch.setattr(kernels_module, "cpu_sets", lambda: SETS_OF_INTEL | {KernelSet.AMX})
    monkeypatch.setattr(kernels_module, "pairs_are_slow", lambda: True)
    monkeypatch.setattr(kernels_module, "own_kernels", lambda own: own)
    choice = choose_kernels(KernelSet.AMX, rounded=True)
    assert (choice.kernel_set, choice.why) == (KernelSet.AVX512, "amx does not multiply by rounded weights")


def test_other_types_and_modes_stay_with_torch() -> None:
    """float32, and a deterministic runner of either type."""
    config, tensors = model("odd sizes")
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    runner = partial(TorchRunner, config=config, tensors=tensors, block_size=16)
    wide = replace(config, head_dim=258)
    for other in (runner(tensors=floats), runner(deterministic=True), runner(config=wide)):
        assert not other.arithmetic.startswith("compute kernels")


@pytest.mark.parametrize("block_size", [4, 24])
def test_without_kernels_pytorch_computes_in_float32(block_size: int) -> None:
    """A bfloat16 checkpoint by float32 operations over a region of bfloat16: near what its own type computes, in scores
    and records."""
    config, tensors = model("odd sizes")
    runner = TorchRunner(config=config, tensors=tensors, block_size=block_size, kernels=KernelSet.TORCH)
    assert runner.arithmetic == "PyTorch's operations (float32, K and V bfloat16)"
    assert runner.kv_spec.dtype == "bfloat16"
    wide, narrow = Side(runner, None, None), Side(runner, TorchForward, Decoder(config, tensors))
    tokens = text(60, 1)
    for step in (piece(0, tokens, 0, 40),), (piece(0, tokens, 40, 59), piece(1, tokens, 0, 1)):
        scores = wide.score(*step)
        assert_near(scores, narrow.score(*step))
    layers = [side.region_U8.view(np.int16).reshape(2, NUM_BLOCKS, -1)[0] for side in (wide, narrow)]
    first, second = (torch.from_numpy(layer).view(torch.bfloat16).float() for layer in layers)
    assert torch.equal(first.isnan(), second.isnan())
    assert_near(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize("draws", [True, False])
def test_a_layer_is_told_of_when_its_records_are_there(draws: bool, kernel_set: KernelSet) -> None:
    """What the region has of a layer when the sink hears of it is what it has at the end, in the last layer too, which
    most rows leave there."""
    runner = TorchRunner(kernels=kernel_set, config=model("odd sizes")[0], tensors=model("odd sizes")[1], block_size=16)
    side, seen = Side(runner, None, None), []

    class Looking:
        def layer_done(self, layer: int) -> None:
            seen.append((layer, side.region_U8.reshape(2, -1)[layer].copy()))

    side.output(replace(piece(0, text(70, 3), 0, 70), sample=draws), sink=Looking())
    assert [layer for layer, _ in seen] == [0, 1]
    for layer, records in seen:
        assert np.array_equal(records, side.region_U8.reshape(2, -1)[layer])
