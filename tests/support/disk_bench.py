"""Blocks of a small shape, and a disk file that is driven from a test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cachestore.tier_books import BlockKey, TierBooks, TierSlot, block_keys
from kvtransfer.native.disk import BlockIo, Offsets, page_buffer
from node.disk_file import DiskFile, Outcome
from node.disk_format import FileIdentity

WAIT_S = 20
BLOCK_TOKENS = 4
ROOT = b"r" * 16


class DiskBench:
    """Memory of blocks of so many bytes, and files of them."""

    def __init__(self, block_bytes: int, *, blocks: int = 16, seed: int = 0) -> None:
        self.memory_U8 = page_buffer(blocks * block_bytes)
        self.memory_U8[:] = np.random.default_rng(seed).integers(0, 256, len(self.memory_U8), np.uint8)
        self.identity = FileIdentity(
            kv_root=ROOT, layout_hash="layout", block_bytes=block_bytes, block_tokens=BLOCK_TOKENS
        )

    def places(self, blocks: Sequence[int]) -> Offsets:
        return np.asarray(blocks, dtype=np.int64) * self.identity.block_bytes

    def content(self, block: int) -> bytes:
        nbytes = self.identity.block_bytes
        return self.memory_U8[block * nbytes :][:nbytes].tobytes()

    def open(
        self, path: Path, slots: int, *, identity: FileIdentity | None = None, io: BlockIo | None = None
    ) -> DiskFile:
        identity = identity or self.identity
        bytes_max = identity.file_nbytes(slots)
        return DiskFile.open(path, bytes_max=bytes_max, identity=identity, io=io)


def keys(first: int, count: int, salt: bytes = b"") -> list[BlockKey]:
    """Of a chain of its own."""
    return block_keys(ROOT, salt, list(range(first, first + count * BLOCK_TOKENS)), BLOCK_TOKENS)


async def store(
    file: DiskFile, bench: DiskBench, slots: Sequence[int], of: Sequence[BlockKey], blocks: Sequence[int]
) -> list[Outcome]:
    ended: asyncio.Queue[Sequence[Outcome]] = asyncio.Queue()
    at_B = bench.places(blocks)
    file.start_store(bench.memory_U8, [TierSlot(s) for s in slots], of, at_B, ended.put_nowait)
    async with asyncio.timeout(WAIT_S):
        return list(await ended.get())


async def load(file: DiskFile, bench: DiskBench, slots: Sequence[int], blocks: Sequence[int]) -> list[Outcome]:
    ended: asyncio.Queue[Sequence[Outcome]] = asyncio.Queue()
    file.start_load(bench.memory_U8, [TierSlot(s) for s in slots], bench.places(blocks), ended.put_nowait)
    async with asyncio.timeout(WAIT_S):
        return list(await ended.get())


def restored(file: DiskFile) -> TierBooks:
    books = TierBooks(file.num_slots, file.block_bytes)
    file.restore(books)
    books.check()
    return books
