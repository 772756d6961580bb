"""The GPU benchmark's logic, tiny, with a stand-in for the device: every part gives its figures."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_card
from benchmarks.gpu_card import card
from benchmarks.gpu_children import ROOT, Figures, environment, run_part
from benchmarks.gpu_goals import NOT_MEASURED, outcome, passed
from kvtransfer.device.driver import GpuDirect
from kvtransfer.transport import DeviceError
from tests.support.fake_device import FakeDriver

ENVIRONMENT = environment(OMP_NUM_THREADS="1")
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]
GONE_S_MAX = 100


@pytest.mark.slow
def test_every_part_of_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    """Exactness holds, the handoff between two processes is sealed, the trace is a file, and no part is an error."""
    out = tmp_path / "gpu.json"
    result = subprocess.run(
        [*COMMAND, "--out", str(out), "--trace", str(tmp_path / "trace.json.gz")],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(out.read_text())
    assert figures["kernels"]["wrong"] == []
    assert figures["kernels"]["agree"] is True
    assert figures["exactness"]["float32_tokens_equal"] is True
    assert figures["exactness"]["bfloat16_decode_error_of_largest"] < 0.05
    assert figures["handoff"]["mbytes"] == pytest.approx(0.032768)
    assert figures["tiny"]["decode_rows"] == 2
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert figures["handoff"]["committed_ms"] > 0
    assert figures["weights"].keys() == {"bfloat16", "fp8", "int4", "decode_context", "scored_tokens", "part_s"}
    for name in ("bfloat16", "fp8", "int4"):
        assert figures["weights"][name]["decode"].keys() == {"1", "2"}
        assert 0 < figures["weights"][name]["error_in_deviations"] < 1
    assert figures["spill"]["mbytes"] == pytest.approx(0.032768)
    assert min(figures["spill"][f"{way}_gbytes_s"] for way in ("out", "back")) > 0
    parts = {"kernels", "limits", "exactness", "handoff", "card", "spill", "tiny", "trace", "weights"}
    assert figures.keys() == parts | {"device", "torch", "triton", "python", "goals"}
    assert figures["goals"]["exactness: float32_tokens_equal"] == {"goal": "true", "found": True, "met": True}
    assert figures["goals"]["qwen3-8b: decode_of_copy_rate"]["met"] == NOT_MEASURED


class RefusingDriver(FakeDriver):
    """It says that it can, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = GpuDirect(peer_memory=True, dma_buf=True, ordered=False, host_flushes=True)

    def flush_remote_writes(self) -> None:
        raise DeviceError("cudaDeviceFlushGPUDirectRDMAWrites: not supported")


def test_what_a_card_may_do_is_asked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attributes of the device, and a flush's time. What it says and what it refuses to do are both kept."""
    figures = Figures()
    card("cpu", figures)
    assert figures.values.pop("flush_us") > 0
    assert figures.values == {"peer_memory": True, "dma_buf": False, "ordered": False, "host_flushes": True}
    monkeypatch.setattr(gpu_card, "make_driver", lambda device: RefusingDriver())
    figures = Figures()
    card("cpu", figures)
    assert figures.values == {
        "peer_memory": True, "dma_buf": True, "ordered": False, "host_flushes": True,
        "dma_buf_refused": "cuMemGetHandleForAddressRange: operation not supported",
        "flush_refused": "cudaDeviceFlushGPUDirectRDMAWrites: not supported",
    }  # fmt: skip


def part(tmp_path: Path, script: str, **options: Any) -> dict[str, Any]:
    """What is kept of a part that measures one figure and then does as the script says."""
    kept = tmp_path / "figures.json"
    begin = (
        "import os, signal, subprocess, sys, time; from pathlib import Path\n"
        "from benchmarks.gpu_children import Figures\n"
        f"figures = Figures(Path({str(kept)!r}), {{'device': 'none'}}); figures.add(rate=2.5)\n"
    )
    given: dict[str, Any] = {"limit_s": 100.0, "stopped": lambda: False} | options
    about, found = run_part([sys.executable, "-c", begin + script], kept, environment=ENVIRONMENT, **given)
    assert found.pop("part_s") > 0
    assert about == ({"device": "none"} if kept.exists() else {})
    return found


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("figures.add(steps=3)", {"steps": 3}),
        ("os.kill(os.getpid(), signal.SIGSEGV)", {"error": "ended by SIGSEGV"}),
        ("os._exit(7)", {"error": "ended with status 7"}),
        ("figures.add(error='ValueError: no'); sys.exit(1)", {"error": "ValueError: no"}),
    ],
)
def test_a_part_keeps_what_it_measured_before_it_died(tmp_path: Path, script: str, problem: dict[str, Any]) -> None:
    """Its own words for what went wrong, where it had any; else how its process ended."""
    assert part(tmp_path, script) == {"rate": 2.5} | problem


