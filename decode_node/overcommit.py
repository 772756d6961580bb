"""Whether one more request may be granted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachestore.admission import Claim, each_fits
from cachestore.spill import Spill
from kvtransfer.ledger import Ledger

if TYPE_CHECKING:
    from decode_node.node import Job


def has_room(
    spill: Spill | None, ledger: Ledger, jobs: Iterable[Job], *, prefix: int, new: int, footprint: int
) -> bool:
    """The request would hold `prefix` blocks that are here, take `new` ones, and may come to `footprint` in all.

    Under overcommit (`spill`), beside the sum of blocks and promises: nobody waits in host memory, those who run find
    their headroom, and each request could still grow to its full size.
    """
    if not ledger.can_give(new, footprint - prefix - new, host_backed=spill is not None):
        return False
    if spill is None:
        return True
    if spill.busy or ledger.growable - new < spill.headroom():
        return False
    granted = list(jobs)
    counts = ledger.books()
    of_jobs = sum(len(job.blocks) for job in granted if not job.committed.done())
    claims = [Claim(footprint=footprint, immovable=prefix + new)]
    for job in granted:
        immovable = 0 if job.resumed else len(job.prefix) + len(job.blocks)
        claims.append(Claim(footprint=job.footprint, immovable=immovable))
    return each_fits(
        claims,
        others_immovable=counts.writer_owned + counts.quarantined - of_jobs,
        num_blocks=ledger.num_blocks,
    )
