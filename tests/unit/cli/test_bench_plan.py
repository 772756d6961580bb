"""What `baton bench` plans to send: lengths, arrival times, prompts, traces."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench_plan import (
    LENGTH_MAX,
    Arrivals,
    Lengths,
    Planned,
    TraceError,
    arrival_times,
    at_times,
    check_trace,
    drawn_requests,
    parse_lengths,
    prompt_ids,
    trace_requests,
)

numbers = st.integers(1, LENGTH_MAX)
distributions: st.SearchStrategy[Lengths] = st.one_of(
    st.tuples(numbers).map(lambda of: Lengths("fixed", of)),
    st.tuples(numbers, numbers).map(lambda pair: Lengths("uniform", (min(pair), max(pair)))),
    st.tuples(st.floats(1, LENGTH_MAX), st.floats(0, 10)).map(lambda of: Lengths("lognormal", of)),
    st.tuples(st.floats(1, LENGTH_MAX)).map(lambda of: Lengths("exponential", of)),
)


@given(distributions, st.integers())
def test_lengths_are_usable_and_repeatable(lengths: Lengths, seed: int) -> None:
    """Whatever is drawn is from 1 to LENGTH_MAX, and the same seed draws the same."""
    drawn = [lengths.draw(rng) for rng in [random.Random(seed)] for _ in range(20)]
    assert all(isinstance(length, int) and 1 <= length <= LENGTH_MAX for length in drawn)
    assert drawn == [lengths.draw(rng) for rng in [random.Random(seed)] for _ in range(20)]
    if lengths.kind == "uniform":
        assert all(lengths.numbers[0] <= length <= lengths.numbers[1] for length in drawn)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Lengths("fixed", (512,))),
        ("uniform:64:64", Lengths("uniform", (64, 64))),
        ("lognormal:512:0.6", Lengths("lognormal", (512.0, 0.6))),
        ("exponential:100", Lengths("exponential", (100.0,))),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no distribution of lengths: '' is no number"),
        ("0", "'0' is no distribution of lengths: 0 is not from 1 to 1048576"),
        ("-3", "-3 is not from 1 to"),
        ("1e3", "'1e3' is no number"),
        ("99999999999", "is not from 1 to"),
        ("uniform:9:3", "'uniform:9:3' is no distribution of lengths: 9 is above 3"),
        ("uniform:9", "write it as N, uniform:LOW:HIGH"),
        ("lognormal:0:1", "0 is not from 1 to"),
        ("lognormal:10:nan", "nan is not from 0 to 10"),
        ("lognormal:10:x", "'x' is no number"),
        ("exponential:inf", "inf is not from 1 to"),
        ("normal:5:5", "write it as"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="no distribution") as caught:
        parse_lengths(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_middle_of_a_distribution() -> None:
    """Of 4,000 lengths half are under a lognormal's median, and the mean of an exponential's is its own; both to 5%."""
    rng = random.Random(1)
    lognormal = sorted(Lengths("lognormal", (500, 0.7)).draw(rng) for _ in range(4000))
    assert 475 <= lognormal[2000] <= 525
    assert 475 <= sum(Lengths("exponential", (500,)).draw(rng) for _ in range(4000)) / 4000 <= 525


@given(st.sampled_from(Arrivals), st.floats(1e-3, 1e6), st.integers())
def test_arrivals_ascend_and_repeat(arrivals: Arrivals, rate: float, seed: int) -> None:
    """Times never go back, and the same seed gives the same ones, whatever happens meanwhile."""
    times = list(islice(arrival_times(arrivals, rate, random.Random(seed)), 50))
    assert all(later >= earlier >= 0 for earlier, later in pairwise(times))
    assert times == list(islice(arrival_times(arrivals, rate, random.Random(seed)), 50))


def test_poisson_arrivals() -> None:
    """At 10 a second 10,000 take 1,000 s to 3%, and gaps spread as much as their mean, as an exponential's do."""
    times = list(islice(arrival_times(Arrivals.POISSON, 10, random.Random(2)), 10_000))
    assert 970 <= times[-1] <= 1030
    gaps = [later - earlier for earlier, later in pairwise(times)]
    spread = (sum((gap - 0.1) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.095 <= spread <= 0.105


def test_even_arrivals_do_not_drift() -> None:
    assert next(islice(arrival_times(Arrivals.EVEN, 3, random.Random(0)), 2_999_999, None)) == 1_000_000


def ids_of(planned: Planned, seed: int = 7) -> list[int]:
    return prompt_ids(planned, ids_from=2, ids_to=100, seed=seed)


@given(distributions, st.integers(0, 300), st.integers(0, 1 << 63), st.integers(1, 400))
def test_drawn_prompts(prompt: Lengths, shared: int, seed: int, cap: int) -> None:
    """As long as planned and no longer than the cap; the shared beginning is the same in all, the last token never
    belongs to it, and another seed's prompts are others."""
    drawn = drawn_requests(
        prompt=prompt,
        output=Lengths("fixed", (10,)),
        shared_prefix_tokens=shared,
        prompt_tokens_max=cap,
        output_tokens_max=9,
        seed=seed,
    )
    plan = list(islice(drawn, 4))
    assert [planned.index for planned in plan] == [0, 1, 2, 3]
    prompts = [ids_of(planned) for planned in plan]
    for planned, ids in zip(plan, prompts, strict=True):
        assert len(ids) == planned.prompt_tokens <= cap
        assert planned.output_tokens == 9
        assert all(2 <= token < 100 for token in ids)
        common = min(shared, len(ids) - 1, len(prompts[0]) - 1)
        assert ids[:common] == prompts[0][:common]
        assert ids == ids_of(planned)
        if len(ids) >= 20:
            assert ids != ids_of(planned, seed=8)
    if min(map(len, prompts)) >= shared + 20:
        assert len({tuple(ids[shared:]) for ids in prompts}) == 4


def test_other_times() -> None:
    plan = drawn_requests(prompt=parse_lengths("4"), output=parse_lengths("1"), seed=0)
    timed = list(at_times(plan, [0.5, 1.5]))
    assert [planned.due_s for planned in timed] == [0.5, 1.5]
    assert [planned.due_s for planned in at_times(timed, repeat(None))] == [None, None]


def line(timestamp: Any = 0, input_length: Any = 10, output_length: Any = 5, hash_ids: Any = ()) -> str:
    fields = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps(fields if hash_ids is None else {**fields, "hash_ids": list(hash_ids)})


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace(tmp_path: Path) -> None:
    """Times from the first request on and by the speed, lengths by the scale; equal hash ids are equal tokens, and what
    no id covers is each prompt's own."""
    path = trace(
        tmp_path,
        line(1000, 1100, 50, [3, 4, 5]),
        line(1000, 1024, 1, [3, 4]),
        "",
        line(4000, 1100, 900, [3, 4, 6]),
        line(5000, 600, 7, None),
        line(5000, 600, 7, None),
    )
    assert check_trace(path) == 5
    plan = list(trace_requests(path, speed=2.0, length_scale=0.25, output_tokens_max=100))
    assert [planned.due_s for planned in plan] == [0.0, 0.0, 1.5, 2.0, 2.0]
    assert [planned.prompt_tokens for planned in plan] == [275, 256, 275, 150, 150]
    assert [planned.output_tokens for planned in plan] == [12, 1, 100, 2, 2]
    first, second, third, fourth, fifth = map(ids_of, plan)
    assert first[:256] == second == third[:256]
    assert first[128:256] != first[:128]
    assert first[256:] != third[256:]
    assert fourth != fifth
    cut = next(trace_requests(path, speed=2.0, length_scale=0.25, prompt_tokens_max=200))
    assert ids_of(cut) == first[:200]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("[1]", ":2: input should be an object"),
        ("{", ":2: invalid json"),
        (line(timestamp=None), ":2: timestamp input should be a valid number"),
        (line(timestamp=True), ":2: timestamp input should be a valid number"),
        (line(timestamp=-1), ":2: timestamp input should be greater than or equal to 0"),
        (line(timestamp=4), ":2: timestamp 4 is before the line above's"),
        (line(6, input_length=0), ":2: input_length input should be greater than or equal to 1"),
        (line(6, output_length=1.5), ":2: output_length input should be a valid integer"),
        (line(6, hash_ids=[-1]), ":2: hash_ids input should be greater than or equal to 0"),
        (line(6, hash_ids=["a"]), ":2: hash_ids input should be a valid integer"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, bad: str, problem: str) -> None:
    """File, line and what is wrong, before anything is sent."""
    path = trace(tmp_path, line(5), bad)
    with pytest.raises(TraceError) as caught:
        check_trace(path)
    assert str(caught.value).startswith(f"{path}{problem}")


def test_a_file_that_is_no_trace_at_all(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, problem in (
        (empty, "has no request in it"),
        (binary, "is no text in UTF-8"),
        (tmp_path / "missing", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(TraceError, match=problem):
            check_trace(path)
