"""What a step refuses to post."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from baton.ids import BlockId
from cachestore.layout import kv_layout
from kvtransfer.step_writes import StepWrites
from kvtransfer.transports.posted_writes import WriteOutOfBounds


def test_a_block_outside_the_grant_is_not_posted() -> None:
    """One of two destination blocks is not the grant's: nothing is accounted for, planned or posted, not even the
    other; with both inside both are, in every layer."""
    planned: list[tuple[int, int]] = []
    layout = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32", dtype_bytes=4)
    peer = SimpleNamespace(
        observer=None,
        layout=layout,
        src_num_blocks=8,
        link=SimpleNamespace(num_blocks=8),
        planned=lambda _handoff, writes, nbytes: planned.append((writes, nbytes)),
    )
    handoff = SimpleNamespace(
        peer=peer, link=SimpleNamespace(), steps=set(), dst_blocks=[BlockId(3), BlockId(5)], key="key"
    )

    def plan(*dst: int) -> StepWrites:
        src_blocks_B, dst_blocks_B = np.array([1, 2], np.int64), np.array(dst, np.int64)
        return StepWrites.plan_for(cast(Any, handoff), src_blocks_B, dst_blocks_B, range(3))

    with pytest.raises(WriteOutOfBounds, match="block 4 is none of the 2 of the grant"):
        plan(3, 4)
    assert (planned, handoff.steps) == ([], set())
    step = plan(5, 3)
    assert planned == [(6, 6 * layout.record_bytes)]
    assert handoff.steps == {step}
