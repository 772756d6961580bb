"""Connections over HTTP that bring too little or are too many: bounded in number and time, and told in JSON."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from router import doors
from tests.support.http_door import REQUEST, Door, answer, run

HEAD_MS_MAX = 1_000
"""What has begun to be said in time must have that time on a busy machine too."""


def test_one_connection_too_many_is_told_so_in_json() -> None:
    """Four may be open, half of them from one address. Its third gets an OpenAI error with a time to come back, and is
    closed; the two go on."""

    async def scene(connect: Door) -> None:
        first, second = await connect(), await connect()
        assert (await answer(first))[1] == b"ok"
        assert (await answer(second))[1] == b"ok"
        third = await connect()
        head, body = await answer(third)
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        assert await third[0].read() == b""
        assert (await answer(first))[1] == b"ok"

    run(scene, http_connections_max=4)


def test_a_connection_that_asks_nothing_is_closed() -> None:
    """One client says nothing at all, one half a head, one half of its second head: all three are closed by us."""

    async def scene(connect: Door) -> None:
        silent, half, second = await connect(), await connect(), await connect()
        half[1].write(REQUEST[:-2])
        assert (await answer(second))[1] == b"ok"
        second[1].write(REQUEST[:5])
        for reader, _ in (silent, half, second):
            assert await reader.read() == b""

    run(scene, http_head_ms_max=HEAD_MS_MAX)


def test_a_body_may_come_after_the_time_of_the_head() -> None:
    """The head is there at once, so its time limit is over with it, however long the body then takes."""

    async def scene(connect: Door) -> None:
        stream, silent = await connect(), await connect()
        stream[1].write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n")
        assert await silent[0].read() == b""  # which began to wait after the other
        assert (await answer(stream, b"hi"))[1] == b"hi"

    run(scene, http_head_ms_max=HEAD_MS_MAX)


def test_connections_far_beyond_the_limit_are_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is answered, one more is refused politely, and the flood behind them costs no answer."""
    monkeypatch.setattr(doors, "SURPLUS_CONNECTIONS_MAX", 1)

    async def scene(connect: Door) -> None:
        first, second = await connect(), await connect()
        assert (await answer(first))[1] == b"ok"
        assert (await answer(second))[0].startswith(b"HTTP/1.1 429 ")
        held = await connect()
        held[1].write(REQUEST[:5])
        for _ in range(20):
            reader, _writer = await connect()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert (await answer(first))[1] == b"ok"

    run(scene, http_connections_max=1)


def test_a_head_without_an_end_is_refused() -> None:
    """Headers follow headers: what a head may be is known, and nobody reads on."""

    async def scene(connect: Door) -> None:
        reader, writer = await connect()
        writer.write(REQUEST[:-2] + b"a: b\r\n" * 10_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    run(scene)
