"""What counts as a hold of a loop, and what does not."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

import pytest

from tests.support.loop_holds import HOLD_S, TICK_S, Watch, burn_s

HOLD_MS = HOLD_S * 1e3
SEEN_MS = 0.25 * HOLD_MS
"""More is a hold, less is none: a loaded machine and its host are far from it on both sides."""


async def longest_ms(work: Callable[[], object], *, in_thread: bool) -> float:
    watch = Watch()
    await asyncio.sleep(5 * TICK_S)
    watch.reset()
    if in_thread:
        await asyncio.to_thread(work)
    else:
        work()
    await asyncio.sleep(5 * TICK_S)
    found = watch.read()
    watch.close()
    return found.longest_ms


def burn() -> None:
    burn_s(HOLD_S)


def let_go() -> None:
    """Compute for HOLD_S without the interpreter's lock."""
    data, end_s = bytes(1 << 20), time.thread_time() + HOLD_S
    while time.thread_time() < end_s:
        hashlib.sha256(data)


@pytest.mark.parametrize("in_thread", [False, True], ids=["the loop's thread", "another thread"])
def test_computing_with_the_lock_is_a_hold(in_thread: bool) -> None:
    """Whichever thread does it, the loop cannot turn."""
    found_ms = asyncio.run(longest_ms(burn, in_thread=in_thread))
    assert found_ms > SEEN_MS


def test_computing_without_the_lock_is_none() -> None:
    """Another thread computes as long and lets go of the lock: the loop turns on."""
    assert asyncio.run(longest_ms(let_go, in_thread=True)) < SEEN_MS


def test_waiting_is_none() -> None:
    """No processor time is used: another process may have had the core."""
    assert asyncio.run(longest_ms(lambda: time.sleep(HOLD_S), in_thread=False)) < SEEN_MS
