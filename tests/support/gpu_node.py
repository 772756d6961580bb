"""What the tests of nodes on a device share: a model so small that Triton's interpreter is fast enough, and settings.

On a machine with a GPU, `BATON_TEST_DEVICE=cuda` runs the same nodes on it, each in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from batonpb import node_pb2

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import ComputeDevice, EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.types import SamplingParams
from tests.support.cluster_harness import RunningCluster, running
from tests.support.inprocess_cluster import InProcessCluster, inprocess

ON_GPU: Final = os.environ.get("BATON_TEST_DEVICE") == "cuda"
DEVICE: Final = ComputeDevice.CUDA if ON_GPU else ComputeDevice.CPU_KERNELS
MODEL: Final = DemoModelParams(
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    context_len_max=160,
)
AnyCluster = InProcessCluster | RunningCluster
TOKENS: Final = 6
GREEDY: Final = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=TOKENS)
NOTHING: Final[Mapping[str, object]] = {}
BLOCK_SIZE: Final = 8
NUM_BLOCKS: Final = 60
SEQUENCES_MAX: Final = 5
ENGINE: Final[dict[str, object]] = {
    "engine.device": DEVICE.value,
    "engine.dtype": "float32",
    "engine.block_size": BLOCK_SIZE,
    "engine.poison_freed": True,
    "engine.tokens_per_step_max": 16,
    "engine.sequences_max": SEQUENCES_MAX,
    "engine.gpu.graphs.graph_rows_max": 4,  # of three rows one is padding, and five run kernel by kernel
}


def write_model(folder: Path) -> Path:
    path = folder / "model"
    write_demo_model(path, MODEL)
    return path


def spec_of(
    model: Path, *, mixed: int = 0, on_cpu: Collection[str] = (), more: Mapping[str, object] = NOTHING
) -> ClusterSpec:
    """A prefill and a decode node, or some mixed ones, on the device, but for those named in `on_cpu`. `more`: settings
    of all of them."""
    halves = 0 if mixed else 1
    everywhere = {**ENGINE, **more}
    decodes = {**everywhere, "requests_max": SEQUENCES_MAX}
    return ClusterSpec(
        prefill=halves,
        decode=halves,
        mixed=mixed,
        model=str(model),
        engine_kind=EngineKind.MODEL,
        threads=1,
        blocks=NUM_BLOCKS,
        flags={
            Service.PREFILL: everywhere,
            Service.DECODE: decodes,
            Service.MIXED: {**decodes, "handoff_tokens_min": 10},
            Service.ROUTER: {"placement_wait_ms_max": 60_000},
        },
        node_flags={name: {"engine.device": "cpu"} for name in on_cpu},
        start_ms_max=120_000,
    )


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, MODEL.vocab_size) for _ in range(length)] for length in lengths]


def play(spec: ClusterSpec, scene: Callable[[AnyCluster], Awaitable[None]]) -> None:
    """The scene on a cluster in this process; on a GPU, whose memory no process opens a second time, of processes."""
    if ON_GPU:
        with running(spec) as cluster:
            cluster.run(_whole(scene(cluster)))
        return

    async def inside() -> None:
        async with inprocess(spec) as cluster:
            await scene(cluster)

    asyncio.run(inside())


async def _whole(scene: Awaitable[None]) -> None:
    await scene


def blocks_in_all(status: node_pb2.NodeStatus) -> int:
    blocks = status.record.load.blocks
    return blocks.free + blocks.cached + blocks.held + blocks.writer_owned + blocks.quarantined


def facts_of(status: node_pb2.NodeStatus) -> dict[str, str]:
    return {fact.name: fact.text for fact in status.engine.facts}
