"""Writes the state diagrams of the grant machines and of spilled sequences into docs/handoff.md and docs/memory.md,
as Mermaid text from their transition tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from cachestore import spill_policy
from cachestore.spill_policy import SpillState
from kvtransfer.protocol.receiver import TRANSITIONS, GrantState
from kvtransfer.protocol.writer import WRITER_TRANSITIONS, WriterState

_State = TypeVar("_State", bound=Enum)
_Step = TypeVar("_Step", bound=Enum)

PAGES = {"receiver-states": "handoff.md", "writer-states": "handoff.md", "spill-states": "memory.md"}
"""Which page of this folder has which diagram, between its markers."""


def diagrams() -> dict[str, str]:
    """Mermaid text by the name of its markers, fenced for Markdown."""
    return {
        "receiver-states": _diagram(TRANSITIONS, GrantState.RESERVED, "Reserve", GrantState.RELEASED),
        "writer-states": _diagram(WRITER_TRANSITIONS, WriterState.ASKING, "handoff asked for", WriterState.DONE),
        "spill-states": _diagram(spill_policy.TRANSITIONS, SpillState.RUNNING, "first step", SpillState.GONE),
    }


def _diagram(
    table: Mapping[tuple[_State, _Step], tuple[_State, ...]], first: _State, first_step: str, last: _State
) -> str:
    """One arrow for each pair of states, in the order of the table, with all steps that lead along it."""
    arrows: dict[tuple[_State, _State], list[str]] = {}
    for state in type(first):
        for (came_from, step), ends in table.items():
            for to in ends if came_from is state else ():
                arrows.setdefault((came_from, to), []).append(step.value)
    lines = [f"    {a.value} --> {b.value} : {', '.join(steps)}" for (a, b), steps in arrows.items()]
    begin, end = f"    [*] --> {first.value} : {first_step}", f"    {last.value} --> [*]"
    return "\n".join(["```mermaid", "stateDiagram-v2", begin, *lines, end, "```"])


def renewed() -> dict[Path, str]:
    """The text of each page with its diagrams renewed; raises ValueError where a marker is missing."""
    texts: dict[Path, str] = {}
    for name, diagram in diagrams().items():
        page = Path(__file__).with_name(PAGES[name])
        text = texts.get(page) or page.read_text(encoding="utf-8")
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{page.name} lacks the markers {begin} and {end}, in this order")
        texts[page] = f"{before}{begin}\n{diagram}\n{end}{after}"
    return texts


if __name__ == "__main__":
    for page, text in renewed().items():
        page.write_text(text, encoding="utf-8")
