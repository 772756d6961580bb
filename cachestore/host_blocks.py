"""Which blocks of host memory are in use. Pure; owned by the node's control thread.

Every block is free, in a copy that is under way, or filled; the sum is the tier.
"""

from __future__ import annotations

from typing import NewType

from cachestore.ledger import ConservationError

HostBlockId = NewType("HostBlockId", int)


class HostBlocks:
    """The ledger of the tier. Asserts on misuse: misuse is our own bug."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._free = [HostBlockId(b) for b in range(num_blocks - 1, -1, -1)]
        self._copying: set[HostBlockId] = set()
        self._filled: set[HostBlockId] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filled(self) -> int:
        """Blocks whose content is nowhere else."""
        return len(self._filled)

    @property
    def copying(self) -> int:
        """Blocks of copies under way: their content is, or will be, on the device as well."""
        return len(self._copying)

    def begin_out(self, count: int) -> list[HostBlockId]:
        """Free blocks to be copied to."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        self._copying.update(blocks)
        return blocks

    def fill(self, block: HostBlockId) -> None:
        """The copy out has ended, and the block on the device is given up."""
        assert block in self._copying, block
        self._copying.remove(block)
        self._filled.add(block)

    def begin_back(self, block: HostBlockId) -> None:
        """A filled block is being copied back."""
        assert block in self._filled, block
        self._filled.remove(block)
        self._copying.add(block)

    def release(self, block: HostBlockId) -> None:
        """Its content is not needed here any more; no copy touches it."""
        assert block in self._copying or block in self._filled, block
        self._copying.discard(block)
        self._filled.discard(block)
        self._free.append(block)

    def check(self) -> None:
        """Recount. Raises ConservationError."""
        known = sorted([*self._free, *self._copying, *self._filled])
        if known != list(range(self.num_blocks)):
            raise ConservationError(f"host memory: of {self.num_blocks} blocks the books have {known}")
