"""Streams over HTTP that outlive their routers, with a client that knows server-sent events and nothing of us."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from tests.support.cluster_harness import CALL_S_MAX, RunningCluster, assert_conserved, http_call, running, wait_for
from tests.support.sse import Stream
from tests.unit.router.test_keys import made

FAST: Final = {"membership.heartbeat_ms": 100, "membership.ttl_ms": 600}
TOKENS: Final = 120
ASKED: Final[dict[str, Any]] = {
    "prompt": "the sea in the evening", "max_tokens": TOKENS, "temperature": 0.8, "seed": 7, "stream": True,
    "resumable": True,
}  # fmt: skip
FIRST, SECOND = "router-0", "router-1"


def spec_of(folder: Path, **router: object) -> ClusterSpec:
    """Two routers with a tokenizer before a mock engine that writes some 100 tokens a second."""
    write_demo_model(folder, DemoModelParams(num_layers=1, hidden_size=16, num_heads=2, head_dim=8, vocab_size=1000))
    return ClusterSpec(
        routers=2,
        decode=2,
        blocks=600,
        engine_kind=EngineKind.MOCK,
        http="127.0.0.1:0",
        metrics="127.0.0.1:0",
        flags={
            Service.PREFILL: {**FAST, "engine.poison_freed": True},
            Service.DECODE: {**FAST, "engine.poison_freed": True, "engine.mock_layer_delay_ms": 2},
            Service.ROUTER: {**FAST, "model": str(folder), "placement_wait_ms_max": 20_000, **router},
        },
        start_ms_max=60_000,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """What a test kills it starts again."""
    with running(spec_of(tmp_path_factory.mktemp("attach") / "tiny")) as cluster:
        yield cluster


def lines_of(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Up to where the connection breaks."""
    try:
        while line := response.readline():
            yield line
    except (OSError, http.client.HTTPException):
        return


def ask(
    cluster: RunningCluster,
    stream: Stream,
    call: str,
    body: Mapping[str, Any] | None = None,
    *,
    router: str = FIRST,
    events: int | None = None,
    headers: Mapping[str, str] | None = None,
    to_the_end: bool = False,
) -> Iterator[int]:
    """One call, "POST /path" or so. Yields the status once the client has so many events, with the connection open; it
    then goes, or reads what else there is."""
    method, path = call.split()
    endpoint = cluster.cluster.others_of(router)["http"]
    with closing(http.client.HTTPConnection(endpoint, timeout=CALL_S_MAX)) as connection:
        own = stream.headers() if stream.last_id else {}
        connection.request(method, path, json.dumps(body) if body else None, {**own, **(headers or {})})
        response = connection.getresponse()
        if response.status == 200:
            stream.read(lines_of(response), events=events)
        else:
            stream.error = json.loads(response.read() or b"{}").get("error")
        yield response.status
        if to_the_end:
            stream.read(lines_of(response))


def asked(cluster: RunningCluster, stream: Stream, call: str, body: Any = None, **how: Any) -> int:
    """The same, with the connection closed behind it."""
    (status,) = ask(cluster, stream, call, body, **how)
    return status


def undisturbed(cluster: RunningCluster, call: str, body: Mapping[str, Any]) -> Stream:
    stream = Stream()
    assert asked(cluster, stream, call, {**body, "resumable": False}, router=SECOND) == 200
    assert stream.done
    return stream


def kill(cluster: RunningCluster, *names: str) -> None:
    for name in names:
        cluster.send_signal(name, signal.SIGKILL)
    for name in names:
        cluster.run(cluster.wait_exit(name))
        cluster.set_down(name)


def revive(cluster: RunningCluster, *names: str) -> None:
    for name in names:
        cluster.run(cluster.cluster.start_process(name))
        cluster.set_down(name, False)


def all_freed(cluster: RunningCluster) -> None:
    cluster.run(assert_conserved(cluster))


def runners(cluster: RunningCluster) -> list[str]:
    """Decode nodes that have requests."""
    statuses = cluster.run(cluster.statuses())
    return [name for name, status in statuses.items() if name.startswith("decode") and status.requests]


