"""Decode steps as CUDA graphs: one launch instead of some hundred kernels.

A graph is captured for each of a few batch sizes ("buckets"); a batch runs in the smallest that holds it. Padding rows
write to a block that is reserved for them.

Shape suffixes: B rows of a bucket   M columns of the block tables   V vocabulary
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.ids import BlockId
from engine.gpu.config import GraphConfig
from engine.types import SequenceSlice

HOST_KNOWS = -1
"""Instead of a row: the host has the token."""
_FIXED_COLUMNS = 3
"""At the start of a packed row, before its block table: token id, position, row of the token in the step before."""


def bucket_sizes(rows_max: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is `rows_max` itself. A graph costs
    memory and time at start, padding costs time in every step."""
    sizes, size = [], 1
    while size < rows_max:
        sizes.append(size)
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    return (*sizes, rows_max) if rows_max else ()


class Capture:
    """How a computation on fixed tensors is captured. This one is for a device without graphs: it computes again."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `compute` at least once -> a function that repeats it, with the same inputs and output tensor.

        The next repetition of any graph of this capture may overwrite the output.
        """
        out = compute().clone()
        return lambda: out.copy_(compute())


class CudaCapture(Capture):
    """torch.cuda.CUDAGraph, with one memory pool for all graphs. On a GPU only."""

    WARM_UP_RUNS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Capture.capture`. Runs `compute` before: kernels must not be compiled, nor workspaces allocated, during
        a capture."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP_RUNS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (copies of records): only this thread's calls are checked.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Inputs of a decode step on the device: views of one buffer."""

    ids_B: torch.Tensor
    positions_B: torch.Tensor
    future_rows_B: torch.Tensor
    """See `pick` in `engine/gpu/runner.py`."""
    tables_BM: torch.Tensor


Forward = Callable[[DecodeInputs], torch.Tensor]
"""From the inputs of a bucket to each row's scores of the next token, [B, V]. The host must not look at values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    inputs: torch.Tensor
    staging: torch.Tensor
    """Of the same shape, in host memory (pinned for a GPU): filled by the CPU, then copied at once."""
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """One graph for each bucket. Engine thread only, after `warm_up`."""

    def __init__(
        self,
        *,
        forward: Forward,
        block_size: int,
        padding_block: BlockId,
        device: torch.device,
        row_of: Callable[[SequenceSlice], int],
        capture: Capture,
        config: GraphConfig,
    ) -> None:
        """`row_of`: `FutureTokens.row_of`."""
        self._forward = forward
        self._row_of = row_of
        self._block_size = block_size
        self._padding_block = padding_block
        self._device = device
        self._capture = capture
        self._rows_max = config.graph_rows_max
        self._context_max = config.graph_context_max
        self._columns = -(-config.graph_context_max // block_size)
        self._sizes = bucket_sizes(config.graph_rows_max)
        self._graphs: dict[int, _Graph] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.steps = 0
        self.rows_padded = 0

    def __str__(self) -> str:
        """For people."""
        rows = ", ".join(map(str, self._sizes))
        return f"of {rows} rows, contexts up to {self._context_max} tokens"

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every bucket, the largest first so that the others fit into its memory. Writes the padding block."""
        for done, rows in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            self._graphs[rows] = self._captured(rows)

    def fits(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether a batch can run as a graph: one token of each sequence, few enough, none too long."""
        return 0 < len(slices) <= self._rows_max and all(
            s.stop - s.start == 1 and s.stop <= self._context_max for s in slices
        )

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Scores of the token after each slice -> [rows, V]: a view, overwritten by the next `run`."""
        assert self.fits(slices), len(slices)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, len(slices))]]
        if self._copied is not None:
            # The device may still have to read the inputs of the step before.
            self._copied.synchronize()
        self._fill(graph.staging.numpy(), slices)
        graph.inputs.copy_(graph.staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.steps += 1
        self.rows_padded += len(graph.inputs) - len(slices)
        return graph.replay()[: len(slices)]

    def _captured(self, rows: int) -> _Graph:
        shape = (rows, _FIXED_COLUMNS + self._columns)
        inputs = torch.zeros(shape, dtype=torch.int32, device=self._device)
        staging = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._fill(staging.numpy(), ())
        inputs.copy_(staging)
        views = DecodeInputs(
            ids_B=inputs[:, 0],
            positions_B=inputs[:, 1],
            future_rows_B=inputs[:, 2],
            tables_BM=inputs[:, _FIXED_COLUMNS:],
        )
        forward = self._forward  # not self._forward: a graph must not keep all graphs alive
        return _Graph(inputs=inputs, staging=staging, replay=self._capture.capture(lambda: forward(views)))

    def _fill(self, staging: np.ndarray, slices: Sequence[SequenceSlice]) -> None:
        """A row of padding is a sequence of one token, id 0, in the padding block."""
        for row, s in enumerate(slices):
            needed = -(-s.stop // self._block_size)
            staging[row, 0] = 0 if s.token_pending else s.tokens[s.start]
            staging[row, 1] = s.start
            staging[row, 2] = self._row_of(s)
            staging[row, _FIXED_COLUMNS : _FIXED_COLUMNS + needed] = s.block_table[:needed]
        staging[len(slices) :, :_FIXED_COLUMNS] = (0, 0, HOST_KNOWS)
        staging[len(slices) :, _FIXED_COLUMNS] = self._padding_block
