"""The servers of benchmarks/front_door.py, started and stopped: Baton's clusters, vLLM's API server, the bare ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks.front_door_node import NODES_ENV, RATE_ENV
from benchmarks.front_door_report import BARE_GRPC, BARE_HTTP, BARE_WHOLE
from benchmarks.front_door_tokens import write_tokenizer
from cli.services import Service
from cli.supervisor import ROUTER_NAME, Cluster, ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model

HERE: Final = Path(__file__).resolve().parent
START_S_MAX: Final = 300.0
STREAMS_MAX: Final = 2_048
GRPC_STREAMS_MAX: Final = 1_000
"""A router has places for 1,024 gRPC connections, and those of the run before take a moment to go."""
ONE_LAYER: Final = DemoModelParams(num_layers=1, hidden_size=64, num_heads=2, head_dim=32, vocab_size=2_048)
VLLM_ENV: Final = {
    "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`front` is the process whose cost is compared; `node` computes (a child of `front` where it is None)."""

    name: str
    front: int
    node: int | None = None
    doors: Mapping[str, str] = field(default_factory=dict)
    """Address, by door."""
    model: str = "mock"
    paced: bool = True
    """The mock engine's pace; others are as fast as they can be."""
    shares: int = 1
    """It gets one of so many shares of the streams."""
    streams_too: bool = True
    """It answers with streams, too."""

    @property
    def pids(self) -> dict[str, int]:
        return {"front": self.front, **({} if self.node is None else {"node": self.node})}


class TimedCluster(Cluster):
    """Its nodes are those of benchmarks/front_door_node.py, its code that of `tree`."""

    def __init__(self, spec: ClusterSpec, tree: Path) -> None:
        super().__init__(spec)
        self._python = str(tree / ".venv/bin/python") if (tree / ".venv").is_dir() else sys.executable

    def _command(self, name: str, service: Service, directory: str) -> list[str]:
        command = super()._command(name, service, directory)
        if service.has_engine:
            return [self._python, "-P", str(HERE / "front_door_node.py"), *command[command.index("cli.main") + 1 :]]
        return [self._python, *command[1:]]


@asynccontextmanager
async def cluster(
    name: str,
    folder: Path,
    *,
    rate: float,
    mock: bool,
    tree: Path,
    router: Mapping[str, object],
    decode_nodes: int = 1,
    shares: int = 1,
) -> AsyncIterator[Server]:
    """A router, a prefill node and decode nodes; of the mock engine, or of the one-layer model in `folder`."""
    engine: dict[str, object] = {"engine.sequences_max": STREAMS_MAX, "engine.tokens_per_step_max": 4_096}
    sizes: dict[str, object] = {
        "http_listen": "127.0.0.1:0",
        "http_connections_max": 4 * STREAMS_MAX,
        "requests_max": 2 * STREAMS_MAX,
        "rpc.rpcs_max": 2 * STREAMS_MAX,
        "model": str(folder),
    }
    decode = {**engine, "requests_max": STREAMS_MAX}
    spec = ClusterSpec(
        decode=decode_nodes, model=None if mock else str(folder), threads=1,
        engine_kind=EngineKind.MOCK if mock else None, blocks=STREAMS_MAX * 24 // decode_nodes if mock else 12_000,
        flags={Service.ROUTER: {**sizes, **router}, Service.PREFILL: engine, Service.DECODE: decode},
        env={RATE_ENV: str(rate), NODES_ENV: str(decode_nodes), "PYTHONPATH": f"{tree}:{tree / 'proto'}"},
    )  # fmt: skip
    running = TimedCluster(spec, tree)
    try:
        await running.start()
        http = running.router_others["http"].removeprefix("http://")
        yield Server(
            name=name, front=running.pids[ROUTER_NAME], node=running.pids["decode-0"],
            doors={"http": http, "grpc": running.router}, model="mock" if mock else folder.name, paced=mock,
            shares=shares,
        )  # fmt: skip
    finally:
        for problem in await running.stop():
            print(problem, file=sys.stderr)


@asynccontextmanager
async def bare_whole(rate: float) -> AsyncIterator[Server]:
    """Answers without streaming, by way of nodes that compute nothing."""
    async with bare("nodes", rate) as nodes, bare("whole", float(nodes.doors["nodes"].rpartition(":")[2])) as front:
        yield replace(front, doors={"http": front.doors["whole"]}, streams_too=False)


@asynccontextmanager
async def bare(door: str, rate: float, *, groups: int = 1) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.front_door_bare", door, str(rate), str(groups),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE.parent,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    try:
        port = int(await process.stdout.readline())
        name = {"http": BARE_HTTP, "grpc": BARE_GRPC}.get(door, BARE_WHOLE)
        yield Server(name=name, front=process.pid, doors={door: f"127.0.0.1:{port}"})
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def vllm(python: Path, folder: Path, log: Path) -> AsyncIterator[Server]:
    """vLLM's API server is the front, its child the engine core."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name",
        folder.name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048",
        "--max-num-seqs", "1024", "--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | VLLM_ENV
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        give_up_s = time.monotonic() + START_S_MAX
        while not await _listens(port):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"vLLM did not start; the end of its log:\n{_tail(log)}")
            await asyncio.sleep(0.5)
        address = f"127.0.0.1:{port}"
        yield Server(name="vLLM", front=process.pid, doors={"http": address}, model=folder.name, paced=False)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def write_models(folder: Path) -> tuple[Path, Path]:
    """The folders of the mock engine's tokenizer and of the one-layer model."""
    mock, model = folder / "mock", folder / "one-layer"
    if not (mock / "config.json").exists():
        write_demo_model(mock, DemoModelParams(num_layers=1, hidden_size=64, num_heads=2, head_dim=32, vocab_size=600))
        write_tokenizer(mock)
    if not (model / "config.json").exists():
        write_demo_model(model, ONE_LAYER)
    return mock, model


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4_000:]
