"""What a step refuses to post."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from baton.ids import BlockId, ReserveNumber
from cachestore.layout import kv_layout
from kvtransfer.protocol.writer import WriterEvent, WritesPosted
from kvtransfer.transport import WriteOutOfBounds
from kvtransfer.writer import Handoff, StepWrites


def test_a_block_outside_the_grant_is_not_posted() -> None:
    """One of two destination blocks is not the grant's: nothing is accounted for, planned or posted, not even the
    other; with both inside both are, in every layer."""
    planned: list[WriterEvent] = []
    layout = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32", dtype_bytes=4)
    peer = SimpleNamespace(
        layout=layout,
        src_num_blocks=8,
        link=SimpleNamespace(num_blocks=8),
        handle=planned.append,
        loop=SimpleNamespace(time=lambda: 0.0),
    )
    handoff = SimpleNamespace(
        number=ReserveNumber(0),
        link=SimpleNamespace(),
        steps=set(),
        dst_blocks=[BlockId(3), BlockId(5)],
        key="key",
        writes=0,
        bytes_written=0,
        peer=peer,
    )

    def plan(*dst: int) -> StepWrites:
        src_blocks_B, dst_blocks_B = np.array([1, 2], np.int64), np.array(dst, np.int64)
        return Handoff.plan_step(cast(Any, handoff), src_blocks_B, dst_blocks_B)

    with pytest.raises(WriteOutOfBounds, match="block 4 is not among the 2 blocks of the grant"):
        plan(3, 4)
    assert (planned, handoff.steps) == ([], set())
    step = plan(5, 3)
    nbytes = 6 * layout.record_bytes
    assert planned == [WritesPosted(number=ReserveNumber(0), writes=6, bytes_written=nbytes)]
    assert (handoff.writes, handoff.bytes_written) == (6, nbytes)
    assert handoff.steps == {step}
