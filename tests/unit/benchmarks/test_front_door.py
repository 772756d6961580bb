"""The front door's benchmark: a tiny run of it, and what its report says of figures that are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import front_door
from benchmarks.front_door_cpu import add, difference
from benchmarks.front_door_report import BARE_HTTP, ROUTER, VLLM, WORKERS, Figures, Run, report, run_of
from benchmarks.front_door_tokens import TICK_S, VOCABULARY, age_ms, stamp, text_of, write_tokenizer

RUN = Run(
    server=ROUTER, door="http", streams=64, streaming=True, requests=64, errors=0, token_us=50.0, whole_us=60.0,
    request_us=900.0, node_token_us=20.0, engine_token_us=5.0, tokens_of_event=1.0, held=[],
)  # fmt: skip


def bars(*runs: Run) -> dict[str, tuple[float, bool]]:
    return {bar.what: (bar.value, bar.value <= bar.limit) for bar in Figures(runs).bars()}


def test_ratios_are_of_medians_and_stand_beside_their_bars() -> None:
    """Rounds of 40, 50 and 90 us for the router, 10 for the bare loop, 200 for vLLM: 5.0 misses, 0.25 passes."""
    bare = replace(RUN, server=BARE_HTTP, token_us=10.0, whole_us=10.0, node_token_us=None)
    vllm = replace(RUN, server=VLLM, token_us=200.0, whole_us=200.0, node_token_us=None)
    found = bars(replace(RUN, token_us=40.0), RUN, replace(RUN, token_us=90.0), bare, vllm)
    assert found["http, 64 streams, a token: of the bare loop's"] == (5.0, False)
    assert found["http, 64 streams, a token: of vLLM's"] == (0.25, True)
    assert found["http, 64 streams, decode node, mock engine, a token: of the bare loop's"] == (2.0, True)
    assert found["http, 64 streams, a token, requests in it: of vLLM's"] == (0.3, True)
    assert "5.00  bar 3.5  MISS" in report([RUN, bare])


def test_workers_are_judged_by_cost_and_by_balance() -> None:
    """The parent holds no connection and does not count; a worker without any is as bad as it can be."""
    two = replace(RUN, server=WORKERS, token_us=54.0, held=[0, 40, 24])
    found = bars(RUN, two)
    assert found["http, 64 streams, two workers, a token: of one's"] == (54 / 50, True)
    assert found["http, 64 streams, two workers, connections [0, 40, 24]: most to fewest"] == (40 / 24, False)
    idle = bars(RUN, replace(two, held=[0, 64, 0]))
    assert not idle["http, 64 streams, two workers, connections [0, 64, 0]: most to fewest"][1]


def test_a_request_without_streaming_has_its_own_bar() -> None:
    """2 ms of the router's time."""
    whole = replace(RUN, streaming=False, token_us=None, request_us=2_000.0)
    assert bars(whole) == {"http, 64 at a time, a request without streaming: ms": (2.0, False)}


def test_what_a_run_used_is_told_apart() -> None:
    """Two requests of ten tokens: 20 us a token in the window, 700 us in all; the node's threads apart."""
    window = {"front": {"1": {"others": 200_000}}, "node": {"2": {"engine": 50_000, "others": 100_000}}}
    out = {
        "all": {"front": {"1": {"others": 600_000}, "3": {"others": 100_000}}}, "window": window, "window_events": 5,
        "events": 10, "tokens": 20, "requests": 2, "errors": {}, "held": [],
    }  # fmt: skip
    found = run_of(ROUTER, {"door": "http", "streams": 2, "streaming": True}, out)
    assert (found.token_us, found.whole_us, found.request_us) == (20.0, 35.0, 150.0)
    assert (found.node_token_us, found.engine_token_us, found.tokens_of_event) == (10.0, 5.0, 2.0)
    # vLLM's child is its engine core.
    assert run_of(VLLM, {"door": "http", "streams": 2, "streaming": True}, out).whole_us == 30.0


def test_a_process_that_has_begun_had_used_nothing() -> None:
    """Differences of what was used, added up over two windows."""
    total = difference({"front": {"1": {"others": 7}, "2": {"others": 3}}}, {"front": {"1": {"others": 5}}})
    add(total, {"front": {"1": {"others": 10}}})
    assert total == {"front": {"1": {"others": 12}, "2": {"others": 3}}}


def test_a_token_says_when_it_was_drawn(tmp_path: Path) -> None:
    """By id, and by the text that the tokenizer makes of it."""
    token = stamp(12_345.0)
    assert 0 <= token < VOCABULARY
    assert age_ms(token, 12_346.0) == pytest.approx(1_000, abs=2e3 * TICK_S)
    write_tokenizer(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([token]) == text_of(token)


@pytest.mark.slow
def test_a_tiny_run_measures_every_server(tmp_path: Path) -> None:
    """Eight streams over both doors of a real cluster, one round: no error, every figure is there."""
    path = tmp_path / "run.json"
    front_door.main(["--streams", "8", "--rounds", "1", "--no-one-layer", "--json", str(path)])
    runs = [Run(**each) for each in json.loads(path.read_text())]
    found = {(run.door, run.server, run.streaming) for run in runs}
    assert found == {
        ("http", BARE_HTTP, True), ("grpc", "bare grpc.aio server", True), ("http", ROUTER, True),
        ("grpc", ROUTER, True), ("http", ROUTER, False),
    }  # fmt: skip
    assert [run.errors for run in runs] == [0] * len(runs)
    assert all(run.token_us for run in runs if run.streaming)
    assert all(run.node_token_us and run.engine_token_us for run in runs if run.server == ROUTER and run.streaming)
