"""`baton cache`: what the nodes have cached, by tier, and orders to empty one."""

from __future__ import annotations

import asyncio
from math import ceil
from typing import Any, Final

import click
from batonpb import cache_pb2, cache_pb2_grpc

from baton.errors import BatonError
from baton.rpc import Channels, rpc_errors
from baton.wire import NodeRecord, Role
from cli.invocation import EXIT_ERROR
from cli.nodes import (
    TIER_HEADER,
    TIER_RIGHT,
    UNREACHABLE_HINT,
    NodeView,
    complete_node,
    directory_option,
    find_record,
    list_records,
    run_with_channels,
    tier_row,
    view_nodes,
)
from cli.operator import Operator, operator_options
from cli.output import JSON, format_table, message_data, output_option, print_json
from cli.parameters import timeout_option

ALL: Final = "all"
_timeout_option: Final = timeout_option(10.0, "How long the directory, and then each node, may take to answer.")


@click.group(invoke_without_command=True)
@directory_option
@_timeout_option
@output_option
@click.pass_context
def cache(ctx: click.Context, directory: str, timeout_s: float, output: str) -> int:
    """Show what each node has cached, by tier: the device's region, host memory and the disk below it.

    One line a tier: its blocks and bytes, those that pins keep, the blocks that prompts have found there, the bytes
    that were copied down to it and up from it, the blocks that it has evicted (UNUSED: never found by a prompt), those
    that were evicted above before they were copied (LOST) or not taken (REFUSED), and how long it took on average to
    bring blocks up for a prompt. Totals are since the node's start.

    \b
    Example:
      baton cache --directory 127.0.0.1:7070
      baton cache empty prefill-0 --tier disk
    """
    if ctx.invoked_subcommand is not None:
        return 0
    views = run_with_channels(
        lambda channels: view_nodes(directory, channels=channels, call_ms_max=ceil(timeout_s * 1e3))
    )
    views = [view for view in views if view.record.role is not Role.ROUTER]
    if output == JSON:
        print_json([_data(view) for view in views])
        return 0
    rows = [
        [view.record.name, *tier_row(tier)]
        for view in views
        if view.status is not None
        for tier in view.status.record.load.tiers
    ]
    click.echo(format_table(("NAME", *TIER_HEADER), rows, right={column + 1 for column in TIER_RIGHT}))
    problems = [f"{view.record.name}: {view.problem}" for view in views if view.problem]
    if problems:
        click.echo("\n".join(["", *problems, UNREACHABLE_HINT]))
    return EXIT_ERROR if problems else 0


@cache.command()
@click.argument("node", metavar="NODE|all", shell_complete=complete_node)
@click.option("--tier", type=click.Choice(["host", "disk"]), required=True, help="Which tier.")
@directory_option
@operator_options
@_timeout_option
def empty(node: str, tier: str, directory: str, timeout_s: float, **operator: Any) -> int:
    """Forget what a tier of NODE, or of all nodes that have it, has cached. Pinned blocks stay.

    Running requests go on. What the device has cached goes down again when it is used again.

    \b
    Example:
      baton cache empty all --tier host
    """

    async def order(channels: Channels, record: NodeRecord) -> int:
        metadata = Operator(**operator).metadata(record.command_endpoint)
        request = cache_pb2.EmptyTierRequest(incarnation=record.incarnation, tier=tier)
        with rpc_errors(record.name):
            stub = cache_pb2_grpc.CacheStub(channels.get(record.command_endpoint))
            reply: cache_pb2.EmptyTierReply = await stub.EmptyTier(request, timeout=timeout_s, metadata=metadata)
        return int(reply.blocks)

    async def work(channels: Channels) -> list[tuple[str, int | BaseException]]:
        call_ms_max = ceil(timeout_s * 1e3)
        if node != ALL:
            records = [await find_record(node, directory, channels=channels, call_ms_max=call_ms_max)]
        else:
            known = await list_records(directory, channels=channels, call_ms_max=call_ms_max)
            records = [record for record in known if any(each.tier == tier for each in record.load.tiers)]
        done = await asyncio.gather(*(order(channels, record) for record in records), return_exceptions=True)
        return list(zip([record.name for record in records], done, strict=True))

    failed = False
    answers = run_with_channels(work)
    if not answers:
        click.echo(f"No node has a {tier} tier.")
    for name, found in answers:
        if isinstance(found, BatonError):
            click.echo(f"{name}: {found.message}", err=True)
            failed = True
        elif isinstance(found, BaseException):
            raise found
        else:
            click.echo(f"{name}: {found} blocks forgotten.")
    return EXIT_ERROR if failed else 0


def _data(view: NodeView) -> dict[str, Any]:
    """One node as plain data for `-o json`: keys are never renamed."""
    tiers = [] if view.status is None else [message_data(tier) for tier in view.status.record.load.tiers]
    return {"name": view.record.name, "tiers": tiers, "problem": view.problem or None}
