"""Sampling defaults of a model's `generation_config.json`, from the router's folder to the nodes that draw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, Reason
from engine.demo_model import write_demo_model
from tests.support.cluster_harness import mock_spec, mock_tokens
from tests.support.inprocess_cluster import inprocess

PROMPT = [5, 6, 7]
MODELS: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}


def model_with(folder: Path, generation: dict[str, object]) -> str:
    write_demo_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **generation}))
    return str(folder)


def test_the_models_values_are_drawn_with_unless_switched_off(tmp_path: Path) -> None:
    """The mock engine's tokens depend on temperature, top_p and top_k. A request that names none draws with the
    model's, one that names them with its own, zeros included; with `generation_config` off, all are neutral."""
    model = model_with(tmp_path / "model", MODELS)

    async def answer(**router_flags: object) -> tuple[list[int], list[int]]:
        async with inprocess(mock_spec(router_flags={"model": model, **router_flags})) as cluster:
            ask = cluster.client.generate
            plain = await ask(PROMPT, max_tokens=6, seed=4, temperature=None, ignore_eos=True)
            named = await ask(PROMPT, max_tokens=6, seed=4, temperature=0.8, top_k=0, top_p=1.0, ignore_eos=True)
            return plain.ids, named.ids

    own = mock_tokens(PROMPT, 6, seed=4, temperature=0.8, top_k=0, top_p=1.0)
    assert asyncio.run(answer()) == (mock_tokens(PROMPT, 6, seed=4, **MODELS), own)
    neutral = mock_tokens(PROMPT, 6, seed=4, temperature=1.0, top_k=0, top_p=1.0)
    assert asyncio.run(answer(generation_config="false")) == (neutral, own)


def test_a_router_does_not_start_with_defaults_that_nobody_may_have(tmp_path: Path) -> None:
    """top_p 2 in the file: the router says which key of which file, and what to do."""
    model = model_with(tmp_path / "model", {"top_p": 2})

    async def scenario() -> None:
        async with inprocess(mock_spec(router_flags={"model": model})):
            raise AssertionError("it has started")

    with pytest.raises(
        BatonError, match=r"generation_config\.json: top_p must be .* generation_config to false"
    ) as caught:
        asyncio.run(scenario())
    assert caught.value.reason is Reason.MODEL_BROKEN
