"""What the runs of benchmarks/front_door.py say: medians, spread, and ratios with their bars. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

ROUTER, VLLM, BARE_HTTP, BARE_GRPC = "router", "vLLM", "bare asyncio loop", "bare grpc.aio server"
MODEL: Final = "router, one-layer model"
WORKERS: Final = "router, 2 workers"
VLLM_MAX, BARE_HTTP_MAX, BARE_GRPC_MAX, NODE_MAX, REQUEST_MS_MAX = 0.3, 3.5, 1.6, 2.5, 1.5
WORKERS_MAX, BALANCE_MAX = 1.1, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One server's figures of one round. Microseconds of processor time."""

    server: str
    door: str
    streams: int
    streaming: bool
    requests: int
    errors: int
    token_us: float | None
    """Of the front, while all streams ran. None: they never all ran."""
    whole_us: float
    """Of the front, all of it by tokens: requests are in it."""
    request_us: float | None
    """Of the front, what is left of a request without its tokens."""
    node_token_us: float | None
    """Of the decode node's threads that do not compute."""
    engine_token_us: float | None
    """Of those that do; of vLLM all of its engine core."""
    tokens_of_event: float
    held: list[int]
    """Connections of each process of the front."""


def run_of(server: str, job: dict[str, Any], out: dict[str, Any]) -> Run:
    front, children, _, _ = (_us(out["all"], *part) for part in _PARTS)
    w_front, w_children, w_node, w_engine = (_us(out["window"], *part) for part in _PARTS)
    if server == VLLM:
        w_engine = w_children
    else:
        front, w_front = front + children, w_front + w_children
    of_event = out["tokens"] / max(out["events"], 1)
    in_window = out["window_events"] * of_event
    per = (lambda us: us / in_window) if in_window else (lambda us: None)
    token_us = per(w_front)
    request_us = None if token_us is None else (front - token_us * out["tokens"]) / max(out["requests"], 1)
    if not job["streaming"]:
        request_us = front / max(out["requests"], 1)
    return Run(
        server=server, door=job["door"], streams=job["streams"], streaming=job["streaming"],
        requests=out["requests"], errors=sum(out["errors"].values()), token_us=token_us,
        whole_us=front / max(out["tokens"], 1), request_us=request_us, node_token_us=per(w_node),
        engine_token_us=per(w_engine), tokens_of_event=of_event, held=out["held"],
    )  # fmt: skip


_PARTS: Final = (("front", True, None), ("front", False, None), ("node", None, "others"), ("node", None, "engine"))


def _us(spent: dict[str, dict[str, dict[str, int]]], name: str, first: bool | None, kind: str | None) -> float:
    """Of the process itself (first), its children (not first) or all (None)."""
    ns = 0
    for number, kinds in enumerate(spent.get(name, {}).values()):
        if first is None or first == (number == 0):
            ns += sum(value for each, value in kinds.items() if kind in (None, each))
    return ns / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    what: str
    value: float
    limit: float

    def __str__(self) -> str:
        verdict = "pass" if self.value <= self.limit else "MISS"
        return f"{self.what:<80} {self.value:6.2f}  bar {self.limit:<4g} {verdict}"


