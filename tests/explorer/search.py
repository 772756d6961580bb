"""Breadth first to the fixpoint; the shortest trace to what is wrong."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from tests.explorer.bounds import Bounds, Violation
from tests.explorer.product import Label, Product, State
from tests.explorer.trace import tell


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
    steps: int
    depth: int
    seconds: float

    def path(self, state: State) -> list[State]:
        return path_to(self.seen, state)


def explore(bounds: Bounds, *, states_max: int = 100_000_000) -> Found:
    """Visit every reachable state, in order of distance.

    Raises:
        Counterexample: an invariant is broken.
    """
    began = time.perf_counter()
    product = Product(bounds)
    seen: dict[State, State | None] = {product.start: None}
    frontier: deque[State] = deque([product.start])
    steps = 0
    while frontier:
        state = frontier.popleft()
        label: Label | None = None
        try:
            for label, to in product.steps(state):
                steps += 1
                if to not in seen:
                    product.check(to)
                    seen[to] = state
                    frontier.append(to)
                label = None
        except Violation as violation:
            # Without a label the step itself failed, on its way to a state.
            failing = label or product.trying
            trace = tell(product, path_to(seen, state), (failing, str(violation)))
            raise Counterexample(str(violation), trace) from violation
        assert len(seen) <= states_max, f"more than {states_max} states"
    return Found(
        product=product,
        seen=seen,
        steps=steps,
        depth=len(path_to(seen, state)) - 1,
        seconds=time.perf_counter() - began,
    )


def path_to(seen: dict[State, State | None], state: State) -> list[State]:
    path = [state]
    while (before := seen[path[-1]]) is not None:
        path.append(before)
    return path[::-1]

