"""A set of background tasks: broken ones are told, all of them can be waited for or ended."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton.log import get_log
from baton.tasks import Tasks


def test_a_task_that_breaks_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """One of two raises: one error in the log with the owner's fields and the traceback; the other ends well."""
    ended: list[int] = []

    async def fine() -> None:
        await asyncio.sleep(0)
        ended.append(1)

    async def broken() -> None:
        raise ValueError("a bug")

    async def test() -> None:
        tasks = Tasks(asyncio.get_running_loop(), get_log("test"), broken="call broke off", peer="decode-0")
        tasks.spawn(broken())
        tasks.spawn(fine())
        assert len(tasks) == 2
        await tasks.drain(60_000)
        assert (len(tasks), ended) == (0, [1])

    with caplog.at_level(logging.INFO, logger="baton"):
        asyncio.run(test())
    (record,) = caplog.records
    assert (record.levelname, record.getMessage(), vars(record)["baton_fields"]) == (
        "ERROR", "call broke off", {"peer": "decode-0"},
    )  # fmt: skip
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


def test_draining_waits_for_what_is_spawned_meanwhile_and_no_longer_than_told() -> None:
    """A task that spawns another one: both are waited for. One that never ends is left running after the limit."""
    ended: list[str] = []

    async def test() -> None:
        tasks = Tasks(asyncio.get_running_loop(), get_log("test"))

        async def child() -> None:
            await asyncio.sleep(0)
            ended.append("child")

        async def parent() -> None:
            tasks.spawn(child())
            ended.append("parent")

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("endless")

        tasks.spawn(parent())
        await tasks.drain(60_000)
        assert ended == ["parent", "child"]
        tasks.spawn(endless())
        await tasks.drain(1)
        assert (len(tasks), ended[2:]) == (1, [])
        await tasks.cancel()
        assert (len(tasks), ended[2:]) == (0, ["endless"])

    asyncio.run(test())


def test_cancelling_tells_of_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Cancelled before it began or in the middle: nothing in the log; cancelling none is fine."""

    async def test() -> None:
        tasks = Tasks(asyncio.get_running_loop(), get_log("test"))
        await tasks.cancel()
        tasks.spawn(asyncio.sleep(3600))
        await asyncio.sleep(0)
        tasks.spawn(asyncio.sleep(3600))
        await tasks.cancel()
        assert len(tasks) == 0

    with caplog.at_level(logging.INFO, logger="baton"):
        asyncio.run(test())
    assert caplog.records == []
