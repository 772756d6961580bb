"""The shortest way to a state, in words."""

from __future__ import annotations

import dataclasses
import itertools
from enum import Enum
from typing import Any

from tests.explorer.bounds import Violation
from tests.explorer.product import DEAD, Label, Product, State

_INDENT = " " * 16
_TO_WRITER = ("to writer", "writer", "orphan")


def trace_to(product: Product, path: list[State], failing: tuple[Label, str] | None) -> list[str]:
    """One line for each step of the path with its instructions below it, then the step that failed."""
    lines: list[str] = []
    for before, after in itertools.pairwise(path):
        label = next(label for label, to in product.steps(before) if to == after)
        lines += step_lines(product, before, label, after)
    if failing is not None:
        label, what = failing
        lines += [*step_lines(product, path[-1], label, None), f"     !! {what}"]
    return lines


def step_lines(product: Product, state: State, label: Label, after: State | None) -> list[str]:
    kind, number = label
    if kind in ("arrives", "skips abandoned"):
        connection = product.path.by_id[state[2]].connections[number]
        what = ", ".join(f"{'seal' if i < 0 else f'write {i}'} of grant {g.hex()}" for g, i in connection.queue)
        lines = [f"        data: {kind}: what is oldest of [{what}] on epoch {connection.epoch}"]
        return lines + _meanwhile(product, state, 0, after)
    if kind not in ("to receiver", "receiver", *_TO_WRITER):
        return [f"       fault: {kind}"]
    instructions: list[Any] = []
    sent = 0
    try:
        if kind in _TO_WRITER:
            writer_effect = product.writers.effect(product.writers.by_id[state[1]], number)
            instructions, sent = list(writer_effect.instructions), writer_effect.sent
        else:
            receiver_effect = product.receivers.effect(product.receivers.by_id[state[0]], number)
            instructions, sent = list(receiver_effect.instructions), receiver_effect.sent
    except Violation:
        pass  # the step that failed
    lines = [f"{kind:>12}: {show(product.messages.event(number))}", *(f"{_INDENT}-> {show(i)}" for i in instructions)]
    return lines + _meanwhile(product, state, sent, after)


def _meanwhile(product: Product, state: State, sent: int, after: State | None) -> list[str]:
    """Messages that were put into the network beside those of the step (see `Network`)."""
    if after is None or after[0] == DEAD:
        return []
    new = after[4] & ~state[4] & ~sent
    events = [m.event for i, m in enumerate(product.messages.items) if new >> i & 1]
    return [f"{_INDENT}   repeats and answers to repeats send {show(e)}" for e in events]


def show(thing: Any) -> str:
    """A message as one would write it down."""
    if dataclasses.is_dataclass(thing):
        fields = (f"{f.name}={show(getattr(thing, f.name))}" for f in dataclasses.fields(thing) if _tells(thing, f))
        return f"{type(thing).__name__}({', '.join(fields)})"
    if isinstance(thing, Enum):
        return thing.name
    return thing.hex() if isinstance(thing, bytes) else str(thing)


def _tells(thing: Any, field: dataclasses.Field[Any]) -> bool:
    value = getattr(thing, field.name)
    return value != field.default and field.name not in ("bytes_written", "blocks", "prefix", "blocks_new", "pair")
