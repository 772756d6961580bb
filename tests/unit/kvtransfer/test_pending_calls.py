"""Callers that wait for one answer: those who get it, those who went away, and what is left behind."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from baton.tasks import PendingCalls


def test_all_who_wait_get_the_answer_but_those_who_went_away() -> None:
    """Three ask for the same, one for something else. One goes away; two get the answer, the other waits on."""

    async def test() -> None:
        pending: PendingCalls[str, int] = PendingCalls(asyncio.get_running_loop())
        asked: list[str] = []
        calls = [asyncio.ensure_future(pending.ask(key, partial(asked.append, key))) for key in "aaab"]
        await asyncio.sleep(0)
        assert asked == ["a", "a", "a", "b"]
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        pending.answer("a", 7)
        assert "a" not in pending and "b" in pending
        assert (await calls[0], await calls[2], calls[1].cancelled(), calls[3].done()) == (7, 7, True, False)
        calls[3].cancel()
        await asyncio.wait([calls[3]])
        assert "b" not in pending

    asyncio.run(test())


def test_an_answer_may_come_while_it_is_asked_for() -> None:
    """Asking answers at once. Who asks again waits for an answer of his own."""

    async def test() -> None:
        pending: PendingCalls[str, int] = PendingCalls(asyncio.get_running_loop())
        assert await pending.ask("a", lambda: pending.answer("a", 1)) == 1
        pending.answer("a", 2)  # nobody waits
        later = asyncio.ensure_future(pending.ask("a", lambda: None))
        await asyncio.sleep(0)
        pending.answer("a", 3)
        assert await later == 3

    asyncio.run(test())


def test_each_who_waits_gets_an_error_of_its_own() -> None:
    """At the end nobody is left waiting, and an error that is raised twice is not the same one."""

    async def test() -> None:
        pending: PendingCalls[str, int] = PendingCalls(asyncio.get_running_loop())
        calls = [asyncio.ensure_future(pending.ask(key, lambda: None)) for key in "aab"]
        await asyncio.sleep(0)
        pending.fail_all(lambda: OSError("over"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results] == ["over"] * 3
        assert len({id(result) for result in results}) == 3
        with pytest.raises(ValueError, match="not asked"):
            await pending.ask("c", _refuse)
        assert not any(key in pending for key in "abc")

    asyncio.run(test())


def _refuse() -> None:
    raise ValueError("not asked")
