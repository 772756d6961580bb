"""The router's figures: gaps between tokens, and requests that a mixed node kept."""

from __future__ import annotations

import os
import subprocess

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError
from baton.http2_front import Ended
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import (
    LOCAL_TRANSPORT,
    MovedLoad,
    NodeLoad,
    NodeRecord,
    Role,
    TierLoad,
    Times,
    record_from_proto,
    record_to_proto,
)
from router.doors import Door
from router.keys import ApiKey, KeyUse
from router.metrics import RouterMetrics


def test_a_kept_request_is_no_transfer() -> None:
    """Counted by itself; bytes, skipped blocks and exposed time are of handoffs only."""
    metrics = RouterMetrics(list)
    for transport, nbytes in ((LOCAL_TRANSPORT, 0), ("shm", 640), (LOCAL_TRANSPORT, 0)):
        observed = metrics.received(0.0)
        observed.tokens(1.0, 1)
        stats = inference_pb2.RequestStats(transport=transport, bytes_written=nbytes)
        observed.finished(common_pb2.FINISH_REASON_LENGTH, stats)
        observed.ended()
    text = metrics.text()[0].decode()
    assert "baton_requests_local_total 2.0\n" in text
    assert 'baton_transfer_bytes_total{transport="shm"} 640.0\n' in text
    assert 'baton_transfer_exposed_seconds_count{transport="shm"} 1.0\n' in text
    assert 'transport="local"' not in text


def test_every_token_but_the_first_has_a_gap() -> None:
    """Three tokens come at once and are the first, since the router was busy; two come 0.4 s later, and one alone."""
    metrics = RouterMetrics(list)
    observed = metrics.received(0.0)
    observed.tokens(1.0, 3)
    observed.tokens(1.4, 2)
    observed.tokens(1.5, 1)
    figures = dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines())
    assert (figures["baton_ttft_seconds_count"], figures["baton_ttft_seconds_sum"]) == ("1.0", "1.0")
    assert figures["baton_itl_seconds_count"] == "5.0"
    assert float(figures["baton_itl_seconds_sum"]) == pytest.approx(0.5)


def test_a_gap_of_a_bound_is_in_its_bucket() -> None:
    """Prometheus' buckets have their upper bounds in them, and count what is below; four tokens share 0.04 s."""
    metrics = RouterMetrics(list)
    observed = metrics.received(0.0)
    observed.tokens(0.0, 1)
    observed.tokens(0.04, 4)
    observed.tokens(100.0, 1)
    figures = dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines())
    buckets = [figures[f'baton_itl_seconds_bucket{{le="{le}"}}'] for le in ("0.005", "0.01", "5.0", "+Inf")]
    assert buckets == ["0.0", "4.0", "4.0", "5.0"]
    assert figures["baton_ttft_seconds_count"] == "1.0"


def test_those_that_wait_in_line() -> None:
    """Two wait, one of them has its turn after 3 s."""
    metrics = RouterMetrics(list)
    one, other = metrics.received(0.0), metrics.received(0.0)
    for each in (one, other):
        each.waits()
    one.waited(3.0)
    figures = dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines())
    assert (figures["baton_requests_in_line"], figures["baton_requests_queued"]) == ("1.0", "2.0")
    assert (figures["baton_line_seconds_count"], figures["baton_line_seconds_sum"]) == ("1.0", "3.0")


