"""Whether a decode node may grant one more request under overcommit, beside blocks that are the engine's for good."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cachestore.block_manager import BlockManager
from cachestore.ledger import Ledger
from decode_node.config import DecodeConfig
from decode_node.reserving import Reserving
from engine.build import EngineConfig, EngineKind


@pytest.mark.parametrize(("padding", "room"), [(0, True), (1, False)])
def test_padding_cannot_be_moved_for_anybody(padding: int, room: bool) -> None:
    """A request that may come to seven of ten blocks runs. One of three asks: while it is written to, the first could
    still have seven, but not beside a block that graphs keep for padding."""
    ledger = Ledger(10)
    ledger.take(padding)
    ledger.host_room = 20
    blocks = BlockManager(ledger, 4, b"model", padding_blocks=padding)
    spill: Any = SimpleNamespace(busy=False, headroom=lambda: 0)
    runs: Any = SimpleNamespace(
        committed=SimpleNamespace(done=lambda: True), resumed=True, prefix=(), blocks=(), footprint=7
    )
    pool: Any = SimpleNamespace(ledger=ledger, blocks=blocks, host=SimpleNamespace(spill=spill))
    config = DecodeConfig(name="decode-0", engine=EngineConfig(kind=EngineKind.MOCK))

    async def asked() -> None:
        reserving = Reserving(config=config, pool=pool, jobs=[runs])
        assert reserving.has_room(prefix=0, new=3, footprint=3) is room
        assert reserving.has_room(prefix=0, new=2, footprint=3)

    asyncio.run(asked())
