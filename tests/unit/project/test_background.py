"""The tests themselves: they pass however they are started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDS_CTRL_C = "tests/unit/cli/test_child.py::test_a_child_tells_progress_and_readiness"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_ctrl_c_works_in_the_tests_of_a_run_in_the_background(workers: str) -> None:
    """A shell starts what runs in its background with SIGINT ignored. A test whose child ends by SIGINT passes there,
    in pytest's own process and in a worker."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", NEEDS_CTRL_C]
    shell = subprocess.run(
        ["bash", "-c", f"{shlex.join(command)} & wait $!"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
