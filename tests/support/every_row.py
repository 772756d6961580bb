"""Scores of every token of a batch, where a step computes those of the last ones only."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.runner import ModelRunner
from engine.types import Batch, NullSink


@torch.inference_mode()
def score(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """The scores of the token after each token of the batch -> [T, V]. K and V are stored as by `run`."""
    batch = replace(batch, every_row=True)
    forward, sink = runner._begin(batch, NullSink())
    return forward.logits(forward.forward(batch, sink)).clone()
