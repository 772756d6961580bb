"""The router's metrics for Prometheus: what it sees of its requests, and what the nodes report to the directory."""

from __future__ import annotations

import itertools
import operator
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from batonpb import common_pb2, inference_pb2
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from baton import baton_version
from baton.errors import Reason
from baton.http2_front import Ended
from baton.lifecycle import Lifecycle
from baton.loop_lag import BUCKETS_MS
from baton.wire import LOCAL_TRANSPORT, TIME_BOUNDS_S, BlockLoad, NodeLoad, NodeRecord, Role, TierLoad
from router.doors import Door
from router.keys import KeyUse, Limit
from router.request import ObservedRequest

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL_BUCKETS_S: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
E2E_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
HANDOFF_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
BLOCK_CLASSES: Final = tuple(each.name for each in fields(BlockLoad) if each.name not in ("promised", "pinned"))
ATTACH_OUTCOMES: Final = ("taken", "computed_again", "refused")
PROMPT_SOURCES: Final = {
    "computed": "computed",
    "device": "cached_device",
    "host": "cached_host",
    "disk": "cached_disk",
    "peer": "fetched",
}
"""Labels, by the fields of PromptSources."""
_NODE_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.MIXED)
_OUTCOMES: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one metric of the router's own is called. With `buckets` it is a histogram."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False
    buckets: tuple[float, ...] = ()


REQUESTS: Final = Figure(
    name="baton_requests",
    text="Requests that have ended, by outcome: stop, length, cancelled (the client left), deadline, or another "
    "error's reason.",
    labels=("outcome",),
)
RESUMPTIONS: Final = Figure(
    name="baton_resumptions", text="Attempts that failed after their grant, and were taken up on other nodes."
)
ATTACHES: Final = Figure(
    name="baton_attaches",
    text="Calls of clients that came back for an answer, by outcome: taken (over from its node), computed_again, or "
    "refused.",
    labels=("outcome",),
)
CONNECTIONS_REFUSED: Final = Figure(
    name="baton_connections_refused",
    text="Connections of clients closed at once for want of a place, by door: grpc or http.",
    labels=("door",),
)
CONNECTIONS_ENDED: Final = Figure(
    name="baton_connections_ended",
    text="Connections of gRPC clients ended for what they sent, or sent too fast or too late, by why.",
    labels=("why",),
)
CORRUPT: Final = Figure(
    name="baton_handoffs_corrupt",
    text="Handoffs refused because sampled records did not arrive as sent: hardware of the pair is failing.",
    labels=("prefill_node", "decode_node", "transport"),
)
QUEUED: Final = Figure(name="baton_requests_queued", text="Requests without their first token yet.", is_gauge=True)
IN_LINE: Final = Figure(
    name="baton_requests_in_line", text="Of these, requests that wait in line for room on nodes.", is_gauge=True
)
LINE_S: Final = Figure(
    name="baton_line_seconds",
    text="How long requests that had to wait in line did so, each time.",
    buckets=E2E_BUCKETS_S,
)
RUNNING: Final = Figure(name="baton_requests_running", text="Requests between first and last token.", is_gauge=True)
TTFT_S: Final = Figure(
    name="baton_ttft_seconds", text="From a request's arrival to its first token.", buckets=TTFT_BUCKETS_S
)
ITL_S: Final = Figure(
    name="baton_itl_seconds",
    text="Gaps between tokens; tokens that come together share theirs.",
    buckets=ITL_BUCKETS_S,
)
E2E_S: Final = Figure(
    name="baton_e2e_seconds",
    text="From the arrival of a request that was answered to its last token.",
    buckets=E2E_BUCKETS_S,
)
PROMPT_TOKENS: Final = Figure(name="baton_prompt_tokens", text="Tokens of prompts answered.")
CACHED_TOKENS: Final = Figure(name="baton_prefix_hit_tokens", text="Of these, tokens that the prefill node had cached.")
SKIPPED_TOKENS: Final = Figure(
    name="baton_prefix_skipped_tokens", text="Of these, tokens never sent: the decode node had them cached."
)
SOURCE_TOKENS: Final = Figure(
    name="baton_prompt_tokens_by_source",
    text="Tokens of prompts answered, by where their KV came from: computed, device, host, disk, or peer.",
    labels=("source",),
)
SOURCE_REQUESTS: Final = Figure(
    name="baton_requests_by_source",
    text="Requests answered that had at least one token from there, by source.",
    labels=("source",),
)
OUTPUT_TOKENS: Final = Figure(name="baton_output_tokens", text="Tokens of answers.")
KEPT: Final = Figure(name="baton_requests_local", text="Requests that a mixed node ran without a handoff.")
LOOP_LAG_S: Final = Figure(
    name="baton_control_loop_lag_seconds",
    text="How late this router's control thread was, at each look.",
    buckets=tuple(ms / 1000 for ms in BUCKETS_MS),
)
TRANSFER_BYTES: Final = Figure(
    name="baton_transfer_bytes", text="KV bytes written from prefill to decode nodes.", labels=("transport",)
)
BLOCKS_WRITTEN: Final = Figure(
    name="baton_transfer_blocks", text="Prompt blocks written from prefill to decode nodes.", labels=("transport",)
)
BLOCKS_SKIPPED: Final = Figure(
    name="baton_transfer_blocks_skipped",
    text="Prompt blocks never sent: the decode node had them cached.",
    labels=("transport",),
)
TRANSFER_S: Final = Figure(
    name="baton_transfer_exposed_seconds",
    text="From the end of the prefill's last layer to the commit accepted.",
    labels=("transport",),
    buckets=HANDOFF_BUCKETS_S,
)
_FIGURES: Final = {
    each.name: each
    for each in (
        REQUESTS, RESUMPTIONS, ATTACHES, CORRUPT, QUEUED, IN_LINE, LINE_S, RUNNING, TTFT_S, ITL_S, E2E_S, PROMPT_TOKENS,
        CACHED_TOKENS, SKIPPED_TOKENS, SOURCE_TOKENS,
        SOURCE_REQUESTS, OUTPUT_TOKENS, KEPT, LOOP_LAG_S, TRANSFER_BYTES, BLOCKS_WRITTEN, BLOCKS_SKIPPED,
        TRANSFER_S, CONNECTIONS_REFUSED, CONNECTIONS_ENDED,
    )
}  # fmt: skip
_Values = list[float]
"""Of one set of labels. A histogram's: the count in each bucket, the one beyond the last too, and the sum."""
_Labels = tuple[str, ...]
FigureValues = dict[str, dict[_Labels, _Values]]
"""Of all figures, by name."""


