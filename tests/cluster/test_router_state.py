"""What a router keeps to itself: text is encoded off its loop, channels to what is gone are dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.errors import Reason
from baton.http2_front import native_front
from baton.native import NativeLibrary
from cli.services import Service
from router import text_workers
from router.text import TextCodec
from tests.support.cluster_harness import (
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
)
from tests.support.inprocess_cluster import InProcessCluster, ask_exactly, inprocess, until

CHARS_MAX = 40
TEXT = "a cab, a bad cab"


def small_tokenizer(folder: Path) -> Tokenizer:
    """Three letters, a comma and a space."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3, ",": 4, " ": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_text_is_measured_first_and_encoded_off_the_loop(tmp_path: Path) -> None:
    """A text over the limit is refused before it is encoded; one within it is encoded on another thread."""

    async def scenario() -> None:
        tokenizer = small_tokenizer(tmp_path)
        threads: list[int] = []
        real_encode = TextCodec.encode

        def encode(self: TextCodec, text: str, **options: bool) -> Sequence[int]:
            threads.append(threading.get_ident())
            return real_encode(self, text, **options)

        flags = {"model": str(tmp_path), "prompt_chars_max": CHARS_MAX}
        no_text_is_short = patch.object(text_workers, "INLINE_BYTES_MAX", 0)
        with no_text_is_short, patch.object(TextCodec, "encode", encode):
            async with inprocess(mock_spec(router_flags=flags)) as cluster:
                error = await error_of(cluster.client.generate("a" * (CHARS_MAX + 1), max_tokens=3))
                assert (error.reason, error.field) == (Reason.PROMPT_TOO_LONG, "text"), error
                assert threads == []
                answer = await cluster.client.generate(TEXT, max_tokens=3)
                assert answer.ids == mock_tokens(tokenizer.encode(TEXT).ids, 3)
                assert len(threads) == 1
                assert threads[0] != threading.get_ident(), "encoded on the loop"
                await ask_length(cluster, CHARS_MAX)

    async def ask_length(cluster: InProcessCluster, length: int) -> None:
        assert (await cluster.client.generate("a" * length, max_tokens=1)).stats.prompt_tokens == length

    asyncio.run(scenario())


def test_the_router_keeps_no_channel_to_what_is_gone() -> None:
    """Both nodes restart again and again, each time on another port, serving in between: the router's channels are
    those of a router that has met these processes only."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            channels = cluster.router._channels
            await ask_exactly(cluster, [5, 6])
            expected, gone = len(channels._channels), set[str]()
            for i in range(4):
                for name, service in (("prefill-0", Service.PREFILL), ("decode-0", Service.DECODE)):
                    gone.add(cluster.endpoints[name])
                    await cluster.stop_node(name)
                    await cluster.start_node(name, service)
                await ask_exactly(cluster, [5 + i, 6])
            gone -= set(cluster.endpoints.values())
            assert len(gone) >= 4
            await until(cluster, "channels to be dropped", lambda: not gone & channels._channels.keys())
            assert len(channels._channels) == expected
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_router_without_a_compiler_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It has no front: gRPC listens itself, and the log says once what that costs."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            await ask_exactly(cluster, [5, 6])

    monkeypatch.setattr("baton.http2_front.load", lambda _source: NativeLibrary(handle=None, status="no C compiler"))
    native_front.cache_clear()
    try:
        asyncio.run(scenario())
    finally:
        native_front.cache_clear()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.endswith("front")]
    assert "gRPC faces its clients itself" in warning
