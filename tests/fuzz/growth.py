"""How the cost of an input grows with its length: processor time of this thread's process, and memory of Python."""

from __future__ import annotations

import gc
import time
import tracemalloc
from typing import Final

from tests.fuzz.target import Target

SMALL_BYTES: Final = 24_000
LARGER: Final = 4
"""The large input is as many times as long."""
GROWTH_MAX: Final = 2.0
"""How much longer than that it may take: the square would be four times."""
FLOOR_S: Final = 0.01
"""What takes less is not looked at."""
BYTE_S_MAX: Final = 50e-6
BYTE_BYTES_MAX: Final = 600
BASE_BYTES: Final = 4 << 20


def too_costly(target: Target, begin: bytes, part: bytes, end: bytes) -> str | None:
    """Why this input, repeated in its middle, costs more than its length is worth. Looked at three times, as machines
    are busy with other things too."""
    small, large = (begin + part * (size // len(part)) + end for size in (SMALL_BYTES, SMALL_BYTES * LARGER))
    why = None
    for _ in range(3):
        low_s, high_s = _takes_s(target, small), _takes_s(target, large)
        grown = max(high_s, FLOOR_S) / max(low_s, FLOOR_S / LARGER)
        if grown <= LARGER * GROWTH_MAX and high_s <= BYTE_S_MAX * len(large):
            why = None
            break
        why = f"{len(small)} bytes take {low_s:.3f} s, {len(large)} take {high_s:.3f} s"
    return why or _too_large(target, large)


def _takes_s(target: Target, data: bytes) -> float:
    gc.collect()
    began_s = time.process_time()
    target.check(data)
    return time.process_time() - began_s


def _too_large(target: Target, data: bytes) -> str | None:
    tracemalloc.start()
    try:
        target.check(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fits = peak <= BASE_BYTES + BYTE_BYTES_MAX * len(data)
    return None if fits else f"{len(data)} bytes take {peak >> 20} MiB of memory"
