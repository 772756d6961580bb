"""The pure parts of the transfer benchmark: what is moved, how it is checked, what is said of the samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer_report import figures, report
from benchmarks.transfer_side import Plan, has_landed, plan_of


@given(st.integers(0, 50), st.sampled_from([1 << 12, 1 << 14, 1 << 16]))
def test_a_plan_uses_no_place_twice_and_its_check_finds_a_wrong_byte(seed: int, size: int) -> None:
    """Source and destination blocks are distinct and inside; one changed byte of a block that is looked at is seen."""
    region_bytes = 1 << 20
    plan = plan_of(size, seed, moved_bytes=size * 8, region_bytes=region_bytes)
    for at in (plan.src, plan.dst):
        assert len(set(at.tolist())) == 8
        assert at.min() >= 0
        assert at.max() + size <= region_bytes
        assert not (at % size).any()
    words = np.arange(region_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    source_U8, region_U8 = words.view(np.uint8), np.zeros(region_bytes, np.uint8)
    for s, d in zip(plan.src, plan.dst, strict=True):
        region_U8[d : d + size] = source_U8[s : s + size]
    assert has_landed(region_U8, Plan(size, plan.src, plan.dst))
    region_U8[plan.dst[3] + 5] ^= 1
    assert not has_landed(region_U8, plan)


def test_the_report_takes_the_median_of_rounds_and_says_what_is_missed() -> None:
    """Two rounds of three runs each, ours 4 and 6, a peer's 2: 5.00, and 2.5 times the peer, where 3 is wanted."""

    def runs(method: str, at: int, *speeds: float) -> list[dict[str, object]]:
        same = {"transport": "shm", "method": method, "size": 1 << 14, "round": at}
        return [{**same, "gb_s": s, "sender_cpu_s_gb": 0.1, "receiver_cpu_s_gb": 0.0} for s in speeds]

    samples = [*runs("baton", 1, 9, 4, 1), *runs("baton", 2, 6, 6, 6), *runs("nixl", 1, 2, 2, 2)]
    assert figures(samples, "gb_s") == {("shm", "baton", 1 << 14): [4, 6], ("shm", "nixl", 1 << 14): [2]}
    text = report(samples)
    assert "| baton | 5.00 (4.0-6.0) |" in text
    assert "shm: baton / nixl or nixl-spin (wanted 3): 16 KiB 2.500 MISSED" in text


def test_one_record_is_compared_with_the_bare_loop_of_the_same_round() -> None:
    """The loop is fast in one round and slow in another; ours is 30 over it in both, though the medians are apart."""

    def times(method: str, at: int, *us: float) -> dict[str, object]:
        return {"transport": "ping", "method": method, "size": 1 << 14, "round": at, "us": sorted(us)}

    rounds = [(1, 10.0), (2, 60.0), (3, 12.0)]
    samples = [times("doorbell", at, us, us, us) for at, us in rounds]
    samples += [times("baton shm", at, us + 30, us + 30, us + 30) for at, us in rounds]
    assert "baton shm over doorbell, round by round: 30.0 (30.0 to 30.0) (wanted 50)" in report(samples)
