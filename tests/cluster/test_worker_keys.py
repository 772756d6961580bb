"""API keys at a router with two workers, with real processes: what a key may have it may have of both together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from baton.errors import BatonError, Reason
from router.keys import new_key
from tests.cluster.test_resume import FAST
from tests.cluster.test_workers import ROUTER, WORKERS, workers
from tests.support.attaching import Reader
from tests.support.cluster_harness import (
    Client,
    RunningCluster,
    assert_conserved,
    error_of,
    http_endpoint,
    make_request,
    metrics_text,
    mock_spec,
    mock_tokens,
    running,
    wait_for,
)

CALLS: Final = 12
LONG: Final = 3_000
"""Tokens of an answer that does not end while a test looks at it."""
PROMPT: Final = [5, 6, 7]


class Keys:
    """A file of keys that tests write to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, str] = {}
        self.of: dict[str, str] = {}
        self.add("free")
        self.add("two", concurrency=2)
        self.add("one", concurrency=1)
        self.add("slow", requests_per_minute=5)
        self.add("few", tokens_per_minute=20)
        self.write()

    def add(self, name: str, **limits: Any) -> None:
        self.of[name], self.entries[name] = new_key(os.urandom(32).hex()[:43], {"name": name, **limits})

    def write(self) -> None:
        made = self.path.with_suffix(".new")
        made.write_text("\n".join(self.entries.values()))
        made.replace(self.path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.toml")


@pytest.fixture(scope="module")
def cluster(keys: Keys) -> Iterator[RunningCluster]:
    flags = {"workers": WORKERS, "lame_duck_ms": 0, "api_keys_file": keys.path}
    spec = mock_spec(both=FAST, decode_flags={"engine.mock_layer_delay_ms": 1})
    spec = replace(spec, http="127.0.0.1:0", metrics="127.0.0.1:0", node_flags={ROUTER: flags})
    with running(spec, warm_up=False) as started:
        yield started


@contextlib.asynccontextmanager
async def clients_of(cluster: RunningCluster, key: str, count: int) -> AsyncIterator[list[Client]]:
    """Each with a connection of its own: they are shared out among the workers."""
    endpoint = cluster.client.endpoint
    made = [Client(endpoint, api_key=key, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            await client.close()
