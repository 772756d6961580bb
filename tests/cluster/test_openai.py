"""The OpenAI endpoints of a real cluster, called with the `openai` package: sync and async, stream and not."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from baton import baton_version
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import BOS_ID, DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    http_call,
    http_endpoint,
    metrics_text,
    running,
    wait_for,
)
from tests.support.drain_harness import order

PROMPT: Final = "the sea in the evening"
MESSAGES: Final[list[ChatCompletionMessageParam]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": PROMPT},
]
RENDERED: Final = f"<|begin|>system: Be brief.\nuser: {PROMPT}\nassistant:"
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
REQUESTS_MAX: Final = 12
"""That nodes have of the router at a time; as many wait in line."""
TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai") / "tiny"
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
        flags={Service.ROUTER: {"requests_max": REQUESTS_MAX, "line_requests_max": REQUESTS_MAX}},
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


def test_the_model_is_listed(client: openai.OpenAI, model: Path) -> None:
    """id and root are its name; one by that name is found, another is not."""
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (model.name, "model")
    assert listed.model_dump()["root"] == model.name
    assert client.models.retrieve(model.name).id == model.name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_same_streamed_and_whole(client: openai.OpenAI, cluster: RunningCluster) -> None:
    """The text, the reason and the usage are those of the gRPC endpoint, as text and as token ids."""
    wanted = cluster.run(cluster.client.generate(PROMPT, max_tokens=12, ignore_eos=True))
    whole = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert whole.object == "text_completion"
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (wanted.text, "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (wanted.stats.prompt_tokens, 12)
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted.text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == ([], 12)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    by_ids = client.completions.create(model="tiny", prompt=[5, 6, 7], **GREEDY)
    ids_wanted = cluster.run(cluster.client.generate([5, 6, 7], max_tokens=12, ignore_eos=True))
    assert (by_ids.choices[0].text, by_ids.usage and by_ids.usage.prompt_tokens) == (ids_wanted.text, 3)


def test_a_resumable_stream_reads_as_any_other(client: openai.OpenAI) -> None:
    """Clients that know nothing of ids of events, or of token ids, read what they read before."""
    chat: Any = client.chat.completions
    plain, resumable = (
        [
            (chunk.choices[0].delta.content, chunk.choices[0].finish_reason)
            for chunk in chat.create(
                model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, stream=True,
                extra_body={"ignore_eos": True, **extra},
            )
        ]
        for extra in ({}, {"resumable": True, "return_token_ids": True})
    )  # fmt: skip
    # Which tokens share a chunk is a matter of load; what they say is not.
    for chunks in (plain, resumable):
        assert [finish for _, finish in chunks if finish] == ["length"]
        assert chunks[-1][1] == "length"
    assert "".join(text or "" for text, _ in resumable) == "".join(text or "" for text, _ in plain)


def test_a_chat_is_rendered_by_the_models_template(client: openai.OpenAI, cluster: RunningCluster, model: Path) -> None:
    """The prompt is the rendered template, its special tokens as such; the role comes with the first token only."""
    ids = list(TextCodec.load(model).encode_chat(RENDERED))
    assert ids[0] == BOS_ID
    wanted = cluster.run(cluster.client.generate(ids, max_tokens=12, ignore_eos=True))
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    assert (whole.object, whole.choices[0].finish_reason) == ("chat.completion", "length")
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", wanted.text)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (len(ids), len(ids) + 12)
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **GREEDY))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert deltas[0].content
    assert "".join(delta.content or "" for delta in deltas) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]


def test_several_answers_stop_and_logprobs(client: openai.OpenAI, cluster: RunningCluster) -> None:
    """Three answers from one seed: all differ, the first is that of n = 1; each has its log-probabilities."""
    asked: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    one = client.chat.completions.create(model="tiny", messages=MESSAGES, **asked)
    three = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, **asked)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    counted = 0
    for choice in three.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        counted += len(choice.logprobs.content)
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
    assert three.usage.completion_tokens == counted
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True, **asked):
        (piece,) = chunk.choices
        streamed[piece.index] = streamed.get(piece.index, "") + (piece.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts

    prompts = client.completions.create(model="tiny", prompt=[PROMPT, "a storm"], n=2, logprobs=1, **asked)
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    first = prompts.choices[0].logprobs
    assert first is not None
    assert first.tokens is not None
    assert first.token_logprobs is not None
    assert len(first.tokens) == len(first.token_logprobs) > 0
    greedy = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text
    stopped = client.completions.create(model="tiny", prompt=PROMPT, stop=[greedy[5:9]], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (greedy[: greedy.index(greedy[5:9])], "stop")
    cluster.run(assert_conserved(cluster))


def test_the_same_prompt_twice_is_drawn_twice(client: openai.OpenAI) -> None:
    """Without a seed, answers to equal prompts of one call differ as those of two calls would; with one they do not."""
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 2.0, "extra_body": {"ignore_eos": True}}
    drawn = client.completions.create(model="tiny", prompt=[PROMPT] * 3, n=2, **asked)
    assert len({choice.text for choice in drawn.choices}) == 6
    seeded = client.completions.create(model="tiny", prompt=[PROMPT] * 2, seed=5, **asked)
    assert len({choice.text for choice in seeded.choices}) == 1


def test_many_async_calls_at_once(cluster: RunningCluster, endpoint: str) -> None:
    """Streams and whole answers side by side on one async client: each gets its own, then nothing is held."""

    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://{endpoint}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S
        ) as client:

            async def streamed(prompt: list[int]) -> str:
                text = ""
                async for chunk in await client.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY):
                    text += chunk.choices[0].text
                return text

            async def whole(prompt: list[int]) -> str:
                answer = await client.completions.create(model="tiny", prompt=prompt, **GREEDY)
                return str(answer.choices[0].text)

            prompts = [[i, i + 1, i + 2] for i in range(5, 5 + REQUESTS_MAX // 2)]
            texts = await asyncio.gather(*map(streamed, prompts), *map(whole, prompts))
            assert texts[: len(prompts)] == texts[len(prompts) :]
            assert len(set(texts)) > 1

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))


@pytest.mark.parametrize(
    ("chat", "fields", "status", "param", "code"),
    [
        (True, {"echo": True}, 400, "echo", "bad_field"),
        (False, {"prompt_logprobs": 1}, 400, "prompt_logprobs", "bad_field"),
        (False, {"temperature": -1}, 400, "temperature", "sampling_out_of_range"),
        (False, {"max_tokens": 0}, 400, "max_tokens", "bad_field"),
        (False, {"max_tokens": -1}, 400, "max_tokens", "bad_field"),
        (False, {"logprobs": 21}, 400, "logprobs", "bad_field"),
        (False, {"stop": [""]}, 400, "stop", "sampling_out_of_range"),
        (False, {"prompt": []}, 400, "prompt", "bad_field"),
        (False, {"prompt": [600]}, 400, "prompt", "token_out_of_range"),
        (False, {"prompt": [1] * 5000}, 400, "prompt", "context_length_exceeded"),
        (False, {"model": "other"}, 404, "model", "model_not_found"),
        (False, {"n": 3, "model": "other", "stream": True}, 404, "model", "model_not_found"),
        (True, {"messages": []}, 400, "messages", "bad_field"),
        (True, {"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0.role", "bad_field"),
        (True, {"messages": [{"role": "user", "content": "\x20".join(["x"] * 5000)}]}, 400, "messages", None),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", None),
        (True, {"tools": [{"type": "function"}]}, 400, "tools.0", "bad_field"),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "bad_field"),
        (True, {"top_logprobs": 3}, 400, "top_logprobs", "bad_field"),
        (True, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "bad_field"),
    ],
)
def test_what_is_wrong_is_an_openai_error(
    endpoint: str, chat: bool, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    """Status, type, parameter and code, streamed or not; the message is a sentence."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    base: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "hi"}
    found = http_call(endpoint, "POST", path, json.dumps({"model": "tiny", **base, **fields}).encode())
    error = json.loads(found[2])["error"]
    assert (found[0], error["type"], error["param"]) == (status, "invalid_request_error", param)
    assert code is None or error["code"] == code
    assert error["message"].endswith(".")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/completions", b"{", 400, "bad_field"),
        ("POST", "/v1/completions", b"[]", 400, "bad_field"),
        ("POST", "/v1/completions", b"\xff", 400, "bad_field"),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, "bad_field"),
        ("POST", "/v1/completions", b'{"prompt": "hi", "model": "\\ud800"}', 400, "bad_field"),
        ("POST", "/v1/completions", b"[" * 100_000, 400, "bad_field"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("GET", "/v1/other", b"", 404, "not_found"),
        ("GET", "/v1/models/other", b"", 404, "model_not_found"),
        ("POST", "/tokenize", b'{"prompt": 5}', 400, "bad_field"),
        ("POST", "/tokenize", b'{"prompt": "hi", "model": "other"}', 404, "model_not_found"),
        ("POST", "/detokenize", b'{"tokens": [600]}', 400, "token_out_of_range"),
        ("POST", "/detokenize", b"{}", 400, "bad_field"),
    ],
)
def test_a_wrong_call_is_an_openai_error_too(
    endpoint: str, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    """Broken JSON, no object, no such path or method, no such model; each answer has an id."""
    found = http_call(endpoint, method, path, body)
    error = json.loads(found[2])["error"]
    assert (found[0], error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert len(found[1]["x-request-id"]) == 32


def test_unknown_fields_and_nulls_are_accepted(endpoint: str) -> None:
    """Clients send more than we know; null is the same as left out; no model is the one there is."""
    body = {"prompt": "hi", "user": "u", "new_thing": [1], "temperature": None, "echo": False, "max_tokens": 2, "n": 1}
    status, headers, raw = http_call(endpoint, "POST", "/v1/completions", json.dumps(body).encode())
    answer = json.loads(raw)
    assert (status, answer["model"], len(answer["choices"])) == (200, "tiny", 1)
    assert answer["id"] == f"cmpl-{headers['x-request-id']}"


def test_a_full_router_says_when_to_come_back(client: openai.OpenAI, cluster: RunningCluster, endpoint: str) -> None:
    """More answers than the router takes: 429 with a time, for all of the call, and nothing of it is left. The metrics
    count those that were refused."""
    refused = 'baton_requests_total{outcome="too_many_calls"}'
    before = metrics_of(cluster).get(refused, 0.0)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt=[[1, 2], [3], [4]], n=REQUESTS_MAX, **GREEDY)
    assert caught.value.type == "rate_limit_error"
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) in (("1", "1000"), ("2", "2000"))
    cluster.run(assert_conserved(cluster))
    assert metrics_of(cluster)[refused] > before


