"""What the parts of `benchmarks/gpu.py` have in common: models of random weights, batches, runners, timing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.graphs import Capture
from engine.gpu.runner import GpuRunner
from engine.model_config import ModelConfig, Quantisation, parse_model_config, weight_shapes
from engine.runner import TorchRunner
from engine.types import Batch, SamplingParams, SequenceSlice

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1 << 20, ignore_eos=True)
SHAPES = {
    "tiny": (2, 32, 48, 4, 2, 16, 61, True),
    "exact": (2, 128, 192, 8, 2, 128, 61, True),
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
    def __init__(self, *, device: str, tiny: bool) -> None:
        self.device = torch.device(device)
        self.tiny = tiny
        self.repeats = 1 if tiny else 10
        self.capture: Capture | None = None
        if self.device.type != "cuda":
            from tests.support.gpu_models import FakeCapture

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

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def region_bytes(self, runner: GpuRunner | TorchRunner, num_blocks: int) -> int:
        spec = runner.kv_spec
        per_block = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * getattr(torch, spec.dtype).itemsize
        return int(spec.num_layers * num_blocks * per_block)

    def runner(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        num_blocks: int,
        rows_max: int,
        context_max: int,
        quantisation: Quantisation = Quantisation.NONE,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> GpuRunner:
        """Bound and warmed up. `allocate` gives the region's memory; by default it is torch's."""
        graphs = GraphConfig(graph_rows_max=rows_max, graph_context_max=context_max)
        runner = GpuRunner(
            config=config, tensors=weights, block_size=BLOCK_SIZE, device=self.device,
            quantisation=quantisation, gpu=GpuConfig(graphs=graphs), capture=self.capture,
        )  # fmt: skip
        runner.bind((allocate or self.zeros)(self.region_bytes(runner, num_blocks)), num_blocks)
        runner.warm_up(BlockId(num_blocks - 1))
        return runner

    def free(self) -> None:
        """Memory of what is no longer referred to goes back to the device. Runners with graphs are held by cycles."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
