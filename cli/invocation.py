"""What the entry point and the commands share: exit statuses, and how this process was started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ERROR_PREFIX: Final = "error: "
"""How the message begins that a command ends with when its user can do something about it."""
EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What every command may ask of its context (`click.Context.obj`)."""

    supervised: bool
    """Started by a supervisor, which reads this process's stdout."""
