"""Pairs whose shared memory breaks, or cannot be had, in a cluster of processes: they go on over tcp, and say so."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from batonpb import node_pb2

from baton.endpoint import split_endpoint
from cli.services import Service
from cli.supervisor import Cluster
from kvtransfer.transport import TransportName
from tests.support.broken_sockets import break_connections
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

PROMPT_TOKENS = 1500
AT_ONCE = 4
RATE = r"[0-9.e-]+"
SLOW_PREFILL = {"engine.mock_layer_delay_ms": 40}
"""Three chunks of four layers: half a second in the middle of a handoff."""


async def ask(cluster: RunningCluster, rng: random.Random) -> Answer:
    prompt = random_prompt(rng, PROMPT_TOKENS)
    answer = await cluster.client.generate(prompt, max_tokens=6)
    assert answer.ids == mock_tokens(prompt, 6)
    return answer


async def link(cluster: RunningCluster) -> node_pb2.PairStatus:
    (pair,) = (await cluster.status("prefill-0")).pairs
    return pair


async def counters(cluster: RunningCluster, name: str) -> dict[str, float]:
    return {counter.name: counter.value for counter in (await cluster.status(name)).counters}


async def break_in_mid_handoff(cluster: RunningCluster, rng: random.Random, transport: TransportName) -> None:
    """Break decode-0's data connections while a prompt is being written over them. Every request of that time has the
    right answer; where its blocks were being written, by a second attempt with a grant of its own."""
    before = await link(cluster)
    calls = [asyncio.create_task(ask(cluster, rng)) for _ in range(AT_ONCE)]

    async def written() -> bool:
        # The writer has its grant, and has told the router of it: what breaks now is a resumption.
        writes = (await link(cluster)).bytes_moved > before.bytes_moved
        return writes and (await cluster.status("decode-0")).record.load.blocks.writer_owned > 0

    await wait_for(written, "a handoff to decode-0", story=cluster.story)
    _, port = split_endpoint(cluster.cluster.endpoints["decode-0"])
    assert break_connections(cluster.cluster.pids["decode-0"], transport, control_port=port) > 0

    async def noticed() -> bool:
        return (await link(cluster)).link_failures > before.link_failures

    await wait_for(noticed, "the prefill node to lose its link", story=cluster.story)
    answers = await asyncio.gather(*calls)
    assert any(answer.stats.resumptions for answer in answers), "no request was in mid-handoff"
    await assert_conserved(cluster)


@pytest.mark.slow
def test_a_pair_whose_shared_memory_breaks_twice_goes_on_over_tcp() -> None:
    """Twice the shm connection is cut from outside in mid-handoff. The pair then uses tcp; the node's log says so once,
    its counter, `baton describe` and the answers as well. Cut too, tcp is not given up, and what the broken shared
    memory has left behind does not keep the fence of that waiting."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(71)
        assert (await ask(cluster, rng)).stats.transport == "shm"
        await break_in_mid_handoff(cluster, rng, TransportName.SHM)
        assert (await ask(cluster, rng)).stats.transport == "shm"
        assert list((await link(cluster)).transports_given_up) == []
        await break_in_mid_handoff(cluster, rng, TransportName.SHM)
        assert {(await ask(cluster, rng)).stats.transport for _ in range(2)} == {"tcp"}
        pair = await link(cluster)
        assert (pair.transport, list(pair.transports_given_up), pair.link_failures) == ("tcp", ["shm"], 2)
        assert (await counters(cluster, "prefill-0"))["transports given up"] == 1
        seen = await counters(cluster, "decode-0")
        assert seen["tcp: frames_landed"] > 0
        assert (seen["shm: connections_writing"], seen["shm: connections_unproved"]) == (0, 0)

        await break_in_mid_handoff(cluster, rng, TransportName.TCP)
        assert (await ask(cluster, rng)).stats.transport == "tcp"
        assert (await link(cluster)).epoch > pair.epoch
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill_flags=SLOW_PREFILL,
        router_flags={"placement_wait_ms_max": 30_000},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
        log = cluster.log_text("prefill-0")
        assert len(re.findall(r"transport given up .*transport=shm.*left=tcp", log)) == 1, log
        assert log.count("transport given up") == 1
        reported = describe(cluster)
        assert re.search(
            rf"^decode-0 +[0-9a-f]{{16}} +tcp +open +[1-9]\d* +[1-9]\d* +{RATE} +{RATE}"
            r" +3 +shm \(retry in \d+ s\) +- +-$",
            reported,
            re.MULTILINE,
        )
        assert re.search(r"^transports given up +1$", reported, re.MULTILINE), reported
        (data,) = json.loads(describe(cluster, "-o", "json"))["status"]["pairs"]
        assert (data["transport"], data["transports_given_up"], data["link_failures"]) == ("tcp", ["shm"], 3)
        assert data["rejected_transports"] == []


