"""Where each record of a region lies, and what two regions must agree on (docs/memory.md).

Pure. A record is what one block occupies in one layer: its components (K and V; later a latent, scales, states), each
`[head][slot][bytes of one slot and head]`, one after the other. Nothing outside this module assumes K and V.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

FORMAT_VERSION = 1
"""Raised when the meaning of the fields below changes; part of the hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One named tensor of a record: `num_heads` x `block_size` slots of `slot_bytes` each, contiguous in that order."""

    name: str
    num_heads: int
    slot_bytes: int

    def __post_init__(self) -> None:
        assert self.name and self.num_heads > 0 and self.slot_bytes > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Record layout of a region; `num_blocks` is each node's own affair and not part of the hash."""

    components: tuple[Component, ...]
    num_layers: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.components and self.num_layers > 0 and self.block_size > 0, self

    @property
    def record_bytes(self) -> int:
        return sum(c.num_heads * c.slot_bytes for c in self.components) * self.block_size

    def region_bytes(self, num_blocks: int) -> int:
        return self.num_layers * num_blocks * self.record_bytes

    def compatibility_hash(self) -> str:
        """Digest of everything that two regions must share before records are copied between them (I9)."""
        parts = [f"v{FORMAT_VERSION}", f"layers={self.num_layers}", f"block={self.block_size}", f"dtype={self.dtype}"]
        parts += [f"{c.name}:{c.num_heads}x{c.slot_bytes}" for c in self.components]
        return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def kv_layout(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, dtype_bytes: int
) -> Layout:
    """The default layout `[K|V][kv_head][block_size][head_dim]`."""
    slot_bytes = head_dim * dtype_bytes
    return Layout(
        components=(
            Component(name="k", num_heads=num_kv_heads, slot_bytes=slot_bytes),
            Component(name="v", num_heads=num_kv_heads, slot_bytes=slot_bytes),
        ),
        num_layers=num_layers,
        block_size=block_size,
        dtype=dtype,
    )
