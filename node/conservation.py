"""The running check of block conservation (DESIGN I4): a violation is counted and logged, never silent."""

from __future__ import annotations

from collections.abc import Callable

from baton.clock import Clock
from baton.log import get_log
from cachestore.ledger import ConservationError, Ledger

log = get_log("ledger")

TIME_SHARE_MAX = 0.02
"""Of the control thread's time: in a very large region the recount comes less often than it is asked for."""


class ConservationWatch:
    """Recounts one ledger when asked to, and remembers how often it was wrong."""

    def __init__(self, ledger: Ledger, clock: Clock, *, beside: Callable[[], None] | None = None) -> None:
        """`beside` recounts what lies beside the ledger, and raises ConservationError too."""
        self._ledger = ledger
        self._beside = beside
        self._clock = clock
        self._next_s = 0.0
        self.errors = 0

    def check_sometimes(self) -> None:
        """The regular check, within its share of the time."""
        began_s = self._clock.monotonic_s()
        if began_s >= self._next_s:
            self.check()
            took_s = self._clock.monotonic_s() - began_s
            self._next_s = began_s + took_s / TIME_SHARE_MAX

    def check(self) -> None:
        try:
            self._ledger.check()
            if self._beside is not None:
                self._beside()
        except ConservationError as error:
            self.errors += 1
            log.error("blocks are not conserved", problem=str(error), errors=self.errors)
