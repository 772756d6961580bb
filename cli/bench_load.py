"""The loader of `baton bench`: sends what is planned and takes the times.

An open loop sends at the planned times, whatever has become of earlier requests, and measures each from when it was
*due*; a closed loop keeps so many requests under way and measures from when each was sent. The clock is passed in and
must be monotonic. One event loop, one thread.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import InvalidField, check_positive
from cli.bench_plan import Planned, prompt_ids
from cli.bench_stats import Answered, Measured, Slo
from cli.bench_targets import Messages, Target, TargetError

IN_FLIGHT_FULL: Final = "IN_FLIGHT_MAX"
NO_TOKENS: Final = "NO_TOKENS"
LAG_LOOK_S: Final = 0.02
"""Pause between two looks at how late the event loop is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Raises InvalidField."""

    concurrency: int | None
    """Of a closed loop; None is an open loop."""
    requests_max: int | None
    duration_s_max: float | None
    """Nothing is sent later than this; what is under way is waited for."""
    warm_up: int
    """The first so many requests count for nothing."""
    in_flight_max: int
    """Open loop: requests under way; one more is not sent, and counts as failed."""
    ids_from: int
    ids_to: int
    seed: int

    def __post_init__(self) -> None:
        check_positive(self, "in_flight_max")
        for name in ("concurrency", "requests_max", "duration_s_max"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if not 0 <= self.ids_from < self.ids_to:
            raise InvalidField("ids_from", f"must be from 0 to below {self.ids_to}, not {self.ids_from}")


class Loader:
    """One run. `run` once; `measured` is up to date at every moment, after a cancel of `run` too."""

    def __init__(
        self, config: LoadConfig, plan: Iterator[Planned], target: Target, *, slo: Slo, now_s: Callable[[], float]
    ) -> None:
        self.measured = Measured(slo=slo)
        self._config = config
        self._plan = plan
        self._target = target
        self._now_s = now_s
        self._start_s = 0.0
        self._running: set[asyncio.Task[None]] = set()

    @property
    def elapsed_s(self) -> float:
        return self._now_s() - self._start_s

    async def run(self) -> None:
        """To the end of the plan and of every answer. Cancelled, it gives up what is under way, which then counts as
        unfinished (`Measured.in_flight`)."""
        self._start_s = self._now_s()
        lag = asyncio.ensure_future(self._watch_lag())
        try:
            if self._config.concurrency is None:
                await self._send_on_time()
            else:
                for _ in range(self._config.concurrency):
                    self._spawn(self._work())
            while self._running:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_EXCEPTION)
                for task in [task for task in self._running if task.done()]:
                    self._running.discard(task)
                    task.result()  # a bug of ours ends the run
        finally:
            tasks = {lag, *self._running}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Failures stay, for `run` to find.
        if not task.cancelled() and task.exception() is None:
            self._running.discard(task)

    def _next(self) -> Planned | None:
        """The next request to send, None after the last one."""
        config = self._config
        if config.requests_max is not None and self.measured.sent >= config.requests_max:
            return None
        planned = next(self._plan, None)
        if planned is None or config.duration_s_max is None:
            return planned
        due_s = self.elapsed_s if planned.due_s is None else planned.due_s
        return planned if due_s < config.duration_s_max else None

    async def _work(self) -> None:
        """One of the closed loop's: a request after the other."""
        while (planned := self._next()) is not None:
            self.measured.sent += 1
            messages = self._messages(planned)
            await self._request(planned, messages, due_s=self.elapsed_s)

    async def _send_on_time(self) -> None:
        while (planned := self._next()) is not None:
            assert planned.due_s is not None
            messages = self._messages(planned)  # made before its time comes
            # At least one turn of the event loop for each: answers are read in the greatest hurry too.
            await asyncio.sleep(max(0.0, planned.due_s - self.elapsed_s))
            self.measured.sent += 1
            counts = planned.index >= self._config.warm_up
            if counts:
                self.measured.begin(planned.due_s)
            if len(self._running) >= self._config.in_flight_max:
                text = f"{self._config.in_flight_max} requests were under way already (--in-flight-max)."
                self.measured.error(IN_FLIGHT_FULL, text, at_s=self.elapsed_s, counts=counts)
                continue
            if counts:
                self.measured.late.add(max(0.0, self.elapsed_s - planned.due_s) * 1000)
            self._spawn(self._request(planned, messages, due_s=planned.due_s))

    def _messages(self, planned: Planned) -> Callable[[], Messages]:
        config = self._config
        ids = prompt_ids(planned, ids_from=config.ids_from, ids_to=config.ids_to, seed=config.seed)
        return self._target.prepare(ids, planned.output_tokens)

    async def _request(self, planned: Planned, messages: Callable[[], Messages], *, due_s: float) -> None:
        counts = planned.index >= self._config.warm_up
        if counts:
            self.measured.begin(due_s)
        try:
            answered = await self._answer(planned, messages, due_s)
        except TargetError as error:
            self.measured.error(error.kind, str(error), at_s=self.elapsed_s, counts=counts)
            return
        self.measured.answer(answered, at_s=due_s + answered.e2e_ms / 1000, counts=counts)

    async def _answer(self, planned: Planned, messages: Callable[[], Messages], due_s: float) -> Answered:
        """Raises TargetError."""
        gaps_ms = array("d")
        timeline = self.measured.timeline
        first_s = last_s = None
        tokens = 0
        async with aclosing(messages()) as stream:
            async for message in stream:
                tokens += message.tokens
                if not message.timed:
                    continue
                at_s = self.elapsed_s
                if last_s is None:
                    first_s = at_s
                    timeline.first_token(at_s, (at_s - due_s) * 1000)
                    timeline.tokens(at_s, message.tokens, 0.0)
                else:
                    gaps_ms.append((at_s - last_s) * 1000)
                    timeline.tokens(at_s, message.tokens, gaps_ms[-1])
                last_s = at_s
        if first_s is None or last_s is None:
            raise TargetError(NO_TOKENS, "An answer ended without a token.")
        return Answered(
            ttft_ms=(first_s - due_s) * 1000,
            e2e_ms=(last_s - due_s) * 1000,
            gaps_ms=gaps_ms,
            prompt_tokens=planned.prompt_tokens,
            output_tokens=tokens,
        )

    async def _watch_lag(self) -> None:
        while True:
            before_s = self._now_s()
            await asyncio.sleep(LAG_LOOK_S)
            self.measured.loop_late.add(max(0.0, self._now_s() - before_s - LAG_LOOK_S) * 1000)
