"""What clients and frameworks look for beside the answers themselves: words of errors, names, small endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoModelForCausalLM

from baton.client import AsyncClient, BatonError, Sampling
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cluster_harness import RunningCluster, http_call, http_endpoint, metrics_text, running

PROMPT: Final = "the sea in the evening"
MESSAGES: Final[list[ChatCompletionMessageParam]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": PROMPT},
]
RENDERED: Final = f"<|begin|>system: Be brief.\nuser: {PROMPT}\nassistant:"
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
ORIGIN: Final = "https://chat.example.org"
TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words") / "tiny"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[RunningCluster]:
    spec = ClusterSpec(
        model=str(model),
        engine_kind=EngineKind.MODEL,
        blocks=512,
        http="127.0.0.1:0",
        metrics="127.0.0.1:0",
        flags={Service.ROUTER: {"served_model_name": "gpt-sea,sea", "cors_origins": ORIGIN}},
    )
    with running(spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def endpoint(cluster: RunningCluster) -> str:
    return http_endpoint(cluster)


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{endpoint}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def post(endpoint: str, path: str, body: dict[str, Any]) -> Any:
    status, _, raw = http_call(endpoint, "POST", path, json.dumps(body).encode())
    assert status == 200, raw
    return json.loads(raw)


def test_the_model_is_served_by_the_names_that_were_given(client: openai.OpenAI, endpoint: str) -> None:
    """Both are listed; an answer says the name that was asked for, or the first; the folder's name is none of them."""
    listed = client.models.list().data
    assert [(each.id, each.model_dump()["root"]) for each in listed] == [("gpt-sea", "tiny"), ("sea", "tiny")]
    assert client.models.retrieve("sea").id == "sea"
    assert client.completions.create(model="sea", prompt=PROMPT, **GREEDY).model == "sea"
    assert post(endpoint, "/v1/completions", {"prompt": [5], "max_tokens": 1})["model"] == "gpt-sea"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


def test_the_fingerprint_is_the_same_in_all_answers(client: openai.OpenAI) -> None:
    """Whole and streamed, of both kinds: it stands for the model's weights."""
    chat = client.chat.completions.create(model="sea", messages=MESSAGES, **GREEDY)
    chunks = list(client.chat.completions.create(model="sea", messages=MESSAGES, stream=True, **GREEDY))
    completion = client.completions.create(model="sea", prompt=PROMPT, **GREEDY)
    found = {chat.system_fingerprint, completion.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)}
    (fingerprint,) = found
    assert fingerprint is not None
    assert (fingerprint[:3], len(fingerprint)) == ("fp_", 15)


def test_a_prompt_beyond_the_context_says_so_in_the_words_that_frameworks_look_for(client: openai.OpenAI) -> None:
    """A completion and a chat: they shorten what they sent when a message begins so, or when the code says it."""
    for ask in (
        lambda: client.completions.create(model="sea", prompt="\x20".join(["x"] * 5000)),
        lambda: client.chat.completions.create(
            model="sea", messages=[{"role": "user", "content": "\x20".join(["x"] * 5000)}]
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 4096 tokens. The prompt has " in caught.value.message
    for create in (
        lambda: client.completions.create(model="sea", prompt="x" * 2_000_001),
        lambda: client.chat.completions.create(model="sea", messages=[{"role": "user", "content": "x" * 2_000_001}]),
    ):
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 4096 tokens\. .* characters"):
            create()


def test_a_developer_speaks_as_the_system_where_the_template_knows_none(client: openai.OpenAI) -> None:
    """The answer is the same, from a prompt of as many tokens."""
    developer: list[Any] = [{"role": "developer", "content": "Be brief."}, MESSAGES[1]]
    answers = [client.chat.completions.create(model="sea", messages=chat, **GREEDY) for chat in (MESSAGES, developer)]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.usage and answer.usage.prompt_tokens for answer in answers}) == 1


@pytest.mark.parametrize(("sent", "kept"), [("client-1.a:b_c", True), ("a b", False), ("é", False), ("x" * 65, False)])
def test_a_strange_request_id_is_replaced(endpoint: str, sent: str, kept: bool) -> None:
    """One that no log should have; a usual one comes back."""
    body, headers = b'{"prompt": [5], "max_tokens": 1}', {"x-request-id": sent.encode("latin-1")}
    status, answered, raw = http_call(endpoint, "POST", "/v1/completions", body, headers)
    assert (status, answered["x-request-id"] == sent) == (200, kept)
    assert json.loads(raw)["id"] == f"cmpl-{answered['x-request-id']}"


