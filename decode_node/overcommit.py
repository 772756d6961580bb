"""Whether one more request may be granted on a node that promises more than its device holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachestore.admission import Claim, each_fits
from cachestore.spill import Spill
from kvtransfer.ledger import Ledger

if TYPE_CHECKING:
    from decode_node.node import Job


def may_overcommit(spill: Spill, ledger: Ledger, jobs: Iterable[Job], *, prefix: int, new: int, footprint: int) -> bool:
    """Beside the sum of blocks and promises: nobody waits in host memory, those who run find their headroom, and each
    request could still grow to its full size.

    The new one would hold `prefix` blocks that are here, take `new` ones, and may come to `footprint` in all.
    """
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
