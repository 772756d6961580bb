"""Seals that come in parts: whole once, in whichever order, and refused where a part cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Epoch, GrantId
from kvtransfer.transport import Seal
from kvtransfer.transports.control_channel import Refusal, SealGather, SealSent

EPOCH = Epoch(3)


def seal(number: int, epoch: Epoch = EPOCH) -> Seal:
    return Seal(grant=GrantId(bytes(16)), epoch=epoch, writes=number, bytes_written=0)


def said(number: int, epoch: Epoch = EPOCH, ways_mask: int = 1) -> SealSent:
    return SealSent(number=number, seal=seal(number, epoch), ways_mask=ways_mask)


def test_a_seal_is_whole_with_its_second_part() -> None:
    """One way: in either order, each once; a repeat of a part, another epoch's seal and too many halves are refused."""
    parts = SealGather(epoch=EPOCH, ways=1, seals_max=2)
    waiting = [parts.waiting]
    assert parts.message_came(said(1)) is None
    waiting.append(parts.waiting)
    assert parts.number_came(1) == said(1)
    assert parts.number_came(2) is None
    waiting.append(parts.waiting)
    assert waiting == [False, True, False]
    assert parts.message_came(said(2)) == said(2)
    parts.message_came(said(3))
    with pytest.raises(Refusal, match=r"^SEAL$"):
        parts.message_came(said(3))
    with pytest.raises(Refusal, match=r"^SEAL$"):
        parts.message_came(said(4, Epoch(2)))
    parts.number_came(5)
    with pytest.raises(Refusal, match=r"^SEAL$"):
        parts.number_came(5)
    with pytest.raises(Refusal, match=r"^SEALS_MAX$"):
        parts.number_came(6)


@pytest.mark.parametrize("mask", [0, 8, 9])
def test_a_seal_names_ways_that_there_are(mask: int) -> None:
    with pytest.raises(Refusal, match=r"^SEAL$"):
        SealGather(epoch=EPOCH, ways=3, seals_max=2).message_came(said(1, ways_mask=mask))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_each_seal_is_told_once_with_the_last_of_its_parts(masks: list[int], rng: object) -> None:
    """Three ways, seals over some of them, their parts in any order; the last numbers are beyond 32 bits, of which the
    ways carry the lower half."""
    first = (1 << 32) - 2
    gather = SealGather(epoch=EPOCH, ways=3, seals_max=len(masks))
    parts: list[tuple[int, int | None]] = []
    for number, mask in enumerate(masks, start=first):
        parts += [(number, None), *((number, way) for way in range(3) if mask >> way & 1)]
    rng.shuffle(parts)  # type: ignore[attr-defined]
    last = {number: at for at, (number, _) in enumerate(parts)}
    for at, (number, way) in enumerate(parts):
        if way is None:
            reported = gather.message_came(said(number, ways_mask=masks[number - first]))
        else:
            reported = gather.number_came(number & 0xFFFF_FFFF, way)
        assert reported == (said(number, ways_mask=masks[number - first]) if last[number] == at else None)
    assert not gather.waiting
