"""Seals that come in parts: whole once, in whichever order, and refused where a part cannot be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Epoch, GrantId
from kvtransfer.transport import Seal
from kvtransfer.transports.rdma_wire import RefusalReason as RdmaReason
from kvtransfer.transports.seal_gather import SealFault, SealGather, SealRefused, WholeSeal
from kvtransfer.transports.ucx_wire import RefusalReason as UcxReason

EPOCH = Epoch(3)


def seal(number: int, epoch: Epoch = EPOCH) -> Seal:
    return Seal(grant=GrantId(bytes(16)), epoch=epoch, writes=number, bytes_written=0)


def whole(number: int) -> WholeSeal:
    return WholeSeal(number=number, seal=seal(number))


def test_a_seal_is_whole_with_its_second_part() -> None:
    """One way: in either order, each once; a repeat of a part, another epoch's seal and too many halves are refused."""
    parts = SealGather(epoch=EPOCH, ways=1, seals_max=2)
    waiting = [parts.waiting]
    assert parts.told(1, seal(1)) is None
    waiting.append(parts.waiting)
    assert parts.arrived(1) == whole(1)
    assert parts.arrived(2) is None
    waiting.append(parts.waiting)
    assert waiting == [False, True, False]
    assert parts.told(2, seal(2)) == whole(2)
    parts.told(3, seal(3))
    with pytest.raises(SealRefused, match=r"^SEAL$"):
        parts.told(3, seal(3))
    with pytest.raises(SealRefused, match=r"^SEAL$"):
        parts.told(4, seal(4, Epoch(2)))
    parts.arrived(5)
    with pytest.raises(SealRefused, match=r"^SEAL$"):
        parts.arrived(5)
    with pytest.raises(SealRefused, match=r"^SEALS_MAX$"):
        parts.arrived(6)


@pytest.mark.parametrize("mask", [0, 8, 9])
def test_a_seal_names_ways_that_there_are(mask: int) -> None:
    with pytest.raises(SealRefused, match=r"^SEAL$"):
        SealGather(epoch=EPOCH, ways=3, seals_max=2).told(1, seal(1), mask)


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
            told = gather.told(number, seal(number), masks[number - first])
        else:
            told = gather.arrived(number & 0xFFFF_FFFF, way)
        assert told == (whole(number) if last[number] == at else None)
    assert not gather.waiting


def test_each_wire_has_a_reason_for_each_fault() -> None:
    for wire, fault in itertools.product((RdmaReason, UcxReason), SealFault):
        assert wire[fault.name].name == fault.name
