"""How the turns of a loop are shared. The loop and its clock are the test's."""

from __future__ import annotations

from collections.abc import Callable

from router.line import TURN_MS, Turns


class Loop:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[Callable[[], None]] = []
        self.turns = Turns(self.soon.append, lambda: self.now_s)
        self.done: list[str] = []

    def work(self, name: str, ms: float) -> bool:
        def do() -> None:
            self.done.append(name)
            self.now_s += ms / 1000

        return self.turns.do(do)

    def turn(self) -> list[str]:
        """What is done in the next turn."""
        self.done.clear()
        soon, self.soon[:] = list(self.soon), []
        for each in soon:
            each()
        return list(self.done)


def test_what_is_more_than_a_turn_waits() -> None:
    """Work goes on until its time is over; the rest is done in the next turns, in order, and nothing overtakes it."""
    loop = Loop()
    assert [loop.work(name, TURN_MS / 2 + 0.1) for name in "abcd"] == [True, True, False, False]
    assert not loop.work("e", 0)
    assert loop.done == ["a", "b"]
    assert loop.turn() == ["c", "d"]
    assert not loop.work("f", 0)
    assert loop.turn() == ["e", "f"]
    assert loop.turn() == []


def test_a_turn_without_work_has_its_whole_time() -> None:
    """However long ago the one before was. Nothing is left to be called."""
    loop = Loop()
    assert loop.work("a", TURN_MS)
    assert loop.turn() == []
    loop.now_s += 100
    assert loop.soon == []
    assert [loop.work(name, TURN_MS) for name in "bc"] == [True, False]


def test_work_that_comes_later_counts_now() -> None:
    """Each call begins a task, which takes its time in the next turn: a turn begins only so many."""
    loop = Loop()
    loop.turns.charge(TURN_MS / 2)
    assert loop.work("a", 0)
    loop.turns.charge(TURN_MS / 2)
    assert not loop.work("b", 0)
    assert loop.turn() == ["b"]
