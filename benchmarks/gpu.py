"""What the GPU path does, in one call: exactness, speed against measured limits of the same device, handoff, a trace.

    python -m benchmarks.gpu --out gpu.json --trace gpu-trace.json        (a GPU)
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --tiny      (the logic of it, without one)

Weights are random in the shapes of Qwen3-0.6B and Qwen3-8B. Each part that fails is reported as an error and the others
go on; a part that would begin after `--seconds-max` is left out and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from benchmarks import gpu_handoff, gpu_spill, gpu_weights
from benchmarks.gpu_card import card
from benchmarks.gpu_engine import steps_through_the_engine
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.graphs import Capture
from engine.gpu.runner import GpuRunner
from engine.model_config import ModelConfig, Quantisation, parse_model_config
from engine.models.weights import weight_shapes
from engine.torch_runner import TorchRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1 << 20, ignore_eos=True)
SHAPES = {
    "tiny": (2, 32, 48, 4, 2, 16, 61, True),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151_936, True),
    "qwen3-8b": (36, 4096, 12_288, 32, 8, 128, 151_936, False),
}


def config_of(shape: str) -> ModelConfig:
    layers, hidden, inner, heads, kv_heads, head_dim, vocab, tied = SHAPES[shape]
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": tied, "eos_token_id": None, "dtype": "bfloat16",
    }  # fmt: skip
    return parse_model_config(values, source=shape, generation={})


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Made on the device: 8B parameters would take minutes to make on the host and to copy."""
    generator = torch.Generator(device=device).manual_seed(1)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        tensor = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = tensor * 0.1 + 1 if len(shape) == 1 else tensor * shape[1] ** -0.5
    return tensors


