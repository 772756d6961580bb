"""The running check of block conservation (DESIGN I4): a violation is counted and logged, never silent."""

from __future__ import annotations

from baton.log import get_log
from kvtransfer.ledger import ConservationError, Ledger

log = get_log("ledger")


class ConservationWatch:
    """Checks one ledger each time it is asked to, and remembers how often it was wrong."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.errors = 0

    def check(self) -> None:
        try:
            self._ledger.check()
        except ConservationError as error:
            self.errors += 1
            log.error("blocks are not conserved", problem=str(error), errors=self.errors)
