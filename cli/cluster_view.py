"""What the commands see of a cluster: who the directory knows, and what each of them says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import click
from batonpb import node_pb2, node_pb2_grpc

from baton.clock import SystemClock
from baton.directory_client import DirectoryClientConfig
from baton.directory_setting import describe_directory, open_directory
from baton.errors import BatonError, Reason
from baton.rpc_client import ChannelLimits, Channels, rpc_errors
from baton.wire import NodeRecord

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
    client = open_directory(directory, channels=channels, clock=SystemClock(), config=config)
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
