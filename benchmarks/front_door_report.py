"""What the runs of benchmarks/front_door.py say: medians, spread, and ratios with their bars. Pure."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

ROUTER, VLLM, BARE_HTTP, BARE_GRPC = "router", "vLLM", "bare asyncio loop", "bare grpc.aio server"
BARE_WHOLE: Final = "bare loop and grpc.aio client"
MODEL: Final = "router, one-layer model"
VLLM_MAX, BARE_HTTP_MAX, BARE_GRPC_MAX, NODE_MAX, REQUEST_MS_MAX = 0.3, 3.5, 1.6, 2.5, 1.5
WORKERS_MAX, BALANCE_MAX = 1.1, 1.5
GROWTH_MAX: Final = 0.02
COMPARED_SHARE: Final = 0.25
"""Of the time behind the first answers: the mean of its beginning and of its end, each so long."""
CLIENT_SHARE_MAX: Final = 0.8
NO_BALANCE: Final = 99.0
"""One process has all connections."""


def workers_name(workers: int) -> str:
    return f"{ROUTER}, {workers} workers"


def has_workers(name: str) -> bool:
    return name.endswith(" workers")


def share_name(workers: int) -> str:
    """A router of one process with as much to do as each of so many workers."""
    return f"{ROUTER}, 1/{workers} of the load"


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
    client_us: float = 0.0
    """What a token costs the clients."""
    client_share: float = 0.0
    """Of a core, while all streams ran. Near 1 the clients are the limit."""

    @property
    def event_us(self) -> float | None:
        """Of the front, for what comes together: whoever joins more tokens pays less for each."""
        return None if self.token_us is None else self.token_us * self.tokens_of_event

    def __str__(self) -> str:
        kind = "" if self.streaming else ", whole"
        token = "no window" if self.token_us is None else f"{self.token_us:.1f} us a token"
        request = "" if self.request_us is None else f", {self.request_us / 1e3:.2f} ms a request"
        node = f", node {self.node_token_us:.1f}" if self.node_token_us else ""
        client = f"; clients {self.client_us:.1f}, {self.client_share:.2f} of a core" if self.client_us else ""
        errors = f"; {self.errors} ERRORS" if self.errors else ""
        return f"{self.door} {self.streams} {self.server}{kind}: {token}{request}{node}{client}{errors}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """Of many slow streams that go on and on."""

    server: str
    door: str
    streams: int
    tokens_of_answer: int
    requests: int
    tokens: int
    took_s: float
    settled_s: float
    """When the first answers had ended, which have all lengths; what is below is of the time behind it."""
    errors: dict[str, int]
    token_us: float
    """Of the front: requests are in it."""
    client_us: float
    client_share: float
    ages_ms: list[float]
    """p50, p99 and the maximum, from when the engine drew a token to when a client had it."""
    memory: list[tuple[float, dict[str, int]]]
    """At each time in seconds: bytes, by process."""

    def growth(self, name: str) -> tuple[float, float] | None:
        """MiB at first and at last, of the front or of a node. None: the time was too short."""
        length_s = COMPARED_SHARE * (self.took_s - self.settled_s)
        samples = [(at_s, each[name] / 2**20) for at_s, each in self.memory if self.settled_s and name in each]
        early = [mib for at_s, mib in samples if 0 <= at_s - self.settled_s <= length_s]
        late = [mib for at_s, mib in samples if at_s >= self.took_s - length_s]
        return (statistics.mean(early), statistics.mean(late)) if early and late else None

    def __str__(self) -> str:
        lines = [
            f"soak: {self.door}, {self.server}, {self.streams} streams, answers of {self.tokens_of_answer} tokens: "
            f"{self.requests} requests, {self.tokens} tokens in {self.took_s:.0f} s, "
            f"{self.token_us:.1f} us a token with requests; clients {self.client_us:.1f}, "
            f"{self.client_share:.2f} of a core",
            f"  errors: {self.errors or 'none'}",
        ]
        if self.ages_ms:
            p50, p99, most = self.ages_ms
            lines.append(f"  from the draw to the client: p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {most:.1f} ms")
        for name in self.memory[-1][1] if self.memory else ():
            if (found := self.growth(name)) is not None:
                early, late = found
                verdict = f"; bar {GROWTH_MAX:.0%} {'pass' if late / early - 1 <= GROWTH_MAX else 'MISS'}"
                lines.append(
                    f"  memory of the {name}: {early:.1f} MiB after the first answers, {late:.1f} at the end "
                    f"({late / early - 1:+.1%}{verdict if name == 'front' else ''})"
                )
        return "\n".join(lines)


def soaked_of(server: str, job: dict[str, Any], out: dict[str, Any]) -> Soaked:
    in_window = out["window_events"] * out["tokens"] / max(out["events"], 1)
    us = sum(_us(out["window"], "front", first, None) for first in (True, False))
    return Soaked(
        server=server, door=job["door"], streams=job["streams"], tokens_of_answer=job["tokens"],
        requests=out["requests"], tokens=out["tokens"], took_s=out["took_s"], settled_s=out["settled_s"],
        errors=out["errors"], token_us=us / max(in_window, 1),
        client_us=1e6 * out["window_client_s"] / max(in_window, 1),
        client_share=out["window_client_s"] / max(out["window_s"], 1e-6), ages_ms=out["ages"], memory=out["memory"],
    )  # fmt: skip


def read(text: str) -> list[Run | Soaked]:
    """Of a file with cases of both kinds."""
    return [Soaked(**each) if "ages_ms" in each else Run(**each) for each in json.loads(text)]


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
        client_us=1e6 * out["window_client_s"] / max(in_window, 1),
        client_share=out["window_client_s"] / max(out["window_s"], 1e-6),
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
            if door == "http":
                mine, peer = (self.of(door, streams, server, "event_us") for server in (ROUTER, VLLM))
                ratio(f"{door}, {streams} streams, an event: of vLLM's", mine, peer, VLLM_MAX)
            for server, node_of in ((MODEL, "decode node, a token:"), (ROUTER, "decode node, mock engine, a token:")):
                node = self.of(door, streams, server, "node_token_us")
                text = f"{door}, {streams} streams, {node_of} of the bare loop's"
                ratio(text, node, self.of("http", streams, BARE_HTTP, "token_us"), NODE_MAX)
            found += self._workers(door, streams)
        for door, streams in sorted({(run.door, run.streams) for run in self._runs if not run.streaming}):
            us = self.of(door, streams, ROUTER, "request_us", streaming=False)
            if us is not None:
                text = f"{door}, {streams} at a time, a request without streaming: ms"
                bare = self.of(door, streams, BARE_WHOLE, "request_us", streaming=False)
                text += f" ({us / bare:.2f} of the bare loop's {bare / 1e3:.2f})" if bare else ""
                found.append(Bar(what=text, value=us / 1e3, limit=REQUEST_MS_MAX))
        return found

    def _workers(self, door: str, streams: int) -> Iterator[Bar]:
        one = self.of(door, streams, ROUTER, "token_us")
        for server in sorted({run.server for run in self._runs if has_workers(run.server)}):
            label = f"{door}, {streams} streams, {server}"
            several = self.of(door, streams, server, "token_us")
            if several is not None and one:
                yield Bar(what=f"{label}, a token: of one's", value=several / one, limit=WORKERS_MAX)
            workers = int(server.split()[-2])
            alone = self.of(door, streams // workers, share_name(workers), "token_us")
            if several is not None and alone:
                text = f"{label}, a token: of a router's with {streams // workers}"
                yield Bar(what=text, value=several / alone, limit=WORKERS_MAX)
            rounds = [run.held for run in self._groups.get((door, streams, server, True), ()) if any(run.held)]
            ratios = [
                max(busy) / min(busy) if len(busy) > 1 else NO_BALANCE
                for busy in ([n for n in held if n] for held in rounds)
            ]
            if ratios:
                worst = max(ratios)
                held = [n for n in rounds[ratios.index(worst)] if n]
                text = f"{label}, connections {held} (the worst round): most to fewest"
                yield Bar(what=text, value=worst, limit=BALANCE_MAX)

    def table(self) -> list[str]:
        lines = [
            f"{'door':<5}{'streams':>8}  {'server':<24}{'us a token':>22}{'whole':>8}{'ms a request':>14}"
            f"{'node':>7}{'engine':>8}{'joined':>8}{'clients':>9}{'errors':>7}"
        ]
        for (door, streams, server, streaming), runs in sorted(
            self._groups.items(), key=lambda item: (not item[0][3], item[0][0] != "http", item[0][1])
        ):
            tokens = self._values(runs, "token_us")
            text = "-" if not tokens else f"{statistics.median(tokens):.1f} ({min(tokens):.1f}..{max(tokens):.1f})"
            cells = [self.of(door, streams, server, what, streaming=streaming) for what in _COLUMNS]
            whole, request, node, engine, joined, clients = cells
            request = None if request is None else request / 1e3
            words = [
                "-" if value is None or (value == 0 and digits < 2) else f"{value:.{digits}f}"
                for value, digits in ((whole, 1), (request, 2), (node, 1), (engine, 1), (joined, 2), (clients, 1))
            ]
            name = server if streaming else f"{server}, whole"
            lines.append(
                f"{door:<5}{streams:>8}  {name:<24}{text:>22}{words[0]:>8}{words[1]:>14}{words[2]:>7}"
                f"{words[3]:>8}{words[4]:>8}{words[5]:>9}{sum(run.errors for run in runs):>7}"
            )
        return lines

    @staticmethod
    def _values(runs: Sequence[Run], what: str) -> list[float]:
        return [value for run in runs if (value := getattr(run, what)) is not None]


_COLUMNS: Final = ("whole_us", "request_us", "node_token_us", "engine_token_us", "tokens_of_event", "client_us")


def report(cases: Sequence[Run | Soaked]) -> str:
    runs = [case for case in cases if isinstance(case, Run)]
    lines = [str(case) for case in cases if isinstance(case, Soaked)]
    if runs:
        figures = Figures(runs)
        lines += [*figures.table(), "", *map(str, figures.bars()), "", *_clients(runs)]
    return "\n".join(lines)


def _clients(runs: Sequence[Run]) -> Iterator[str]:
    for door in sorted({run.door for run in runs if run.client_us}, reverse=True):
        costs = [run for run in runs if run.door == door and run.client_us]
        share = max(run.client_share for run in costs)
        token_us = statistics.median(run.client_us for run in costs)
        yield (
            f"clients, {door}: {token_us:.1f} us a token, at most {share:.2f} of a core"
            f"{': THEY MAY BE THE LIMIT' if share > CLIENT_SHARE_MAX else ''}"
        )
