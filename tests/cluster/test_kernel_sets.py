"""A cluster whose nodes compute by different kernel sets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.native.kernels import native_kernels
from tests.support.cluster_harness import assert_conserved, running

PARAMS = DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=600)
TOKENS = 12


@pytest.mark.skipif(native_kernels() is None, reason="no compute kernels, so all nodes have one set")
def test_nodes_of_different_sets_hand_over_and_say_so(tmp_path: Path) -> None:
    """One that computes by PyTorch beside one that computes by the best set of this CPU: every block is handed over,
    the digests of cached KV are the same, and the router's log says that the sets differ."""
    write_demo_model(tmp_path / "model", PARAMS)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    spec = ClusterSpec(
        prefill=1,
        decode=1,
        model=str(tmp_path / "model"),
        engine_kind=EngineKind.MODEL,
        blocks=128,
        flags={Service.PREFILL: {"engine.kernels": "torch"}},
    )
    rng = random.Random(4)
    prompt = [rng.randrange(2, PARAMS.vocab_size) for _ in range(75)]
    with running(spec) as cluster:
        answer = cluster.run(cluster.client.generate(prompt, max_tokens=TOKENS, ignore_eos=True))
        cluster.run(assert_conserved(cluster))
        statuses = cluster.run(cluster.statuses())
        warned = "nodes compute with different kernels" in cluster.log_text("router-0")
    assert (len(answer.ids), answer.stats.blocks_written) == (TOKENS, 5)
    models = [statuses[name].record.model for name in ("prefill-0", "decode-0")]
    assert models[0].kv_root == models[1].kv_root
    assert models[0].kernel_set.startswith("torch ")
    assert not models[1].kernel_set.startswith("torch")
    assert warned
