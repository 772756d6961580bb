"""Every Triton kernel becomes machine code, by the compiler in Triton's wheel: no GPU and no driver is needed. The
interpreter, in which the other tests run them, takes much that the compiler refuses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES_MAX = {90: 232_448, 80: 166_912}
"""Of one program, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


def kernels_in_the_sources() -> set[str]:
    found = set()
    for path in (*ROOT.glob("engine/gpu/*.py"), *ROOT.glob("kvtransfer/device/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
def test_every_kernel_compiles_as_it_is_launched(capability: int, tmp_path: Path) -> None:
    """By the functions that launch them, for bfloat16 and for float32 with odd sizes; none asks for more memory than a
    processor has. A kernel that is written later has to be here too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", str(capability)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    of_older = kernels_in_the_sources() - {"scale_rows_kernel"}  # there are no 8-bit floats before 8.9
    assert {each["kernel"] for each in compiled} == (kernels_in_the_sources() if capability >= 89 else of_older)
    # One of each shape and type, whatever the numbers of tokens and splits; 1 and 32 splits.
    variants = Counter(each["kernel"] for each in compiled)
    assert variants["decode_combine_kernel"] == 2 * 2
    once = ("rotate_store_kernel", "decode_split_kernel", "gather_kernel", "copy_kernel")
    assert [variants[name] for name in once] == [2] * 4
    assert min(each["cubin_bytes"] for each in compiled) > 0
    assert max(each["shared"] for each in compiled) <= SHARED_BYTES_MAX[capability]