def test_tokens_of_a_prompt_and_back(endpoint: str, model: Path) -> None:
    """As vLLM has it: a text, a chat, and the text of tokens."""
    codec = TextCodec.load(model)
    ids = list(codec.encode(PROMPT))
    found = post(endpoint, "/tokenize", {"model": "sea", "prompt": PROMPT, "return_token_strs": True})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 4096)
    assert len(found["token_strs"]) == len(ids)
    bare = post(endpoint, "/tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    assert (bare["tokens"], bare["token_strs"]) == (list(codec.encode(PROMPT, add_special_tokens=False)), None)
    chat = list(codec.encode_chat(RENDERED))
    assert post(endpoint, "/tokenize", {"messages": MESSAGES})["tokens"] == chat
    assert post(endpoint, "/detokenize", {"tokens": chat}) == {"prompt": codec.decode(chat)}
    assert post(endpoint, "/detokenize", {"tokens": []}) == {"prompt": ""}
    for body, param in (
        ({}, "prompt"), ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": MESSAGES, "chat_template": "a"}, "chat_template"),
    ):  # fmt: skip
        status, _, raw = http_call(endpoint, "POST", "/tokenize", json.dumps(body).encode())
        assert (status, json.loads(raw)["error"]["param"]) == (400, param)


def test_what_is_there_for_tools_and_people(endpoint: str) -> None:
    """Ping as health; a description of endpoints, each of which is there; a page without scripts."""
    assert http_call(endpoint, "GET", "/ping")[0] == http_call(endpoint, "POST", "/ping")[0] == 200
    described = json.loads(http_call(endpoint, "GET", "/openapi.json")[2])
    assert described["openapi"] == "3.1.0"
    found = {}
    for path, methods in described["paths"].items():
        for method in methods:
            status, _, raw = http_call(endpoint, method.upper(), path)
            code = json.loads(raw)["error"]["code"] if status >= 400 else None
            assert code not in ("not_found", "method_not_allowed"), path
            found[path] = status
    assert found["/health"] == found["/version"] == found["/v1/models"] == 200
    status, headers, page = http_call(endpoint, "GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"POST /v1/chat/completions" in page
    assert b"<script" not in page


def test_metrics_come_in_the_format_that_is_asked_for(cluster: RunningCluster) -> None:
    """OpenMetrics for who accepts it, with its end mark; else Prometheus' text."""
    place = cluster.cluster.router_others["metrics"]
    _, headers, text = http_call(place, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"# EOF" not in text
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    _, headers, text = http_call(place, "GET", "/metrics", headers=accept)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert b"# TYPE baton_requests counter" in text


def test_pages_of_an_origin_that_is_named_may_call(endpoint: str) -> None:
    """The browser asks first, and reads the answer; another origin is told nothing."""
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    status, headers, _ = http_call(endpoint, "OPTIONS", "/v1/chat/completions", headers=asks)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"]
    body = b'{"prompt": [5], "max_tokens": 2, "stream": true}'
    status, headers, raw = http_call(endpoint, "POST", "/v1/completions", body, {"origin": ORIGIN})
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert raw.endswith(b"data: [DONE]\n\n")
    _, headers, _ = http_call(endpoint, "POST", "/v1/completions", body, {"origin": "https://other.example.org"})
    assert "access-control-allow-origin" not in headers


def ask(client: openai.OpenAI, prompt: Any = PROMPT, **extra: Any) -> Any:
    fixed = {name: extra.pop(name) for name in ("stop", "logprobs", "n", "stream") if name in extra}
    body = {"ignore_eos": True, **extra}
    return client.completions.create(
        model="sea", prompt=prompt, temperature=0, max_tokens=body.pop("max_tokens", 12), extra_body=body, **fixed
    )


def talk(client: openai.OpenAI, messages: Any = MESSAGES, **extra: Any) -> Any:
    fixed = {name: extra.pop(name) for name in ("logprobs", "top_logprobs", "stream") if name in extra}
    return client.chat.completions.create(
        model="sea", messages=messages, temperature=0, max_tokens=12, extra_body={"ignore_eos": True, **extra}, **fixed
    )


def test_answers_have_the_ids_of_prompt_and_answer(client: openai.OpenAI, model: Path) -> None:
    """As vLLM has them: with each choice of a completion, beside the choices of a chat; in streams with the first
    chunk."""
    codec = TextCodec.load(model)
    (choice,) = ask(client, return_token_ids=True).model_dump()["choices"]
    assert choice["prompt_token_ids"] == list(codec.encode(PROMPT))
    assert len(choice["token_ids"]) == 12
    chat = talk(client, return_token_ids=True).model_dump()
    assert chat["prompt_token_ids"] == list(codec.encode_chat(RENDERED))
    chunks = [chunk.model_dump() for chunk in talk(client, return_token_ids=True, stream=True)]
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert ids == chat["choices"][0]["token_ids"]
    chunks = [chunk.model_dump()["choices"][0] for chunk in ask(client, return_token_ids=True, stream=True)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [list(codec.encode(PROMPT))] + [None] * (
        len(chunks) - 1
    )


def test_log_probabilities_name_tokens_by_their_ids(client: openai.OpenAI) -> None:
    """With `return_tokens_as_token_ids`, in both kinds of answers."""
    (choice,) = ask(client, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True).model_dump()["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[name] for name in named]
    chat = talk(client, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = chat.model_dump()["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == named


def test_each_chunk_has_the_usage_so_far(client: openai.OpenAI) -> None:
    """It rises to that of the whole answer, which comes last."""
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [12, 12]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_stopped_the_answer(client: openai.OpenAI, stream: bool) -> None:
    """A stop string, a stop token, or neither."""

    def reason(**extra: Any) -> Any:
        answer = ask(client, stream=stream, **extra)
        last = list(answer)[-1] if stream else answer
        (choice,) = last.model_dump()["choices"]
        return choice["finish_reason"], choice["stop_reason"]

    (choice,) = ask(client, return_token_ids=True).model_dump()["choices"]
    token = choice["token_ids"][5]
    assert reason() == ("length", None)
    assert reason(stop_token_ids=[token]) == ("stop", token)
    stop = choice["text"][4:7]
    assert reason(stop=["never so", stop]) == ("stop", stop)


def test_a_prompt_is_cut_to_its_end(client: openai.OpenAI) -> None:
    """To so many tokens, or to what the model takes beside the answer; a chat's too."""
    assert ask(client, [5, 6, 7, 8], truncate_prompt_tokens=2).choices == ask(client, [7, 8]).choices
    assert ask(client, [5, 6], truncate_prompt_tokens=9).choices == ask(client, [5, 6]).choices
    assert ask(client, [9] * 5000, truncate_prompt_tokens=-1).usage.prompt_tokens == 4096 - 12
    assert talk(client, truncate_prompt_tokens=3).usage.prompt_tokens == 3


def test_the_tokenizers_own_tokens_may_be_left_out(client: openai.OpenAI, model: Path) -> None:
    """`add_special_tokens` false: the prompt has the text's tokens only."""
    bare = list(TextCodec.load(model).encode(PROMPT, add_special_tokens=False))
    answer = ask(client, add_special_tokens=False, return_token_ids=True)
    assert answer.model_dump()["choices"][0]["prompt_token_ids"] == bare


def test_the_last_message_may_be_continued(client: openai.OpenAI, model: Path) -> None:
    """The prompt ends with its text, as the template writes it: no end of the message, and no other one begins."""
    begun = [*MESSAGES, {"role": "assistant", "content": "The waves "}]
    found = talk(client, begun, continue_final_message=True, return_token_ids=True).model_dump()
    text = TextCodec.load(model).decode(found["prompt_token_ids"])
    assert text.endswith("\nassistant: The waves")
    with pytest.raises(openai.BadRequestError) as caught:
        talk(client, begun, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(openai.BadRequestError, match="its text is empty"):
        talk(client, [*MESSAGES, {"role": "assistant", "content": ""}], continue_final_message=True)


@pytest.mark.parametrize("priority", [-5, 0, 3, "high", "normal", "low"])
def test_a_priority_is_taken(client: openai.OpenAI, priority: object) -> None:
    """vLLM's numbers and names of classes; the answer is the same."""
    assert ask(client, priority=priority).choices == ask(client).choices


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3), ("bad_words", ["sea"]), ("allowed_token_ids", [5]), ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False), ("logits_processors", ["x"]), ("priority", "urgent"),
        ("truncate_prompt_tokens", 0), ("use_beam_search", True), ("thinking_token_budget", 5),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, field: str, value: object) -> None:
    """Fields of vLLM that would change the answer."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{field: value})
    assert caught.value.param == field


def reference(model: Path, ids: list[int], top: int) -> list[tuple[float, dict[int, float]]]:
    """By transformers: of each token behind the first, its log-probability and those of the best ones."""
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    scores = logits.double().log_softmax(-1)
    best = scores.topk(top, dim=-1)
    return [
        (float(scores[i, ids[i + 1]]), dict(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)))
        for i in range(len(ids) - 1)
    ]


@pytest.mark.parametrize("length", [2, 30, 700])
def test_a_prompt_is_scored(client: openai.OpenAI, cluster: RunningCluster, model: Path, length: int) -> None:
    """`echo`, `logprobs` and `max_tokens` 0: the prompt's own log-probabilities are those of transformers, also the
    second time, when all of the prompt is cached; 700 tokens take two steps. No decode node is asked."""
    ids = [5 + (7 * i * i + i) % 500 for i in range(length)]
    wanted = reference(model, ids, 2)
    sent = 'baton_transfer_bytes_total{transport="shm"}'
    before = metrics_of(cluster).get(sent)
    for _ in range(2):
        answer = ask(client, ids, echo=True, logprobs=2, max_tokens=0, return_tokens_as_token_ids=True)
        (choice,) = answer.choices
        found = choice.logprobs
        assert found.tokens == [f"token_id:{token}" for token in ids]
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        assert found.token_logprobs[1:] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-4)
        for token, top, (logprob, best) in zip(ids[1:], found.top_logprobs[1:], wanted, strict=True):
            expected = {f"token_id:{other}": value for other, value in {**best, token: logprob}.items()}
            assert top == pytest.approx(expected, abs=1e-4)
        assert (choice.text, choice.finish_reason) == (TextCodec.load(model).decode(ids), "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 0)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert metrics_of(cluster).get(sent) == before


def test_a_prompt_is_scored_over_grpc(cluster: RunningCluster) -> None:
    """In one message and in a stream. A resumable one is refused: another router would not have the scores."""
    sampling = Sampling(max_tokens=4, temperature=0, prompt_logprobs=1)

    async def scenario() -> None:
        async with AsyncClient(cluster.cluster.routers) as asked:
            whole = await asked.generate([5, 6, 7, 8], sampling=sampling)
            stream = asked.stream([5, 6, 7, 8], sampling=sampling)
            assert len([piece async for piece in stream]) > 0
            for answer in (whole, stream.answer):
                assert [len(found.top_ids) for found in answer.prompt_logprobs] == [1, 1, 1]
            assert list(whole.prompt_logprobs) == list(stream.answer.prompt_logprobs)
            with pytest.raises(BatonError) as caught:
                await asked.generate([5, 6], sampling=sampling, resumable=True)
            assert caught.value.field == "sampling.prompt_logprobs"

    asyncio.run(scenario())


def test_a_prompt_is_echoed_before_its_answer(client: openai.OpenAI) -> None:
    """With its log-probabilities, or as text alone, streamed too; the answer is that without."""
    plain, echoed = ask(client, logprobs=1), ask(client, echo=True, logprobs=1)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    tokens = plain.choices[0].logprobs.tokens
    assert echoed.choices[0].logprobs.tokens[-12:] == tokens
    assert len(echoed.choices[0].logprobs.tokens) == echoed.usage.prompt_tokens + 12
    assert echoed.choices[0].logprobs.text_offset[0] == 0
    assert "".join(chunk.choices[0].text for chunk in ask(client, echo=True, stream=True)) == echoed.choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, echo=True, stream=True, logprobs=1)
    assert caught.value.param == "echo"


def test_a_prompt_has_a_limit_of_scores(client: openai.OpenAI) -> None:
    """Of tokens and alternatives together; named with both numbers."""
    with pytest.raises(openai.BadRequestError, match=r"4000 tokens 65536 in all"):
        ask(client, [5] * 4000, echo=True, logprobs=20, max_tokens=0)


def metrics_of(cluster: RunningCluster) -> dict[str, float]:
    lines = metrics_text(cluster).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition("\x20") for line in lines if line[0] != "#")}
