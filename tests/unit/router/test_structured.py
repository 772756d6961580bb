"""Structured output over HTTP: every client's way of asking becomes a grammar of ours."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.wire import GRAMMAR_BYTES_MAX, ModelInfo
from router.openai import error_json, parse_completion
from router.replies import Replies
from router.request import check_request
from router.structured import grammar_of

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
JSON = '{"type":"object","properties":{"é":{"type":"integer"}}}'
ANY = '{"type":"object"}'
Grammar = common_pb2.Grammar


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(json_schema=ANY)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}}},
            Grammar(json_schema=JSON),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Grammar(json_schema=ANY)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar(json_schema=JSON)),
        ({"structured_outputs": {"json_object": True}}, Grammar(json_schema=ANY)),
        ({"structured_outputs": {"choice": ["a", 'b "c" ::= é']}}, Grammar(rules='start: "a" | "b \\"c\\" ::= é"')),
        ({"guided_json": JSON}, Grammar(json_schema=JSON)),
        ({"guided_regex": "a+"}, Grammar(regex="a+")),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, Grammar(rules='start: "a"')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar(rules='root ::= "a"')),
        ({"ebnf": 'root ::= "a"'}, Grammar(rules='root ::= "a"')),
        ({"regex": "a"}, Grammar(regex="a")),
        ({"json_schema": JSON}, Grammar(json_schema=JSON)),
    ],
)  # fmt: skip
def test_all_ways_to_ask(body: dict[str, Any], grammar: common_pb2.Grammar | None) -> None:
    """OpenAI's, vLLM's and SGLang's fields."""
    assert grammar_of(body) == grammar
    sampling = parse_completion({"prompt": "hi", **body}).requests[0].sampling
    assert (sampling.grammar if sampling.HasField("grammar") else None) == grammar


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
    ],
)  # fmt: skip
def test_what_is_none_of_them_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    """Nothing that would change the answer is ignored."""
    with pytest.raises(BatonError) as caught:
        grammar_of(body)
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_FIELD, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {"type": "foo"}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "regex": "("}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({}, "grammar"),
    ],
)
def test_an_error_of_a_grammar_names_the_clients_field(fields: dict[str, Any], field: str) -> None:
    """Nodes know one field, clients many. Errors of other fields, and of calls without a grammar, are as they were."""
    call = parse_completion({"prompt": "hi", **fields})
    replies = Replies(request_id="i", call=call, model="m", created=1, token_text=str)
    error, other = bad_field("sampling.grammar", "No."), bad_field("sampling.top_p", "No.")
    assert error_json(replies.renamed(error))["error"]["param"] == field
    assert json.loads(replies.failure(error)) == error_json(replies.renamed(error))
    assert replies.renamed(other) is other


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"grammar": Grammar(regex="é" * (GRAMMAR_BYTES_MAX // 2 + 1))}, "at most 65536"),
        ({"grammar": Grammar()}, "must have a json_schema, a regex or rules"),
        ({"grammar": Grammar(regex="a"), "min_tokens": 1}, "leave min_tokens and ignore_eos out"),
        ({"grammar": Grammar(regex="a"), "ignore_eos": True}, "leave min_tokens and ignore_eos out"),
    ],
)
def test_a_grammar_is_checked_with_what_stands_beside_it(sampling: dict[str, Any], problem: str) -> None:
    """Its size, and fields that also say where an answer ends."""
    model = ModelInfo(
        name="m", fingerprint="f", vocab_size=50, context_len_max=64, eos_token_ids=(1,), layout_hash="l",
        block_size=4, protocol_min=1, protocol_max=1,
    )  # fmt: skip

    def check(**sampling: Any) -> common_pb2.SamplingSpec:
        request = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(**sampling))
        request.token_ids.ids.append(3)
        return check_request(
            request, model=model, prompt=[3], has_tokenizer=False, answer_tokens=lambda _: 8, rng=random.Random(1)
        ).sampling

    with pytest.raises(BatonError, match=problem) as caught:
        check(**sampling)
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_FIELD, "sampling.grammar")
    assert check(grammar=Grammar(regex="a")).grammar == Grammar(regex="a")
