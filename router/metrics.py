"""The router's metrics for Prometheus: what it sees of its requests, and what the nodes report to the directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Final

from batonpb import common_pb2, inference_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton import baton_version
from baton.errors import Reason
from baton.http2_front import Ended
from baton.lifecycle import Lifecycle
from baton.loop_lag import BUCKETS_MS
from baton.wire import LOCAL_TRANSPORT, BlockLoad, NodeRecord, Role
from router.doors import Door
from router.keys import KeyUse, Limit
from router.request import ObservedRequest

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL_BUCKETS_S: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
E2E_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
HANDOFF_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
BLOCK_CLASSES: Final = tuple(each.name for each in fields(BlockLoad) if each.name not in ("promised", "pinned"))
ATTACH_OUTCOMES: Final = ("taken", "computed_again", "refused")
_NODE_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.MIXED)
_OUTCOMES: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


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
        self.requests = self._counter(
            "baton_requests",
            "Requests that have ended, by outcome: stop, length, cancelled (the client left), deadline, or another "
            "error's reason.",
            "outcome",
        )
        self.resumptions = self._counter(
            "baton_resumptions", "Attempts that failed after their grant, and were taken up on other nodes."
        )
        self.attaches = self._counter(
            "baton_attaches",
            "Calls of clients that came back for an answer, by outcome: taken (over from its node), computed_again, or "
            "refused.",
            "outcome",
        )
        self.connections_refused = self._counter(
            "baton_connections_refused",
            "Connections of clients closed at once for want of a place, by door: grpc or http.",
            "door",
        )
        self.connections_ended = self._counter(
            "baton_connections_ended",
            "Connections of gRPC clients ended for what they sent, or sent too fast or too late, by why.",
            "why",
        )
        for door in Door:
            self.connections_refused.labels(door.label)
        for why in Ended:
            if why is not Ended.LEFT:
                self.connections_ended.labels(why.name.lower())
        for outcome in ATTACH_OUTCOMES:
            self.attaches.labels(outcome)
        self.corrupt = self._counter(
            "baton_handoffs_corrupt",
            "Handoffs refused because sampled records did not arrive as sent: hardware of the pair is failing.",
            "prefill_node", "decode_node", "transport",
        )  # fmt: skip
        self.queued = self._gauge("baton_requests_queued", "Requests without their first token yet.")
        self.in_line = self._gauge("baton_requests_in_line", "Of these, requests that wait in line for room on nodes.")
        self.line_s = self._histogram(
            "baton_line_seconds", "How long requests that had to wait in line did so, each time.", E2E_BUCKETS_S
        )
        self.running = self._gauge("baton_requests_running", "Requests between first and last token.")
        self.ttft_s = self._histogram(
            "baton_ttft_seconds", "From a request's arrival to its first token.", TTFT_BUCKETS_S
        )
        self.itl_s = self._histogram(
            "baton_itl_seconds", "Gaps between tokens; tokens that come together share theirs.", ITL_BUCKETS_S
        )
        self.e2e_s = self._histogram(
            "baton_e2e_seconds", "From the arrival of a request that was answered to its last token.", E2E_BUCKETS_S
        )
        self.prompt_tokens = self._counter("baton_prompt_tokens", "Tokens of prompts answered.")
        self.cached_tokens = self._counter(
            "baton_prefix_hit_tokens", "Of these, tokens that the prefill node had cached."
        )
        self.skipped_tokens = self._counter(
            "baton_prefix_skipped_tokens", "Of these, tokens never sent: the decode node had them cached."
        )
        self.output_tokens = self._counter("baton_output_tokens", "Tokens of answers.")
        self.kept = self._counter("baton_requests_local", "Requests that a mixed node ran without a handoff.")
        self.loop_lag_s = self._histogram(
            "baton_control_loop_lag_seconds",
            "How late this router's control thread was, at each look.",
            tuple(ms / 1000 for ms in BUCKETS_MS),
        )
        self._open_transfers()
        for collector in (_NodeCollector(nodes), _KeyCollector(keys)):
            self.registry.register(collector)
        self._watch_process(directory_lost)

    def _open_transfers(self) -> None:
        self.transfer_bytes = self._counter(
            "baton_transfer_bytes", "KV bytes written from prefill to decode nodes.", "transport"
        )
        self.blocks_written = self._counter(
            "baton_transfer_blocks", "Prompt blocks written from prefill to decode nodes.", "transport"
        )
        self.blocks_skipped = self._counter(
            "baton_transfer_blocks_skipped", "Prompt blocks never sent: the decode node had them cached.", "transport"
        )
        self.transfer_s = self._histogram(
            "baton_transfer_exposed_seconds",
            "From the end of the prefill's last layer to the commit accepted.",
            HANDOFF_BUCKETS_S,
            "transport",
        )

    def _watch_process(self, directory_lost: Callable[[], bool]) -> None:
        self._gauge("baton_build_info", "1, for the version of this router.", "version").labels(baton_version()).set(1)
        reached = self._gauge("baton_directory_reached", "0 while the directory is out of this router's reach, else 1.")
        reached.set_function(lambda: not directory_lost())
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def received(self, now_s: float) -> ObservedRequest:
        """A request has come in."""
        return _Observed(self, now_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format. On any thread: what it reads is replaced, not changed."""
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

    def waits(self) -> None:
        self._metrics.in_line.inc()

    def waited(self, waited_s: float) -> None:
        self._metrics.in_line.dec()
        self._metrics.line_s.observe(waited_s)

    def resumed(self) -> None:
        self._metrics.resumptions.inc()

    def attached(self, outcome: str) -> None:
        self._metrics.attaches.labels(outcome).inc()

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
        requests = _family("requests", "Requests that wait and run on the node.", "state")
        blocks = _family("blocks", "KV blocks by owner, as the node last reported.", "class")
        pinned = _family("blocks_pinned", "Of the cached blocks, those that pins keep.")
        host = _family("host_blocks", "Blocks of host memory below the KV blocks.", "class")
        swapped_out = _family("swapped_out_requests", "Running requests whose KV is not all on the device now.")
        given_up = _family(
            "transports_given_up",
            "Transports that the node no longer offers to some peer because they kept failing, over its peers.",
        )
        lag = _family(
            "control_loop_lag_seconds", "The longest that the node's control thread was late in the last 30 s or more."
        )
        for record in self._nodes():
            if record.role is Role.ROUTER:
                continue
            counts[record.role, record.lifecycle] += 1
            labels, load = [record.name, record.role.name.lower()], record.load
            requests.add_metric([*labels, "waiting"], load.waiting_requests)
            requests.add_metric([*labels, "running"], load.running_requests)
            for name in BLOCK_CLASSES:
                blocks.add_metric([*labels, name], getattr(load.blocks, name))
            pinned.add_metric(labels, load.blocks.pinned)
            host.add_metric([*labels, "filled"], load.host_blocks_filled)
            host.add_metric([*labels, "free"], load.host_blocks_free)
            swapped_out.add_metric(labels, load.swapped_out_requests)
            given_up.add_metric(labels, load.transports_given_up)
            lag.add_metric(labels, load.control_loop_lag_ms_max / 1000)
        for (role, state), count in counts.items():
            there.add_metric([role.name.lower(), state.name.lower()], count)
        yield from (there, requests, blocks, pinned, host, swapped_out, given_up, lag)


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


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"baton_node_{name}", text, labels=["node", "role", *labels])
