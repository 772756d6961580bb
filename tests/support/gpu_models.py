"""Small random models for the GPU runner's tests, and a stand-in for the capture of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tests.support.triton_interpreter  # noqa: F401  # before anything that imports the kernels
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.gpu.graphs import Capture
from engine.model_config import ModelConfig, parse_model_config, weight_shapes
from engine.types import SamplingParams, SequenceSlice

BLOCK_SIZE = 4
NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
DRAWN = SamplingParams(temperature=0.8, top_k=0, top_p=1.0, seed=7, max_tokens=64, logprobs=2)


def tiny_config() -> ModelConfig:
    """Qwen3 in small: grouped heads, norms of queries and keys, tied embeddings."""
    return parse_model_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 61,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 100.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "eos_token_id": None,
            "dtype": "float32",
        },
        source="test",
        generation={},
    )


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * 2.5 / shape[1] ** 0.5
    return tensors


class FakeCapture(Capture):
    """Captures by remembering what to compute; its graphs share their memory, as those of one pool do."""

    def __init__(self) -> None:
        self.captured = 0
        self._outs: list[torch.Tensor] = []

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with NoLooking():  # type: ignore[no-untyped-call]
            out = compute().clone()
        self.captured += 1
        self._outs.append(out)

        def replay() -> torch.Tensor:
            for other in self._outs:
                other.fill_(float("nan"))
            with NoLooking():  # type: ignore[no-untyped-call]
                out.copy_(compute())
            return out

        return replay


class NoLooking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a captured computation, or a launch, may not do: take a value, or a shape that hangs on values, to
    the host."""

    REFUSED = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func.name().split(".")[0] not in self.REFUSED, f"{func} looks at a value"
        if "index" in func.name() and len(args) > 1 and isinstance(args[1], (list, tuple)):
            masks = [each for each in args[1] if isinstance(each, torch.Tensor) and each.dtype == torch.bool]
            assert not masks, f"{func} by a mask looks at its values"
        return func(*args, **(kwargs or {}))


class Sequence:
    """A sequence as a scheduler would keep it."""

    def __init__(self, number: int, tokens: list[int], table: list[BlockId], params: SamplingParams) -> None:
        self.key = RequestKey(request=RequestId(f"r{number}"), attempt=Attempt(0))
        self.tokens, self.table, self.params = tokens, table, params
        self.prompt_len, self.computed = len(tokens), 0

    def slice(self, count: int | None = None) -> SequenceSlice:
        stop = len(self.tokens) if count is None else min(len(self.tokens), self.computed + count)
        return SequenceSlice(
            key=self.key,
            tokens=tuple(self.tokens),
            start=self.computed,
            stop=stop,
            block_table=tuple(self.table),
            sample=stop == len(self.tokens),
            output_index=len(self.tokens) - self.prompt_len,
            params=self.params,
        )
