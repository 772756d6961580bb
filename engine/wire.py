"""Sampling parameters: frozen values here, protocol buffers on the wire. Pure."""

from __future__ import annotations

from batonpb import common_pb2

from baton.ids import Attempt, RequestId, RequestKey
from engine.types import FinishReason, SamplingParams

FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


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
    )


def key_from_proto(key: common_pb2.RequestKey) -> RequestKey:
    return RequestKey(request=RequestId(key.request), attempt=Attempt(key.attempt))


def key_to_proto(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=key.request, attempt=key.attempt)
