"""The router's figures about requests that a mixed node kept."""

from __future__ import annotations

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