def test_a_part_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    """A child of it that ignores everything, and has its pipes, is gone too; a limit that is over at once leaves none
    either."""
    note = tmp_path / "child"
    ignoring = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    script = (
        f"child = subprocess.Popen([sys.executable, '-c', {ignoring!r}])\n"
        f"Path({str(note)!r} + '.part').write_text(str(child.pid)); os.rename({str(note)!r} + '.part', {str(note)!r})\n"
        "time.sleep(1000)"
    )
    assert part(tmp_path, script, stopped=note.exists) == {"rate": 2.5, "error": "interrupted"}
    wait_until_gone(int(note.read_text()))
    (tmp_path / "figures.json").unlink()
    assert part(tmp_path, "time.sleep(1000)", limit_s=0)["error"] == "not ended after 0 s"


def wait_until_gone(pid: int) -> None:
    """A process that was killed and whose parent is dead is reaped by another one, in a moment."""
    give_up = time.monotonic() + GONE_S_MAX
    while Path(f"/proc/{pid}/stat").exists():
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < give_up, f"{pid} goes on"
        time.sleep(0.01)


def marked(marker: str) -> dict[int, str]:
    """Processes that have inherited this variable, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"BENCH_MARKER={marker}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_a_part_whose_parent_is_killed_ends_with_its_children() -> None:
    """The other end of its standard input is closed by that; nobody else is there to end it."""
    script = (
        "import subprocess, sys, time; from benchmarks.gpu_children import end_with_parent; end_with_parent()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
        process_group=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(GONE_S_MAX) == -signal.SIGKILL
    wait_until_gone(child)


def test_a_benchmark_that_is_asked_to_stop_leaves_no_process_and_a_whole_file(tmp_path: Path) -> None:
    """In the middle of a handoff, with a receiver beside it. The JSON tells of every part."""
    out, marker = tmp_path / "gpu.json", f"{os.getpid()}"
    command = [*COMMAND, "--only", "handoff", "--only", "spill", "--out", str(out)]
    give_up = time.monotonic() + GONE_S_MAX
    env = ENVIRONMENT | {"BENCH_MARKER": marker, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not any("gpu_receiver" in line for line in marked(marker).values()):
            assert time.monotonic() < give_up and process.poll() is None, "there is no receiver"
            time.sleep(0.01)
        others = set(marked(marker)) - {process.pid}
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=GONE_S_MAX)
    for pid in others:
        wait_until_gone(pid)
    figures = json.loads(out.read_text())
    assert figures["spill"] == {"skipped": "not begun"}
    assert process.returncode == 128 + signal.SIGINT, output
    assert figures["handoff"]["error"] == "interrupted"
    assert figures["device"] == "cpu, interpreted"


EXACT: dict[str, dict[str, Any]] = {
    "kernels": {"agree": True},
    "exactness": {
        "float32_tokens_equal": True,
        "bfloat16_prefill_error_of_largest": 0.01,
        "bfloat16_decode_error_of_largest": 0.01,
    },
}


def test_goals_are_reported_with_what_was_found() -> None:
    """Met, missed or not measured; a NaN is missed. Speed that is missed is no failure."""
    results = EXACT | {
        "qwen3-8b": {"prefill_of_matrix_rate": 0.61, "decode_of_copy_rate": 0.69},
        "handoff": {"exposed_ms": float("nan"), "error": "interrupted"},
    }
    table = outcome(results)
    assert table["qwen3-8b: prefill_of_matrix_rate"] == {"goal": "at least 0.6", "found": 0.61, "met": True}
    assert table["qwen3-8b: decode_of_copy_rate"]["met"] is False
    assert table["handoff: exposed_ms"]["met"] is False
    assert table["handoff: committed_ms"] == {"goal": "at most 1", "found": None, "met": NOT_MEASURED}
    assert passed(results, ("kernels", "exactness", "qwen3-8b"))
    assert not passed(results, ("kernels", "exactness", "handoff"))


@pytest.mark.parametrize("found", [False, None])
def test_tokens_that_differ_are_a_failure(found: bool | None) -> None:
    """So is a run that has not looked."""
    results = EXACT | {"exactness": EXACT["exactness"] | {"float32_tokens_equal": found}}
    assert not passed(results, ("kernels", "exactness"))
    assert passed(results, ("kernels",))
