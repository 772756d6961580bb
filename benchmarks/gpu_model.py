"""The part of `benchmarks/gpu.py` about a model's speed: prefill, and decode with and without graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu_bench import Bench, blocks_of, config_of, decode_batch, random_weights, slice_of
from benchmarks.gpu_children import Figures
from benchmarks.gpu_engine import steps_through_the_engine
from engine.types import Batch, NullSink


def measure(bench: Bench, shape: str, limits: Mapping[str, float], figures: Figures) -> None:
    """Prefill of a long prompt, and decode steps with and without graphs, bare and through the engine."""
    config = config_of(shape)
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    prompt_len, rows, context = (24, 2, 20) if bench.tiny else (4096, 64, 1024)
    num_blocks = max(rows * blocks_of(context), blocks_of(prompt_len)) + 2
    weights = random_weights(config, dtype, bench.device)
    matrix_parameters = sum(t.numel() for name, t in weights.items() if t.dim() == 2 and "embed" not in name)
    weight_bytes = sum(t.numel() * t.element_size() for n, t in weights.items() if "embed" not in n)
    if config.tie_word_embeddings:
        weight_bytes += config.vocab_size * config.hidden_size * dtype.itemsize
    runner = bench.runner(config, weights, num_blocks, rows, 2 * context)
    del weights
    figures.add(attention=runner.describe())

    prompt = Batch(slices=(slice_of("prompt", [i % 61 for i in range(prompt_len)], 0, prompt_len, 0),))
    prefill_s = bench.time_s(lambda: runner.run(prompt, NullSink()))
    head_size = config.vocab_size * config.hidden_size if not config.tie_word_embeddings else 0
    flop = 2 * (matrix_parameters - head_size) * prompt_len
    # Causal attention: half of QK and PV over all pairs.
    flop += 2 * config.num_layers * config.num_heads * config.head_dim * prompt_len**2
    figures.add(prefill_tokens=prompt_len, prefill_tflops=flop / prefill_s / 1e12)
    if "matrix_tflops" in limits:
        figures.add(prefill_of_matrix_rate=flop / prefill_s / 1e12 / limits["matrix_tflops"])

    batch = decode_batch(rows, context)
    with_graphs_s = bench.time_s(lambda: runner.run(batch, NullSink()))
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * context * rows
    rate = (weight_bytes + kv_bytes) / with_graphs_s / 1e9
    figures.add(decode_rows=rows, decode_context=context, decode_gbytes_s=rate, steps_s_with_graphs=1 / with_graphs_s)
    if "copy_gbytes_s" in limits:
        figures.add(decode_of_copy_rate=rate / limits["copy_gbytes_s"])
    graphs, runner._graphs = runner._graphs, None
    figures.add(steps_s_without_graphs=1 / bench.time_s(lambda: runner.run(batch, NullSink())))
    runner._graphs = graphs
    figures.add(
        engine=steps_through_the_engine(
            runner, num_blocks, rows=rows, prompt_len=context // 2, tokens=8 if bench.tiny else 200
        )
    )
    figures.add(attention=runner.describe())
