"""The shortest way to a state, in words."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from tests.explorer.bounds import Violation
from tests.explorer.product import DEAD, Label, Product, State


def tell(product: Product, path: list[State], last: tuple[Label, str] | None) -> list[str]:
    """One line for each step of the path, what each side was told to do below it; then the step that failed."""
    lines: list[str] = []
    for before, after in zip(path, path[1:], strict=False):
        label = next(label for label, to in product.steps(before) if to == after)
        lines += _step(product, before, label, len(lines))
    if last is not None:
        label, what = last
        lines += _step(product, path[-1], label, len(lines))
        lines.append(f"     !! {what}")
    return lines


def _step(product: Product, state: State, label: Label, line: int) -> list[str]:
    del line
    kind, number = label
    if kind in ("to receiver", "to writer", "receiver", "writer", "orphan"):
        event = product.messages.event(number)
        told: list[Any] = []
        try:
            if kind in ("to receiver", "receiver"):
                told = list(product.receivers.effect(product.receivers.by_id[state[0]], number).instructions)
            else:
                told = list(product.writers.effect(product.writers.by_id[state[1]], number).instructions)
        except Violation:
            pass
        return [f"{kind:>12}: {show(event)}", *(f"{'':>16}-> {show(i)}" for i in told)]
    if kind in ("arrives", "skips abandoned"):
        connection = product.data[state[2]].connections[number]
        grant, index = connection.queue[0]
        what = "seal" if index < 0 else f"write {index}"
        return [f"{'data':>12}: {kind}: {what} of grant {grant.hex()} on epoch {connection.epoch}"]
    return [f"{'fault':>12}: {kind}"]


def show(thing: Any) -> str:
    """A message as one would write it down."""
    if dataclasses.is_dataclass(thing):
        fields = ", ".join(
            f"{f.name}={show(getattr(thing, f.name))}" for f in dataclasses.fields(thing) if _tells(thing, f)
        )
        return f"{type(thing).__name__}({fields})"
    if isinstance(thing, Enum):
        return thing.name
    return thing.hex() if isinstance(thing, bytes) else str(thing)


def _tells(thing: Any, field: dataclasses.Field[Any]) -> bool:
    value = getattr(thing, field.name)
    return value != field.default and field.name not in ("bytes_written", "blocks", "prefix", "blocks_new")


__all__ = ["DEAD", "show", "tell"]
