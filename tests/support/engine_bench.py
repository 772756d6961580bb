"""A node around an engine over the mock runner and the real ledger, for tests.

Every block is filled with 0xEE when it becomes free, so that a read of freed or never written memory changes a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine, TokenEvent
from engine.mock import MockConfig, MockRunner
from engine.scheduler import SchedulerConfig, Sequence, SequenceMode
from engine.types import FinishReason, NullSink, SamplingParams

POISON = 0xEE
SMALL = MockConfig(num_layers=2, vocab_size=50, block_size=4, context_len_max=256)
GROUPED = replace(SMALL, num_layers=5, latent_layers=(0, 3))
"""Two groups of layers: every position has two blocks."""


class PoisonLedger(Ledger):
    """Tells of each block that becomes free."""

    def __init__(self, num_blocks: int, freed: Callable[[BlockId], None]) -> None:
        super().__init__(num_blocks)
        self._freed = freed

    def evict(self, block: BlockId) -> None:
        super().evict(block)
        if not self.is_held(block):
            self._freed(block)

    def _settle(self, block: BlockId) -> None:
        super()._settle(block)
        if not (self._holds[block] or self._cached[block]):
            self._freed(block)


def key_of(name: str) -> RequestKey:
    return RequestKey(request=RequestId(name), attempt=Attempt(0))


def params_of(
    max_tokens: int = 8,
    *,
    temperature: float = 0.0,
    seed: int = 1,
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )


class Node:
    """What a node does around an engine: admission, steps on this thread, and a record of all events."""

    def __init__(
        self,
        config: MockConfig = SMALL,
        *,
        num_blocks: int = 64,
        tokens_per_step: int = 16,
        sequences: int = 8,
        runner: MockRunner | None = None,
    ) -> None:
        self.config = config
        self.runner = runner or MockRunner(config)
        layout = config.layout
        self.region = np.full(layout.region_bytes(num_blocks), POISON, np.uint8)
        self.pages = self.region.reshape(layout.num_rows, num_blocks, layout.page_bytes)
        self.runner.bind(self.region, num_blocks)
        self.ledger = PoisonLedger(num_blocks, self._poison)
        self.blocks = BlockManager(self.ledger, config.block_size, b"mock", groups=layout.num_groups)
        self.engine = Engine(
            self.runner,
            self.blocks,
            SchedulerConfig(tokens_per_step_max=tokens_per_step, sequences_max=sequences, waiting_max=16),
        )
        self.events: list[TokenEvent] = []

    def _poison(self, block: BlockId) -> None:
        self.pages[:, block] = POISON

    def sequence(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        output: list[int] | None = None,
        mode: SequenceMode = SequenceMode.COMPLETE,
        salt: bytes = b"",
    ) -> Sequence | None:
        """Admit: match, hold, allocate, promise. None when there is no room now."""
        tokens = [*prompt, *(output or [])]
        prefix = self.blocks.match_prompt(tokens, salt)
        held = self.blocks.blocks_for(len(tokens))
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(tokens),
            max_tokens=params.max_tokens,
            context_len_max=self.config.context_len_max,
            block_size=self.config.block_size,
            blocks_held=held,
            groups=self.blocks.groups,
        )
        if mode is SequenceMode.PREFILL_ONLY:
            growth = 0
        if not self.blocks.can_admit(prefix, held - len(prefix), growth):
            return None
        cached = self.blocks.tokens_in(len(prefix))
        return Sequence(
            key=key_of(name),
            params=params,
            tokens=tokens,
            prompt_len=len(prompt),
            computed=cached,
            block_table=self.blocks.admit(prefix, held - len(prefix), promise_key=name, promise=growth),
            promise_key=name,
            mode=mode,
            cache_salt=salt,
            cached_tokens=cached,
        )

    def submit(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        mode: SequenceMode = SequenceMode.COMPLETE,
        salt: bytes = b"",
    ) -> Sequence:
        seq = self.sequence(name, prompt, params, mode=mode, salt=salt)
        assert seq is not None, "no room"
        self.engine.submit(seq)
        return seq

    def step(self) -> list[TokenEvent]:
        batch = self.engine.schedule()
        events = self.engine.take_events()
        if batch is not None:
            events += self.engine.postprocess(batch, self.engine.run(batch, NullSink()))
        self.events += events
        self.ledger.check()
        return events

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def tokens(self, name: str) -> list[int]:
        """The tokens told in events, whose indices must follow each other."""
        mine = [e for e in self.events if e.seq.key == key_of(name) and e.token is not None]
        assert [e.index for e in mine] == list(range(mine[0].index, mine[0].index + len(mine))) if mine else True
        return [e.token for e in mine if e.token is not None]

    def finish(self, name: str) -> list[FinishReason]:
        return [e.finish for e in self.events if e.seq.key == key_of(name) and e.finish is not None]

    def assert_nothing_held(self) -> None:
        counts = self.ledger.check()
        assert (counts.free + counts.cached, counts.promised) == (self.ledger.num_blocks, 0)
        self.blocks.prefix_cache.forget(map(BlockId, range(self.ledger.num_blocks)))
        assert self.ledger.check().free == self.ledger.num_blocks
        assert (self.region == POISON).all()
