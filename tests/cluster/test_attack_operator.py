"""Orders and pins by clients who are no operators, at the public port and at those for operators.

The router has a token of its own here, in a file that is named to it; the nodes have the default one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from batonpb import inference_pb2, node_pb2, node_pb2_grpc, pins_pb2, pins_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import BatonError, Reason
from baton.operator import Metadata, OperatorToken
from baton.rpc import HEALTH_SERVICE, REFLECTION_SERVICES, rpc_errors
from cli.nodes import state_name
from cli.supervisor import ROUTER_NAME
from tests.support.attack import Front, attacker_channel, front_door, nobody_notices
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import CALL_S_MAX, error_of, http_call, metrics_text
from tests.support.operators import as_operator

ORDERS: Final = ("Drain", "Cordon", "Uncordon", "Undrain")
ROUNDS: Final = 15
DECODE: Final = "decode-0"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operator") / "token"


@pytest.fixture(scope="module")
def front(token_file: Path) -> Iterator[Front]:
    with front_door(router_flags={"operator_token_file": str(token_file)}) as front:
        yield front


def orders(channel: grpc.aio.Channel, metadata: Metadata) -> list[Callable[[], Awaitable[Any]]]:
    """All that a caller of Node and Pins could do harm with."""
    node, pins = node_pb2_grpc.NodeStub(channel), pins_pb2_grpc.PinsStub(channel)
    why = node_pb2.LifecycleOrder(why="an attack")
    pin = pins_pb2.PinRequest(name="mine", token_ids=inference_pb2.TokenIds(ids=range(1, 40)))
    sent = {"timeout": CALL_S_MAX, "metadata": metadata}
    return [
        *(lambda order=order: getattr(node, order)(why, **sent) for order in ORDERS),
        lambda: pins.Pin(pin, **sent),
        lambda: pins.Unpin(pins_pb2.UnpinRequest(name="mine"), **sent),
        lambda: pins.ListPins(pins_pb2.ListPinsRequest(), **sent),
    ]


async def refusals(channel: grpc.aio.Channel, metadata: Metadata) -> set[Reason]:
    """What the orders are refused with."""

    async def refused(order: Callable[[], Awaitable[Any]]) -> BatonError:
        async def call() -> None:
            with rpc_errors("it"):
                await order()

        return await error_of(call())

    return {(await refused(order)).reason for order in orders(channel, metadata)}


async def services(channel: grpc.aio.Channel) -> set[str]:
    """What a port says that it serves."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=CALL_S_MAX)
    return {each.name for each in (await call.read()).list_services_response.service}


async def nothing_happened(front: Front) -> None:
    """Router and nodes take requests, and never did anything else; nobody has a pin."""
    for name, status in (await front.statuses()).items():
        assert state_name(status) == "ready", (name, status.story)
        assert [word for word in ("CORDONED", "DRAINING", "DRAINED") if word in status.story] == [], name
        assert [pin.name for pin in status.prefixes.pins] == []


def test_nobody_gives_orders_at_the_public_port(front: Front, token_file: Path) -> None:
    """A client calls Node and Pins a few hundred times, without a token and with the right one: there are no such
    services. The router takes requests as before, and others notice nothing."""

    async def attack() -> None:
        async with attacker_channel(front) as channel:
            for metadata in ((), OperatorToken(token_file).metadata()) * ROUNDS:
                assert await refusals(channel, metadata) == {Reason.UNIMPLEMENTED}
            status = node_pb2_grpc.NodeStub(channel).GetStatus(node_pb2.GetStatusRequest(), timeout=CALL_S_MAX)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await services(channel) == {"baton.v1.Inference", HEALTH_SERVICE, *REFLECTION_SERVICES}

    front.run(nobody_notices(front, attack))
    front.run(nothing_happened(front))


def test_an_order_without_the_token_changes_nothing(front: Front, token_file: Path) -> None:
    """At the router's port for operators, and at a node's only port: no token, another one, the token of another
    process."""

    async def attack() -> None:
        router, decode = front.command_channel(ROUTER_NAME), front.command_channel(DECODE)
        other = (("authorization", "Bearer " + "x" * 43),)
        for metadata in ((), other, as_operator()) * ROUNDS:
            assert await refusals(router, metadata) == {Reason.UNAUTHENTICATED}
        for metadata in ((), other, OperatorToken(token_file).metadata()) * ROUNDS:
            # Of pins a node knows nothing.
            assert await refusals(decode, metadata) == {Reason.UNAUTHENTICATED, Reason.UNIMPLEMENTED}

    front.run(nobody_notices(front, attack))
    front.run(nothing_happened(front))


def test_metrics_are_not_for_clients(front: Front) -> None:
    """They are served at their own port only, and nothing else is served there."""
    metrics = front.cluster.router_others["metrics"]
    assert http_call(front.http, "GET", "/metrics")[0] == 404
    assert "baton_requests_running 0.0\n" in metrics_text(front)
    assert [http_call(metrics, "GET", path)[0] for path in ("/v1/models", "/health", "/version")] == [404] * 3


def test_an_operator_gives_orders(front: Front, token_file: Path, tmp_path: Path) -> None:
    """`baton drain` as a user calls it: with the default token, which is the node's but not the router's; with a file
    that is named by flag or environment; with one that is not there. Looking needs no token."""
    directory = ("--directory", front.cluster.directory)

    def baton(*arguments: str, **env: str) -> tuple[int, str, str]:
        done = run_baton(*arguments, *directory, env=env)
        return done.returncode, done.stdout, done.stderr

    named = ("--operator-token-file", str(token_file))
    drained = "is drained and holds nothing: safe to delete.\n"
    assert baton("drain", DECODE, "--wait") == (0, f"{DECODE} {drained}", "")
    assert baton("undrain", DECODE) == (0, f"{DECODE} is ready; it holds nothing.\n", "")

    status, said, why = baton("drain", ROUTER_NAME, "--wait")
    assert (status, said) == (1, "")
    assert f"The token is in {token_file} on this process's machine" in why
    assert why.endswith("(reason UNAUTHENTICATED)\n")
    status, said, why = baton("cordon", DECODE, *named)
    assert (status, said) == (1, "") and why.endswith("(reason UNAUTHENTICATED)\n")
    missing = tmp_path / "none"
    status, said, why = baton("drain", ROUTER_NAME, "--operator-token-file", str(missing))
    assert (status, said) == (2, "") and why.startswith(f"error: There is no operator's token at {missing}.")
    assert not missing.exists()
    assert state_name(front.run(front.status(ROUTER_NAME))) == state_name(front.run(front.status(DECODE))) == "ready"
    assert f"\n{ROUTER_NAME} " in "\n" + baton("nodes")[1].partition("\n")[2]

    assert baton("drain", ROUTER_NAME, "--wait", *named) == (0, f"{ROUTER_NAME} {drained}", "")
    undrained = baton("undrain", ROUTER_NAME, BATON_OPERATOR_TOKEN_FILE=str(token_file))
    assert undrained == (0, f"{ROUTER_NAME} is ready; it holds nothing.\n", "")
    assert baton("pin", "sea", "--token-ids", ",".join(map(str, range(1, 33))), *named)[0] == 0
    assert baton("pins")[0] == 1
    assert baton("unpin", "sea", *named) == (0, "sea is unpinned.\n", "")
