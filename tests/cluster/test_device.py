"""Clusters whose engines compute on a copy of the region: `engine.device` cuda-mirrored.

Without a GPU the same copies are made between two places of the host's memory. On a machine with one:
`BATON_TEST_DEVICE=cuda python -m pytest tests/cluster/test_device.py tests/unit/engine/test_device.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from cli.reference import Reference
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import ComputeDevice, EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.types import SamplingParams
from tests.support.cluster_harness import assert_conserved, running

ON_GPU = os.environ.get("BATON_TEST_DEVICE") == "cuda"
DEVICE = (ComputeDevice.CUDA_MIRRORED if ON_GPU else ComputeDevice.CPU_MIRRORED).value
PARAMS = DemoModelParams(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=600)
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device") / "model"
    write_demo_model(folder, PARAMS)
    return folder


def spec_of(model: Path, devices: Mapping[Service, str], mixed: int = 0) -> ClusterSpec:
    flags: dict[Service, dict[str, object]] = {
        service: {
            "engine.device": device,
            "engine.dtype": "float32",
            "engine.tokens_per_step_max": 64,
            "engine.poison_freed": True,
        }
        for service, device in devices.items()
    }
    halves = 0 if mixed else 1
    return ClusterSpec(
        prefill=halves,
        decode=halves,
        mixed=mixed,
        model=str(model),
        engine_kind=EngineKind.MODEL,
        threads=1,
        blocks=96,
        flags=flags,
    )


@pytest.mark.parametrize(
    ("devices", "mixed"),
    [
        ({Service.PREFILL: DEVICE, Service.DECODE: DEVICE}, 0),
        ({Service.PREFILL: DEVICE, Service.DECODE: "cpu"}, 0),
        ({Service.PREFILL: "cpu", Service.DECODE: DEVICE}, 0),
        ({Service.MIXED: DEVICE}, 2),
    ],
    ids=["both", "prefill", "decode", "two mixed nodes"],
)
def test_answers_are_those_of_one_engine_on_the_cpu(model: Path, devices: Mapping[Service, str], mixed: int) -> None:
    """Prompts at once, with a common beginning, in a region so small that blocks are freed and used again: exact."""
    rng = random.Random(8)
    common = [rng.randrange(3, PARAMS.vocab_size) for _ in range(48)]
    prompts = [[rng.randrange(3, PARAMS.vocab_size) for _ in range(length)] for length in (1, 15, 16, 17, 130, 200)]
    prompts += [common + prompt[:30] for prompt in prompts]
    reference = Reference(model, num_blocks=64, compute_threads=1)
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]
    with running(spec_of(model, devices, mixed)) as cluster:

        async def answers() -> list[list[int]]:
            calls = (cluster.client.generate(prompt, max_tokens=TOKENS) for prompt in prompts)
            return [list(answer.ids) for answer in await asyncio.gather(*calls)]

        for _ in range(3):
            assert cluster.run(answers()) == expected
        cluster.run(assert_conserved(cluster))
