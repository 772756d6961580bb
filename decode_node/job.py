"""One request in a decode node, and what it needs of the region."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from batonpb import common_pb2

from baton.ids import BlockId, GrantId, RequestKey
from decode_node.streams import RequestOutput
from engine.block_manager import growth_blocks
from engine.types import Runner, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request: granted to a prefill node, or kept by the mixed node that this is half of (`kept`).

    A kept one is in the engine from its prompt on; its blocks are the engine's, and `grant` only names its promise.
    """

    key: RequestKey
    grant: GrantId
    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes
    prefix: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    deadline_s: float
    output: RequestOutput
    committed: asyncio.Future[bool]
    """True at the commit, False when the grant is over without one. A kept request runs before its commit."""
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    kept: bool = False

    @property
    def runs(self) -> bool:
        """The engine has it, or has had it."""
        return self.kept or (self.committed.done() and self.committed.result())


def answer_growth(runner: Runner, prompt_tokens: int, max_tokens: int) -> int:
    """Blocks to promise to a request whose prompt's blocks are held, for all that it may draw."""
    size = runner.kv_spec.block_size
    return growth_blocks(
        prompt_len=prompt_tokens,
        known_len=prompt_tokens + 1,
        max_tokens=max_tokens,
        context_len_max=runner.context_len_max,
        block_size=size,
        blocks_held=-(-prompt_tokens // size),
    )


def why_never(
    prompt: Sequence[int], sampling: common_pb2.SamplingSpec, *, runner: Runner, num_blocks: int
) -> str | None:
    """Why this request can never run here, whatever is free. A bad one must not break the steps of the others."""
    if max(prompt) >= runner.vocab_size:
        return f"token id {max(prompt)} is outside the vocabulary of {runner.vocab_size}"
    if sampling.max_tokens < 1 or not math.isfinite(sampling.temperature) or not 0 < sampling.top_p <= 1:
        return "its sampling parameters are out of range"
    if len(prompt) >= runner.context_len_max:
        return f"the prompt's {len(prompt)} tokens leave no room in a context of {runner.context_len_max}"
    need = -(-len(prompt) // runner.kv_spec.block_size) + answer_growth(runner, len(prompt), sampling.max_tokens)
    if need > num_blocks:
        return f"prompt and answer need {need} blocks, the region has {num_blocks}"
    return None
