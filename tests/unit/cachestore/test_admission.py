"""What is admitted to disk: the second use by default, with bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.admission import CREDIT_MAX, ONCE_PER_REUSE, Admission

REMEMBERED = 8


def test_the_second_use_admits() -> None:
    """A block that one prompt had is not written where another one would have to go; once another prompt has it, it
    is."""
    admission = Admission()
    admission.use([b"a"])
    admission.use([b"b"])
    assert not admission.admits(b"a", room=False)
    admission.use([b"a"])
    assert admission.admits(b"a", room=False) and not admission.admits(b"b", room=False)


def test_while_there_is_room_one_use_is_enough() -> None:
    """What was never used is not written."""
    admission = Admission()
    admission.use([b"a"])
    assert admission.admits(b"a", room=True) and not admission.admits(b"b", room=True)


def test_a_block_used_again_pays_for_others_once() -> None:
    """Blocks that are used once pay for nothing; the second use pays, later ones do not. There is an end to it."""
    admission = Admission()
    admission.use([b"a"])
    admission.use([b"b"])
    assert admission.credit == 0
    admission.use([b"a"])
    admission.use([b"a"])
    assert admission.credit == ONCE_PER_REUSE
    for number in range(CREDIT_MAX):
        admission.use([b"%d" % number])
        admission.use([b"%d" % number])
    assert admission.credit == CREDIT_MAX


def test_what_was_brought_needs_one_use_more() -> None:
    """The prompt that it was brought for does not count, nor does being brought again."""
    admission = Admission()
    admission.brought([b"a"])
    admission.use([b"a"])
    admission.brought([b"a"])
    assert not admission.admits(b"a", room=True)
    admission.use([b"a"])
    assert admission.admits(b"a", room=True) and not admission.admits(b"a", room=False)
    admission.use([b"a"])
    assert admission.admits(b"a", room=False)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 3))
def test_memory_is_bounded_and_what_is_recent_is_known(uses: list[int], uses_min: int) -> None:
    """Of the last four different blocks (half of what may be remembered) uses are counted exactly while each stays
    among them; no block is admitted that was not used often enough."""
    admission = Admission(uses_min=uses_min, remembered_max=REMEMBERED)
    recent: OrderedDict[int, int] = OrderedDict()
    total = dict.fromkeys(range(31), 0)
    for each in uses:
        admission.use([bytes([each])])
        total[each] += 1
        recent[each] = recent.pop(each, 0) + 1
        if len(recent) > REMEMBERED // 2:
            recent.popitem(last=False)
        assert len(admission) <= REMEMBERED
        for known, count in recent.items():
            assert admission.admits(bytes([known]), room=False) or count < uses_min
        assert not any(admission.admits(bytes([n]), room=False) for n, count in total.items() if count < uses_min)
