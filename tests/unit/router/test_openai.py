"""Bodies and answers of the OpenAI endpoints, without a network: any JSON is taken or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Code, Reason
from engine.demo_model import CHAT_TEMPLATE, DemoModelParams, write_demo_model
from router.answers import AnswerPart, Collected
from router.chat_template import ChatTemplate
from router.openai import (
    CHOICES_MAX,
    JSON_COMMAS_MAX,
    JSON_ELEMENTS_MAX,
    JSON_STRINGS_MAX,
    PROMPT_SCORES_MAX,
    OpenAiCall,
    error_headers,
    error_json,
    error_status,
    parse_body,
    parse_chat,
    parse_completion,
)
from router.replies import Replies
from router.text import TextCodec

FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "n", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "stop", "seed", "logit_bias", "best_of",
    "suffix", "tools", "response_format", "stop_token_ids", "min_tokens", "ignore_eos", "chat_template_kwargs", "x",
    "resumable", "resume_token_ids", "return_token_ids", "reasoning_effort", "include_reasoning",
]  # fmt: skip
leaves = (
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["hi", 0, 1, "5", {"type": "text"}, {"role": "user", "content": "hi"}])
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("5"), inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)


def encode(messages: Sequence[Mapping[str, Any]], reported: Mapping[str, Any]) -> Sequence[int]:
    assert all(isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages)
    return [len(messages), len(reported)]


def attempt(parse: Callable[[Mapping[str, Any]], OpenAiCall], raw: bytes) -> OpenAiCall | BatonError:
    try:
        return parse(parse_body(raw))
    except BatonError as error:
        return error


@given(bodies)
def test_any_body_is_taken_or_refused_by_name(body: dict[str, Any]) -> None:
    """Nothing but a BatonError with status 400 comes out, and what is taken can be sent."""
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    for parse in (parse_completion, lambda each: parse_chat(each, encode)):
        call = attempt(parse, raw)
        if isinstance(call, BatonError):
            assert error_status(call) == 400
            json.dumps(error_json(call), ensure_ascii=False).encode()
            continue
        assert 0 < len(call.requests) * call.n <= CHOICES_MAX
        for request in call.requests:
            assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()) == request


def test_every_parameter_reaches_our_request() -> None:
    """OpenAI's names and our extensions; what is left out stays unset, so that the defaults hold; -1 is off."""
    body = {
        "model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 0, "top_p": 0.5, "n": 2, "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": 3, "stop": "x", "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"7": -100}, "seed": -1, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True, "include_stop": True,
    }  # fmt: skip
    call = parse_completion(body)
    assert (call.chat, call.n, call.stream, call.include_usage, call.logprobs) == (False, 2, True, True, True)
    expected = inference_pb2.Sampling(
        temperature=0, top_p=0.5, max_tokens=5, logprobs=3, stop=["x"], presence_penalty=1, frequency_penalty=-1,
        logit_bias={7: -100}, seed=2**64 - 1, top_k=0, min_p=0.1, repetition_penalty=1.5, min_tokens=2,
        stop_token_ids=[9], ignore_eos=True, include_stop=True,
    )  # fmt: skip
    assert call.requests == (inference_pb2.GenerateRequest(text="hi", model="m", sampling=expected),)
    assert parse_completion({"prompt": "hi"}).requests == (
        inference_pb2.GenerateRequest(text="hi", sampling=inference_pb2.Sampling()),
    )
    chat = parse_chat(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2},
        lambda messages, _: list(messages[0]["content"].encode()),
    )  # fmt: skip
    assert list(chat.requests[0].token_ids.ids) == [97, 10, 98]
    assert (chat.requests[0].sampling.max_tokens, chat.requests[0].sampling.logprobs) == (4, 2)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("structural_tag", {}, None), ("response_format", {"type": "grammar"}, {"type": "text"}),
        ("guided_regex", ["a"], None), ("structured_outputs", {"regex": "a", "choice": ["b"]}, None),
        ("guided_choice", [], None), ("allowed_token_ids", [5], []),
        ("bad_words", ["a"], []), ("logits_processors", ["x"], []), ("skip_special_tokens", False, True),
        ("typical_p", 0.9, 1.0), ("no_repeat_ngram_size", 3, 0), ("use_beam_search", True, False),
        ("length_penalty", 1.2, 1.0), ("early_stopping", True, False), ("vllm_xargs", {"a": 1}, {}),
        ("logprob_token_ids", [5], []), ("return_prompt_text", True, False), ("kv_transfer_params", {"a": 1}, {}),
        ("watermarking", True, False), ("stop_regex", "a+", []), ("no_stop_trim", True, False),
        ("separate_reasoning", False, True), ("lora_path", "a", ""), ("custom_logit_processor", "a", ""),
    ],
)  # fmt: skip
def test_what_would_make_another_answer_is_refused_by_name(name: str, value: object, neutral: object) -> None:
    """Parameters of other servers, of both endpoints; what says "as always" is taken."""
    for parse, prompt in (
        (parse_completion, {"prompt": "hi"}),
        (lambda body: parse_chat(body, encode), {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        refused = attempt(parse, json.dumps({**prompt, name: value}).encode())
        assert isinstance(refused, BatonError)
        assert (refused.reason, refused.field) == (Reason.BAD_FIELD, name)
        assert isinstance(attempt(parse, json.dumps({**prompt, name: neutral}).encode()), OpenAiCall)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "true or false"),
        ({"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats", "true or false"),
        ({"priority": "urgent"}, "priority", "must be high, normal, low, or a whole number"),
        ({"stop_token_ids": [5, "6"]}, "stop_token_ids", "stop_token_ids[1] must be a whole number"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
         "messages.0.function_call", "tool_calls are"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "the model's own"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "and guided_regex both"),
        ({"prompt": [5, True]}, "prompt", "prompt[1] must be a whole number"),
        ({"prompt": [[1], [2, "x"]]}, "prompt", "prompt[1][1] must be a whole number"),
        ({"prompt": "a", "stream": True, "resumable": True, "resume_token_ids": [5, -1]},
         "resume_token_ids", "resume_token_ids[1] must be a whole number"),
        ({"prompt": "a", "stream": True, "resumable": True, "n": 2, "resume_token_ids": [[5], [6, -1]]},
         "resume_token_ids", "resume_token_ids[1][1] must be a whole number"),
    ],
)  # fmt: skip
def test_an_error_says_the_place_and_what_may_stand_there(fields: dict[str, Any], field: str, says: str) -> None:
    """Parts of fields, elements of lists, two fields for one thing, and older forms of messages."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    parse = parse_completion if "prompt" in body else lambda each: parse_chat(each, encode)
    refused = attempt(parse, json.dumps(body).encode())
    assert isinstance(refused, BatonError)
    assert (refused.field, says in refused.message) == (field, True), refused.message


@pytest.mark.parametrize(
    ("said", "n", "taken"),
    [
        ([5, 6], 1, ((5, 6),)), ([[5, 6]], 1, ((5, 6),)), ([], 1, ()), ([], 2, ()), ([[5], []], 2, ((5,), ())),
        ([5, 6], 2, None), ([[5]], 2, None), ([[5], 6], 2, None), ({}, 1, None), ([["5"]], 1, None), ([[[5]]], 1, None),
    ],
)  # fmt: skip
def test_what_a_client_says_it_has(said: object, n: int, taken: object) -> None:
    """A list for each answer, or one list for one answer; anything else is refused by its name."""
    body = {"prompt": "hi", "n": n, "stream": True, "resumable": True, "resume_token_ids": said}
    call = attempt(parse_completion, json.dumps(body).encode())
    if taken is None:
        assert isinstance(call, BatonError)
        assert call.field == "resume_token_ids"
    else:
        assert isinstance(call, OpenAiCall)
        assert call.said == taken


def test_special_tokens_are_added_as_each_endpoint_does() -> None:
    """The tokenizer adds its own to a text, none to a chat that the template has rendered: what says so is taken."""
    taken = []
    for adds in (True, False):
        body = json.dumps({"prompt": "hi", "add_special_tokens": adds}).encode()
        taken.append(isinstance(attempt(parse_completion, body), OpenAiCall))
        message = {"role": "user", "content": "hi"}
        body = json.dumps({"messages": [message], "add_special_tokens": adds}).encode()
        taken.append(isinstance(attempt(lambda raw: parse_chat(raw, encode), body), OpenAiCall))
    assert taken == [True, False, False, True]


def test_errors_have_a_status_and_a_time() -> None:
    """429 always says when to come back, in both forms the same; what is over for good does not."""
    full = BatonError(Reason.QUEUE_FULL, "Full.", retry_after_ms=1_200)
    assert (error_status(full), error_headers(full)) == (429, {"retry-after": "2", "retry-after-ms": "2000"})
    assert error_headers(BatonError(Reason.DECODE_FULL, "Full.")) == {"retry-after": "1", "retry-after-ms": "1000"}
    wrong = BatonError(Reason.PROMPT_TOO_LONG, "Long.", field="token_ids")
    assert error_json(wrong)["error"]["param"] == "prompt"
    assert error_json(wrong, chat=True)["error"]["param"] == "messages"
    for reason in Reason:
        status = error_status(BatonError(reason, "Wrong."))
        assert 400 <= status < 600
        assert (status == 429) == (BatonError(reason, "Wrong.").code is Code.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_json(chat: bool) -> None:
    """Minus infinity has a stand-in, half a character has no bytes, and offsets count over chunks."""
    call = OpenAiCall(chat=chat, requests=(), n=1, stream=True, include_usage=False, logprobs=True)
    replies = Replies(request_id="i", call=call, model="m", created=1, token_text=["ab", "\ufffd"].__getitem__)
    found = common_pb2.TokenLogprobs(logprob=-math.inf, top_ids=[0], top_logprobs=[-0.5])
    part = AnswerPart(first_index=0, ids=[0, 1], text="ab", logprobs=[found, found], place=None)
    chunks = [replies.chunk(0, part), replies.chunk(0, part)]
    pieces = [json.loads(chunk, parse_constant=pytest.fail)["choices"][0]["logprobs"] for chunk in chunks if chunk]
    if chat:
        first, second = pieces[0]["content"]
        assert (first["logprob"], first["bytes"], second["bytes"]) == (-9999.0, [97, 98], None)
        assert first["top_logprobs"] == [{"token": "ab", "logprob": -0.5, "bytes": [97, 98]}]
    else:
        assert pieces[0]["top_logprobs"] == [{"ab": -0.5}, {"\ufffd": -9999.0, "ab": -0.5}]
        assert [piece["text_offset"] for piece in pieces] == [[0, 2], [3, 5]]


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    """Two prompts with two answers each: tokens of prompts twice, of answers four times."""
    call = parse_completion({"prompt": ["a", "b"], "n": 2})
    replies = Replies(request_id="i", call=call, model="m", created=1, token_text=str)
    for index in range(4):
        replies.started(index, inference_pb2.Started(prompt_tokens=10))
        stats = inference_pb2.RequestStats(output_tokens=3, prompt_tokens_cached=4)
        replies.finished(index, inference_pb2.Finished(stats=stats))
    assert (replies.prompt_tokens, replies.cached_tokens, replies.completion_tokens) == (20, 8, 12)
    assert replies.usage()["total_tokens"] == 32


def test_a_prompt_alone_has_no_end_of_an_answer() -> None:
    """The token that is drawn and dropped may be one that stops."""
    call = parse_completion({"prompt": [1, 2], "echo": True, "max_tokens": 0, "stop_token_ids": [7]})
    answer = Collected(end=inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, stop_token=7))
    replies = Replies(request_id="i", call=call, model="m", created=1, token_text=str)
    (choice,) = replies.whole([answer])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_what_a_call_may_have_echoed() -> None:
    """So many log-probabilities of all its prompts together, and none in a stream that another router may go on with:
    that one need not have the prompt."""
    most = PROMPT_SCORES_MAX // (2 * 2 * 8)  # two prompts, two answers, eight alternatives with the token itself
    scored = {"echo": True, "logprobs": 7, "n": 2, "max_tokens": 0}
    taken = attempt(parse_completion, json.dumps({"prompt": [[1] * most] * 2, **scored}).encode())
    assert isinstance(taken, OpenAiCall)
    for body in (
        {"prompt": [[1] * most, [1] * (most + 1)], **scored},
        {"prompt": "hi", "echo": True, "stream": True, "resumable": True},
    ):
        refused = attempt(parse_completion, json.dumps(body).encode())
        assert isinstance(refused, BatonError)
        assert (refused.reason, refused.field) == (Reason.BAD_FIELD, "echo")


def template_of(folder: Path, config: object, own: str | None = None) -> ChatTemplate | None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if own is not None:
        (folder / "chat_template.jinja").write_text(own, encoding="utf-8")
    return ChatTemplate.load(folder)


def test_templates_are_found_where_models_have_them(tmp_path: Path) -> None:
    """In the configuration, as a list of named ones, in a file of its own, which goes first, or nowhere."""
    messages = [{"role": "user", "content": " hi "}]
    reported = {"add_generation_prompt": True}
    assert template_of(tmp_path, {}) is None
    for config in (
        {"chat_template": CHAT_TEMPLATE, "bos_token": {"content": "<s>"}},
        {"chat_template": [{"name": "default", "template": CHAT_TEMPLATE}], "bos_token": "<s>"},
    ):
        template = template_of(tmp_path, config)
        assert template is not None
        assert template.render(messages, reported) == "<s>user: hi\nassistant:"
    own = template_of(tmp_path, {"chat_template": "no"}, "{{ messages | tojson }}{{ tools is none }}")
    assert own is not None
    assert own.render([{"role": "user", "content": "<é>"}], {}) == '[{"role": "user", "content": "<é>"}]True'


@pytest.mark.parametrize("reason", [Reason.INCARNATION_MISMATCH, Reason.INCOMPATIBLE_NODE])
def test_trouble_between_nodes_is_not_the_clients_fault(reason: Reason) -> None:
    """A node that has just restarted, or none that fits: the client is to come again, not to correct its request."""
    error = BatonError(reason, "No node fits.")
    assert (error_status(error), error_json(error)["error"]["type"]) == (503, "server_error")


def test_alternatives_of_a_chat_go_by_their_own_name() -> None:
    """Both endpoints ask for them in one field of ours, that chat calls top_logprobs; its logprobs is a switch."""
    error = BatonError(Reason.SAMPLING_OUT_OF_RANGE, "Too many.", field="sampling.logprobs")
    assert [error_json(error, chat=chat)["error"]["param"] for chat in (False, True)] == ["logprobs", "top_logprobs"]
    switch = BatonError(Reason.BAD_FIELD, "It must be true or false.", field="logprobs")
    assert error_json(switch, chat=True)["error"]["param"] == "logprobs"


def test_a_chat_has_the_tokens_that_transformers_gives_it(tmp_path: Path) -> None:
    """The demo model's own template: the same ids, special tokens, trimmed texts and all."""
    from transformers import AutoTokenizer

    write_demo_model(tmp_path / "m", DemoModelParams(num_layers=1, hidden_size=16, num_heads=2, head_dim=8))
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "hi\né"}]
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "m").apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    template = ChatTemplate.load(tmp_path / "m")
    assert template is not None
    ours = TextCodec.load(tmp_path / "m").encode_chat(template.render(messages, {"add_generation_prompt": True}))
    assert list(ours) == theirs["input_ids"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_is_an_error_of_the_messages(tmp_path: Path, source: str) -> None:
    """By its own words, by a fault over these messages, or because the sandbox does not let it."""
    template = template_of(tmp_path, {}, source)
    assert template is not None
    with pytest.raises(BatonError) as caught:
        template.render([{"role": "user", "content": "hi"}], {})
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_FIELD, "messages")


