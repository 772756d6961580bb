"""Import this before `engine.gpu`: the kernels then run in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, *arguments: Any) -> None:
    """Triton 3.6 keeps a scalar as an array of one element, which NumPy 2.4 no longer turns into an index (a bound of
    a loop). Newer ones do this themselves."""
    _patch_tensor(tensor, *arguments)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index
