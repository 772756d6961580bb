"""The compute kernels are there where they can be: their other tests are left out without them, and would not tell."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.native import COMPILERS, load
from engine.kernel_sets import KernelSet
from engine.native import kernels
from engine.native.kernels import OWN, cpu_sets, own_kernels

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
FLAGS = {
    KernelSet.AVX2: {"avx2", "fma"},
    KernelSet.AVX512: AVX512,
    KernelSet.AVX512BF16: AVX512 | {"avx512_bf16"},
    KernelSet.AMX: {"amx_tile", "amx_bf16", "avx512_bf16"},
}


def cpu_flags() -> set[str]:
    """Of the first core; none on a machine that has no such list."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
@pytest.mark.parametrize("own", OWN)
def test_a_compiler_makes_them_and_a_cpu_that_can_runs_them(own: KernelSet) -> None:
    """Any CPU builds each library, some with nothing in it; one with its instructions computes by it."""
    library = load(Path(kernels.__file__).with_name(f"kernels_{own.value}.c"))
    assert library.handle is not None, library.status
    if own in cpu_sets():
        assert own_kernels(own) is not None


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
def test_what_the_cpu_has_is_what_the_system_says() -> None:
    """By the flags that Linux lists."""
    flags = cpu_flags()
    assert cpu_sets() - {KernelSet.NEON} == {each for each, needed in FLAGS.items() if flags >= needed}
