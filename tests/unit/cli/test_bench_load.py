"""The loader of `baton bench` against servers of known speed, on a clock that jumps from timer to timer."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from baton.errors import InvalidField
from cli.bench_load import IN_FLIGHT_FULL, NO_TOKENS, LoadConfig, Loader, Message, Messages, TargetError, _message
from cli.bench_plan import Planned, at_times, drawn_requests, parse_lengths, turns
from cli.bench_stats import Slo, report_data, report_text

_T = TypeVar("_T")


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: the clock goes on by what there was to wait."""

    now_s = 100.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def jump(work: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(work)


class Server:
    """Answers at most `at_once` requests at a time: a first token after `first_s`, the others `gap_s` apart."""

    name = "a server"

    def __init__(self, *, at_once: int = 1000, first_s: float = 1.0, gap_s: float = 0.1, together: int = 1) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._first_s = first_s
        self._gap_s = gap_s
        self._together = together
        self.prompts: list[list[int]] = []
        self.sent_s: list[float] = []
        self.closed = 0

    async def check(self) -> None:
        pass

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        self.prompts.append(ids)
        index = len(self.prompts) - 1
        return lambda: self._messages(index, output_tokens)

    async def _messages(self, index: int, output_tokens: int) -> Messages:
        self.sent_s.append(asyncio.get_running_loop().time() - 100)
        try:
            async with self._places:
                await asyncio.sleep(self._first_s)
                yield Message(self.first(index), timed=True)
                for _ in range(0, output_tokens - 1, self._together):
                    await asyncio.sleep(self._gap_s)
                    yield Message(self._together, timed=True)
        finally:
            self.closed += 1

    def first(self, index: int) -> int:
        return 1


def plan(times_s: Sequence[float] | None = None, *, output: int = 3) -> Iterator[Planned]:
    requests = drawn_requests(prompt=parse_lengths("5"), output=parse_lengths(str(output)), seed=0)
    return requests if times_s is None else at_times(requests, times_s)


def config(**given: Any) -> LoadConfig:
    return LoadConfig(**{"in_flight_max": 100, "token_ids": (2, 9), **given})


async def load(server: Server, planned: Iterator[Planned], slo: Slo | None = None, **given: Any) -> Loader:
    loader = Loader(config(**given), planned, server, slo=slo or Slo(), now_s=asyncio.get_running_loop().time)
    await loader.run()
    return loader


class Talking(Server):
    """Answers with the length of the prompt, as many times as it is asked for tokens; its first answer is slow."""

    async def _messages(self, index: int, output_tokens: int) -> Messages:
        await asyncio.sleep(5 if index == 0 else 1)
        yield Message(output_tokens, timed=True, ids=[len(self.prompts[index])] * output_tokens)


def test_conversations() -> None:
    """Two conversations of three turns, three requests at a time: a turn has all that was said before it, answers too,
    and waits for the turn before it."""
    server = Talking()
    lengths = parse_lengths("2")
    planned = turns(2, 3, question=lengths, answer=lengths, seed=0)
    loader = jump(load(server, planned, concurrency=3))
    assert loader.measured.answered == 6
    assert loader.measured.prompt_tokens == 2 * (2 + 6 + 10)
    assert sorted(map(len, server.prompts)) == [2, 2, 6, 6, 10, 10]
    for last in (prompt for prompt in server.prompts if len(prompt) == 10):
        assert (last[2:4], last[6:8]) == ([2, 2], [6, 6])
        assert last[:6] in server.prompts and last[:2] in server.prompts


def test_an_open_loop_does_not_wait() -> None:
    """Four requests due a second apart at a server that takes them one by one, 3 s each: all are sent when they are
    due, and the wait in the server's queue is part of their times."""

    async def scene() -> None:
        server = Server(at_once=1, first_s=2.8)
        measured = (await load(server, plan([1, 2, 3, 4]))).measured
        assert server.sent_s == pytest.approx([1, 2, 3, 4])
        assert measured.answered == 4
        # The first tokens come at 3.8, 6.8, 9.8, 12.8.
        assert measured.ttft.total == pytest.approx(1000 * (2.8 + 4.8 + 6.8 + 8.8))
        assert measured.e2e.most == pytest.approx(9000)
        assert measured.itl.count == 8
        assert (measured.began_s, measured.seconds) == pytest.approx((1, 12))
        assert measured.late.most == pytest.approx(0, abs=1)

    jump(scene())


def test_a_late_loader_hides_nothing() -> None:
    """The loader itself is held up for 2 s: requests due meanwhile are measured from when they were due, and it says
    how late they were sent."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _JumpingLoop)
        server = Server()

        def hold_up() -> None:
            loop._clock.now_s += 2.0

        loop.call_at(100.5, hold_up)
        measured = (await load(server, plan([1.0, 2.0, 5.0]))).measured
        assert server.sent_s == pytest.approx([2.5, 2.5, 5.0], abs=0.03)
        assert measured.late.most == pytest.approx(1500, abs=30)
        assert measured.ttft.most == pytest.approx(2500, abs=30)
        assert measured.loop_late.most == pytest.approx(2000, abs=30)

    jump(scene())


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    """Two at a time: the next is sent when one has ended, and is measured from then."""

    async def scene() -> None:
        server = Server()
        measured = (await load(server, plan(), concurrency=2, requests=6)).measured
        assert server.sent_s == pytest.approx([0, 0, 1.2, 1.2, 2.4, 2.4])
        assert (measured.ttft.most, measured.e2e.most) == pytest.approx((1000, 1200))
        assert measured.throughput()["output_tokens_per_s"] == pytest.approx(18 / 3.6)
        assert measured.late.count == 0

    jump(scene())


@pytest.mark.parametrize(("concurrency", "times"), [(None, [0.0, 1.0, 2.0, 3.0]), (1, None)])
def test_the_end_of_the_time(concurrency: int | None, times: list[float] | None) -> None:
    """After `duration` nothing is sent, and what is under way is waited for."""

    async def scene() -> None:
        server = Server()
        loader = await load(server, plan(times), concurrency=concurrency, duration=2.0)
        assert len(server.sent_s) == 2
        assert loader.measured.answered == 2
        assert loader.elapsed_s > 2.0

    jump(scene())


def test_warm_up_is_left_out() -> None:
    """The first two are sent and answered, and are in none of the figures; time counts from the third's."""

    async def scene() -> None:
        measured = (await load(Server(), plan([0, 0.5, 4, 5]), warm_up=2)).measured
        assert (measured.sent, measured.warm_up, measured.answered, measured.ttft.count) == (4, 2, 2, 2)
        assert (measured.began_s, measured.seconds) == pytest.approx((4, 2.2))
        assert measured.output_tokens == 6
        assert measured.late.count == 2

    jump(scene())


def test_nothing_is_due() -> None:
    """A rate so low that no request comes within the run's time: it is said, in place of a report of nothing."""

    async def scene() -> None:
        measured = (await load(Server(), plan([1e7]), duration=2.0)).measured
        assert "\nNothing was sent: no request was due" in report_text(measured, what="this", complete=True)
        assert "Nothing" not in report_text(measured, what="this", complete=False)

    jump(scene())


def test_tokens_in_one_message() -> None:
    """Two tokens a message: half the gaps, all the tokens."""

    async def scene() -> None:
        measured = (await load(Server(together=2), plan(output=9), concurrency=1, requests=1)).measured
        assert (measured.itl.count, measured.output_tokens) == (4, 9)
        assert measured.tpot.most == pytest.approx(50)

    jump(scene())


class Failing(Server):
    """Every third request fails, every third has no token."""

    def first(self, index: int) -> int:
        if index % 3 == 0:
            raise TargetError("QUEUE_FULL", f"Request {index} has no place.")
        return 1

    async def _messages(self, index: int, output_tokens: int) -> Messages:
        if index % 3 == 1:
            return
        async for message in super()._messages(index, output_tokens):
            yield message


def test_failures_are_counted_by_kind() -> None:
    """Failed requests are in no latency, count as not good, and their first message is told."""

    async def scene() -> None:
        slo = Slo(ttft_ms=1000.1)
        measured = (await load(Failing(), plan([0, 1, 2, 3, 4, 5]), slo)).measured
        assert measured.errors == {"QUEUE_FULL": 2, NO_TOKENS: 2}
        assert (measured.answered, measured.failed, measured.ttft.count) == (2, 4, 2)
        assert measured.good_share() == pytest.approx(1 / 3)
        text = report_text(measured, what="this", complete=True)
        assert "error       2 x QUEUE_FULL: Request 0 has no place." in text
        assert "2 answered in 6.2 s, 4 failed." in text
        assert "33.3% of all (TTFT at most 1000.1 ms)" in text

    jump(scene())


def test_too_many_under_way() -> None:
    """An open loop's requests beyond the limit are not sent, and fail: memory is bounded whatever the server does."""

    async def scene() -> None:
        server = Server(first_s=10)
        measured = (await load(server, plan([0, 1, 2, 3]), in_flight_max=2)).measured
        assert server.sent_s == pytest.approx([0, 1])
        assert measured.errors == {IN_FLIGHT_FULL: 2}
        assert (measured.sent, measured.answered, measured.in_flight) == (4, 2, 0)

    jump(scene())


@pytest.mark.parametrize(("concurrency", "times"), [(None, [0.0, 1.0, 9.0]), (2, None)])
def test_a_run_that_is_cut_short(concurrency: int | None, times: list[float] | None) -> None:
    """Cancelled in the middle: every request under way is given up at once, and what there is can be reported."""

    async def scene() -> None:
        server = Server()
        loader = Loader(
            config(concurrency=concurrency),
            plan(times),
            server,
            slo=Slo(),
            now_s=asyncio.get_running_loop().time,
        )
        running = asyncio.ensure_future(loader.run())
        await asyncio.sleep(1.5)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert server.closed == len(server.sent_s)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        measured = loader.measured
        assert measured.in_flight == len(server.sent_s) - measured.answered
        data = report_data(measured, config={}, complete=False)
        assert data["requests"]["unfinished"] == measured.in_flight
        assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, allow_nan=False))
        assert "given up unfinished" in report_text(measured, what="this", complete=False)

    jump(scene())


