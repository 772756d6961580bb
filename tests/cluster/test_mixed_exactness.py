"""Mixed nodes with real weights: what one keeps is what it would hand over, and what one engine or `generate` gives.

Every freed block is filled with NaN. Prompts run where they come in or at the other node, and running sequences share
their batches with prompts of both kinds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from batonpb import common_pb2

from cli.reference import Reference
from cli.services import Service
from engine.demo_model import EOS_ID
from tests.support.cluster_harness import Answer, assert_conserved
from tests.support.exactness_cluster import LLAMA, Served, random_prompt, serving
from tests.support.sampling_features import FEATURES, TOKENS, assert_logprobs, logprobs_from_proto, params_of

pytestmark = pytest.mark.slow

BOTH_WAYS_S_MAX: Final = 60.0
"""A node that loses its lease for want of a processor is back by then."""
AT_ONCE_MAX: Final = 16
TIES_SHARE_MAX: Final = 0.002
WAYS: Final = {"local", "shm"}


ENGINE: Final = {
    "engine.poison_freed": True,
    "engine.block_size": LLAMA.block_size,
    "engine.tokens_per_step_max": LLAMA.tokens_per_step_max,
}


def flags(mixed: Mapping[str, object]) -> dict[Service, Mapping[str, object]]:
    return {Service.MIXED: mixed, Service.ROUTER: {"placement_wait_ms_max": 60_000}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """mixed-0 hands over all but what it has cached to within 8 tokens; mixed-1 keeps prompts of up to 200 tokens."""
    minimum = {"mixed-0": {"handoff_tokens_min": 8}, "mixed-1": {"handoff_tokens_min": 201}}
    folder = tmp_path_factory.mktemp("mixed") / "model"
    with serving(LLAMA, folder, prefill=0, decode=0, mixed=2, flags=flags(ENGINE), node_flags=minimum) as served:
        yield served


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.folder, num_blocks=64, compute_threads=1)


def ask_both_ways(served: Served, name: str, prompt: list[int], **sampling: Any) -> list[Answer]:
    """The same request again and again, several at a time, until it was kept at least once and handed over once. More
    of them each time, so that a node that is believed to be slow gets some.

    Each request has a salt of its own: to the node that has the prompt, or is about to, all later ones would go.
    """
    answers: list[Answer] = []
    deadline_s = time.monotonic() + BOTH_WAYS_S_MAX
    for number in count():
        salts = [f"{name}-{number}-{each}" for each in range(min(4 + number, AT_ONCE_MAX))]
        answers += served.ask_each([(prompt, {**sampling, "cache_salt": salt}) for salt in salts], at_once=len(salts))
        if {answer.stats.transport for answer in answers} - {""} >= WAYS:
            break
        assert time.monotonic() < deadline_s, f"{name}: {[answer.stats.transport for answer in answers]}"
    return answers


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_both_ways(served: Served, reference: Reference, name: str) -> None:
    """Seeded draws, penalties, bias, min_tokens and logprobs: kept or handed over, tokens and logprobs are those of one
    engine alone."""
    seed = list(FEATURES).index(name)
    prompt, params = random_prompt(random.Random(seed), 40 + 9 * seed), params_of(FEATURES[name], seed)
    expected = reference.draw(prompt, params)
    for answer in ask_both_ways(served, name, prompt, max_tokens=TOKENS, seed=seed, **FEATURES[name]):
        assert answer.ids == [token for token, _ in expected], answer.stats
        assert len(answer.logprobs) == (0 if params.logprobs is None else len(answer.ids))
        for found, (_, wanted) in zip(answer.logprobs, expected, strict=False):
            assert_logprobs(logprobs_from_proto(found), wanted)


def test_stop_conditions_both_ways(served: Served) -> None:
    """Stop token ids, the model's end token, stop strings and limits end the answer at the same place, with the same
    reason."""
    rng = random.Random(71)
    prompt = random_prompt(rng, 120)
    whole = ask_both_ways(served, "whole", prompt, max_tokens=30, ignore_eos=True, temperature=1.0, seed=5)[0]
    stops = [whole.ids[0], whole.ids[7], whole.ids[-1]]
    for stop in stops:
        end = whole.ids.index(stop) + 1
        for answer in served.ask(
            [prompt] * 6, max_tokens=30, ignore_eos=True, temperature=1.0, seed=5, stop_token_ids=[stop]
        ):
            assert (answer.ids, answer.reason) == (whole.ids[:end], common_pb2.FINISH_REASON_STOP)
    biased: dict[str, Any] = {"logit_bias": {EOS_ID: 100.0}, "min_tokens": 5, "max_tokens": 30}
    for answer in ask_both_ways(served, "biased", random_prompt(rng, 130), **biased):
        assert (len(answer.ids), answer.ids[-1]) == (6, EOS_ID)
        assert answer.reason == common_pb2.FINISH_REASON_STOP
    part = whole.text[4:8]
    free: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    for answer in ask_both_ways(served, "string", prompt, stop=[part], **free):
        assert answer.text == whole.text[: whole.text.index(part)]
        assert answer.reason == common_pb2.FINISH_REASON_STOP
    served.cluster.run(assert_conserved(served.cluster))


def test_greedy_answers_equal_generate(served: Served) -> None:
    """Prompts of 1 to 700 tokens around block and chunk boundaries and both minimums, sixteen at once; then their
    second turns, which start from what is cached."""
    rng = random.Random(72)
    edges = [8, 16, 128, 200, 256, 384, 640]
    lengths = [1, 2, *(edge + side for edge in edges for side in (-1, 0, 1)), 500, 700]
    prompts = [random_prompt(rng, length) for length in lengths * 2]
    rng.shuffle(prompts)
    answers = served.ask(prompts)
    ties = served.check(prompts, answers)
    assert {a.stats.transport for a in answers} >= WAYS
    turns = [[*p, *a.ids, *random_prompt(rng, 6)] for p, a in zip(prompts, answers, strict=True)]
    seconds = served.ask(turns)
    ties += served.check(turns, seconds)
    assert sum(a.stats.prompt_tokens_cached for a in seconds) > sum(map(len, turns)) // 2
    tokens = sum(len(a.ids) for a in answers + seconds)
    print(f"{tokens} tokens, {len(ties)} ties {ties}")
    assert len(ties) <= TIES_SHARE_MAX * tokens, ties
    served.cluster.run(assert_conserved(served.cluster))


def test_a_short_memory(tmp_path: Path) -> None:
    """Regions that hold a fraction of what is asked for: room is waited for, kept and granted requests share it, and
    the answers are those of `generate`."""
    rng = random.Random(73)
    prompts = [random_prompt(rng, rng.choice([30, 100, 180, 300])) for _ in range(24)]
    mixed = {**ENGINE, "handoff_tokens_min": 150, "local_fallback": "full"}
    with serving(LLAMA, tmp_path / "model", prefill=0, decode=0, mixed=2, blocks=48, flags=flags(mixed)) as small:
        answers = small.ask(prompts)
        assert {a.stats.transport for a in answers} >= WAYS
        ties = small.check(prompts, answers)
        assert len(ties) <= TIES_SHARE_MAX * sum(len(a.ids) for a in answers), ties
