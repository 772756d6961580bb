"""`baton describe NODE`: all that one node says of itself."""

from __future__ import annotations

from math import ceil
from typing import Final

import click
from batonpb import node_pb2

from baton.rpc import Channels
from baton.wire import Role
from cli.cluster_view import (
    UNREACHABLE_HINT,
    NodeView,
    complete_node,
    directory_option,
    find_record,
    hit_percent,
    left_text,
    node_data,
    run_with_channels,
    state_name,
    view_node,
)
from cli.invocation import EXIT_ERROR
from cli.output import Output, format_table, output_option, print_json
from cli.parameters import timeout_option

_PAIR_HEADER: Final = ("PEER", "INCARNATION", "TRANSPORT", "LINK", "EPOCH", "BYTES MOVED", "GB/S", "GB/S 10 S",
                       "LINK FAILURES", "GIVEN UP", "CORRUPT", "INSTEAD OF")  # fmt: skip

_WRITER_HEADER: Final = ("WRITER", "INCARNATION", "HOST", "TRANSPORT", "GRANTS", "GRANTED", "QUARANTINED",
                         "SINCE", "ASKED BACK", "BYTES LANDED", "GB/S 10 S", "WHY")  # fmt: skip

_PIN_HEADER: Final = ("PIN", "BLOCKS", "HERE", "LEASE")


@click.command()
@click.argument("node", shell_complete=complete_node)
@directory_option
@timeout_option(2.0, "How long the directory, and then the node, may take to answer.")
@output_option
def describe(node: str, directory: str, timeout_s: float, output: str) -> int:
    """Show everything that NODE says of itself: its life so far, what it holds, its links and counters.

    Links show which transport is in use for each peer, whether it is open, how fast it moves bytes while it has any to
    move (since it is used, and in the last 10 s), which better ones were given up and when they are tried again, and
    which it is used instead of and why. Of a node that others write into, each writer with the blocks that it may still
    write to: granted, and quarantined since when and why; and the bytes that have landed, in all and a second.

    \b
    Example:
      baton describe prefill-0 -o json
    """
    call_ms_max = ceil(timeout_s * 1e3)

    async def ask(channels: Channels) -> NodeView:
        record = await find_record(node, directory, channels=channels, call_ms_max=call_ms_max)
        return await view_node(record, channels=channels, call_ms_max=call_ms_max)

    view = run_with_channels(ask)
    if Output(output) is Output.JSON:
        print_json(node_data(view))
    else:
        click.echo(_text(view))
    return 0 if view.status is not None else EXIT_ERROR


def _text(view: NodeView) -> str:
    record, status = view.record, view.status
    rows = [
        ("name", record.name),
        ("role", record.role.name.lower()),
        ("endpoint", record.endpoint),
        ("incarnation", f"{record.incarnation:016x}"),
    ]
    if status is None:
        return _lines([*rows, ("state", f"unreachable: {view.problem}")]) + f"\n\n{UNREACHABLE_HINT}"
    own, blocks = status.record, status.record.load.blocks
    rows += [
        ("state", state_name(status)),
        ("life", status.story),
        ("holds", left_text(status)),
        ("safe to delete", "yes" if status.safe_to_delete else "no"),
    ]
    if record.role is Role.ROUTER:
        return _lines(rows)
    rows += [
        ("model", f"{own.model.name} ({own.model.fingerprint})"),
        ("transports", ", ".join(own.transports) or "none"),
        *((fact.name, fact.text) for fact in status.engine.facts),
        ("blocks", f"{blocks.free} free, {blocks.cached} cached, {blocks.held} held{_padding_text(status.engine)}, "
            f"{blocks.writer_owned} owned by a writer, {blocks.quarantined} quarantined; {blocks.promised} promised"),
        ("prefix hits", hits_text(status.prefixes, record.role)),
        ("pinned", f"{status.prefixes.pinned_blocks} blocks of at most {status.prefixes.pinned_blocks_max}"),
        ("errors", f"{status.conservation_errors} of block conservation"),
        *((counter.name, figure_text(counter.value)) for counter in status.counters),
    ]  # fmt: skip
    text = _lines(rows)
    if status.prefixes.pins:
        text += "\n\n" + format_table(_PIN_HEADER, [
            (pin.name, str(pin.blocks), str(pin.blocks_pinned), f"{pin.lease_left_ms / 1e3:.0f} s")
            for pin in status.prefixes.pins
        ], right={1, 2, 3})  # fmt: skip
    if status.pairs:
        text += "\n\n" + format_table(_PAIR_HEADER, [_pair_row(pair) for pair in status.pairs], right={4, 5, 6, 7, 8})
    if status.writers:
        text += "\n\n" + format_table(
            _WRITER_HEADER, [_writer_row(writer) for writer in status.writers], right={4, 5, 6, 7, 8, 9, 10}
        )
    return text


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


def _padding_text(engine: node_pb2.EngineStatus) -> str:
    return f" ({engine.padding_blocks} for padding)" if engine.padding_blocks else ""


def _lines(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
