"""What a case came to, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.faults.load import Asked


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One row."""

    case: str
    requests: int = 0
    lost: int = 0
    """Clients without an answer."""
    wrong: int = 0
    """Clients with another answer than the right one."""
    leaked: int = 0
    """Blocks, promises, grants and requests that a surviving node still has when all is over."""
    cut: int = 0
    """Clients whose own router was struck, and who have no answer."""
    attached: int = 0
    """Requests whose client lost its connection and went on at that router or another."""
    resumed: int = 0
    """Requests that were taken up by other nodes."""
    recover_s: float = 0.0
    """Longest wait for a token, of the request that was hit and of those that were resumed."""
    took_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return bool(self.lost or self.wrong or self.leaked or self.cut or self.problems)

    def count(self, asked: Sequence[Asked], hit: Asked, *, struck_s: float, router_struck: bool = False) -> None:
        """Take in what became of the clients."""
        for one in asked:
            self.requests += 1
            self.wrong += one.wrong
            self.cut += one.failed and router_struck
            self.lost += one.failed and not router_struck
            attached = one.answer is not None and one.answer.attaches > 0
            resumed = one.answer is not None and one.answer.stats.resumptions > 0
            self.attached += attached
            self.resumed += resumed
            if attached or resumed or (one is hit and not one.failed):
                self.recover_s = max(self.recover_s, one.longest_wait_s(struck_s))
            if one.wrong or one.failed:
                self.problems.append(_story(one))


def _story(one: Asked) -> str:
    question = one.question
    asked = f"prompt {question.prompt[:3]}... ({len(question.prompt)} tokens) {dict(question.sampling)}"
    if one.answer is None:
        return f"{asked}: {one.error}"
    got, expected = one.answer.ids, question.expected
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    return f"{asked}: {len(got)} tokens for {len(expected)}, other ones from {at} on: {got[at : at + 5]}"


NAME_WIDTH: Final = 60
COUNTS: Final = ("requests", "lost", "wrong", "leaked", "cut", "attached", "resumed")
HEAD: Final = ("case", *COUNTS, "recover s", "case s")


def row(outcome: Outcome) -> tuple[str, ...]:
    counts = [str(getattr(outcome, name)) for name in COUNTS]
    return (outcome.case, *counts, f"{outcome.recover_s:.2f}", f"{outcome.took_s:.1f}")


def line(cells: Sequence[str]) -> str:
    """One line of the table; the columns are as wide as they may get."""
    name, *numbers = cells
    return f"| {name:<{NAME_WIDTH}} | " + " | ".join(f"{text:>9}" for text in numbers) + " |"


def head() -> str:
    return f"{line(HEAD)}\n|{'-' * (NAME_WIDTH + 2)}|" + f"{'-' * 10}:|" * (len(HEAD) - 1)


def total(outcomes: Sequence[Outcome]) -> str:
    sums = Outcome(case=f"all {len(outcomes)}")
    for each in outcomes:
        for name in (*COUNTS, "took_s"):
            setattr(sums, name, getattr(sums, name) + getattr(each, name))
    sums.recover_s = max((each.recover_s for each in outcomes), default=0.0)
    return line(row(sums))
