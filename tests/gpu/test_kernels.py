"""The Triton kernels against plain torch, in Triton's interpreter: no GPU is needed. Shapes as in engine/gpu."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace

import pytest
import torch

from tests.support.gpu_cases import (
    SHAPES,
    Shape,
    assert_close,
    fill,
    poisoned_pool,
    random_batch,
    random_queries,
    store,
)

# isort: split
from engine.attention import TorchAttention
from engine.gpu import kernels
from engine.kv_pool import KvPool
from engine.models.decoder import rotary_angles, rotate
from engine.types import Batch

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
seeds = pytest.mark.parametrize("seed", range(2))
# Linux; the mmap module has no name for it.
_MAP_NORESERVE = 0x4000


def slots_of(pool: KvPool, batch: Batch, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and slots of the new tokens, some of them made padding (block -1), and which ones are stored."""
    where = pool.map_slots(batch)
    stored_T = torch.tensor([True, *(chance.random() < 0.8 for _ in range(batch.num_tokens - 1))])
    return torch.where(stored_T, where.blocks_T, -1), where.slots_T, stored_T


def references(pool: KvPool, shape: Shape, batch: Batch, q_THD: torch.Tensor, layer: int) -> torch.Tensor:
    """The torch reference in float32, over the same numbers."""
    bytes_U8 = pool.kv_LN2KSD.float().reshape(-1).view(torch.uint8)
    attention = TorchAttention(KvPool(bytes_U8, pool.num_blocks, replace(shape.spec, dtype="float32")))
    return attention.attend(layer, q_THD.float(), attention.prepare(batch.slices))