def test_what_nodes_report_of_times_and_evictions() -> None:
    """Two promotions took 2 ms, one took a minute; one fetch took half a second; the region has evicted five blocks,
    two of them unused. The report has gone over the wire."""
    promotions, fetches = Times(), Times()
    for seconds in (0.002, 0.002, 60.0):
        promotions.add(seconds)
    fetches.add(0.5)
    host = TierLoad(
        tier="host", promotions=3, promotion_s=promotions.total_s, promotion_counts=tuple(promotions.counts)
    )
    record = NodeRecord(
        name=NodeName("prefill-0"),
        role=Role.PREFILL,
        incarnation=Incarnation(1),
        endpoint="127.0.0.1:1",
        lifecycle=Lifecycle.READY,
        sequence=1,
        load=NodeLoad(
            tiers=(TierLoad(tier="device", blocks_evicted=5, blocks_evicted_unused=2), host),
            moved=MovedLoad(fetches=1, fetch_s=fetches.total_s, fetch_counts=tuple(fetches.counts)),
        ),
    )
    assert record_from_proto(record_to_proto(record)) == record
    metrics = RouterMetrics(lambda: [record])
    figures = dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines())
    of, tier = 'node="prefill-0",role="prefill"', 'node="prefill-0",role="prefill",tier="host"'
    name = "baton_node_tier_promotion_seconds"
    found = [figures[f'{name}_bucket{{le="{le}",{tier}}}'] for le in ("0.001", "0.003", "3.0", "+Inf")]
    assert found == ["0.0", "2.0", "2.0", "3.0"]
    assert float(figures[f"{name}_sum{{{tier}}}"]) == pytest.approx(60.004)
    assert figures[f'baton_node_fetch_seconds_bucket{{le="0.3",{of}}}'] == "0.0"
    assert figures[f"baton_node_fetch_seconds_count{{{of}}}"] == "1.0"
    device = 'node="prefill-0",role="prefill",tier="device"'
    evicted = [figures[f'baton_node_tier_blocks{{{device},what="{what}"}}'] for what in ("evicted", "evicted_unused")]
    assert evicted == ["5.0", "2.0"]


def test_keys_by_their_names() -> None:
    """What each has been given and refused; one that has asked nothing has no line, nor has one that is gone."""
    used, idle = (KeyUse(ApiKey(name=name, sha256="0" * 64, concurrency=1), 0.0) for name in ("used", "idle"))
    used.admit(0.0, spread=0.0)
    with pytest.raises(BatonError):
        used.admit(0.0, spread=0.0)
    used.take_prompt(5, 0.0)
    used.take_output(3, 0.0)
    keys = [used, idle]
    metrics = RouterMetrics(list, keys=lambda: keys)
    lines = metrics.text()[0].decode().splitlines()
    assert [line for line in lines if line.startswith("baton_key_") and "_created" not in line] == [
        'baton_key_requests_total{key="used"} 1.0',
        'baton_key_tokens_total{key="used",kind="prompt"} 5.0',
        'baton_key_tokens_total{key="used",kind="output"} 3.0',
        'baton_key_refused_total{key="used",limit="concurrency"} 1.0',
        'baton_key_refused_total{key="used",limit="requests"} 0.0',
        'baton_key_refused_total{key="used",limit="tokens"} 0.0',
        'baton_key_running{key="used"} 1.0',
    ]
    keys.clear()
    assert 'key="' not in metrics.text()[0].decode()


def test_figures_of_processes_are_those_of_all_workers() -> None:
    """One worker runs, another one has just ended. Files are added up; the start is the parent's."""
    with subprocess.Popen(["sleep", "1000"]) as worker:
        try:
            gone = subprocess.Popen(["true"])
            gone.wait()
            metrics = RouterMetrics(list)
            found = []
            for pids in ([], [worker.pid, gone.pid]):
                metrics.worker_pids = pids
                found.append(dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines()))
            alone, summed = ({name: float(value) for name, value in each.items() if "#" not in name} for each in found)
            files = len(os.listdir(f"/proc/{worker.pid}/fd"))
            assert summed["process_open_fds"] == alone["process_open_fds"] + files
            assert summed["process_start_time_seconds"] == alone["process_start_time_seconds"]
            assert summed["process_cpu_seconds_total"] >= alone["process_cpu_seconds_total"]
        finally:
            worker.kill()


def test_connections_of_clients() -> None:
    """Every door and every reason to end one has a line from the start; a client that leaves is no reason."""
    metrics = RouterMetrics(list)
    metrics.connection_refused(Door.GRPC)
    metrics.connection_ended(Ended.LATE)
    figures = dict(line.rsplit(" ", 1) for line in metrics.text()[0].decode().splitlines())
    refused = [figures[f'baton_connections_refused_total{{door="{door}"}}'] for door in ("grpc", "http")]
    ended = {why: figures.get(f'baton_connections_ended_total{{why="{why.name.lower()}"}}') for why in Ended}
    assert refused == ["1.0", "0.0"]
    assert ended == dict.fromkeys(Ended, "0.0") | {Ended.LATE: "1.0", Ended.LEFT: None}
