"""`draw.c`, with its types. Shape suffixes as in engine/types.py; R rows that are drawn, P changed scores."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from baton.log import get_log
from baton.native import load
from engine.penalties import Adjusted
from engine.types import SamplingParams

log = get_log("native")

SHARED_TOKENS_MIN = 1 << 15
"""Scores in all rows from which on several threads draw: below it, waking them takes longer."""

_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
_DRAW = np.dtype(
    [
        ("row", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("choice", np.uint64),
        ("index", np.uint64),
        ("changed_at", np.int64),
        ("changed_end", np.int64),
    ]
)
_MASK64 = 2**64 - 1


class DrawKernel:
    """Draws the tokens of a batch by the definition in engine/sampler.py. Any thread may call it."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._draw = handle.baton_draw
        self._draw.restype = None
        self._draw.argtypes = [
            pointer, integer, integer, integer, pointer, integer, pointer, pointer, pointer, pointer, integer,
            ctypes.c_int,
        ]  # fmt: skip
        self._scratch = handle.baton_draw_scratch
        self._scratch.restype, self._scratch.argtypes = integer, [integer, integer]

    def takes(self, logits_BV: torch.Tensor) -> bool:
        return logits_BV.device.type == "cpu" and logits_BV.dtype in _TYPES and logits_BV.stride(1) == 1

    def draw(
        self,
        logits_BV: torch.Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        changed: Adjusted | None,
    ) -> torch.Tensor:
        """One token for each row -> int64 [B], NO_TOKEN for a row without one. Lets go of the interpreter's lock;
        mutates nothing."""
        assert self.takes(logits_BV), (logits_BV.device, logits_BV.dtype)
        rows, vocab_size = logits_BV.shape
        ends = [0] * (rows + 1)
        if changed is not None:
            ends = np.searchsorted(changed.rows_P, np.arange(rows + 1)).tolist()
        draws_R = np.array(
            [
                (
                    row,
                    p.temperature,
                    p.top_p,
                    p.min_p,
                    p.top_k,
                    p.seed & _MASK64,
                    p.choice & _MASK64,
                    output_indices[row],
                    ends[row],
                    ends[row + 1],
                )
                for row, p in enumerate(params)
            ],
            dtype=_DRAW,
        )
        limits = draws_R["top_k"]
        k_max = int(limits[limits < vocab_size].max(initial=0))
        threads = torch.get_num_threads() if rows * vocab_size >= SHARED_TOKENS_MIN else 1
        scratch_bytes = self._scratch(vocab_size, k_max)
        scratch = np.empty(threads * scratch_bytes // 8, dtype=np.float64)
        tokens_B = torch.empty(rows, dtype=torch.int64)
        self._draw(
            logits_BV.data_ptr(),
            _TYPES[logits_BV.dtype],
            logits_BV.stride(0),
            vocab_size,
            draws_R.ctypes.data,
            rows,
            None if changed is None else changed.ids_P.ctypes.data,
            None if changed is None else changed.scores_P.data_ptr(),
            tokens_B.data_ptr(),
            scratch.ctypes.data,
            scratch_bytes,
            threads,
        )
        return tokens_B


@cache
def draw_kernel() -> DrawKernel | None:
    """None: no library; said once in the log. The first call may take seconds."""
    library = load(Path(__file__).with_name("draw.c"), ("m",))
    if library.handle is None:
        log.warning(
            "the sampling kernel is missing: PyTorch's operations are used, which are slower", why=library.status
        )
        return None
    return DrawKernel(library.handle)
