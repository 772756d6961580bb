"""The front door's benchmark: a tiny run of it, and what its report says of figures that are given."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from benchmarks import front_door
from benchmarks.front_door_cpu import add, difference
from benchmarks.front_door_report import (
    BARE_HTTP,
    BARE_WHOLE,
    ROUTER,
    VLLM,
    Figures,
    Run,
    Soaked,
    read,
    report,
    run_of,
    share_name,
    workers_name,
)  # fmt: skip
from benchmarks.front_door_tokens import TICK_S, VOCABULARY, age_ms, first_step_s, stamp, text_of, write_tokenizer

RUN = Run(
    server=ROUTER, door="http", streams=64, streaming=True, requests=64, errors=0, token_us=50.0, whole_us=60.0,
    request_us=900.0, node_token_us=20.0, engine_token_us=5.0, tokens_of_event=1.0, held=[],
)  # fmt: skip


def bars(*runs: Run) -> dict[str, tuple[float, bool]]:
    return {bar.what: (bar.value, bar.value <= bar.limit) for bar in Figures(runs).bars()}


def test_ratios_are_of_medians_and_stand_beside_their_bars() -> None:
    """Rounds of 40, 50 and 90 us for the router, 10 for the bare loop, 200 for vLLM: 5.0 misses, 0.25 passes. vLLM
    writes five tokens in four events, so an event of the router's costs 0.2 of its."""
    bare = replace(RUN, server=BARE_HTTP, token_us=10.0, whole_us=10.0, node_token_us=None)
    vllm = replace(RUN, server=VLLM, token_us=200.0, whole_us=200.0, node_token_us=None, tokens_of_event=1.25)
    found = bars(replace(RUN, token_us=40.0), RUN, replace(RUN, token_us=90.0), bare, vllm)
    assert found["http, 64 streams, a token: of the bare loop's"] == (5.0, False)
    assert found["http, 64 streams, a token: of vLLM's"] == (0.25, True)
    assert found["http, 64 streams, an event: of vLLM's"] == (0.2, True)
    assert found["http, 64 streams, decode node, mock engine, a token: of the bare loop's"] == (2.0, True)
    assert found["http, 64 streams, a token, requests in it: of vLLM's"] == (0.3, True)
    assert "5.00  bar 3.5  MISS" in report([RUN, bare])


def test_workers_are_judged_by_cost_and_by_balance() -> None:
    """The parent holds no connection and does not count; a worker without any is as bad as it can be."""
    two = replace(RUN, server=workers_name(2), token_us=54.0, held=[0, 40, 24])
    found = bars(RUN, two)
    assert found["http, 64 streams, router, 2 workers, a token: of one's"] == (54 / 50, True)
    label = "http, 64 streams, router, 2 workers, connections"
    assert found[f"{label} [40, 24] (the worst round): most to fewest"] == (40 / 24, False)
    idle = bars(RUN, replace(two, held=[0, 64, 0]))
    assert not idle[f"{label} [64] (the worst round): most to fewest"][1]


def test_workers_are_compared_with_one_process_that_has_as_much_to_do_as_each_of_them() -> None:
    """Half of the streams, for two."""
    two = replace(RUN, server=workers_name(2), token_us=54.0, held=[0, 32, 32])
    half = replace(RUN, server=share_name(2), streams=32, token_us=45.0)
    found = bars(RUN, two, half)
    assert found["http, 64 streams, router, 2 workers, a token: of a router's with 32"] == (54 / 45, False)


