"""The script that measures the control thread's lag tells what it has seen (no figure is asserted)."""

from __future__ import annotations

import numpy as np

from tests.unit.benchmarks.test_checksum import script


def test_lags_are_told() -> None:
    text = script("control_lag").reported("loaded", np.array([1.0, 2.0, 40.0]))
    assert text.startswith("loaded        3 looks   p50    2.00 ms")
    assert text.endswith("max   40.00 ms")