def attaches(cluster: RunningCluster) -> Counter[str]:
    """What the second router has done for clients that came back, by outcome."""
    _, _, text = http_call(cluster.cluster.others_of(SECOND)["metrics"], "GET", "/metrics")
    found = re.findall(r'^baton_attaches_total\{outcome="(\w+)"\} (\d+)', text.decode(), re.M)
    return Counter({outcome: int(count) for outcome, count in found})


def same(stream: Stream, whole: Stream, *names: str) -> None:
    for name in ("texts", "ends", *names):
        assert getattr(stream, name) == getattr(whole, name), name
    assert stream.done
    assert len(stream.heads) == 1, stream.heads


@pytest.mark.parametrize("way", ["POST", pytest.param("GET", marks=pytest.mark.slow)])
def test_its_router_is_killed(cluster: RunningCluster, way: str) -> None:
    """In mid-answer. The client attaches at the other router: the text is that of an undisturbed answer, and the
    decode node went on with it. A DELETE frees what is kept of it."""
    whole, stream, before = undisturbed(cluster, "POST /v1/completions", ASKED), Stream(), attaches(cluster)
    for status in ask(cluster, stream, "POST /v1/completions", ASKED, events=20):
        assert status == 200
        kill(cluster, FIRST)
    (name, *_), body = next(iter(stream.heads)), ASKED if way == "POST" else None
    call = "POST /v1/completions" if way == "POST" else f"GET /v1/requests/{name}/stream"
    assert asked(cluster, stream, call, body, router=SECOND) == 200
    same(stream, whole)
    assert attaches(cluster)["taken"] == before["taken"] + 1
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)
    revive(cluster, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False], ids=["with its ids", "without"])
def test_its_router_and_its_decode_node_are_killed(cluster: RunningCluster, says: bool) -> None:
    """At once. The answer is computed on: behind the ids that the client says, or from the beginning, and compared. A
    GET cannot do it, and says what can."""
    body = {**ASKED, "return_token_ids": says}
    whole, stream, before = undisturbed(cluster, "POST /v1/completions", body), Stream(), attaches(cluster)
    for _ in ask(cluster, stream, "POST /v1/completions", body, events=20):
        (runner,) = runners(cluster)
        kill(cluster, FIRST, runner)
    ((name, *_),) = stream.heads
    assert asked(cluster, stream, f"GET /v1/requests/{name}/stream", router=SECOND) == 503
    assert stream.error["code"] == "not_resumable"
    assert "POST" in stream.error["message"]
    stream.error = None
    said = {"resume_token_ids": stream.ids[0]} if says else {}
    assert asked(cluster, stream, "POST /v1/completions", {**body, **said}, router=SECOND) == 200
    same(stream, whole, "ids")
    assert attaches(cluster)["computed_again"] == before["computed_again"] + 1
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)
    revive(cluster, FIRST, runner)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["POST", "GET", "decode too"])
def test_several_answers_of_a_chat(cluster: RunningCluster, way: str) -> None:
    """Three answers with log-probabilities and usage. A stop string has ended the first one when the router is killed,
    the others are in their midst; with "decode too" a node that has some of them dies as well. Each goes on by
    itself."""
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "the sea"}], "n": 3, "max_tokens": TOKENS, "temperature": 1.0,
        "seed": 9, "logprobs": True, "top_logprobs": 1, "stream": True, "stream_options": {"include_usage": True},
        "resumable": True,
    }  # fmt: skip
    free = undisturbed(cluster, "POST /v1/chat/completions", chat)
    chat["stop"] = [free.texts[0][20:26]]
    whole, stream = undisturbed(cluster, "POST /v1/chat/completions", chat), Stream()
    assert len(whole.texts[0]) == free.texts[0].index(chat["stop"][0]) <= 20
    for _ in ask(cluster, stream, "POST /v1/chat/completions", chat, events=90):
        assert stream.ends[0] == ["stop"]
        assert not stream.ends[1]
        lost = runners(cluster)[:1] if way == "decode too" else []
        kill(cluster, FIRST, *lost)
    ((name, *_),) = stream.heads
    call = f"GET /v1/requests/{name}/stream" if way == "GET" else "POST /v1/chat/completions"
    assert asked(cluster, stream, call, None if way == "GET" else chat, router=SECOND) == 200
    same(stream, whole, "logprobs")
    ((used,), (wanted,)) = stream.usage, whole.usage
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert used[key] == wanted[key], key
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)
    revive(cluster, FIRST, *lost)


