"""Which records of a request are posted to its decode node, and when: each once, as soon as it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from baton.ids import BlockId, RequestKey
from cachestore.block_manager import BlockManager
from engine.types import Batch, SequenceSlice
from kvtransfer.writer import Handoff, StepWrites
from prefill_node.job import Job


@dataclass(slots=True, eq=False, kw_only=True)
class StepSink:
    """Posts, after each layer, the records that this step finishes."""

    tokens: int
    began_s: float
    writes: list[StepWrites] = field(default_factory=list)

    def layer_done(self, layer: int) -> None:
        for step_writes in self.writes:
            step_writes.layer_done(layer)


class Posting:
    """Of one prefill node; control thread only. What is planned here the engine thread posts (`StepSink`)."""

    def __init__(self, blocks: BlockManager, *, num_layers: int) -> None:
        self._blocks = blocks
        self._num_layers = num_layers

    def post_cached(self, job: Job, handoff: Handoff, table: list[BlockId], cached_blocks: int) -> None:
        """Pin the prompt's blocks until the transport has let go of them, and send what decode lacks of the cached."""
        self._blocks.hold(table)
        job.pinned = list(table)
        handoff.pin(len(table))
        job.next_block = handoff.prefix_skip
        writes = self.plan(job, handoff, cached_blocks)
        if writes is not None:
            for layer in writes.layers:
                writes.layer_done(layer)
            writes.finish()

    def sink(self, batch: Batch, jobs: Mapping[RequestKey, Job], *, now_s: float) -> StepSink:
        """For the step that begins: what it finishes of each of these jobs that is handed over."""
        tokens = sum(piece.stop - piece.start for piece in batch.slices if piece.output_index == 0)
        sink = StepSink(tokens=tokens, began_s=now_s)
        for piece in batch.slices:
            job = jobs.get(piece.key)
            if job is not None and job.handoff is not None and job.handoff.may_post():
                writes = self.plan(job, job.handoff, self._finished_blocks(piece))
                if writes is not None:
                    sink.writes.append(writes)
        return sink

    def plan(self, job: Job, handoff: Handoff, end_block: int) -> StepWrites | None:
        """Writes of the prompt's blocks from `next_block` to `end_block`, all layers. None if there are none."""
        assert job.seq is not None
        first, job.next_block = job.next_block, max(job.next_block, end_block)
        if first >= job.next_block:
            return None
        src = job.seq.block_table[first : job.next_block]
        dst = handoff.dst_blocks[first - handoff.prefix_skip : job.next_block - handoff.prefix_skip]
        return handoff.plan_step(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), range(self._num_layers))

    def _finished_blocks(self, piece: SequenceSlice) -> int:
        """How many of the prompt's records are finished by this slice: full ones, and the last one at the end."""
        size = self._blocks.block_size
        return self._blocks.blocks_for(piece.stop) if piece.sample else piece.stop // size
