"""Of the peer's processes, where benchmarks/engine.py holds both sides to fewer instructions than this CPU has.

The peer asks PyTorch which there are, and PyTorch answers for the CPU, whatever ATEN_CPU_CAPABILITY says.
"""

from __future__ import annotations

import os

import torch.cpu

for name in os.environ["BENCHMARK_LACKS"].split():
    assert hasattr(torch.cpu, name), name
    setattr(torch.cpu, name, lambda: False)
