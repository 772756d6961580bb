"""What the commands see of a cluster: who the directory knows, and what each node says of itself. `baton nodes` shows
all of them, `baton describe NODE` one.

The plain data for `-o json` is part of the commands' interface: keys are never renamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, TypeVar

import click
from batonpb import common_pb2, directory_pb2, node_pb2, node_pb2_grpc

from baton.clock import Clock
from baton.directory_setting import describe_directory, open_directory
from baton.endpoint import is_loopback
from baton.errors import BatonError, Reason
from baton.rpc import ChannelLimits, Channels, rpc_errors
from baton.tls import Tls
from baton.wire import NodeRecord, Role
from cli.invocation import EXIT_ERROR
from cli.output import JSON, format_pairs, format_table, message_data, output_option, print_json
from cli.parameters import options, timeout_option
from cli.tls import command_tls, tls_options

_LEFT: Final = {
    "requests": ("request", "requests"),
    "answers_unacknowledged": (
        "answer not acknowledged by its router",
        "answers not acknowledged by their router",
    ),
    "grants_received": ("grant received", "grants received"),
    "grants_written": ("grant written to", "grants written to"),
    "unacknowledged_writes": ("unacknowledged write", "unacknowledged writes"),
}
"""What holds a drain back (`baton.drain.Holdings.left`), and what one and several are called."""


def state_name(status: node_pb2.NodeStatus) -> str:
    """ "ready", "draining", ..."""
    return common_pb2.Lifecycle.Name(status.record.lifecycle).removeprefix("LIFECYCLE_").lower()


def left_text(status: node_pb2.NodeStatus) -> str:
    """What holds a drain back, in a line; "nothing" where nothing is left."""
    counts = {name: int(getattr(status, name)) for name in _LEFT}
    counts["grants_received"] -= status.grants_quarantined
    return ", ".join(f"{n} {_LEFT[name][n > 1]}" for name, n in counts.items() if n) or "nothing"


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
        "admin_endpoint": record.admin_endpoint or None,
        "incarnation": f"{record.incarnation:016x}",
        "status": None if view.status is None else status_data(view.status, record.role),
        "problem": view.problem or None,
    }


def status_data(status: node_pb2.NodeStatus, role: Role) -> dict[str, Any]:
    """A node's own answer."""
    record, load = status.record, status.record.load
    plain = message_data(status)
    data: dict[str, Any] = {
        "state": state_name(status),
        "waiting": load.waiting_requests,
        "running": load.running_requests,
        **{name: value for name, value in plain.items() if not isinstance(value, dict | list)},
        "counters": {counter.name: counter.value for counter in status.counters},
    }
    if role is Role.ROUTER:
        return data
    facts = {fact.name: fact.text for fact in status.engine.facts}
    return {
        **data,
        "blocks": message_data(load.blocks),
        "engine": {"facts": facts, "padding_blocks": status.engine.padding_blocks},
        "prefixes": plain["prefixes"],
        "tiers": [message_data(tier) for tier in load.tiers],
        "model": {"name": record.model.name, "fingerprint": record.model.fingerprint},
        "transports": list(record.transports),
        "pairs": [_pair_data(pair) for pair in status.pairs],
        "writers": [_writer_data(writer) for writer in status.writers],
        "fetches": [
            {**message_data(fetch), "owner_incarnation": f"{fetch.owner_incarnation:016x}"} for fetch in status.fetches
        ],
    }


def _pair_data(pair: node_pb2.PairStatus) -> dict[str, Any]:
    return {
        **message_data(pair),
        "peer_incarnation": f"{pair.peer_incarnation:016x}",
        "transport": pair.transport or None,
        "moved": _moved_data(pair.moved),
        "moved_recently": _moved_data(pair.moved_recently),
    }


def _moved_data(moved: node_pb2.MovedBytes) -> dict[str, Any]:
    return {
        "bytes": moved.nbytes,
        "moving_us": moved.moving_us,
        "bytes_per_s": moved.bytes_per_s if moved.moving_us else None,
    }


