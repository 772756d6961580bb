"""What a launched step leaves behind: its tokens for the step behind it, and for the host one small copy.

Shape suffixes: B rows that draw   P int64 numbers, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.ids import RequestKey
from engine.logprobs import ScoredRows
from engine.types import SequenceSlice, StepResult

ROWS_AHEAD_MAX = 4096
"""Tokens of one step that the next one may read on the device."""
HOST_KNOWS = -1
"""In the place of a row: the token is the host's to give."""


class FutureTokens:
    """The tokens of the step launched last, on the device, where the one behind it reads them.

    One place for each row serves all steps: on the stream, a step reads it before its own tokens are put there.
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.zeros(ROWS_AHEAD_MAX, dtype=torch.int64, device=device)
        """Stays where it is: captured graphs read it."""
        self._rows: dict[RequestKey, int] = {}

    def row_of(self, piece: SequenceSlice) -> int:
        """Where the slice's one new token is; HOST_KNOWS when it is in `piece.tokens`."""
        return self._rows[piece.key] if piece.ahead else HOST_KNOWS

    def keep(self, slices: Sequence[SequenceSlice], tokens_B: torch.Tensor | None) -> None:
        """A step has been queued that draws these, in this order; None: it draws nothing."""
        kept = slices[:ROWS_AHEAD_MAX]
        self._rows = {piece.key: row for row, piece in enumerate(kept)}
        if tokens_B is not None:
            # A sequence without a token leaves with this step, and its surplus slice needs an id that exists.
            self.ids[: len(kept)].copy_(tokens_B[: len(kept)].clamp(min=0))


def pick(ids_B: torch.Tensor, rows_B: torch.Tensor, future_ids: torch.Tensor) -> torch.Tensor:
    """The tokens of a step's rows: `ids_B`, but where a row of `future_ids` is named, that one."""
    return torch.where(rows_B == HOST_KNOWS, ids_B.to(torch.int64), future_ids[rows_B.clamp(min=0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """Its tokens and log-probabilities are on their way to the host, in one copy."""

    slices: list[SequenceSlice]
    """Those that draw."""
    scored: ScoredRows | None
    packed_P: torch.Tensor | None
    """In pinned memory where there is a device. None: nothing is drawn."""
    done: torch.cuda.Event | None
    """Behind the copy, and so behind all of the step."""

    @classmethod
    def of(
        cls,
        slices: list[SequenceSlice],
        tokens_B: torch.Tensor | None,
        scored: ScoredRows | None,
        *,
        device: torch.device,
    ) -> LaunchedStep:
        """Queues the copy, on the current stream; to be called once all else of the step is queued."""
        on_gpu, packed_P, done = device.type == "cuda", None, None
        if tokens_B is not None:
            drawn_P = tokens_B if scored is None else torch.cat([tokens_B, scored.packed()])
            packed_P = torch.empty(drawn_P.shape, dtype=torch.int64, pin_memory=on_gpu)
            packed_P.copy_(drawn_P, non_blocking=on_gpu)
        if on_gpu:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
        return cls(slices=slices, scored=scored, packed_P=packed_P, done=done)

    def result(self) -> StepResult:
        """Waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        if self.packed_P is None:
            return StepResult()
        numbers: np.ndarray = self.packed_P.numpy()
        count = len(self.slices)
        sampled = {s.key: token for s, token in zip(self.slices, numbers[:count].tolist(), strict=True)}
        if self.scored is None:
            return StepResult(sampled=sampled)
        found = self.scored.told(numbers[count:])
        return StepResult(sampled=sampled, logprobs={self.slices[row].key: each for row, each in found.items()})
