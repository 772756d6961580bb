"""Nodes that the directory still has and that do not answer: what the commands say of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess

from cli.nodes import UNREACHABLE_HINT
from cli.supervisor import DIRECTORY_NAME, ROUTER_NAME
from tests.support.cli_harness import BATON, RUN_S_MAX, clean_env, run_baton
from tests.support.cluster_harness import RunningCluster, mock_spec, running

KEPT = {"membership.ttl_ms": 60_000}
"""The directory keeps the dead for as long as the test takes, and no longer than it keeps anybody."""


def baton(cluster: RunningCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_baton(*arguments, "--directory", cluster.cluster.endpoints[DIRECTORY_NAME])


def test_a_node_was_killed_and_another_one_is_stopped() -> None:
    """`nodes` lists both, says of each in words why there is nothing to show, and what to make of it; `describe` ends
    with status 1."""
    with running(mock_spec(both=KEPT, router_flags=KEPT)) as cluster:
        dead, slow = cluster.cluster.endpoints["decode-0"], cluster.cluster.endpoints["prefill-0"]
        cluster.send_signal("decode-0", signal.SIGKILL)
        cluster.run(cluster.wait_exit("decode-0"))
        cluster.send_signal("prefill-0", signal.SIGSTOP)

        nodes = baton(cluster, "nodes", "--timeout", "3")
        assert (nodes.returncode, nodes.stderr) == (0, "")
        lines = nodes.stdout.splitlines()
        assert [re.split(" +", line)[:3] for line in lines[1:4]] == [
            ["decode-0", "decode", "unreachable"], ["prefill-0", "prefill", "unreachable"],
            ["router-0", "router", "ready"],
        ]  # fmt: skip
        why_dead = f"The process at {dead} does not answer: nothing listens there."
        # The kernel takes the connection for it, and nothing is said on that.
        why_slow = f"The process at {slow} does not answer: no connection came about in time."
        assert lines[4:] == ["", f"decode-0: {why_dead}", f"prefill-0: {why_slow}", UNREACHABLE_HINT]

        reported = json.loads(baton(cluster, "nodes", "--timeout", "3", "-o", "json").stdout)
        assert {node["name"]: node["problem"] for node in reported} == {
            "decode-0": why_dead, "prefill-0": why_slow, "router-0": None,
        }  # fmt: skip

        described = baton(cluster, "describe", "decode-0")
        assert (described.returncode, described.stderr) == (1, "")
        assert described.stdout.endswith(f"\nstate        unreachable: {why_dead}\n\n{UNREACHABLE_HINT}\n")
        cluster.send_signal("prefill-0", signal.SIGCONT)


def test_the_router_was_killed() -> None:
    """Commands that call routers name the one that does not answer."""
    with running(mock_spec(router_flags=KEPT)) as cluster:
        cluster.send_signal(ROUTER_NAME, signal.SIGKILL)
        cluster.run(cluster.wait_exit(ROUTER_NAME))
        pins = baton(cluster, "pins")
        assert (pins.returncode, pins.stdout) == (1, "")
        assert pins.stderr == "error: router-0 does not answer: nothing listens there. (reason PEER_UNREACHABLE)\n"


def test_the_directorys_port_in_place_of_the_routers() -> None:
    """And the other way round: both live, and neither is what was asked for."""
    with running(mock_spec()) as cluster:
        directory = cluster.cluster.endpoints[DIRECTORY_NAME]
        asked = run_baton("generate", "--token-ids", "1,2", "--router", directory)
        words = "runs, but does not know this call: it is another kind of process, or another version."
        assert (asked.returncode, asked.stdout) == (1, "")
        assert asked.stderr == f"error: The router at {directory} {words} (reason UNIMPLEMENTED)\n"
        router = cluster.cluster.router
        nodes = run_baton("nodes", "--directory", router)
        assert (nodes.returncode, nodes.stdout) == (1, "")
        assert nodes.stderr == f"error: The directory at {router} {words} (reason UNIMPLEMENTED)\n"


def test_an_address_with_http_before_it() -> None:
    """A habit from the other API; the message does not speak of IPv6."""
    asked = run_baton("generate", "hello", "--router", "http://127.0.0.1:8000")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == (
        "error: 'http://127.0.0.1:8000' is not a usable endpoint: expected host:port alone, as in 127.0.0.1:7000, and "
        "nothing like http:// before it.\n"
    )


def test_the_only_router_dies_in_the_middle_of_an_answer() -> None:
    """The command looks for another one as long as there is time. Then what there is of the answer stays on stdout, and
    the error says that it is not whole."""
    with running(mock_spec(both={"engine.mock_layer_delay_ms": 20.0})) as cluster:
        router = cluster.cluster.router
        command = ["generate", "--token-ids", "1,2", "--router", router, "--max-tokens", "200"]
        command += ["--ignore-eos", "--timeout", "4"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*BATON, *command], env=clean_env(), text=True, **pipes) as asked:  # type: ignore[call-overload]
            try:
                first = asked.stdout.read(1)
                cluster.send_signal(ROUTER_NAME, signal.SIGKILL)
                out, err = asked.communicate(timeout=RUN_S_MAX)
            finally:
                asked.kill()
        assert re.fullmatch(r"\d+( \d+)*\n", first + out)
        assert asked.returncode == 1
        assert err.startswith(
            "error: The answer broke off. There was no whole answer within 4 s. The last try: "
            f"The router at {router} does not answer: "
        )
        assert err.endswith(" (reason DEADLINE)\n")
