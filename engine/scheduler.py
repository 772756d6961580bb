"""Which tokens the next step computes: continuous batching with chunked prompts (Orca, Sarathi-Serve).

Pure; owned by the node's control thread. Running sequences go first with one token each, then the prompt already begun,
then waiting prompts in order of arrival, all under one budget of tokens. At most `bypasses_max` later sequences that
come to decode bypass a waiting prompt; prompts never bypass each other. Nothing is preempted to be computed again:
growth comes from a promise made at admission (I5). With `Overcommit` a sequence may be swapped out, or lack a block.

The step behind one in flight is put together from where that one will have left its sequences (`Sequence.after`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.errors import InvalidField
from baton.ids import BlockId, RequestKey
from cachestore.block_manager import BlockManager
from cachestore.prefix_cache import IndexCursor
from engine.types import Batch, GrammarMatcher, SamplingParams, SequenceSlice, TokenLogprobs


class SequenceMode(Enum):
    """How long a sequence stays in the engine."""

    COMPLETE = "complete"  # until it finishes
    PREFILL_ONLY = "prefill_only"  # until its first token is drawn; its blocks then belong to the caller


@dataclass(frozen=True, slots=True)
class After:
    """What the host knows of a sequence's state after the step in flight."""

    computed: int
    """As `Sequence.computed`."""
    draws: bool
    """It gets one more token."""
    leaves: bool
    """It leaves the engine, whatever token is drawn."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens of one attempt at one request, and the blocks that hold their KV. Owned by the control thread.

    Output token i is `tokens[prompt_len + i]`; a retry starts with output already there. The KV of `tokens[:computed]`
    is in the blocks of `block_table`, each held once. The engine changes these three while it has the sequence.
    """

    key: RequestKey
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    computed: int
    block_table: list[BlockId]
    promise_key: Hashable
    """Key of the ledger's promise that growth is drawn from (COMPLETE only)."""
    mode: SequenceMode
    cache_salt: bytes = b""
    cached_tokens: int = 0
    """Leading tokens from the prefix cache; for statistics."""
    index_cursor: IndexCursor = field(default_factory=IndexCursor)
    age: int = -1
    """Its place in the order of entry; set by the engine."""
    steps_in_flight: int = 0
    """Steps in flight that contain it. Its blocks are not released before they are over."""
    has_left: bool = False
    """It has ended, while a step that was launched before may still be in flight."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of its tokens from the second on, as far as they are computed, where the request asks."""
    after: After | None = None
    """Set only while the step behind the one in flight is scheduled."""
    grammar: GrammarMatcher | None = None
    """Of a request with a grammar; set before the engine has it."""

    def __post_init__(self) -> None:
        assert 0 < self.prompt_len <= len(self.tokens), (self.prompt_len, len(self.tokens))
        assert 0 <= self.computed < len(self.tokens), (self.computed, len(self.tokens))
        assert 0 <= self.cached_tokens <= len(self.tokens), (self.cached_tokens, len(self.tokens))

    @property
    def planned(self) -> int:
        """Its computed tokens when the next step begins."""
        return self.computed if self.after is None else self.after.computed

    @property
    def planned_len(self) -> int:
        """Its tokens when the next step begins."""
        return len(self.tokens) if self.after is None else len(self.tokens) + self.after.draws

    @property
    def output_count(self) -> int:
        """Output tokens so far, which is the index of the next one."""
        return len(self.tokens) - self.prompt_len


class Overcommit(Protocol):
    """Moves sequences out of the region. Called on the control thread, never within its own calls of the engine."""

    def before_step(self, runners: Several[Sequence]) -> None:
        """The next step is about to be scheduled, none is in flight: sequences may be swapped out. `runners` decode,
        oldest first."""
        ...

    def lets_step(self, runners: Several[Sequence]) -> bool:
        """Whether `before_step` would change nothing. Called while a step is in flight."""
        ...

    def swapped_out(self, seq: Sequence) -> None:
        """`seq` does not step until it is swapped in. The callee takes over the references of its block table."""
        ...

    def left(self, seq: Sequence) -> None:
        """`seq` has left the engine. Release what `swapped_out` took over."""
        ...


