"""A runner whose device is late, for tests: the mock model, with launched steps computed when nothing can wait longer.

A step that is launched sees of the host only what was there at its launch; it runs then, or later, and at the latest
when it is collected. So by the time a step runs that overlaps, the engine has taken the one before in.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.ids import BlockId, RequestKey
from engine.core import TokenEvent
from engine.mock import MockConfig, MockRunner
from engine.types import STEPS_IN_FLIGHT_MAX, Batch, KvSink, NullSink, SamplingParams, SequenceSlice, StepResult
from tests.support.engine_bench import SMALL, Node
from tests.support.spill_bench import SpillNode


@dataclass(eq=False)
class LateStep:
    slices: tuple[SequenceSlice, ...]
    """With copies of tokens and block tables as they were."""
    result: StepResult | None = None


class LateRunner(MockRunner):
    """As late as allowed; with `chance`, now and then earlier. Writing to a block that nobody holds is an error."""

    overlap_rows_max = 64

    def __init__(self, config: MockConfig, *, chance: random.Random | None = None) -> None:
        super().__init__(config)
        self.is_held: Callable[[BlockId], bool] = lambda block: True
        self.calls: list[str] = []
        self.break_launch = self.break_collect = -1
        """Numbers of steps, counted from 0, that fail."""
        self._chance = chance
        self._queue: deque[LateStep] = deque()
        self._numbers: dict[int, int] = {}
        self._launched = 0
        self._drawn: dict[RequestKey, int] = {}

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def can_overlap(self, params: SamplingParams) -> bool:
        return params.repetition_penalty == 1

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        raise AssertionError("a runner that overlaps is not to be run")

    def launch(self, batch: Batch, sink: KvSink) -> LateStep:
        number, self._launched = self._launched, self._launched + 1
        self.calls.append(f"launch {number}")
        if number == self.break_launch:
            raise RuntimeError("not launched")
        assert len(self._queue) < STEPS_IN_FLIGHT_MAX
        assert all(len(piece.tokens) == piece.start for piece in batch.slices if piece.token_pending)
        step = LateStep(
            tuple(
                replace(piece, tokens=list(piece.tokens[: piece.stop]), block_table=list(piece.block_table))
                for piece in batch.slices
            )
        )
        self._numbers[id(step)] = number
        self._queue.append(step)
        for layer in range(self.config.num_layers):
            sink.layer_done(layer)
        self._run_some()
        return step

    def collect(self, in_flight: LateStep) -> StepResult:
        number = self._numbers.pop(id(in_flight))
        self.calls.append(f"collect {number}")
        assert self._queue[0] is in_flight, "not the oldest"
        self._compute(in_flight)
        self._run_some()
        self._queue.popleft()
        if number == self.break_collect:
            raise RuntimeError("device lost")
        assert in_flight.result is not None
        return in_flight.result

    def _run_some(self) -> None:
        if self._chance is not None:
            for step in self._queue:
                if self._chance.random() < 0.5:
                    return
                self._compute(step)

    def _compute(self, step: LateStep) -> None:
        if step.result is not None:
            return
        for piece in step.slices:
            first, last = piece.start // self.config.block_size, (piece.stop - 1) // self.config.block_size
            for block in piece.block_table[first : last + 1]:
                assert self.is_held(block), f"block {block} was freed under a step in flight"
        slices = [
            replace(piece, tokens=[*piece.tokens, self._drawn[piece.key]]) if piece.token_pending else piece
            for piece in step.slices
        ]
        step.result = MockRunner.run(self, Batch(slices=tuple(slices)), NullSink())
        self._drawn = step.result.sampled


class Overlap:
    """The engine loop on one thread: what a node's `step` is when its runner overlaps."""

    between: Callable[[], None] | None = None
    """Called wherever the control thread may be asked something: before and after each launch, and after each step."""
    overlaps: Callable[[], bool] | None = None
    """Whether this turn may; always when None."""

    def __init__(self) -> None:
        self._flying: deque[tuple[Batch, LateStep]] = deque()

    def turn(self, node: Node) -> list[TokenEvent]:
        engine, runner = node.engine, node.runner
        assert isinstance(runner, LateRunner)
        runner.is_held = node.ledger.is_held
        self._ask()
        if not self._flying:
            self._launch(node, engine.schedule())
        self._ask()
        if self._flying and (self.overlaps is None or self.overlaps()):
            self._launch(node, engine.schedule_overlapped())
        self._ask()
        events = engine.take_events()
        if self._flying:
            batch, step = self._flying.popleft()
            events += engine.postprocess(batch, runner.collect(step))
        return events

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def _launch(self, node: Node, batch: Batch | None) -> None:
        if batch is not None:
            assert isinstance(node.runner, LateRunner)
            self._flying.append((batch, node.runner.launch(batch, NullSink())))
            node.ledger.check()

    def _ask(self) -> None:
        if self.between is not None:
            self.between()


class OverlapNode(Node):
    def __init__(
        self,
        config: MockConfig = SMALL,
        *,
        num_blocks: int = 64,
        tokens_per_step: int = 16,
        sequences: int = 8,
        chance: random.Random | None = None,
    ) -> None:
        runner = LateRunner(config, chance=chance)
        super().__init__(
            config, num_blocks=num_blocks, tokens_per_step=tokens_per_step, sequences=sequences, runner=runner
        )
        self.late = runner
        self.overlap = Overlap()

    def step(self) -> list[TokenEvent]:
        events = self.overlap.turn(self)
        self.events += events
        self.ledger.check()
        return events


class OverlapSpillNode(SpillNode):
    def __init__(self, *, num_blocks: int, host_blocks: int, chance: random.Random | None = None) -> None:
        super().__init__(num_blocks=num_blocks, host_blocks=host_blocks, runner=LateRunner(SMALL, chance=chance))
        self.overlap = Overlap()

    def step(self) -> list[TokenEvent]:
        steps = self.engine.counters.steps
        events = self.overlap.turn(self)
        self.events += events
        self.check()
        self.idle = self.engine.counters.steps == steps
        return events
