"""Run in a process of its own, without Triton's interpreter: compile every kernel to machine code, without a GPU.

The package's own functions are called with tensors in host memory. What they would launch is compiled as a launch on
such a device compiles it, types, alignment, specialised values and all, and not launched.

    python -m tests.support.compile_kernels CAPABILITY    (90: Hopper; prints a line of JSON for each kernel)
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.gpu import kernels, linears
from engine.kv_pool import KvPool
from engine.types import KvSpec, SamplingParams, SequenceSlice
from kvtransfer.device.cuda_streams import copy_records
from kvtransfer.transport import WriteOps

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)
TOKENS = (1, 16, 17)
"""Triton looks at numbers for 1 and for multiples of 16."""


class NoDevice:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching() -> None:
    """From now on each launch of a kernel prints what it was compiled to. A kernel is compiled once a variant."""
    run = JITFunction.run
    seen: set[int] = set()

    @functools.wraps(run)
    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = run(self, *arguments, grid=grid, warmup=True, **named)
        if id(made) not in seen:
            seen.add(id(made))
            facts = {"kernel": self.fn.__name__, "cubin_bytes": len(made.asm["cubin"]), "shared": made.metadata.shared}
            print(json.dumps(facts), flush=True)
        return made

    JITFunction.run = compiled


def pool_of(heads: int, head_dim: int, dtype: str, num_blocks: int = 32, block_size: int = 16) -> KvPool:
    spec = KvSpec(num_layers=2, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    nbytes = 2 * num_blocks * 2 * heads * block_size * head_dim * getattr(torch, dtype).itemsize
    return KvPool(torch.zeros(nbytes, dtype=torch.uint8), num_blocks, spec)


def attention(pool: KvPool, group: int) -> None:
    """What one layer launches, in steps of a few sizes."""
    spec = pool.spec
    heads = group * spec.num_kv_heads
    for tokens in TOKENS:
        # As a joined projection gives them: rows that are not next to each other.
        qkv = torch.zeros(tokens, heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=pool.dtype)
        q_THD, k_TKD, v_TKD = torch.split(qkv, [heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        angles = (torch.zeros(tokens, spec.head_dim // 2, dtype=pool.dtype),) * 2
        where_T = torch.zeros(tokens, dtype=torch.int64)
        kernels.rotate_and_store(pool, 1, q_THD, k_TKD, v_TKD, angles, where_T, where_T)
        q_BHD = torch.zeros(tokens, heads, spec.head_dim, dtype=pool.dtype)
        tables_BM = torch.zeros(tokens, tokens, dtype=torch.int32)
        for num_splits in (1, kernels.SPLITS_MAX):
            kernels.decode(pool, 1, q_BHD, tables_BM, torch.ones(tokens, dtype=torch.int32), num_splits)
    prompt = SequenceSlice(
        key=RequestKey(request=RequestId("prompt"), attempt=Attempt(0)),
        tokens=[0] * 20,
        start=0,
        stop=20,
        block_table=[BlockId(i) for i in range(-(-20 // spec.block_size))],
        sample=False,
        output_index=0,
        params=GREEDY,
    )
    kernels.gather(pool, 1, kernels.plan_gather(pool, [prompt]))


def products(capability: int) -> None:
    x_TX = torch.zeros(16, 256, dtype=torch.bfloat16)
    if capability >= 89:  # older ones have no 8-bit floats
        linears.scale_rows(x_TX, 256, linears.FP8)
    product = linears.Int4Matmul.pack(torch.zeros(64, 256, dtype=torch.bfloat16))
    for rows in (1, 17, 64):
        product.by_tiles(torch.zeros(rows, 256, dtype=torch.bfloat16))


def copies() -> None:
    memory_U8 = torch.zeros(4096, dtype=torch.uint8)
    for nbytes in (64, 63):  # in words of 8 bytes, and byte by byte
        for count in TOKENS:
            at = np.zeros(count, dtype=np.int64)
            copy_records(memory_U8, memory_U8, WriteOps(src=at, dst=at, nbytes=np.full(count, nbytes, np.int64)))


def main(capability: int) -> None:
    driver.set_active(NoDevice(capability))
    assert not kernels.interpreted(), "TRITON_INTERPRET is set: nothing would be compiled"
    compile_instead_of_launching()
    attention(pool_of(2, 128, "bfloat16"), group=4)
    attention(pool_of(3, 10, "float32", block_size=3), group=2)
    products(capability)
    copies()


if __name__ == "__main__":
    main(int(sys.argv[1]))
