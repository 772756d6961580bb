"""Where each record of a region lies, and what two regions must agree on (docs/memory.md).

Pure. A record is what one block occupies in one layer: its components (K and V; later a latent, scales, states), each
`[head][slot][bytes of one slot and head]`, one after the other. Nothing outside this module assumes K and V.

The layers form groups: the layers of a group have records of the same components. A *position* is the place of
`block_size` consecutive tokens in a sequence. It has one block in each group, which holds the records of the group's
layers, and a block table lists them position after position: block g of position p is `table[p * num_groups + g]`, so
that a group's own table is `table[g::num_groups]`.

A region is a grid of pages of one size, `num_rows` x `num_blocks`, so that each block serves any group. Layer number
`row` of its group has the record of block b in page `(row, b)`, from the page's start.

Shape suffix: B = one entry for each block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

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
class LayerGroup:
    """Layers, by their numbers in the model, whose records have the same components."""

    layers: tuple[int, ...]
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        assert self.layers and self.components and list(self.layers) == sorted(set(self.layers)), self


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Record layout of a region; `num_blocks` is each node's own affair and not part of the hash."""

    groups: tuple[LayerGroup, ...]
    """Each layer of the model is in one of them."""
    block_size: int
    dtype: str
    num_layers: int = field(init=False)
    page_bytes: int = field(init=False)
    """The largest record of any group."""
    bytes_by_layer: tuple[int, ...] = field(init=False)
    """Of each layer's records."""
    position_bytes: int = field(init=False)
    """The records of one position, in all layers."""
    places: tuple[tuple[int, int], ...] = field(init=False)
    """Of each layer: its group, and its row there."""

    def __post_init__(self) -> None:
        assert self.groups and self.block_size > 0, self.groups
        places = {
            layer: (number, row) for number, group in enumerate(self.groups) for row, layer in enumerate(group.layers)
        }
        num_layers = sum(len(group.layers) for group in self.groups)
        assert sorted(places) == list(range(num_layers)), "each layer is in one group"
        put = object.__setattr__
        put(self, "num_layers", num_layers)
        put(self, "places", tuple(places[layer] for layer in range(num_layers)))
        put(self, "bytes_by_layer", tuple(self.record_bytes_of(group) for group, _ in self.places))
        put(self, "position_bytes", sum(self.bytes_by_layer))
        put(self, "page_bytes", max(self.bytes_by_layer))

    @property
    def num_groups(self) -> int:
        """Blocks of one position."""
        return len(self.groups)

    @property
    def num_rows(self) -> int:
        """Pages of one block."""
        return max(len(group.layers) for group in self.groups)

    @property
    def record_bytes(self) -> int:
        """Of a layout with one group."""
        assert len(self.groups) == 1, "each group has its own"
        return self.page_bytes

    def record_bytes_of(self, group: int) -> int:
        return sum(c.num_heads * c.slot_bytes for c in self.groups[group].components) * self.block_size

    def block_bytes(self, group: int) -> int:
        """The records of one block of this group."""
        return len(self.groups[group].layers) * self.record_bytes_of(group)

    def region_bytes(self, num_blocks: int) -> int:
        return self.num_rows * num_blocks * self.page_bytes

    def offset(self, layer: int, block: int, num_blocks: int) -> int:
        """Where a record begins in a region of so many blocks. The block is one of the layer's group."""
        return (self.places[layer][1] * num_blocks + block) * self.page_bytes

    def block_offsets(self, group: int, blocks: Iterable[int], num_blocks: int) -> Int64Array:
        """Where the records of these blocks of one group begin, `record_bytes_of(group)` each: all those of the group's
        first layer, then those of the next."""
        rows_L1 = np.arange(len(self.groups[group].layers), dtype=np.int64)[:, None]
        blocks_B = np.fromiter(blocks, dtype=np.int64)
        offsets: Int64Array = ((rows_L1 * num_blocks + blocks_B) * self.page_bytes).ravel()
        return offsets

    def compatibility_hash(self) -> str:
        """Digest of everything that two regions must share before records are copied between them (I9)."""
        parts = [f"v{FORMAT_VERSION}", f"layers={self.num_layers}", f"block={self.block_size}", f"dtype={self.dtype}"]
        for group in self.groups:
            if len(self.groups) > 1:
                parts.append(f"group={','.join(map(str, group.layers))}")
            parts += [f"{c.name}:{c.num_heads}x{c.slot_bytes}" for c in group.components]
        return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def kv_layout(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, dtype_bytes: int
) -> Layout:
    """The default layout, one group: `[K|V][kv_head][block_size][head_dim]`."""
    slot_bytes = head_dim * dtype_bytes
    components = (
        Component(name="k", num_heads=num_kv_heads, slot_bytes=slot_bytes),
        Component(name="v", num_heads=num_kv_heads, slot_bytes=slot_bytes),
    )
    group = LayerGroup(layers=tuple(range(num_layers)), components=components)
    return Layout(groups=(group,), block_size=block_size, dtype=dtype)
