"""Nodes of a running cluster that are pods of a Kubernetes (a double of its API): a drain marks the pod to remove."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

from batonpb import node_pb2, node_pb2_grpc

from baton.pod import ANNOTATION, COST_FAILURES, COST_GIVEN_UP, COST_LOWERED, FIRST_TO_GO
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import CALL_S_MAX, RunningCluster, assert_conserved, mock_spec, running
from tests.support.kube_api_double import SILENCE, Call, KubeApi, kube_api, status_body
from tests.support.operators import as_operator

FORBIDDEN = 'pods "decode-x" is forbidden: User "baton-node" cannot patch resource "pods"'
WARNING = (
    "The deletion cost of decode-0's pod could not be set (its log says why): a smaller pool may remove another pod.\n"
)


def marks(calls: list[Call]) -> list[tuple[str, str | None]]:
    """Pod and value, in the order in which the API was told."""
    pods = [call.path.removeprefix("/api/v1/namespaces/baton/pods/").partition("?")[0] for call in calls]
    return list(zip(pods, [call.body["metadata"]["annotations"][ANNOTATION] for call in calls], strict=True))


def baton(cluster: RunningCluster, *arguments: str) -> tuple[int, str, str]:
    done = run_baton(*arguments, "--directory", cluster.cluster.directory)
    return done.returncode, done.stdout, done.stderr


def counters(status: node_pb2.NodeStatus) -> dict[str, float]:
    wanted = (COST_LOWERED, COST_FAILURES, COST_GIVEN_UP)
    return {counter.name: counter.value for counter in status.counters if counter.name in wanted}


async def drain(cluster: RunningCluster, name: str) -> node_pb2.NodeStatus:
    stub = node_pb2_grpc.NodeStub(cluster.command_channel(name))
    status: node_pb2.NodeStatus = await stub.Drain(
        node_pb2.LifecycleOrder(why="a test"), timeout=CALL_S_MAX, metadata=as_operator()
    )
    return status


def pods(api: KubeApi) -> dict[str, dict[str, object]]:
    """Only decode-0 is a pod; a call may take as long as the machine takes."""
    flags = {
        "pod.name": "decode-x", "pod.api": api.url, "pod.credentials": str(api.credentials), "pod.call_ms_max": 60_000,
    }  # fmt: skip
    return {"decode-0": flags}


def test_a_drained_pod_is_the_first_to_go(tmp_path: Path) -> None:
    """The cost is taken back at the start, lowered by a drain before the node says "safe to delete", taken back by
    undrain. Where the API refuses, the drain ends all the same, and says so; where it says nothing, the node is not
    safe to delete yet, and still ends when it is told to. A node that is no pod says nothing of pods."""
    with kube_api(tmp_path) as api, running(mock_spec(decode=2, node_flags=pods(api))) as cluster:
        assert marks(api.wait_for_calls(1)) == [("decode-x", None)]
        assert baton(cluster, "drain", "decode-0", "--wait") == (
            0, "decode-0 is drained and holds nothing: safe to delete.\n", "",
        )  # fmt: skip
        assert marks(api.calls) == [("decode-x", None), ("decode-x", FIRST_TO_GO)]
        status = cluster.run(cluster.status("decode-0"))
        assert counters(status) == {COST_LOWERED: 1, COST_FAILURES: 0, COST_GIVEN_UP: 0}
        assert counters(cluster.run(cluster.status("decode-1"))) == {}
        assert baton(cluster, "undrain", "decode-0")[0] == 0
        assert marks(api.wait_for_calls(3))[2:] == [("decode-x", None)]

        api.decide = lambda call: (403, status_body(FORBIDDEN, 403))
        assert baton(cluster, "drain", "decode-0", "--wait") == (
            0, "decode-0 is drained and holds nothing: safe to delete.\n", WARNING,
        )  # fmt: skip
        assert counters(cluster.run(cluster.status("decode-0"))) == {
            COST_LOWERED: 0, COST_FAILURES: 1, COST_GIVEN_UP: 1,
        }  # fmt: skip
        _, text, _ = baton(cluster, "describe", "decode-0")
        assert re.search(rf"^{COST_GIVEN_UP} +1$", text, re.MULTILINE), text
        assert "pod deletion cost not set" in cluster.log_text("decode-0")

        api.decide = lambda call: (SILENCE, b"")
        assert baton(cluster, "drain", "decode-0")[:2] == (
            0, "decode-0 is drained and holds nothing: its pod is being marked as the first to go.\n",
        )  # fmt: skip
        assert marks(api.wait_for_calls(5))[4:] == [("decode-x", FIRST_TO_GO)]
        assert not cluster.run(drain(cluster, "decode-0")).safe_to_delete

        async def end() -> int | None:
            cluster.set_down("decode-0")
            cluster.send_signal("decode-0", signal.SIGTERM)
            async with asyncio.timeout(CALL_S_MAX):
                return await cluster.wait_exit("decode-0")

        assert cluster.run(end()) == 0, cluster.story()
        assert len(api.calls) == 5
        cluster.run(assert_conserved(cluster))