def metrics_of(cluster: RunningCluster) -> dict[str, float]:
    lines = metrics_text(cluster).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_answers(
    client: openai.OpenAI, cluster: RunningCluster, endpoint: str, n: int
) -> None:
    """It reads a few tokens of answers of 2,000 and closes: all of them count as cancelled, and all nodes let go."""
    cancelled = 'baton_requests_total{outcome="cancelled"}'
    before = metrics_of(cluster).get(cancelled, 0.0)
    asked: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="tiny", prompt=PROMPT, n=n, stream=True, **asked)
    seen = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == n:
            break
    stream.close()
    cluster.run(assert_conserved(cluster))
    assert metrics_of(cluster)[cancelled] - before == n


async def healthy(endpoint: str) -> bool:
    """Or there is no decode node, and nothing else is wrong."""
    status, _, raw = http_call(endpoint, "GET", "/health")
    if status == 200:
        return True
    assert (status, json.loads(raw)["error"]["code"]) == (503, "no_decode_node")
    return False


def test_metrics_and_health(cluster: RunningCluster, endpoint: str, client: openai.OpenAI) -> None:
    """What the calls here have left in the counters; nothing queued or running."""
    cluster.run(wait_for(lambda: healthy(endpoint), "the router to know both nodes"))
    assert json.loads(http_call(endpoint, "GET", "/version")[2]) == {"version": baton_version()}

    (served,) = client.models.list().data
    assert (served.id, served.model_dump()["max_model_len"]) == ("tiny", 4096)

    before = metrics_of(cluster)
    client.completions.create(model="tiny", prompt=list(range(2, 70)), **GREEDY)
    again = client.completions.create(model="tiny", prompt=list(range(2, 70)), **GREEDY)
    after = metrics_of(cluster)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert rise('baton_requests_total{outcome="length"}') == 2
    assert rise("baton_ttft_seconds_count") == 2
    assert rise("baton_itl_seconds_count") == 2 * 11
    assert rise("baton_e2e_seconds_count") == 2
    assert rise("baton_e2e_seconds_sum") > rise("baton_ttft_seconds_sum")
    assert (rise("baton_prompt_tokens_total"), rise("baton_output_tokens_total")) == (136, 24)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert rise("baton_prefix_hit_tokens_total") == again.usage.prompt_tokens_details.cached_tokens == 64
    assert rise('baton_transfer_bytes_total{transport="shm"}') > 0
    assert rise('baton_transfer_exposed_seconds_count{transport="shm"}') == 2
    assert (after["baton_requests_queued"], after["baton_requests_running"]) == (0, 0)
    nodes = {name for name in after if name.startswith("baton_node_blocks{")}
    assert 'baton_node_blocks{class="free",node="decode-0",role="decode"}' in nodes
    assert after['baton_node_host_blocks{class="free",node="decode-0",role="decode"}'] == 0
    assert after['baton_node_swapped_out_requests{node="decode-0",role="decode"}'] == 0
    assert after['baton_nodes{role="decode",state="ready"}'] == 1
    assert after['baton_nodes{role="decode",state="draining"}'] == 0
    assert after[f'baton_build_info{{version="{baton_version()}"}}'] == 1
    assert after["process_resident_memory_bytes"] > 0


