"""What is known of a node, as plain data for `-o json`. Part of the command's interface: keys are never renamed."""

from __future__ import annotations

from typing import Any, Final

from batonpb import common_pb2, node_pb2

from baton.wire import Role
from cli.cluster_view import NodeView

_LEFT: Final = (
    ("requests", "requests"),
    ("answers_unacknowledged", "answers not acknowledged by their router"),
    ("grants_received", "grants received"),
    ("grants_written", "grants written to"),
    ("unacknowledged_writes", "unacknowledged writes"),
)

_ONE: Final = {
    "requests": "request",
    "answers not acknowledged by their router": "answer not acknowledged by its router",
    "grants received": "grant received",
    "grants written to": "grant written to",
    "unacknowledged writes": "unacknowledged write",
}


def state_name(status: node_pb2.NodeStatus) -> str:
    """ "ready", "draining", ..."""
    return common_pb2.Lifecycle.Name(status.record.lifecycle).removeprefix("LIFECYCLE_").lower()


def left_behind(status: node_pb2.NodeStatus) -> dict[str, int]:
    """What holds a drain back (`baton.drain.Holdings.left`), by the words of the text output."""
    counts = {words: int(getattr(status, name)) for name, words in _LEFT}
    counts["grants received"] -= status.grants_quarantined
    return {words: count for words, count in counts.items() if count}


def left_text(status: node_pb2.NodeStatus) -> str:
    """The same in a line; "nothing" where nothing is left."""
    told = [
        f"{count} {_ONE.get(words, words) if count == 1 else words}" for words, count in left_behind(status).items()
    ]
    return ", ".join(told) or "nothing"


def hit_percent(prefixes: node_pb2.PrefixStatus) -> float | None:
    """Prompt tokens that were cached, of all admitted since the node's start; None before the first."""
    return 100 * prefixes.hit_tokens / prefixes.prompt_tokens if prefixes.prompt_tokens else None


def node_data(view: NodeView) -> dict[str, Any]:
    """One node: its record, and its own answer (null, with `problem`, where there is none)."""
    record = view.record
    return {
        "name": record.name,
        "role": record.role.name.lower(),
        "endpoint": record.endpoint,
        "incarnation": f"{record.incarnation:016x}",
        "status": None if view.status is None else status_data(view.status, record.role),
        "problem": view.problem or None,
    }


def status_data(status: node_pb2.NodeStatus, role: Role) -> dict[str, Any]:
    """A node's own answer."""
    record, load = status.record, status.record.load
    data: dict[str, Any] = {
        "state": state_name(status),
        "safe_to_delete": status.safe_to_delete,
        "ending": status.ending,
        "ended_empty": status.ended_empty,
        "story": status.story,
        "waiting": load.waiting_requests,
        "running": load.running_requests,
        "requests": status.requests,
        "answers_unacknowledged": status.answers_unacknowledged,
        "grants_received": status.grants_received,
        "grants_quarantined": status.grants_quarantined,
        "grants_written": status.grants_written,
        "unacknowledged_writes": status.unacknowledged_writes,
        "conservation_errors": status.conservation_errors,
        "counters": {counter.name: counter.value for counter in status.counters},
    }
    if role is Role.ROUTER:
        return data
    names = ("free", "cached", "held", "writer_owned", "quarantined", "promised", "pinned")
    return {
        **data,
        "blocks": {name: getattr(load.blocks, name) for name in names},
        "engine": {
            "facts": {fact.name: fact.text for fact in status.engine.facts},
            "padding_blocks": status.engine.padding_blocks,
        },
        "prefixes": {
            "prompt_tokens": status.prefixes.prompt_tokens,
            "hit_tokens": status.prefixes.hit_tokens,
            "pinned_blocks": status.prefixes.pinned_blocks,
            "pinned_blocks_max": status.prefixes.pinned_blocks_max,
            "pins": [_pin_data(pin) for pin in status.prefixes.pins],
        },
        "model": {"name": record.model.name, "fingerprint": record.model.fingerprint},
        "transports": list(record.transports),
        "pairs": [_pair_data(pair) for pair in status.pairs],
        "writers": [_writer_data(writer) for writer in status.writers],
    }


def _pin_data(pin: node_pb2.PinStatus) -> dict[str, Any]:
    return {
        "name": pin.name,
        "blocks": pin.blocks,
        "blocks_pinned": pin.blocks_pinned,
        "lease_left_ms": pin.lease_left_ms,
    }


def _pair_data(pair: node_pb2.PairStatus) -> dict[str, Any]:
    return {
        "peer": pair.peer,
        "peer_incarnation": f"{pair.peer_incarnation:016x}",
        "transport": pair.transport or None,
        "epoch": pair.epoch,
        "bytes_moved": pair.bytes_moved,
        "transports_given_up": list(pair.transports_given_up),
        "given_up_left_ms": list(pair.given_up_left_ms),
        "link_failures": pair.link_failures,
        "handoffs_corrupt": pair.handoffs_corrupt,
        "records_checksummed": pair.records_checksummed,
        "link_open": pair.link_open,
        "moved": _moved_data(pair.moved),
        "moved_recently": _moved_data(pair.moved_recently),
        "rejected_transports": [{"transport": other.transport, "why": other.why} for other in pair.rejected_transports],
    }


def _moved_data(moved: node_pb2.MovedBytes) -> dict[str, Any]:
    return {
        "bytes": moved.nbytes,
        "moving_us": moved.moving_us,
        "bytes_per_s": moved.bytes_per_s if moved.moving_us else None,
    }


def _writer_data(writer: node_pb2.WriterStatus) -> dict[str, Any]:
    return {
        "writer": writer.writer,
        "writer_incarnation": f"{writer.writer_incarnation:016x}",
        "host": writer.host,
        "transport": writer.transport,
        "grants": writer.grants,
        "blocks_granted": writer.blocks_granted,
        "blocks_quarantined": writer.blocks_quarantined,
        "taken_back_ms": writer.taken_back_ms or None,
        "quarantined_ms": writer.quarantined_ms or None,
        "why": writer.why or None,
        "bytes_landed": writer.bytes_landed,
        "landed_per_s": writer.landed_per_s,
    }