def test_a_bug_ends_the_run() -> None:
    """What is no failed request is not taken for one."""

    class Broken(Server):
        def first(self, index: int) -> int:
            raise ZeroDivisionError

    async def scene() -> None:
        with pytest.raises(ZeroDivisionError):
            await load(Broken(), plan(), concurrency=2, requests=4)

    jump(scene())


def test_the_same_seed_sends_the_same() -> None:
    async def scene(seed: int) -> list[list[int]]:
        server = Server()
        await load(server, plan([0, 1]), seed=seed)
        return server.prompts

    assert jump(scene(1)) == jump(scene(1))
    assert jump(scene(1)) != jump(scene(2))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"token_ids": (9, 9)}, "token_ids must be from 0 to below 9, not 9"),
        ({"requests": 4, "warm_up": 4}, r"warm_up must be below the number of requests \(4\), not 4"),
    ],
)
def test_a_wrong_configuration(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidField, match=problem):
        config(**given)


@pytest.mark.parametrize(
    ("chunk", "reported", "message"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, 0, Message(1, timed=True)),
        ({"choices": [{"text": "", "finish_reason": "length"}], "usage": None}, 3, None),
        ({"choices": [{"text": "ab"}], "usage": {"completion_tokens": 5}}, 3, Message(2, timed=True)),
        ({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}, 3, Message(1, True)),
        ({"choices": [], "usage": {"completion_tokens": 9}}, 3, Message(6, timed=False)),
        ({"choices": [], "usage": {"completion_tokens": 3}}, 3, None),
    ],
)
def test_the_tokens_of_a_chunk(chunk: dict[str, Any], reported: int, message: Message | None) -> None:
    """Where the server counts, its count is taken; else a chunk is a token, and the rest is told at the end."""
    assert _message(chunk, reported) == message