def slice_of(name: str, tokens: list[int], start: int, stop: int, first_block: int) -> SequenceSlice:
    return SequenceSlice(
        key=RequestKey(request=RequestId(name), attempt=Attempt(0)),
        tokens=tokens,
        start=start,
        stop=stop,
        block_table=[BlockId(first_block + i) for i in range(-(-len(tokens) // BLOCK_SIZE))],
        sample=True,
        output_index=0,
        params=GREEDY,
    )


def blocks_of(context: int) -> int:
    """Of one sequence, with room for a token more."""
    return -(-(context + 1) // BLOCK_SIZE)


def decode_batch(rows: int, context: int) -> Batch:
    """Sequences side by side in the region, each about to compute the last token of its context."""
    tokens = [j % 61 for j in range(context)]
    return Batch(
        slices=tuple(slice_of(f"d{i}", tokens, context - 1, context, i * blocks_of(context)) for i in range(rows))
    )


class Bench:
    def __init__(self, *, device: str, tiny: bool, trace: Path | None) -> None:
        self.device = torch.device(device)
        self.tiny = tiny
        self.trace = trace
        self.repeats = 1 if tiny else 10
        self.capture: Capture | None = None
        if self.device.type != "cuda":
            from tests.gpu_models import FakeCapture

            self.capture = FakeCapture()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_s(self, run: Callable[[], object]) -> float:
        """Median of some runs, after one that is not counted."""
        run()
        times = []
        for _ in range(self.repeats):
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def region(self, runner: GpuRunner | TorchRunner, num_blocks: int) -> torch.Tensor:
        spec = runner.kv_spec
        per_block = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * getattr(torch, spec.dtype).itemsize
        return torch.zeros(spec.num_layers * num_blocks * per_block, dtype=torch.uint8, device=self.device)

    def runner(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        num_blocks: int,
        rows_max: int,
        context_max: int,
        quantisation: Quantisation = Quantisation.NONE,
    ) -> GpuRunner:
        graphs = GraphConfig(graph_rows_max=rows_max, graph_context_max=context_max)
        runner = GpuRunner(
            config=config, tensors=weights, block_size=BLOCK_SIZE, device=self.device,
            quantisation=quantisation, gpu=GpuConfig(graphs=graphs), capture=self.capture,
        )  # fmt: skip
        runner.bind_tensor(self.region(runner, num_blocks), num_blocks)
        runner.warm_up(BlockId(num_blocks - 1))
        return runner

    # --- parts -------------------------------------------------------------------------------------------------------

    def limits(self) -> dict[str, float]:
        """What the device does at best: a large matrix product, and a copy within its memory (read and written)."""
        side = 64 if self.tiny else 8192
        dtype = torch.float32 if self.tiny else torch.bfloat16
        a = torch.randn(side, side, device=self.device, dtype=dtype)
        b = torch.randn(side, side, device=self.device, dtype=dtype)
        matrix_s = self.time_s(lambda: a @ b)
        source = torch.empty((1 << 20) if self.tiny else (4 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.time_s(lambda: target.copy_(source))
        return {"matrix_tflops": 2 * side**3 / matrix_s / 1e12, "copy_gbytes_s": 2 * len(source) / copy_s / 1e9}

    def exactness(self) -> dict[str, Any]:
        """float32: greedy tokens equal to the torch runner's on the CPU; bfloat16: scores against float32's."""
        config = config_of("tiny")
        torch.backends.cuda.matmul.allow_tf32 = False
        weights = {name: tensor.cpu() for name, tensor in random_weights(config, torch.float32, self.device).items()}
        gpu, num_blocks = self.runner(config, weights, 64, 4, 256), 64
        reference = TorchRunner(config=config, tensors=weights, block_size=BLOCK_SIZE)
        reference.bind(self.region(reference, num_blocks).cpu().numpy(), num_blocks)
        answers = []
        count = 4 if self.tiny else 64
        for runner in (gpu, reference):
            tokens = [(7 * i) % 61 for i in range(37)]
            start = 0
            for _ in range(count):
                s = slice_of("exact", tokens, start, len(tokens), 3)
                start = len(tokens)
                tokens.append(runner.run(Batch(slices=(s,)), NullSink()).sampled[s.key])
            answers.append(tokens)
        half = self.runner(config, {n: t.to(torch.bfloat16) for n, t in weights.items()}, 64, 0, 256)
        prompt = slice_of("logits", answers[1], 0, len(answers[1]), 3)
        wanted = reference.score(Batch(slices=(prompt,)), NullSink())
        found = half.score(Batch(slices=(prompt,)), NullSink()).cpu().float()
        return {
            "float32_tokens_equal": answers[0] == answers[1],
            "float32_tokens": count,
            "bfloat16_error_of_largest": float((found - wanted).abs().max() / wanted.abs().max()),
            "attention": gpu.describe(),
        }

    def model(self, shape: str, limits: dict[str, float]) -> dict[str, Any]:
        """Prefill of a long prompt, and decode steps with and without graphs."""
        config = config_of(shape)
        dtype = torch.float32 if self.tiny else torch.bfloat16
        prompt_len, rows, context = (24, 2, 20) if self.tiny else (4096, 64, 1024)
        num_blocks = max(rows * blocks_of(context), blocks_of(prompt_len)) + 2
        weights = random_weights(config, dtype, self.device)
        matrix_parameters = sum(t.numel() for name, t in weights.items() if t.dim() == 2 and "embed" not in name)
        weight_bytes = sum(t.numel() * t.element_size() for n, t in weights.items() if "embed" not in n)
        if config.tie_word_embeddings:
            weight_bytes += config.vocab_size * config.hidden_size * dtype.itemsize
        runner = self.runner(config, weights, num_blocks, rows, 2 * context)
        del weights

        prompt = Batch(slices=(slice_of("prompt", [i % 61 for i in range(prompt_len)], 0, prompt_len, 0),))
        prefill_s = self.time_s(lambda: runner.run(prompt, NullSink()))
        head_size = config.vocab_size * config.hidden_size if not config.tie_word_embeddings else 0
        flop = 2 * (matrix_parameters - head_size) * prompt_len
        # Causal attention: half of QK and PV over all pairs.
        flop += 2 * config.num_layers * config.num_heads * config.head_dim * prompt_len**2

        batch = decode_batch(rows, context)
        with_graphs_s = self.time_s(lambda: runner.run(batch, NullSink()))
        graphs, runner._graphs = runner._graphs, None
        without_s = self.time_s(lambda: runner.run(batch, NullSink()))
        runner._graphs = graphs
        engine = steps_through_the_engine(
            runner, num_blocks, rows=rows, prompt_len=context // 2, tokens=8 if self.tiny else 200
        )
        kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * context * rows
        moved = weight_bytes + kv_bytes
        return {
            "prefill_tokens": prompt_len,
            "prefill_tflops": flop / prefill_s / 1e12,
            "prefill_of_matrix_rate": flop / prefill_s / 1e12 / limits["matrix_tflops"],
            "decode_rows": rows,
            "decode_context": context,
            "decode_gbytes_s": moved / with_graphs_s / 1e9,
            "decode_of_copy_rate": moved / with_graphs_s / 1e9 / limits["copy_gbytes_s"],
            "steps_s_with_graphs": 1 / with_graphs_s,
            "steps_s_without_graphs": 1 / without_s,
            "engine": engine,
            "attention": runner.describe(),
        }

    def weights(self, shape: str, limits: dict[str, float]) -> dict[str, Any]:
        """Weights in 16, 8 and 4 bits: see benchmarks/gpu_weights.py."""
        config = config_of(shape)
        prompt_len, rows, context = (24, (1, 2), 20) if self.tiny else (64, (1, 16, 64), 1024)
        return gpu_weights.measure(
            self,
            config,
            random_weights(config, torch.bfloat16, self.device),
            limits,
            decode=decode_batch,
            prompt=Batch(slices=(slice_of("prompt", [7 * i % 61 for i in range(prompt_len)], 0, prompt_len, 0),)),
            rows=rows,
            context=context,
        )

    def handoff(self) -> dict[str, Any]:
        """What a handoff to another process costs: see benchmarks/gpu_handoff.py."""
        return gpu_handoff.measure(self)

    def spill(self) -> dict[str, Any]:
        """Blocks to host memory and back: see benchmarks/gpu_spill.py."""
        return gpu_spill.measure(self)

    def overlap_trace(self) -> dict[str, Any]:
        """A handoff under torch's profiler, in the format that Perfetto opens."""
        if self.trace is None:
            return {"skipped": "no --trace"}
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.handoff()
        profile.export_chrome_trace(str(self.trace))
        return {"file": str(self.trace), "bytes": self.trace.stat().st_size}


def run_all(bench: Bench, seconds_max: float) -> dict[str, Any]:
    """Every part's figures, or what kept it from having any."""
    begin = time.monotonic()
    device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu, interpreted"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": sys.version.split()[0]}
    shapes = ["tiny"] if bench.tiny else ["qwen3-0.6b", "qwen3-8b"]
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("limits", bench.limits),
        ("exactness", bench.exactness),
        ("handoff", bench.handoff),
        ("card", lambda: card(bench.device.type)),
        ("spill", bench.spill),
        *((shape, lambda shape=shape: bench.model(shape, results["limits"])) for shape in shapes),
        ("trace", bench.overlap_trace),
        ("weights", lambda: bench.weights(shapes[-1], results["limits"])),
    ]
    for name, part in parts:
        if time.monotonic() - begin > seconds_max:
            results[name] = {"skipped": f"{seconds_max:g} s are over"}
            continue
        started = time.monotonic()
        try:
            with torch.inference_mode():
                results[name] = part()
        except Exception as error:
            # One part's failure must not cost the figures of the others: a machine is lent for minutes.
            import traceback

            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        results[name]["part_s"] = time.monotonic() - started
        print(name, json.dumps(results[name]), flush=True)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a few milliseconds of work: the logic only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seconds-max", type=float, default=420)
    arguments = parser.parse_args()
    bench = Bench(device=arguments.device, tiny=arguments.tiny, trace=arguments.trace)
    results = run_all(bench, arguments.seconds_max)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(isinstance(part, dict) and "error" in part for part in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
