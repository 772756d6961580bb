"""Pinned text with a real tokenizer and chat template: the first chat of a user finds it; tenants do not meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from batonpb import pins_pb2, pins_pb2_grpc

from cli.services import Service
from cli.supervisor import ROUTER_NAME, ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    http_call,
    http_endpoint,
    metrics_text,
    running,
    wait_for,
)
from tests.support.operators import as_operator

SIZE: Final = 16
SYSTEM: Final = "You are the support desk of a ferry line. " * 6
TEXT: Final = "The sea in the evening is calm, and the boats come home one after the other. " * 4
TEXT_FOR_ONE: Final = "In the morning the harbour is full of fog and nobody can see the light. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pins") / "tiny"
    write_demo_model(folder, DemoModelParams(num_layers=1, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[RunningCluster]:
    pins = [
        {"name": "desk", "system": SYSTEM},
        {"name": "sea", "text": TEXT},
        {"name": "fog", "text": TEXT_FOR_ONE, "cache_salt": "acme"},
    ]
    spec = ClusterSpec(
        model=str(model),
        engine_kind=EngineKind.MODEL,
        blocks=512,
        http="127.0.0.1:0",
        metrics="127.0.0.1:0",
        flags={Service.ROUTER: {"pinned_prefixes": json.dumps(pins)}},
    )
    with running(spec) as cluster:
        cluster.run(wait_for(lambda: warm(cluster), "the prefixes to be computed", story=cluster.story))
        yield cluster


async def warm(cluster: RunningCluster) -> bool:
    for name in ("prefill-0", "decode-0"):
        pins = (await cluster.status(name)).prefixes.pins
        if [pin.name for pin in pins] != ["desk", "fog", "sea"] or any(p.blocks != p.blocks_pinned for p in pins):
            return False
    return True


def http_text(cluster: RunningCluster, method: str, path: str, body: object = None) -> str:
    status, _, answer = http_call(http_endpoint(cluster), method, path, json.dumps(body).encode())
    assert status == 200, answer
    return answer.decode()


def cached_tokens(cluster: RunningCluster, path: str, **body: Any) -> int:
    reply = json.loads(http_text(cluster, "POST", path, {"max_tokens": 3, "temperature": 0, **body}))
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def full(tokens: int) -> int:
    return tokens // SIZE * SIZE


def test_the_first_chat_of_a_user_finds_the_system_message(cluster: RunningCluster, model: Path) -> None:
    """Whatever the user says first; all full blocks up to where the user's own words begin are there."""
    codec = TextCodec.load(model)
    common = len(codec.encode_chat(f"<|begin|>system: {SYSTEM}\nuser:"))
    assert common > 3 * SIZE
    for user in ("Hello", "0", "Zebra?", "  spaces", "\u00e9t\u00e9"):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        assert cached_tokens(cluster, "/v1/chat/completions", messages=messages) >= full(common - 2)
    other = [{"role": "system", "content": "X" + SYSTEM}, {"role": "user", "content": "Hello"}]
    assert cached_tokens(cluster, "/v1/chat/completions", messages=other) == 0


def test_a_pinned_text_is_for_its_tenant_only(cluster: RunningCluster, model: Path) -> None:
    """The one with a salt is found with that salt and not without; the one without, the other way round."""
    codec = TextCodec.load(model)
    sea, fog = (full(len(codec.encode(text)) - 1) for text in (TEXT, TEXT_FOR_ONE))
    assert cached_tokens(cluster, "/v1/completions", prompt=TEXT + "Then night falls.") >= sea
    assert cached_tokens(cluster, "/v1/completions", prompt=TEXT + "Then night falls.", cache_salt="acme") == 0
    assert cached_tokens(cluster, "/v1/completions", prompt=TEXT_FOR_ONE + "Wait.", cache_salt="acme") >= fog
    assert cached_tokens(cluster, "/v1/completions", prompt=TEXT_FOR_ONE + "Wait.") == 0
    cluster.run(assert_conserved(cluster))


def test_a_system_message_by_the_api_is_the_configured_one(cluster: RunningCluster) -> None:
    """The same blocks: an operator's pin of the same message has all of them pinned already."""

    async def scenario() -> None:
        stub = pins_pb2_grpc.PinsStub(cluster.command_channel(ROUTER_NAME))
        request = pins_pb2.PinRequest(name="again", system=SYSTEM)
        reply = await stub.Pin(request, timeout=CALL_S_MAX, metadata=as_operator())
        assert [on.node for on in reply.pin.nodes] == ["decode-0", "prefill-0"]
        assert all(on.blocks == on.blocks_pinned > 3 for on in reply.pin.nodes)
        assert (await stub.Unpin(pins_pb2.UnpinRequest(name="again"), timeout=CALL_S_MAX, metadata=as_operator())).known
        assert await warm(cluster)

    cluster.run(scenario())


def test_the_metrics_count_hits_in_tokens_on_both_sides(cluster: RunningCluster) -> None:
    """Tokens not computed, tokens not sent, blocks sent and not sent, and what is pinned, as the figures of a request
    that hits say."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How are the tides today?"}]

    def figures() -> dict[str, float]:
        lines = metrics_text(cluster).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = figures()
    hits = cached_tokens(cluster, "/v1/chat/completions", messages=messages)
    after = figures()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["baton_prefix_hit_tokens_total"] == grown["baton_prefix_skipped_tokens_total"] == hits
    assert grown['baton_transfer_blocks_skipped_total{transport="shm"}'] == hits / SIZE
    prompt_blocks = -(-grown["baton_prompt_tokens_total"] // SIZE)
    assert grown['baton_transfer_blocks_total{transport="shm"}'] == prompt_blocks - hits / SIZE

    async def reported() -> bool:
        """With the nodes' next heartbeats."""
        now = figures()
        names = [f'baton_node_blocks_pinned{{node="{n}",role="{n[:-2]}"}}' for n in ("prefill-0", "decode-0")]
        return now[names[0]] == now[names[1]] > 9

    cluster.run(wait_for(reported, "both nodes to report what is pinned"))
