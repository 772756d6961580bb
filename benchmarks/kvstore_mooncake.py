"""Gets over tcp beside Mooncake Store's: the same bytes, the same cores, objects of 64 KiB and 1 MiB.

Ours is `Fetch`, from a prefill node to another, as in `kvstore fetch --part rate`: look-up, Reserve, writes, seal,
Commit, and the blocks entered in the prefix cache. An object is a block of 16 tokens, in a record for each of its
layers. Mooncake's: `batch_get_into` of as many keys, in a process without a segment, and its time alone. After each get
of either, all bytes are compared with what was put. Mooncake has an environment of its own (docs/bench.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.kvstore_fetch import BLOCK, fetched, model_of, two_nodes
from benchmarks.kvstore_fetch_side import run_as_process
from benchmarks.transfer_side import MOVED_BYTES

LAYERS = {64 << 10: 4, 1 << 20: 16}
"""Of the models whose blocks have so many bytes: records of 16 and 64 KiB."""
BAR = 2.0
PUT_SEED = 1
LIMITS = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32768", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "32768"}
"""Of Mooncake: with its own, large batches fail."""


class Child:
    """A process that answers a line of JSON with one. Ends with the context."""

    def __init__(self, undo: ExitStack, command: list[str]) -> None:
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

    def get(self, size: int) -> dict[str, Any]:
        """The same objects each time, into memory that was zeroed: what was read cannot be removed for a while."""
        cpu = self._owner.ask("cpu")
        found: dict[str, Any] = self._getter.ask("get", size=size, seed=PUT_SEED)
        assert found["whole"], "what Mooncake got is not what was put"
        return {"seconds": found["seconds"], "cpu_s": found["cpu_s"] + self._owner.ask("cpu") - cpu}


async def measure(size: int, mooncake: Mooncake, rounds: int, folder: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    blocks = MOVED_BYTES // size
    tokens = blocks * BLOCK
    async with two_nodes(
        folder, model_of(LAYERS[size], size // LAYERS[size], tokens + BLOCK), blocks + blocks // 4, "tcp"
    ) as two:
        assert two.half.node.pool.layout.position_bytes == size, two.half.node.pool.layout
        await asyncio.to_thread(mooncake.put, size)

        async def ours(seed: int) -> dict[str, Any]:
            parts = await fetched(two, seed, tokens)
            return {"seconds": parts["indexed"], **parts}

        async def theirs(seed: int) -> dict[str, Any]:
            return await asyncio.to_thread(mooncake.get, size)

        for number in range(-1, rounds):
            turns = [("ours", ours), ("mooncake", theirs)][:: 1 if number % 2 else -1]
            found = {name: await get(number + 1000) for name, get in turns}
            if number >= 0:  # the first round opens connections
                samples.append({"size": size, **found})
    return samples


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
        parts = {what: statistics.median(each["ours"][what] for each in own) for what in own[0]["ours"]}
        stamps = ", ".join(
            f"{what} after {parts[what] * 1e3:.1f} ms" for what in ("granted", "commit asked", "indexed")
        )
        lines.append(f"           ours: {stamps}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has Mooncake")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--ports", type=int, nargs=4, default=[50151, 50152, 50153, 50154])
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        mooncake = Mooncake(undo, options.python, options.ports)
        for size in options.sizes:
            samples += run_as_process(measure(size, mooncake, options.rounds, folder / str(size)))
            print(report([sample for sample in samples if sample["size"] == size]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
