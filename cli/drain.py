"""`baton cordon`, `uncordon`, `drain`, `undrain`: orders to one node, which owns its state and answers for it."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import click
from batonpb import node_pb2, node_pb2_grpc

from baton.errors import BatonError, Reason
from baton.pod import COST_GIVEN_UP
from baton.rpc import Channels, rpc_errors
from baton.wire import NodeRecord
from cli.invocation import EXIT_ERROR
from cli.nodes import (
    NodeView,
    complete_node,
    directory_option,
    find_record,
    get_status,
    left_text,
    node_data,
    run_with_channels,
    state_name,
)
from cli.operator import Operator, operator_options
from cli.output import JSON, output_option, print_json
from cli.parameters import options, timeout_option

CALL_MS_MAX: Final = 5_000
"""How long the directory, and then the node, may take to answer once."""
POLL_MS: Final = 100
"""After a look at a node that was not answered, and between two looks at one that cannot be watched."""
LOOKS_UNANSWERED_MAX: Final = 20
"""Failures in a row before --wait gives up: a busy node or a short network failure does not end the drain."""
_FINAL: Final = frozenset({Reason.INCARNATION_MISMATCH, Reason.BAD_LIFECYCLE})
"""Waiting longer would be in vain."""
_SILENT: Final = frozenset({Reason.PEER_UNREACHABLE, Reason.DEADLINE, Reason.CANCELLED})
UNDRAINED_MAX: Final = 3
"""Statuses in a row: the first ones may be from before the order."""
WATCH_S_MAX: Final = 3_600.0
"""How long one call may watch a node; the next one follows."""
_COST_GIVEN_UP: Final = (
    "The deletion cost of {node}'s pod could not be set (its log says why): a smaller pool may remove another pod."
)


_node_options: Final = options(
    click.argument("node", shell_complete=complete_node), directory_option, operator_options, output_option
)


def _order_command(order: str, what: str) -> click.Command:
    """A command that only gives an order."""

    def command(node: str, directory: str, output: str, **operator: Any) -> int:
        return _order(order, node, directory, output, Operator(**operator))

    name = order.lower()
    text = f"{what}\n\n\b\nExample:\n  baton {name} decode-0"
    return click.command(name, help=text)(_node_options(command))


cordon: Final = _order_command(
    "Cordon", "Keep new requests away from NODE. What it has goes on. `baton uncordon` ends it."
)
uncordon: Final = _order_command("Uncordon", "Let NODE take requests again after a cordon.")
undrain: Final = _order_command("Undrain", "Let NODE take requests again after a drain, whether it was over or not.")


@click.command()
@_node_options
@click.option("--wait", is_flag=True, help="Return only when the node has proved that it is empty.")
@timeout_option(300.0, "How long --wait may take.")
def drain(node: str, directory: str, output: str, wait: bool, timeout_s: float, **operator: Any) -> int:
    """Empty NODE: it takes nothing new, finishes what it has, and then says that it is safe to delete.

    With --wait, the exit status is 0 when the node is safe to delete, or when its process has ended and was empty
    before. It is 1 after --timeout: the command lists what is still there, and the drain goes on. A second drain is no
    error.

    \b
    Example:
      baton drain decode-0 --wait --timeout 120
    """
    return _order("Drain", node, directory, output, Operator(**operator), wait_s_max=timeout_s if wait else None)


def _order(
    order: str, node: str, directory: str, output: str, operator: Operator, *, wait_s_max: float | None = None
) -> int:
    async def work(channels: Channels) -> NodeView:
        record = await find_record(node, directory, channels=channels, call_ms_max=CALL_MS_MAX)
        if wait_s_max is None:
            return NodeView(record=record, status=await _send(channels, record, order, operator))
        return NodeView(record=record, status=await _drain(channels, record, operator, wait_s_max=wait_s_max))

    try:
        view = run_with_channels(work)
    except KeyboardInterrupt:
        if wait_s_max is not None:
            click.echo(
                f"Not waited for any longer; {node} goes on with its drain (`baton undrain {node}` ends it).", err=True
            )
        raise
    status = view.status
    assert status is not None
    if output == JSON:
        print_json(node_data(view))
    else:
        click.echo(_text(node, status))
    if any(counter.name == COST_GIVEN_UP and counter.value for counter in status.counters):
        click.echo(_COST_GIVEN_UP.format(node=node), err=True)
    if wait_s_max is None or status.safe_to_delete or status.ended_empty:
        return 0
    if status.ending:
        click.echo(f"{node} was stopped before it was empty; given up: {left_text(status)}.", err=True)
    else:
        click.echo(f"{node} is not empty after {wait_s_max:g} s; still there: {left_text(status)}.", err=True)
    return EXIT_ERROR


async def _drain(
    channels: Channels, record: NodeRecord, operator: Operator, *, wait_s_max: float
) -> node_pb2.NodeStatus:
    """Order the drain and wait. The node is watched from before the order on: what it says last is not missed."""
    looks = StatusLooks(channels, record)
    try:
        with suppress(BatonError):  # the order finds out what is wrong
            await looks.look()
        status = await _send(channels, record, "Drain", operator)
        return await wait_empty(status, looks.look, name=record.name, wait_s_max=wait_s_max)
    finally:
        looks.close()


async def wait_empty(
    status: node_pb2.NodeStatus,
    look: Callable[[], Awaitable[node_pb2.NodeStatus]],
    *,
    name: str,
    wait_s_max: float,
    poll_ms: int = POLL_MS,
) -> node_pb2.NodeStatus:
    """Look until the node is safe to delete, or is ending, or the time is over; what was seen last.

    Raises BatonError: what `look` raises that is final; PEER_UNREACHABLE where it raises anything else
    `LOOKS_UNANSWERED_MAX` times in a row, in words that say what to do.
    """
    unanswered = 0
    try:
        async with asyncio.timeout(wait_s_max):
            while not (status.safe_to_delete or status.ending):
                try:
                    status, unanswered = await look(), 0
                except BatonError as error:
                    unanswered += 1
                    if error.reason in _FINAL:
                        raise
                    if unanswered >= LOOKS_UNANSWERED_MAX:
                        raise _gone(name, status, error) from error
                    await asyncio.sleep(poll_ms / 1e3)
    except TimeoutError:
        pass
    return status


def _gone(name: str, status: node_pb2.NodeStatus, error: BatonError) -> BatonError:
    """It has not said that it was empty, and it says nothing any more: killed, broken, or out of reach from here."""
    answers = error.reason not in _SILENT
    what = f"only says: {error.message}" if answers else "no longer answers"
    return BatonError(
        Reason.PEER_UNREACHABLE,
        f"{name} {what} (asked {LOOKS_UNANSWERED_MAX} times), and has not said that it was empty; when it last "
        f"answered it was {state_name(status)} and held {left_text(status)}. If its process has ended, what it held is "
        "gone, and running requests go on at other nodes: `baton nodes` shows who is there, its log how it ended. If "
        "it still runs, order the drain again once it can be reached from here.",
    )


class StatusLooks:
    """One node's statuses, one at a time: from a call that watches it, or, where there is none, asked for each time."""

    def __init__(self, channels: Channels, record: NodeRecord) -> None:
        self._channels = channels
        self._record = record
        self._call: Any = None
        self._watches = True
        self._undrained = 0

    async def look(self) -> node_pb2.NodeStatus:
        """The next status, which comes within a second or so. Raises BatonError, BAD_LIFECYCLE once the node is no
        longer being drained."""
        try:
            status = await (self._watch() if self._watches else self._ask())
        except BatonError as error:
            self.close()
            if error.reason is not Reason.UNIMPLEMENTED or not self._watches:
                raise
            self._watches = False  # a node of an earlier version
            return await self.look()
        name = self._record.name
        if status.record.incarnation != self._record.incarnation:
            raise BatonError(
                Reason.INCARNATION_MISMATCH,
                f"{name} was restarted while it was waited for: the process that was to be drained has ended, and has "
                f"not said that it was empty. Drain the new one if that is what you want: `baton drain {name}`.",
            )
        drains = status.ending or state_name(status) in ("lame_duck", "draining", "drained")
        self._undrained = 0 if drains else self._undrained + 1
        if self._undrained >= UNDRAINED_MAX:
            raise BatonError(Reason.BAD_LIFECYCLE, f"{name} is no longer being drained. So far: {status.story}.")
        return status

    def close(self) -> None:
        """End the call, if there is one. The next look makes another."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _watch(self) -> node_pb2.NodeStatus:
        name = self._record.name
        if self._call is None:
            stub = node_pb2_grpc.NodeStub(self._channels.get(self._record.command_endpoint))
            self._call = stub.WatchStatus(node_pb2.GetStatusRequest(), timeout=WATCH_S_MAX)
        try:
            # Not asyncio.wait_for, which swallows a cancellation that comes as the call ends (Python 3.11).
            with rpc_errors(name):
                async with asyncio.timeout(CALL_MS_MAX / 1e3):
                    status = await self._call.read()
        except TimeoutError as error:
            raise BatonError(Reason.DEADLINE, f"{name} has said nothing for {CALL_MS_MAX} ms.") from error
        if not isinstance(status, node_pb2.NodeStatus):
            raise BatonError(Reason.PEER_UNREACHABLE, f"{name} has ended the call.")
        return status

    async def _ask(self) -> node_pb2.NodeStatus:
        await asyncio.sleep(POLL_MS / 1e3)
        return await get_status(self._record.command_endpoint, channels=self._channels, call_ms_max=CALL_MS_MAX)


async def _send(channels: Channels, record: NodeRecord, order: str, operator: Operator) -> node_pb2.NodeStatus:
    """Raises BatonError: without the token, unreachable, another process by now, or BAD_LIFECYCLE."""
    request = node_pb2.LifecycleOrder(incarnation=record.incarnation, why=f"baton {order.lower()}, {_user()}")
    metadata = operator.metadata(record.command_endpoint)
    try:
        with rpc_errors(record.name):
            call = getattr(node_pb2_grpc.NodeStub(channels.get(record.command_endpoint)), order)
            status: node_pb2.NodeStatus = await call(request, timeout=CALL_MS_MAX / 1e3, metadata=metadata)
    except BatonError as error:
        if error.reason not in _SILENT:
            raise
        raise BatonError(
            error.reason,
            f"{record.name} does not answer at {record.command_endpoint}, where the directory has it. If its process "
            "has ended, the directory drops it within seconds, and there is nothing to order; if it runs, look at its "
            "log, and whether it can be reached from here. `baton nodes` shows who answers.",
        ) from error
    return status


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _text(node: str, status: node_pb2.NodeStatus) -> str:
    state = state_name(status)
    if status.ending:
        how = "was empty before" if status.ended_empty else "was not empty"
        return f"{node} has ended in order; it {how}."
    if state == "drained":
        verdict = "safe to delete" if status.safe_to_delete else "not safe to delete"
        if not status.safe_to_delete and left_text(status) == "nothing":
            verdict = "its pod is being marked as the first to go"
        return f"{node} is drained and holds {left_text(status)}: {verdict}."
    if state == "lame_duck":
        state = "a lame duck: it is not ready and serves new requests still, soon none"
    return f"{node} is {state}; it holds {left_text(status)}."
