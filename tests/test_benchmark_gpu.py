"""The GPU benchmark's logic, tiny, with a stand-in for the device: every part gives its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_card import card

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_every_part_of_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    """Exactness holds, the handoff between two processes is sealed, the trace is a file, and no part is an error."""
    out = tmp_path / "gpu.json"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
    }
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--out", str(out)]
    result = subprocess.run(
        [*command, "--trace", str(tmp_path / "trace.json")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(out.read_text())
    assert figures["exactness"]["float32_tokens_equal"] is True
    assert figures["handoff"]["mbytes"] == pytest.approx(0.032768)
    assert figures["tiny"]["decode_rows"] == 2
    assert figures["trace"]["bytes"] > 0
    assert figures["handoff"]["committed_ms"] > 0
    assert figures["weights"].keys() == {"bfloat16", "fp8", "int4", "decode_context", "scored_tokens", "part_s"}
    for name in ("bfloat16", "fp8", "int4"):
        assert figures["weights"][name]["decode"].keys() == {"1", "2"}
        assert 0 < figures["weights"][name]["error_in_deviations"] < 1
    assert figures["spill"]["mbytes"] == pytest.approx(0.032768)
    assert min(figures["spill"][f"{way}_gbytes_s"] for way in ("out", "back")) > 0
    parts = {"limits", "exactness", "handoff", "card", "spill", "tiny", "trace", "weights"}
    assert figures.keys() == parts | {"device", "torch", "python"}


def test_what_a_card_may_do_is_asked_without_one() -> None:
    """The attributes of the device, and a flush's time; the stand-in makes no dma-buf."""
    figures = card("cpu")
    assert figures.pop("flush_us") > 0
    assert figures == {"peer_memory": True, "dma_buf": False, "ordered": False, "host_flushes": True}