def _writer_data(writer: node_pb2.WriterStatus) -> dict[str, Any]:
    return {
        **message_data(writer),
        "writer_incarnation": f"{writer.writer_incarnation:016x}",
        "taken_back_ms": writer.taken_back_ms or None,
        "quarantined_ms": writer.quarantined_ms or None,
        "why": writer.why or None,
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

directory_option: Final = options(
    click.option(
        "--directory", default=DIRECTORY_DEFAULT, show_default=True, metavar="HOST:PORT|REDIS_URL",
        help="Where the directory is.",
    ),
    tls_options,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is known of one node: its record in the directory, and its own answer or why there is none."""

    record: NodeRecord
    status: node_pb2.NodeStatus | None
    problem: str = ""


async def list_records(directory: str, *, channels: Channels, call_ms_max: int) -> tuple[NodeRecord, ...]:
    """Who the directory knows. Raises BatonError."""
    client = open_directory(directory, channels=channels, clock=Clock(), call_ms_max=call_ms_max)
    try:
        return (await client.list()).records
    except BatonError as error:
        if error.reason not in (Reason.PEER_UNREACHABLE, Reason.DEADLINE):
            raise
        raise BatonError(
            error.reason,
            f"No directory answers at {describe_directory(directory)} within {call_ms_max} ms. Is the cluster running "
            "(`baton up`)? Name another place with --directory HOST:PORT."
            + (f" {error.message}" if "tls" in error.message.lower() else ""),
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
        status = await get_status(record.command_endpoint, channels=channels, call_ms_max=call_ms_max)
    except BatonError as error:
        return NodeView(record=record, status=None, problem=error.message + _only_there(record))
    if status.record.incarnation != record.incarnation:
        return NodeView(
            record=record,
            status=None,
            problem=f"Another process answers at {record.command_endpoint}." + _only_there(record),
        )
    return NodeView(record=record, status=status)


def _only_there(record: NodeRecord) -> str:
    """What to add where a node answers its clients on the network, and commands on its own machine only."""
    if is_loopback(record.endpoint) or not is_loopback(record.command_endpoint):
        return ""
    return f" Commands reach {record.name} on its own machine only (admin_listen)."


async def get_status(endpoint: str, *, channels: Channels, call_ms_max: int) -> node_pb2.NodeStatus:
    """One node's answer. Raises BatonError."""
    with rpc_errors(f"The process at {endpoint}"):
        stub = node_pb2_grpc.NodeStub(channels.get(endpoint))
        status: node_pb2.NodeStatus = await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=call_ms_max / 1e3)
    return status


@asynccontextmanager
async def open_channels(tls: Tls | None = None) -> AsyncIterator[Channels]:
    """Channels to nodes, closed at the end."""
    channels = Channels(limits=ChannelLimits(), tls=tls)
    try:
        yield channels
    finally:
        await channels.close()


def run_with_channels(work: Callable[[Channels], Awaitable[_T]]) -> _T:
    """Run `work` on a loop of its own, with channels to nodes that are closed at its end."""
    tls = command_tls()

    async def run() -> _T:
        async with open_channels(tls) as channels:
            return await work(channels)

    return asyncio.run(run())


def complete_node(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of nodes for the shell's completion: none where the directory does not answer at once."""
    directory = str(ctx.params.get("directory") or DIRECTORY_DEFAULT)
    try:
        with ctx.scope(cleanup=False):
            records = run_with_channels(
                lambda channels: list_records(directory, channels=channels, call_ms_max=COMPLETION_MS_MAX)
            )
    except (BatonError, click.UsageError):
        return []
    return [record.name for record in records if record.name.startswith(incomplete)]


_NODE_HEADER: Final = (
    "NAME", "ROLE", "STATE", "ENDPOINT", "INCARNATION", "WAITING", "RUNNING", "HITS",
    "FREE", "CACHED", "HELD", "WRITER", "QUARANTINED", "GRANTS", "ERRORS",
)  # fmt: skip
_NODE_RIGHT: Final = frozenset(range(5, len(_NODE_HEADER)))


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
    click.echo(format_table(_NODE_HEADER, [_node_row(view) for view in views], right=_NODE_RIGHT))
    problems = [f"{view.record.name}: {view.problem}" for view in views if view.problem]
    if problems:
        click.echo("\n".join(["", *problems, UNREACHABLE_HINT]))


def _node_row(view: NodeView) -> list[str]:
    record, status = view.record, view.status
    named = [record.name, record.role.name.lower()]
    where = [record.endpoint, f"{record.incarnation:016x}"]
    if status is None:
        return [*named, "unreachable", *where, *["-"] * len(_NODE_RIGHT)]
    own = status.record
    row = [*named, state_name(status), *where, str(own.load.waiting_requests), str(own.load.running_requests)]
    if record.role is Role.ROUTER:
        return [*row, *["-"] * (len(_NODE_HEADER) - len(row))]
    blocks = own.load.blocks
    counts = (blocks.free, blocks.cached, blocks.held, blocks.writer_owned, blocks.quarantined)
    grants = status.grants_received + status.grants_written
    percent = hit_percent(status.prefixes)
    hits = "-" if percent is None else f"{percent:.0f}%"
    return [*row, hits, *map(str, counts), str(grants), str(status.conservation_errors)]


_PAIR_HEADER: Final = ("PEER", "INCARNATION", "TRANSPORT", "LINK", "EPOCH", "BYTES MOVED", "GB/S", "GB/S 10 S",
                       "LINK FAILURES", "GIVEN UP", "CORRUPT", "INSTEAD OF")  # fmt: skip

_WRITER_HEADER: Final = ("WRITER", "INCARNATION", "HOST", "TRANSPORT", "GRANTS", "GRANTED", "QUARANTINED",
                         "SINCE", "ASKED BACK", "BYTES LANDED", "GB/S 10 S", "WHY")  # fmt: skip

TIER_HEADER: Final = ("TIER", "BLOCKS", "BYTES", "PINNED", "HITS", "BYTES DOWN", "BYTES UP", "EVICTED", "UNUSED",
                      "LOST", "REFUSED", "UP IN")  # fmt: skip
TIER_RIGHT: Final = frozenset(range(1, len(TIER_HEADER)))
_PIN_HEADER: Final = ("PIN", "BLOCKS", "HERE", "LEASE")


@click.command()
@click.argument("node", shell_complete=complete_node)
@directory_option
@timeout_option(2.0, "How long the directory, and then the node, may take to answer.")
@output_option
def describe(node: str, directory: str, timeout_s: float, output: str) -> int:
    """Show everything that NODE says of itself: its life so far, what it holds, its links and counters.

    Of each peer that NODE writes to: the transport in use, and why no better one is; whether the link is open; its
    speed while it moves data, since its start and in the last 10 s; the transports that were given up, and when they
    are tried again. Of each node that writes to NODE: the blocks that it may still write to, since when and why some
    are quarantined, and the bytes that have landed.

    \b
    Example:
      baton describe prefill-0 -o json
    """
    call_ms_max = ceil(timeout_s * 1e3)

    async def ask(channels: Channels) -> NodeView:
        record = await find_record(node, directory, channels=channels, call_ms_max=call_ms_max)
        return await view_node(record, channels=channels, call_ms_max=call_ms_max)

    view = run_with_channels(ask)
    if output == JSON:
        print_json(node_data(view))
    else:
        click.echo(_node_text(view))
    return 0 if view.status is not None else EXIT_ERROR


def _node_text(view: NodeView) -> str:
    record, status = view.record, view.status
    rows = [
        ("name", record.name),
        ("role", record.role.name.lower()),
        ("endpoint", record.endpoint),
        *([("for commands", record.admin_endpoint)] if record.admin_endpoint else []),
        ("incarnation", f"{record.incarnation:016x}"),
    ]
    if status is None:
        return format_pairs([*rows, ("state", f"unreachable: {view.problem}")]) + f"\n\n{UNREACHABLE_HINT}"
    own, blocks, engine = status.record, status.record.load.blocks, status.engine
    padding = f" ({engine.padding_blocks} for padding)" if engine.padding_blocks else ""
    rows += [
        ("state", state_name(status)),
        ("life", status.story),
        ("holds", left_text(status)),
        ("safe to delete", "yes" if status.safe_to_delete else "no"),
    ]
    counters = [(counter.name, figure_text(counter.value)) for counter in status.counters]
    if record.role is Role.ROUTER:
        return format_pairs([*rows, *counters])
    rows += [
        ("model", f"{own.model.name} ({own.model.fingerprint})"),
        ("transports", ", ".join(own.transports) or "none"),
        *((fact.name, fact.text) for fact in engine.facts),
        ("blocks", f"{blocks.free} free, {blocks.cached} cached, {blocks.held} held{padding}, "
            f"{blocks.writer_owned} owned by a writer, {blocks.quarantined} quarantined; {blocks.promised} promised"),
        ("prefix hits", hits_text(status.prefixes, record.role)),
        ("pinned", f"{status.prefixes.pinned_blocks} blocks of at most {status.prefixes.pinned_blocks_max}"),
        ("errors", f"{status.conservation_errors} of block conservation"),
        *counters,
    ]  # fmt: skip
    text = format_pairs(rows)
    if len(own.load.tiers) > 1:
        text += "\n\n" + format_table(TIER_HEADER, [tier_row(tier) for tier in own.load.tiers], right=TIER_RIGHT)
    if status.prefixes.pins:
        text += "\n\n" + format_table(_PIN_HEADER, [
            (pin.name, str(pin.blocks), str(pin.blocks_pinned), f"{pin.lease_left_ms / 1e3:.0f} s")
            for pin in status.prefixes.pins
        ], right={1, 2, 3})  # fmt: skip
    if status.pairs:
        text += "\n\n" + format_table(_PAIR_HEADER, [_pair_row(pair) for pair in status.pairs], right={4, 5, 6, 7, 8})
    if status.fetches:
        rows_of_owners = [_fetch_row(fetch) for fetch in status.fetches]
        text += "\n\n" + format_table(_FETCH_HEADER, rows_of_owners, right={1, 2, 3, 4, 5, 6})
    if status.writers:
        text += "\n\n" + format_table(
            _WRITER_HEADER, [_writer_row(writer) for writer in status.writers], right={4, 5, 6, 7, 8, 9, 10}
        )
    return text


def tier_row(tier: directory_pb2.TierLoad) -> list[str]:
    """Bytes are of whole blocks. The region has no tier above it."""
    below = tier.tier != "device"
    moved = (tier.blocks_stored, tier.blocks_hit) if below else (0, 0)
    return [
        tier.tier,
        f"{tier.blocks} of {tier.blocks_max}",
        str(tier.blocks * tier.block_bytes),
        str(tier.blocks_pinned),
        str(tier.blocks_hit),
        *(str(count * tier.block_bytes) if below else "-" for count in moved),
        str(tier.blocks_evicted),
        str(tier.blocks_evicted_unused),
        *(str(count) if below else "-" for count in (tier.blocks_lost, tier.blocks_refused)),
        f"{tier.promotion_s / tier.promotions * 1e3:.1f} ms" if tier.promotions else "-",
    ]


_FETCH_HEADER: Final = ("FETCHED FROM", "FETCHES", "TOKENS", "BYTES", "EACH TOOK", "REFUSED", "FAILED")


def _fetch_row(fetch: node_pb2.FetchStatus) -> list[str]:
    return [
        fetch.owner,
        str(fetch.fetches),
        str(fetch.tokens),
        str(fetch.nbytes),
        f"{fetch.seconds / fetch.fetches * 1e3:.1f} ms" if fetch.fetches else "-",
        str(fetch.refused),
        str(fetch.failed),
    ]


def _pair_row(pair: node_pb2.PairStatus) -> list[str]:
    return [
        pair.peer,
        f"{pair.peer_incarnation:016x}",
        pair.transport or "none",
        "open" if pair.link_open else "closed",
        str(pair.epoch),
        str(pair.bytes_moved),
        _speed(pair.moved),
        _speed(pair.moved_recently),
        str(pair.link_failures),
        _given_up(pair) or "-",
        str(pair.handoffs_corrupt or "-"),
        "; ".join(f"{other.transport} ({other.why})" for other in pair.rejected_transports) or "-",
    ]


def _given_up(pair: node_pb2.PairStatus) -> str:
    left_ms = [*pair.given_up_left_ms, *[0] * len(pair.transports_given_up)]  # an older node sends none
    return ", ".join(
        f"{transport} (retry in {ceil(ms / 1e3)} s)" if ms else f"{transport} (retry with the next link)"
        for transport, ms in zip(pair.transports_given_up, left_ms, strict=False)
    )


def _speed(moved: node_pb2.MovedBytes) -> str:
    return figure_text(moved.bytes_per_s / 1e9) if moved.moving_us else "-"


def _writer_row(writer: node_pb2.WriterStatus) -> list[str]:
    return [
        writer.writer or "-",
        f"{writer.writer_incarnation:016x}",
        writer.host or "-",
        writer.transport,
        str(writer.grants),
        str(writer.blocks_granted),
        str(writer.blocks_quarantined),
        _ago(writer.quarantined_ms),
        _ago(writer.taken_back_ms),
        str(writer.bytes_landed),
        figure_text(writer.landed_per_s / 1e9) if writer.landed_per_s else "-",
        writer.why or "-",
    ]


def figure_text(value: float) -> str:
    """A whole number with all its digits, another one with three that count."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def _ago(ms: int) -> str:
    return f"{ms / 1e3:.1f} s ago" if ms else "-"


def hits_text(prefixes: node_pb2.PrefixStatus, role: Role) -> str:
    """How many prompt tokens did not have to be computed (prefill) or sent (decode)."""
    percent, done = hit_percent(prefixes), "sent" if role is Role.DECODE else "computed"
    share = f", {percent:.1f} %, were cached here and not {done} again" if percent is not None else ""
    return f"{prefixes.hit_tokens} of {prefixes.prompt_tokens} prompt tokens{share}"