class Figures:
    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._groups: defaultdict[tuple[str, int, str, bool], list[Run]] = defaultdict(list)
        for run in runs:
            self._groups[run.door, run.streams, run.server, run.streaming].append(run)

    def of(self, door: str, streams: int, server: str, what: str, *, streaming: bool = True) -> float | None:
        values = self._values(self._groups.get((door, streams, server, streaming), ()), what)
        return statistics.median(values) if values else None

    def bars(self) -> list[Bar]:
        found: list[Bar] = []

        def ratio(text: str, value: float | None, other: float | None, limit: float) -> None:
            if value is not None and other:
                found.append(Bar(what=text, value=value / other, limit=limit))

        for door, streams in sorted({(run.door, run.streams) for run in self._runs if run.streaming}, reverse=True):
            for what, text in (("token_us", "a token"), ("whole_us", "a token, requests in it")):
                mine = self.of(door, streams, ROUTER, what)
                label = f"{door}, {streams} streams, {text}:"
                if door == "http":
                    peer = self.of(door, streams, VLLM, what)
                    ratio(f"{label} of vLLM's", mine, peer, VLLM_MAX)
                    ratio(f"{label} (same model) of vLLM's", self.of(door, streams, MODEL, what), peer, VLLM_MAX)
                    ratio(f"{label} of the bare loop's", mine, self.of(door, streams, BARE_HTTP, what), BARE_HTTP_MAX)
                else:
                    ratio(f"{label} of grpc.aio's", mine, self.of(door, streams, BARE_GRPC, what), BARE_GRPC_MAX)
            for server, node_of in ((MODEL, "decode node, a token:"), (ROUTER, "decode node, mock engine, a token:")):
                node = self.of(door, streams, server, "node_token_us")
                text = f"{door}, {streams} streams, {node_of} of the bare loop's"
                ratio(text, node, self.of("http", streams, BARE_HTTP, "token_us"), NODE_MAX)
            two, one = (self.of(door, streams, each, "token_us") for each in (WORKERS, ROUTER))
            ratio(f"{door}, {streams} streams, two workers, a token: of one's", two, one, WORKERS_MAX)
            held = [n for run in self._groups.get((door, streams, WORKERS, True), ()) for n in [run.held] if any(n)]
            for each in held[-1:]:
                busy = [n for n in each if n] or [1]
                text = f"{door}, {streams} streams, two workers, connections {each}: most to fewest"
                found.append(Bar(what=text, value=max(busy) / min(busy) if len(busy) > 1 else 99, limit=BALANCE_MAX))
        for door, streams in sorted({(run.door, run.streams) for run in self._runs if not run.streaming}):
            us = self.of(door, streams, ROUTER, "request_us", streaming=False)
            if us is not None:
                text = f"{door}, {streams} at a time, a request without streaming: ms"
                found.append(Bar(what=text, value=us / 1e3, limit=REQUEST_MS_MAX))
        return found

    def table(self) -> list[str]:
        lines = [
            f"{'door':<5}{'streams':>8}  {'server':<24}{'us a token':>22}{'whole':>8}{'ms a request':>14}"
            f"{'node':>7}{'engine':>8}{'joined':>8}{'errors':>7}"
        ]
        for (door, streams, server, streaming), runs in sorted(
            self._groups.items(), key=lambda item: (not item[0][3], item[0][0] != "http", item[0][1])
        ):
            tokens = self._values(runs, "token_us")
            text = "-" if not tokens else f"{statistics.median(tokens):.1f} ({min(tokens):.1f}..{max(tokens):.1f})"
            cells = [self.of(door, streams, server, what, streaming=streaming) for what in _COLUMNS]
            whole, request, node, engine, joined = cells
            request = None if request is None else request / 1e3
            words = [
                "-" if value is None or (value == 0 and digits < 2) else f"{value:.{digits}f}"
                for value, digits in ((whole, 1), (request, 2), (node, 1), (engine, 1), (joined, 2))
            ]
            name = server if streaming else f"{server}, whole"
            lines.append(
                f"{door:<5}{streams:>8}  {name:<24}{text:>22}{words[0]:>8}{words[1]:>14}{words[2]:>7}"
                f"{words[3]:>8}{words[4]:>8}{sum(run.errors for run in runs):>7}"
            )
        return lines

    @staticmethod
    def _values(runs: Sequence[Run], what: str) -> list[float]:
        return [value for run in runs if (value := getattr(run, what)) is not None]


_COLUMNS: Final = ("whole_us", "request_us", "node_token_us", "engine_token_us", "tokens_of_event")


def report(runs: Sequence[Run]) -> str:
    figures = Figures(runs)
    return "\n".join([*figures.table(), "", *map(str, figures.bars())])
