"""Parts of `benchmarks/gpu.py` as processes with a time limit, whose figures outlive them. Without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_POLL_S = 0.05
KILLED_S_MAX = 10.0
"""For a killed process to be gone. One that waits in a driver may take longer; it is left alone then."""


def environment(**more: str) -> dict[str, str]:
    """For a child: packages of this tree first, then those that were named to this process."""
    paths = [str(ROOT), str(ROOT / "proto"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def write_whole(path: Path, values: object) -> None:
    """As JSON, so that whoever reads it, whenever, sees the old file or the new one."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(values, indent=2) + "\n")
    beside.replace(path)


class Figures:
    """What a part has measured so far, kept in a file: its process may be killed at any moment."""

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        """`about`: facts of the machine, which are the same for all parts."""
        self.values: dict[str, Any] = {}
        self._path = path
        self._about = about or {}

    def add(self, **values: Any) -> None:
        self.values |= values
        if self._path is not None:
            write_whole(self._path, {"about": self._about, "figures": self.values})


def end_with_parent() -> None:
    """From now on this process and all of its group are killed when its parent is gone, which holds the other end of
    its standard input. For a child of `run_part`."""
    assert os.getpgrp() == os.getpid(), "not in a process group of its own"

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def run_part(
    command: Sequence[str],
    figures: Path,
    *,
    limit_s: float,
    stopped: Callable[[], bool],
    environment: dict[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> (facts of the machine, the part's figures), as far as they got; with `error` where it did not come to its end.

    Blocks, for `limit_s` and KILLED_S_MAX at most, or until `stopped`. Afterwards nothing of the child's process group
    is left: it is a group of its own in this session, so that a signal to this one's does not reach it.
    """
    begin = time.monotonic()
    problem = ""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, cwd=ROOT, process_group=0
    ) as child:  # fmt: skip
        try:
            # Not reaped before its group is killed: till then nobody else can have its number.
            while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if stopped():
                    problem = "interrupted"
                elif time.monotonic() - begin > limit_s:
                    problem = f"not ended after {limit_s:g} s"
                if problem:
                    break
                time.sleep(_POLL_S)
        finally:
            gone = _kill(child)
    if not gone:
        problem += f", and not gone {KILLED_S_MAX:g} s after it was killed"
    elif not problem and child.returncode:
        problem = f"ended {_words(child.returncode)}"
    kept = json.loads(figures.read_text()) if figures.exists() else {"about": {}, "figures": {}}
    found: dict[str, Any] = kept["figures"]
    if problem and "error" not in found:
        found["error"] = problem
    found["part_s"] = time.monotonic() - begin
    return kept["about"], found


def _kill(child: subprocess.Popen[bytes]) -> bool:
    """The child's whole group. -> whether the child is gone."""
    os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(KILLED_S_MAX)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # or leaving the `with` above would wait without a limit
        return False
    return True


def _words(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
