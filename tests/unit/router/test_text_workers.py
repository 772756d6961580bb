"""Threads and processes for texts: long ones hold nobody up, and what ends a process is one request's trouble."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.errors import BatonError, Reason
from router import text_workers
from router.byte_shares import TextOwner
from router.prompts import PromptEncoder
from router.text_workers import INLINE_BYTES_MAX, PROCESSES, SHORT_BYTES_MAX, THREADS, TextWorkers
from tests.support import text_work

SOMEBODY, OTHER = TextOwner(address="10.0.0.1"), TextOwner(address="10.0.0.2")
LINE, SHORT = bytes(INLINE_BYTES_MAX), bytes(SHORT_BYTES_MAX)
LONG = bytes(SHORT_BYTES_MAX + 1)


@asynccontextmanager
async def workers() -> AsyncIterator[TextWorkers]:
    made = TextWorkers(PromptEncoder(chars_max=100), lambda: 0.0)
    try:
        yield made
    finally:
        await made.close()


def test_short_texts_go_past_long_ones(tmp_path: Path) -> None:
    """More long texts than there are processes are being read, or wait. Short ones are done meanwhile, in this process;
    long ones in others, and what waits when the router stops is not begun."""

    async def scene() -> None:
        async with workers() as made:
            long = [
                asyncio.create_task(made.run(SOMEBODY, text_work.wait_for, LONG, str(tmp_path / "go")))
                for _ in range(2 * PROCESSES)
            ]
            short = [made.run(SOMEBODY, text_work.pid, SHORT) for _ in range(2 * THREADS)]
            assert set(await asyncio.gather(*short)) == {os.getpid()}
            assert not any(each.done() for each in long)
            (tmp_path / "go").touch()
            pids = await asyncio.gather(*long)
            assert os.getpid() not in pids
            assert len(set(pids)) == PROCESSES

    asyncio.run(scene())


def test_a_line_is_read_at_once() -> None:
    """No thread is asked, and nobody else has a turn before it is read; longer ones are not read on the loop."""

    async def scene() -> None:
        async with workers() as made:
            here, turns = threading.get_ident(), list[int]()
            asyncio.get_running_loop().call_soon(turns.append, 1)
            assert await made.run(SOMEBODY, text_work.thread, LINE) == here
            assert turns == []
            assert await made.run(SOMEBODY, text_work.thread, SHORT) != here

    asyncio.run(scene())


def test_what_a_text_is_refused_with_is_the_same_from_a_process() -> None:
    """An error for the client comes back whole, and a bug of ours with the place where it is."""

    async def scene() -> None:
        async with workers() as made:
            for raw in (LINE, SHORT, LONG):
                with pytest.raises(BatonError) as caught:
                    await made.run(SOMEBODY, text_work.refuse, raw)
                error = caught.value
                assert (error.reason, error.message, error.field) == (Reason.BAD_FIELD, "The test says so.", "prompt")
                assert (error.retry_after_ms, error.metadata) == (7, {"a": "b"})
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                await made.run(SOMEBODY, text_work.fail, LONG)

    asyncio.run(scene())


def test_a_process_that_ends_is_started_again() -> None:
    """Its text is refused, the next one is read."""

    async def scene() -> None:
        async with workers() as made:
            with pytest.raises(BatonError) as caught:
                await made.run(SOMEBODY, text_work.end, LONG)
            assert caught.value.reason is Reason.INTERNAL
            assert await made.run(SOMEBODY, text_work.pid, LONG) != os.getpid()

    asyncio.run(scene())


def test_a_process_that_has_ended_while_it_had_nothing_to_do() -> None:
    """The system has killed it. The next text has another, and nobody notices."""

    async def scene() -> None:
        async with workers() as made:
            first = await made.run(SOMEBODY, text_work.pid, LONG)
            child = made._idle[-1]._child
            assert child is not None and child.pid == first
            child.kill()
            await child.wait()
            assert await made.run(SOMEBODY, text_work.pid, LONG) != first

    asyncio.run(scene())


def test_a_text_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """Its process is killed, and the next text has another."""

    async def scene() -> None:
        async with workers() as made:
            first = await asyncio.gather(*[made.run(SOMEBODY, text_work.pid, LONG) for _ in range(PROCESSES)])
            with patch.object(text_workers, "TEXT_MS_MAX", 50), pytest.raises(BatonError) as caught:
                await made.run(SOMEBODY, text_work.wait_for, LONG, str(tmp_path / "never"))
            assert caught.value.reason is Reason.DEADLINE
            then = await asyncio.gather(*[made.run(SOMEBODY, text_work.pid, LONG) for _ in range(PROCESSES)])
            assert len({*first, *then}) == PROCESSES + 1

    asyncio.run(scene())


def test_a_client_that_leaves_takes_nothing_along(tmp_path: Path) -> None:
    """The process ends what it has begun, and its answer is nobody's: the next text gets its own."""

    async def scene() -> None:
        async with workers() as made:
            left = [
                asyncio.create_task(made.run(SOMEBODY, text_work.wait_for, LONG, str(tmp_path / "go")))
                for _ in range(3)
            ]
            await asyncio.to_thread(text_work.seen, str(tmp_path / "go.begun"))
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            (tmp_path / "go").touch()
            assert await made.run(SOMEBODY, text_work.echo, LONG, "mine") == "mine"

    asyncio.run(scene())


