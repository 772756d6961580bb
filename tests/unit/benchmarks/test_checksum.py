"""The script that measures checksums runs, and measures what it says (no figure is asserted)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from cachestore.layout import kv_layout


def script(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_handoff_is_played_at_each_fraction() -> None:
    layout = kv_layout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="uint8", dtype_bytes=1)
    rates, costs = script("checksum").measure(layout, 32, 1)
    assert {"copy", "zlib.crc32"} <= rates.keys()
    assert [cost.fraction for cost in costs] == [0.0, 0.01, 0.1, 1.0]
    assert costs[0].records == 0 < costs[2].records < costs[3].records == 4 * 32
