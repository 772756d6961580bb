"""What the disk tier's file looks like. Pure.

The first page says whose KV the file has; then come slots of one size. A slot is a header (whole pages) and the block's
data: its records one after the other, filled up to whole pages with zeros. All numbers are little-endian.

A slot of another file id is an empty one: to empty the file is to write a first page with a new id.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from cachestore.tier_books import BlockKey, TierSlot
from kvtransfer.native.disk import PAGE_BYTES, pages

FORMAT_VERSION: Final = 1
FILE_MAGIC: Final = b"BATONKV\0"
BLOCK_MAGIC: Final = b"BATONBLK"
FILE_ID_BYTES: Final = 16
NAME_BYTES_MAX: Final = 64
"""Of the root, and of the layout's hash."""
SLOTS_AT: Final = PAGE_BYTES
_TOKEN_BYTES: Final = 8

_FILE = struct.Struct(f"<8sI{FILE_ID_BYTES}sQQIB{NAME_BYTES_MAX}sB{NAME_BYTES_MAX}s")
_FILE_SUM_BYTES: Final = 16
_FILE_SUM_AT: Final = PAGE_BYTES - _FILE_SUM_BYTES
_BLOCK = struct.Struct(f"<8s8x8xQQQ{FILE_ID_BYTES}s16s16s16sII")  # two sums after the magic: `kvtransfer.native.disk`


class NotOurs(Exception):
    """The first page has something else than zeros or a file of ours: it is not overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """What all blocks of one file have in common. A file of another identity is of no use."""

    kv_root: bytes
    layout_hash: str
    block_bytes: int
    """Of one position: the records of every group and layer."""
    block_tokens: int

    @property
    def header_nbytes(self) -> int:
        return pages(_BLOCK.size + self.block_tokens * _TOKEN_BYTES)

    @property
    def slot_nbytes(self) -> int:
        return self.header_nbytes + pages(self.block_bytes)

    def slots_in(self, nbytes: int) -> int:
        """How many slots a file of this size has; 0: none fits."""
        return max(0, nbytes - SLOTS_AT) // self.slot_nbytes

    def file_nbytes(self, slots: int) -> int:
        return SLOTS_AT + slots * self.slot_nbytes

    def slot_at(self, slot: int) -> int:
        """Where its header is; the data follow."""
        return SLOTS_AT + slot * self.slot_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPage:
    """What the first page says."""

    identity: FileIdentity
    file_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBlock:
    """A whole header. Its data have not been looked at."""

    key: BlockKey
    slot: TierSlot
    sequence: int
    """Of two blocks the one with the higher number was stored later."""
    data_sum: int


def pack_first_page(page: FirstPage) -> bytes:
    identity = page.identity
    root, layout = identity.kv_root, identity.layout_hash.encode()
    assert len(root) <= NAME_BYTES_MAX and len(layout) <= NAME_BYTES_MAX, (root, layout)
    packed = _FILE.pack(
        FILE_MAGIC,
        FORMAT_VERSION,
        page.file_id,
        identity.block_bytes,
        identity.slot_nbytes,
        identity.block_tokens,
        len(root),
        root,
        len(layout),
        layout,
    ).ljust(_FILE_SUM_AT, b"\0")
    return packed + blake2b(packed, digest_size=_FILE_SUM_BYTES).digest()


def read_first_page(page: bytes, identity: FileIdentity) -> FirstPage | str:
    """A string says why the blocks of this file are of no use here. Raises NotOurs."""
    if not any(page):
        return "it is new"
    if not page.startswith(FILE_MAGIC):
        raise NotOurs
    if (
        len(page) < PAGE_BYTES
        or blake2b(page[:_FILE_SUM_AT], digest_size=_FILE_SUM_BYTES).digest() != page[_FILE_SUM_AT:]
    ):
        return "its first page is damaged"
    _, version, file_id, block_bytes, slot_nbytes, block_tokens, root_len, root, layout_len, layout = _FILE.unpack_from(
        page
    )
    if version != FORMAT_VERSION:
        return f"it is of format {version}, this is {FORMAT_VERSION}"
    if root[:root_len] != identity.kv_root:
        return "it is of another model, or of other weights or KV types"
    if layout[:layout_len].decode() != identity.layout_hash or block_bytes != identity.block_bytes:
        return "it has KV of another layout"
    if block_tokens != identity.block_tokens or slot_nbytes != identity.slot_nbytes:
        return "it has blocks of another size"
    return FirstPage(identity=identity, file_id=file_id)


def pack_block_header(file_id: bytes, slot: int, sequence: int, identity: FileIdentity, key: BlockKey) -> bytes:
    """Without the two sums, which whoever writes it fills in, and without the zeros up to its end."""
    assert len(key.packed) == identity.block_tokens * _TOKEN_BYTES, len(key.packed)
    head = _BLOCK.pack(
        BLOCK_MAGIC,
        sequence,
        slot,
        identity.block_bytes,
        file_id,
        key.digest,
        key.parent,
        key.salt,
        key.depth,
        len(key.packed),
    )
    return head + key.packed


def read_block_header(header: bytes | memoryview, file_id: bytes, slot: TierSlot) -> FoundBlock | None:
    """Of a header whose own sum is right. None: it is of another file, or lies where another one belongs."""
    magic, sequence, at_slot, _, of_file, digest, parent, salt, depth, packed_len = _BLOCK.unpack_from(header)
    if magic != BLOCK_MAGIC or of_file != file_id or at_slot != slot:
        return None
    packed = bytes(header[_BLOCK.size : _BLOCK.size + packed_len])
    key = BlockKey(digest=digest, parent=parent, packed=packed, salt=salt, depth=depth)
    return FoundBlock(key=key, slot=slot, sequence=sequence, data_sum=int.from_bytes(header[16:24], "little"))
