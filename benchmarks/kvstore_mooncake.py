"""Gets over tcp beside Mooncake Store's: the same bytes, the same cores, objects of 64 KiB and 1 MiB.

Ours: the tokens go to the owner, which computes their digests, looks them up, compares the tokens and writes the blocks
into the asker's memory, as one handoff's tcp transfer does. The time is the asker's, with the request and the answer.
Mooncake's: `batch_get_into` of as many keys, in a process without a segment, and its time alone. After
each get of either, 64 objects are compared with what was put. Mooncake has an environment of its own (docs/bench.md).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore_get_side import prompt
from benchmarks.transfer_side import MOVED_BYTES, plan_of

SIZES = (64 << 10, 1 << 20)
STREAMS = 2
BAR = 2.0
PUT_SEED = 1
LIMITS = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32768", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "32768"}
"""Of Mooncake: with its own, large batches fail."""


class Child:
    """A process that answers a line of JSON with one. Ends with the context."""

    def __init__(self, undo: ExitStack, command: list[str], *, ready: bool = True) -> None:
        environment = {**os.environ, **LIMITS, "PYTHONPATH": os.pathsep.join([os.getcwd(), f"{os.getcwd()}/proto"])}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        undo.callback(self._end)
        if ready:
            self._reply()

    def ask(self, do: str, **fields: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self._process.args, "has ended")
        return json.loads(line)["reply"]

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ours:
    def __init__(self, undo: ExitStack) -> None:
        python = [sys.executable, "-m"]
        self._asker = Child(undo, [*python, "benchmarks.transfer_ours", "tcp", str(STREAMS)], ready=False)
        self._owner = Child(undo, [*python, "benchmarks.kvstore_get_side", str(STREAMS)])
        self._owner.ask("connect", address=self._asker.ask("address"))

    def get(self, size: int, seed: int) -> dict[str, Any]:
        self._owner.ask("index", size=size, seed=seed)
        tokens = np.array(prompt(size, seed), dtype=np.int64)
        cpu = self._asker.ask("cpu")
        began_s = time.perf_counter()
        asked = {
            "tokens": base64.b64encode(tokens.tobytes()).decode(),
            "dst": base64.b64encode(plan_of(size, seed).dst.tobytes()).decode(),
        }
        answer = self._owner.ask("get", size=size, **asked)
        seconds = time.perf_counter() - began_s
        cpu = self._asker.ask("cpu") - cpu + answer["cpu_s"]
        whole = answer["blocks"] == MOVED_BYTES // size and self._asker.ask("check", size=size, seed=seed)
        return {"seconds": seconds, "cpu_s": cpu, "whole": whole}


class Mooncake:
    def __init__(self, undo: ExitStack, python: Path, ports: list[int]) -> None:
        master, metrics, owner, getter = map(str, ports)
        command = [str(python.parent / "mooncake_master"), "--rpc_port", master, "--metrics_port", metrics]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        undo.callback(process.wait)
        undo.callback(process.kill)
        time.sleep(2)
        side = [str(python), "-m", "benchmarks.kvstore_mooncake_side"]
        self._owner = Child(undo, [*side, "owner", owner, f"127.0.0.1:{master}"])
        self._getter = Child(undo, [*side, "getter", getter, f"127.0.0.1:{master}"])

    def put(self, size: int) -> None:
        self._owner.ask("put", size=size, seed=PUT_SEED)

    def get(self, size: int, seed: int) -> dict[str, Any]:
        """The same objects each time, into memory that was zeroed: what was read cannot be removed for a while."""
        cpu = self._owner.ask("cpu")
        found: dict[str, Any] = self._getter.ask("get", size=size, seed=PUT_SEED)
        return {**found, "cpu_s": found["cpu_s"] + self._owner.ask("cpu") - cpu}


def report(samples: list[dict[str, Any]]) -> str:
    lines = ["object     ours GB/s  Mooncake GB/s   ratio (range)         CPU s a GB, both sides: ours  Mooncake   bar"]
    for size in sorted({sample["size"] for sample in samples}):
        own = [sample for sample in samples if sample["size"] == size]
        ratios = sorted(each["mooncake"]["seconds"] / each["ours"]["seconds"] for each in own)
        rate, cpu = (
            {name: statistics.median(f(each[name]) for each in own) for name in ("ours", "mooncake")}
            for f in (lambda one: MOVED_BYTES / one["seconds"] / 1e9, lambda one: one["cpu_s"] / MOVED_BYTES * 1e9)
        )
        ratio = statistics.median(ratios)
        lines.append(
            f"{size >> 10:5} KiB{rate['ours']:12.2f}{rate['mooncake']:15.2f}   {ratio:.1f} ({ratios[0]:.1f} to "
            f"{ratios[-1]:.1f}){cpu['ours']:28.2f}{cpu['mooncake']:10.2f}   {BAR}{'' if ratio >= BAR else '  MISSED'}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has Mooncake")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--ports", type=int, nargs=4, default=[50151, 50152, 50153, 50154])
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with ExitStack() as undo:
        ours, mooncake = Ours(undo), Mooncake(undo, options.python, options.ports)
        for size in options.sizes:
            mooncake.put(size)
            for number in range(-1, options.rounds):
                seed = number + 2
                turns = [("ours", ours.get), ("mooncake", mooncake.get)][:: 1 if number % 2 else -1]
                found = {name: get(size, seed) for name, get in turns}
                assert all(each["whole"] for each in found.values()), (size, found)
                if number >= 0:  # the first round opens connections
                    samples.append({"size": size, **found})
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
    print(report(samples))
