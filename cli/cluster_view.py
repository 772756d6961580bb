"""What the commands see of a cluster: who the directory knows, and what each of them says of itself.

The plain data for `-o json` is part of the command's interface: keys are never renamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
from batonpb import common_pb2, node_pb2, node_pb2_grpc

from baton.clock import Clock
from baton.directory_client import DirectoryClientConfig
from baton.directory_setting import describe_directory, open_directory
from baton.errors import BatonError, Reason
from baton.rpc import ChannelLimits, Channels, rpc_errors
from baton.wire import NodeRecord, Role

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


_T = TypeVar("_T")

DIRECTORY_DEFAULT: Final = "127.0.0.1:7070"
STATUS_CALLS_MAX: Final = 32
"""Nodes asked at a time."""
COMPLETION_MS_MAX: Final = 500
"""How long the completion of a node's name may hold the shell up."""
UNREACHABLE_HINT: Final = (
    "The directory drops a process that has ended within seconds. One that stays here is stopped, or cannot be reached "
    "from this machine; the cluster itself may reach it all the same."
)
"""What to make of nodes that do not answer this command."""

directory_option: Final = click.option(
    "--directory", default=DIRECTORY_DEFAULT, show_default=True, metavar="HOST:PORT|REDIS_URL",
    help="Where the directory is.",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is known of one node: its record in the directory, and its own answer or why there is none."""

    record: NodeRecord
    status: node_pb2.NodeStatus | None
    problem: str = ""


async def list_records(directory: str, *, channels: Channels, call_ms_max: int) -> tuple[NodeRecord, ...]:
    """Who the directory knows. Raises BatonError."""
    config = DirectoryClientConfig(call_ms_max=call_ms_max)
    client = open_directory(directory, channels=channels, clock=Clock(), config=config)
    try:
        return (await client.list()).records
    except BatonError as error:
        if error.reason not in (Reason.PEER_UNREACHABLE, Reason.DEADLINE):
            raise
        raise BatonError(
            error.reason,
            f"No directory answers at {describe_directory(directory)} within {call_ms_max} ms. Is the cluster running "
            "(`baton up`)? Name another place with --directory HOST:PORT.",
        ) from error
    finally:
        await client.close()


async def find_record(name: str, directory: str, *, channels: Channels, call_ms_max: int) -> NodeRecord:
    """One node by its name. Raises BatonError UNKNOWN_NODE, or what `list_records` raises."""
    records = await list_records(directory, channels=channels, call_ms_max=call_ms_max)
    for record in records:
        if record.name == name:
            return record
    known = ", ".join(record.name for record in records) or "nobody"
    raise BatonError(
        Reason.UNKNOWN_NODE,
        f"The directory at {describe_directory(directory)} does not know '{name}'. It knows {known}.",
    )


async def view_nodes(directory: str, *, channels: Channels, call_ms_max: int) -> list[NodeView]:
    """Ask the directory, then every node, STATUS_CALLS_MAX at a time.

    Raises BatonError where the directory does not answer; a node that does not answer is a NodeView with a problem.
    """
    records = await list_records(directory, channels=channels, call_ms_max=call_ms_max)
    places = asyncio.Semaphore(STATUS_CALLS_MAX)

    async def view(record: NodeRecord) -> NodeView:
        async with places:
            return await view_node(record, channels=channels, call_ms_max=call_ms_max)

    return list(await asyncio.gather(*map(view, records)))


async def view_node(record: NodeRecord, *, channels: Channels, call_ms_max: int) -> NodeView:
    """Ask one node; its problem where it does not answer, or where it is another process by now."""
    try:
        status = await get_status(record.endpoint, channels=channels, call_ms_max=call_ms_max)
    except BatonError as error:
        return NodeView(record=record, status=None, problem=error.message)
    if status.record.incarnation != record.incarnation:
        return NodeView(record=record, status=None, problem=f"Another process answers at {record.endpoint}.")
    return NodeView(record=record, status=status)


async def get_status(endpoint: str, *, channels: Channels, call_ms_max: int) -> node_pb2.NodeStatus:
    """One node's answer. Raises BatonError."""
    with rpc_errors(f"The process at {endpoint}"):
        stub = node_pb2_grpc.NodeStub(channels.get(endpoint))
        status: node_pb2.NodeStatus = await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=call_ms_max / 1e3)
    return status


def run_with_channels(work: Callable[[Channels], Awaitable[_T]]) -> _T:
    """Run `work` on a loop of its own, with channels that are closed at its end."""

    async def run() -> _T:
        channels = Channels(limits=ChannelLimits())
        try:
            return await work(channels)
        finally:
            await channels.close()

    return asyncio.run(run())


def complete_node(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of nodes for the shell's completion: none where the directory does not answer at once."""
    directory = str(ctx.params.get("directory") or DIRECTORY_DEFAULT)
    try:
        records = run_with_channels(
            lambda channels: list_records(directory, channels=channels, call_ms_max=COMPLETION_MS_MAX)
        )
    except BatonError:
        return []
    return [record.name for record in records if record.name.startswith(incomplete)]