class Figures:
    """What is counted of requests, in plain numbers: an observation costs a bisection and two additions. Pure."""

    def __init__(self) -> None:
        self.values: defaultdict[str, dict[_Labels, _Values]] = defaultdict(dict)
        for figure in _FIGURES.values():
            if not figure.labels:
                self.of(figure)
        for outcome in ATTACH_OUTCOMES:
            self.of(ATTACHES, outcome)
        for door in Door:
            self.of(CONNECTIONS_REFUSED, door.label)
        for why in Ended:
            if why is not Ended.LEFT:
                self.of(CONNECTIONS_ENDED, why.name.lower())

    def of(self, figure: Figure, *labels: str) -> _Values:
        """To be changed in place; the same list each time."""
        rows = self.values[figure.name]
        found = rows.get(labels)
        if found is None:
            found = rows[labels] = [0.0] * (len(figure.buckets) + 2 if figure.buckets else 1)
        return found

    def include(self, others: Iterable[FigureValues], *, gauges: bool = True) -> None:
        """Add what others have counted; without `gauges` they are over, and nothing of theirs is under way."""
        for values in others:
            for name, rows in list(values.items()):
                if not gauges and _FIGURES[name].is_gauge:
                    continue
                for labels, row in list(rows.items()):
                    own = self.of(_FIGURES[name], *labels)
                    own[:] = map(operator.add, own, row)

    def add(self, figure: Figure, *labels: str, by: float = 1) -> None:
        self.of(figure, *labels)[0] += by

    def observe(self, figure: Figure, value: float, *labels: str) -> None:
        observe(self.of(figure, *labels), figure.buckets, value, 1)


def observe(row: _Values, buckets: Sequence[float], value: float, count: int) -> None:
    """So many observations of one value, into a histogram's numbers."""
    row[bisect_left(buckets, value)] += count
    row[-1] += value * count


