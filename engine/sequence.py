"""One request inside the engine. Mutable; owned by the node's control thread, never seen by the engine thread."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from baton.ids import BlockId, RequestKey
from cachestore.prefix_cache import IndexCursor
from engine.types import SamplingParams


class SequenceMode(Enum):
    """How long a sequence stays in the engine."""

    COMPLETE = "complete"  # until it finishes
    PREFILL_ONLY = "prefill_only"  # until its first token is drawn; its blocks then belong to the caller


@dataclass(frozen=True, slots=True)
class After:
    """What the step in flight will have done to a sequence, as far as the host can know before it is over."""

    computed: int
    """As `Sequence.computed`."""
    draws: bool
    """There will be one token more."""
    leaves: bool
    """It will leave the engine, whatever token is drawn."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens of one attempt at one request, and the blocks that hold their KV.

    Output token i is `tokens[prompt_len + i]`; a retry starts with output already there. The KV of `tokens[:computed]`
    is in the blocks of `block_table`, each of which this sequence holds once. The engine changes `tokens`, `computed`
    and `block_table` while it has the sequence.
    """

    key: RequestKey
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    computed: int
    block_table: list[BlockId]
    promise_key: Hashable
    """Names the ledger's promise that growth is drawn from (COMPLETE only)."""
    mode: SequenceMode
    cache_salt: bytes = b""
    cached_tokens: int = 0
    """How many leading tokens came from the prefix cache; for statistics."""
    index_cursor: IndexCursor = field(default_factory=IndexCursor)
    age: int = -1
    """Its place in the order of entry into the engine, which sets it."""
    steps_in_flight: int = 0
    """Steps that contain it and are not over. Its blocks are not released before they are."""
    has_left: bool = False
    """It has ended, and a step that was launched before that was known is still to be over."""
    after: After | None = None
    """Set only while the step behind the one in flight is being put together."""

    def __post_init__(self) -> None:
        assert 0 < self.prompt_len <= len(self.tokens), (self.prompt_len, len(self.tokens))
        assert 0 <= self.computed < len(self.tokens), (self.computed, len(self.tokens))
        assert 0 <= self.cached_tokens <= len(self.tokens), (self.cached_tokens, len(self.tokens))

    @property
    def planned(self) -> int:
        """How many of its tokens will be computed when the next step begins."""
        return self.computed if self.after is None else self.after.computed

    @property
    def planned_len(self) -> int:
        """How many tokens it will have when the next step begins."""
        return len(self.tokens) if self.after is None else len(self.tokens) + self.after.draws

    @property
    def output_count(self) -> int:
        """Output tokens so far, which is the index of the next one."""
        return len(self.tokens) - self.prompt_len