@pytest.mark.parametrize(
    ("config", "own"), [({"chat_template": 5}, None), ([], None), ({}, "{% if %}"), ({"chat_template": [5]}, "{{")]
)
def test_a_broken_template_is_refused_at_start(tmp_path: Path, config: object, own: str | None) -> None:
    """The router says which model is broken rather than fail at each chat."""
    with pytest.raises(BatonError) as caught:
        template_of(tmp_path, config, own)
    assert caught.value.reason is Reason.MODEL_BROKEN


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[" + b"[]," * JSON_ELEMENTS_MAX + b"[]]", "elements"),
        (b"[" + b"1," * JSON_COMMAS_MAX + b"1,1]", "elements"),
        (b'{"a": {' + b'"k":1,' * (JSON_STRINGS_MAX // 2) + b'"k": ' + b"[" * JSON_ELEMENTS_MAX, "elements"),
        (b'["' + b'","' * (JSON_STRINGS_MAX + 1) * 9 + b'"]', "strings"),
        (b"[" * (JSON_ELEMENTS_MAX + 1), "elements"),
    ],
)
def test_json_that_is_long_to_parse_is_refused_unparsed(raw: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes for each list, object or string would hold up all streams for seconds."""
    monkeypatch.setattr("router.openai.json.loads", lambda _text: pytest.fail("it was parsed"))
    with pytest.raises(BatonError, match=f"more than .* {why}, the limit"):
        parse_body(raw)


@pytest.mark.parametrize("text", ["a, b: [c]{d}" * JSON_ELEMENTS_MAX, '\\"[,\\\\' * JSON_ELEMENTS_MAX])
def test_what_a_string_holds_does_not_count(text: str) -> None:
    """A long prompt may be code, with quotes and backslashes."""
    assert parse_body(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_role_of_their_own_is_refused() -> None:
    """A template writes the role between the characters of a special token, so it must be one of a few."""
    for role in ("im_end", "", "assistant|>"):
        body = {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]}
        with pytest.raises(BatonError) as caught:
            parse_chat(body, lambda _messages, _extra: [1])
        assert (caught.value.reason, caught.value.field) == (Reason.BAD_FIELD, "messages.1.role")
