"""What every writer's link promises of a posted batch: it stays inside both regions, and it completes once.

Shape suffix: B = one entry per write operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from baton.ids import BlockId, GrantId
from kvtransfer.transport import WriteOps

Completed = Callable[[GrantId, int, int, bool], None]
"""Called on the loop's thread with (grant, writes, bytes, copied); the figures are those of the posted batch."""


class WriteOutOfBounds(Exception):
    """A write reaches outside the source region, the destination or its grant. Nothing of its batch is copied."""


class TooManyAbandonedGrants(Exception):
    """`abandoned_grants_max` is reached: the link has to end, for it must not forget one that may still be posted."""


def check_granted(dst_blocks_B: np.ndarray, granted: Sequence[BlockId]) -> None:
    """Make sure that every block is one of the grant's. Where the receiver takes no part in the writes, only this does.

    Raises:
        WriteOutOfBounds: naming the first that is not.
    """
    if not set(granted).issuperset(asked := dst_blocks_B.tolist()):
        outside = next(block for block in asked if block not in granted)
        raise WriteOutOfBounds(f"block {outside} is none of the {len(granted)} of the grant")


class AbandonedGrants:
    """The grants of which a link moves nothing more. The caller locks."""

    def __init__(self, grants_max: int) -> None:
        self._grants_max = grants_max
        self._grants: set[GrantId] = set()

    def __contains__(self, grant: GrantId) -> bool:
        return grant in self._grants

    def add(self, grant: GrantId) -> TooManyAbandonedGrants | None:
        """What the caller has to raise once it has stopped; the grant is remembered all the same."""
        self._grants.add(grant)
        if len(self._grants) <= self._grants_max:
            return None
        return TooManyAbandonedGrants(f"{self._grants_max} abandoned grants remembered, none may be forgotten")

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for it any more."""
        self._grants.discard(grant)


def check_ops(ops: WriteOps, src_nbytes: int, dst_nbytes: int) -> None:
    """Make sure that every op stays inside both regions.

    Raises:
        WriteOutOfBounds: naming the first op that does not.
    """
    src_B, dst_B, nbytes_B = ops.src, ops.dst, ops.nbytes
    for array in (src_B, dst_B, nbytes_B):
        assert array.dtype == np.int64, array.dtype
        assert array.shape == src_B.shape == (len(src_B),), (array.shape, src_B.shape)
    if len(src_B) == 1:
        # What follows costs as much as sending a single record takes.
        src, dst, nbytes = int(src_B[0]), int(dst_B[0]), int(nbytes_B[0])
        if nbytes >= 0 and 0 <= src <= src_nbytes - nbytes and 0 <= dst <= dst_nbytes - nbytes:
            return
    # Compared so that no sum can overflow.
    bad_B = (nbytes_B < 0) | (nbytes_B > min(src_nbytes, dst_nbytes))
    bad_B |= (src_B < 0) | (src_B > src_nbytes - nbytes_B) | (dst_B < 0) | (dst_B > dst_nbytes - nbytes_B)
    if bad_B.any():
        i = int(bad_B.argmax())
        raise WriteOutOfBounds(
            f"write {i} of {len(src_B)}: {nbytes_B[i]} bytes from {src_B[i]} of {src_nbytes} "
            f"to {dst_B[i]} of {dst_nbytes}"
        )