def test_texts_that_wait_when_the_router_stops_end(tmp_path: Path) -> None:
    """Many more than there are processes: none is begun any more, and all of their calls end."""

    async def scene() -> None:
        async with workers() as made:
            never = str(tmp_path / "never")
            waiting = [
                asyncio.create_task(made.run(SOMEBODY, text_work.wait_for, LONG, never)) for _ in range(3 * PROCESSES)
            ]
            await asyncio.to_thread(text_work.seen, f"{never}.begun")
        done, left = await asyncio.wait(waiting, timeout=20)
        assert not left
        errors = [each.exception() for each in done if not each.cancelled()]
        assert [isinstance(each, BatonError) and each.reason is Reason.NODE_DRAINING for each in errors] == [True] * (
            2 * PROCESSES
        )

    asyncio.run(scene())


def test_long_texts_have_a_limit_in_bytes(tmp_path: Path) -> None:
    """What is more than an owner's share is refused at once, with a retry time, and another owner's is taken. Short
    ones do not count, and what has ended neither."""

    async def scene() -> None:
        go = str(tmp_path / "go")
        with patch.object(text_workers, "HELD_BYTES_MAX", 4 * PROCESSES * len(LONG)):
            async with workers() as made:
                mine = [made.run(SOMEBODY, text_work.wait_for, LONG, go) for _ in range(3 * PROCESSES)]
                waiting = [asyncio.create_task(each) for each in mine]
                await asyncio.to_thread(text_work.seen, f"{go}.begun")
                with pytest.raises(BatonError) as caught:
                    await made.run(SOMEBODY, text_work.pid, LONG)
                assert (caught.value.reason, caught.value.retry_after_ms) == (Reason.TOO_MANY_CALLS, 1_000)
                assert await made.run(SOMEBODY, text_work.pid, SHORT) == os.getpid()
                others = asyncio.create_task(made.run(OTHER, text_work.echo, LONG, "others"))
                waiting[-1].cancel()
                await asyncio.wait(waiting[-1:])
                (tmp_path / "go").touch()
                assert await others == "others"
                await asyncio.gather(*waiting[:-1])
                many = [made.run(SOMEBODY, text_work.echo, LONG, "mine") for _ in range(3 * PROCESSES)]
                assert set(await asyncio.gather(*many)) == {"mine"}

    asyncio.run(scene())


def test_each_owner_has_its_turn(tmp_path: Path) -> None:
    """One has sent many texts, then another sends one, and one by one of its addresses with an API key: each of these
    waits for no more than one of the many that were there before."""

    async def scene() -> None:
        async with workers() as made:
            go = str(tmp_path / "go")
            order: list[str] = []

            async def read(owner: TextOwner, name: str) -> None:
                order.append(await made.run(owner, text_work.echo, LONG, name))

            first = [
                asyncio.create_task(made.run(SOMEBODY, text_work.wait_for, LONG, f"{go}{i}")) for i in range(PROCESSES)
            ]
            await asyncio.gather(*(asyncio.to_thread(text_work.seen, f"{go}{i}.begun") for i in range(PROCESSES)))
            asked = [(SOMEBODY, f"many {i}") for i in range(10)]
            asked += [(OTHER, "other"), (TextOwner(address="10.0.0.1", key="a"), "key")]
            reading = []
            for owner, name in asked:
                reading.append(asyncio.create_task(read(owner, name)))
                await asyncio.sleep(0)
            # One process for all: what it reads comes in order.
            (tmp_path / "go0").touch()
            await asyncio.gather(*reading)
            assert order == ["many 0", "other", "key", *(f"many {i}" for i in range(1, 10))]
            for i in range(PROCESSES):
                (tmp_path / f"go{i}").touch()
            await asyncio.gather(*first)

    asyncio.run(scene())