@shapes
@seeds
def test_store_writes_its_slots_and_no_other_byte(shape: Shape, seed: int) -> None:
    """New K and V of several sequences go to scattered slots; padding tokens and every other byte stay as they were."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool, expected = poisoned_pool(shape, 40), poisoned_pool(shape, 40)
    batch = random_batch(chance, pool, sequences=chance.randint(1, 5), context_max=5 * shape.block_size)
    # Slices of one projection, as a model's fused QKV would give: rows are not next to each other.
    kv = torch.randn(batch.num_tokens, 3, shape.kv_heads, shape.head_dim, generator=generator).to(pool.dtype)
    blocks_T, slots_T, stored_T = slots_of(pool, batch, chance)
    store(pool, 1, kv[:, 0], kv[:, 2], blocks_T, slots_T)
    at = (blocks_T[stored_T], slots_T[stored_T])
    expected.kv_LN2KSD[1][at[0], 0, :, at[1]] = kv[stored_T, 0]
    expected.kv_LN2KSD[1][at[0], 1, :, at[1]] = kv[stored_T, 2]
    bits = torch.int32 if shape.dtype == "float32" else torch.int16
    assert torch.equal(pool.kv_LN2KSD.view(bits), expected.kv_LN2KSD.view(bits))


@shapes
@seeds
def test_rotary_and_store_are_one_pass(shape: Shape, seed: int) -> None:
    """Queries come back turned, keys are stored turned, values as they are: as the separate steps within rounding."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool, expected = poisoned_pool(shape, 40), poisoned_pool(shape, 40)
    batch = random_batch(chance, pool, sequences=chance.randint(1, 5), context_max=5 * shape.block_size)
    q_THD = random_queries(pool, shape, batch, generator)
    kv = torch.randn(2, batch.num_tokens, shape.kv_heads, shape.head_dim, generator=generator).to(pool.dtype)
    positions_T = torch.cat([torch.arange(s.start, s.stop) for s in batch.slices])
    angles = rotary_angles(positions_T, torch.rand(shape.head_dim // 2, generator=generator), dtype=pool.dtype)
    blocks_T, slots_T, stored_T = slots_of(pool, batch, chance)
    before = q_THD.clone()
    turned = kernels.rotate_and_store(pool, 0, q_THD, kv[0], kv[1], angles, blocks_T, slots_T)
    assert torch.equal(q_THD, before)
    wide = (angles[0].float(), angles[1].float())
    assert_close(turned, rotate(q_THD.float(), *wide), shape.dtype)
    at = (blocks_T[stored_T], slots_T[stored_T])
    assert_close(pool.kv_LN2KSD[0][at[0], 0, :, at[1]], rotate(kv[0].float(), *wide)[stored_T], shape.dtype)
    assert torch.equal(pool.kv_LN2KSD[0][at[0], 1, :, at[1]], kv[1][stored_T])
    pool.kv_LN2KSD[0][at[0], :, :, at[1]] = expected.kv_LN2KSD[0][at[0], :, :, at[1]]
    assert pool.kv_LN2KSD.isnan().all()


@shapes
@seeds
def test_gather_copies_contexts_in_order(shape: Shape, seed: int) -> None:
    """Contexts over scattered blocks, the last one half empty, come out token after token, without the NaN beyond."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = poisoned_pool(shape, 40)
    batch = random_batch(chance, pool, sequences=chance.randint(1, 5), context_max=5 * shape.block_size)
    fill(pool, batch, generator)
    plan = kernels.plan_gather(pool, batch.slices)
    k_CKD, v_CKD = kernels.gather(pool, 1, plan)
    row = 0
    for s in batch.slices:
        at_C = torch.arange(s.stop)
        blocks_C = torch.tensor(s.block_table)[at_C // shape.block_size]
        kv = pool.kv_LN2KSD[1][blocks_C, :, :, at_C % shape.block_size]
        assert torch.equal(k_CKD[row : row + s.stop], kv[:, 0])
        assert torch.equal(v_CKD[row : row + s.stop], kv[:, 1])
        row += s.stop
    assert row == len(k_CKD) == plan.num_rows


@shapes
@seeds
def test_decode_agrees_with_the_reference(shape: Shape, seed: int) -> None:
    """One query token each over contexts of very uneven lengths, in few or many splits, between rows of padding."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_blocks = 5 * (-(-400 // shape.block_size) + 2)
    pool = poisoned_pool(shape, num_blocks)
    batch = random_batch(chance, pool, sequences=chance.randint(1, 4), context_max=400, decode=True)
    fill(pool, batch, generator)
    q_THD = random_queries(pool, shape, batch, generator)
    wanted = references(pool, shape, batch, q_THD, layer=1)

    padding = chance.randint(0, 2)
    rows = len(batch.slices) + padding
    columns = max(len(s.block_table) for s in batch.slices) + chance.randrange(3)
    tables_BM = torch.full((rows, columns), 2**31 - 1, dtype=torch.int32)
    contexts_B = torch.zeros(rows, dtype=torch.int32)
    for row, s in enumerate(batch.slices):
        tables_BM[row, : len(s.block_table)] = torch.tensor(s.block_table)
        contexts_B[row] = s.stop
    q_BHD = torch.cat([q_THD, torch.full((padding, *q_THD.shape[1:]), 7.0, dtype=q_THD.dtype)])
    for num_splits in (1, chance.randint(2, 32)):
        out_BHD = kernels.decode(pool, 1, q_BHD, tables_BM, contexts_B, num_splits)
        assert_close(out_BHD[: len(batch.slices)], wanted, shape.dtype)
        assert not out_BHD[len(batch.slices) :].any()


def test_slots_are_counted_in_64_bits() -> None:
    """A region of more than 2**31 elements: the kernels reach its last block. Its pages come when they are touched."""
    shape = Shape(heads=1, kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16")
    spec = replace(shape.spec, num_layers=1)
    per_block = 2 * spec.block_size * spec.head_dim
    num_blocks = 2**31 // per_block + 3
    nbytes = num_blocks * per_block * 2
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    pool = KvPool(torch.frombuffer(pages, dtype=torch.uint8), num_blocks, spec)
    last, generator = num_blocks - 1, torch.Generator().manual_seed(1)
    kv = torch.randn(2, 3, 1, 64, generator=generator).to(torch.bfloat16)
    q_BHD = torch.randn(1, 1, 64, generator=generator).to(torch.bfloat16)
    store(pool, 0, kv[0], kv[1], torch.full((3,), last), torch.arange(3))
    assert torch.equal(pool.kv_LN2KSD[0, last, :, 0, :3], kv[:, :, 0])
    out = kernels.decode(
        pool, 0, q_BHD, torch.tensor([[last]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), 1
    )
    weights = torch.softmax(kv[0, :, 0].float() @ q_BHD[0, 0].float() / 8, dim=0)
    assert_close(out[0, 0], weights @ kv[1, :, 0].float(), "bfloat16")
    k_CKD, v_CKD = kernels.gather(
        pool,
        0,
        kernels.GatherPlan(
            blocks_n=torch.tensor([last]), first_rows_n=torch.tensor([0]), num_slots_n=torch.tensor([3]), num_rows=3
        ),
    )
    assert torch.equal(k_CKD, kv[0])
    assert torch.equal(v_CKD, kv[1])


@pytest.mark.parametrize(
    ("rows", "kv_heads", "context_max", "splits"),
    [(1, 8, 40960, 32), (64, 8, 40960, 8), (64, 8, 1024, 8), (256, 8, 100, 1), (2, 8, 4096, 17), (8, 8, 2048, 8)],
)
def test_splits_fill_the_device_and_are_not_tiny(rows: int, kv_heads: int, context_max: int, splits: int) -> None:
    """On a device of 132 processors: one row is cut finely, many rows as far as balance needs, short contexts not."""
    assert kernels.choose_splits(rows, kv_heads, context_max, 132) == splits