@pytest.mark.slow
def test_a_drawn_seed_is_kept(cluster: RunningCluster) -> None:
    """Two prompts without a seed, whose router dies with all decode nodes: computed again by the noise that the first
    router drew for each, both are what the client has the beginning of, and go on."""
    asked_for = {name: value for name, value in ASKED.items() if name != "seed"}
    body, stream = {**asked_for, "prompt": ["the sea", "the sea"], "temperature": 2.0}, Stream()
    for _ in ask(cluster, stream, "POST /v1/completions", body, events=40):
        kill(cluster, FIRST, "decode-0", "decode-1")
    began = dict(stream.texts)
    assert all(began.values())
    assert began[0][:10] != began[1][:10]
    revive(cluster, "decode-0", "decode-1")
    assert asked(cluster, stream, "POST /v1/completions", body, router=SECOND) == 200
    assert (stream.done, stream.ends) == (True, {0: ["length"], 1: ["length"]})
    assert all(stream.texts[index].startswith(text) for index, text in began.items())
    ((name, *_),) = stream.heads
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)
    revive(cluster, FIRST)


@pytest.mark.slow
def test_an_answer_that_ends_while_nobody_reads_it(cluster: RunningCluster) -> None:
    """The client loses its connection, its router dies, and the answer is written to its end before the client comes
    back: it is kept. Attached once more after the last event, there is only the end again. Then it is forgotten."""
    body = {**ASKED, "logprobs": 0}
    whole, stream = undisturbed(cluster, "POST /v1/completions", body), Stream()
    for _ in ask(cluster, stream, "POST /v1/completions", body, events=10):
        kill(cluster, FIRST)

    async def is_written() -> bool:
        statuses = await cluster.statuses()
        return [status.answers_unacknowledged for status in statuses.values() if status.requests] in ([], [1])

    cluster.run(wait_for(is_written, "the end of the answer", story=cluster.story))
    ((name, *_),) = stream.heads
    for _ in range(2):
        assert asked(cluster, stream, f"GET /v1/requests/{name}/stream", router=SECOND) == 200
        same(stream, whole, "logprobs")
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)
    revive(cluster, FIRST)


@pytest.mark.slow
def test_both_routers_are_alive(cluster: RunningCluster) -> None:
    """The client has lost its connection, as far as it knows: it attaches at the other router while the first one still
    serves it. The first stream ends with taken_over; the second goes on. Then back again, at the first."""
    whole, stream, half_dead = undisturbed(cluster, "POST /v1/completions", ASKED), Stream(), Stream()
    for _ in ask(cluster, half_dead, "POST /v1/completions", ASKED, events=10, to_the_end=True):
        stream.last_id, stream.heads = half_dead.last_id, half_dead.heads.copy()
        stream.texts.update(half_dead.texts)
        assert asked(cluster, stream, "POST /v1/completions", ASKED, router=SECOND, events=20) == 200
        ((name, *_),) = stream.heads
        assert asked(cluster, stream, f"GET /v1/requests/{name}/stream") == 200
        same(stream, whole)
    assert half_dead.error["code"] == "taken_over"
    assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
    all_freed(cluster)


@pytest.mark.slow
def test_its_router_ends_before_the_answer_does(tmp_path: Path) -> None:
    """It is told to end, and the answer is longer than its time: the connection is closed without an error, the decode
    node goes on, and the client attaches to that at the other router."""
    hurried = {"lame_duck_ms": 0, "drain_ms_max": 100, "stop_grace_ms": 100}
    body = {**ASKED, "max_tokens": 3 * TOKENS}
    with running(spec_of(tmp_path / "tiny", **hurried)) as cluster:
        whole, stream, before = undisturbed(cluster, "POST /v1/completions", body), Stream(), attaches(cluster)
        for _ in ask(cluster, stream, "POST /v1/completions", body, events=10, to_the_end=True):
            cluster.send_signal(FIRST, signal.SIGTERM)
            cluster.run(cluster.wait_exit(FIRST))
            cluster.set_down(FIRST)
        assert (stream.done, stream.error) == (False, None)
        ((name, *_),) = stream.heads
        assert asked(cluster, stream, f"GET /v1/requests/{name}/stream", router=SECOND) == 200
        same(stream, whole)
        assert attaches(cluster)["taken"] == before["taken"] + 1
        assert asked(cluster, stream, f"DELETE /v1/requests/{name}", router=SECOND) == 204
        all_freed(cluster)


