"""How fast records move between two processes of one machine: ours, NIXL, Mooncake and the limits, alternately.

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install numpy mooncake-transfer-engine-non-cuda==0.3.13
    /tmp/peers/bin/pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
    python -m benchmarks.transfer --peers /tmp/peers/bin/python --json out.json --rounds 5
    python -m benchmarks.transfer --json out.json --report --plot out.png

128 MiB a run, in blocks from random places of one region of 512 MiB to random places of another, whose pages exist.
Every round starts fresh processes for every method, in another order each round; its figure is the median of its runs.
Samples are added to the JSON file, so that a measurement can be made in several pieces (`--transport`, `--rounds 1`).
Where NIXL is importable by this Python too (PYTHONPATH; `make test-ucx` has it in build/nixl) our transport over it
runs as well: `baton ucx`, over tcp.
`x-spin` is NIXL without its progress thread: the receiver then asks for notifications in a loop, on a core of its own.
Needs about 3 GiB of memory and x86-64. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtransfer.transports.ucx import installed

ROOT = Path(__file__).parents[1]
SIZES = [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
RUNS_OF_ROUND = 3
PING_BYTES, PING_TIMES = 1 << 14, 2000
MOVED_GB = (128 << 20) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`module` and `arguments` start its sides; `peer`: in the peers' environment. A limit may need no receiver."""

    module: str
    arguments: tuple[str, ...]
    peer: bool = False
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)


_TCP_ONLY = {"UCX_TLS": "tcp"}
_MOONCAKE = Method(
    module="benchmarks.transfer_peers",
    arguments=("mooncake",),
    peer=True,
    # Without these a large batch is refused.
    environment={
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32768",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "32768",
        "MC_LOG_LEVEL": "ERROR",
    },
)


def _ours(*arguments: str) -> Method:
    return Method(module="benchmarks.transfer_ours", arguments=arguments)


def _limit(name: str, *, alone: bool = False) -> Method:
    return Method(module="benchmarks.transfer_limits", arguments=(name,), alone=alone)


def _nixl(name: str, **environment: str) -> Method:
    return Method(module="benchmarks.transfer_peers", arguments=(name,), peer=True, environment=environment)


METHODS: dict[str, dict[str, Method]] = {
    "shm": {
        "baton": _ours("shm", "2"),
        "baton, 1 thread": _ours("shm", "1"),
        "nixl": _nixl("nixl"),
        "nixl-spin": _nixl("nixl-spin"),
        "stores, 2 threads": _limit("stores-2", alone=True),
        "stores, 1 thread": _limit("stores-1", alone=True),
    },
    "tcp": {
        "baton": _ours("tcp", "2"),
        "baton, 1 stream": _ours("tcp", "1"),
        "mooncake": _MOONCAKE,
        "nixl": _nixl("nixl", **_TCP_ONLY),
        "nixl-spin": _nixl("nixl-spin", **_TCP_ONLY),
        **({"baton ucx": _ours("ucx", "1")} if installed() else {}),
        "socket": _limit("socket"),
        "socket, 2 streams": _limit("socket-2"),
    },
    "ping": {
        "baton shm": _ours("shm", "1"),
        "doorbell": _limit("doorbell"),
        "baton tcp": _ours("tcp", "2"),
        "echo": _limit("echo"),
    },
}


class Process:
    """One side, told what to do by lines of JSON."""

    def __init__(self, method: Method, peers: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **method.environment}
        given = [] if method.peer else filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "proto"), *given])
        self._process = subprocess.Popen(
            [peers if method.peer else sys.executable, "-m", method.module, *method.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if method.peer else None,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended with {self._process.wait()}")
        return json.loads(line)["reply"]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def measure(name: str, method: Method, sizes: list[int], peers: str, seed: int, transport: str) -> list[dict[str, Any]]:
    """One round of one method."""
    samples = []
    with ExitStack() as stack:
        sender = stack.enter_context(Process(method, peers))
        receiver = sender if method.alone else stack.enter_context(Process(method, peers))
        if not method.alone:
            sender.ask("fill")
            sender.ask("connect", address=receiver.ask("address"))
        if transport == "ping":
            times = sender.ask("ping", size=PING_BYTES, times=PING_TIMES)
            return [{"transport": transport, "method": name, "size": PING_BYTES, "round": seed, "us": sorted(times)}]
        sender.ask("prepare", size=1 << 20, seed=seed)
        sender.ask("move")  # connections, page tables, worker threads
        for size in sizes:
            for run in range(RUNS_OF_ROUND):
                run_seed = seed * 1000 + run
                sender.ask("prepare", size=size, seed=run_seed)
                before_s = receiver.ask("cpu")
                took = sender.ask("move")
                receiver_s = 0.0 if method.alone else receiver.ask("cpu") - before_s
                samples.append(
                    {
                        "transport": transport,
                        "method": name,
                        "size": size,
                        "round": seed,
                        "gb_s": MOVED_GB / took["seconds"],
                        "sender_cpu_s_gb": took["cpu_s"] / MOVED_GB,
                        "receiver_cpu_s_gb": receiver_s / MOVED_GB,
                    }
                )
            if not receiver.ask("check", size=size, seed=run_seed):
                raise RuntimeError(f"{name}: what has arrived is not what was sent")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="samples are read from and added to this file")
    parser.add_argument("--peers", default="", help="Python of the peers' environment; without it they are left out")
    parser.add_argument("--transport", choices=sorted(METHODS), action="append", help="all, if not given")
    parser.add_argument("--method", action="append", help="only these")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", action="store_true", help="measure nothing, print what the file has")
    parser.add_argument("--plot", type=Path, help="write a picture of what the file has")
    options = parser.parse_args()
    samples: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else []
    if not options.report:
        for _ in range(options.rounds):
            seed = random.randrange(1 << 30)
            for transport in options.transport or list(METHODS):
                chosen = [
                    (name, method)
                    for name, method in METHODS[transport].items()
                    if (options.peers or not method.peer) and (not options.method or name in options.method)
                ]
                random.shuffle(chosen)
                for name, method in chosen:
                    samples += measure(name, method, options.sizes, options.peers, seed, transport)
                    options.json.write_text(json.dumps(samples))
                    print(f"{transport}: {name}", file=sys.stderr, flush=True)
    from benchmarks.transfer_report import plot, report

    print(report(samples))
    if options.plot:
        plot(samples, options.plot)


if __name__ == "__main__":
    main()