class EngineFullError(RuntimeError):
    """No place in the engine's queue: try again later or elsewhere. The caller keeps its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine. Raises InvalidField."""

    tokens_per_step_max: int
    sequences_max: int
    """Sequences that decode, or whose prompt is begun, at once."""
    waiting_max: int
    """Sequences that may wait for a place; one more is refused."""
    logits_rows_max: int | None = None
    """Tokens drawn in one step: each takes a row of scores. None: `sequences_max`."""
    bypasses_max: int = 32
    """How many later sequences may start to decode while a prompt waits; then it gets the next place."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_step_max", "sequences_max", "waiting_max", "bypasses_max"):
            if getattr(self, name) < 1:
                raise InvalidField(name, f"is {getattr(self, name)}; must be at least 1")
        if self.sequences_max > self.tokens_per_step_max:
            raise InvalidField(
                "sequences_max",
                f"is {self.sequences_max}; must not exceed tokens_per_step_max ({self.tokens_per_step_max}): each "
                "running sequence needs one token of every step",
            )
        if not 1 <= self.rows_max <= self.sequences_max:
            raise InvalidField("logits_rows_max", f"is {self.rows_max}; must be from 1 to {self.sequences_max}")

    @property
    def rows_max(self) -> int:
        return self.sequences_max if self.logits_rows_max is None else self.logits_rows_max


class Scheduler:
    """The queues. After each `schedule` the owner advances the batch's sequences, or removes them."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self._blocks = blocks
        self._running: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self._begun: Sequence | None = None
        self._resumed: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self._prompts: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self._swapped_out: dict[RequestKey, Sequence] = {}
        self._entered = 0
        self._decodes_started = 0
        self._started_before: dict[RequestKey, int] = {}
        """For each waiting prompt, `_decodes_started` when it came."""
        self.overcommit: Overcommit | None = None

    @property
    def swapped_out(self) -> int:
        """Sequences that wait for `swap_in`, without a place or a block table."""
        return len(self._swapped_out)

    @property
    def running(self) -> int:
        """Sequences that decode, or whose prompt is begun."""
        return len(self._running) + (self._begun is not None)

    @property
    def waiting(self) -> int:
        return len(self._resumed) + len(self._prompts)

    def find(self, key: RequestKey) -> Sequence | None:
        if self._begun is not None and self._begun.key == key:
            return self._begun
        return self._running.get(key) or self._resumed.get(key) or self._prompts.get(key) or self._swapped_out.get(key)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence whose tokens from `computed` on are to be computed.

        It holds the blocks of all its tokens already, and in COMPLETE mode a promise for all it may draw.

        Raises EngineFullError: `waiting_max` sequences wait already.
        """
        assert len(seq.block_table) >= self._blocks.blocks_for(len(seq.tokens)), (seq.key, len(seq.block_table))
        self._enter(seq, self._prompts)
        self._started_before[seq.key] = self._decodes_started

    def resume(self, seq: Sequence) -> None:
        """Queue a sequence to decode: all but its last token are computed. Goes before prompts not begun.

        Raises EngineFullError: `waiting_max` sequences wait already. A node asks before it grants, not when it resumes.
        """
        assert seq.mode is SequenceMode.COMPLETE, seq.key
        assert seq.output_count > 0, seq.key
        assert seq.computed == len(seq.tokens) - 1, (seq.key, seq.computed, len(seq.tokens))
        assert len(seq.block_table) >= self._blocks.blocks_for(seq.computed), (seq.key, len(seq.block_table))
        self._enter(seq, self._resumed)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence. Its blocks are not released."""
        if self._begun is seq:
            self._begun = None
            return
        self._started_before.pop(seq.key, None)
        for queue in (self._running, self._resumed, self._prompts, self._swapped_out):
            if queue.pop(seq.key, None) is not None:
                return
        raise AssertionError(f"{seq.key} is not in the scheduler")

    def blocks_needed(self, seq: Sequence) -> int:
        """Blocks that the next step of a decoding sequence takes: none, or those of a new position."""
        return max(0, self._blocks.blocks_for(seq.planned_len) - len(seq.block_table))

    def swap_out(self, seq: Sequence) -> None:
        """Take a decoding sequence out until `swap_in`. The caller takes over its block table."""
        assert self._running.get(seq.key) is seq or self._resumed.get(seq.key) is seq, seq.key
        self.remove(seq)
        self._swapped_out[seq.key] = seq

    def swap_in(self, seq: Sequence) -> None:
        """Let a swapped-out sequence decode again, before others that wait for a place. Its block table is whole."""
        assert len(seq.block_table) >= self._blocks.blocks_for(seq.computed), (seq.key, len(seq.block_table))
        del self._swapped_out[seq.key]
        self._resumed[seq.key] = seq
        self._resumed.move_to_end(seq.key, last=False)

    def schedule(self, *, overlapped: bool = False) -> Batch | None:
        """The next step; None if there is nothing to compute. Takes growth blocks from promises.

        `overlapped`: a step is in flight, and its sequences have their `after`. None too if blocks have to move to host
        memory first.
        """
        self._fill_places()
        if self.overcommit is not None and overlapped:
            if not self.overcommit.lets_step(self._decoding_by_age()):
                return None
        elif self.overcommit is not None:
            self.overcommit.before_step(self._decoding_by_age())
            self._fill_places()
        decoding = self._running.values() if self.overcommit is None else self._decoding_by_age()
        slices = [piece for seq in decoding if (piece := self._decode_slice(seq)) is not None]
        budget = self.config.tokens_per_step_max - len(slices)
        while budget > 0 and (prompt := self._next_prompt()) is not None:
            start = prompt.planned
            stop = min(len(prompt.tokens), start + budget)
            if stop == len(prompt.tokens) and len(self._running) >= self.config.rows_max:
                stop -= 1  # its last token waits for a row of scores, and so do the prompts behind it
                budget = 0
            if stop > start:
                slices.append(_slice(prompt, start, stop))
                budget -= stop - start
            if stop == len(prompt.tokens):
                self._running[prompt.key] = prompt
            else:
                self._begun = prompt
        return Batch(slices=tuple(slices)) if slices else None

    def _enter(self, seq: Sequence, queue: OrderedDict[RequestKey, Sequence]) -> None:
        assert self.find(seq.key) is None, (seq.key, "is in the engine already")
        ledger = self._blocks.ledger
        assert all(map(ledger.is_held, seq.block_table)), (seq.key, "blocks not held")
        if seq.mode is SequenceMode.COMPLETE:
            assert ledger.promise_left(seq.promise_key) is not None, (seq.key, "no promise for growth")
        if self.waiting >= self.config.waiting_max:
            raise EngineFullError(f"{self.config.waiting_max} sequences are waiting already (waiting_max)")
        seq.age = self._entered
        self._entered += 1
        queue[seq.key] = seq

    def _fill_places(self) -> None:
        while self._resumed and self._may_resume():
            key, seq = self._resumed.popitem(last=False)
            self._running[key] = seq
            self._decodes_started += 1

    def _may_resume(self) -> bool:
        """Whether one more may decode. The last place is kept for a prompt that was bypassed too often, the last row of
        scores for a prompt of which only the last token is left."""
        begun = self._begun
        waits_for_row = begun is not None and begun.planned == len(begun.tokens) - 1
        if len(self._running) + waits_for_row >= self.config.rows_max:
            return False
        first = next(iter(self._prompts), None)
        bypassed = 0 if first is None else self._decodes_started - self._started_before[first]
        return self.running + (bypassed >= self.config.bypasses_max) < self.config.sequences_max

    def _decoding_by_age(self) -> list[Sequence]:
        return sorted(self._running.values(), key=lambda seq: seq.age)

    def _next_prompt(self) -> Sequence | None:
        if self._begun is not None:
            if self._begun.after is not None and self._begun.after.leaves:
                return None  # it keeps its place until it has left
            prompt, self._begun = self._begun, None
            return prompt
        if self._prompts and len(self._running) < self.config.sequences_max:
            key, prompt = self._prompts.popitem(last=False)
            del self._started_before[key]
            return prompt
        return None

    def _decode_slice(self, seq: Sequence) -> SequenceSlice | None:
        """None: it lacks a block, or leaves with the step in flight."""
        start, known, after = seq.computed, len(seq.tokens), seq.after
        if after is not None:
            if after.leaves:
                return None
            start, known = seq.planned, seq.planned_len
        assert start == known - 1, (seq.key, start, known)
        groups = self._blocks.groups
        if len(seq.block_table) * self._blocks.block_size < known * groups:
            if not self._blocks.ledger.can_draw(seq.promise_key, groups):
                return None
            seq.block_table += self._blocks.allocate(groups, promise=seq.promise_key)
        return _slice(seq, start, known, token_pending=after is not None)


def _slice(seq: Sequence, start: int, stop: int, *, token_pending: bool = False) -> SequenceSlice:
    return SequenceSlice(
        key=seq.key,
        tokens=seq.tokens,
        start=start,
        stop=stop,
        block_table=seq.block_table,
        sample=stop >= len(seq.tokens),
        output_index=max(stop, len(seq.tokens)) - seq.prompt_len,
        params=seq.params,
        token_pending=token_pending,
        grammar=seq.grammar,
    )
