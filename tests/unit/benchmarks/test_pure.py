"""The pure parts of the measurements: what they make of recorded events."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from benchmarks.engine import over_limit, table
from benchmarks.engine_cases import DECODES, LIGHT, LOADS, Steps, full_steps, kv_bytes, measure, weight_bytes
from benchmarks.engine_libraries import interval
from benchmarks.handoff_trace import Event, What, chrome_trace, figures, spans
from benchmarks.interference import LOAD, STREAMS, Load, Run
from benchmarks.interference_report import LONG_PROMPT, best_chunk, by_system, report
from cli.bench_load import Message

MIB = 1 << 20


def handoff() -> list[Event]:
    """Two layers, two chunks of two records of 1 MiB; the transport takes 0.5 s a layer, and is behind once."""
    return [
        Event(0.0, What.GRANTED),
        Event(1.0, What.PLANNED, writes=4),
        Event(2.0, What.POSTED, 0, 2, 2 * MIB),
        Event(2.5, What.COMPLETED, writes=2),
        Event(3.0, What.POSTED, 1, 2, 2 * MIB),
        Event(3.5, What.COMPUTED),
        Event(4.0, What.PLANNED, writes=4),
        Event(4.5, What.POSTED, 0, 2, 2 * MIB),
        Event(4.6, What.POSTED, 1, 2, 2 * MIB),
        Event(4.75, What.COMPLETED, writes=2),
        Event(5.0, What.COMPLETED, writes=2),
        Event(5.5, What.COMPLETED, writes=2),
        Event(5.75, What.COMPUTED),
        Event(6.0, What.DRAWN),
        Event(6.1, What.SEALED),
        Event(6.25, What.ENDED),
    ]


def test_a_handoff_in_figures() -> None:
    """Exposed is what follows the last step on its thread, and the draw is told later; three layers' records were still
    on their way when the last was posted."""
    found = figures(handoff())
    assert round(found.exposed_ms) == 500
    assert round(found.tail_ms) == 1150
    assert round(found.drain_ms) == 900
    assert found.left_bytes == 6 * MIB
    assert found.sent_bytes == 8 * MIB
    assert round(found.computed_ms) == 4750


def test_the_layers_of_a_handoff() -> None:
    """Each layer is computed once and sent once, in order; a later one begins when the one before has landed."""
    computed, sent = spans(handoff())
    assert [(span.chunk, span.layer, span.begin_s, span.end_s) for span in computed] == [
        (0, 0, 1.0, 2.0), (0, 1, 2.0, 3.0), (1, 0, 4.0, 4.5), (1, 1, 4.5, 4.6),
    ]  # fmt: skip
    assert [(span.chunk, span.layer, span.begin_s, span.end_s) for span in sent] == [
        (0, 0, 2.0, 2.5), (0, 1, 3.0, 4.75), (1, 0, 4.75, 5.0), (1, 1, 5.0, 5.5),
    ]  # fmt: skip
    trace = json.loads(json.dumps(chrome_trace(handoff(), name="shm")))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 8
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "i"} == {
        "granted", "drawn", "sealed", "ended",
    }  # fmt: skip


def run(system: str, gap_ms: float, prompts: int) -> dict[str, Any]:
    return {
        "system": system,
        "alone_ttft_ms": 300.0,
        "phases": {"alone": (0, 10), "prompts": (10, 20), "saturated": (20, 30)},
        "gaps": [(5, 1.0)] + [(15, gap_ms)] * 10 + [(25, 9 * gap_ms)] * 10,
        "prompts": [(12, 400.0)] + [(25, 800.0)] * prompts,
    }


def test_interference() -> None:
    """A chunk that is slow as a whole does not count, however short its gaps; ours are told as shares of the best."""
    runs = [run("cluster", 10, 5), run("vllm-128", 20, 5), run("vllm-512", 100, 10), run("vllm-2048", 150, 10)]
    assert best_chunk(runs) == "vllm-512"
    assert best_chunk(runs[:1]) is None
    found = by_system(runs)["cluster"]
    assert "alone_ttft" in report(runs).splitlines()[0]
    assert found["alone_ttft"] == 300
    assert (found["alone_p50"], found["p99"], found["max"], found["ttft_max"]) == (1, 10, 10, 400)
    assert found["tokens_per_s"] == (10 + 5 * 4000) / 10
    assert "P99 gap of cluster: 0.100 of vllm-512's" in report(runs)


def test_the_rate_of_long_prompts_is_taken_beside_the_streams() -> None:
    """Warm-ups and prompts alone come before the first stream; those that the load is counted from, beside all."""
    streams = 0
    beside: list[int] = []

    class Target:
        name = "a target"

        async def check(self) -> None:
            pass

        def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], AsyncGenerator[Message, None]]:
            return lambda: self._messages(len(ids))

        async def _messages(self, length: int) -> AsyncGenerator[Message, None]:
            nonlocal streams
            if length == LONG_PROMPT:
                beside.append(streams)
                yield Message(1, timed=True)
                return
            streams += 1
            try:
                while True:
                    yield Message(1, timed=True)
                    await asyncio.sleep(0)
            finally:
                streams -= 1

    args = argparse.Namespace(
        warmups=2, alone_prompts=3, prompts_min=1, prompts_s=0.0, alone_s=0.0, settle_s=0.0, saturated_s=0.0,
        stream_tokens=64, seed="0",
    )  # fmt: skip
    run = Run(system="cluster", shape="small")
    asyncio.run(Load(Target(), run, args).measure(None))
    assert beside == [0] * 5 + [STREAMS] * 4
    assert run.gap_s == pytest.approx(run.beside_ttft_ms / 1e3 / LOAD)
    assert run.beside_ttft_ms > 0
    assert list(run.phases) == ["alone", "prompts", "saturated"]


def test_only_steps_of_all_answers_count() -> None:
    """Three prompts read one after the other; the first answer ends before the last one.

    Steps that read a prompt, the one that first goes on all three among them, and those of fewer answers are left out.
    """
    steps = [(1.0, 1), (2.5, 2), (4.0, 3), (4.5, 3), (5.25, 3), (5.5, 2), (5.75, 1)]
    assert full_steps(steps, 3) == [0.5, 0.75]


def engine_round(step_s: float, read_bytes_s: float, **rates: float) -> dict[str, Any]:
    cases = {f"decode_s_{batch}_{context}": step_s for batch, context in DECODES["473m"]}
    own = {"prefill_tokens_s": 900.0, "outside_runner_s": 1e-4, "read_bytes_s": read_bytes_s} | cases
    return {"model": "473m", "steps": 32, "own": own | rates, "vllm": {"prefill_tokens_s": 700.0} | cases}


def test_a_step_is_held_against_the_rate_around_it() -> None:
    """A case with a rate of its own, and one of an older file, which has the round's; the table has least and most."""
    bytes_read = weight_bytes("473m") + kv_bytes("473m", 1 * (64 + 16))
    each = engine_round(0.025, 50e9, read_bytes_s_1_64=40e9)
    assert over_limit(each, 1, 64) == 0.025 / (bytes_read / 40e9)
    assert over_limit(engine_round(0.025, 50e9), 1, 64) == 0.025 / (bytes_read / 50e9)
    lines = table([engine_round(0.025, 40e9), engine_round(0.025, 40e9, read_bytes_s_16_512=60e9)]).splitlines()
    assert next(line for line in lines if "batch 1, context 64" in line).endswith("| 1.05 (1.05-1.05) (reading) |")
    assert any("40.0 (40.0-60.0); 0.100" in line for line in lines)


