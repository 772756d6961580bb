"""Whether one more request may be granted, or one more block pinned."""

from __future__ import annotations

from collections.abc import Collection

from cachestore.admission import Claim, each_fits
from cachestore.block_manager import BlockManager
from cachestore.ledger import Ledger
from decode_node.job import Job
from node.spill import Spill


class Admission:
    """Of one decode node; reads only. Under overcommit (`spill`) it answers the prefix cache about pins too."""

    def __init__(self, spill: Spill | None, ledger: Ledger, blocks: BlockManager, jobs: Collection[Job]) -> None:
        """`jobs` is a view: the node's requests as they are at each question."""
        self._spill = spill
        self._ledger = ledger
        self._blocks = blocks
        self._jobs = jobs
        self.host_backed = spill is not None
        """Whether promises may be covered by host memory."""
        if spill is not None:
            blocks.prefix_cache.may_pin = self._may_pin

    def has_room(self, *, prefix: int, new: int, footprint: int) -> bool:
        """The request would hold `prefix` blocks that are here, take `new` ones, and may come to `footprint` in all.

        Under overcommit, beside the sum of blocks and promises: nobody waits in host memory, those who run find their
        headroom, and each request could still grow to its full size.
        """
        if not self._ledger.can_give(new, footprint - prefix - new, host_backed=self.host_backed):
            return False
        if self._spill is None:
            return True
        if self._spill.busy or self._ledger.growable - new < self._spill.headroom():
            return False
        cache = self._blocks.prefix_cache
        pins_to_come = cache.pinned_blocks_wanted - cache.pinned_blocks  # they wait for those before it, not for it
        return self._all_fit(Claim(footprint=footprint + pins_to_come, immovable=prefix + new))

    def _may_pin(self) -> bool:
        """Whether each request could still grow to its full size with one more block pinned, which cannot be moved."""
        return self._all_fit(pins_more=1)

    def _all_fit(self, *more: Claim, pins_more: int = 0) -> bool:
        counts = self._ledger.books()
        of_jobs = sum(len(job.blocks) for job in self._jobs if not job.committed.done())
        claims = [*more]
        for job in self._jobs:
            immovable = 0 if job.resumed else len(job.prefix) + len(job.blocks)
            claims.append(Claim(footprint=job.footprint, immovable=immovable))
        kept = self._blocks.padding_blocks + self._blocks.prefix_cache.pinned_blocks + pins_more
        return each_fits(
            claims,
            others_immovable=counts.writer_owned + counts.quarantined - of_jobs,
            blocks_usable=self._ledger.num_blocks - kept,
        )