def describe(cluster: RunningCluster, *flags: str) -> str:
    done = run_baton("describe", "prefill-0", "--directory", cluster.cluster.directory, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_pid_namespace(command: list[str]) -> list[str]:
    return [sys.executable, str(Path(__file__).parents[1] / "support" / "in_pid_namespace.py"), *command]


@pytest.mark.slow
def test_a_pair_that_cannot_share_memory_uses_tcp_at_once() -> None:
    """The prefill node lives in a PID namespace of its own, as in a container: the decode node could not watch it
    through a pidfd, so shm is never tried. The first request goes over tcp, nothing has failed, and all say so, and
    why: the node's log once, however many links there are, its counter, the pair's status and `baton describe`."""
    if subprocess.run(in_pid_namespace(["/bin/true"]), capture_output=True, check=False).returncode != 0:
        pytest.skip("a PID namespace cannot be made here (CAP_SYS_ADMIN)")
    real = Cluster._command

    def command(self: Cluster, name: str, service: Service, directory: str) -> list[str]:
        plain = real(self, name, service, directory)
        return in_pid_namespace(plain) if service is Service.PREFILL else plain

    spec = mock_spec(prefill_flags=SLOW_PREFILL, router_flags={"placement_wait_ms_max": 30_000})
    with patch.object(Cluster, "_command", command), running(spec) as cluster:

        async def scenario() -> None:
            rng = random.Random(72)
            assert {(await ask(cluster, rng)).stats.transport for _ in range(3)} == {"tcp"}
            pair = await link(cluster)
            assert (pair.transport, list(pair.transports_given_up), pair.link_failures) == ("tcp", [], 0)
            assert list((await cluster.status("prefill-0")).record.transports) == ["shm", "tcp"]
            assert (await counters(cluster, "decode-0"))["shm: connections_made"] == 0
            assert [(other.transport, other.why) for other in pair.rejected_transports] == [
                ("shm", "another PID namespace")
            ]
            assert (await counters(cluster, "prefill-0"))["pairs that do not use a better transport"] == 1
            await break_in_mid_handoff(cluster, rng, TransportName.TCP)
            assert (await ask(cluster, rng)).stats.transport == "tcp"
            await assert_conserved(cluster)

        cluster.run(scenario())
        log, reported = cluster.log_text("prefill-0"), describe(cluster)
        assert log.count("data link peer=decode-0 transport=tcp") == 2
        assert log.count("a better transport is not used") == 1
        warning = r'^\S+ WARNING .*used peer=decode-0 transport=tcp instead_of="shm \(another PID namespace\)"$'
        assert re.search(warning, log, re.MULTILINE), log
        row = rf"^decode-0 .* tcp +open .* {RATE} +1 +- +- +shm \(another PID namespace\)$"
        assert re.search(row, reported, re.MULTILINE), reported
        (data,) = json.loads(describe(cluster, "-o", "json"))["status"]["pairs"]
        assert data["rejected_transports"] == [{"transport": "shm", "why": "another PID namespace"}]
