"""`baton cordon`, `uncordon`, `drain`, `undrain`: orders to one node, which owns its state and answers for it."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable
from typing import Final

import click
from batonpb import node_pb2, node_pb2_grpc

from baton.errors import BatonError, Reason
from baton.pod import COST_GIVEN_UP
from baton.rpc_client import Channels, rpc_errors
from baton.wire import NodeRecord
from cli.cluster_view import NodeView, complete_node, directory_option, find_record, get_status, run_with_channels
from cli.invocation import EXIT_ERROR
from cli.node_data import left_behind, node_data, state_name
from cli.output import Output, output_option, print_json
from cli.parameters import timeout_option

CALL_MS_MAX: Final = 5_000
"""How long the directory, and then the node, may take to answer once."""
POLL_MS: Final = 100
"""Between two looks at a node that is being drained."""
LOOKS_UNANSWERED_MAX: Final = 20
"""In a row, before --wait gives up: a busy node or a network that hiccups is not the drain's end."""
_MAY_ANSWER_YET: Final = frozenset({Reason.PEER_UNREACHABLE, Reason.DEADLINE, Reason.TOO_MANY_CALLS})
_COST_GIVEN_UP: Final = (
    "The deletion cost of {node}'s pod could not be set (its log says why): a smaller pool may remove another pod."
)


def _node_command(command: Callable[..., int]) -> click.Command:
    with_options = directory_option(output_option(command))
    return click.command()(click.argument("node", shell_complete=complete_node)(with_options))


@_node_command
def cordon(node: str, directory: str, output: str) -> int:
    """Keep new requests away from NODE; what it has goes on, and nothing else changes. `baton uncordon` ends it.

    \b
    Example:
      baton cordon decode-0
    """
    return _order("Cordon", node, directory, output)


@_node_command
def uncordon(node: str, directory: str, output: str) -> int:
    """Let NODE take requests again after a cordon.

    \b
    Example:
      baton uncordon decode-0
    """
    return _order("Uncordon", node, directory, output)


@_node_command
def undrain(node: str, directory: str, output: str) -> int:
    """Let NODE take requests again after a drain, whether it was over or not.

    \b
    Example:
      baton undrain decode-0
    """
    return _order("Undrain", node, directory, output)


@_node_command
@click.option("--wait", is_flag=True, help="Return only when the node has proved that it is empty.")
@timeout_option(300.0, "How long --wait may take.")
def drain(node: str, directory: str, output: str, wait: bool, timeout_s: float) -> int:
    """Empty NODE: it takes nothing new, finishes what it has, and then says that it is safe to delete.

    With --wait, the exit status is 0 when it is, and 1 when it is not within --timeout; what is still there is listed
    then, and the drain goes on. Draining a node that is being drained already is no error.

    \b
    Example:
      baton drain decode-0 --wait --timeout 120
    """
    return _order("Drain", node, directory, output, wait_s_max=timeout_s if wait else None)


def _order(order: str, node: str, directory: str, output: str, *, wait_s_max: float | None = None) -> int:
    async def work(channels: Channels) -> tuple[NodeView, bool]:
        record = await find_record(node, directory, channels=channels, call_ms_max=CALL_MS_MAX)
        status = await _send(channels, record, order)
        if wait_s_max is None:
            return NodeView(record=record, status=status), True
        status = await wait_empty(status, lambda: _look(channels, record), wait_s_max=wait_s_max)
        return NodeView(record=record, status=status), status.safe_to_delete

    view, done = run_with_channels(work)
    assert view.status is not None
    if Output(output) is Output.JSON:
        print_json(node_data(view))
    else:
        click.echo(_text(node, view.status))
    if any(counter.name == COST_GIVEN_UP and counter.value for counter in view.status.counters):
        click.echo(_COST_GIVEN_UP.format(node=node), err=True)
    if not done:
        click.echo(f"{node} is not empty after {wait_s_max:g} s; still there: {_left(view.status)}.", err=True)
    return 0 if done else EXIT_ERROR


async def wait_empty(
    status: node_pb2.NodeStatus,
    look: Callable[[], Awaitable[node_pb2.NodeStatus]],
    *,
    wait_s_max: float,
    poll_ms: int = POLL_MS,
) -> node_pb2.NodeStatus:
    """Look until the node is safe to delete or the time is over; what was seen last.

    Raises BatonError: what `look` raises, where that is final or comes `LOOKS_UNANSWERED_MAX` times in a row.
    """
    unanswered = 0
    try:
        async with asyncio.timeout(wait_s_max):
            while not status.safe_to_delete:
                await asyncio.sleep(poll_ms / 1e3)
                try:
                    status, unanswered = await look(), 0
                except BatonError as error:
                    unanswered += 1
                    if error.reason not in _MAY_ANSWER_YET or unanswered >= LOOKS_UNANSWERED_MAX:
                        raise
    except TimeoutError:
        pass
    return status


async def _send(channels: Channels, record: NodeRecord, order: str) -> node_pb2.NodeStatus:
    """Raises BatonError: unreachable, another process by now, or BAD_LIFECYCLE."""
    request = node_pb2.LifecycleOrder(incarnation=record.incarnation, why=f"baton {order.lower()}, {_user()}")
    with rpc_errors(record.name):
        call = getattr(node_pb2_grpc.NodeStub(channels.get(record.endpoint)), order)
        status: node_pb2.NodeStatus = await call(request, timeout=CALL_MS_MAX / 1e3)
    return status


async def _look(channels: Channels, record: NodeRecord) -> node_pb2.NodeStatus:
    status = await get_status(record.endpoint, channels=channels, call_ms_max=CALL_MS_MAX)
    if status.record.incarnation != record.incarnation:
        raise BatonError(
            Reason.INCARNATION_MISMATCH, f"{record.name} was restarted while it was waited for; it is another process."
        )
    if state_name(status) not in ("draining", "drained"):
        raise BatonError(Reason.BAD_LIFECYCLE, f"{record.name} is no longer being drained. So far: {status.story}.")
    return status


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _left(status: node_pb2.NodeStatus) -> str:
    return ", ".join(f"{count} {what}" for what, count in left_behind(status).items()) or "nothing"


def _text(node: str, status: node_pb2.NodeStatus) -> str:
    state = state_name(status)
    if state == "drained":
        verdict = "safe to delete" if status.safe_to_delete else "not safe to delete"
        if not status.safe_to_delete and not left_behind(status):
            verdict = "its pod is being marked as the first to go"
        return f"{node} is drained and holds {_left(status)}: {verdict}."
    return f"{node} is {state}; it holds {_left(status)}."
