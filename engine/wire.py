"""Sampling parameters and log-probabilities: frozen values here, protocol buffers on the wire. Pure."""

from __future__ import annotations

import math

from batonpb import common_pb2

from baton.ids import Attempt, RequestId, RequestKey
from engine.types import FinishReason, SamplingParams, TokenLogprobs

FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


NOT_FINITE_MESSAGE = (
    "The model's scores for the next token are not numbers (NaN, or infinite), so none can be drawn. The same request "
    "may fail again: check the weights, and whether other requests fail on this node too."
)
"""Of an answer that ends by FinishReason.NOT_FINITE."""


def sampling_problem(spec: common_pb2.SamplingSpec, *, vocab_size: int) -> str | None:
    """Why an engine of this vocabulary cannot draw by these parameters; None if it can.

    The router checks the client's input against narrower limits. This is for a peer's mistake: one row that cannot be
    drawn would end every sequence of its batch.
    """
    penalty = spec.repetition_penalty if spec.HasField("repetition_penalty") else 1.0
    numbers = (spec.temperature, penalty, spec.presence_penalty, spec.frequency_penalty, *spec.logit_bias.values())
    if not all(map(math.isfinite, numbers)):
        return "a sampling parameter is not a finite number"
    if spec.temperature < 0 or penalty <= 0 or not 0 < spec.top_p <= 1 or not 0 <= spec.min_p <= 1:
        return "a sampling parameter is out of range"
    if spec.logprobs > vocab_size or spec.min_tokens > spec.max_tokens:
        return "a sampling parameter is out of range"
    outside = [token for token in (*spec.logit_bias, *spec.stop_token_ids) if token >= vocab_size]
    if outside:
        return f"a sampling parameter names token id {outside[0]}, outside the vocabulary of {vocab_size}"
    return None


def params_from_proto(spec: common_pb2.SamplingSpec) -> SamplingParams:
    return SamplingParams(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        seed=spec.seed,
        choice=spec.choice,
        max_tokens=spec.max_tokens,
        stop_token_ids=frozenset(spec.stop_token_ids),
        ignore_eos=spec.ignore_eos,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty if spec.HasField("repetition_penalty") else 1.0,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=tuple(sorted(spec.logit_bias.items())),
        min_tokens=spec.min_tokens,
        logprobs=spec.logprobs if spec.HasField("logprobs") else None,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_ids, message.top_logprobs, strict=True)
    return TokenLogprobs(logprob=message.logprob, top=tuple(top))


def key_from_proto(key: common_pb2.RequestKey) -> RequestKey:
    return RequestKey(request=RequestId(key.request), attempt=Attempt(key.attempt))


def key_to_proto(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=key.request, attempt=key.attempt)
