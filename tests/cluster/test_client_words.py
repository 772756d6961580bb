"""What clients and frameworks look for beside the answers themselves: words of errors, names, small endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cluster_harness import RunningCluster, http_call, http_endpoint, running

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


def test_a_developer_speaks_as_the_system_where_the_template_knows_none(client: openai.OpenAI) -> None:
    """The answer is the same, from a prompt of as many tokens."""
    answers = [
        client.chat.completions.create(model="sea", messages=chat, **GREEDY)
        for chat in (MESSAGES, [{"role": "developer", "content": "Be brief."}, MESSAGES[1]])
    ]
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
