"""When a router's workers are started, get no new connection, are killed and are replaced. Pure: events in,
instructions out; its owner passes the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SILENT_S: Final = 0.5
"""A worker that has not reported for this long gets no new connection."""
STOPPED_S: Final = 5.0
"""One that has not for this long is killed."""
START_S_MAX: Final = 60.0
"""How long one may take from its start until it is ready."""
STEADY_S: Final = 60.0
"""One that was ready for this long before it died has not died at once: what replaces it does not wait."""
PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 30.0
"""Before a worker is started again that dies again and again; it doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Its end is reported by `died`, as any other."""

    worker: int
    why: str


Instruction = Start | Kill


@dataclass(slots=True, eq=False, kw_only=True)
class _Worker:
    start_at_s: float
    """While it does not run: when it is started."""
    runs: bool = False
    began_s: float = 0.0
    ready_s: float | None = None
    heard_s: float = 0.0
    killed: bool = False
    deaths: int = 0
    """One soon after another."""


class Supervision:
    """Mutable; workers are numbered from 0. Call `tick` often: it returns what is due."""

    def __init__(self, workers: int, *, now_s: float) -> None:
        self._workers = [_Worker(start_at_s=now_s) for _ in range(workers)]
        self._ticked_s = now_s
        self._stopping = False

    def tick(self, now_s: float) -> list[Instruction]:
        stood_still_s = now_s - self._ticked_s
        self._ticked_s = now_s
        if stood_still_s >= SILENT_S:  # this process itself: nobody could be heard
            for worker in self._workers:
                worker.began_s += stood_still_s
                worker.heard_s = min(worker.heard_s + stood_still_s, now_s)  # a report may have been read just before
        due: list[Instruction] = []
        for number, worker in enumerate(self._workers):
            if not worker.runs:
                if not self._stopping and now_s >= worker.start_at_s:
                    worker.runs, worker.began_s, worker.ready_s, worker.killed = True, now_s, None, False
                    due.append(Start(worker=number))
            elif not worker.killed and (why := _overdue(worker, now_s)):
                worker.killed = True
                due.append(Kill(worker=number, why=why))
        return due

    def heard(self, number: int, now_s: float) -> None:
        """It is ready, or has reported."""
        worker = self._workers[number]
        assert worker.runs
        worker.heard_s = now_s
        if worker.ready_s is None:
            worker.ready_s = now_s

    def died(self, number: int, now_s: float) -> None:
        """The first of a row is replaced at once."""
        worker = self._workers[number]
        assert worker.runs
        steady = worker.ready_s is not None and now_s - worker.ready_s >= STEADY_S
        worker.deaths = 1 if steady else worker.deaths + 1
        pause_s = 0.0
        if worker.deaths > 1:
            doublings = min(worker.deaths - 2, 16)
            pause_s = min(PAUSE_S_MIN * 2**doublings, PAUSE_S_MAX)
        worker.runs, worker.ready_s, worker.start_at_s = False, None, now_s + pause_s

    def killed(self, number: int) -> bool:
        """Whether it is, or would be if its process was there."""
        return self._workers[number].killed

    def stop(self) -> None:
        """Start none from now on."""
        self._stopping = True

    def able(self, number: int, now_s: float) -> bool:
        """Whether it may get a new connection."""
        worker = self._workers[number]
        return worker.ready_s is not None and not worker.killed and now_s - worker.heard_s < SILENT_S


def _overdue(worker: _Worker, now_s: float) -> str:
    if worker.ready_s is None:
        return "it did not become ready" if now_s - worker.began_s >= START_S_MAX else ""
    return "it has stopped reporting" if now_s - worker.heard_s >= STOPPED_S else ""
