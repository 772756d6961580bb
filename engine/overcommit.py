"""What the engine asks of whoever lets it run more than the device holds. With nobody there, growth never waits."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from engine.sequence import Sequence


class Overcommit(Protocol):
    """Called on the control thread, never while it is inside a call of the engine's that it made itself."""

    def before_step(self, runners: Several[Sequence]) -> None:
        """No step is in flight and the next one is about to be put together: the moment to swap out sequences.

        `runners` are those that decode, oldest first.
        """
        ...

    def lets_step(self, runners: Several[Sequence]) -> bool:
        """A step is in flight, so nothing can be swapped out, and the one behind it is about to be put together.

        Whether `before_step` would change nothing. `runners` as there.
        """
        ...

    def swapped_out(self, seq: Sequence) -> None:
        """`seq` will not step until it is swapped in. Its block table, and the references in it, are the callee's."""
        ...

    def left(self, seq: Sequence) -> None:
        """`seq` has left the engine, wherever it was. What `swapped_out` passed on is to be released."""
        ...
