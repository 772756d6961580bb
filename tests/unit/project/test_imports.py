"""The direction of imports, and what a router process loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.without_packages import CARRIED

ROOT = Path(__file__).parents[3]
RUN_S_MAX = 120


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )


def test_imports_keep_their_direction() -> None:
    """Every contract of pyproject.toml holds: the layers, the router without torch, no training, the pure modules."""
    result = run("-c", "from importlinter.cli import lint_imports_command as main; main(['--no-logo', '--no-cache'])")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Contracts: 5 kept, 0 broken." in result.stdout


def test_a_router_process_loads_no_torch() -> None:
    """A fresh interpreter that imports all of a router has neither torch nor what reads weights."""
    loaded = run(
        "-c", "import router.main, sys; print(sorted({'torch', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    assert (loaded.returncode, loaded.stdout) == (0, "[]\n"), loaded.stderr


def test_a_router_without_http_loads_no_http() -> None:
    """What serves HTTP, renders templates and counts metrics is imported only where HTTP is served."""
    http = "{'starlette', 'httptools', 'jinja2', 'prometheus_client'}"
    loaded = run("-c", f"import router.main, sys; print(sorted({http} & set(sys.modules)))")
    assert (loaded.returncode, loaded.stdout) == (0, "[]\n"), loaded.stderr


def test_the_command_loads_nothing_heavy_until_it_is_needed() -> None:
    """`baton --help` answers without gRPC, torch, NumPy or pydantic."""
    heavy = "{'torch', 'grpc', 'numpy', 'pydantic'}"
    loaded = run("-c", f"import cli.main, sys; cli.main.run(['--help']); print(sorted({heavy} & set(sys.modules)))")
    assert (loaded.returncode, loaded.stdout.splitlines()[-1]) == (0, "[]"), loaded.stderr


def test_a_pair_runs_without_the_packages_that_it_can_do_without() -> None:
    """Engine, kvtransfer, both halves and the GPU's benchmark load, and a server serves, where redis, the health and
    reflection services, starlette and pydantic-settings are not installed, and of others no more than a machine with a
    GPU has. The package itself is not installed either: it runs from its tree. What has to be carried there is named
    in the documentation."""
    reported = (ROOT / "docs/gpu.md").read_text()
    assert [name for name in CARRIED.values() if name not in reported] == []
    result = run("-m", "tests.support.without_packages")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "unknown\nserving\n[]\n"
    assert "install grpcio-health-checking" in result.stderr
