"""The same answers from one process: one engine, no network, no handoff. What the demo compares the cluster with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from baton.ids import Attempt, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.build import EngineConfig, EngineKind, build_runner
from engine.core import Engine
from engine.model_config import ComputeDtype
from engine.scheduler import Sequence as EngineSequence
from engine.scheduler import SequenceMode
from engine.types import NullSink, SamplingParams, TokenLogprobs
from router.text import TextCodec

_PROMISE: Final = "reference"


class Reference:
    """Answers one request at a time and takes no prefix from a cache. One thread."""

    def __init__(
        self, model: Path, *, num_blocks: int, compute_threads: int, dtype: ComputeDtype = ComputeDtype.AUTO
    ) -> None:
        """Load the model (blocking). Raises BatonError MODEL_MISSING, MODEL_BROKEN or MODEL_UNSUPPORTED."""
        config = EngineConfig(
            kind=EngineKind.MODEL,
            model=str(model),
            num_blocks=num_blocks,
            compute_threads=compute_threads,
            dtype=dtype,
        )
        self._codec = TextCodec.load(model)
        built = build_runner(config)
        built.runner.bind(np.zeros(built.runner.layout.region_bytes(num_blocks), np.uint8), num_blocks)
        self._context_len_max = built.runner.context_len_max
        self._blocks = BlockManager(Ledger(num_blocks), config.block_size, built.fingerprint.encode())
        self._engine = Engine(built.runner, self._blocks, config.scheduler())
        self._answered = 0

    def encode(self, text: str) -> list[int]:
        return list(self._codec.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer as the router shows it."""
        stream = self._codec.stream()
        return stream.push(ids) + stream.flush()

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The output tokens. Every prompt token is computed here: no prefix is taken from the cache."""
        return [token for token, _ in self.draw(prompt, params)]

    def draw(
        self, prompt: Sequence[int], params: SamplingParams, *, output: Sequence[int] = ()
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """What comes after `output`, which an earlier try has drawn; with log-probabilities where `params` ask."""
        blocks, engine = self._blocks, self._engine
        self._answered += 1
        known = [*prompt, *output]
        held = blocks.blocks_for(len(known))
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(known),
            max_tokens=params.max_tokens,
            context_len_max=self._context_len_max,
            block_size=blocks.block_size,
            blocks_held=held,
        )
        assert blocks.can_admit([], held, growth), "the reference's region is too small"
        sequence = EngineSequence(
            key=RequestKey(request=RequestId(f"reference-{self._answered}"), attempt=Attempt(0)),
            params=params,
            tokens=known,
            prompt_len=len(prompt),
            computed=0,
            block_table=blocks.admit([], held, promise_key=_PROMISE, promise=growth),
            promise_key=_PROMISE,
            mode=SequenceMode.COMPLETE,
        )
        engine.submit(sequence)
        drawn = []
        while (batch := engine.schedule()) is not None:
            events = engine.postprocess(batch, engine.run(batch, NullSink()))
            drawn += [(event.token, event.logprobs) for event in events if event.token is not None]
        return drawn
