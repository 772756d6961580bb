"""Stop strings and several answers on a cluster with a real model: what the client gets, and that all is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import pytest
from batonpb import common_pb2

from baton.errors import Reason
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from tests.support.cluster_harness import RunningCluster, assert_conserved, error_of, running

PROMPT: Final = "the sea in the evening"
TOKENS: Final = 40
STOP: Final = common_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("stops") / "model"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    with running(ClusterSpec(model=str(folder), engine_kind=EngineKind.MODEL, blocks=256)) as cluster:
        yield cluster


def test_a_stop_string_ends_the_answer_wherever_it_is(cluster: RunningCluster) -> None:
    """Cut out of the unstopped answer, over token borders too: text up to it, the tokens that made it, reason STOP."""

    async def ask() -> None:
        free: Any = {"max_tokens": TOKENS, "ignore_eos": True}
        whole = await cluster.client.generate(PROMPT, **free)
        assert len(whole.ids) == TOKENS
        for begin in range(1, len(whole.text) - 6, 9):
            stop = whole.text[begin : begin + 6]
            end = whole.text.index(stop)
            answer, included = await asyncio.gather(
                cluster.client.generate(PROMPT, stop=["\0never", stop], **free),
                cluster.client.generate(PROMPT, stop=[stop], include_stop=True, **free),
            )
            assert (answer.text, answer.reason) == (whole.text[:end], STOP)
            assert (included.text, included.reason) == (whole.text[: end + 6], STOP)
            assert answer.ids == included.ids == whole.ids[: len(answer.ids)]
            assert answer.stats.output_tokens == len(answer.ids) <= TOKENS

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))


def test_a_stop_string_frees_a_long_answer(cluster: RunningCluster) -> None:
    """The stop comes in the first tokens of an answer of 3,000: the decode node is told, and holds nothing soon."""

    async def ask() -> None:
        first = await cluster.client.generate(PROMPT, max_tokens=3)
        for text in (first.text[:1], first.text[-1:]):
            answer = await cluster.client.generate(PROMPT, max_tokens=3000, ignore_eos=True, stop=[text])
            assert (answer.text, answer.reason) == (first.text[: first.text.index(text)], STOP)

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))


def test_min_tokens_comes_before_a_stop_string(cluster: RunningCluster) -> None:
    """A stop string that the early tokens have does not count; the answer goes on as without it."""

    async def ask() -> None:
        free: Any = {"max_tokens": TOKENS, "ignore_eos": True}
        whole = await cluster.client.generate(PROMPT, **free)
        letters = sorted(set(whole.text))
        answer = await cluster.client.generate(PROMPT, stop=letters[:16], min_tokens=TOKENS, **free)
        assert (answer.text, answer.ids) == (whole.text, whole.ids)
        assert answer.reason == common_pb2.FINISH_REASON_LENGTH
        early = await cluster.client.generate(PROMPT, stop=[whole.text[0]], min_tokens=7, **free)
        assert len(early.ids) > 7 or early.reason == common_pb2.FINISH_REASON_LENGTH

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))


@pytest.mark.parametrize("stop", [[""], ["x" * 257], [str(i) for i in range(17)]])
def test_a_wrong_stop_is_refused(cluster: RunningCluster, stop: list[str]) -> None:
    """Empty, too long, too many: by name."""
    error = cluster.run(error_of(cluster.client.generate(PROMPT, stop=stop)))
    assert (error.reason, error.field) == (Reason.SAMPLING_OUT_OF_RANGE, "sampling.stop")