def test_the_rates_around_a_case_are_averaged() -> None:
    """Rates differ from call to call: each case gets the mean of its own, and none where nobody measures."""
    calls: list[int] = []

    def generate(prompts: list[list[int]], tokens: int) -> Steps:
        calls.append(len(prompts))
        return [(float(step), len(prompts)) for step in range(1, tokens + 1)]

    load = LOADS["473m"]

    def rates() -> dict[str, list[float]]:
        return {"read_bytes_s": [10.0 * len(calls), 10.0 * len(calls) + 2], "multiply_flops_s": [3.0, 4.0]}

    found = measure("473m", load, random.Random(0), generate, rates)
    # The first call is the prefill's.
    assert [found[f"read_bytes_s_{batch}_{context}"] for batch, context in DECODES["473m"]] == [21, 31, 41, 51]
    assert found["multiply_flops_s_16_64"] == 3.5
    assert calls == [4, 1, 1, 16, 16]
    assert not any("_bytes_s" in name for name in measure("473m", load, random.Random(0), generate))


def test_a_slow_multiplier_bounds_a_step() -> None:
    """Sixteen rows of products take longer than reading the weights once: the step is held against that."""
    each = engine_round(0.2, 50e9, multiply_flops_s=100e9)
    flops = 16 * weight_bytes("473m") + 16 * 80 * 4 * 28 * 16 * 128
    assert over_limit(each, 16, 64) == pytest.approx(0.2 / (flops / 100e9))
    line = next(line for line in table([each]).splitlines() if "batch 16, context 64" in line)
    assert line.endswith("(multipliers) |")
    each = engine_round(0.2, 50e9, multiply_flops_s=100e9, multiply_flops_s_16_64=80e9)
    assert over_limit(each, 16, 64) == pytest.approx(0.2 / (flops / 80e9))


def test_a_median_ratio_has_an_interval() -> None:
    """Of a hundred pairs a tenth were disturbed: they do not move the median, and the interval lies close to it."""
    low, middle, high = interval([0.99 + 0.0002 * at for at in range(90)] + 10 * [3.0])
    assert middle == pytest.approx(0.9999)
    assert 0.995 < low < middle < high < 1.005
    assert interval([1.25, 1.25]) == (1.25, 1.25, 1.25)


def test_a_light_round_goes_on_what_its_prefill_has_read() -> None:
    """Prompts of decode steps are the beginning of the prefill's and one token more; the next round's is another."""
    asked: list[list[list[int]]] = []

    def generate(prompts: list[list[int]], tokens: int) -> Steps:
        asked.append(prompts)
        return [(float(step), len(prompts)) for step in range(1, tokens + 1)]

    rng = random.Random(0)
    measure("473m", LIGHT, rng, generate)
    assert [(len(prompts), len(prompts[0])) for prompts in asked] == [(1, 512), (1, 65), (1, 513), (16, 65), (16, 513)]
    read = asked[0][0]
    assert all(prompt[:-1] == read[: len(prompt) - 1] for prompts in asked[1:] for prompt in prompts)
    assert len({prompt[-1] for prompt in asked[-1]}) == 16
    measure("473m", LIGHT, rng, generate)
    assert asked[5][0] != read
