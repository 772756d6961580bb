"""Sampling on a cluster of prefill and decode processes with a real model: what one engine draws, they draw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from batonpb import common_pb2

from baton.errors import BatonError, Reason
from cli.reference import Reference
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import EOS_ID, DemoModelParams, write_demo_model
from tests.support.cluster_harness import Answer, RunningCluster, assert_conserved, error_of, running
from tests.support.sampling_features import FEATURES, TOKENS, assert_logprobs, logprobs_from_proto, params_of

VOCAB: Final = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "model"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=VOCAB))
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[RunningCluster]:
    spec = ClusterSpec(
        prefill=1,
        decode=2,
        model=str(model),
        engine_kind=EngineKind.MODEL,
        blocks=256,
        flags={service: {"engine.poison_freed": True} for service in (Service.PREFILL, Service.DECODE)},
    )
    with running(spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1)


def prompts() -> dict[str, list[int]]:
    rng = random.Random(8)
    return {name: [rng.randrange(2, VOCAB) for _ in range(rng.randrange(5, 90))] for name in FEATURES}


def test_every_feature_is_the_same_as_on_one_engine(cluster: RunningCluster, reference: Reference) -> None:
    """Prefill draws the first token, decode the rest: tokens and logprobs are those of one engine that does it all."""

    async def ask_all() -> dict[str, Answer]:
        calls = {
            name: cluster.client.generate(prompt, max_tokens=TOKENS, seed=i, **FEATURES[name])
            for i, (name, prompt) in enumerate(prompts().items())
        }
        return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))

    answers = cluster.run(ask_all())
    for i, (name, prompt) in enumerate(prompts().items()):
        answer, params = answers[name], params_of(FEATURES[name], i)
        expected = reference.draw(prompt, params)
        assert answer.ids == [token for token, _ in expected], name
        assert answer.stats.decode_node.startswith("decode"), name
        assert len(answer.logprobs) == (0 if params.logprobs is None else len(answer.ids)), name
        for found, (token, wanted) in zip(answer.logprobs, expected, strict=False):
            assert_logprobs(logprobs_from_proto(found), wanted)
            assert len(found.top_ids) == params.logprobs
            if params.temperature == 0 and params.logprobs:
                assert (found.top_ids[0], found.top_logprobs[0]) == (token, found.logprob)
    assert answers["bias"].ids.count(300) > 0
    cluster.run(assert_conserved(cluster))


CHANGING = ("min_p", "repetition", "repetition_drawn", "presence", "frequency", "bias", "min_tokens", "everything")


@pytest.mark.parametrize("name", CHANGING)
def test_every_feature_changes_the_answer(reference: Reference, name: str) -> None:
    """The comparisons here would not notice a parameter that is dropped on both sides."""
    prompt, params = prompts()[name], params_of(FEATURES[name], list(FEATURES).index(name))
    off = replace(
        params, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=()
    )  # fmt: skip
    off = replace(off, min_tokens=0) if name == "everything" else off
    assert reference.answer(prompt, params) != reference.answer(prompt, off)


def test_logprobs_do_not_change_the_answer(reference: Reference) -> None:
    """They are told, not used."""
    for name in ("logprobs", "logprobs_of_the_drawn"):
        params = params_of(FEATURES[name], 3)
        assert params.logprobs is not None
        assert reference.answer([9, 8, 7], params) == reference.answer([9, 8, 7], replace(params, logprobs=None))


def test_min_tokens_holds_the_end_back(cluster: RunningCluster) -> None:
    """A bias that makes the end certain: with min_tokens 9 the end is the tenth token, without it the first."""
    prompt = prompts()["min_tokens"]

    async def ask() -> None:
        biased: dict[str, Any] = {"logit_bias": {EOS_ID: 100.0}, "max_tokens": TOKENS}
        late = await cluster.client.generate(prompt, min_tokens=9, **biased)
        assert (len(late.ids), late.ids[-1], late.reason) == (10, EOS_ID, common_pb2.FINISH_REASON_STOP)
        assert EOS_ID not in late.ids[:-1]
        first = await cluster.client.generate(prompt, logprobs=2, **biased)
        assert (first.ids, first.reason) == ([EOS_ID], common_pb2.FINISH_REASON_STOP)
        assert len(first.logprobs) == 1
        whole = await cluster.client.unary(prompt, logprobs=2, max_tokens=3)
        assert len(whole.logprobs) == len(whole.ids) == 3

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))


@pytest.mark.parametrize("name", list(FEATURES))
def test_a_retry_goes_on_as_the_first_try_would_have(reference: Reference, name: str) -> None:
    """The tokens drawn so far come back as output: penalties, min_tokens, noise and logprobs count them as such."""
    prompt, params = prompts()[name], params_of(FEATURES[name], 5)
    whole = reference.draw(prompt, params)
    for received in (1, 7, len(whole) - 1):
        rest = reference.draw(prompt, params, output=[token for token, _ in whole[:received]])
        assert [token for token, _ in rest] == [token for token, _ in whole[received:]]
        for (_, found), (_, expected) in zip(rest, whole[received:], strict=True):
            assert (found is None) == (params.logprobs is None)
            if found is not None:
                assert_logprobs(found, expected)


@pytest.mark.parametrize(
    ("sampling", "field", "message"),
    [
        ({"min_p": -0.1}, "min_p", "min_p is -0.1; it must be from 0 (off) to 1."),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "must be above 0 and at most 100"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be at most 20 alternatives."),
    ],
)
def test_a_wrong_value_is_refused_at_the_router(
    cluster: RunningCluster, sampling: dict[str, Any], field: str, message: str
) -> None:
    """The error reaches the client with the field's name."""

    async def ask() -> BatonError:
        return await error_of(cluster.client.generate([5, 6], max_tokens=2, **sampling))

    error = cluster.run(ask())
    assert (error.reason, error.field) == (Reason.SAMPLING_OUT_OF_RANGE, f"sampling.{field}")
    assert message in error.message
