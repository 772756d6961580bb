"""The router's checks of sampling parameters: what is off, what is out of range, and what goes to the nodes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from baton.wire import ModelInfo
from engine.types import SamplingParams, TokenLogprobs, logprobs_to_proto, params_from_proto
from router.request import check_request
from tests.support.sampling_features import logprobs_from_proto

MODEL = ModelInfo(
    name="m",
    fingerprint="f",
    vocab_size=100,
    context_len_max=50,
    eos_token_ids=(1,),
    layout_hash="h",
    block_size=16,
    protocol_min=1,
    protocol_max=1,
)


def spec_of(**sampling: Any) -> common_pb2.SamplingSpec:
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(**sampling))
    request.token_ids.ids.extend([3] * 10)
    checked = check_request(
        request,
        model=MODEL,
        prompt=request.token_ids.ids,
        has_tokenizer=False,
        answer_tokens=lambda _prompt_tokens: 20,
        rng=random.Random(1),
    )
    return checked.sampling


def test_what_is_left_out_is_off() -> None:
    """A request that says nothing of the new fields: the nodes get parameters that change nothing."""
    params = params_from_proto(spec_of(seed=3))
    assert params == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3, max_tokens=20)


def test_off_by_name_is_off_too() -> None:
    """The neutral values, spelt out."""
    spelt = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
    }
    assert spec_of(seed=3, **spelt) == spec_of(seed=3)


def test_every_value_reaches_the_engine() -> None:
    """The ends of each range."""
    params = params_from_proto(
        spec_of(
            min_p=1.0,
            repetition_penalty=100.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias={99: 100.0, 0: -100.0},
            min_tokens=20,
            logprobs=20,
        )
    )
    assert (params.min_p, params.repetition_penalty) == (1.0, 100.0)
    assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 2.0)
    assert params.logit_bias == ((0, -100.0), (99, 100.0))
    assert (params.min_tokens, params.logprobs) == (20, 20)
    assert params_from_proto(spec_of(logprobs=0)).logprobs == 0


def test_log_probabilities_survive_the_wire() -> None:
    """Every bit of them, with and without alternatives."""
    for logprobs in (
        TokenLogprobs(logprob=-0.1, top=((5, -0.1), (2**31, -1e-300))),
        TokenLogprobs(logprob=-math.inf),
    ):
        encoded = logprobs_to_proto(logprobs)
        assert encoded is not None
        message = common_pb2.TokenLogprobs.FromString(encoded.SerializeToString())
        assert logprobs_from_proto(message) == logprobs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("min_p", -0.5, "min_p is -0.5; it must be from 0 (off) to 1."),
        ("min_p", 1.5, "min_p is 1.5; it must be from 0 (off) to 1."),
        ("min_p", float("nan"), "min_p is nan; it must be from 0 (off) to 1."),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0; it must be above 0 and at most 100 (1 is off)."),
        (
            "repetition_penalty",
            float("inf"),
            "repetition_penalty is inf; it must be above 0 and at most 100 (1 is off).",
        ),
        ("presence_penalty", 2.5, "presence_penalty is 2.5; it must be from -2 to 2 (0 is off)."),
        ("presence_penalty", float("nan"), "presence_penalty is nan; it must be from -2 to 2 (0 is off)."),
        ("frequency_penalty", -2.5, "frequency_penalty is -2.5; it must be from -2 to 2 (0 is off)."),
        ("logit_bias", {100: 1.0}, "logit_bias is for token 100; it must be for ids below the vocabulary of 100."),
        ("logit_bias", {5: -101.0}, "logit_bias is -101.0 for token 5; it must be from -100 to 100."),
        ("logit_bias", {5: float("nan")}, "logit_bias is nan for token 5; it must be from -100 to 100."),
        (
            "logit_bias",
            dict.fromkeys(range(1025), 1.0),
            "logit_bias is 1025 tokens long; it must be at most 1024 tokens long.",
        ),
        ("min_tokens", 21, "min_tokens is 21; it must be at most max_tokens, which is 20 here."),
        ("logprobs", 21, "logprobs is 21; it must be at most 20 alternatives."),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: Any, message: str) -> None:
    """The error says what the value is and what it may be."""
    with pytest.raises(BatonError) as caught:
        spec_of(**{field: value})
    error = caught.value
    assert (error.reason, error.field, error.message) == (Reason.SAMPLING_OUT_OF_RANGE, f"sampling.{field}", message)
