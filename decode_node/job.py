"""One request in a decode node, and what it needs of the region."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from batonpb import common_pb2, transfer_pb2

from baton.errors import Reason, bad_field
from baton.ids import BlockId, GrantId, Incarnation, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from decode_node.streams import RequestOutput
from engine.scheduler import Sequence, SequenceMode
from engine.types import Runner, SamplingParams, key_from_proto, params_from_proto, sampling_problem
from kvtransfer.protocol.receiver import AnswerGranted


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request: granted to a prefill node, or kept by the mixed node that this is half of (`kept`).

    A kept one is in the engine from its prompt on; its blocks are the engine's, and `grant` only names its promise.
    """

    key: RequestKey
    grant: GrantId
    tokens: list[int]
    """Prompt, and what the client has of the answer already."""
    prompt_len: int
    params: SamplingParams
    cache_salt: bytes
    prefix: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    deadline_s: float
    output: RequestOutput
    committed: asyncio.Future[bool]
    """True at the commit, False when the grant is over without one. A kept request runs before its commit."""
    footprint: int
    """Blocks that it may come to hold in all."""
    resumed: bool = False
    """The engine has it: its blocks can be moved."""
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    kept: bool = False

    @property
    def runs(self) -> bool:
        """The engine has it, or has had it."""
        return self.kept or (self.committed.done() and self.committed.result())

    def sequence(self, block_table: list[BlockId], *, block_size: int) -> Sequence:
        """What the engine goes on with after the commit; the references of these blocks are the sequence's."""
        return Sequence(
            key=self.key,
            params=self.params,
            tokens=[*self.tokens, self.first_token],
            prompt_len=self.prompt_len,
            computed=len(self.tokens),
            block_table=block_table,
            promise_key=self.grant,
            mode=SequenceMode.COMPLETE,
            cache_salt=self.cache_salt,
            cached_tokens=len(self.prefix) * block_size,
        )


def granted_job(
    request: transfer_pb2.ReserveRequest,
    tokens: list[int],
    granted: AnswerGranted,
    *,
    deadline_s: float,
    footprint: int,
    committed: asyncio.Future[bool],
) -> Job:
    """Of a Reserve that was granted; `tokens` are its prompt and output, the job's from here on."""
    key = key_from_proto(request.key)
    return Job(
        key=key,
        grant=granted.grant,
        tokens=tokens,
        prompt_len=len(request.prompt),
        params=params_from_proto(request.sampling),
        cache_salt=request.cache_salt,
        prefix=granted.prefix,
        blocks=granted.blocks,
        footprint=footprint,
        deadline_s=deadline_s,
        output=RequestOutput(key=key, router=Incarnation(request.router), first_index=len(request.output)),
        committed=committed,
    )


def kept_job(
    seq: Sequence, *, router: Incarnation, deadline_s: float, footprint: int, committed: asyncio.Future[bool]
) -> Job:
    """Of a sequence that the engine has already."""
    assert isinstance(seq.promise_key, bytes), seq.key
    return Job(
        key=seq.key,
        grant=GrantId(seq.promise_key),
        tokens=list(seq.tokens),
        prompt_len=seq.prompt_len,
        params=seq.params,
        cache_salt=seq.cache_salt,
        prefix=(),
        blocks=(),
        deadline_s=deadline_s,
        output=RequestOutput(key=seq.key, router=router, first_index=seq.output_count),
        committed=committed,
        footprint=footprint,
        resumed=True,
        kept=True,
    )


def answer_growth(runner: Runner, tokens: Tokens[int], prompt_len: int, max_tokens: int) -> int:
    """Blocks to promise to a request whose blocks for `tokens` are held, for all that it may draw.

    `tokens` are the prompt, of `prompt_len`, and what the client has of the answer.
    """
    size = runner.kv_spec.block_size
    return growth_blocks(
        prompt_len=prompt_len,
        known_len=len(tokens) + 1,
        max_tokens=max_tokens,
        context_len_max=runner.context_len_max,
        block_size=size,
        blocks_held=-(-len(tokens) // size),
    )


def why_never(
    tokens: Tokens[int],
    prompt_len: int,
    sampling: common_pb2.SamplingSpec,
    *,
    runner: Runner,
    blocks: BlockManager,
) -> str | None:
    """Why this request can never run here, whatever is free. A bad one must not break the steps of the others."""
    if max(tokens) >= runner.vocab_size:
        return f"token id {max(tokens)} is outside the vocabulary of {runner.vocab_size}"
    if sampling.max_tokens <= len(tokens) - prompt_len:
        return "its answer has max_tokens tokens already"
    problem = sampling_problem(sampling, vocab_size=runner.vocab_size)
    if problem is not None:
        return problem
    if len(tokens) >= runner.context_len_max:
        return f"its {len(tokens)} tokens leave no room in a context of {runner.context_len_max}"
    need = blocks.blocks_for(len(tokens)) + answer_growth(runner, tokens, prompt_len, sampling.max_tokens)
    if need > blocks.blocks_usable:
        return f"prompt and answer need {need} blocks, the region has {blocks.ledger.num_blocks}{blocks.less_others}"
    return None


def check_first_token(request: transfer_pb2.CommitRequest, *, vocab_size: int) -> None:
    """The engine continues with this token, and the router reads its log-probabilities.

    Raises BatonError TOKEN_OUT_OF_RANGE or BAD_FIELD.
    """
    logprobs = request.first_logprobs
    outside = [token for token in (request.first_token, *logprobs.top_ids) if token >= vocab_size]
    if outside:
        raise bad_field(
            "first_token",
            f"Token id {outside[0]} is outside the vocabulary of {vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    if len(logprobs.top_ids) != len(logprobs.top_logprobs):
        raise bad_field(
            "first_logprobs",
            f"{len(logprobs.top_ids)} token ids come with {len(logprobs.top_logprobs)} log-probabilities.",
        )
