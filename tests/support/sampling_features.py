"""One request for each sampling feature, and what is compared: for tests of clusters with a real model."""

from __future__ import annotations

from typing import Any, Final

import pytest
from batonpb import common_pb2

from engine.demo_model import EOS_ID
from engine.types import SamplingParams, TokenLogprobs, params_from_proto
from tests.support.cluster_harness import make_request

TOKENS: Final = 24
FEATURES: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.3},
    "filters": {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.8, "min_p": 0.05},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6},
    "repetition_drawn": {"temperature": 1.0, "repetition_penalty": 0.8, "top_p": 0.95},
    "presence": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency": {"temperature": 0.7, "frequency_penalty": -1.5, "presence_penalty": -0.5},
    "bias": {"temperature": 0.0, "logit_bias": {300: 7.5, 301: 7.25, 302: -50.0}},
    "min_tokens": {"temperature": 0.0, "logit_bias": {EOS_ID: 100.0}, "min_tokens": 9},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "logprobs_of_the_drawn": {"temperature": 1.0, "logprobs": 0},
    "everything": {
        "temperature": 0.9,
        "top_k": 200,
        "top_p": 0.97,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {77: 3.0},
        "min_tokens": 5,
        "logprobs": 20,
    },
}


def params_of(sampling: dict[str, Any], seed: int) -> SamplingParams:
    """What the nodes are to make of the client's message."""
    asked = make_request([1], max_tokens=TOKENS, seed=seed, **sampling).sampling
    spec = common_pb2.SamplingSpec(top_p=1.0)
    for field, value in asked.ListFields():
        if field.name == "logit_bias":
            spec.logit_bias.update(value)
        else:
            setattr(spec, field.name, value)
    for name in ("temperature", "seed", "max_tokens"):
        assert getattr(spec, name) == getattr(asked, name)
    if asked.HasField("logprobs"):
        spec.logprobs = asked.logprobs
    return params_from_proto(spec)


def assert_logprobs(found: TokenLogprobs, expected: TokenLogprobs | None) -> None:
    """The same alternatives; the numbers within what the size of a batch does to float32."""
    assert expected is not None
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-4)


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_ids, message.top_logprobs, strict=True)
    return TokenLogprobs(logprob=message.logprob, top=tuple(top))
