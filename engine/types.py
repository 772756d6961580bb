"""What passes between the scheduler, a runner and the node that owns both.

Shape suffixes used in this package:
  B sequences in the batch   T new tokens of the whole batch, concatenated   L layers   N blocks of the region
  S slots of a block (block_size)   K KV heads   H query heads   D head dimension   E hidden   V vocabulary
  W those of the T rows whose scores are wanted
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
from batonpb import common_pb2

from baton.ids import BlockId, RequestKey
from baton.wire import grammar_problem
from cachestore.layout import Layout, kv_layout


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token id of the request, or the model's end-of-sequence token
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORTED = "aborted"
    NOT_FINITE = "not_finite"  # its scores were not numbers, so there is no token to draw
    GRAMMAR = "grammar"  # its grammar cannot be followed any further


NO_TOKEN = -1
"""In the place of a drawn token: the row's scores are not finite numbers, and nothing can be drawn from them."""


class GrammarKind(Enum):
    """How a grammar is written. Values are the fields of the message."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    RULES = "rules"  # Lark or GBNF


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the text of an answer may be."""

    kind: GrammarKind
    text: str
    source: int = 0
    """Stands for whose it is: who waits behind whose grammars."""


class GrammarMatcher(Protocol):
    """Follows one answer by its grammar. `engine.grammar` has the only one."""

    @property
    def problem(self) -> str:
        """Why it cannot go on: a limit, or a token that the grammar does not allow. Empty: it can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens. Validated once, in the router; here it is trusted.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are off. See
    `engine.sampler.sample` for the order in which they apply. The seed is always set: the router draws one where the
    client gives none, so that a resumed request gets the same noise.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int = 0
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_p: float = 0.0
    """Excludes tokens less probable than this fraction of the best token's probability."""
    repetition_penalty: float = 1.0
    """For tokens of prompt and output: positive scores are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens of the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the scores of tokens of the output, once for each occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its score); each id once."""
    min_tokens: int = 0
    """No token that ends the answer is drawn before so many others."""
    logprobs: int | None = None
    """How many of the best tokens to report log-probabilities of, besides the drawn one. None: no report."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, each besides itself; but for the first one, which nothing is before. Such a
    sequence is computed from its first token on."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities by the model's own scores, before temperature, penalties and filters."""

    logprob: float
    """Of the token that was drawn."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the best tokens, best first, equal ones by id."""


