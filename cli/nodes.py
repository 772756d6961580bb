"""`baton nodes`: who the directory knows, and what each of them says it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import click
from batonpb import common_pb2, node_pb2, node_pb2_grpc

from baton.clock import SystemClock
from baton.directory_client import DirectoryClientConfig
from baton.directory_setting import describe_directory, open_directory
from baton.errors import BatonError, Reason
from baton.rpc_client import ChannelLimits, Channels, rpc_errors
from baton.wire import NodeRecord, Role
from cli.table import format_table

STATUS_CALLS_MAX: Final = 32
"""Nodes asked at a time."""
_HEADER: Final = (
    "NAME", "ROLE", "STATE", "ENDPOINT", "INCARNATION", "WAITING", "RUNNING",
    "FREE", "CACHED", "HELD", "WRITER", "QUARANTINED", "GRANTS", "ERRORS",
)  # fmt: skip
_RIGHT: Final = frozenset(range(5, len(_HEADER)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is known of one node: its record in the directory, and its own answer or why there is none."""

    record: NodeRecord
    status: node_pb2.NodeStatus | None
    problem: str = ""


async def view_nodes(directory: str, *, channels: Channels, call_ms_max: int) -> list[NodeView]:
    """Ask the directory, then every node, STATUS_CALLS_MAX at a time.

    Raises BatonError where the directory does not answer; a node that does not answer is a NodeView with a problem.
    """
    config = DirectoryClientConfig(call_ms_max=call_ms_max)
    client = open_directory(directory, channels=channels, clock=SystemClock(), config=config)
    try:
        snapshot = await client.list()
    finally:
        await client.close()
    places = asyncio.Semaphore(STATUS_CALLS_MAX)

    async def view(record: NodeRecord) -> NodeView:
        async with places:
            try:
                status = await get_status(record.endpoint, channels=channels, call_ms_max=call_ms_max)
            except BatonError as error:
                return NodeView(record=record, status=None, problem=error.message)
        if status.record.incarnation != record.incarnation:
            return NodeView(record=record, status=None, problem="another process answers at its endpoint")
        return NodeView(record=record, status=status)

    return list(await asyncio.gather(*map(view, snapshot.records)))


async def get_status(endpoint: str, *, channels: Channels, call_ms_max: int) -> node_pb2.NodeStatus:
    """One node's answer. Raises BatonError."""
    with rpc_errors(endpoint):
        stub = node_pb2_grpc.NodeStub(channels.get(endpoint))
        status: node_pb2.NodeStatus = await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=call_ms_max / 1e3)
    return status


@click.command()
@click.option(
    "--directory",
    default="127.0.0.1:7070",
    show_default=True,
    metavar="HOST:PORT|REDIS_URL",
    help="Where the directory is.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
    metavar="SECONDS", help="How long the directory, and then each node, may take to answer.",
)  # fmt: skip
def nodes(directory: str, timeout_s: float) -> None:
    """Show who is in the cluster and what each node holds.

    One line a node: what waits and runs there, its KV blocks by owner (free, cached for prefixes, held by requests,
    owned by a remote writer, quarantined), its open grants, and violations of block conservation, which must be 0.

    \b
    Example:
      baton nodes --directory 127.0.0.1:7070
    """
    views = asyncio.run(_view(directory, round(timeout_s * 1e3)))
    if not views:
        click.echo(f"The directory at {describe_directory(directory)} knows no node.")
        return
    click.echo(format_table(_HEADER, [_row(view) for view in views], right=_RIGHT))
    for view in views:
        if view.problem:
            click.echo(f"{view.record.name}: unreachable: {view.problem}")


async def _view(directory: str, call_ms_max: int) -> list[NodeView]:
    channels = Channels(limits=ChannelLimits())
    try:
        return await view_nodes(directory, channels=channels, call_ms_max=call_ms_max)
    except BatonError as error:
        if error.reason not in (Reason.PEER_UNREACHABLE, Reason.DEADLINE):
            raise
        raise BatonError(
            error.reason,
            f"No directory answers at {describe_directory(directory)} within {call_ms_max} ms. Is the cluster running "
            "(`baton up`)? Name another place with --directory.",
        ) from error
    finally:
        await channels.close()


def _row(view: NodeView) -> list[str]:
    record, status = view.record, view.status
    named = [record.name, record.role.name.lower()]
    where = [record.endpoint, f"{record.incarnation:016x}"]
    if status is None:
        return [*named, "unreachable", *where, *["-"] * len(_RIGHT)]
    own = status.record
    state = common_pb2.Lifecycle.Name(own.lifecycle).removeprefix("LIFECYCLE_").lower()
    row = [*named, state, *where, str(own.load.waiting_requests), str(own.load.running_requests)]
    if record.role is Role.ROUTER:
        return [*row, *["-"] * (len(_HEADER) - len(row))]
    blocks = own.load.blocks
    counts = (blocks.free, blocks.cached, blocks.held, blocks.writer_owned, blocks.quarantined)
    grants = status.grants_received + status.grants_written
    return [*row, *map(str, counts), str(grants), str(status.conservation_errors)]
