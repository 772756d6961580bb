"""The router's figures: gaps between tokens, and requests that a mixed node kept."""

from __future__ import annotations

import pytest
from batonpb import common_pb2, inference_pb2

from baton.wire import LOCAL_TRANSPORT
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
    text = metrics.text().decode()
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
    figures = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    assert (figures["baton_ttft_seconds_count"], figures["baton_ttft_seconds_sum"]) == ("1.0", "1.0")
    assert figures["baton_itl_seconds_count"] == "5.0"
    assert float(figures["baton_itl_seconds_sum"]) == pytest.approx(0.5)
