"""What a node reports of its region, as the leaf's records have it."""

from __future__ import annotations

from baton.wire import BlockLoad
from cachestore.ledger import Ledger


def block_load(ledger: Ledger) -> BlockLoad:
    """The region's blocks by class, from the running books."""
    counts = ledger.books()
    return BlockLoad(
        quarantined=counts.quarantined,
        writer_owned=counts.writer_owned,
        held=counts.held,
        cached=counts.cached,
        free=counts.free,
        promised=counts.promised,
        pinned=counts.pinned,
    )
