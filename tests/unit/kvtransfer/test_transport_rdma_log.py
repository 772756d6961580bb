"""What rdma says of queue pairs that the device does not destroy: once, then how often, then that it is over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.rdma_double import DoubleQueuePairs
from tests.support.rdma_harness import EPOCH, PAIR, Raw, double, linked, receiving
from tests.support.shm_harness import REGION_NBYTES, run
from tests.support.shm_peer import source_bytes

__all__ = ["double"]

pytestmark = pytest.mark.usefixtures("double")
TRIES = 20


def reported(caplog: pytest.LogCaptureFixture, what: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Level, message and fields of the lines about it, but for what depends on the time that it took."""
    lines = [(r.levelname, r.getMessage(), dict(r.baton_fields)) for r in caplog.records if what in r.getMessage()]  # type: ignore[attr-defined]
    for *_, fields in lines:
        for name in ("over_s", "lasted_s"):
            fields.pop(name, None)
    return lines


def test_a_fence_without_evidence_is_not_told_at_each_try(caplog: pytest.LogCaptureFixture) -> None:
    """The device refuses at the receiver again and again: each try is counted, one line says how many there were."""

    async def test() -> None:
        async with receiving() as r:
            raw = Raw(r)
            await raw.welcome()
            DoubleQueuePairs.fails_to_destroy = TRIES
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.port.describe()["destroy_failed"] == TRIES
            await raw.close()

    with caplog.at_level(logging.INFO, "baton.rdma"):
        run(test())
    what, writer = "a fence has no evidence yet", f"{PAIR.writer:x}"
    first, last = reported(caplog, what)
    assert (first[:2], first[2]["peer"]) == (("ERROR", what), writer)
    because = "its queue pairs are destroyed, the device is flushed"
    assert last == ("INFO", f"{what}: no more", {"peer": writer, "times": TRIES - 1, "because": because})


def test_a_link_that_keeps_its_source_does_not_say_so_at_each_try(caplog: pytest.LogCaptureFixture) -> None:
    """The same at the writer, after the receiver's fence."""

    async def test() -> None:
        async with receiving() as r, linked(r, source_bytes(1, REGION_NBYTES)) as (_, events):
            r.port.fence(PAIR, EPOCH)
            DoubleQueuePairs.fails_to_destroy = TRIES
            await events.until(lambda e: bool(e.lost))
            assert DoubleQueuePairs.fails_to_destroy == 0

    with caplog.at_level(logging.INFO, "baton.rdma"):
        run(test())
    what = "RDMA link keeps its source blocks"
    first, last = reported(caplog, what)
    assert (first[:2], last[:2]) == (("ERROR", what), ("INFO", f"{what}: no more"))
    assert (last[2]["times"], last[2]["because"]) == (TRIES - 1, "its queue pairs are destroyed")
