"""`baton pin`, `unpin`, `pins`: prefixes that the nodes keep cached. The command calls every router of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import click
from batonpb import pins_pb2, pins_pb2_grpc

from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.rpc import Channels, rpc_errors
from baton.wire import NodeRecord, Role
from cli.cluster_view import directory_option, list_records, run_with_channels
from cli.invocation import EXIT_ERROR
from cli.output import Output, format_table, output_option, print_json
from cli.parameters import IntegerList, Seconds, check_utf8, read_stdin, timeout_option

_T = TypeVar("_T")
_HEADER: Final = ("NAME", "TOKENS", "SALT", "ENDS IN", "FROM", "ROUTER", "NODES")

_timeout_option: Final = timeout_option(10.0, "How long the directory, and then each router, may take to answer.")


@click.command()
@click.argument("name")
@click.argument("prefix", required=False)
@click.option("--token-ids", type=IntegerList(), help="The prefix as token ids, in place of text.")
@click.option("--system", "as_system", is_flag=True, help="PREFIX is the system message of chats.")
@click.option("--cache-salt", help="The salt of the requests that it is for.  [default: those without a salt]")
@click.option("--ttl", "ttl_s", type=Seconds(), metavar="SECONDS", help="Unpin by itself after this time.")
@click.option("--warm", is_flag=True, help="Compute the prefix now, so that the first request finds it.")
@directory_option
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
) -> int:
    """Keep the KV of a prefix cached on all nodes, whatever else they are asked; `-` reads PREFIX from stdin.

    Its full blocks stay from their first use on, and new nodes get them when they join. A pin of the same name is
    replaced. Routers keep pins in memory: those that should outlive them go into [[router.pinned_prefixes]].

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

    async def send(stub: pins_pb2_grpc.PinsStub, timeout_s: float) -> pins_pb2.PinReply:
        reply: pins_pb2.PinReply = await stub.Pin(request, timeout=timeout_s)
        return reply

    replies = _ask_routers(directory, timeout_s, send)
    rows = [(router, reply.pin) for router, reply in replies.items()]
    _print(rows, output)
    return EXIT_ERROR if any(on.problem for _, pin in rows for on in pin.nodes) else 0


@click.command()
@click.argument("name")
@directory_option
@_timeout_option
def unpin(name: str, directory: str, timeout_s: float) -> int:
    """Let a pinned prefix be evicted again, on all nodes. An error where nobody knows it.

    \b
    Example:
      baton unpin support
    """
    check_utf8(name, "NAME")
    request = pins_pb2.UnpinRequest(name=name)

    async def send(stub: pins_pb2_grpc.PinsStub, timeout_s: float) -> pins_pb2.UnpinReply:
        reply: pins_pb2.UnpinReply = await stub.Unpin(request, timeout=timeout_s)
        return reply

    known = any(reply.known for reply in _ask_routers(directory, timeout_s, send).values())
    click.echo(f"{name} is unpinned." if known else f"Nobody has a pin '{name}'. See `baton pins`.", err=not known)
    return 0 if known else EXIT_ERROR


@click.command()
@directory_option
@_timeout_option
@output_option
def pins(directory: str, timeout_s: float, output: str) -> None:
    """Show the pinned prefixes, and how many blocks of each are on which node.

    \b
    Example:
      baton pins -o json
    """

    async def send(stub: pins_pb2_grpc.PinsStub, timeout_s: float) -> pins_pb2.ListPinsReply:
        reply: pins_pb2.ListPinsReply = await stub.ListPins(pins_pb2.ListPinsRequest(), timeout=timeout_s)
        return reply

    replies = _ask_routers(directory, timeout_s, send)
    _print([(router, pin) for router, reply in replies.items() for pin in reply.pins], output)


def _ask_routers(
    directory: str, timeout_s: float, send: Callable[[pins_pb2_grpc.PinsStub, float], Awaitable[_T]]
) -> dict[str, _T]:
    """Every router's answer, by its name. Raises BatonError: the first one's that has one."""

    async def ask(channels: Channels, record: NodeRecord) -> _T:
        with rpc_errors(record.name):
            return await send(pins_pb2_grpc.PinsStub(channels.get(record.endpoint)), timeout_s)

    async def work(channels: Channels) -> dict[str, _T]:
        records = await list_records(directory, channels=channels, call_ms_max=round(timeout_s * 1e3))
        routers = [r for r in records if r.role is Role.ROUTER and r.lifecycle is not Lifecycle.STARTING]
        if not routers:
            raise BatonError(Reason.UNKNOWN_NODE, "The directory knows no router, and routers keep the pins.")
        replies = await asyncio.gather(*(ask(channels, record) for record in routers))
        return {record.name: reply for record, reply in zip(routers, replies, strict=True)}

    return run_with_channels(work)


def _print(rows: list[tuple[str, pins_pb2.PinnedPrefix]], output: str) -> None:
    if Output(output) is Output.JSON:
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
        "name": pin.name,
        "tokens": pin.tokens,
        "has_cache_salt": pin.has_cache_salt,
        "ttl_left_ms": pin.ttl_left_ms if pin.HasField("ttl_left_ms") else None,
        "from_config": pin.from_config,
        "router": router,
        "nodes": [
            {"node": on.node, "blocks": on.blocks, "blocks_pinned": on.blocks_pinned, "problem": on.problem or None}
            for on in pin.nodes
        ],
    }


def _row(router: str, pin: pins_pb2.PinnedPrefix) -> list[str]:
    ends = f"{pin.ttl_left_ms / 1e3:.0f} s" if pin.HasField("ttl_left_ms") else "never"
    nodes = ", ".join(f"{on.node} {'-' if on.problem else f'{on.blocks_pinned}/{on.blocks}'}" for on in pin.nodes)
    salt, source = "yes" if pin.has_cache_salt else "no", "config" if pin.from_config else "api"
    return [pin.name, str(pin.tokens), salt, ends, source, router, nodes or "none"]
