"""Whether a decode node may grant one more request under overcommit, beside blocks that are the engine's for good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.ids import BlockId, GrantId
from cachestore.block_manager import BlockManager
from cachestore.ledger import Ledger
from decode_node.config import DecodeConfig
from decode_node.reserving import Reserving
from engine.build import EngineConfig, EngineKind


def job(*, footprint: int, blocks: Sequence[BlockId] = ()) -> Any:
    """It runs, or, with `blocks`, they are granted."""
    runs = not blocks
    committed = SimpleNamespace(done=lambda: runs)
    return SimpleNamespace(committed=committed, resumed=runs, prefix=(), blocks=blocks, footprint=footprint)


def has_room(ledger: Ledger, jobs: list[Any], *, new: int, footprint: int, padding: int = 0) -> bool:
    ledger.host_room = 20
    blocks = BlockManager(ledger, 4, b"model", padding_blocks=padding)
    spill: Any = SimpleNamespace(busy=False, headroom=lambda: 0)
    pool: Any = SimpleNamespace(ledger=ledger, blocks=blocks, host=SimpleNamespace(spill=spill))
    config = DecodeConfig(name="decode-0", engine=EngineConfig(kind=EngineKind.MOCK))

    async def asked() -> bool:
        reserving = Reserving(config=config, pool=pool, jobs=jobs)
        return reserving.has_room(prefix=0, new=new, footprint=footprint)

    return asyncio.run(asked())


@pytest.mark.parametrize(("padding", "room"), [(0, True), (1, False)])
def test_padding_cannot_be_moved_for_anybody(padding: int, room: bool) -> None:
    """A request that may come to seven of ten blocks runs. One of three asks: while it is written to, the first could
    still have seven, but not beside a block that graphs keep for padding."""
    ledger = Ledger(10)
    ledger.take(padding)
    jobs = [job(footprint=7)]
    assert has_room(ledger, jobs, new=3, footprint=3, padding=padding) is room
    assert has_room(ledger, jobs, new=2, footprint=3, padding=padding)


@pytest.mark.parametrize(
    ("runs", "granted", "revoked", "room"),
    [(6, 0, 0, True), (6, 0, 1, False), (6, 1, 0, False), (0, 0, 2, True), (0, 0, 3, False)],
)
def test_each_could_still_grow_beside_what_cannot_be_moved(runs: int, granted: int, revoked: int, room: bool) -> None:
    """A request of 6 runs on a device of 10; one of 8 asks, of which 4 are its prompt: while that is written to, the
    first could still have 6. Another grant of 1, or a revoked one, and it could not."""
    ledger = Ledger(10)
    jobs = [job(footprint=runs)] if runs else []
    if granted:
        jobs.append(job(footprint=granted, blocks=ledger.take(granted)))
        ledger.give_writer(jobs[-1].blocks, GrantId(b"granted"))
    ledger.give_writer(ledger.take(revoked), GrantId(b"revoked"))
    assert has_room(ledger, jobs, new=4, footprint=8) is room