def test_a_soak_is_judged_by_what_grows_behind_its_first_answers() -> None:
    """Memory grows while streams begin, which is no leak; then it stays, and then it grows by 3%."""
    memory = [(at_s, {"front": mib * 2**20}) for at_s, mib in ((5.0, 50), (20.0, 100), (60.0, 101), (99.0, 100))]
    steady = Soaked(
        server=ROUTER, door="http", streams=2_000, tokens_of_answer=40, requests=9, tokens=360, took_s=100.0,
        settled_s=20.0, errors={}, token_us=90.0, client_us=20.0, client_share=0.1, ages_ms=[5.0, 20.0, 21.0],
        memory=memory,
    )  # fmt: skip
    assert "100.0 at the end (+0.0%; bar 2% pass)" in report([steady])
    assert "p50 5.0 ms, p99 20.0 ms, at most 21.0 ms" in report([steady])
    leaks = replace(steady, memory=[*memory[:-1], (99.0, {"front": 103 * 2**20})], errors={"closed": 2})
    assert "(+3.0%; bar 2% MISS)" in report([leaks])
    assert "errors: {'closed': 2}" in report([leaks])


def test_what_was_measured_is_kept_as_each_case_ends(tmp_path: Path) -> None:
    """A run that is ended early leaves a file with all cases until then."""
    path = tmp_path / "run.json"
    kept = front_door.Kept(path)
    kept.add(RUN)
    assert read(path.read_text()) == [RUN]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--doors", "grpc", "--streams", "2000"], "over gRPC at most 1000 streams"),
        (["--streams", "2001", "--doors", "http"], "more than the 2000 addresses"),
        (["--workers", "1"], "--workers: 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """More streams than there are places or addresses for, and workers that are none."""
    with pytest.raises(SystemExit):
        front_door.parse_args(arguments)
    assert problem in capsys.readouterr().err


def test_streams_that_need_more_files_than_allowed_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A hard limit of 1,024 files, and 1,000 streams."""
    with (
        patch.object(resource, "getrlimit", return_value=(1_024, 1_024)),
        pytest.raises(SystemExit),
    ):
        front_door.parse_args(["--streams", "1000"])
    assert "1000 streams need 3256 open files in a process, and 1024 are allowed" in capsys.readouterr().err


def test_a_request_without_streaming_has_its_own_bar() -> None:
    """2 ms of the router's time."""
    whole = replace(RUN, streaming=False, token_us=None, request_us=2_000.0)
    assert bars(whole) == {"http, 64 at a time, a request without streaming: ms": (2.0, False)}


def test_what_a_run_used_is_told_apart() -> None:
    """Two requests of ten tokens: 20 us a token in the window, 700 us in all; the node's threads apart."""
    window = {"front": {"1": {"others": 200_000}}, "node": {"2": {"engine": 50_000, "others": 100_000}}}
    out = {
        "all": {"front": {"1": {"others": 600_000}, "3": {"others": 100_000}}}, "window": window, "window_events": 5,
        "events": 10, "tokens": 20, "requests": 2, "errors": {}, "held": [], "window_client_s": 0.0, "window_s": 1.0,
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


def test_steps_of_several_nodes_come_one_after_another() -> None:
    """Half a second each, four nodes: an eighth of a second apart, whenever they begin."""
    assert [first_step_s(10.2, 0.5, node / 4) for node in range(4)] == [10.5, 10.625, 10.25, 10.375]


@pytest.mark.slow
def test_a_tiny_run_measures_every_server(tmp_path: Path) -> None:
    """Eight streams over both doors of a real cluster, one round: no error, every figure is there."""
    path = tmp_path / "run.json"
    front_door.main(["--streams", "8", "--rounds", "1", "--no-one-layer", "--json", str(path)])
    runs = [case for case in read(path.read_text()) if isinstance(case, Run)]
    found = {(run.door, run.server, run.streaming) for run in runs}
    assert found == {
        ("http", BARE_HTTP, True), ("grpc", "bare grpc.aio server", True), ("http", ROUTER, True),
        ("grpc", ROUTER, True), ("http", ROUTER, False), ("http", BARE_WHOLE, False),
    }  # fmt: skip
    assert [run.errors for run in runs] == [0] * len(runs)
    assert all(run.token_us for run in runs if run.streaming)
    assert all(run.node_token_us and run.engine_token_us for run in runs if run.server == ROUTER and run.streaming)
