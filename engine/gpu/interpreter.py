"""Triton's interpreter in the place of a GPU: the kernels run on the CPU, slowly, for tests."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

_alone = threading.RLock()
"""The interpreter puts its own operations in the place of Triton's while a kernel runs: one at a time in a process."""
_changed: list[str] = []


def use_interpreter() -> None:
    """From now on kernels that are defined run in the interpreter. Called before `engine.gpu.kernels` and
    `kvtransfer.device.cuda_streams` are imported. Idempotent; any thread.

    Raises ImportError: there is no Triton.
    """
    with _alone:
        if _changed:
            return
        # Triton's own functions are what they were made to be when it was imported.
        early = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
        assert not early, "Triton was imported before its interpreter was asked for"
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.runtime import interpreter

        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
        interpreter.GridExecutor.__call__ = _one_at_a_time(interpreter.GridExecutor.__call__)
        _changed.append("triton")


def _with_index(patch_tensor: Any) -> Any:
    """Triton 3.6 keeps a scalar as an array of one element, which NumPy 2.4 no longer turns into an index (a bound of
    a loop). Newer ones do this themselves."""

    def patched(tensor: Any, *arguments: Any) -> None:
        patch_tensor(tensor, *arguments)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return patched


def _one_at_a_time(launch: Any) -> Any:
    def launched(*arguments: Any, **named: Any) -> Any:
        with _alone:
            return launch(*arguments, **named)

    return launched
