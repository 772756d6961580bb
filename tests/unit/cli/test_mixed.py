"""`baton mixed` and `baton up --mixed`, as a user runs them: what is refused, and a cluster of mixed nodes alone."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidField
from cli.services import Service
from cli.supervisor import ClusterSpec
from cli.up import UpConfig
from engine.build import EngineConfig, EngineKind
from mixed_node.config import MixedConfig
from prefill_node.local_policy import LocalFallback
from tests.support.cli_harness import Foreground, run_baton

MIXED = ("mixed", "--name", "mixed-0", "--engine-kind", "mock")
UP = ("up", "--engine-kind", "mock", "--blocks", "64", "--listen", "127.0.0.1:0", "--directory-listen", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("command", "arguments", "problem"),
    [
        (MIXED, ["--handoff-tokens-min", "-1"], "--handoff-tokens-min: must not be negative, not -1"),
        (MIXED, ["--handoff-tokens-min", "many"], "--handoff-tokens-min: Input should be a valid integer"),
        (
            MIXED,
            ["--local-fallback", "sometimes"],
            "--local-fallback: Input should be 'never', 'unreachable' or 'full'",
        ),
        (MIXED, ["--requests-max", "65"], "--requests-max: must not exceed engine.sequences_max (64)"),
        (MIXED, ["--queue-max", "0"], "--queue-max: must be positive, not 0"),
        (MIXED, ["--transports", "shm,shm"], "--transports: must name at least one transport, none of them twice"),
        (MIXED, ["--spill-host-blocks", "64"], "--spill-host-blocks: is 64; must be 0 on a mixed node, whose answers"),
        (UP, ["--mixed", "-1"], "--mixed: must not be negative, not -1"),
        (UP, ["--mixed", "1", "--decode", "-1"], "--decode: must not be negative, not -1"),
        (UP, ["--prefill", "0"], "--prefill: must be positive, not 0"),
        (UP, ["--decode", "0"], "--decode: must be positive, not 0"),
    ],
)
def test_a_wrong_value_is_named(command: tuple[str, ...], arguments: list[str], problem: str) -> None:
    """Status 2 and one problem, under the flag that it came from; nothing is started."""
    result = run_baton(*command, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    head, *problems = result.stderr.splitlines()
    assert head == "error: Wrong configuration:"
    assert len(problems) == 1
    assert problems[0].strip().startswith(problem)


def test_too_many_nodes() -> None:
    """All engines count."""
    result = run_baton(*UP, "--mixed", "60", "--prefill", "3", "--decode", "2")
    assert (result.returncode, result.stderr) == (
        2,
        "error: Wrong configuration:\n  --prefill: makes 65 nodes with decode and mixed; at most 64\n",
    )


def test_the_halves_of_a_configuration() -> None:
    """Each key reaches the half that it belongs to, and the defaults are the halves' own."""
    engine = ClusterSpec(mixed=1).flags_of("mixed-0", Service.MIXED, "127.0.0.1:7070")
    assert engine["engine.compute_threads"] == str(ClusterSpec(mixed=1).compute_threads())
    spec = ClusterSpec(prefill=0, decode=0, mixed=2)
    assert [name for name, _ in spec.processes()] == ["directory", "router-0", "mixed-0", "mixed-1"]
    with pytest.raises(InvalidField, match="decode must be positive"):
        ClusterSpec(decode=0)
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({}, (1, 1)),
        ({"mixed": 2}, (0, 0)),
        ({"mixed": 2, "decode": 1}, (0, 1)),
    ]
    for given, counts in cases:
        found = UpConfig(**given).counts
        assert (found[Service.PREFILL], found[Service.DECODE]) == counts
    config = MixedConfig(
        name="m", engine=EngineConfig(kind=EngineKind.MOCK), queue_max=7, orphan_ms=9, busy_retry_ms=11
    )
    prefill, decode = config.prefill_half(), config
    assert (prefill.queue_max, decode.orphan_ms, prefill.busy_retry_ms, decode.busy_retry_ms) == (7, 9, 11, 11)
    assert (prefill.tcp, decode.tcp) == (config.tcp, config.tcp)
    assert config.policy().fallback is LocalFallback.UNREACHABLE


@pytest.mark.slow
def test_a_cluster_of_mixed_nodes_alone(tmp_path: Path) -> None:
    """`up --mixed 2` starts no other node; `generate` says how a request ran; `nodes`, `describe`, `cordon`, `uncordon`
    and `drain` know the role; Ctrl-C ends it all."""
    with Foreground(*UP, "--mixed", "2", folder=tmp_path) as up:
        up.wait_for("Ctrl-C stops it.")
        used = dict(re.findall(r"^  (\S+) +ready at (\S+)$", up.err, re.MULTILINE))
        assert sorted(used) == ["directory", "mixed-0", "mixed-1", "router-0"]
        at = ["--directory", used["directory"]]
        prompt = ["--router", used["router-0"], "--token-ids", "5,6,7,8,9", "--max-tokens", "7", "--stats"]

        def node_of(answer: str) -> str:
            found = re.search(r"^prefill node +(mixed-[01])$", answer, re.MULTILINE)
            assert found is not None, answer
            assert re.search(rf"^decode node +{found[1]}$", answer, re.MULTILINE), answer
            assert "local" in answer
            return found[1]

        first = run_baton("generate", *prompt)
        assert first.returncode == 0, first.stderr
        name = node_of(first.stderr)
        listed = json.loads(run_baton("nodes", *at, "-o", "json").stdout)
        assert {node["name"]: node["role"] for node in listed} == {
            "mixed-0": "mixed", "mixed-1": "mixed", "router-0": "router",
        }  # fmt: skip
        table = run_baton("nodes", *at).stdout
        assert len(re.findall(r"^mixed-[01] +mixed +ready ", table, re.MULTILINE)) == 2
        described = run_baton("describe", name, *at)
        assert described.returncode == 0
        assert re.search(r"^role +mixed$", described.stdout, re.MULTILINE)

        assert run_baton("cordon", name, *at).returncode == 0
        other = run_baton("generate", *prompt)
        assert {name, node_of(other.stderr)} == {"mixed-0", "mixed-1"}
        assert run_baton("uncordon", name, *at).returncode == 0
        drained = run_baton("drain", name, "--wait", *at)
        assert (drained.returncode, drained.stdout) == (0, f"{name} is drained and holds nothing: safe to delete.\n")
        assert run_baton("undrain", name, *at).returncode == 0
        assert up.stop(signal.SIGINT) == 0
        assert up.wait_all_ended() == []
        assert up.files() == []
