"""What a model folder must answer, by transformers; and the comparison of an answer with it.

The rule: an answer equals `generate` in float32, token for token. Where a token differs, it passes only if the two
tokens tie in float64 scores of the same context, and from there on each token must be the best one of its own context
by those scores, or tie with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from baton.ids import Attempt, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine
from engine.runner import TorchRunner
from engine.sampler import gumbel_noise, row_key
from engine.scheduler import SchedulerConfig, SequenceMode
from engine.scheduler import Sequence as EngineSequence
from engine.types import NullSink, SamplingParams
from tests.support.sampler_ways import filtered_scores

TIE_TOLERANCE = 5e-4
"""Scores closer than this tie.

Each of two computations in float32 is off by at most some d from exact scores, so they can disagree about two tokens
only if these are less than 4d apart. d is measured against float64 by `rounding`: up to 5e-5 at 2,000 tokens, where the
scores themselves have a spread of 3 and the best two are 0.9 apart on average.
"""
GENERATE_BATCH_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Where an answer has another token than expected, and that rounding may decide there."""

    prompt_len: int
    index: int
    token: int
    expected: int
    gap: float


class ReferenceModel:
    """transformers' own model of a folder, twice: float32 to generate with, float64 to judge by."""

    def __init__(self, folder: Path) -> None:
        auto_model: Any = transformers.AutoModelForCausalLM
        self._model32 = auto_model.from_pretrained(folder, dtype=torch.float32).eval()
        self._model64 = auto_model.from_pretrained(folder, dtype=torch.float64).eval()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new: int, eos_token_ids: Collection[int] | None = None
    ) -> list[list[int]]:
        """Greedy answers, each ended by an end token if one is drawn. Prompts of one length are computed together.

        `eos_token_ids` replaces the model's own end tokens; empty ignores them.
        """
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        ends = self._model32.generation_config.eos_token_id if eos_token_ids is None else list(eos_token_ids)
        ends = [ends] if isinstance(ends, int) else list(ends)
        answers: dict[int, list[int]] = {}
        for indices in by_length.values():
            for start in range(0, len(indices), GENERATE_BATCH_MAX):
                part = indices[start : start + GENERATE_BATCH_MAX]
                rows = self._generate([prompts[i] for i in part], max_new, ends)
                answers.update(zip(part, rows, strict=True))
        return [answers[i] for i in range(len(prompts))]

    def _generate(self, prompts: Sequence[Sequence[int]], max_new: int, ends: list[int]) -> Iterator[list[int]]:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        out = self._model32.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
        for row in out[:, ids.shape[1] :].tolist():
            length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            yield row[:length]

    @torch.inference_mode()
    def scores64(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Scores from which each token of the answer was to be chosen, given all before it -> float64 [answer, V]."""
        return self._scores(self._model64, prompt, answer)

    @torch.inference_mode()
    def rounding(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """By how much float32 is off here, at most."""
        scores32 = self._scores(self._model32, prompt, answer)
        return float((scores32 - self.scores64(prompt, answer)).abs().max())

    @staticmethod
    def _scores(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        scores: torch.Tensor = model(ids, logits_to_keep=len(answer)).logits[0]
        return scores

    def compare(self, prompt: Sequence[int], answer: Sequence[int], expected: Sequence[int]) -> list[Tie]:
        """Ties of an answer that `generate` gives as `expected`; none where the two are equal.

        Raises AssertionError where they differ and there is no tie. The length after a tie is not compared.
        """
        first = next((i for i, (a, b) in enumerate(zip_longest(answer, expected)) if a != b), None)
        if first is None:
            return []
        where = f"prompt of {len(prompt)} tokens, output token {first}"
        assert first < min(len(answer), len(expected)), f"{where}: {len(answer)} tokens instead of {len(expected)}"
        scores_IV = self.scores64(prompt, answer)
        ties = []
        for index in range(first, len(answer)):
            best = expected[first] if index == first else int(scores_IV[index].argmax())
            gap = float((scores_IV[index, best] - scores_IV[index, answer[index]]).abs())
            assert gap < TIE_TOLERANCE, (
                f"{where}: at {index} {answer[index]} instead of {best}, whose score is {gap:.2e} higher; "
                f"a tie is below {TIE_TOLERANCE:.0e}. Answer {list(answer)}, expected {list(expected)}"
            )
            if best != answer[index]:
                ties.append(Tie(prompt_len=len(prompt), index=index, token=answer[index], expected=best, gap=gap))
        return ties

    def draws(self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams) -> tuple[list[int], float]:
        """What the sampler draws at each index of `answer` from these scores, and the smallest lead of a draw.

        A lead above TIE_TOLERANCE / temperature means that no rounding decides any of these draws, but where top_k or
        top_p cut between two tokens that tie.
        """
        assert params.temperature > 0, params
        scores_IV = self.scores64(prompt, answer) / params.temperature
        filtered_IV = filtered_scores(scores_IV, [params] * len(answer))
        keys = [row_key(params.seed, params.choice, index) for index in range(len(answer))]
        best_I2 = (filtered_IV + gumbel_noise(keys, scores_IV.shape[1])).topk(2, dim=-1)
        lead = float((best_I2.values[:, 0] - best_I2.values[:, 1]).min())
        tokens: list[int] = best_I2.indices[:, 0].tolist()
        return tokens, lead


class OneProcess:
    """The same engine with nothing around it: one region, one ledger, no network, no handoff, no prefix hits."""

    def __init__(self, folder: Path, *, block_size: int, num_blocks: int, tokens_per_step_max: int) -> None:
        self._runner = TorchRunner.load(folder, block_size=block_size)
        layout = self._runner.layout
        self._runner.bind(np.full(layout.region_bytes(num_blocks), 0xFF, dtype=np.uint8), num_blocks)
        self._blocks = BlockManager(Ledger(num_blocks), block_size, b"one process")
        limits = SchedulerConfig(tokens_per_step_max=tokens_per_step_max, sequences_max=16, waiting_max=16)
        self._engine = Engine(self._runner, self._blocks, limits)

    def answers(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
        """Answer all requests in one batch, as far as the scheduler lets them in together."""
        sequences = [self._submit(f"request-{i}", list(prompt), params) for i, (prompt, params) in enumerate(requests)]
        while (batch := self._engine.schedule()) is not None:
            self._engine.postprocess(batch, self._engine.run(batch, NullSink()))
        return [seq.tokens[seq.prompt_len :] for seq in sequences]

    def _submit(self, name: str, prompt: list[int], params: SamplingParams) -> EngineSequence:
        held = self._blocks.blocks_for(len(prompt))
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(prompt),
            max_tokens=params.max_tokens,
            context_len_max=self._runner.context_len_max,
            block_size=self._blocks.block_size,
            blocks_held=held,
        )
        seq = EngineSequence(
            key=RequestKey(request=RequestId(name), attempt=Attempt(0)),
            params=params,
            tokens=prompt,
            prompt_len=len(prompt),
            computed=0,
            block_table=self._blocks.admit([], held, promise_key=name, promise=growth),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
        )
        self._engine.submit(seq)
        return seq
