"""How commands end: the error message, the exit status, and Ctrl-C while modules are being imported. Imports next to
nothing: it is there before the rest is."""

from __future__ import annotations

import os
import signal
from typing import Final

ERROR_PREFIX: Final = "error: "
"""How the message begins that a command ends with when its user can do something about it."""
EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells say it."""


class QuietInterrupts:
    """Within it a SIGINT ends the process at once and silently, with status 130: for imports only, which have
    nothing to put away. A KeyboardInterrupt there is a traceback, or lost where an import swallows it.

    To be entered in the main thread; elsewhere, and where SIGINT is ignored or handled otherwise, it changes nothing.
    """

    def __enter__(self) -> None:
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            try:
                signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
            except ValueError:  # not the main thread
                self._ours = False

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
