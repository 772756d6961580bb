"""What the GPU path does, in one call: exactness, speed against measured limits of the same device, handoff, a trace.

    python -m benchmarks.gpu --out gpu.json --trace gpu-trace.json        (a GPU)
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --tiny      (the logic of it, without one)

Weights are random in the shapes of Qwen3-0.6B and Qwen3-8B. Each part that fails is reported as an error and the others
go on; a part that would begin after `--seconds-max` is left out and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.ids import Attempt, BlockId, Epoch, GrantId, Pair, RequestId, RequestKey
from benchmarks.gpu_engine import steps_through_the_engine
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.graphs import Capture
from engine.gpu.runner import GpuRunner
from engine.model_config import ModelConfig, parse_model_config
from engine.models.weights import weight_shapes
from engine.torch_runner import TorchRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice

ROOT = Path(__file__).parent.parent
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
        self, config: ModelConfig, weights: dict[str, torch.Tensor], num_blocks: int, rows_max: int, context_max: int
    ) -> GpuRunner:
        graphs = GraphConfig(graph_rows_max=rows_max, graph_context_max=context_max)
        runner = GpuRunner(
            config=config, tensors=weights, block_size=BLOCK_SIZE, device=self.device,
            gpu=GpuConfig(graphs=graphs), capture=self.capture,
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
        per_sequence = -(-(context + 1) // BLOCK_SIZE)
        num_blocks = max(rows * per_sequence, -(-prompt_len // BLOCK_SIZE)) + 2
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

        slices = tuple(
            slice_of(f"d{i}", [j % 61 for j in range(context)], context - 1, context, i * per_sequence)
            for i in range(rows)
        )
        with_graphs_s = self.time_s(lambda: runner.run(Batch(slices=slices), NullSink()))
        graphs, runner._graphs = runner._graphs, None
        without_s = self.time_s(lambda: runner.run(Batch(slices=slices), NullSink()))
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

    def handoff(self) -> dict[str, Any]:
        """Layer by layer over cuda_ipc into another process, beside a chain of matrix products: what it costs those.

        `exposed_ms`: the products with the copies less those without. `sealed_ms`: from the end of the last product
        to the receiver's word that the seal has arrived.
        """
        command = [sys.executable, "-m", "benchmarks.gpu_receiver", self.device.type]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        ) as receiver:
            try:
                return asyncio.run(self._hand_over(receiver))
            finally:
                receiver.kill()

    async def _hand_over(self, receiver: subprocess.Popen[str]) -> dict[str, Any]:
        from benchmarks.gpu_receiver import GRANT, PAIR, REGION_BYTES, endpoint_from, make_driver
        from kvtransfer.device.region import DeviceRegion
        from kvtransfer.transport import Seal, WriteOps
        from kvtransfer.transports.cuda_ipc import CudaIpcWriterLink

        assert receiver.stdin is not None
        assert receiver.stdout is not None
        endpoint = endpoint_from(json.loads(await asyncio.to_thread(receiver.stdout.readline)))
        loop, driver, events = asyncio.get_running_loop(), make_driver(self.device.type), _Events()
        source = DeviceRegion(driver, REGION_BYTES, "bench-source")
        link = await CudaIpcWriterLink.connect_device(endpoint, PAIR, source, events, loop, driver)
        layers, records, record_bytes = (2, 4, 4096) if self.tiny else (28, 256, 65_536)
        side = 64 if self.tiny else 4096
        dtype = torch.float32 if self.tiny else torch.bfloat16
        a = torch.randn(side, side, device=self.device, dtype=dtype)

        def layer_ops(layer: int) -> WriteOps:
            at = (layer * records + np.arange(records, dtype=np.int64)) * record_bytes
            return WriteOps(src=at, dst=at, nbytes=np.full(records, record_bytes, dtype=np.int64))

        def compute(grant: GrantId | None) -> float:
            self.synchronize()
            begin = time.perf_counter()
            for layer in range(layers):
                for _ in range(4):
                    torch.mm(a, a)
                if grant is not None:
                    link.post(grant, layer_ops(layer))
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return time.perf_counter() - begin

        compute(None)
        alone_s, beside_s, sealed_s = [], [], []
        for number in range(self.repeats):
            alone_s.append(await asyncio.to_thread(compute, None))
            grant = GrantId(GRANT[:-1] + bytes([number]))
            expected = len(events.completed) + layers
            beside_s.append(await asyncio.to_thread(compute, grant))
            ended = time.perf_counter()
            await events.until(expected)
            link.seal(
                Seal(
                    grant=grant, epoch=Epoch(1), writes=layers * records, bytes_written=layers * records * record_bytes
                )
            )
            await asyncio.to_thread(receiver.stdout.readline)
            sealed_s.append(time.perf_counter() - ended)
        await link.close()
        source.close()
        return {
            "mbytes": layers * records * record_bytes / 1e6,
            "alone_ms": 1e3 * statistics.median(alone_s),
            "exposed_ms": 1e3 * (statistics.median(beside_s) - statistics.median(alone_s)),
            "sealed_ms": 1e3 * statistics.median(sealed_s),
        }

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


class _Events:
    def __init__(self) -> None:
        self.completed: list[GrantId] = []
        self._changed = asyncio.Event()

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        self.completed.append(grant)
        self._changed.set()

    def writes_adrift(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        raise AssertionError(f"the receiver of the benchmark is gone: {reason}")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.completed) < count:
                self._changed.clear()
                await self._changed.wait()


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
        *((shape, lambda shape=shape: bench.model(shape, results["limits"])) for shape in shapes),
        ("trace", bench.overlap_trace),
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