# NumPy has no bfloat16; a layout needs its size only.
_DTYPE_BYTES = {"bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """Shape of a KV cache that has the same K and V in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """NumPy-style name: "float32", "bfloat16", "uint8"."""

    @property
    def layout(self) -> Layout:
        return kv_layout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            dtype_bytes=_DTYPE_BYTES.get(self.dtype) or np.dtype(self.dtype).itemsize,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceSlice:
    """The part of one sequence that one step computes. Not changed once made (nor frozen, which costs time).

    `tokens[start:stop]` are the new tokens; the KV of `tokens[:start]` is in the region already. `block_table` has at
    least `ceil(stop / block_size)` positions, each with a block of each layer group (cachestore/layout.py). `tokens`
    and `block_table` are the sequence's own lists, which do not change while the step runs.
    """

    key: RequestKey
    tokens: Sequence[int]
    start: int
    stop: int
    block_table: Sequence[BlockId]
    sample: bool
    """True when `stop` is the end of the tokens known: draw the token at position `stop`."""
    output_index: int
    """Index of the token to draw among the request's output tokens; the sampling noise depends on it."""
    params: SamplingParams
    token_pending: bool = False
    """Its one new token is drawn by the step before, which is not collected: `tokens` ends at `start`, and the token is
    on the runner's device. For an `OverlapRunner` only."""
    grammar: GrammarMatcher | None = None

    @property
    def is_scored(self) -> bool:
        """Whether tokens that are known behind its first one are to have log-probabilities."""
        return self.params.prompt_logprobs is not None and len(self.tokens) > self.start + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes, in order."""

    slices: tuple[SequenceSlice, ...]
    every_row: bool = False
    """All of its rows are computed to the end, not only those that tokens are drawn from."""

    @property
    def num_tokens(self) -> int:
        return sum([s.stop - s.start for s in self.slices])

    @property
    def drawing_rows(self) -> list[int]:
        """Which of the T rows are computed to the end: the last of each slice with `sample`, or `every_row`."""
        if self.every_row:
            return [*range(self.num_tokens)]
        ends = accumulate(s.stop - s.start for s in self.slices)
        return [end - 1 for s, end in zip(self.slices, ends, strict=True) if s.sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One entry for each slice with `sample`, in batch order."""

    sampled: dict[RequestKey, int] = field(default_factory=dict)
    """NO_TOKEN where nothing could be drawn."""
    logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict)
    """Of the sampled tokens, for the requests that ask."""
    prompt_logprobs: dict[RequestKey, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the tokens that are known behind each one of a slice, for the requests that ask; of slices without `sample`
    too."""


class KvSink(Protocol):
    """Called on the engine thread when the K and V of one layer of the step are in the region.

    Must not block or raise: the forward step never waits for the network.
    """

    def layer_done(self, layer: int) -> None: ...


class NullSink:
    """For steps whose KV stays here."""

    def layer_done(self, layer: int) -> None:
        del layer


class Runner(Protocol):
    """One model on one device over one region. One thread at a time calls `run`, not always the same one."""

    layout: Layout
    vocab_size: int
    context_len_max: int
    eos_token_ids: frozenset[int]

    def bind(self, region_U8: np.ndarray, num_blocks: int) -> None:
        """Use this region (uint8, one dimension, writable) as the paged pool. The caller keeps it alive and frees it.

        Records lie where `layout` says.
        """
        ...

    def unbind(self) -> None:
        """Drop all views of the region, so that its owner can close it. Idempotent; `run` is not called afterwards."""
        ...

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """Compute the batch, write its KV to the region, call `sink.layer_done` for each layer, draw tokens."""
        ...


STEPS_IN_FLIGHT_MAX = 2
"""Launched and not collected: the one that the device computes, and the next."""


@runtime_checkable
class OverlapRunner(Runner, Protocol):
    """A runner that takes a step while its device computes the one before: at most `STEPS_IN_FLIGHT_MAX` at a time.

    Steps are collected in the order of their launches.
    """

    overlap_rows_max: int
    """How many tokens a step may draw for the next one to overlap it. 0: no steps overlap."""

    def can_overlap(self, params: SamplingParams) -> bool:
        """Whether a token can be drawn by `params` while the host knows neither the token before nor any score."""
        ...

    def launch(self, batch: Batch, sink: KvSink) -> Any:
        """Queue the batch on the device, behind the step before -> the argument of `collect`. Does not wait.

        Reads the batch before it returns; the tokens of slices with a grammar again when the step before is collected,
        at the next `launch` or in `collect`. If it raises, nothing of the batch is written afterwards. `sink` is called
        when a layer is queued.
        """
        ...

    def collect(self, in_flight: Any) -> StepResult:
        """Wait for a launched step, once. When it returns or raises, the step writes nothing any more."""
        ...


FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


NOT_FINITE_MESSAGE = (
    "The model's scores for the next token are not numbers (NaN, or infinite), so none can be drawn. The same request "
    "may fail again: check the weights, and whether other requests fail on this node too."
)
"""Of an answer that ends by FinishReason.NOT_FINITE."""


GRAMMAR_MESSAGE = "The grammar cannot be followed any further: {}. Make it smaller, or ask for another answer."
"""Of an answer that ends by FinishReason.GRAMMAR."""


def sampling_problem(spec: common_pb2.SamplingSpec, *, vocab_size: int) -> str | None:
    """Why an engine with this vocabulary cannot draw by these parameters; None if it can.

    The router checks the client's input against narrower limits. This catches a peer's mistake: one row that cannot be
    drawn would end all sequences of its batch.
    """
    penalty = spec.repetition_penalty if spec.HasField("repetition_penalty") else 1.0
    numbers = (spec.temperature, penalty, spec.presence_penalty, spec.frequency_penalty, *spec.logit_bias.values())
    if not all(map(math.isfinite, numbers)):
        return "a sampling parameter is not a finite number"
    if spec.temperature < 0 or penalty <= 0 or not 0 < spec.top_p <= 1 or not 0 <= spec.min_p <= 1:
        return "a sampling parameter is out of range"
    if max(spec.logprobs, spec.prompt_logprobs) > vocab_size or spec.min_tokens > spec.max_tokens:
        return "a sampling parameter is out of range"
    outside = [token for token in (*spec.logit_bias, *spec.stop_token_ids) if token >= vocab_size]
    if outside:
        return f"a sampling parameter names token id {outside[0]}, outside the vocabulary of {vocab_size}"
    return grammar_problem(spec)


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


def params_from_proto(spec: common_pb2.SamplingSpec) -> SamplingParams:
    """The fields of both have the same names."""
    values: dict[str, Any] = {name: getattr(spec, name) for name in _SAMPLING_FIELDS}
    values["stop_token_ids"] = frozenset(spec.stop_token_ids)
    values["logit_bias"] = tuple(sorted(spec.logit_bias.items()))
    values["repetition_penalty"] = spec.repetition_penalty if spec.HasField("repetition_penalty") else 1.0
    for name in ("logprobs", "prompt_logprobs"):
        values[name] = getattr(spec, name) if spec.HasField(name) else None
    kind = spec.grammar.WhichOneof("kind") if spec.HasField("grammar") else None
    values["grammar"] = None
    if kind is not None:
        text = getattr(spec.grammar, kind)
        values["grammar"] = Grammar(kind=GrammarKind(kind), text=text, source=spec.grammar_source)
    return SamplingParams(**values)


def logprobs_to_proto(logprobs: TokenLogprobs | None) -> common_pb2.TokenLogprobs | None:
    if logprobs is None:
        return None
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )
