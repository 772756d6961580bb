"""The engine: queues, blocks and stop rules around a runner. Knows no network.

Everything is called on the node's control thread but `Engine.run`, which runs one step on the engine thread and touches
nothing but the batch. Meanwhile the control thread may submit, resume and abort.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.ids import RequestKey
from engine.block_manager import BlockManager, growth_blocks
from engine.overcommit import Overcommit
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence, SequenceMode
from engine.types import Batch, FinishReason, KvSink, Runner, SequenceSlice, StepResult, TokenLogprobs


@dataclass(slots=True, eq=False, kw_only=True)
class TokenEvent:
    """Something happened to a sequence: a token was drawn, it ended, or both. Not changed once made.

    A PREFILL_ONLY sequence leaves the engine with its first token, whether `finish` is set or not.
    """

    seq: Sequence
    token: int | None
    index: int
    """Index of `token` among the output; without a token, how many output tokens there are."""
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of `token`, where the request asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """A snapshot; the last four are totals since the start."""

    running: int
    waiting: int
    steps: int
    tokens_computed: int
    tokens_drawn: int
    tokens_cached: int


class Engine:
    """One runner, bound to its region already, and the sequences it works for.

    A sequence belongs to the engine from `submit` or `resume` until the event in which it leaves. In COMPLETE mode the
    engine then releases its blocks and its promise; in PREFILL_ONLY mode the caller releases `seq.block_table`.
    """

    def __init__(self, runner: Runner, blocks: BlockManager, config: SchedulerConfig) -> None:
        assert runner.kv_spec.block_size == blocks.block_size, (runner.kv_spec.block_size, blocks.block_size)
        self._runner = runner
        self._blocks = blocks
        self._scheduler = Scheduler(config, blocks)
        self._in_flight: Batch | None = None
        self._flying: dict[RequestKey, Sequence] = {}
        self._aborting: set[RequestKey] = set()
        self._events: list[TokenEvent] = []
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_drawn = 0

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def has_work(self) -> bool:
        """There is something to compute, or a step is in flight, or a sequence is parked."""
        return self.running + self.waiting + self.parked > 0

    @property
    def parked(self) -> int:
        """Sequences whose KV is not all on the device now; neither running nor waiting."""
        return self._scheduler.parked

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters(
            running=self.running,
            waiting=self.waiting,
            steps=self._steps,
            tokens_computed=self._tokens_computed,
            tokens_drawn=self._tokens_drawn,
            tokens_cached=self._blocks.prefix_cache.stats.hit_tokens,
        )

    def submit(self, seq: Sequence) -> None:
        """Take a sequence to compute. Its blocks are held, its promise made (see `Scheduler.submit`).

        Raises:
            EngineFullError: too many are waiting; the sequence stays the caller's.
        """
        self._check(seq)
        self._scheduler.submit(seq)
        self._entered(seq)

    def resume(self, seq: Sequence) -> None:
        """Take a sequence whose tokens but the last are computed, and whose last token is known: decode on.

        Raises:
            EngineFullError: too many are waiting; the sequence stays the caller's.
        """
        self._check(seq)
        assert seq.output_count < seq.params.max_tokens, (seq.key, "has ended already")
        self._scheduler.resume(seq)
        self._entered(seq)

    def overcommit(self, overcommit: Overcommit) -> None:
        """Set once, before the first sequence: who parks sequences when their growth does not fit on the device."""
        assert self._scheduler.overcommit is None and not self.has_work
        self._scheduler.overcommit = overcommit

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next step of a decoding sequence starts a new block."""
        return self._scheduler.needs_block(seq)

    def park(self, seq: Sequence) -> None:
        """Take a decoding sequence out of the steps. Only from inside `Overcommit.before_step`."""
        assert seq.key not in self._flying, (seq.key, "is in the step in flight")
        assert self._scheduler.overcommit is not None
        self._scheduler.park(seq)
        self._scheduler.overcommit.parked(seq)

    def unpark(self, seq: Sequence) -> None:
        """Let a parked sequence decode on, its block table whole again. At any time."""
        self._scheduler.unpark(seq)

    def has(self, key: RequestKey) -> bool:
        """Whether a sequence of this key is here, one that is being aborted counted."""
        return self._scheduler.find(key) is not None

    def abort(self, key: RequestKey) -> bool:
        """End a sequence; False when it is not here. Idempotent until its event is out.

        If the step in flight contains it, it keeps its blocks until that step's `postprocess`, whose events tell it.
        Otherwise it leaves at once, and `take_events` has the event.
        """
        seq = self._scheduler.find(key)
        if seq is None:
            return False
        if key in self._flying:
            self._aborting.add(key)
        else:
            self._events.append(self._leave(seq, None, FinishReason.ABORTED))
        return True

    def take_events(self) -> list[TokenEvent]:
        """Events of sequences that ended outside a step. `postprocess` and `fail_step` hand these out too."""
        events, self._events = self._events, []
        return events

    def schedule(self) -> Batch | None:
        """The next step's batch, or None when there is nothing to do. At most one step is in flight."""
        assert self._in_flight is None, "a step is in flight"
        batch = self._scheduler.schedule()
        if batch is None:
            return None
        self._in_flight = batch
        for piece in batch.slices:
            seq = self._scheduler.find(piece.key)
            assert seq is not None, piece.key
            self._flying[piece.key] = seq
        return batch

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """Compute the batch. The only method for another thread; whatever the runner raises comes through."""
        return self._runner.run(batch, sink)

    def postprocess(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        """Take the step's outcome in: tokens appended, full blocks indexed, ended sequences gone. Events in order."""
        assert batch is self._in_flight, "not the step in flight"
        events = self.take_events()
        for piece in batch.slices:
            event = self._advance(self._flying.pop(piece.key), piece, result)
            if event is not None:
                events.append(event)
        self._steps += 1
        self._tokens_computed += batch.num_tokens
        self._landed()
        return events

    def fail_step(self, batch: Batch) -> list[TokenEvent]:
        """`run` raised: abort every sequence of the batch. What it half wrote is not indexed."""
        assert batch is self._in_flight, "not the step in flight"
        events = self.take_events()
        for piece in batch.slices:
            events.append(self._leave(self._flying.pop(piece.key), None, FinishReason.ABORTED))
        self._landed()
        return events

    def _landed(self) -> None:
        assert not self._flying, self._flying
        self._aborting.clear()
        self._in_flight = None

    def _check(self, seq: Sequence) -> None:
        size = self._blocks.block_size
        assert len(seq.tokens) < self._runner.context_len_max, (seq.key, len(seq.tokens))
        written = seq.block_table[seq.computed // size :]
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
        )
        left = self._blocks.ledger.promise_left(seq.promise_key)
        assert left is not None, (seq.key, "no promise for growth")
        assert left >= need, (seq.key, "promise", left, "growth", need)

    def _entered(self, seq: Sequence) -> None:
        self._blocks.prefix_cache.count_prompt(len(seq.tokens), seq.cached_tokens)
        self._index(seq)

    def _index(self, seq: Sequence) -> None:
        self._blocks.index(seq.tokens, seq.block_table, seq.computed, seq.cache_salt, seq.index_cursor)

    def _advance(self, seq: Sequence, piece: SequenceSlice, result: StepResult) -> TokenEvent | None:
        key, stop, size = piece.key, piece.stop, self._blocks.block_size
        before, seq.computed = seq.computed, stop
        if stop // size > before // size:
            self._index(seq)
        if key in self._aborting:
            return self._leave(seq, None, FinishReason.ABORTED)
        if not piece.sample:
            return None
        token = result.sampled[key]
        seq.tokens.append(token)
        self._tokens_drawn += 1
        logprobs = result.logprobs.get(key) if result.logprobs else None
        finish = self._finish_reason(seq, token)
        if finish is not None or seq.mode is SequenceMode.PREFILL_ONLY:
            return self._leave(seq, token, finish, logprobs)
        return TokenEvent(seq=seq, token=token, index=piece.output_index, finish=None, logprobs=logprobs)

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        params, runner, known = seq.params, self._runner, len(seq.tokens)
        output = known - seq.prompt_len
        ends = token in params.stop_token_ids or (not params.ignore_eos and token in runner.eos_token_ids)
        if ends and output > params.min_tokens:
            return FinishReason.STOP
        if output >= params.max_tokens or known >= runner.context_len_max:
            return FinishReason.LENGTH
        return None

    def _leave(
        self, seq: Sequence, token: int | None, finish: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> TokenEvent:
        self._scheduler.remove(seq)
        if self._scheduler.overcommit is not None:
            self._scheduler.overcommit.left(seq)
        if seq.mode is SequenceMode.COMPLETE:
            self._blocks.release(seq.block_table)
            seq.block_table.clear()
            self._blocks.ledger.unpromise(seq.promise_key)
        index = seq.output_count if token is None else seq.output_count - 1
        return TokenEvent(seq=seq, token=token, index=index, finish=finish, logprobs=logprobs)