@pytest.mark.slow
def test_a_client_that_forgets_cannot_come_back(cluster: RunningCluster) -> None:
    """It cancels in mid-answer, at the other router: nothing is left of the request, its stream ends, and an attach is
    refused, with the body too."""
    stream, again = Stream(), Stream()
    for _ in ask(cluster, stream, "POST /v1/completions", ASKED, events=10):
        again.last_id = stream.last_id
        ((name, *_),) = stream.heads
        assert asked(cluster, again, f"DELETE /v1/requests/{name}", router=SECOND) == 204
        all_freed(cluster)
    for call, body in ((f"GET /v1/requests/{name}/stream", None), ("POST /v1/completions", ASKED)):
        assert asked(cluster, again, call, body, router=SECOND) == 499
        assert again.error["code"] == "cancelled"


@pytest.mark.slow
def test_another_keys_token(tmp_path: Path) -> None:
    """It opens nothing: 403 for POST, GET and DELETE, and the answer's own client is not disturbed."""
    mine, other = (made(name) for name in ("mine", "other"))
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[[keys]]\nname = "{key.name}"\nsha256 = "{key.sha256}"\n' for _, key in (mine, other)))
    with_mine, with_other = ({"authorization": f"Bearer {text}"} for text, _ in (mine, other))
    with running(spec_of(tmp_path / "tiny", api_keys_file=str(path)), warm_up=False) as cluster:
        stream, thief = Stream(), Stream()

        def began() -> int:
            stream.error = None  # nothing has warmed the cluster up: a first call may be refused
            return asked(cluster, stream, "POST /v1/completions", ASKED, events=10, headers=with_mine)

        async def has_begun() -> bool:
            return began() == 200

        cluster.run(wait_for(has_begun, "the first answer", story=cluster.story))
        thief.last_id = stream.last_id
        ((name, *_),) = stream.heads
        for call in ("POST /v1/completions", f"GET /v1/requests/{name}/stream", f"DELETE /v1/requests/{name}"):
            body = ASKED if call.startswith("POST") else None
            assert asked(cluster, thief, call, body, router=SECOND, headers=with_other) == 403
            assert thief.error["code"] == "permission_denied"
        assert asked(cluster, stream, "POST /v1/completions", ASKED, router=SECOND, headers=with_mine) == 200
        assert stream.done
        text = "".join(cluster.log_text(each) for each in (FIRST, SECOND))
        assert stream.last_id not in text
        assert thief.last_id not in text


@pytest.mark.slow
def test_the_example_in_the_docs(cluster: RunningCluster, tmp_path: Path) -> None:
    """As it stands, with this cluster's routers and a long answer; its first router is killed while it prints."""
    page = Path("docs/openai.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "Last-Event-ID" in block]
    places = [f"http://{cluster.cluster.others_of(name)['http']}" for name in (FIRST, SECOND)]
    example = re.sub(r"ROUTERS = .*", f"ROUTERS = {places}", example)
    asked_for = {**ASKED, "prompt": "Tell me of the sea."}
    example = re.sub(r"BODY = .*", f"BODY = json.dumps({asked_for!r}).encode()", example)
    whole = undisturbed(cluster, "POST /v1/completions", asked_for)
    script = tmp_path / "example.py"
    script.write_text(example)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as running_example:
        assert running_example.stdout is not None
        first = running_example.stdout.read(20)
        kill(cluster, FIRST)
        assert first + running_example.stdout.read() == whole.texts[0]
        assert running_example.wait(CALL_S_MAX) == 0
    revive(cluster, FIRST)
