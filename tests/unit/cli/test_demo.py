"""The demo finds a wrong answer, and what one process computes is right by its own measure."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from batonpb import inference_pb2

from baton.client import Answer, BatonError, Reason, Sampling, Stats
from cli.demo import FIRST_WAVE, SECOND_WAVE, DemoRequest, _send_wave, find_mismatches
from cli.main import run
from cli.reference import Reference
from engine.demo_model import DemoModelParams, write_demo_model
from engine.types import SamplingParams
from tests.support.scripted_router import Events, ScriptedClient, refused, started

GREEDY = DemoRequest(name="greedy", prompt="Where does the road lead?", sampling=Sampling(temperature=0, max_tokens=6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2))
    return folder


def answered(reference: Reference) -> Answer:
    """What a faultless cluster answers to GREEDY."""
    prompt = reference.encode(GREEDY.prompt)
    ids = reference.answer(prompt, SamplingParams(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=6))
    assert len(ids) == 6
    return Answer(
        request_id="r",
        ids=ids,
        text=reference.decode(ids),
        finish="length",
        stats=Stats(prompt_tokens=len(prompt)),
    )


def test_a_wrong_answer_is_found(model: Path) -> None:
    """Right, one token other than it should be, one too few, other text, another prompt: each is told apart."""
    reference = Reference(model, num_blocks=16, compute_threads=1)
    right = answered(reference)
    other = (*right.ids[:3], right.ids[3] + 1, *right.ids[4:])
    answers = {
        "right": right,
        "token": Answer(ids=other, text=right.text, stats=right.stats),
        "short": Answer(ids=right.ids[:5], text=right.text, stats=right.stats),
        "text": Answer(ids=right.ids, text="something else", stats=right.stats),
        "prompt": Answer(ids=right.ids, text=right.text, stats=Stats(prompt_tokens=1)),
    }
    pairs = [(dataclasses.replace(GREEDY, name=name), answer) for name, answer in answers.items()]
    assert asyncio.run(find_mismatches(pairs, model=model, compute_threads=1)) == {
        "token": f"output token 3 is {other[3]}, one process draws {right.ids[3]}",
        "short": f"output token 5 is None, one process draws {right.ids[5]}",
        "text": f"the text is 'something else', its tokens say {right.text!r}",
        "prompt": f"the prompt has {right.stats.prompt_tokens} tokens, the router counted 1",
    }


def test_the_reference_repeats_itself(model: Path) -> None:
    """The same request twice, with others before it, gives the same tokens: nothing is left of earlier ones."""
    reference = Reference(model, num_blocks=16, compute_threads=1)
    first = answered(reference)
    params = SamplingParams(temperature=1, top_k=0, top_p=1, seed=3, max_tokens=20)
    reference.answer(reference.encode("Hello! Good morning."), params)
    assert answered(reference) == first


class Failing:
    """Refuses the prompt "bad"; answers none of the others."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def __call__(self, request: inference_pb2.GenerateRequest) -> Events:
        if request.text == "bad":
            raise refused(BatonError(Reason.BAD_FIELD, "Not that.", field="text", retry_after_ms=5))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.append(request.text)
        yield started()


def test_which_model_is_written(tmp_path: Path) -> None:
    """The trained one, unless random weights are asked for, by name or by an option of their shape."""

    def written(*options: str) -> tuple[str, str, int]:
        assert run(["demo-model", str(tmp_path / "model"), *options]) == 0
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        return config["model_type"], config["dtype"], config["num_hidden_layers"]

    assert written() == ("qwen3", "bfloat16", 5)
    assert written("--random") == ("llama", "float32", 4)
    assert written("--layers", "1") == ("llama", "float32", 1)


def test_a_request_of_the_demo_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """One error, no group of them, which names the request; the others are cancelled first."""
    wave = [dataclasses.replace(GREEDY, name=name, prompt=name) for name in ("good", "bad")]
    answers = Failing()
    with pytest.raises(BatonError) as caught:
        asyncio.run(_send_wave(ScriptedClient(answers), wave))
    error = caught.value
    assert error.message == "The demo's request bad failed: Not that."
    assert (error.reason, error.field, error.retry_after_ms) == (Reason.BAD_FIELD, "text", 5)
    assert answers.cancelled == ["good"]
    assert capsys.readouterr().out.endswith(">\n")


def test_the_demo_requests() -> None:
    """Names are unique, every answer can be computed again, and the parts that the demo promises are there."""
    requests = [*FIRST_WAVE, *SECOND_WAVE]
    assert len({request.name for request in requests}) == len(requests)
    assert all(request.sampling.temperature == 0 or request.sampling.seed is not None for request in requests)
    assert sum(request.unary for request in requests) == 1
    assert not FIRST_WAVE[0].unary
    assert not SECOND_WAVE[0].unary
