"""What a node reports of its region, as the leaf's records have it."""

from __future__ import annotations

from baton.wire import BlockLoad
from kvtransfer.ledger import Ledger


def block_load(ledger: Ledger) -> BlockLoad:
    """A recount of the region's blocks by class. O(num_blocks): for reports, not for every step."""
    counts = ledger.counts()
    return BlockLoad(
        quarantined=counts.quarantined,
        writer_owned=counts.writer_owned,
        held=counts.held,
        cached=counts.cached,
        free=counts.free,
        promised=counts.promised,
    )
