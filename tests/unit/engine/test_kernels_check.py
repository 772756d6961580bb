"""The compute kernels by a program in C, without Python: each set that this CPU has, and NEON in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from baton.native import COMPILERS
from engine.kernel_sets import KernelSet
from engine.native import kernels
from engine.native.kernels import OWN, cpu_sets

CHECK = Path(__file__).parents[2] / "support" / "kernels_check.c"
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
COMPILE_S_MAX, RUN_S_MAX = 300, 300


def checked(kernel_set: KernelSet, program: Path, compiler: str, *flags: str, run: tuple[str, ...] = ()) -> str:
    """The last line of the program's output."""
    source = f'-DKERNELS="kernels_{kernel_set.value}.c"'
    folder = Path(kernels.__file__).parent
    command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", *flags, source, f"-I{folder}"]
    subprocess.run([*command, str(CHECK), "-o", str(program), "-lm"], check=True, timeout=COMPILE_S_MAX)
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert not wrong and done.returncode == 0, (wrong, done.stderr)
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel_set", OWN)
def test_a_set_of_this_cpu(kernel_set: KernelSet, tmp_path: Path) -> None:
    """Products of 16, 8 and 4 bits, attention of few and of many rows, norm and highest score: near float64, and each
    row of a product as by itself."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if kernel_set not in cpu_sets() or compiler is None:
        pytest.skip(f"no compiler, or a CPU without {kernel_set.value}")
    assert checked(kernel_set, tmp_path / "check", compiler) == "0 wrong"


@pytest.mark.slow
@pytest.mark.parametrize("kernel_set", [KernelSet.NEON, KernelSet.NEONBF16])
def test_neon_in_an_emulator(kernel_set: KernelSet, tmp_path: Path) -> None:
    """The same on an emulated aarch64, which a cross-compiler builds for."""
    if shutil.which(CROSS) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {CROSS} and {EMULATOR} (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)")
    program = tmp_path / "check"
    assert checked(kernel_set, program, CROSS, "-static", run=(EMULATOR, "-cpu", "max")) == "0 wrong"
