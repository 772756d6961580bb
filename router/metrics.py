"""The router's metrics for Prometheus: what it sees of its requests, and what the nodes report to the directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Final

from batonpb import common_pb2, inference_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.errors import Reason
from baton.lifecycle import Lifecycle
from baton.loop_lag import BUCKETS_MS
from baton.version import baton_version
from baton.wire import LOCAL_TRANSPORT, BlockLoad, NodeRecord, Role
from router.observer import ObservedRequest, RequestObserver

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL_BUCKETS_S: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
E2E_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
HANDOFF_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
BLOCK_CLASSES: Final = tuple(each.name for each in fields(BlockLoad) if each.name not in ("promised", "pinned"))
_NODE_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.MIXED)
_OUTCOMES: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class RouterMetrics(RequestObserver):
    """A registry of its own: two routers in one process do not meet. `nodes` gives the records known now,
    `directory_lost` whether they may be out of date."""

    def __init__(
        self, nodes: Callable[[], Sequence[NodeRecord]], *, directory_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests",
            "Requests that have ended, by outcome: stop, length, cancelled (the client left), deadline, or another "
            "error's reason.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.resumptions = Counter(
            "baton_resumptions", "Attempts that failed after their grant, and were taken up on other nodes.",
            registry=registry,
        )  # fmt: skip
        self.corrupt = Counter(
            "baton_handoffs_corrupt",
            "Handoffs refused because sampled records did not arrive as sent: hardware of the pair is failing.",
            ["prefill_node", "decode_node", "transport"], registry=registry,
        )  # fmt: skip
        self.queued = Gauge("baton_requests_queued", "Requests without their first token yet.", registry=registry)
        self.running = Gauge("baton_requests_running", "Requests between first and last token.", registry=registry)
        self.ttft_s = Histogram(
            "baton_ttft_seconds", "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.itl_s = Histogram(
            "baton_itl_seconds", "Gaps between tokens; tokens that come together share theirs.",
            buckets=ITL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.e2e_s = Histogram(
            "baton_e2e_seconds", "From the arrival of a request that was answered to its last token.",
            buckets=E2E_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("baton_prompt_tokens", "Tokens of prompts answered.", registry=registry)
        self.cached_tokens = Counter(
            "baton_prefix_hit_tokens", "Of these, tokens that the prefill node had cached.", registry=registry
        )
        self.skipped_tokens = Counter(
            "baton_prefix_skipped_tokens", "Of these, tokens never sent: the decode node had them cached.",
            registry=registry,
        )  # fmt: skip
        self.output_tokens = Counter("baton_output_tokens", "Tokens of answers.", registry=registry)
        self.kept = Counter(
            "baton_requests_local", "Requests that a mixed node ran without a handoff.", registry=registry
        )
        self.transfer_bytes = Counter(
            "baton_transfer_bytes", "KV bytes written from prefill to decode nodes.", ["transport"], registry=registry
        )
        self.blocks_written = Counter(
            "baton_transfer_blocks", "Prompt blocks written from prefill to decode nodes.",
            ["transport"], registry=registry,
        )  # fmt: skip
        self.blocks_skipped = Counter(
            "baton_transfer_blocks_skipped", "Prompt blocks never sent: the decode node had them cached.",
            ["transport"], registry=registry,
        )  # fmt: skip
        self.transfer_s = Histogram(
            "baton_transfer_exposed_seconds", "From the end of the prefill's last layer to the commit accepted.",
            ["transport"], buckets=HANDOFF_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.loop_lag_s = Histogram(
            "baton_control_loop_lag_seconds", "How late this router's control thread was, at each look.",
            buckets=tuple(ms / 1000 for ms in BUCKETS_MS), registry=registry,
        )  # fmt: skip
        registry.register(_NodeCollector(nodes))
        self._tell_of_the_process(directory_lost)

    def _tell_of_the_process(self, directory_lost: Callable[[], bool]) -> None:
        registry = self.registry
        Gauge("baton_build_info", "1, for the version of this router.", ["version"], registry=registry).labels(
            baton_version()
        ).set(1)
        Gauge(
            "baton_directory_reached", "0 while the directory is out of this router's reach, else 1.", registry=registry
        ).set_function(lambda: not directory_lost())
        ProcessCollector(registry=registry)

    def received(self, now_s: float) -> ObservedRequest:
        return _Observed(self, now_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Observed(ObservedRequest):
    def __init__(self, metrics: RouterMetrics, now_s: float) -> None:
        self._metrics = metrics
        self._began_s = self._last_s = now_s
        self._has_token = False
        self._outcome = "cancelled"
        metrics.queued.inc()

    def tokens(self, now_s: float, count: int) -> None:
        gap_s, self._last_s = now_s - self._last_s, now_s
        if not self._has_token:
            self._has_token = True
            self._metrics.queued.dec()
            self._metrics.running.inc()
            self._metrics.ttft_s.observe(gap_s)
            count, gap_s = count - 1, 0.0  # what came with the first token was not waited for
        for _ in range(count):
            self._metrics.itl_s.observe(gap_s / count)

    def finished(self, reason: common_pb2.FinishReason, stats: inference_pb2.RequestStats) -> None:
        metrics = self._metrics
        self._outcome = _OUTCOMES[reason]
        metrics.e2e_s.observe(self._last_s - self._began_s)
        metrics.prompt_tokens.inc(stats.prompt_tokens)
        metrics.cached_tokens.inc(stats.prompt_tokens_cached)
        metrics.skipped_tokens.inc(stats.prompt_tokens_skipped)
        metrics.output_tokens.inc(stats.output_tokens)
        if stats.transport == LOCAL_TRANSPORT:
            metrics.kept.inc()
        elif stats.transport:
            metrics.transfer_bytes.labels(stats.transport).inc(stats.bytes_written)
            metrics.blocks_written.labels(stats.transport).inc(stats.blocks_written)
            metrics.blocks_skipped.labels(stats.transport).inc(stats.blocks_skipped)
            metrics.transfer_s.labels(stats.transport).observe(stats.handoff_exposed_ms / 1000)

    def failed(self, reason: Reason) -> None:
        self._outcome = reason.value.lower()

    def resumed(self) -> None:
        self._metrics.resumptions.inc()

    def corrupt(self, prefill_node: str, decode_node: str, transport: str) -> None:
        self._metrics.corrupt.labels(prefill_node, decode_node, transport).inc()

    def ended(self) -> None:
        (self._metrics.running if self._has_token else self._metrics.queued).dec()
        self._metrics.requests.labels(self._outcome).inc()


class _NodeCollector(Collector):
    """What each node has last reported to the directory."""

    def __init__(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        there = GaugeMetricFamily("baton_nodes", "Nodes that the directory knows.", labels=["role", "state"])
        counts = dict.fromkeys(itertools.product(_NODE_ROLES, Lifecycle), 0)  # zeros too, for alerts
        requests = GaugeMetricFamily(
            "baton_node_requests", "Requests that wait and run on the node.", labels=["node", "role", "state"]
        )
        for record in self._nodes():
            key = (record.role, record.lifecycle)
            counts[key] = counts.get(key, 0) + 1
            labels = [record.name, record.role.name.lower()]
            requests.add_metric([*labels, "waiting"], record.load.waiting_requests)
            requests.add_metric([*labels, "running"], record.load.running_requests)
        for (role, state), count in counts.items():
            there.add_metric([role.name.lower(), state.name.lower()], count)
        yield there
        yield requests
        yield from self._memory()

    def _memory(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "baton_node_blocks", "KV blocks by owner, as the node last reported.", labels=["node", "role", "class"]
        )
        for record in self._nodes():
            for name in BLOCK_CLASSES:
                labels = [record.name, record.role.name.lower(), name]
                family.add_metric(labels, getattr(record.load.blocks, name))
        yield family
        pinned = GaugeMetricFamily(
            "baton_node_blocks_pinned", "Of the cached blocks, those that pins keep.", labels=["node", "role"]
        )
        for record in self._nodes():
            pinned.add_metric([record.name, record.role.name.lower()], record.load.blocks.pinned)
        yield pinned
        host = GaugeMetricFamily(
            "baton_node_host_blocks", "Blocks of host memory below the KV blocks.", labels=["node", "role", "class"]
        )
        swapped_out = GaugeMetricFamily(
            "baton_node_swapped_out_requests", "Running requests whose KV is not all on the device now.",
            labels=["node", "role"],
        )  # fmt: skip
        for record in self._nodes():
            labels = [record.name, record.role.name.lower()]
            host.add_metric([*labels, "filled"], record.load.host_blocks_filled)
            host.add_metric([*labels, "free"], record.load.host_blocks_free)
            swapped_out.add_metric(labels, record.load.swapped_out_requests)
        yield host
        yield swapped_out
        given_up = GaugeMetricFamily(
            "baton_node_transports_given_up",
            "Transports that the node no longer offers to some peer because they kept failing, over its peers.",
            labels=["node", "role"],
        )
        for record in self._nodes():
            given_up.add_metric([record.name, record.role.name.lower()], record.load.transports_given_up)
        yield given_up
        lag = GaugeMetricFamily(
            "baton_node_control_loop_lag_seconds",
            "The longest that the node's control thread was late in the last 30 s or more.",
            labels=["node", "role"],
        )
        for record in self._nodes():
            lag.add_metric([record.name, record.role.name.lower()], record.load.control_loop_lag_ms_max / 1000)
        yield lag
