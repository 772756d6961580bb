"""The ways of computing a batch: through every layer once, with its K and V written to the pool on the way.

Shape suffixes as in engine/types.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from engine.attention import AttentionMetadata, Ends, TorchAttention, ends_of
from engine.kv_pool import KvPool
from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder
from engine.native.kernels import PACKED_ROWS_MIN, TASK_ROWS_MAX, AttentionPlan
from engine.types import Batch, KvSink, NullSink


class Forward(Protocol):
    """One model over one pool. Called from one thread at a time, inside `torch.inference_mode`."""

    def forward(self, batch: Batch, sink: KvSink, *, every_row: bool = False) -> torch.Tensor:
        """The last layer's output for `Batch.drawing_rows` -> [W, E]; with `every_row` for each new token -> [T, E].

        K and V of every token are kept in any case. See `Runner.run` for what the sink is told.
        """
        ...

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after the given rows -> [B, V]; the caller's until the next call."""
        ...


def token_ids(batch: Batch, vocab_size: int) -> torch.Tensor:
    """The new tokens of a batch -> int64 [T]."""
    if all(s.stop - s.start == 1 for s in batch.slices):
        tokens = np.array([s.tokens[s.start] for s in batch.slices], dtype=np.int64)
    else:
        tokens = np.concatenate([np.asarray(s.tokens[s.start : s.stop], dtype=np.int64) for s in batch.slices])
    assert tokens.min() >= 0 and tokens.max() < vocab_size, "token id outside the vocabulary"
    return torch.from_numpy(tokens)


class TorchForward:
    """PyTorch's own operations: any device, float32 or bfloat16. What the others are measured by."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = TorchAttention(pool)

    def forward(self, batch: Batch, sink: KvSink, *, every_row: bool = False) -> torch.Tensor:
        """`sink` hears of a layer before the attention of the same layer: its bytes travel meanwhile."""
        pool, attention, decoder = self._pool, self._attention, self._decoder
        metadata = attention.prepare(batch)
        last_ends = None if every_row else ends_of(batch, pool.device)
        angles = decoder.angles(metadata.positions_T)
        x_TE = decoder.embed(token_ids(batch, decoder.config.vocab_size).to(pool.device))
        for layer in range(pool.spec.num_layers):
            ends = last_ends if layer + 1 == pool.spec.num_layers else None

            def attend(
                q_THD: torch.Tensor,
                k_TKD: torch.Tensor,
                v_TKD: torch.Tensor,
                layer: int = layer,
                ends: Ends | None = ends,
            ) -> torch.Tensor:
                pool.store(layer, k_TKD, v_TKD, metadata.slots)
                sink.layer_done(layer)
                if ends is not None:
                    return ends.attend(attention, layer, q_THD)
                return attention.attend(layer, q_THD, metadata)

            x_TE = decoder.run_layer(layer, x_TE, angles, attend, None if ends is None else ends.rows_W)
        return x_TE

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(x_BE)


class DeterministicForward:
    """Every operation is given one token at a time, in order; many times slower.

    The kernels then see the same shapes whatever else is in the step: they choose blocking and order of summation by
    shape, which is where the difference in rounding between two batches comes from.
    """

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = TorchAttention(pool)

    def forward(self, batch: Batch, sink: KvSink, *, every_row: bool = False) -> torch.Tensor:
        pool, attention, decoder = self._pool, self._attention, self._decoder
        singles = [replace(s, start=at, stop=at + 1) for s in batch.slices for at in range(s.start, s.stop)]
        ids = token_ids(batch, decoder.config.vocab_size).to(pool.device)
        metadata = [attention.prepare(Batch(slices=(single,))) for single in singles]
        angles = [decoder.angles(each.positions_T) for each in metadata]
        rows = [decoder.embed(ids[row : row + 1]) for row in range(len(singles))]
        for layer in range(pool.spec.num_layers):
            for row, each in enumerate(metadata):

                def attend(
                    q_1HD: torch.Tensor,
                    k_1KD: torch.Tensor,
                    v_1KD: torch.Tensor,
                    layer: int = layer,
                    each: AttentionMetadata = each,
                ) -> torch.Tensor:
                    pool.store(layer, k_1KD, v_1KD, each.slots)
                    return attention.attend(layer, q_1HD, each)

                rows[row] = decoder.run_layer(layer, rows[row], angles[row], attend)
            sink.layer_done(layer)
        wanted = rows if every_row else [rows[row] for row in batch.drawing_rows]
        return torch.cat(wanted) if wanted else rows[0][:0]

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._decoder.logits(x_BE[row : row + 1].clone()) for row in range(len(x_BE))])


class NativeForward:
    """kernels.c between packed matrices: bfloat16 on a CPU. A step that nobody listens to is one call of it."""

    def __init__(self, decoder: NativeDecoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool

    def forward(self, batch: Batch, sink: KvSink, *, every_row: bool = False) -> torch.Tensor:
        """`sink` hears of a layer before the attention of the same layer: its bytes travel meanwhile."""
        plan, positions_T = plan_attention(batch, self._pool)
        ends = None
        drawing = [sequence for sequence, s in enumerate(batch.slices) if s.sample]
        if not every_row and len(drawing) < len(positions_T):
            ends = plan.ends(np.array(drawing, dtype=np.int64))
        x_TE = self._decoder.embed(token_ids(batch, self._decoder.config.vocab_size))
        layer_done = None if isinstance(sink, NullSink) else sink.layer_done
        return self._decoder.run_layers(x_TE, positions_T, plan, self._pool, layer_done, ends)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(x_BE)


def plan_attention(batch: Batch, pool: KvPool) -> tuple[AttentionPlan, torch.Tensor]:
    """What kernels.c needs of a batch, and the positions of its new tokens. Block ids are checked here."""
    slices, block_size = batch.slices, pool.spec.block_size
    tables = [np.asarray(s.block_table[: -(-s.stop // block_size)], dtype=np.int64) for s in slices]
    starts, stops = (np.array([getattr(s, name) for s in slices], dtype=np.int64) for name in ("start", "stop"))
    counts = stops - starts
    rows_at = np.concatenate(([0], counts.cumsum()))
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    table_at_B = lengths.cumsum() - lengths
    every = np.concatenate(tables)
    assert every.min() >= 0 and every.max() < pool.num_blocks, "block id outside the region"
    sequence_T = np.repeat(np.arange(len(slices)), counts)
    positions_T = np.arange(rows_at[-1]) - rows_at[sequence_T] + starts[sequence_T]
    tasks = [
        (b, first, rows, rows >= PACKED_ROWS_MIN)
        for b, count in enumerate(counts.tolist())
        for first in range(0, count, TASK_ROWS_MAX)
        if (rows := min(TASK_ROWS_MAX, count - first))
    ]
    plan = AttentionPlan(
        tables=every,
        table_at_B=table_at_B,
        rows_at=rows_at,
        contexts_B=stops,
        tasks=np.array(tasks, dtype=np.int64),
        blocks_T=every[table_at_B[sequence_T] + positions_T // block_size],
        slots_T=positions_T % block_size,
    )
    return plan, torch.from_numpy(positions_T)
