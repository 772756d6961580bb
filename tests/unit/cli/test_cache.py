"""`baton cache`, and what `describe` says of tiers, against a running cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.supervisor import DIRECTORY_NAME
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import RunningCluster, mock_spec, random_prompt, running, wait_for

SIZE = 16
POSITION_BYTES = 4 * 2 * SIZE * 8
HOST_BLOCKS = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Prefill has both tiers, decode has none."""
    folder: Path = tmp_path_factory.mktemp("disk")
    flags = {
        "store.host_bytes": HOST_BLOCKS * POSITION_BYTES,
        "store.disk_path": str(folder),
        "store.disk_bytes": 1 << 20,
    }
    with running(mock_spec(blocks=60, prefill_flags=flags)) as cluster:
        yield cluster


def baton(cluster: RunningCluster, *arguments: str) -> tuple[int, str, str]:
    done = run_baton(*arguments, "--directory", cluster.cluster.endpoints[DIRECTORY_NAME])
    return done.returncode, done.stdout, done.stderr


def tiers(cluster: RunningCluster, node: str) -> dict[str, Any]:
    status, out, err = baton(cluster, "cache", "-o", "json")
    assert (status, err) == (0, "")
    (found,) = [each for each in json.loads(out) if each["name"] == node]
    assert found["problem"] is None
    return {tier["tier"]: tier for tier in found["tiers"]}


def test_tiers_are_shown_and_emptied(cluster: RunningCluster) -> None:
    """One prompt of four blocks, asked twice: it is in all three tiers of the prefill node; two are emptied."""
    prompt = random_prompt(random.Random(5), 4 * SIZE + 3)
    for _ in range(2):
        cluster.run(cluster.client.generate(prompt, max_tokens=2))

    async def is_down() -> bool:
        load = (await cluster.status("prefill-0")).record.load
        return [tier.blocks for tier in load.tiers] == [4, 4, 4]

    cluster.run(wait_for(is_down, "the blocks to be on disk", story=cluster.story))
    found = tiers(cluster, "prefill-0")
    assert [(name, tier["blocks"], tier["blocks_max"]) for name, tier in found.items()] == [
        ("device", 4, 60), ("host", 4, HOST_BLOCKS), ("disk", 4, found["disk"]["blocks_max"]),
    ]  # fmt: skip
    assert [tier["blocks_hit"] for tier in found.values()] == [4, 0, 0]
    assert [tier["blocks_stored"] for tier in found.values()] == [0, 4, 4]
    assert {tier["block_bytes"] for tier in found.values()} == {POSITION_BYTES}
    assert list(tiers(cluster, "decode-0")) == ["device"]
    status, out, _ = baton(cluster, "cache")
    assert status == 0
    assert [line.split()[:5] for line in out.splitlines() if line.startswith("prefill-0  h")] == [
        ["prefill-0", "host", "4", "of", str(HOST_BLOCKS)]
    ]
    assert " UNUSED " in baton(cluster, "describe", "prefill-0")[1]
    assert baton(cluster, "cache", "empty", "all", "--tier", "host") == (0, "prefill-0: 4 blocks forgotten.\n", "")
    assert baton(cluster, "cache", "empty", "prefill-0", "--tier", "disk")[:2] == (
        0,
        "prefill-0: 4 blocks forgotten.\n",
    )
    assert [tier["blocks"] for tier in tiers(cluster, "prefill-0").values()] == [4, 0, 0]


def test_a_tier_that_a_node_has_not_is_refused(cluster: RunningCluster) -> None:
    status, out, err = baton(cluster, "cache", "empty", "decode-0", "--tier", "disk")
    assert (status, out) == (1, "")
    assert "This node has no tier 'disk' below its region" in err
