"""Settings of earlier versions: which have another name now, and which are fixed. A file that still has one is refused
with a message that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

_LINK: Final = {
    "connect_ms_max": 5000,
    "ABANDONED_GRANTS_MAX": 1 << 20,
    "seals_waiting_max": 4096,
    "drain_ms_max": 2000,
    "bye_ms_max": 2000,
}
_PORT: Final = {"handshakes_max": 256, "handshake_ms_max": 5000, "ACCEPTS_PER_WAKE_MAX": 32, "accept_pause_ms": 100}
_SOCKET: Final = {
    "socket.KEEPALIVE_IDLE_S": 10,
    "socket.KEEPALIVE_INTERVAL_S": 5,
    "socket.KEEPALIVE_PROBES_MAX": 4,
    "socket.USER_TIMEOUT_MS": 20_000,
}
_RDMA_QUEUE: Final = {
    "rdma.send_wrs_max": 128,
    "rdma.seals_max": 64,
    "rdma.HOP_LIMIT": 64,
    "rdma.device_check_ms": 500,
}
_TRANSPORTS: Final[Mapping[tuple[str, str], Mapping[str, int]]] = {
    ("shm", "shm_receiver"): {**_PORT, "handshake_ms_max": 2000, "MESSAGES_PER_WAKE_MAX": 64},
    ("rdma", "rdma_receiver"): {**_PORT, **_SOCKET, **_RDMA_QUEUE},
    ("ucx", "ucx_receiver"): {
        **_PORT,
        **_SOCKET,
        "handshake_ms_max": 10_000,
        "seals_max=SEALS_PARTIAL_MAX": 512,
        "SEAL_POLL_US": 200,
    },
    ("tcp", "tcp_receiver"): {
        **_PORT,
        **_SOCKET,
        "handshake_ms_max": 2000,
        "SEALS_PARTIAL_MAX": 4096,
        "stream.frame_bytes_max=FRAME_BYTES_MAX": 1 << 25,
        "stream.frame_segments_max=FRAME_SEGMENTS_MAX": 1024,
        "stream.ACK_FRAMES_MAX": 16,
        "stream.OUTBOX_BYTES_MAX": 1 << 16,
    },
    ("shm", "shm_writer"): {
        **_LINK,
        "CONNECT_RETRY_MS": 20,
        "copy_chunk_ops_max": 1024,
        "copy_chunk_bytes_max": 16 << 20,
        "outbox_messages_max=seals_waiting_max": 4096,
    },
    ("rdma", "rdma_writer"): {
        **_LINK,
        **_SOCKET,
        "chain_wrs_max": 32,
        "chain_bytes_max": 4 << 20,
        "wr_bytes_max": 1 << 20,
        "on_the_way_bytes_max": 32 << 20,
        "spin_us_max": 50,
        **_RDMA_QUEUE,
    },
    ("ucx", "ucx_writer"): {
        **_LINK,
        **_SOCKET,
        "connect_ms_max": 10_000,
        "transfer_writes_max=chain_wrs_max": 4096,
        "transfer_bytes_max=chain_bytes_max": 16 << 20,
        "on_the_way_bytes_max": 64 << 20,
        "SEALS_MAX": 256,
        "POLL_US_MIN": 50,
        "POLL_US_MAX": 1000,
    },
    ("tcp", "tcp_writer"): {**_LINK, **_SOCKET, "AT_ONCE_BYTES_MAX": 1 << 16},
}
"""By the first words of the key. A name in capitals is a constant's; where the constant is called otherwise than the
key was, its name follows."""

_OTHERS: Final[Mapping[str, float]] = {
    "staging.chunk_bytes": 1 << 20,
    "staging.link_chunks": 8,
    "staging.stream_chunks": 4,
    "engine.overtakes_max=bypasses_max": 32,
    "engine.pins.lease_ms_max": 600_000,
    "writer.retry_ms_min": 20,
    "writer.retry_ms_max": 1_000,
    "writer.drift_per_mille": 20,
    "writer.unacked_bytes_max": 1 << 30,
    "writer.pinned_blocks_max": 65_536,
    "fallback.FAILURES_MAX": 2,
    "fallback.FAILURE_WINDOW_MS": 60_000,
    "membership.backoff_ms_min": 50,
    "membership.backoff_ms_max": 1_000,
    "liveness.jitter_percent=JITTER_MAX": 0.2,
    "liveness.reconnect_pause_ms": 50,
    "liveness.REFUSALS_MAX": 3,
    "liveness.barren_ms_max=failed_stream_ms_max": 1_000,
    "liveness.barren_max=failed_streams_max": 6,
    "rpc.RPCS_UNTIMED_MAX": 1024,
    "rpc.busy_retry_ms": 200,
    "rpc.client_ping_ms=heartbeat_ms of CLIENT_LIVENESS": 10_000,
    "rpc.client_answer_ms_max=answer_ms_max of CLIENT_LIVENESS": 5_000,
    "rpc.handler_end_ms_max": 5_000,
    "pod.tries_max": 4,
    "pod.retry_ms_min": 200,
    "pod.retry_ms_max": 2_000,
    "decode_tries_max": 3,
    "busy_retry_ms": 200,
    "rate_age_ms_max": 10_000,
    "spill.copy_blocks_max": 64,
    "spill.pinned_bytes_max": 1 << 40,
    "finished_max": 4_096,
    "resumed_wait_ms": 1_500,
    "resumed_hold_ms_max": 5_000,
    "http_send_buffer_bytes=SEND_BUFFER_BYTES": 131_072,
    "http_body_ms_max": 60_000,
    "placement_retry_ms": 50,
    "HANDED_OFF_MS_MAX": 1_000,
    "retries.resumptions_per_s": 100,
    "retries.resumptions_burst": 256,
    "retries.resume_jitter_ms_max": 50,
    "retries.resumptions_waiting_max": 1_024,
    "retries.resolve_ms_max": 500,
    "retries.resolve_tries_max": 2,
    "retries.RESOLVES_MAX": 4,
    "cancel_ms_max": 1_000,
    "cancel_tries_max": 3,
    "pins.call_ms_max": 2_000,
    "service.limits.records_max": 4096,
    "service.limits.ttl_ms_min": 200,
    "service.limits.ttl_ms_max": 60_000,
    "service.limits.removals_kept_max": 1024,
    "service.limits.gone_kept_max": 4096,
    "service.watchers_max": 1024,
    "service.watch_interval_ms": 10,
    "service.expire_interval_ms": 100,
    "service.standstill_ms_min": 400,
}
_RDMA: Final = ("device", "qps", "ack_timeout_code", "retries_max", "traffic_class")


def _renamed() -> Iterator[tuple[str, str]]:
    yield "resumed_queue_max", "queue_max"
    yield "engine.gpu.steps_ahead", "engine.gpu.overlap_steps"
    for name in _RDMA:
        for section in ("rdma", "rdma_writer", "rdma_receiver"):
            yield f"{section}.rdma.{name}", f"rdma.{name}"
    for transport in ("shm", "rdma", "ucx", "tcp"):
        for section in (transport, f"{transport}_receiver"):
            yield f"{section}.connections_max", "receiver.connections_max"
            yield f"{section}.pairs_max", "receiver.pairs_max"
    yield "shm_writer.copy_threads", "shm.copy_threads"
    yield "tcp_writer.streams", "tcp.streams"
    yield "ucx_writer.tls", "ucx.tls"
    yield "ucx_receiver.tls", "ucx.tls"


def _fixed() -> Iterator[tuple[str, tuple[str, float]]]:
    """Keys; constants and their values."""
    entries: dict[str, float] = {}
    for sections, keys in _TRANSPORTS.items():
        entries |= {f"{section}.{name}": value for section in sections for name, value in keys.items()}
    for entry, value in (entries | dict(_OTHERS)).items():
        key, _, constant = entry.partition("=")
        yield key.lower(), (constant or key.rpartition(".")[2], value)


RENAMED: Final[Mapping[str, str]] = dict(_renamed())
FIXED: Final[Mapping[str, tuple[str, float]]] = dict(_fixed())
FORMER: Final[Mapping[str, str]] = {
    **{
        key: f"is no longer a setting: it is fixed at {value} (constant {constant}). Remove it."
        for key, (constant, value) in FIXED.items()
    },
    **{key: f"is now called {name}." for key, name in RENAMED.items()},
    "pins.warm_configured": "is no longer a setting: pins of the configuration are computed at the start. Remove it.",
    "prefix_blocks_max": "is no longer a setting: nodes say what they have cached. Remove it.",
}
"""What to say of each, behind the place where it is set."""
