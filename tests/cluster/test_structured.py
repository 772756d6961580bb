"""Structured output on a cluster of processes with a real model: prefill draws the first token by the grammar, decode
the rest, and so does another decode node that goes on with it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from batonpb import common_pb2

from baton.errors import BatonError, Code, Reason
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from tests.cluster.test_resume import FAST, ROUTER_FLAGS, Asked, kill, runner_of
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    error_of,
    http_endpoint,
    mock_spec,
    running,
)
from tests.support.schemas import TOKENS_MAX, check_answer, draw_schema

VOCAB = 600
Grammar = common_pb2.Grammar


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("structured") / "model"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=VOCAB))
    spec = ClusterSpec(
        prefill=1,
        decode=2,
        model=str(folder),
        engine_kind=EngineKind.MODEL,
        blocks=1_024,
        http="127.0.0.1:0",
        flags={
            Service.PREFILL: {**FAST, "engine.poison_freed": True},
            Service.DECODE: {**FAST, "engine.poison_freed": True},
            Service.ROUTER: ROUTER_FLAGS,
        },
    )
    with running(spec) as cluster:
        yield cluster


def schema(value: Any) -> common_pb2.Grammar:
    return Grammar(json_schema=json.dumps(value))


def test_answers_of_a_cluster_are_what_their_schemas_allow(cluster: RunningCluster) -> None:
    """Eight at a time, drawn and greedy, beside one without a grammar; then the same again, from the cache."""
    schemas = [draw_schema(random.Random(seed)) for seed in range(70, 78)]

    async def ask() -> list[Answer]:
        calls = [
            cluster.client.generate(
                f"number {i}", max_tokens=TOKENS_MAX, seed=i, temperature=i % 2, grammar=schema(schemas[i])
            )
            for i in range(len(schemas))
        ]
        free = cluster.client.generate("anything", max_tokens=30, ignore_eos=True)
        *answers, said = await asyncio.gather(*calls, free)
        assert len(said.ids) == 30
        return answers

    answers = cluster.run(ask())
    for i, answer in enumerate(answers):
        assert answer.reason == common_pb2.FINISH_REASON_STOP, i
        check_answer(schemas[i], answer.text)
    assert any(answer.stats.decode_node for answer in answers)
    assert [answer.text for answer in cluster.run(ask())] == [answer.text for answer in answers]
    cluster.run(assert_conserved(cluster))


def test_a_grammar_that_cannot_be_used_is_refused_at_once(cluster: RunningCluster) -> None:
    """By the prefill node, before a block is reserved; what the library says comes along."""
    for grammar, problem in ((schema({"type": "foo"}), "Invalid type: foo"), (Grammar(regex="(a"), "unclosed group")):
        error = cluster.run(error_of(cluster.client.generate("hi", grammar=grammar)))
        assert (error.reason, error.code, error.field) == (Reason.BAD_FIELD, Code.INVALID_ARGUMENT, "sampling.grammar")
        assert problem in error.message
    cluster.run(assert_conserved(cluster))


HOSTILE = (
    schema({"type": "integer", "multipleOf": 99_991}),
    schema({"properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}),
    schema({"anyOf": [{"type": "string", "pattern": f"^.*{i}.*{i + 7}.*$"} for i in range(1_000)]}),
    schema({"const": "x" * 60_000}),
    Grammar(regex="(.*a.{40})+(.*b.{50})+(.*c.{60})+"),
    Grammar(regex="((a{1,1000}){1,1000}){1,1000}"),
    Grammar(rules='start: e\ne: e e e | e e | "a" | ""'),
    Grammar(rules='start: ("a"{1,100000}){1,100000}'),
    Grammar(rules='start: a "x"\na[lazy]: /.*/'),
    Grammar(rules='root ::= root root | "a" |'),
)
"""Made to take long, or to break llguidance."""


@pytest.mark.slow
def test_hostile_grammars_harm_nobody_else(cluster: RunningCluster) -> None:
    """Each ends with an answer, or an error of its sender's; the answers beside them are what they always are."""
    digits = Grammar(regex="[0-9]{20}")

    async def others() -> list[list[int]]:
        free = [cluster.client.generate(f"number {i}", max_tokens=60, seed=i, ignore_eos=True) for i in range(3)]
        answers = await asyncio.gather(*free, cluster.client.generate("digits", max_tokens=60, seed=9, grammar=digits))
        return [answer.ids for answer in answers]

    async def hostile(grammar: common_pb2.Grammar) -> Reason | None:
        try:
            await cluster.client.generate("hi", max_tokens=150, seed=1, grammar=grammar)
        except BatonError as error:
            return error.reason
        return None

    async def scenario() -> None:
        undisturbed = await others()
        *reasons, found = await asyncio.gather(*map(hostile, HOSTILE), others())
        assert found == undisturbed
        assert set(reasons) <= {None, Reason.BAD_FIELD, Reason.GRAMMAR_TOO_COMPLEX}
        assert Reason.BAD_FIELD in reasons
        await assert_conserved(cluster)

    cluster.run(scenario())


