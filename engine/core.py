"""The engine: queues, blocks and stop rules around a runner. Knows no network.

All calls are on the node's control thread, except `Engine.run`: it runs one step on the engine thread and touches only
the batch. Meanwhile the control thread may submit, resume and abort.

Overlap scheduling (NanoFlow, Zhu et al. 2024; SGLang), with an `OverlapRunner`: a step may be launched before the one
before is collected. A sequence that ends in the first has a surplus slice in the second: its token is dropped, and the
blocks that it writes to stay held until it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.ids import RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from engine.scheduler import After, Scheduler, SchedulerConfig, Sequence, SequenceMode
from engine.types import (
    NO_TOKEN,
    STEPS_IN_FLIGHT_MAX,
    Batch,
    FinishReason,
    KvSink,
    OverlapRunner,
    Runner,
    SequenceSlice,
    StepResult,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False, kw_only=True)
class TokenEvent:
    """A sequence has drawn a token, has ended, or both. Not changed once made.

    A PREFILL_ONLY sequence leaves the engine with its first token, whether `finish` is set or not.
    """

    seq: Sequence
    token: int | None
    index: int
    """Index of `token` in the output; without a token, the number of output tokens."""
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of `token`, if the request asks."""


@dataclass(slots=True, eq=False)
class EngineCounters:
    """Totals since the start. Only the engine changes them."""

    steps: int = 0
    steps_overlapped: int = 0
    """Those of `steps` that were launched while the step before was in flight."""
    steps_held_back: int = 0
    """Times that the next step waited for the one in flight: a draw needs tokens or scores on the host, or blocks have
    to move to host memory first."""
    tokens_computed: int = 0
    """Surplus slices do not count."""
    tokens_drawn: int = 0
    tokens_surplus: int = 0
    """Dropped, as their sequences had ended."""
    not_finite: int = 0
    """Sequences that ended because their scores were not numbers."""


