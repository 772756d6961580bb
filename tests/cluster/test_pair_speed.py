"""What a running cluster says of a pair: its path, whether that is open, and how fast it is."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest
from batonpb import node_pb2

from baton.endpoint import split_endpoint
from kvtransfer.native.copy import copies_by
from kvtransfer.transport import TransportName
from kvtransfer.transports.tcp import moved_by
from tests.support.broken_sockets import break_connections
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

PROMPT_TOKENS = 1500
RATE = r"([0-9.e-]+)"


def described(cluster: RunningCluster, name: str, *flags: str) -> str:
    done = run_baton("describe", name, "--directory", cluster.cluster.directory, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_json(cluster: RunningCluster, name: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(described(cluster, name, "-o", "json"))["status"]
    return status


async def ask(cluster: RunningCluster, rng: random.Random) -> int:
    """Bytes that were written for it."""
    prompt = random_prompt(rng, PROMPT_TOKENS)
    answer = await cluster.client.generate(prompt, max_tokens=4)
    assert answer.ids == mock_tokens(prompt, 4)
    return int(answer.stats.bytes_written)


async def pair_of(cluster: RunningCluster) -> node_pb2.PairStatus:
    (pair,) = (await cluster.status("prefill-0")).pairs
    return pair


async def landed_from_writer(cluster: RunningCluster) -> int:
    (writer,) = (await cluster.status("decode-0")).writers
    return writer.bytes_landed


def rate_of(moved: node_pb2.MovedBytes) -> float:
    return moved.nbytes / (moved.moving_us / 1e6) if moved.moving_us else 0.0


async def break_link(cluster: RunningCluster, transport: TransportName) -> None:
    """From outside, with nothing under way, and until the prefill node has noticed."""
    _, port = split_endpoint(cluster.cluster.endpoints["decode-0"])
    assert break_connections(cluster.cluster.pids["decode-0"], transport, control_port=port) > 0

    async def closed() -> bool:
        return not (await pair_of(cluster)).link_open

    await wait_for(closed, "the prefill node to lose its link", story=cluster.story)


@pytest.mark.parametrize("transport", [TransportName.SHM, TransportName.TCP], ids=lambda transport: transport.value)
def test_a_pair_says_its_path_whether_it_is_open_and_how_fast_it_is(transport: TransportName) -> None:
    """Prompts are handed over, one after the other. The pair tells the bytes that the answers tell, in some time, which
    is as long while nothing is asked, and the rate that these two make; the decode node has seen the same bytes land.
    Broken from outside, the link is told to be closed, with the path that it was; the next request opens it, and the
    figures go on."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(81)
        before, landed = await pair_of(cluster), await landed_from_writer(cluster)  # of the harness's own first request
        written = sum([await ask(cluster, rng) for _ in range(3)])
        pair = await pair_of(cluster)
        assert (pair.transport, pair.link_open, list(pair.rejected_transports)) == (transport.value, True, [])
        assert pair.moved.nbytes == pair.bytes_moved == before.bytes_moved + written
        assert (written > 0, pair.moved.moving_us > 0, pair.moved.bytes_per_s > 0) == (True, True, True)
        assert pair.moved.bytes_per_s == pytest.approx(rate_of(pair.moved), rel=1 / pair.moved.moving_us)
        recent = pair.moved_recently  # none of it, on a machine that took ten seconds for this
        assert recent.nbytes <= pair.moved.nbytes
        assert recent.bytes_per_s == pytest.approx(rate_of(recent), rel=1 / max(1, recent.moving_us))
        (writer,) = (await cluster.status("decode-0")).writers
        assert (writer.transport, writer.bytes_landed) == (transport.value, landed + written)
        assert writer.landed_per_s <= writer.bytes_landed / 9

        await break_link(cluster, transport)
        broken = await pair_of(cluster)
        assert (broken.transport, broken.epoch, broken.link_failures) == (transport.value, pair.epoch, 1)
        assert broken.moved == pair.moved
        row = rf"^decode-0 +[0-9a-f]{{16}} +{transport.value} +closed +\d+ +{pair.bytes_moved}"
        row += rf" +{RATE} +(?:{RATE}|-) +1 +- +- +-$"
        reported = re.search(row, await asyncio.to_thread(described, cluster, "prefill-0"), re.MULTILINE)
        assert reported is not None
        assert float(reported[1]) == pytest.approx(pair.moved.bytes_per_s / 1e9, rel=0.01)

        written += await ask(cluster, rng)
        again = await pair_of(cluster)
        assert (again.transport, again.link_open) == (transport.value, True)
        assert again.moved.nbytes == before.bytes_moved + written
        assert again.moved.moving_us > pair.moved.moving_us
        data = await asyncio.to_thread(as_json, cluster, "prefill-0")
        (data_pair,) = data["pairs"]
        assert (data_pair["link_open"], data_pair["moved"]["bytes"]) == (True, again.moved.nbytes)
        assert data_pair["moved"]["bytes_per_s"] == pytest.approx(again.moved.bytes_per_s)
        facts = data["engine"]["facts"]
        assert facts["copies by"] == copies_by()
        assert facts["tcp moved by"] == moved_by()
        (seen,) = (await asyncio.to_thread(as_json, cluster, "decode-0"))["writers"]
        assert seen["bytes_landed"] == landed + written
        await assert_conserved(cluster)

    names = "shm,tcp" if transport is TransportName.SHM else "tcp"
    with running(mock_spec(both={"transports": names}, router_flags={"placement_wait_ms_max": 30_000})) as cluster:
        cluster.run(scenario(cluster))
