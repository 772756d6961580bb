"""Breadth first to the fixpoint; the shortest trace to what is wrong."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.explorer.bounds import Bounds, Violation
from tests.explorer.product import Label, Product, State
from tests.explorer.trace import trace_to


class Counterexample(AssertionError):
    """The explored machines break an invariant. Its text is the shortest trace to it."""

    def __init__(self, what: str, trace: list[str]) -> None:
        super().__init__("\n".join([what, *trace]))
        self.what = what
        self.trace = trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A finished exploration: every reachable state, with the one it was first reached from."""

    product: Product
    seen: dict[State, State | None] = field(repr=False)
    visited: int
    """States whose steps were taken: the others can do no more than one of these."""
    steps: int
    depth: int
    seconds: float

    def summary(self) -> str:
        return (
            f"{len(self.seen):,} distinct states ({self.visited:,} visited), {self.steps:,} transitions, depth "
            f"{self.depth}, {self.seconds:.1f} s"
        )

    def path(self, state: State) -> list[State]:
        return path_to(self.seen, state)


def explore(bounds: Bounds, *, states_max: int = 100_000_000) -> Found:
    """Visit every reachable state, in order of distance.

    Raises:
        Counterexample: an invariant is broken.
    """
    with no_collection():
        return _explore(bounds, states_max)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Millions of tuples and no cycles among them: the collector would find nothing, again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _explore(bounds: Bounds, states_max: int) -> Found:
    began = time.perf_counter()
    product = Product(bounds)
    seen: dict[State, State | None] = {product.start: None}
    frontier: deque[State] = deque([product.start])
    best = _Best(product)
    steps = visited = 0
    while frontier:
        visited += 1
        state = frontier.popleft()
        label: Label | None = None
        try:
            for label, to in product.steps(state):
                steps += 1
                if to not in seen:
                    seen[to] = state
                    if not bounds.merges or not best.covers(to):
                        product.check(to)
                        frontier.append(to)
                label = None
        except Violation as violation:
            # Without a label the step itself failed, on its way to a state.
            failing = label or product.trying
            trace = trace_to(product, path_to(seen, state), (failing, str(violation)))
            raise Counterexample(str(violation), trace) from violation
        assert len(seen) <= states_max, f"more than {states_max} states"
    return Found(
        product=product,
        seen=seen,
        visited=visited,
        steps=steps,
        depth=len(path_to(seen, state)) - 1,
        seconds=time.perf_counter() - began,
    )


def path_to(seen: dict[State, State | None], state: State) -> list[State]:
    path = [state]
    while (before := seen[path[-1]]) is not None:
        path.append(before)
    return path[::-1]


class _Best:
    """The states that can do the most, of those that differ only in what is still possible."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._kept: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}

    def covers(self, state: State) -> bool:
        """Can an earlier state do all that this one can? If not, remember this one."""
        place, rank = self._product.rank(state)
        kept = self._kept.setdefault(place, [])
        net, crashes, suspicions = rank
        if any(net & n == net and crashes <= c and suspicions <= s for n, c, s in kept):
            return True
        kept.append(rank)
        return False
