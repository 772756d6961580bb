"""`baton bench` as a user runs it: against a cluster over gRPC and HTTP, with one of its own, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.bench import unwritable
from cli.bench_stats import Measured, Slo, check_plot, draw, report_data
from cli.supervisor import ClusterSpec
from engine.demo_model import DemoModelParams, write_demo_model
from tests.support.cli_harness import Foreground, free_endpoint, run_baton
from tests.support.cluster_harness import RunningCluster, assert_conserved, http_endpoint, running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill and one decode node of a small model."""
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    with running(ClusterSpec(model=str(folder), blocks=512, http="127.0.0.1:0")) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def test_closed_loop_over_grpc(cluster: RunningCluster, tmp_path: Path) -> None:
    """Every request is answered with the tokens asked for; the text, the JSON file and -o json tell the same."""
    figures = tmp_path / "run.json"
    result = run_baton(
        "bench", "--router", cluster.cluster.router, "--concurrency", "3", "--requests", "12", "--warm-up", "2",
        "--prompt-tokens", "uniform:20:90", "--output-tokens", "7", "--shared-prefix-tokens", "16",
        "--slo-ttft-ms", "60000", "--json", str(figures),
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "10 answered in " in result.stdout
    assert "100.0% of all (TTFT at most 60000 ms)" in result.stdout
    data = json.loads(figures.read_text())
    assert data["complete"]
    assert data["requests"] == {
        "sent": 12, "warm_up": 2, "answered": 10, "failed": 0, "unfinished": 0, "good": 10,
    }  # fmt: skip
    assert data["tokens"]["output"] == 70
    assert 200 <= data["tokens"]["prompt"] <= 900
    assert sum(data["timeline"]["tokens"]) == 84
    assert data["latency_ms"]["ttft"]["count"] == data["latency_ms"]["tpot"]["count"] == 10
    assert data["config"]["prompt_tokens"] == "uniform:20:90"


def test_conversations(cluster: RunningCluster, tmp_path: Path) -> None:
    """Three conversations of three turns: the last turns have all that was said before."""
    figures = tmp_path / "run.json"
    result = run_baton(
        "bench", "--router", cluster.cluster.router, "--conversations", "3", "--turns", "3", "--concurrency", "2",
        "--prompt-tokens", "10", "--output-tokens", "5", "--warm-up", "3", "--json", str(figures),
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(
        "2 at a time, 3 conversations of 3 turns, prompts of 10 tokens, answers of 5 to router"
    )
    data = json.loads(figures.read_text())
    assert data["requests"]["answered"] == 6
    assert data["tokens"] == {"prompt": 3 * (25 + 40), "output": 30}


def test_a_trace_over_http(cluster: RunningCluster, tmp_path: Path) -> None:
    """The OpenAI endpoint gives the same number of tokens; the trace's shared block is in the prefix cache the second
    time; an open loop tells how late it was."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 700, "output_length": 40, "hash_ids": [7, 10 + n]} for n in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    endpoint = http_endpoint(cluster)
    result = run_baton(
        "bench", "--url", f"http://{endpoint}", "--trace", str(trace), "--trace-length-scale", "0.25", "-o", "json",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data["requests"]["answered"] == 6
    assert data["tokens"] == {"prompt": 6 * 175, "output": 6 * 10}
    assert data["loader_ms"]["sent_late"]["count"] == 6
    assert data["errors"] == {}


def test_refused_requests_are_counted(cluster: RunningCluster) -> None:
    """Token ids that the model does not have: each failure is counted by its reason, and the exit status is 1."""
    endpoint = http_endpoint(cluster)
    for where, kind in (
        (["--router", cluster.cluster.router], "TOKEN_OUT_OF_RANGE"),
        (["--url", f"http://{endpoint}"], "HTTP_400"),
    ):
        result = run_baton("bench", *where, "--requests", "3", "--token-ids", "700", "900")
        assert result.returncode == 1, result.stdout
        assert re.search(rf"^error +3 x {kind}: \S", result.stdout, re.MULTILINE), result.stdout
        assert "0 answered in" in result.stdout


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    """A cluster of its own and a run without end: SIGINT stops both, the report is printed and written, and nothing is
    left."""
    figures = tmp_path / "run.json"
    with Foreground(
        "bench", "--mock", "--mixed", "1", "--blocks", "512", "--duration", "3600", "--concurrency", "2",
        "--prompt-tokens", "32", "--output-tokens", "8", "--json", str(figures), folder=tmp_path,
    ) as bench:  # fmt: skip
        bench.wait_for("s: ")
        assert bench.stop(signal.SIGINT) == 130
        assert bench.wait_all_ended() == []
        assert re.search(r"^[1-9]\d* answered in .* given up unfinished\.$", bench.out, re.MULTILINE), bench.out
        data = json.loads(figures.read_text())
        assert not data["complete"]
        assert data["requests"]["answered"] > 0
        assert bench.files() == []


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["--concurrency", "2", "--rate", "1"], 2, "Error: --concurrency and --rate exclude each other.\n"),
        (["--conversations", "2", "--rate", "1"], 2, "Error: --conversations and --rate exclude each other.\n"),
        (["--prefill", "1"], 2, "give --model or --mock too.\n"),
        (["--prompt-tokens", "0"], 2, "'0' is no distribution of lengths: 0 is not from 1 to 1048576\n"),
        (["--rate", "0"], 2, "Error: Invalid value for '--rate': '0' is not from 1e-09 to 1e+12\n"),
        (["--concurrency", "0"], 2, "Invalid value for '--concurrency': 0 is not in the range 1<=x<="),
        (["--in-flight-max", "0"], 2, "Invalid value for '--in-flight-max': 0 is not in the range x>=1.\n"),
        (["--token-ids", "9", "9"], 2, "error: token_ids must be from 0 to below 9, not 9.\n"),
        (["--warm-up", "64"], 2, "error: warm_up must be below the number of requests (64), not 64.\n"),
        (["--trace", "/nonexistent"], 2, "error: /nonexistent cannot be read: No such file or directory.\n"),
        (["--json", "/nonexistent/a.json"], 2, "/nonexistent/a.json cannot be written: /nonexistent is no folder.\n"),
        (["--json", "/tmp"], 2, "error: /tmp cannot be written: it is a folder.\n"),
        (["--plot", "a.gif"], 2, "error: --plot a.gif: the name must end in .png, .svg, .pdf.\n"),
        (["--url", "127.0.0.1:1"], 2, "is no address of a server; write it as http://127.0.0.1:8000.\n"),
        (["--url", "http://127.0.0.1:99999"], 2, "error: --url: 'http://127.0.0.1:99999' is no address of a server"),
        (["--url", "http://127.0.0.1:0"], 2, "error: --url: 'http://127.0.0.1:0' is no address of a server"),
        (["--url", "http://[::1"], 2, "error: --url: 'http://[::1' is no address of a server; write it as http"),
        (["--mock", "--prefill", "0"], 2, "error: prefill must be positive, not 0.\n"),
        (["--model", "/nonexistent"], 2, "there is no folder"),
    ],
)  # fmt: skip
def test_wrong_input(arguments: list[str], status: int, problem: str) -> None:
    """One message, before anything is sent."""
    result = run_baton("bench", *arguments)
    assert (result.returncode, result.stdout) == (status, "")
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


def test_figures_are_refused_before_the_run_where_they_could_not_be_kept_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder by a figure's name, a folder that this user may not write to, a file in it that the user may, and one in
    a folder of the user's that the user may not."""
    picture = tmp_path / "run.png"
    picture.mkdir()
    closed, kept = tmp_path / "closed", tmp_path / "kept.json"
    closed.mkdir()
    mine = closed / "mine.json"
    for file in (mine, kept):
        file.touch()
    # Root may write anywhere, so that the modes of real folders show nothing.
    monkeypatch.setattr(os, "access", lambda path, mode: path not in (closed, kept))
    assert unwritable(picture) == "it is a folder"
    assert unwritable(closed / "new.json") == "this user may not"
    assert unwritable(kept) == "this user may not"
    assert unwritable(mine) is None
    assert unwritable(tmp_path / "new.json") is None


def test_nobody_is_there() -> None:
    endpoint = free_endpoint()
    result = run_baton("bench", "--router", endpoint)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: No router answers at {endpoint}. Is the cluster running")
    result = run_baton("bench", "--url", f"http://{endpoint}")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: Nobody answers at http://{endpoint}: nothing listens there. Name another ")


def test_a_plot(tmp_path: Path) -> None:
    """Drawn for a run and for one in which nothing was answered."""
    pytest.importorskip("matplotlib")
    measured = Measured(slo=Slo())
    for name in ("empty.png", "full.svg"):
        path = tmp_path / name
        check_plot(path)
        draw(report_data(measured, config={}, complete=True), path, title="a run")
        assert path.stat().st_size > 1000
        measured.ttft.add(5)
        measured.itl.add(5)
        measured.timeline.add(1, tokens=3, gap_ms_max=5)
        measured.error("QUEUE_FULL", "Full.", at_s=2, counts=True)


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the run, with what to install."""
    folder = tmp_path / "hides"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    path = ":".join([str(folder), *filter(None, sys.path)])
    result = run_baton("bench", "--plot", "a.png", env={"PYTHONPATH": path})
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install 'baton-serve[plot]'" in result.stderr
    assert "Traceback" not in result.stderr
