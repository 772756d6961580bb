"""`baton pin`, `unpin`, `pins`: prefixes that the nodes keep cached. The command calls every router of the cluster."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import click
from batonpb import pins_pb2, pins_pb2_grpc
from google.protobuf.message import Message

from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.rpc import Channels, rpc_errors
from baton.wire import NodeRecord, Role
from cli.invocation import EXIT_ERROR
from cli.nodes import directory_option, list_records, run_with_channels
from cli.operator import Operator, operator_options
from cli.output import JSON, format_table, message_data, output_option, print_json
from cli.parameters import SECONDS, IntegerList, check_utf8, read_stdin, timeout_option

_HEADER: Final = ("NAME", "TOKENS", "SALT", "ENDS IN", "FROM", "ROUTER", "NODES")

_timeout_option: Final = timeout_option(10.0, "How long the directory, and then each router, may take to answer.")


@click.command()
@click.argument("name")
@click.argument("prefix", required=False)
@click.option("--token-ids", type=IntegerList(), help="The prefix as token ids, in place of text.")
@click.option("--system", "as_system", is_flag=True, help="PREFIX is the system message of chats.")
@click.option("--cache-salt", help="For requests with this salt only.  [default: for those without one]")
@click.option("--ttl", "ttl_s", type=SECONDS, metavar="SECONDS", help="End the pin after this time.")
@click.option("--warm", is_flag=True, help="Compute the prefix now, so that the first request finds it.")
@directory_option
@operator_options
@_timeout_option
@output_option
def pin(
    name: str,
    prefix: str | None,
    token_ids: tuple[int, ...] | None,
    as_system: bool,
    cache_salt: str | None,
    ttl_s: float | None,
    warm: bool,
    directory: str,
    timeout_s: float,
    output: str,
    **operator: Any,
) -> int:
    """Keep the KV of a prefix in the cache of every node, and give it the name NAME; `-` reads PREFIX from stdin.

    A node keeps the prefix's full blocks once a request, or --warm, has computed them; other load does not evict them.
    Nodes that join later get the pin too. A pin of the same name is replaced. Pins end when the routers restart: write
    lasting ones into [[router.pinned_prefixes]].

    \b
    Example:
      baton pin support --system "You are the support desk of ACME." --warm
      baton pin legal --token-ids 5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20 --ttl 3600
    """
    if (prefix is None) == (token_ids is None):
        raise click.UsageError("Give either a PREFIX or --token-ids.")
    if as_system and prefix is None:
        raise click.UsageError("--system needs the message as PREFIX.")
    for what, text in (("NAME", name), ("PREFIX", prefix), ("--cache-salt", cache_salt)):
        check_utf8(text or "", what)
    request = pins_pb2.PinRequest(name=name, cache_salt=cache_salt, warm=warm)
    if ttl_s is not None:
        request.ttl_ms = max(1, round(ttl_s * 1e3))
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    else:
        setattr(request, "system" if as_system else "text", read_stdin("PREFIX") if prefix == "-" else str(prefix))
    rows = [(router, reply.pin) for router, reply in _ask_routers(directory, timeout_s, "Pin", request, operator)]
    _print(rows, output)
    return EXIT_ERROR if any(on.problem for _, pin in rows for on in pin.nodes) else 0


@click.command()
@click.argument("name")
@directory_option
@operator_options
@_timeout_option
def unpin(name: str, directory: str, timeout_s: float, **operator: Any) -> int:
    """Let a pinned prefix be evicted again, on all nodes. It is an error if no router knows NAME.

    \b
    Example:
      baton unpin support
    """
    check_utf8(name, "NAME")
    replies = _ask_routers(directory, timeout_s, "Unpin", pins_pb2.UnpinRequest(name=name), operator)
    known = any(reply.known for _, reply in replies)
    click.echo(f"{name} is unpinned." if known else f"Nobody has a pin '{name}'. See `baton pins`.", err=not known)
    return 0 if known else EXIT_ERROR


@click.command()
@directory_option
@operator_options
@_timeout_option
@output_option
def pins(directory: str, timeout_s: float, output: str, **operator: Any) -> None:
    """Show the pinned prefixes, and how many blocks of each are on which node.

    \b
    Example:
      baton pins -o json
    """
    replies = _ask_routers(directory, timeout_s, "ListPins", pins_pb2.ListPinsRequest(), operator)
    _print([(router, pin) for router, reply in replies for pin in reply.pins], output)


def _ask_routers(
    directory: str, timeout_s: float, method: str, request: Message, operator: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Every router's name and reply. Raises BatonError: the first one's that has one."""

    async def ask(channels: Channels, record: NodeRecord) -> tuple[str, Any]:
        metadata = Operator(**operator).metadata(record.command_endpoint)
        with rpc_errors(record.name):
            call = getattr(pins_pb2_grpc.PinsStub(channels.get(record.command_endpoint)), method)
            return record.name, await call(request, timeout=timeout_s, metadata=metadata)

    async def work(channels: Channels) -> list[tuple[str, Any]]:
        records = await list_records(directory, channels=channels, call_ms_max=round(timeout_s * 1e3))
        routers = [r for r in records if r.role is Role.ROUTER and r.lifecycle is not Lifecycle.STARTING]
        if not routers:
            raise BatonError(Reason.UNKNOWN_NODE, "The directory knows no router, and routers keep the pins.")
        return await asyncio.gather(*(ask(channels, record) for record in routers))

    return run_with_channels(work)


def _print(rows: list[tuple[str, pins_pb2.PinnedPrefix]], output: str) -> None:
    if output == JSON:
        print_json([pin_data(router, pin) for router, pin in rows])
    elif not rows:
        click.echo("No prefix is pinned.")
    else:
        click.echo(format_table(_HEADER, [_row(router, pin) for router, pin in rows], right={1}))
        for _, each in rows:
            for on in each.nodes:
                if on.problem:
                    click.echo(f"{each.name} is not on {on.node}: {on.problem}")


def pin_data(router: str, pin: pins_pb2.PinnedPrefix) -> dict[str, Any]:
    """One pin as plain data for `-o json`: keys are never renamed."""
    return {
        **message_data(pin),
        "ttl_left_ms": pin.ttl_left_ms if pin.HasField("ttl_left_ms") else None,
        "router": router,
        "nodes": [{**message_data(on), "problem": on.problem or None} for on in pin.nodes],
    }


def _row(router: str, pin: pins_pb2.PinnedPrefix) -> list[str]:
    ends = f"{pin.ttl_left_ms / 1e3:.0f} s" if pin.HasField("ttl_left_ms") else "never"
    nodes = ", ".join(f"{on.node} {'-' if on.problem else f'{on.blocks_pinned}/{on.blocks}'}" for on in pin.nodes)
    salt, source = "yes" if pin.has_cache_salt else "no", "config" if pin.from_config else "api"
    return [pin.name, str(pin.tokens), salt, ends, source, router, nodes or "none"]
