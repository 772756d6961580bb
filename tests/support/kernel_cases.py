"""Random situations for the Triton kernels and the GPU attention backends, made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.gpu import kernels
from engine.kv_pool import KvPool
from engine.types import Batch, KvSpec, SamplingParams, SequenceSlice

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of the largest reference value: a few units of rounding of the type."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"

    @property
    def spec(self) -> KvSpec:
        return KvSpec(
            num_layers=2,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
        )

    def __str__(self) -> str:
        return f"{self.heads}-{self.kv_heads}-{self.head_dim}-{self.block_size}-{self.dtype}"


SHAPES = (
    Shape(heads=4, kv_heads=2, head_dim=64, block_size=16),
    Shape(heads=8, kv_heads=1, head_dim=128, block_size=16),
    Shape(heads=3, kv_heads=3, head_dim=80, block_size=5),
    Shape(heads=6, kv_heads=2, head_dim=10, block_size=3),
    Shape(heads=4, kv_heads=1, head_dim=64, block_size=16, dtype="float16"),
    Shape(heads=4, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16"),
    Shape(heads=2, kv_heads=1, head_dim=64, block_size=256, dtype="bfloat16"),
)


def poisoned_pool(shape: Shape, num_blocks: int) -> KvPool:
    """A pool of NaN: a kernel that reads a slot it should not shows it."""
    spec = shape.spec
    dtype = getattr(torch, shape.dtype)
    nbytes = spec.num_layers * num_blocks * 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * dtype.itemsize
    return KvPool(torch.full((nbytes,), 0xFF, dtype=torch.uint8), num_blocks, spec)


def random_batch(
    chance: random.Random, pool: KvPool, *, sequences: int, context_max: int, decode: bool = False
) -> Batch:
    """Sequences of uneven lengths over scattered blocks; those before `start` of each are to be filled by the caller.

    Half the lengths are at or next to a block's end. Every block belongs to one sequence.
    """
    size = pool.spec.block_size
    free = list(range(pool.num_blocks))
    chance.shuffle(free)
    slices = []
    for number in range(sequences):
        stop = chance.randint(1, context_max)
        if chance.random() < 0.5:
            stop = max(1, min(context_max, stop // size * size + chance.choice((-1, 0, 1))))
        start = stop - 1 if decode else chance.choice((0, stop - 1, chance.randrange(stop)))
        table = [BlockId(free.pop()) for _ in range(-(-stop // size) + chance.randrange(2))]
        slices.append(
            SequenceSlice(
                key=RequestKey(request=RequestId(f"r{number}"), attempt=Attempt(0)),
                tokens=[chance.randrange(50) for _ in range(stop)],
                start=start,
                stop=stop,
                block_table=table,
                sample=True,
                output_index=0,
                params=GREEDY,
            )
        )
    return Batch(slices=tuple(slices))


def fill(pool: KvPool, batch: Batch, generator: torch.Generator) -> None:
    """Random K and V for every token of every sequence, in all layers; slots past the end stay NaN."""
    spec = pool.spec
    for s in batch.slices:
        at_T = torch.arange(s.stop)
        blocks_T = torch.tensor(s.block_table)[at_T // spec.block_size]
        for layer in range(spec.num_layers):
            kv = torch.randn(2, s.stop, spec.num_kv_heads, spec.head_dim, generator=generator).to(pool.dtype)
            for half in range(2):
                pool.kv_LN2KSD[layer][blocks_T, half, :, at_T % spec.block_size] = kv[half]


def random_queries(pool: KvPool, shape: Shape, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch.num_tokens, shape.heads, shape.head_dim, generator=generator).to(pool.dtype)


def store(
    pool: KvPool, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor, blocks_T: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """K and V to their slots as they are: by the kernel that rotates, with angles of zero."""
    cos = torch.ones(len(k_TKD), pool.spec.head_dim // 2, dtype=pool.dtype, device=pool.device)
    kernels.rotate_and_store(pool, layer, k_TKD, k_TKD, v_TKD, (cos, torch.zeros_like(cos)), blocks_T, slots_T)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Equal but for rounding, and no NaN."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert torch.isfinite(found).all()
    error = (found.double() - wanted.double()).abs().max()
    limit = TOLERANCES[dtype] * float(wanted.double().abs().max())
    assert error <= limit, (float(error), limit)