def test_health_is_of_the_whole_cluster(cluster: RunningCluster, endpoint: str) -> None:
    """Without a decode node that takes requests nothing can be served, and that is no reason to restart the router."""

    async def unhealthy() -> bool:
        return not await healthy(endpoint)

    async def story() -> None:
        await order(cluster, "decode-0", "Cordon")
        try:
            await wait_for(unhealthy, "the router to see it")
            assert http_call(endpoint, "GET", "/live")[0] == 200
            assert metrics_of(cluster)['baton_nodes{role="decode",state="cordoned"}'] == 1
        finally:
            await order(cluster, "decode-0", "Uncordon")
        await wait_for(lambda: healthy(endpoint), "the router to see it")

    cluster.run(story())


def test_several_answers_share_the_prompts_blocks(cluster: RunningCluster, client: openai.OpenAI) -> None:
    """A new prompt of four blocks and a bit, three answers: two find all four blocks cached on both nodes."""
    before = metrics_of(cluster)
    client.completions.create(model="tiny", prompt=list(range(70, 138)), n=3, **GREEDY)
    after = metrics_of(cluster)
    assert after["baton_prefix_hit_tokens_total"] - before["baton_prefix_hit_tokens_total"] == 2 * 64
    skipped = 'baton_transfer_blocks_skipped_total{transport="shm"}'
    assert after[skipped] - before.get(skipped, 0.0) == 2 * 4


def test_an_error_in_the_middle_of_a_stream_is_told(model: Path) -> None:
    """The decode node dies in mid-answer and nobody is left to go on: the stream ends with a data event that has the
    error, which the client raises."""
    spec = ClusterSpec(
        model=str(model),
        engine_kind=EngineKind.MODEL,
        blocks=512,
        http="127.0.0.1:0",
        metrics="127.0.0.1:0",
        flags={Service.ROUTER: {"liveness.reconnect_ms_max": 300, "retries.resume_wait_ms_max": 300}},
    )
    with running(spec) as cluster:
        url = f"http://{http_endpoint(cluster)}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=TIMEOUT_S) as client:
            stream = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            cluster.send_signal("decode-0", signal.SIGKILL)
            with pytest.raises(openai.APIError, match="decode node"):
                list(stream)
