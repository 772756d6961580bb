"""`baton pin`, `unpin`, `pins`, and what `describe` and `nodes` say of prefixes, against a running cluster."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cli.supervisor import DIRECTORY_NAME
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import RunningCluster, mock_spec, mock_tokens, random_prompt, running, wait_for

SIZE = 16
BLOCKS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running(mock_spec(blocks=BLOCKS)) as cluster:
        yield cluster


def baton(cluster: RunningCluster, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = run_baton(*arguments, "--directory", cluster.cluster.endpoints[DIRECTORY_NAME], stdin=stdin)
    return done.returncode, done.stdout, done.stderr


def as_json(cluster: RunningCluster, *arguments: str) -> Any:
    status, out, err = baton(cluster, *arguments, "-o", "json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_the_life_of_a_pin(cluster: RunningCluster) -> None:
    """Pinned, warmed, shown on every node, hit, unpinned; a second unpin is an error."""
    prefix = random_prompt(random.Random(1), 3 * SIZE + 1)
    ids = ",".join(map(str, prefix))
    (pin,) = as_json(cluster, "pin", "support", "--token-ids", ids, "--ttl", "900", "--warm")
    left_ms = pin.pop("ttl_left_ms")
    assert 0 < left_ms <= 900_000
    nodes = [{"node": name, "blocks": 3, "blocks_pinned": 0, "problem": None} for name in ("decode-0", "prefill-0")]
    reported = {"name": "support", "tokens": 49, "has_cache_salt": False, "from_config": False, "router": "router-0"}
    assert pin == {**reported, "nodes": nodes}

    async def warmed() -> bool:
        held = [(await cluster.status(name)).prefixes.pins for name in ("prefill-0", "decode-0")]
        return [[pin.blocks_pinned for pin in pins] for pins in held] == [[3], [3]]

    cluster.run(wait_for(warmed, "the warm-up to end", story=cluster.story))
    answer = cluster.run(cluster.client.generate([*prefix, 5], max_tokens=4))
    assert answer.ids == mock_tokens([*prefix, 5], 4)
    status, out, _ = baton(cluster, "pins")
    assert status == 0
    assert re.search(r"^support +49  no +\d+ s +api +router-0  decode-0 \d/3, prefill-0 \d/3$", out, re.MULTILINE), out
    for name in ("prefill-0", "decode-0"):
        status, out, _ = baton(cluster, "describe", name)
        assert status == 0
        assert re.search(r"^pinned +3 blocks of at most 30$", out, re.MULTILINE), out
        assert re.search(r"^prefix hits +\d+ of \d+ prompt tokens", out, re.MULTILINE), out
        assert re.search(r"^support +3 +3 +\d+ s$", out, re.MULTILINE), out
        prefixes = as_json(cluster, "describe", name)["status"]["prefixes"]
        assert prefixes["hit_tokens"] >= 3 * SIZE
        assert [(p["name"], p["blocks"], p["blocks_pinned"]) for p in prefixes["pins"]] == [("support", 3, 3)]
        assert (prefixes["pinned_blocks"], prefixes["pinned_blocks_max"]) == (3, 30)
    status, out, _ = baton(cluster, "nodes")
    assert " HITS " in out.splitlines()[0]
    assert baton(cluster, "unpin", "support") == (0, "support is unpinned.\n", "")
    assert baton(cluster, "pins")[:2] == (0, "No prefix is pinned.\n")
    status, out, err = baton(cluster, "unpin", "support")
    assert (status, out) == (1, "")
    assert "Nobody has a pin 'support'" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["pin", "a"], 2, "Give either a PREFIX or --token-ids"),
        (["pin", "a", "text", "--token-ids", "1,2"], 2, "Give either a PREFIX or --token-ids"),
        (["pin", "a", "--token-ids", "1,2", "--system"], 2, "--system needs the message"),
        (["pin", "a", "--token-ids", "1,x"], 2, "no list of numbers"),
        (["pin", "a", "--token-ids", "1,2", "--ttl", "0"], 2, "'0' is not from 0.001 to 86400"),
        (["pin", "a", "--token-ids", "1,2"], 1, "must fill at least one block of 16"),
        (["pin", "a b", "--token-ids", "1,2"], 1, "'a b' is no name of a pin"),
        (["pin", "a", "--token-ids", "1000"], 1, "Token id 1000 at position 0"),
        (["pin", "a", "--token-ids", "1,2", "--cache-salt", ""], 1, "cache_salt"),
        (["pin", "a", "the sea"], 1, "without a tokenizer"),
        (["pin", "a", "the sea", "--system"], 1, "without a tokenizer"),
        (["pin", "a", "--token-ids", ",".join(["7"] * SIZE * 31)], 1, "31 blocks would be pinned here; at most 30"),
    ],
)
def test_bad_input_is_told_what_is_wrong(
    cluster: RunningCluster, arguments: list[str], status: int, words: str
) -> None:
    """One message, the exit status of its kind, and no pin."""
    found, out, err = baton(cluster, *arguments)
    assert (found, out) == (status, ""), err
    assert words in err
    assert "Traceback" not in err
    assert as_json(cluster, "pins") == []


def test_what_a_warm_up_has_made_is_shown() -> None:
    """Without waiting for the next renewal of the leases, which here is minutes away."""
    with running(mock_spec(blocks=BLOCKS, router_flags={"pins.lease_ms": 600_000})) as cluster:
        ids = ",".join(map(str, random_prompt(random.Random(3), 2 * SIZE + 1)))
        assert baton(cluster, "pin", "a", "--token-ids", ids, "--warm")[0] == 0

        async def shown() -> bool:
            (pin,) = await asyncio.to_thread(as_json, cluster, "pins")
            return [(on["node"], on["blocks_pinned"]) for on in pin["nodes"]] == [("decode-0", 2), ("prefill-0", 2)]

        cluster.run(wait_for(shown, "the blocks that the warm-up has pinned"))


def test_text_from_stdin(cluster: RunningCluster) -> None:
    """`-` reads the prefix from stdin; the router of this cluster has no tokenizer, and says so."""
    status, _, err = baton(cluster, "pin", "a", "-", stdin="the sea")
    assert status == 1
    assert "without a tokenizer" in err


def test_without_a_cluster() -> None:
    """Nobody answers: one message that names the place."""
    done = run_baton("pins", "--directory", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == 1
    assert "No directory answers at 127.0.0.1:1" in done.stderr
