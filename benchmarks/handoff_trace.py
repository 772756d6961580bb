"""What a recorded handoff says: how long it was exposed, when each layer was computed and sent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class What(Enum):
    GRANTED = "granted"
    PLANNED = "planned"
    POSTED = "posted"
    COMPLETED = "completed"
    COMPUTED = "computed"
    DRAWN = "drawn"
    SEALED = "sealed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Event:
    """One trace point. Records carry their number, layers theirs."""

    at_s: float
    what: What
    layer: int = -1
    writes: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One layer of one chunk, computed or sent."""

    layer: int
    chunk: int
    begin_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The figures of one handoff, in milliseconds."""

    exposed_ms: float
    """From the end of the last step, on the engine's thread (its last layer, head and draw are done), to the Commit
    accepted: what a handoff adds."""
    tail_ms: float
    """From the last layer's K and V to the end of the step: its attention and products, the head, the draw. Computed
    while the last records move."""
    drain_ms: float
    """From the last layer's K and V to the last record landed."""
    left_bytes: int
    """Posted and not yet landed when the last layer's records were posted, those included."""
    sent_bytes: int
    computed_ms: float
    """From the first step's begin to the end of the last one."""


def figures(events: Sequence[Event]) -> Handoff:
    """`events` of one handoff that committed, in order of time."""
    posted = [event for event in events if event.what is What.POSTED]
    last = posted[-1]
    drawn, ended = _only(events, What.DRAWN), _only(events, What.ENDED)
    computed = [event for event in events if event.what is What.COMPUTED and event.at_s <= drawn.at_s][-1]
    before = [event for event in events if event.at_s <= last.at_s]
    record_bytes = last.nbytes // last.writes
    landed = sum(event.writes for event in before if event.what is What.COMPLETED)
    begin_s = next(event.at_s for event in events if event.what is What.PLANNED)
    return Handoff(
        exposed_ms=(ended.at_s - computed.at_s) * 1e3,
        tail_ms=(computed.at_s - last.at_s) * 1e3,
        drain_ms=(max(e.at_s for e in events if e.what is What.COMPLETED) - last.at_s) * 1e3,
        left_bytes=sum(event.nbytes for event in posted) - landed * record_bytes,
        sent_bytes=sum(event.nbytes for event in posted),
        computed_ms=(computed.at_s - begin_s) * 1e3,
    )


def spans(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    """Layers computed, layers sent. A layer is posted when its K and V are there, so what is computed after them counts
    to the next one. A layer was computed from the end of the one before it, or the step's begin; it was
    sent from when it was posted, or the one before it had landed (the transport takes them in order)."""
    computed: list[Span] = []
    sent: list[Span] = []
    waiting: deque[tuple[Span, int]] = deque()
    chunk, since_s, landed_s, landed = -1, 0.0, 0.0, 0
    for event in events:
        if event.what is What.PLANNED:
            chunk, since_s = chunk + 1, event.at_s
        elif event.what is What.POSTED:
            span = Span(event.layer, chunk, since_s, event.at_s, event.nbytes)
            computed.append(span)
            waiting.append((span, event.writes))
            since_s = event.at_s
        elif event.what is What.COMPLETED:
            landed += event.writes
            while waiting and waiting[0][1] <= landed:
                span, writes = waiting.popleft()
                landed -= writes
                sent.append(Span(span.layer, span.chunk, max(span.end_s, landed_s), event.at_s, span.nbytes))
                landed_s = event.at_s
    return computed, sent


def chrome_trace(events: Sequence[Event], *, name: str) -> dict[str, Any]:
    """For https://ui.perfetto.dev and chrome://tracing: one track for layers computed, one for layers sent."""
    start_s = events[0].at_s
    computed, sent = spans(events)
    tracks = {1: "layers computed", 2: "layers sent", 3: "handoff"}
    out: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}}]
    out += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": t, "args": {"name": n}} for t, n in tracks.items()]
    for track, found in ((1, computed), (2, sent)):
        out += [
            {
                "ph": "X", "pid": 1, "tid": track, "name": f"layer {span.layer}", "ts": (span.begin_s - start_s) * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6, "args": {"chunk": span.chunk, "bytes": span.nbytes},
            }
            for span in found
        ]  # fmt: skip
    marks = (What.GRANTED, What.DRAWN, What.SEALED, What.ENDED)
    out += [
        {"ph": "i", "s": "p", "pid": 1, "tid": 3, "name": event.what.value, "ts": (event.at_s - start_s) * 1e6}
        for event in events
        if event.what in marks
    ]
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _only(events: Sequence[Event], what: What) -> Event:
    found = [event for event in events if event.what is what]
    assert len(found) == 1, (what, found)
    return found[0]
