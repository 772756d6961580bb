"""Which blocks of host memory are in use. Pure; owned by the node's control thread.

Every block is free, in a copy that is under way, or filled; the sum is the tier.
"""

from __future__ import annotations

from enum import Enum
from typing import NewType

from cachestore.ledger import ConservationError

HostBlockId = NewType("HostBlockId", int)


class _Place(Enum):
    FREE = "free"
    COPYING = "copying"
    FILLED = "filled"


class HostBlocks:
    """The ledger of the tier. Asserts on misuse: misuse is our own bug."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._places = [_Place.FREE] * num_blocks
        self._free = [HostBlockId(b) for b in range(num_blocks - 1, -1, -1)]
        self._filled = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filled(self) -> int:
        """Blocks whose content is nowhere else."""
        return self._filled

    @property
    def copying(self) -> int:
        """Blocks of copies under way: their content is, or will be, on the device as well."""
        return self.num_blocks - self._filled - len(self._free)

    def begin_out(self, count: int) -> list[HostBlockId]:
        """Free blocks to be copied to."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._places[block] = _Place.COPYING
        return blocks

    def fill(self, block: HostBlockId) -> None:
        """The copy out has ended, and the block on the device is given up."""
        assert self._places[block] is _Place.COPYING, (block, self._places[block])
        self._places[block] = _Place.FILLED
        self._filled += 1

    def begin_back(self, block: HostBlockId) -> None:
        """A filled block is being copied back."""
        assert self._places[block] is _Place.FILLED, (block, self._places[block])
        self._places[block] = _Place.COPYING
        self._filled -= 1

    def release(self, block: HostBlockId) -> None:
        """Its content is not needed here any more; no copy touches it."""
        assert self._places[block] is not _Place.FREE, block
        self._filled -= self._places[block] is _Place.FILLED
        self._places[block] = _Place.FREE
        self._free.append(block)

    def check(self) -> None:
        """Recount. Raises ConservationError."""
        counts = [sum(each is place for each in self._places) for place in _Place]
        books = [len(self._free), self.copying, self._filled]
        if counts != books or len(set(self._free)) != len(self._free):
            raise ConservationError(f"host memory: the books say {books} free, copying, filled, the recount {counts}")
