"""What the GPU path does, in one call: exactness, speed against measured limits of the same device, handoff, a trace.

    python -m benchmarks.gpu --out gpu.json --trace gpu-trace.json.gz     (a GPU)
    python -m benchmarks.gpu --device cpu --tiny                          (the logic of it, without one)

Weights are random in the shapes of Qwen3-0.6B and Qwen3-8B. Each part runs in a process of its own with a time limit,
and `--out` is written after each: a part that fails, hangs, is killed or loses the device costs no other's figures, nor
those it had. Parts that would begin after `--seconds-max` are left out and say so. The exit status is 0 where no part
failed and all that was to be exact is; `goals` in the output tells of those and of the ones of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_children import environment, run_part, write_whole
from benchmarks.gpu_goals import outcome, passed

LIMITS_S = {
    "kernels": 150.0,
    "limits": 45.0,
    "exactness": 90.0,
    "handoff": 60.0,
    "qwen3-8b": 120.0,
    "qwen3-0.6b": 90.0,
    "trace": 60.0,
    "card": 45.0,
    "spill": 60.0,
    "weights": 200.0,
}
"""Of each part, most important first; about three times what it is expected to take."""
TINY_LIMIT_S = 150.0
LEFT_S_MIN = 10.0
"""With less left no part is begun: starting Python, torch and CUDA takes most of it."""


class Run:
    """One call. Signals that ask to stop are noted, never raised: a child in the making would be lost."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        names = [name for name in LIMITS_S if not (arguments.tiny and name.startswith("qwen3"))]
        if arguments.tiny:
            names.insert(names.index("trace"), "tiny")
        self.parts = tuple(name for name in names if not arguments.only or name in arguments.only)
        self.results: dict[str, Any] = {}
        self.stopped_by = 0

    def stop(self, number: int, frame: object) -> None:
        self.stopped_by = self.stopped_by or number

    def all(self) -> None:
        begin, most_s = time.monotonic(), self._arguments.seconds_max
        for name in self.parts:
            self.results[name] = {"skipped": "not begun"}
        self._write()
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
            for name in self.parts:
                left_s = begin + most_s - time.monotonic()
                if self.stopped_by:
                    break
                if left_s < LEFT_S_MIN:
                    self.results[name] = {"skipped": f"{most_s:g} s are over"}
                    continue
                limit_s = TINY_LIMIT_S if self._arguments.tiny else LIMITS_S[name]
                self._part(name, min(limit_s, left_s), Path(folder) / f"{name}.json")
                self._write()
                say(name, json.dumps(self.results[name]))
        self._write()

    def _part(self, name: str, limit_s: float, figures: Path) -> None:
        arguments = self._arguments
        command = [sys.executable, "-m", "benchmarks.gpu_part", name, str(figures), "--device", arguments.device]
        command += ["--limits", json.dumps(self.results.get("limits", {}))]
        command += ["--tiny"] if arguments.tiny else []
        command += ["--trace", str(arguments.trace.absolute())] if arguments.trace is not None else []
        # The kernels are compiled on a GPU, whatever was set for the tests; elsewhere they run in the interpreter.
        more = {"TRITON_INTERPRET": "0" if arguments.device == "cuda" else "1", "PYTHONUNBUFFERED": "1"}
        about, found = run_part(
            command, figures, limit_s=limit_s, stopped=lambda: bool(self.stopped_by), environment=environment(**more)
        )
        self.results = about | self.results | {name: found}

    def _write(self) -> None:
        self.results["goals"] = outcome(self.results)
        if self._arguments.out is not None:
            write_whole(self._arguments.out, self.results)


def say(*words: str) -> None:
    """For whoever looks on. Nobody does where the terminal has gone: what counts is in the file."""
    with contextlib.suppress(OSError):
        print(*words, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a few milliseconds of work: the logic only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path, help="for Perfetto; .json.gz is written packed")
    parser.add_argument("--seconds-max", type=float, default=480)
    parser.add_argument("--only", action="append", choices=[*LIMITS_S, "tiny"], help="may be repeated")
    run = Run(parser.parse_args())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, run.stop)
    run.all()
    say(json.dumps(run.results["goals"], indent=2))
    if run.stopped_by:
        return 128 + run.stopped_by
    return 0 if passed(run.results, run.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
