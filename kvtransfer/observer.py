"""Trace points of handoffs, for measuring: whoever wants them passes an observer to the writer (`WriterPeer`).

Without one a trace point is a test for None. What is observed carries no time: the observer takes its own.
"""

from __future__ import annotations

from typing import Protocol

from baton.ids import RequestKey


class HandoffObserver(Protocol):
    """Told of the stages of every handoff of a process, each as it happens.

    Called in the middle of things: must return at once and not raise. On the control thread, but `layer_posted`, which
    the engine thread calls after each layer, and the control thread for records that were cached.
    """

    def granted(self, key: RequestKey, *, prefix_skip: int) -> None:
        """The receiver has so many blocks already."""
        ...

    def planned(self, key: RequestKey, *, layers: int, writes: int) -> None:
        """A step begins that will post so many records."""
        ...

    def layer_posted(self, key: RequestKey, layer: int, *, writes: int, nbytes: int) -> None:
        """A layer of a step is computed, and its finished records are with the transport."""
        ...

    def completed(self, key: RequestKey, *, writes: int) -> None:
        """The transport has let go of so many records, in the order in which they were posted."""
        ...

    def all_posted(self, key: RequestKey) -> None:
        """The first token is drawn; seal and Commit are on their way as soon as may be."""
        ...

    def sealed(self, key: RequestKey) -> None:
        """The last write is completed and the seal is behind it."""
        ...

    def ended(self, key: RequestKey, *, committed: bool) -> None: ...
