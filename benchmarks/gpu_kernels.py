"""The part of `benchmarks/gpu.py` about single kernels: compiled for this device, against torch on the CPU.

Random cases of the tests, with longer contexts: several tiles and several splits, head dimensions that are no powers of
two, blocks of uneven size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_children import Figures
from engine.attention import TorchAttention
from engine.gpu import kernels, linears
from engine.gpu.attention import ERROR_MAX
from engine.gpu.linears import Int4Matmul
from engine.kv_pool import KvPool
from engine.models.decoder import rotary_angles, rotate
from engine.types import Batch
from kvtransfer.device.cuda_streams import copy_records
from kvtransfer.transport import WriteOps
from tests.support.kernel_cases import SHAPES, Shape, fill, poisoned_pool, random_batch, random_queries, store

Compared = tuple[str, str, torch.Tensor, torch.Tensor, float]
"""What was run, on which type; found, wanted, and by how much of the largest wanted value they may differ."""
CASES_OF_A_SHAPE = 2


def measure(bench: Bench, figures: Figures) -> None:
    """`errors`: the largest difference of each kernel and type, of the largest value; `wrong`: what is off by more than
    is allowed, or was not run. `agree`: all were run and nothing is wrong."""
    errors: dict[str, float] = {}
    wrong: list[str] = []
    cases = 0
    works: list[tuple[str, Callable[[], Iterator[Compared]]]] = [
        *(
            (f"{shape}, seed {seed}", lambda shape=shape, seed=seed: _attention(bench, shape, seed))
            for shape in (SHAPES[3:5] if bench.tiny else SHAPES)
            for seed in range(1 if bench.tiny else CASES_OF_A_SHAPE)
        ),
        ("copies", lambda: _copies(bench)),
        ("rows", lambda: _rows(bench)),
        ("4 bits", lambda: _four_bits(bench)),
    ]
    for where, work in works:
        try:
            for name, dtype, found, wanted, allowed in work():
                error = _error(found.cpu(), wanted)
                at = f"{name} {dtype}"
                errors[at] = max(errors.get(at, 0.0), error, key=lambda e: (e != e, e))  # a NaN is the largest
                cases += 1
                if not error <= allowed:
                    wrong.append(f"{at}, {where}: off by {error:.1e}, {allowed:.0e} is allowed")
        except Exception as failure:
            # A kernel that cannot be compiled or launched: the next one may be.
            wrong.append(f"{where}: {type(failure).__name__}: {str(failure)[:300]}")
        figures.add(agree=False, cases=cases, errors=errors, wrong=wrong)
    figures.add(agree=not wrong)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the largest wanted value; of numbers that are not compared by value, how many differ."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not wanted.is_floating_point():
        return float((found != wanted).sum())
    largest = wanted.double().abs().max()
    return float((found.double() - wanted.double()).abs().max() / largest)


def _attention(bench: Bench, shape: Shape, seed: int) -> Iterator[Compared]:
    """What a layer launches, for a batch of uneven prompts and for one of single tokens."""
    device, dtype, allowed = bench.device, shape.dtype, ERROR_MAX[shape.dtype]
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    context_max, sequences = (200, 2) if bench.tiny else (900, 5)
    num_blocks = sequences * (-(-context_max // shape.block_size) + 1)
    kept = poisoned_pool(shape, num_blocks)
    batch = random_batch(chance, kept, sequences=sequences, context_max=context_max, decode=True)
    fill(kept, batch, generator)
    pool = _on(device, kept, shape)
    q_BHD = random_queries(kept, shape, batch, generator)
    tables_BM = torch.zeros(sequences, -(-context_max // shape.block_size) + 1, dtype=torch.int32)
    for row, s in enumerate(batch.slices):
        tables_BM[row, : len(s.block_table)] = torch.tensor(s.block_table)
    contexts_B = torch.tensor([s.stop for s in batch.slices], dtype=torch.int32)
    wanted = _reference(kept, shape, batch, q_BHD)
    for splits in (1, 3, 8):
        found = kernels.decode(pool, 1, q_BHD.to(device), tables_BM.to(device), contexts_B.to(device), splits)
        yield "decode", dtype, found, wanted, allowed

    k_CKD, v_CKD = kernels.gather(pool, 1, kernels.plan_gather(pool, batch.slices))
    at_C = torch.cat([torch.arange(s.stop) for s in batch.slices])
    blocks_C = torch.cat([torch.tensor(s.block_table)[torch.arange(s.stop) // shape.block_size] for s in batch.slices])
    for half, found in enumerate((k_CKD, v_CKD)):
        yield "gather", dtype, _bits(found), _bits(kept.kv_LN2KSD[1][blocks_C, half, :, at_C % shape.block_size]), 0.0

    yield from _stores(bench, shape, random_batch(chance, kept, sequences=2, context_max=context_max), generator)


def _stores(bench: Bench, shape: Shape, batch: Batch, generator: torch.Generator) -> Iterator[Compared]:
    device, dtype, allowed = bench.device, shape.dtype, ERROR_MAX[shape.dtype]
    num_blocks = 1 + max(block for s in batch.slices for block in s.block_table)
    kept = poisoned_pool(shape, num_blocks)
    pool = _on(device, kept, shape)
    where = kept.map_slots(batch)
    at = (where.blocks_T.to(device), where.slots_T.to(device))
    q_THD = random_queries(kept, shape, batch, generator)
    kv = torch.randn(2, batch.num_tokens, shape.kv_heads, shape.head_dim, generator=generator).to(kept.dtype)
    positions_T = torch.cat([torch.arange(s.start, s.stop) for s in batch.slices])
    angles = rotary_angles(positions_T, torch.rand(shape.head_dim // 2, generator=generator), dtype=kept.dtype)
    near = (angles[0].to(device), angles[1].to(device))
    turned = kernels.rotate_and_store(pool, 0, q_THD.to(device), kv[0].to(device), kv[1].to(device), near, *at)
    wide = (angles[0].float(), angles[1].float())
    yield "turned queries", dtype, turned, rotate(q_THD.float(), *wide), allowed
    found = pool.kv_LN2KSD.cpu()[0][where.blocks_T, :, :, where.slots_T]
    yield "turned keys", dtype, found[:, 0], rotate(kv[0].float(), *wide), allowed
    yield "stored values", dtype, _bits(found[:, 1]), _bits(kv[1]), 0.0
    store(pool, 1, kv[0].to(device), kv[1].to(device), *at)
    for half in range(2):
        kept.kv_LN2KSD[1][where.blocks_T, half, :, where.slots_T] = kv[half]
    yield "store", dtype, _bits(pool.kv_LN2KSD[1]), _bits(kept.kv_LN2KSD[1]), 0.0


def _copies(bench: Bench) -> Iterator[Compared]:
    chance = np.random.default_rng(1)
    for unit, name in ((8, "words"), (1, "bytes")):
        source = torch.from_numpy(chance.integers(0, 256, 1 << 20, dtype=np.uint8))
        count = 50
        starts = chance.permutation(64)[:count].astype(np.int64) * (1 << 14)
        nbytes = chance.integers(1, (1 << 14) // unit, count).astype(np.int64) * unit
        ops = WriteOps(src=chance.permutation(starts), dst=starts, nbytes=nbytes)
        found = torch.zeros_like(source, device=bench.device)
        copy_records(found, source.to(bench.device), ops)
        wanted = torch.zeros_like(source)
        for a, b, n in zip(ops.src.tolist(), starts.tolist(), nbytes.tolist(), strict=True):
            wanted[b : b + n] = source[a : a + n]
        yield "copy", name, found, wanted, 0.0


def _rows(bench: Bench) -> Iterator[Compared]:
    # The interpreter's cast to 8 bits is wrong.
    compiled_for_8_bits = bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) >= (8, 9)
    for dtype in (torch.float32, *([linears.FP8] if compiled_for_8_bits else [])):
        for inputs, width in ((48, 48), (1500, 1504)):
            x_TX = torch.randn(7, inputs, generator=torch.Generator().manual_seed(3))
            found, scales = linears.scale_rows(x_TX.to(bench.device), width, dtype)
            wanted, wanted_scales = linears.round_rows(x_TX, width)
            yield "scales", str(dtype), scales, wanted_scales, ERROR_MAX["float32"]
            # A value between two numbers of 8 bits may go to either.
            yield "scaled rows", str(dtype), found.cpu().to(linears.FP8).float(), wanted.float(), 2.0**-3


def _four_bits(bench: Bench) -> Iterator[Compared]:
    generator = torch.Generator().manual_seed(4)
    outputs, inputs = (64, 128) if bench.tiny else (1000, 1024)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    product = Int4Matmul.pack(weight)
    near = replace(product, tiles=product.tiles.to(bench.device), scales_GY2=product.scales_GY2.to(bench.device))
    for rows in (1, 17, 70):
        x_TX = torch.randn(rows, inputs, generator=generator).bfloat16()
        yield "4 bits", "bfloat16", near.by_tiles(x_TX.to(bench.device)), product.reference(x_TX), ERROR_MAX["bfloat16"]


def _on(device: torch.device, pool: KvPool, shape: Shape) -> KvPool:
    return KvPool(pool.kv_LN2KSD.reshape(-1).view(torch.uint8).clone().to(device), pool.num_blocks, shape.spec)


def _reference(pool: KvPool, shape: Shape, batch: Batch, q_THD: torch.Tensor) -> torch.Tensor:
    bytes_U8 = pool.kv_LN2KSD.float().reshape(-1).view(torch.uint8)
    attention = TorchAttention(KvPool(bytes_U8, pool.num_blocks, replace(shape.spec, dtype="float32")))
    return attention.attend(1, q_THD.float(), attention.prepare(batch.slices))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)