def test_clients_ask_over_http(cluster: RunningCluster) -> None:
    """OpenAI's response_format and vLLM's fields by the openai package; a mistake is 400."""
    client = openai.OpenAI(base_url=f"http://{http_endpoint(cluster)}/v1", api_key="none", max_retries=0)
    wanted = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    with client:
        ask = client.chat.completions.with_raw_response.create
        messages: Any = [{"role": "user", "content": "who?"}]
        chat: Any = {"model": "model", "messages": messages, "max_tokens": 500, "seed": 1}
        formats: Any = {"type": "json_schema", "json_schema": {"name": "who", "strict": True, "schema": wanted}}
        said = ask(**chat, response_format=formats).parse().choices[0]
        assert said.finish_reason == "stop"
        check_answer(wanted, said.message.content or "")
        text = ask(**chat, extra_body={"guided_choice": ["left", "right"]}).parse().choices[0].message.content
        assert text in ("left", "right")
        text = ask(**chat, extra_body={"structured_outputs": {"regex": "[0-9]{4}"}}).parse().choices[0].message.content
        assert re.fullmatch("[0-9]{4}", text or "")
        with pytest.raises(openai.BadRequestError, match="Invalid type: foo") as caught:
            ask(**chat, extra_body={"guided_json": {"type": "foo"}})
        assert caught.value.param == "guided_json"
    cluster.run(assert_conserved(cluster))


def test_a_cut_answer_is_the_beginning_of_one_that_is_allowed(cluster: RunningCluster) -> None:
    """Also where max_tokens cuts it within a character, in one piece and in a stream."""
    whole = "a 🦊 é 标"
    client = openai.OpenAI(base_url=f"http://{http_endpoint(cluster)}/v1", api_key="none", max_retries=0)
    with client:
        found = set()
        for tokens in range(1, len(whole.encode())):
            asked: Any = {"model": "model", "prompt": "hi", "max_tokens": tokens}
            asked["extra_body"] = {"structured_outputs": {"choice": [whole]}}
            text = client.completions.create(**asked).choices[0].text
            assert whole.startswith(text)
            assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text
            found.add(text)
    assert found == {whole[:length] for length in range(1, len(whole))}


@pytest.mark.slow
def test_an_answer_goes_on_when_its_decode_node_is_killed(cluster: RunningCluster) -> None:
    """The next decode node is given the tokens so far: the answer is that of an undisturbed cluster, and valid."""
    wanted = r"\[(?:[0-9]{1,4},){399}[0-9]{1,4}\]"

    async def scenario() -> None:
        request: dict[str, Any] = {"max_tokens": 2_500, "seed": 5, "temperature": 1.0, "grammar": Grammar(regex=wanted)}
        first = await cluster.client.generate("a list", **request)
        asked = Asked(cluster, "a list", **request)
        await asked.tokens(40)
        await kill(cluster, await runner_of(cluster))
        answer = await asked.answer
        assert answer.stats.resumptions == 1
        assert answer.ids == first.ids
        assert re.fullmatch(wanted, answer.text)
        await assert_conserved(cluster)

    cluster.run(scenario())


def test_a_node_without_a_tokenizer_refuses_grammars() -> None:
    """The mock engine's tokens spell nothing."""
    with running(mock_spec()) as cluster:
        error = cluster.run(error_of(cluster.client.generate([1, 2, 3], grammar=Grammar(regex="a"))))
        assert (error.reason, error.field) == (Reason.BAD_FIELD, "sampling.grammar")
        assert "has no tokenizer" in error.message
