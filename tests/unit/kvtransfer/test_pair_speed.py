"""How fast a pair is: bytes over the time with something outstanding, against a plain reckoning of both."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.layout import kv_layout
from kvtransfer.link import PairSpeed
from kvtransfer.status import RECENT_S, Moved, MovedSums
from kvtransfer.transport import RecordPlan, WriteOutOfBounds
from kvtransfer.writer import StepWrites

START_S = 1000.0
"""Times below are sums of sixteenths of a second, which floats hold exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """After a pause a batch is posted, or one of those outstanding completes."""

    pause_sixteenths: int
    posts: int | None
    which: int = 0
    copied: bool = True


TURNS = st.lists(
    st.builds(
        Turn,
        pause_sixteenths=st.integers(0, 64),
        posts=st.none() | st.integers(1, 1 << 30),
        which=st.integers(0, 7),
        copied=st.booleans(),
    ),
    max_size=40,
)


@given(turns=TURNS, wait_sixteenths=st.integers(0, 400))
def test_time_counts_while_something_is_outstanding_and_bytes_when_they_are_there(
    turns: list[Turn], wait_sixteenths: int
) -> None:
    """Batches are posted and complete in any order, some of them uncopied. The time is that in which one was
    outstanding, each moment once; the recent figures are those of the completions in the last ten of the clock's
    seconds and of the time that led to them, and what is still outstanding counts with its time alone."""
    speed, now_s = PairSpeed(), START_S
    outstanding: list[int] = []
    done: list[tuple[float, int, float]] = []
    moving_s = since_event_s = 0.0
    for turn in turns:
        now_s += turn.pause_sixteenths / 16
        if outstanding:
            moving_s += turn.pause_sixteenths / 16
            since_event_s += turn.pause_sixteenths / 16
        if turn.posts is not None:
            speed.posted(turn.posts, now_s)
            outstanding.append(turn.posts)
        elif outstanding:
            nbytes = outstanding.pop(turn.which % len(outstanding))
            speed.completed(nbytes, now_s, copied=turn.copied)
            done.append((now_s, nbytes if turn.copied else 0, since_event_s))
            since_event_s = 0.0
    now_s += wait_sixteenths / 16
    if outstanding:
        moving_s += wait_sixteenths / 16
        since_event_s += wait_sixteenths / 16

    assert speed.in_all(now_s) == Moved(nbytes=sum(nbytes for _, nbytes, _ in done), moving_s=moving_s)
    recent = [(nbytes, took_s) for at_s, nbytes, took_s in done if now_s // 1 - at_s // 1 < RECENT_S]
    assert speed.recent(now_s) == Moved(
        nbytes=sum(nbytes for nbytes, _ in recent), moving_s=sum(took_s for _, took_s in recent) + since_event_s
    )


def test_a_pair_that_moved_nothing_has_no_speed() -> None:
    assert PairSpeed().in_all(START_S).bytes_per_s == 0.0
    assert Moved(nbytes=0, moving_s=0.0).bytes_per_s == 0.0


def test_pauses_do_not_count() -> None:
    """Two batches of 8 GB, each of which takes two seconds, a minute apart: 4 GB/s, and so is the last alone."""
    speed = PairSpeed()
    for posted_s in (START_S, START_S + 60):
        speed.posted(8 * 10**9, posted_s)
        speed.completed(8 * 10**9, posted_s + 2, copied=True)
    assert speed.in_all(START_S + 63) == Moved(nbytes=16 * 10**9, moving_s=4.0)
    assert speed.recent(START_S + 63) == Moved(nbytes=8 * 10**9, moving_s=2.0)
    assert speed.in_all(START_S + 63).bytes_per_s == speed.recent(START_S + 63).bytes_per_s == 4e9
    assert speed.recent(START_S + 90) == Moved(nbytes=0, moving_s=0.0)


def test_a_path_that_stands_still_becomes_slow() -> None:
    """A second batch does not complete: the rate falls with every look, from what it was down to next to nothing."""
    speed = PairSpeed()
    speed.posted(10**9, START_S)
    speed.completed(10**9, START_S + 1, copied=True)
    speed.posted(10**9, START_S + 1)
    assert [speed.recent(START_S + 1 + s).bytes_per_s for s in (0, 1, 3, 30)] == [1e9, 5e8, 2.5e8, 0.0]
    assert speed.in_all(START_S + 10).bytes_per_s == 1e8


def test_another_path_is_measured_by_itself() -> None:
    """The pair goes on over another transport while a batch of the old one is outstanding: its bytes, which never
    moved, and the time that it had taken by then, are none of the new one's."""
    speed = PairSpeed()
    speed.posted(7, START_S)
    speed.posted(5, START_S)
    speed.completed(7, START_S + 1, copied=True)
    speed.restart(START_S + 2)
    assert speed.in_all(START_S + 2) == Moved(nbytes=0, moving_s=0.0)
    speed.completed(5, START_S + 2.5, copied=False)
    speed.posted(9, START_S + 3)
    speed.completed(9, START_S + 4, copied=True)
    assert speed.in_all(START_S + 9) == speed.recent(START_S + 9) == Moved(nbytes=9, moving_s=1.5)


def test_a_layer_counts_from_just_before_its_post_and_not_at_all_where_that_fails() -> None:
    """The first layer is posted, the second one is refused by the link: the pair is told of both before, since they may
    complete at once, and of the second that it was not posted."""
    layout = kv_layout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32", dtype_bytes=4)
    blocks_B = np.array([0, 1, 3], np.int64)
    nbytes = len(blocks_B) * layout.record_bytes
    story: list[tuple[str, int]] = []

    def post(_grant: bytes, ops: Any) -> None:
        refused = any(what == "posted" for what, _ in story)
        story.append(("refused" if refused else "posted", ops.total_bytes))
        if refused:
            raise WriteOutOfBounds("write 0 of 3")

    speed = SimpleNamespace(
        posted=lambda nbytes, _now_s: story.append(("posting", nbytes)),
        completed=lambda nbytes, _now_s, *, copied: story.append(("copied" if copied else "not posted", nbytes)),
    )
    link, loop = SimpleNamespace(speed=speed), SimpleNamespace(time=lambda: START_S)
    step = StepWrites(
        handoff=cast(
            Any,
            SimpleNamespace(
                peer=SimpleNamespace(link=link, layout=layout, loop=loop),
                key="key",
                grant=b"",
                sample=None,
            ),
        ),
        link=cast(Any, SimpleNamespace(post=post)),
        plan=RecordPlan(layout, blocks_B, blocks_B, src_num_blocks=4, dst_num_blocks=4),
    )
    step.layer_done(0)
    with pytest.raises(WriteOutOfBounds):
        step.layer_done(1)
    assert story == [
        ("posting", nbytes), ("posted", nbytes), ("posting", nbytes), ("refused", nbytes), ("not posted", nbytes),
    ]  # fmt: skip


@given(landings=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 1 << 40)), max_size=40))
def test_what_has_landed_is_counted_in_all_and_a_second(landings: list[tuple[int, int]]) -> None:
    """A receiver knows when a handoff has landed, and nothing of the writes before: its rate is one of the clock."""
    landed, now_s = MovedSums(), START_S
    seen: list[tuple[float, int]] = []
    for pause_sixteenths, nbytes in landings:
        now_s += pause_sixteenths / 16
        landed.add(nbytes, 0.0, now_s)
        seen.append((now_s, nbytes))
    assert landed.in_all.nbytes == sum(nbytes for _, nbytes in seen)
    first_s = now_s // 1 - (RECENT_S - 1)
    recent = sum(nbytes for at_s, nbytes in seen if at_s >= first_s)
    assert landed.per_s(now_s) == pytest.approx(recent / (now_s - first_s))
