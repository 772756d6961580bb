"""Whether growth can always go on under overcommit. Pure.

Blocks of running sequences can be moved to host memory; those that a remote writer owns, or that a grant's request
holds before it runs, cannot. So admission asks, beside the sum (`Ledger.can_give`), that each sequence could have the
device to itself but for those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One request that has been granted, or would be."""

    footprint: int
    """Blocks that it may come to hold in all."""
    immovable: int
    """Blocks that it has and that cannot be moved now; 0 once it runs."""


def each_fits(claims: Iterable[Claim], *, others_immovable: int, blocks_usable: int) -> bool:
    """`others_immovable` blocks are in nobody's claim: those of revoked grants whose writer has not let go.

    `blocks_usable` are those of the device, less what pins and the engine's padding keep.
    """
    known = list(claims)
    immovable = others_immovable + sum(claim.immovable for claim in known)
    return all(immovable - claim.immovable + claim.footprint <= blocks_usable for claim in known)
