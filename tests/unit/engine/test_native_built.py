"""The compute kernels are there where they can be: their other tests are left out without them, and would not tell."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.native import COMPILERS, load
from engine.native import kernels
from engine.native.kernels import native_kernels

FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}


def cpu_flags() -> set[str]:
    """Of the first core; none on a machine that has no such list."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
def test_a_compiler_makes_them_and_a_cpu_that_can_runs_them() -> None:
    """Any CPU builds the library, some with nothing in it; one with AVX512-BF16 computes by it."""
    library = load(Path(kernels.__file__).with_name("kernels.c"))
    assert library.handle is not None, library.status
    assert (native_kernels() is not None) == (cpu_flags() >= FLAGS), library.status
