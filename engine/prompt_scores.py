"""Log-probabilities of a prompt's own tokens, for who asks: `SamplingParams.prompt_logprobs`.

A step with such a prompt computes all of its rows to the end. The scores are made for a few rows at a time, since each
row has one for every token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from baton.ids import RequestKey
from engine.kv_pool import to_device
from engine.sampler import ScoredRows
from engine.types import Batch, SequenceSlice, TokenLogprobs

ROWS_MAX: Final = 64
"""Rows whose scores are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """The rows of one step whose scores are wanted."""

    batch: Batch
    """The step's own, with all rows."""
    prompts: list[tuple[SequenceSlice, int]]
    """Slices whose tokens are scored, and the first row of each."""
    draws: list[int]
    """The rows that tokens are drawn from, in the order of their slices."""

    @classmethod
    def of(cls, batch: Batch) -> PromptRows | None:
        """None where nobody asks."""
        if not any(s.is_scored for s in batch.slices):
            return None
        prompts: list[tuple[SequenceSlice, int]] = []
        row = 0
        for s in batch.slices:
            if s.is_scored:
                prompts.append((s, row))
            row += s.stop - s.start
        return cls(batch=replace(batch, every_row=True), prompts=prompts, draws=batch.drawing_rows)

    def logprobs(
        self, x_WE: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[RequestKey, list[TokenLogprobs]]:
        """Of each slice's known tokens behind its first one; waits for the device. `x_WE` are all of the last layer's
        rows."""
        return {s.key: self._of_slice(s, x_WE[row : row + s.stop - s.start], logits) for s, row in self.prompts}

    def _of_slice(
        self, s: SequenceSlice, x_TE: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[TokenLogprobs]:
        following = s.tokens[s.start + 1 : s.stop + 1]  # the last row may have none: its token is to be drawn
        params = replace(s.params, logprobs=s.params.prompt_logprobs)
        found: list[TokenLogprobs] = []
        for at in range(0, len(following), ROWS_MAX):
            next_R = to_device(np.array(following[at : at + ROWS_MAX], dtype=np.int64), x_TE.device)
            scored = ScoredRows.of(logits(x_TE[at : at + len(next_R)]), next_R, [params] * len(next_R))
            assert scored is not None
            found += scored.by_row(scored.packed().cpu().numpy()).values()
        return found
