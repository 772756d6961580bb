"""The operator's credential in commands, and the port that they call."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.operator import OperatorToken
from baton.rpc import ChannelLimits, Channels
from baton.wire import NodeRecord, Role, record_from_proto, record_to_proto
from cli.nodes import NodeView, view_node
from cli.operator import Operator
from router.config import RouterConfig
from tests.support.cli_harness import Foreground, free_endpoint, run_baton


def router_record(endpoint: str, admin_endpoint: str = "") -> NodeRecord:
    return NodeRecord(
        name=NodeName("router-0"), role=Role.ROUTER, incarnation=Incarnation(7), endpoint=endpoint,
        lifecycle=Lifecycle.READY, admin_endpoint=admin_endpoint,
    )  # fmt: skip


def test_the_token_does_not_leave_the_machine_unencrypted(tmp_path: Path) -> None:
    """It is sent over the loopback, and elsewhere only with --insecure. It is read only where it would be sent."""
    path = tmp_path / "token"
    sent = (("authorization", f"Bearer {OperatorToken(path).read_or_make()}"),)
    careful = Operator(operator_token_file=path, insecure=False)
    for near in ("127.0.0.1:1", "127.3.2.1:1", "[::1]:1", "localhost:1"):
        assert careful.metadata(near) == sent
    for far in ("10.0.0.2:7002", "decode-0:7002", "[fe80::1]:7002", "localhost.example.com:7002"):
        with pytest.raises(BatonError) as caught:
            careful.metadata(far)
        assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "insecure")
        assert far in caught.value.message
        assert Operator(operator_token_file=path, insecure=True).metadata(far) == sent


def test_a_router_whose_port_for_operators_is_on_another_machine() -> None:
    """The directory names a port of the router's own loopback. Nobody answers there on this one, and the text says
    where to ask. Where the router itself is on this machine it says nothing of others."""

    async def seen(record: NodeRecord) -> NodeView:
        channels = Channels(limits=ChannelLimits())
        try:
            return await view_node(record, channels=channels, call_ms_max=5_000)
        finally:
            await channels.close()

    admin = free_endpoint()
    silent = f"The process at {admin} does not answer: nothing listens there."
    far = asyncio.run(seen(router_record("10.0.0.1:7000", admin)))
    assert far.problem == f"{silent} Commands reach router-0 on its own machine only (admin_listen)."
    assert asyncio.run(seen(router_record("127.0.0.1:7000", admin))).problem == silent


def test_a_record_names_the_port_for_operators() -> None:
    """It travels; a node without one is called where everybody calls it; one that cannot be called is refused."""
    record = router_record("10.0.0.1:7000", "10.0.0.1:7003")
    assert record_from_proto(record_to_proto(record)) == record
    assert (record.command_endpoint, router_record("10.0.0.1:7000").command_endpoint) == (
        "10.0.0.1:7003", "10.0.0.1:7000",
    )  # fmt: skip
    for wrong in ("0.0.0.0:7003", "10.0.0.1:0", "10.0.0.1"):
        with pytest.raises(BatonError, match="is not a usable endpoint"):
            record_from_proto(record_to_proto(router_record("10.0.0.1:7000", wrong)))


def test_the_port_for_operators_is_on_the_loopback_without_tls() -> None:
    """As the ports of nodes are; `insecure` lifts it. The port for clients may be anywhere."""
    RouterConfig(listen="0.0.0.0:7000")
    RouterConfig(admin_listen="0.0.0.0:7003", insecure=True)
    with pytest.raises(InvalidField, match="without TLS whoever reaches it controls this process") as caught:
        RouterConfig(admin_listen="10.0.0.1:7003")
    assert caught.value.field == "admin_listen"


def test_a_router_tells_where_operators_reach_it(tmp_path: Path) -> None:
    """One that listens for operators on all addresses advertises the host that it advertises to clients."""
    places = [tmp_path / name for name in ("directory", "router")]
    for place in places:
        place.mkdir()
    with Foreground("directory", "--listen", "127.0.0.1:0", folder=places[0]) as directory:
        directory.wait_for("ready directory ")
        where = directory.out.split()[-1]
        flags = ("--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0", "--insecure", "true", "--directory", where)
        with Foreground("router", *flags, folder=places[1]) as router:
            router.wait_for("ready router-0 ")
            said = re.fullmatch(r"ready router-0 (127\.0\.0\.1:\d+) admin=(127\.0\.0\.1:\d+)\n", router.out)
            assert said is not None and said[1] != said[2], router.out
            shown = run_baton("describe", "router-0", "--directory", where).stdout
            assert re.search(rf"^endpoint +{said[1]}\nfor commands +{said[2]}$", shown, re.MULTILINE)
            assert router.stop(signal.SIGINT) == 0
        assert directory.stop(signal.SIGINT) == 0


def test_a_cluster_that_cannot_make_the_token(tmp_path: Path) -> None:
    """No process is left, and the message names the file and the setting."""
    mock = ("up", "--engine-kind", "mock", "--blocks", "64", "--listen", "127.0.0.1:0", "--directory-listen",
            "127.0.0.1:0")  # fmt: skip
    with Foreground(*mock, folder=tmp_path, env={"XDG_STATE_HOME": "/proc"}) as up:
        assert up.wait() == 1
        last = up.err.splitlines()[-1]
        assert " could not start: Cannot make the operator's token /proc/baton/operator_token: " in last
        assert "--operator-token-file (setting operator_token_file)" in last
        assert (up.processes(), up.files()) == ([], [])
