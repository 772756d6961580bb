"""One side of benchmarks/engine.py: a process that is started once and measured in rounds."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

START_S_MAX = 300
"""vLLM compiles its model at the start."""
ROUND_S_MAX = 1_200
"""A peer that multiplies emulated bfloat16 reads twenty tokens a second."""


class SideFailed(SystemExit):
    """The process ended, or said nothing for too long; with the end of what it wrote to stderr."""


GUARD = 'read _; kill -s KILL -- "-$0"'
"""Kills a process group when its input ends: also where the benchmark itself was killed. A stopped group would never
notice that."""


class Side:
    """A process group that answers each line on its input with a line of JSON. It is stopped between rounds, so that
    nothing in it takes time from the other side; it is gone when the `with` block is left, or the benchmark ends in
    any other way."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, str], folder: Path) -> None:
        """Starts the process and waits until it is ready. Raises SideFailed."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=os.environ | settings,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        guard = ["sh", "-c", GUARD, str(self._process.pid)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        self._said = b""
        try:
            self._answer(START_S_MAX)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def round(self) -> dict[str, float]:
        """Measure once. Raises SideFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        found = self._answer(ROUND_S_MAX)
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End every process of the group."""
        self._signal(signal.SIGKILL)
        self._guard.communicate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _answer(self, limit_s: float) -> dict[str, float]:
        """The next line that is a JSON object; others, such as a library's greetings, are passed over."""
        pipe = self._process.stdout
        assert pipe is not None
        deadline_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._said.partition(b"\n")
                if newline:
                    self._said = rest
                    if line[:1] == b"{":
                        found: dict[str, float] = json.loads(line)
                        return found
                    continue
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise self._failed(f"said nothing for {limit_s:.0f} s")
                read = os.read(pipe.fileno(), 1 << 16)
                if not read:
                    raise self._failed("ended")
                self._said += read

    def _failed(self, what: str) -> SideFailed:
        self._errors.seek(0)
        errors = self._errors.read()[-3000:].decode(errors="replace")
        return SideFailed(f"{self._process.args!r} {what}:\n{errors}")
