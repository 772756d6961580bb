"""The situations of tests/kernel_cases.py, with Triton's interpreter: import this before `engine.gpu`."""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split
from tests.kernel_cases import SHAPES, Shape, assert_close, fill, poisoned_pool, random_batch, random_queries

__all__ = ["SHAPES", "Shape", "assert_close", "fill", "poisoned_pool", "random_batch", "random_queries"]
