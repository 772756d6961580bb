"""The situations of tests/support/kernel_cases.py, with Triton's interpreter: import this before `engine.gpu`."""

from __future__ import annotations

import tests.support.triton_interpreter  # noqa: F401

# isort: split
from tests.support.kernel_cases import (
    SHAPES,
    Shape,
    assert_close,
    fill,
    poisoned_pool,
    random_batch,
    random_queries,
    store,
)

__all__ = ["SHAPES", "Shape", "assert_close", "fill", "poisoned_pool", "random_batch", "random_queries", "store"]
