"""What a streamed token costs: the router and the decode node, beside vLLM's API server and servers that do nothing.

    python -m benchmarks.front_door --quick                       # under two minutes, without vLLM
    python -m benchmarks.front_door --workers 2 --vllm-python /tmp/vllm/bin/python --json front_door.json
    python -m benchmarks.front_door --soak 600 --json soak.json
    python -m benchmarks.front_door --report front_door.json

Processor time of each process (of the decode node: of the threads that compute, and of the others), by /proc, so other
work on the machine harms little; figures and what is compared: docs/bench.md. Servers alternate. The router's figures
are with a mock engine on a real decode node, which paces tokens: `--rate` a second in all. Those of the decode node are
with a model of one layer, which vLLM serves too, both as fast as they can. One process of clients, the same for all.
`--trees` measures the code of other checkouts beside this one's. What has been measured is printed and in the file as
each case ends, so a run may be ended early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.front_door_clients import Job, files_problem
from benchmarks.front_door_report import (
    BARE_GRPC,
    BARE_HTTP,
    MODEL,
    ROUTER,
    Run,
    Soaked,
    has_workers,
    read,
    report,
    run_of,
    share_name,
    soaked_of,
    workers_name,
)  # fmt: skip
from benchmarks.front_door_servers import (
    GRPC_STREAMS_MAX,
    HERE,
    Server,
    bare,
    bare_whole,
    cluster,
    vllm,
    write_models,
)  # fmt: skip

TOKENS = 128
ROUNDS_MANY_MAX: Final = 2
"""From 500 streams on."""
FREE_TOKENS_MANY = 64
"""Of an answer where a thousand streams are as fast as they can."""
WHOLE_STREAMS, WHOLE_TOKENS, WHOLE_WAVES = 16, 16, 16
ANSWERS = 128
"""Of a run, at least: few streams take several waves."""
SOAK_STREAMS, SOAK_TOKENS, SOAK_RATE = 2_000, 240, 4_000.0
SOAK_NODES: Final = 8
"""All tokens of a node's step come at once: with one node, of all streams."""
SOAK_BARE_S_MAX: Final = 30.0
LINE_BYTES_MAX = 1 << 24


class ClientProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> ClientProcess:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.front_door_clients",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE.parent, limit=LINE_BYTES_MAX,
            )
        )  # fmt: skip

    async def play(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the clients have ended")
        found: dict[str, Any] = json.loads(line)
        if found["errors"]:
            print(f"{job.door}, {job.streams} streams: errors: {found['errors']}", file=sys.stderr, flush=True)
        return found

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Kept:
    """All cases so far, in a file and for people, as each ends."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._began_s = time.monotonic()
        self.cases: list[Run | Soaked] = []

    def add(self, case: Run | Soaked) -> None:
        self.cases.append(case)
        print(f"{time.monotonic() - self._began_s:.0f} s: {case}", file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps([asdict(each) for each in self.cases]) + "\n")


class Rounds:
    def __init__(self, args: argparse.Namespace, clients: ClientProcess, servers: Sequence[Server], kept: Kept) -> None:
        self._args = args
        self._clients = clients
        self._servers = servers
        self._kept = kept

    async def play(self) -> None:
        streaming = [server for server in self._servers if server.streams_too]
        for server in streaming:
            for door in self._doors(server):
                await self._clients.play(self._job(server, door, 4))
        for streams in () if self._args.requests_only else self._args.streams:
            for number in range(self._args.rounds if streams < 500 else min(self._args.rounds, ROUNDS_MANY_MAX)):
                for server in streaming[:: 1 if number % 2 == 0 else -1]:
                    for door in self._doors(server):
                        await self._one(server, self._job(server, door, streams))
        for number in range(self._args.rounds):
            for server in self._servers[:: 1 if number % 2 == 0 else -1]:
                if server.name not in (BARE_HTTP, BARE_GRPC) and server.shares == 1 and "http" in self._doors(server):
                    job = self._job(server, "http", WHOLE_STREAMS)
                    await self._one(server, replace(job, tokens=WHOLE_TOKENS, waves=WHOLE_WAVES, streaming=False))

    def _doors(self, server: Server) -> list[str]:
        # The decode node's work is the same for both doors.
        doors = ["http"] if server.name == MODEL else self._args.doors
        return [door for door in doors if door in server.doors]

    def _job(self, server: Server, door: str, streams: int) -> Job:
        tokens = TOKENS if server.paced or streams < 500 else FREE_TOKENS_MANY
        streams = max(1, streams // server.shares)
        return Job(
            door=door, address=server.doors[door], pids=server.pids, streams=streams, tokens=tokens,
            model=server.model, waves=max(1, ANSWERS // streams) if streams > 4 else 1,
            balance="front" if has_workers(server.name) else "",
        )  # fmt: skip

    async def _one(self, server: Server, job: Job) -> None:
        self._kept.add(run_of(server.name, asdict(job), await self._clients.play(job)))


async def measure(args: argparse.Namespace, folder: Path, kept: Kept) -> None:
    mock_folder, model_folder = write_models(folder)
    async with AsyncExitStack() as stack:
        servers: list[Server] = []

        async def add(opened: Any) -> None:
            servers.append(await stack.enter_async_context(opened))

        def baton(name: str, *, mock: bool = True, tree: Path = HERE.parent, shares: int = 1, **router: object) -> Any:
            where = mock_folder if mock else model_folder
            return cluster(name, where, rate=args.rate / shares, mock=mock, tree=tree, router=router, shares=shares)

        clients = await ClientProcess.start()
        stack.push_async_callback(clients.close)
        for door in args.doors:
            await add(bare(door, args.rate))
        if "http" in args.doors:
            await add(bare_whole(args.rate))
        await add(baton(ROUTER))
        for tree in args.trees:
            await add(baton(f"{ROUTER} of {tree.name}", tree=tree.resolve()))
        if args.workers:
            await add(baton(workers_name(args.workers), workers=args.workers))
            await add(baton(share_name(args.workers), shares=args.workers))
        if args.one_layer and "http" in args.doors:
            await add(baton(MODEL, mock=False))
        if args.vllm_python is not None and "http" in args.doors:
            await add(vllm(args.vllm_python, model_folder, folder / "vllm.log"))
        await Rounds(args, clients, servers, kept).play()


async def soak(args: argparse.Namespace, folder: Path, kept: Kept) -> None:
    """Many slow streams. The bare loop comes first and for a shorter time: what the clients and the load add."""
    mock_folder, _ = write_models(folder)
    door, nodes = args.doors[0], args.soak_nodes
    clients = await ClientProcess.start()

    async def one(opened: AbstractAsyncContextManager[Server], seconds: float) -> None:
        # An answer takes a third of the time at most: after the first ones there is time to compare.
        tokens = max(1, min(SOAK_TOKENS, int(seconds / 3 * SOAK_RATE / args.soak_streams)))
        async with opened as server:
            job = Job(
                door=door, address=server.doors[door], pids=server.pids, streams=args.soak_streams, tokens=tokens,
                seconds=seconds, ages=True,
            )  # fmt: skip
            kept.add(soaked_of(server.name, asdict(job), await clients.play(job)))

    name, router = (workers_name(args.workers), {"workers": args.workers}) if args.workers else (ROUTER, {})
    try:
        if door == "http":
            await one(bare(door, SOAK_RATE, groups=nodes), min(SOAK_BARE_S_MAX, args.soak / 2))
        running = cluster(
            name, mock_folder, rate=SOAK_RATE, mock=True, tree=HERE.parent, router=router, decode_nodes=nodes
        )
        await one(running, args.soak)
    finally:
        await clients.close()


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", help="at a time (16 64 200 1000)")
    parser.add_argument("--doors", nargs="+", choices=("http", "grpc"), default=["http", "grpc"])
    parser.add_argument("--rounds", type=int, help="from 500 streams on two at most")
    parser.add_argument("--rate", type=float, default=4_000.0, help="tokens a second of the mock engine")
    parser.add_argument("--quick", action="store_true", help="16 and 200 streams, two rounds")
    parser.add_argument("--requests-only", action="store_true", help="only requests without streaming")
    parser.add_argument("--no-one-layer", dest="one_layer", action="store_false", help="not the decode node's figure")
    parser.add_argument(
        "--workers", type=int, default=0, help="measure a router with so many workers too (soak: only that one)"
    )
    parser.add_argument("--trees", type=Path, nargs="+", default=[], help="checkouts to measure beside this one")
    parser.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="do this in place of all else")
    parser.add_argument("--soak-streams", type=int, default=SOAK_STREAMS)
    parser.add_argument("--soak-nodes", type=int, default=SOAK_NODES, help="decode nodes that the streams are on")
    parser.add_argument("--json", type=Path, help="written after each case; what has been there is lost")
    parser.add_argument("--report", type=Path, metavar="JSON", help="measure nothing, print what the file has")
    args = parser.parse_args(arguments)
    args.streams = args.streams or ([16, 200] if args.quick else [16, 64, 200, 1_000])
    args.rounds = args.rounds or (2 if args.quick else 3)
    if args.workers == 1 or args.workers < 0:
        parser.error("--workers: 2 or more; the router without workers is measured always")
    if args.soak is not None and len(args.doors) > 1:
        args.doors = ["http"]
    streams = [args.soak_streams] if args.soak is not None else args.streams
    if "grpc" in args.doors and max(streams) > GRPC_STREAMS_MAX:
        parser.error(f"over gRPC at most {GRPC_STREAMS_MAX} streams: a router has no places for more connections")
    if problem := files_problem(max(streams)):
        parser.error(problem)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    if args.report is not None:
        print(report(read(args.report.read_text())))
        return
    kept = Kept(args.json)
    with tempfile.TemporaryDirectory(prefix="baton-front-door-") as folder:
        try:
            asyncio.run((measure if args.soak is None else soak)(args, Path(folder), kept))
        except KeyboardInterrupt:
            sys.exit("ended early")
        finally:
            print(report(kept.cases), flush=True)


def end_early(*_: object) -> None:
    """As Ctrl-C does, once: all servers are to be stopped, and that of vLLM is no child that ends with this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have those in the background ignore it
    signal.signal(signal.SIGTERM, end_early)
    main()
