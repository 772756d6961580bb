"""An engine under overcommit, for tests: the node of `engine_bench`, host memory, and copies that end when told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachestore.block_manager import growth_blocks
from cachestore.spill_policy import SpillState
from engine.core import TokenEvent
from engine.mock import MockConfig, MockRunner
from engine.scheduler import Sequence, SequenceMode
from engine.types import NullSink, SamplingParams
from kvtransfer.native.copy import copy_records
from node.copiers import BlockCopy, BlockPlaces
from node.spill import Spill, SpillConfig
from tests.support.engine_bench import POISON, SMALL, Node, key_of


@dataclass
class HandCopier:
    """Copies nothing until `finish`, in any order."""

    places: BlockPlaces
    device_U8: np.ndarray
    host_U8: np.ndarray
    waiting: list[tuple[BlockCopy, Callable[[BaseException | None], None]]] = field(default_factory=list)

    def start(self, copy: BlockCopy, done: Callable[[BaseException | None], None]) -> None:
        self.waiting.append((copy, done))

    def finish(self, which: int = 0) -> None:
        copy, done = self.waiting.pop(which)
        src_U8, dst_U8 = (self.device_U8, self.host_U8) if copy.out else (self.host_U8, self.device_U8)
        copy_records(dst_U8, src_U8, self.places.ops(copy))
        done(None)

    def finish_all(self) -> None:
        while self.waiting:
            self.finish()


class SpillNode(Node):
    """Promises are backed by `host_blocks` of host memory."""

    def __init__(
        self,
        config: MockConfig = SMALL,
        *,
        num_blocks: int,
        host_blocks: int,
        headroom_blocks: int = 1,
        copy_blocks_max: int = 3,
        tokens_per_step: int = 64,
        sequences: int = 8,
        runner: MockRunner | None = None,
    ) -> None:
        super().__init__(
            config, num_blocks=num_blocks, tokens_per_step=tokens_per_step, sequences=sequences, runner=runner
        )
        layout = self.runner.layout
        self.places = BlockPlaces(layout=layout, device_blocks=num_blocks, host_blocks=host_blocks)
        self.host_memory = np.full(layout.region_bytes(host_blocks), POISON, np.uint8)
        self.copier = HandCopier(self.places, self.region, self.host_memory)
        copier: Any = self.copier
        self.spill = Spill(
            config=SpillConfig(
                host_blocks=host_blocks, headroom_blocks=headroom_blocks, copy_blocks_max=copy_blocks_max
            ),
            engine=self.engine,
            blocks=self.blocks,
            layout=layout,
            copier=copier,
        )
        self.entered: dict[str, Sequence] = {}
        self.footprints: dict[str, int] = {}
        self.blocks.prefix_cache.may_pin = self._may_pin
        self.expected_tokens_computed = 0

    def enter(self, name: str, prompt: list[int], params: SamplingParams, *, salt: bytes = b"") -> bool:
        """Admit under overcommit. False when there is no room now."""
        size = self.config.block_size
        held = self.blocks.blocks_for(len(prompt))
        prefix = self.blocks.match_prompt(prompt, salt)
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(prompt),
            max_tokens=params.max_tokens,
            context_len_max=self.config.context_len_max,
            block_size=size,
            blocks_held=held,
            groups=self.blocks.groups,
        )
        assert held + growth <= self.ledger.num_blocks, "each sequence alone must fit on the device"
        if held + growth > self.blocks.blocks_usable:
            return False
        new, cached = held - len(prefix), self.blocks.tokens_in(len(prefix))
        if not self.blocks.can_admit(prefix, new, growth, host_backed=True):
            return False
        seq = Sequence(
            key=key_of(name),
            params=params,
            tokens=list(prompt),
            prompt_len=len(prompt),
            computed=cached,
            block_table=self.blocks.admit(prefix, new, promise_key=name, promise=growth, host_backed=True),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
            cache_salt=salt,
            cached_tokens=cached,
        )
        self.footprints[name] = held + growth
        self.engine.submit(seq)
        self.entered[name] = seq
        self.expected_tokens_computed += len(prompt) - cached + params.max_tokens - 1
        return True

    def _may_pin(self) -> bool:
        """Each one that is here could do without the block (`decode_node.reserving`)."""
        live = [size for name, size in self.footprints.items() if self.engine.has(key_of(name))]
        return max(live, default=0) + self.blocks.prefix_cache.pinned_blocks < self.ledger.num_blocks

    def state(self, name: str) -> SpillState | None:
        return self.spill._policy.state_of(key_of(name))

    def check(self) -> None:
        """Conservation on the device and in host memory."""
        self.ledger.check()
        self.spill.check()

    def step(self) -> list[TokenEvent]:
        """One step, or none when everybody waits for copies."""
        batch = self.engine.schedule()
        self.check()
        events = self.engine.take_events()
        if batch is not None:
            events += self.engine.postprocess(batch, self.engine.run(batch, NullSink()))
        self.events += events
        self.check()
        self.idle = batch is None
        return events

    def step_until(self, name: str, state: SpillState, *, steps_max: int = 500) -> None:
        """Copies end as soon as they do not keep `name` in this state."""
        for _ in range(steps_max):
            if self.state(name) is state:
                return
            self.step()
            if self.state(name) is not state and self.copier.waiting:
                self.copier.finish()
                self.check()
        raise AssertionError(f"{name} was never {state}")

    def run(self, *, steps_max: int = 2_000) -> None:
        """To the end. Copies end one at a time, and only when everybody waits for them."""
        for _ in range(steps_max):
            if not self.engine.has_work:
                self.copier.finish_all()
                self.events += self.engine.take_events()
                return
            self.step()
            if self.idle and self.engine.has_work and self.copier.waiting:
                self.copier.finish()
                self.check()
        raise AssertionError(f"not over after {steps_max} steps")

    def assert_nothing_held(self) -> None:
        spill = self.spill
        assert (spill.busy, spill.host.copying, spill.host.filled) == (False, 0, 0)
        assert not self.copier.waiting
        self.spill.check()
        super().assert_nothing_held()
