"""Callers that wait for one answer: those who get it, those who went away, and what is left behind."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvtransfer.waiters import Waiters


def test_all_who_wait_get_the_answer_but_those_who_went_away() -> None:
    """Three ask for the same, one for something else. One goes away; two get the answer, the other waits on."""

    async def test() -> None:
        waiters: Waiters[str, int] = Waiters(asyncio.get_running_loop())
        asked: list[str] = []
        calls = [asyncio.ensure_future(waiters.ask(key, partial(asked.append, key))) for key in "aaab"]
        await asyncio.sleep(0)
        assert asked == ["a", "a", "a", "b"]
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        waiters.answer("a", 7)
        assert "a" not in waiters and "b" in waiters
        assert (await calls[0], await calls[2], calls[1].cancelled(), calls[3].done()) == (7, 7, True, False)
        calls[3].cancel()
        await asyncio.wait([calls[3]])
        assert "b" not in waiters

    asyncio.run(test())


def test_an_answer_may_come_while_it_is_asked_for() -> None:
    """Asking answers at once. Who asks again waits for an answer of his own."""

    async def test() -> None:
        waiters: Waiters[str, int] = Waiters(asyncio.get_running_loop())
        assert await waiters.ask("a", lambda: waiters.answer("a", 1)) == 1
        waiters.answer("a", 2)  # nobody waits
        later = asyncio.ensure_future(waiters.ask("a", lambda: None))
        await asyncio.sleep(0)
        waiters.answer("a", 3)
        assert await later == 3

    asyncio.run(test())


def test_each_who_waits_gets_an_error_of_its_own() -> None:
    """At the end nobody is left waiting, and an error that is raised twice is not the same one."""

    async def test() -> None:
        waiters: Waiters[str, int] = Waiters(asyncio.get_running_loop())
        calls = [asyncio.ensure_future(waiters.ask(key, lambda: None)) for key in "aab"]
        await asyncio.sleep(0)
        waiters.fail_all(lambda: OSError("over"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results] == ["over"] * 3
        assert len({id(result) for result in results}) == 3
        with pytest.raises(ValueError, match="not asked"):
            await waiters.ask("c", _refuse)
        assert not any(key in waiters for key in "abc")

    asyncio.run(test())


def _refuse() -> None:
    raise ValueError("not asked")
