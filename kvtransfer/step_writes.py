"""What a handoff writes in one engine step.

Shape suffix: B = one entry per block.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.plan import Int64Array, RecordPlan
from kvtransfer.transport import WriterLink, check_granted

if TYPE_CHECKING:
    from kvtransfer.handoff import Handoff
    from kvtransfer.writer import WriterPeer


@dataclass(slots=True, eq=False, kw_only=True)
class StepWrites:
    """The writes of one handoff in one engine step: the same blocks, layer after layer. Made by `plan_for`."""

    peer: WriterPeer
    handoff: Handoff
    link: WriterLink
    src_blocks_B: Int64Array
    dst_blocks_B: Int64Array
    plan: RecordPlan
    layers: range
    posted: int = 0
    _closed: bool = False
    _posting: threading.Lock = field(default_factory=threading.Lock)
    """Held for a post; once `finish` has had it, nothing is posted any more."""

    @classmethod
    def plan_for(
        cls, handoff: Handoff, src_blocks_B: Int64Array, dst_blocks_B: Int64Array, layers: range
    ) -> StepWrites:
        """Accounted for as posted: from here on they are outstanding, and only `finish` takes that back.

        Raises WriteOutOfBounds: a block that the grant does not open.
        """
        assert handoff.link is not None, handoff
        peer = handoff.peer
        check_granted(dst_blocks_B, handoff.dst_blocks)
        plan = RecordPlan(
            peer.layout,
            src_blocks_B,
            dst_blocks_B,
            src_num_blocks=peer.src_num_blocks,
            dst_num_blocks=peer.link.num_blocks,
        )
        writes = len(layers) * len(src_blocks_B)
        peer.planned(handoff, writes, writes * peer.layout.record_bytes)
        if peer.observer is not None:
            peer.observer.planned(handoff.key, layers=len(layers), writes=writes)
        step = cls(
            peer=peer,
            handoff=handoff,
            link=handoff.link,
            src_blocks_B=src_blocks_B,
            dst_blocks_B=dst_blocks_B,
            plan=plan,
            layers=layers,
        )
        handoff.steps.add(step)
        return step

    def layer_done(self, layer: int) -> None:
        """Post one layer's records, unless the step was finished meanwhile. On the engine thread; returns at once."""
        with self._posting:
            if not self._closed:
                self._post(layer)

    def _post(self, layer: int) -> None:
        ops = self.plan.of_layer(layer)
        nbytes = len(self.src_blocks_B) * self.peer.layout.record_bytes
        self.peer.link.posting(nbytes)
        try:
            self.link.post(self.handoff.grant, ops)
        except BaseException:
            self.peer.link.not_posted(nbytes)
            raise
        self.posted += 1  # at once: the transport has them, whatever goes wrong from here on
        if self.handoff.sample is not None:
            self.handoff.sample.take(layer, self.dst_blocks_B, ops)
        observer = self.peer.observer
        if observer is not None:
            observer.layer_posted(self.handoff.key, layer, writes=len(self.src_blocks_B), nbytes=nbytes)

    def finish(self) -> None:
        """On the control thread, after the step, or within it when the handoff was given up: no layer is posted from
        now on, and those that were not count as dropped. Idempotent.
        """
        with self._posting:
            self._closed = True
        self.handoff.steps.discard(self)
        missing = (len(self.layers) - self.posted) * len(self.src_blocks_B)
        self.posted = len(self.layers)
        if missing:
            self.peer.completed(self.handoff, missing, missing * self.peer.layout.record_bytes)