class Engine:
    """One runner, bound to its region, and its sequences, each from `submit` or `resume` until it leaves with an event.
    Then the engine releases blocks and promise in COMPLETE mode, the caller the blocks in PREFILL_ONLY mode.
    """

    def __init__(self, runner: Runner, blocks: BlockManager, config: SchedulerConfig) -> None:
        assert runner.layout.block_size == blocks.block_size, (runner.layout.block_size, blocks.block_size)
        assert runner.layout.num_groups == blocks.groups, (runner.layout.num_groups, blocks.groups)
        self._runner = runner
        self._blocks = blocks
        self.scheduler = Scheduler(config, blocks)
        self.counters = EngineCounters()
        self.overlap: OverlapRunner | None = None
        """The runner, if steps are launched and collected instead of run."""
        if isinstance(runner, OverlapRunner) and config.rows_max <= runner.overlap_rows_max:
            self.overlap = runner
        self._flights: deque[tuple[Batch, list[Sequence]]] = deque()
        """Steps in flight, each with the sequences of its slices."""
        self._aborting: set[RequestKey] = set()
        self._events: list[TokenEvent] = []
        self.changed: Callable[[], None] = lambda: None
        """Called when a sequence has come or is to leave: there may be work. Set by the loop that steps."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence is here or a step is in flight."""
        scheduler = self.scheduler
        return scheduler.running + scheduler.waiting + scheduler.swapped_out > 0 or bool(self._flights)

    def describe(self) -> dict[str, str]:
        """For people: how many steps overlapped the host's work, and how many requests had no usable scores."""
        counters = self.counters
        facts = {"requests ended by scores that are not numbers": str(counters.not_finite)}
        if self.overlap is None:
            return facts
        counts = f"{counters.steps_overlapped} of {counters.steps}, {counters.steps_held_back} held back"
        return {"steps overlapped": f"{counts}, {counters.tokens_surplus} surplus tokens", **facts}

    def submit(self, seq: Sequence) -> None:
        """Take a sequence to compute. Its blocks are held and its promise is made (see `Scheduler.submit`).

        Raises EngineFullError: too many are waiting; the sequence stays the caller's.
        """
        self._check(seq)
        self.scheduler.submit(seq)
        self._entered(seq)

    def resume(self, seq: Sequence) -> None:
        """Take a sequence to decode: all its tokens but the last are computed.

        Raises EngineFullError: too many are waiting; the sequence stays the caller's.
        """
        self._check(seq)
        assert seq.output_count < seq.params.max_tokens, (seq.key, "has ended already")
        self.scheduler.resume(seq)
        self._entered(seq)

    def swap_out(self, seq: Sequence) -> None:
        """Take a decoding sequence out of the steps. Only from inside `Overcommit.before_step`."""
        assert seq.steps_in_flight == 0, (seq.key, "is in the step in flight")
        assert self.scheduler.overcommit is not None
        self.scheduler.swap_out(seq)
        self.scheduler.overcommit.swapped_out(seq)

    def has(self, key: RequestKey) -> bool:
        """Whether a sequence with this key is here, even one that is being aborted."""
        return self.scheduler.find(key) is not None

    def abort(self, key: RequestKey) -> bool:
        """End a sequence; False if it is not here. Idempotent until its event is out.

        If steps in flight contain it, it draws no further token, and the last one's `postprocess` returns its event.
        Otherwise it leaves at once, and `take_events` returns the event.
        """
        seq = self.scheduler.find(key)
        if seq is None:
            return False
        if seq.steps_in_flight:
            self._aborting.add(key)
        else:
            self._events.append(self._leave(seq, None, FinishReason.ABORTED))
        self.changed()
        return True

    def take_events(self) -> list[TokenEvent]:
        """Events of sequences that ended outside a step. `postprocess` and `fail_step` return them too."""
        events, self._events = self._events, []
        return events

    def schedule(self) -> Batch | None:
        """The next step's batch; None if there is nothing to do. No step is in flight."""
        assert not self._flights, "a step is in flight"
        return self._take_off(self.scheduler.schedule())

    def schedule_overlapped(self) -> Batch | None:
        """The batch of the step behind the one in flight. None: collect that one first, as the runner does not overlap,
        there is nothing to do, or the step is held back (see `EngineCounters`)."""
        if self.overlap is None:
            return None
        ((ahead, seqs),) = self._flights
        pairs = zip(seqs, ahead.slices, strict=True)
        afters = [(seq, self._after(seq, piece)) for seq, piece in pairs if not seq.has_left]
        going_on = [seq for seq, after in afters if not after.leaves]
        drawing = [seq for seq, after in afters if after.draws and not after.leaves]
        batch = None
        if all(self.overlap.can_overlap(seq.params) for seq in drawing):
            for seq, after in afters:
                seq.after = after
            try:
                batch = self.scheduler.schedule(overlapped=True)
            finally:
                for seq, _ in afters:
                    seq.after = None
        self.counters.steps_overlapped += batch is not None
        self.counters.steps_held_back += batch is None and bool(going_on)
        return self._take_off(batch)

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """Compute the batch, on any thread. Raises what the runner raises."""
        return self._runner.run(batch, sink)

    def postprocess(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        """Take in the oldest step, which is over: append tokens, index full blocks, end sequences -> events."""
        seqs, events = self._land(batch), self.take_events()
        self.counters.tokens_computed += batch.num_tokens
        for seq, piece in zip(seqs, batch.slices, strict=True):
            event = self._advance(seq, piece, result)
            if event is not None:
                events.append(event)
        self.counters.steps += 1
        return events

    def fail_step(self, batch: Batch) -> list[TokenEvent]:
        """Take in the oldest step, which has failed: abort its sequences, those in the next step too when that is over.
        The blocks that it wrote are not indexed."""
        seqs, events = self._land(batch), self.take_events()
        for seq in seqs:
            seq.steps_in_flight -= 1
            if seq.has_left:
                self._release_if_over(seq)
            elif seq.steps_in_flight:
                self._aborting.add(seq.key)
            else:
                events.append(self._leave(seq, None, FinishReason.ABORTED))
        return events

    def _take_off(self, batch: Batch | None) -> Batch | None:
        if batch is None:
            return None
        assert len(self._flights) < STEPS_IN_FLIGHT_MAX
        seqs = []
        for piece in batch.slices:
            seq = self.scheduler.find(piece.key)
            assert seq is not None, piece.key
            seq.steps_in_flight += 1
            seqs.append(seq)
        self._flights.append((batch, seqs))
        return batch

    def _land(self, batch: Batch) -> list[Sequence]:
        assert self._flights and self._flights[0][0] is batch, "not the oldest step in flight"
        return self._flights.popleft()[1]

    def _after(self, seq: Sequence, piece: SequenceSlice) -> After:
        leaves = piece.key in self._aborting
        if piece.sample and not leaves:
            finish = self._finish_reason(seq, len(seq.tokens) + 1, None)
            leaves = finish is not None or seq.mode is SequenceMode.PREFILL_ONLY
        return After(piece.stop, piece.sample, leaves)

    def _check(self, seq: Sequence) -> None:
        size = self._blocks.block_size
        assert len(seq.tokens) < self._runner.context_len_max, (seq.key, len(seq.tokens))
        assert (seq.grammar is None) == (seq.params.grammar is None), (seq.key, "its grammar was left behind")
        written = seq.block_table[self._blocks.full_blocks(seq.computed) :]
        assert not any(block in self._blocks.prefix_cache for block in written), (seq.key, "would write a shared block")
        if seq.mode is SequenceMode.PREFILL_ONLY:
            return
        need = growth_blocks(
            prompt_len=seq.prompt_len,
            known_len=len(seq.tokens),
            max_tokens=seq.params.max_tokens,
            context_len_max=self._runner.context_len_max,
            block_size=size,
            blocks_held=len(seq.block_table),
            groups=self._blocks.groups,
        )
        left = self._blocks.ledger.promise_left(seq.promise_key)
        assert left is not None, (seq.key, "no promise for growth")
        assert left >= need, (seq.key, "promise", left, "growth", need)

    def _entered(self, seq: Sequence) -> None:
        self._blocks.prefix_cache.count_prompt(len(seq.tokens), seq.cached_tokens)
        self._index(seq)
        self.changed()

    def _index(self, seq: Sequence) -> None:
        self._blocks.prefix_cache.index(seq.tokens, seq.block_table, seq.computed, seq.cache_salt, seq.index_cursor)

    def _advance(self, seq: Sequence, piece: SequenceSlice, result: StepResult) -> TokenEvent | None:
        seq.steps_in_flight -= 1
        if seq.has_left:
            self.counters.tokens_computed -= piece.stop - piece.start
            self.counters.tokens_surplus += piece.sample
            self._release_if_over(seq)
            return None
        before, stop, size = seq.computed, piece.stop, self._blocks.block_size
        # Otherwise the step before has failed, and the sequence is being aborted.
        if piece.start == before and stop <= len(seq.tokens):
            seq.computed = stop
            if result.prompt_logprobs:
                seq.prompt_logprobs += result.prompt_logprobs.get(piece.key, ())
            if stop // size > before // size:
                self._index(seq)
        if self._aborting and piece.key in self._aborting:
            return None if seq.steps_in_flight else self._leave(seq, None, FinishReason.ABORTED)
        assert seq.computed == stop, (seq.key, seq.computed, stop)
        if not piece.sample:
            return None
        token = result.sampled[piece.key]
        if token == NO_TOKEN and seq.grammar is not None and seq.grammar.problem:
            return self._leave(seq, None, FinishReason.GRAMMAR)
        if token == NO_TOKEN:
            self.counters.not_finite += 1
            self._blocks.prefix_cache.forget(seq.block_table)  # their KV may be broken
            return self._leave(seq, None, FinishReason.NOT_FINITE)
        seq.tokens.append(token)
        self.counters.tokens_drawn += 1
        logprobs = result.logprobs.get(piece.key) if result.logprobs else None
        finish = self._finish_reason(seq, len(seq.tokens), token)
        if finish is not None or seq.mode is SequenceMode.PREFILL_ONLY:
            return self._leave(seq, token, finish, logprobs)
        return TokenEvent(seq=seq, token=token, index=piece.output_index, finish=None, logprobs=logprobs)

    def _finish_reason(self, seq: Sequence, known: int, token: int | None) -> FinishReason | None:
        """Why it ends with `known` tokens, if it does. `token` is the last of them; None: not known yet."""
        params, runner, output = seq.params, self._runner, known - seq.prompt_len
        ends = token in params.stop_token_ids or (not params.ignore_eos and token in runner.eos_token_ids)
        if ends and output > params.min_tokens:
            return FinishReason.STOP
        if output >= params.max_tokens or known >= runner.context_len_max:
            return FinishReason.LENGTH
        return None

    def _leave(
        self, seq: Sequence, token: int | None, finish: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> TokenEvent:
        self.scheduler.remove(seq)
        self._aborting.discard(seq.key)
        if self.scheduler.overcommit is not None:
            self.scheduler.overcommit.left(seq)
        if seq.mode is SequenceMode.COMPLETE:
            seq.has_left = True
            self._release_if_over(seq)
            self._blocks.ledger.unpromise(seq.promise_key)
        assert seq.mode is SequenceMode.COMPLETE or not seq.steps_in_flight, (seq.key, "its blocks are in use")
        index = seq.output_count if token is None else seq.output_count - 1
        return TokenEvent(seq=seq, token=token, index=index, finish=finish, logprobs=logprobs)

    def _release_if_over(self, seq: Sequence) -> None:
        """Release the blocks of a sequence that has left, unless a launched step may still write to them (I4)."""
        if seq.steps_in_flight == 0:
            self._blocks.release(seq.block_table)
            seq.block_table.clear()
