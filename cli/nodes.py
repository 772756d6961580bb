"""`baton nodes`: who the directory knows, and what each of them says it holds."""

from __future__ import annotations

from math import ceil
from typing import Final

import click

from baton.directory_setting import describe_directory
from baton.wire import Role
from cli.cluster_view import (
    UNREACHABLE_HINT,
    NodeView,
    directory_option,
    hit_percent,
    node_data,
    run_with_channels,
    state_name,
    view_nodes,
)
from cli.output import JSON, format_table, output_option, print_json
from cli.parameters import timeout_option

_HEADER: Final = (
    "NAME", "ROLE", "STATE", "ENDPOINT", "INCARNATION", "WAITING", "RUNNING", "HITS",
    "FREE", "CACHED", "HELD", "WRITER", "QUARANTINED", "GRANTS", "ERRORS",
)  # fmt: skip
_RIGHT: Final = frozenset(range(5, len(_HEADER)))


@click.command()
@directory_option
@timeout_option(2.0, "How long the directory, and then each node, may take to answer.")
@output_option
def nodes(directory: str, timeout_s: float, output: str) -> None:
    """Show who is in the cluster and what each node holds.

    One line a node: what waits and runs there, the share of prompt tokens that its prefix cache had, its KV blocks by
    owner (free, cached for prefixes, held by requests, owned by a remote writer, quarantined), its open grants, and
    violations of block conservation, which must be 0.

    \b
    Example:
      baton nodes --directory 127.0.0.1:7070
    """
    views = run_with_channels(
        lambda channels: view_nodes(directory, channels=channels, call_ms_max=ceil(timeout_s * 1e3))
    )
    if output == JSON:
        print_json([node_data(view) for view in views])
        return
    if not views:
        click.echo(f"The directory at {describe_directory(directory)} knows no node.")
        return
    click.echo(format_table(_HEADER, [_row(view) for view in views], right=_RIGHT))
    problems = [f"{view.record.name}: {view.problem}" for view in views if view.problem]
    if problems:
        click.echo("\n".join(["", *problems, UNREACHABLE_HINT]))


def _row(view: NodeView) -> list[str]:
    record, status = view.record, view.status
    named = [record.name, record.role.name.lower()]
    where = [record.endpoint, f"{record.incarnation:016x}"]
    if status is None:
        return [*named, "unreachable", *where, *["-"] * len(_RIGHT)]
    own = status.record
    row = [*named, state_name(status), *where, str(own.load.waiting_requests), str(own.load.running_requests)]
    if record.role is Role.ROUTER:
        return [*row, *["-"] * (len(_HEADER) - len(row))]
    blocks = own.load.blocks
    counts = (blocks.free, blocks.cached, blocks.held, blocks.writer_owned, blocks.quarantined)
    grants = status.grants_received + status.grants_written
    percent = hit_percent(status.prefixes)
    hits = "-" if percent is None else f"{percent:.0f}%"
    return [*row, hits, *map(str, counts), str(grants), str(status.conservation_errors)]