class RouterMetrics:
    """A registry of its own: two routers in one process do not meet. `nodes` gives the records known now, routers
    among them; `directory_lost` says whether they may be out of date. `keys` gives the API keys that are good now."""

    def __init__(
        self,
        nodes: Callable[[], Sequence[NodeRecord]],
        *,
        directory_lost: Callable[[], bool] = lambda: False,
        keys: Callable[[], Iterable[KeyUse]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self.figures = Figures()
        self.itl, self.ttft, self.e2e = (self.figures.of(each) for each in (ITL_S, TTFT_S, E2E_S))
        self.queued, self.running, self.in_line = (self.figures.of(each) for each in (QUEUED, RUNNING, IN_LINE))
        self.of_workers: list[FigureValues] = []
        """What other processes of this router have counted beside `figures`."""
        self.worker_pids: list[int] = []
        for collector in (_FigureCollector(self), _NodeCollector(nodes), _KeyCollector(keys)):
            self.registry.register(collector)
        Gauge("baton_build_info", "1, for the version of this router.", ("version",), registry=self.registry).labels(
            baton_version()
        ).set(1)
        text = "0 while the directory is out of this router's reach, else 1."
        Gauge("baton_directory_reached", text, registry=self.registry).set_function(lambda: not directory_lost())
        self.registry.register(_ProcessCollector(self))

    def received(self, now_s: float) -> ObservedRequest:
        """A request has come in."""
        return _Observed(self, now_s)

    def look_at_loop(self, lag_s: float) -> None:
        """The control thread was so late."""
        self.figures.observe(LOOP_LAG_S, lag_s)

    def connection_refused(self, door: Door) -> None:
        self.figures.add(CONNECTIONS_REFUSED, door.label)

    def connection_ended(self, why: Ended) -> None:
        """By the front."""
        self.figures.add(CONNECTIONS_ENDED, why.name.lower())

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its content type: in OpenMetrics' format where a scraper says by its Accept header that it
        takes that, else in Prometheus' text format. On any thread: it copies what the control thread changes."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Observed(ObservedRequest):
    __slots__ = ("_began_s", "_has_token", "_last_s", "_metrics", "_outcome")

    def __init__(self, metrics: RouterMetrics, now_s: float) -> None:
        self._metrics = metrics
        self._began_s = self._last_s = now_s
        self._has_token = False
        self._outcome = "cancelled"
        metrics.queued[0] += 1

    def tokens(self, now_s: float, count: int) -> None:
        gap_s, self._last_s = now_s - self._last_s, now_s
        if not self._has_token:
            self._has_token = True
            self._metrics.queued[0] -= 1
            self._metrics.running[0] += 1
            observe(self._metrics.ttft, TTFT_BUCKETS_S, gap_s, 1)
            count, gap_s = count - 1, 0.0  # what came with the first token was not waited for
        if count:
            observe(self._metrics.itl, ITL_BUCKETS_S, gap_s / count, count)

    def finished(self, reason: common_pb2.FinishReason, stats: inference_pb2.RequestStats) -> None:
        metrics, figures = self._metrics, self._metrics.figures
        self._outcome = _OUTCOMES[reason]
        observe(metrics.e2e, E2E_BUCKETS_S, self._last_s - self._began_s, 1)
        figures.add(PROMPT_TOKENS, by=stats.prompt_tokens)
        figures.add(CACHED_TOKENS, by=stats.prompt_tokens_cached)
        figures.add(SKIPPED_TOKENS, by=stats.prompt_tokens_skipped)
        for source, field in PROMPT_SOURCES.items():
            tokens = getattr(stats.sources, field)
            figures.add(SOURCE_TOKENS, source, by=tokens)
            figures.add(SOURCE_REQUESTS, source, by=tokens > 0)
        figures.add(OUTPUT_TOKENS, by=stats.output_tokens)
        transport = stats.transport
        if transport == LOCAL_TRANSPORT:
            figures.add(KEPT)
        elif transport:
            figures.add(TRANSFER_BYTES, transport, by=stats.bytes_written)
            figures.add(BLOCKS_WRITTEN, transport, by=stats.blocks_written)
            figures.add(BLOCKS_SKIPPED, transport, by=stats.blocks_skipped)
            figures.observe(TRANSFER_S, stats.handoff_exposed_ms / 1000, transport)

    def failed(self, reason: Reason) -> None:
        self._outcome = reason.value.lower()

    def waits(self) -> None:
        self._metrics.in_line[0] += 1

    def waited(self, waited_s: float) -> None:
        self._metrics.in_line[0] -= 1
        self._metrics.figures.observe(LINE_S, waited_s)

    def resumed(self) -> None:
        self._metrics.figures.add(RESUMPTIONS)

    def attached(self, outcome: str) -> None:
        self._metrics.figures.add(ATTACHES, outcome)

    def corrupt(self, prefill_node: str, decode_node: str, transport: str) -> None:
        self._metrics.figures.add(CORRUPT, prefill_node, decode_node, transport)

    def ended(self) -> None:
        (self._metrics.running if self._has_token else self._metrics.queued)[0] -= 1
        self._metrics.figures.add(REQUESTS, self._outcome)


class _FigureCollector(Collector):
    """What the router has counted of its requests."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        total = Figures()
        total.include([self._metrics.figures.values, *self._metrics.of_workers])
        for figure in _FIGURES.values():
            yield _metric(figure, total.values[figure.name])


def _metric(figure: Figure, rows: Mapping[_Labels, _Values]) -> Metric:
    if not figure.buckets:
        kind: type[GaugeMetricFamily | CounterMetricFamily]
        kind = GaugeMetricFamily if figure.is_gauge else CounterMetricFamily
        metric = kind(figure.name, figure.text, labels=figure.labels)
        for labels, row in rows.items():
            metric.add_metric(labels, row[0])
        return metric
    made = HistogramMetricFamily(figure.name, figure.text, labels=figure.labels)
    bounds = [*(str(float(bound)) for bound in figure.buckets), "+Inf"]
    for labels, row in rows.items():
        *counts, total = row.copy()
        made.add_metric(labels, list(zip(bounds, itertools.accumulate(counts), strict=True)), total)
    return made


class _ProcessCollector(Collector):
    """What Prometheus' own client says of this process, with its workers'."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        workers = [_of_process(pid) for pid in self._metrics.worker_pids]
        for name, metric in _of_process("self").items():
            if name in _SUMMED:
                more = [worker[name].samples[0].value for worker in workers if name in worker]
                if name == "process_cpu_seconds":  # it never falls: those that have ended count too
                    ended = os.times()
                    more += [ended.children_user, ended.children_system]
                sample = metric.samples[0]
                metric.samples = [sample._replace(value=sample.value + sum(more))]
            yield metric


_SUMMED: Final = frozenset(
    {
        "process_cpu_seconds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)


def _of_process(pid: int | str) -> dict[str, Metric]:
    """By name; nothing of one that has ended."""
    return {metric.name: metric for metric in ProcessCollector(pid=lambda: pid, registry=None).collect()}


class _NodeCollector(Collector):
    """What each node has last reported to the directory."""

    def __init__(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        there = GaugeMetricFamily("baton_nodes", "Nodes that the directory knows.", labels=["role", "state"])
        counts = dict.fromkeys(itertools.product(_NODE_ROLES, Lifecycle), 0)  # zeros too, for alerts
        families = {
            name: GaugeMetricFamily(f"baton_node_{name}", text, labels=["node", "role", *labels])
            for name, (text, labels) in _NODE_FIGURES.items()
        }
        times: tuple[dict[_Labels, _Values], ...] = ({}, {})
        for record in self._nodes():
            if record.role is Role.ROUTER:
                continue
            counts[record.role, record.lifecycle] += 1
            own, load = (record.name, record.role.name.lower()), record.load
            for tier in load.tiers:
                if tier.promotion_counts:
                    times[0][*own, tier.tier] = [*map(float, tier.promotion_counts), tier.promotion_s]
            if load.moved.fetch_counts:
                times[1][own] = [*map(float, load.moved.fetch_counts), load.moved.fetch_s]
            for name, labels, value in _reported(load):
                families[name].add_metric([*own, *labels], value)
        for (role, state), count in counts.items():
            there.add_metric([role.name.lower(), state.name.lower()], count)
        yield there
        yield from families.values()
        for figure, rows in zip(_NODE_TIMES, times, strict=True):
            yield _metric(figure, rows)


_NODE_FIGURES: Final[Mapping[str, tuple[str, _Labels]]] = {
    "requests": ("Requests that wait and run on the node.", ("state",)),
    "blocks": ("KV blocks by owner, as the node last reported.", ("class",)),
    "blocks_pinned": ("Of the cached blocks, those that pins keep.", ()),
    "host_blocks": ("Blocks of host memory below the KV blocks.", ("class",)),
    "swapped_out_requests": ("Running requests whose KV is not all on the device now.", ()),
    "transports_given_up": (
        "Transports that the node no longer offers to some peer because they kept failing, over its peers.",
        (),
    ),
    "control_loop_lag_seconds": (
        "The longest that the node's control thread was late in the last 30 s or more.",
        (),
    ),
    "tier_bytes": ("Of a tier of the node's cache: KV cached there, and the room.", ("tier", "what")),
    "tier_moved_bytes": ("KV copied down to a tier, and up from it, since the node's start.", ("tier", "way")),
    "tier_blocks": (
        "Blocks of a tier since the node's start: hit by prompts; evicted, and of these unused; lost above before "
        "they were copied down; refused.",
        ("tier", "what"),
    ),
    "moved_bytes": (
        "KV written to other nodes since the node's start: for requests (handoff), for their fetches (served); and "
        "fetched from others.",
        ("reason",),
    ),
    "fetches": ("Fetches of KV from other nodes since the node's start, by their end.", ("end",)),
}
"""Of each node: what they say, and their labels behind the node's name and role."""
_NODE_TIMES: Final = (
    Figure(
        name="baton_node_tier_promotion_seconds",
        text="How long it took that blocks came up from a tier for a prompt.",
        labels=("node", "role", "tier"),
        buckets=TIME_BOUNDS_S,
    ),
    Figure(
        name="baton_node_fetch_seconds",
        text="How long fetches of KV from other nodes took that brought something.",
        labels=("node", "role"),
        buckets=TIME_BOUNDS_S,
    ),
)
_Report = Iterator[tuple[str, _Labels, float]]
"""Names of `_NODE_FIGURES`, labels and values."""


def _reported(load: NodeLoad) -> _Report:
    yield "requests", ("waiting",), load.waiting_requests
    yield "requests", ("running",), load.running_requests
    for name in BLOCK_CLASSES:
        yield "blocks", (name,), getattr(load.blocks, name)
    yield "blocks_pinned", (), load.blocks.pinned
    yield "host_blocks", ("filled",), load.host_blocks_filled
    yield "host_blocks", ("free",), load.host_blocks_free
    yield "swapped_out_requests", (), load.swapped_out_requests
    yield "transports_given_up", (), load.transports_given_up
    yield "control_loop_lag_seconds", (), load.control_loop_lag_ms_max / 1000
    for tier in load.tiers:
        yield from _reported_of_tier(tier)
    for reason in ("handoff", "served", "fetched"):
        yield "moved_bytes", (reason,), getattr(load.moved, f"{reason}_bytes")
    yield "fetches", ("done",), load.moved.fetches
    yield "fetches", ("refused",), load.moved.fetches_refused
    yield "fetches", ("failed",), load.moved.fetches_failed


def _reported_of_tier(load: TierLoad) -> _Report:
    tier = load.tier
    yield "tier_bytes", (tier, "cached"), load.blocks * load.block_bytes
    yield "tier_bytes", (tier, "max"), load.blocks_max * load.block_bytes
    for what in ("hit", "evicted", "evicted_unused"):
        yield "tier_blocks", (tier, what), getattr(load, f"blocks_{what}")
    if tier == "device":
        return  # nothing comes to it from above, or up from it
    yield "tier_moved_bytes", (tier, "down"), load.blocks_stored * load.block_bytes
    yield "tier_moved_bytes", (tier, "up"), load.blocks_hit * load.block_bytes
    for what in ("lost", "refused"):
        yield "tier_blocks", (tier, what), getattr(load, f"blocks_{what}")


class _KeyCollector(Collector):
    """What each API key that has been used is given. A key that is gone has no line: names come from its file only."""

    def __init__(self, keys: Callable[[], Iterable[KeyUse]]) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("baton_key_requests", "Calls taken in, by API key.", labels=["key"])
        tokens = CounterMetricFamily("baton_key_tokens", "Tokens of prompts and answers.", labels=["key", "kind"])
        refused = CounterMetricFamily("baton_key_refused", "Calls refused by a limit.", labels=["key", "limit"])
        running = GaugeMetricFamily("baton_key_running", "Answers under way.", labels=["key"])
        for use in self._keys():
            name = use.key.name
            if not (use.requests or use.refused):
                continue
            requests.add_metric([name], use.requests)
            tokens.add_metric([name, "prompt"], use.prompt_tokens)
            tokens.add_metric([name, "output"], use.output_tokens)
            running.add_metric([name], use.running)
            for limit in Limit:
                refused.add_metric([name, limit.value], use.refused[limit])
        yield from (requests, tokens, refused, running)
