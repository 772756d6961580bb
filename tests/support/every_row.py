"""Scores of every token of a batch, where a step computes those of the last ones only."""

from __future__ import annotations

import torch

from engine.runner import ModelRunner
from engine.types import Batch, NullSink


class EveryRow(Batch):
    """A batch that wants the last layer's output of every row."""

    @property
    def drawing_rows(self) -> list[int]:
        return list(range(self.num_tokens))


@torch.inference_mode()
def score(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """The scores of the token after each token of the batch -> [T, V]. K and V are stored as by `run`."""
    forward, sink = runner._begin(EveryRow(slices=batch.slices), NullSink())
    return forward.logits(forward.forward(EveryRow(slices=batch.slices), sink)).clone()
