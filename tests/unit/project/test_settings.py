"""How many settings there are, the page that lists them, and what becomes of those of earlier versions."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from baton.config import ConfigError, env_name, flag_name
from cli.former_settings import FIXED, FORMER, RENAMED
from cli.services import Service, load_config

ROOT: Final = Path(__file__).parents[3]
SETTINGS: Final = 112
"""Key paths over router, prefill, decode, mixed and directory. Raise it with a reason in the same commit: a setting
needs a user who would turn it, and a sentence that says when. At most 112.

The last two: `engine.memory_share`, for whoever shares a machine with other programs, or wants more of it for KV
without counting blocks; `engine.kernels`, for whoever has unlike CPUs in one pool and needs the same tokens after a
resumption."""


def generator() -> ModuleType:
    path = ROOT / "docs" / "generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_how_many_settings_there_are() -> None:
    """As stated, and each says what it is and when to change it."""
    found = generator().settings()
    assert len(found) == SETTINGS
    assert SETTINGS <= 112
    assert [name for name, keys in found.items() for key in keys.values() if not (key.help and key.when)] == []


def test_the_page_of_all_settings_is_current() -> None:
    """Write it anew with: python docs/generate_configuration.py"""
    made = generator()
    assert made.PAGE.read_text(encoding="utf-8") == made.page()


def test_no_setting_has_the_name_of_a_former_one() -> None:
    """Or the message about the former one would never be seen. A new name is a setting's."""
    settings = set(generator().settings())
    assert settings & set(FORMER) == set()
    assert set(RENAMED.values()) <= settings
    assert set(RENAMED) & set(FIXED) == set()


def constants() -> dict[str, list[float]]:
    """The numbers that names are assigned to, or default to, anywhere in the product."""
    found: dict[str, list[float]] = defaultdict(list)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split():
        if name.startswith(("tests/", "benchmarks/", "proto/")):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _note(found, node.target.id, node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                _note(found, node.targets[0].id, node.value)
                _note_keywords(found, node.targets[0].id, node.value)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _note_keywords(found, node.target.id, node.value)
    return found


def _note(found: dict[str, list[float]], name: str, value: ast.expr | None) -> None:
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "fixed":
        value = value.args[0]
    number = _number(value)
    if number is not None:
        found[name].append(number)


def _note_keywords(found: dict[str, list[float]], name: str, value: ast.expr | None) -> None:
    """`LIMITS = PortLimits(handshake_ms_max=2000)` is one of `handshake_ms_max`, and of "... of LIMITS"."""
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        number = _number(keyword.value)
        if keyword.arg is not None and number is not None:
            found[keyword.arg].append(number)
            found[f"{keyword.arg} of {name}"].append(number)


def _number(value: ast.expr | None) -> float | None:
    match value:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=ast.Constant(value=int() as a), op=ast.LShift(), right=ast.Constant(value=int() as b)):
            return a << b
        case _:
            return None


def test_a_former_setting_is_fixed_at_the_value_that_the_message_names() -> None:
    """The constant is there, by its name and with its value."""
    known = constants()
    wrong = {key: constant for key, (constant, value) in FIXED.items() if value not in known.get(constant, [])}
    assert wrong == {}


SERVICES: Final = {
    "tcp.seals_waiting_max": Service.PREFILL,
    "shm_writer.copy_threads": Service.MIXED,
    "rdma_receiver.rdma.hop_limit": Service.MIXED,
    "tcp.stream.frame_bytes_max": Service.DECODE,
    "rdma.rdma.device": Service.DECODE,
    "retries.resolves_max": Service.ROUTER,
    "service.watchers_max": Service.DIRECTORY,
    "resumed_queue_max": Service.PREFILL,
    "engine.gpu.steps_ahead": Service.DECODE,
}


@pytest.mark.parametrize(("key", "service"), SERVICES.items())
def test_a_former_setting_is_refused_with_what_has_become_of_it(key: str, service: Service, tmp_path: Path) -> None:
    """From a file, from the environment, and as a flag of the command."""
    file = tmp_path / "baton.toml"
    file.write_text(f"[{service.value}]\n{key} = 1\n")
    variable = env_name(service.env_prefix, key)
    given: dict[str, Any] = {"name": "n", "engine.kind": "mock"} if service.has_engine else {}
    with pytest.raises(ConfigError) as caught:
        load_config(service, toml_path=file, env={variable: "1"}, flags=given)
    reported = {(problem.source, problem.problem) for problem in caught.value.problems}
    assert reported == {(f"{file}:{service.value}.{key}", FORMER[key]), (variable, FORMER[key])}
    command = [sys.executable, "-m", "cli.main", service.value, flag_name(key), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{flag_name(key)} {FORMER[key]}" in " ".join(done.stderr.split())


def test_what_is_said_of_a_former_setting() -> None:
    """The value and the constant, or the new name."""
    assert FORMER["tcp.seals_waiting_max"] == (
        "is no longer a setting: it is fixed at 4096 (constant seals_waiting_max). Remove it."
    )
    assert FORMER["rdma_writer.rdma.device"] == "is now called rdma.device."
