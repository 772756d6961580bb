"""The generated code in proto/batonpb is what proto/*.proto says, made with the oldest generator we support."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

PROTO = Path(__file__).parents[3] / "proto"
GENERATE_S_MAX = 120


def generated_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in (folder / "batonpb").iterdir()
        if path.is_file() and path.name != "py.typed"
    }


def test_the_committed_code_is_up_to_date(tmp_path: Path) -> None:
    """Generating again into an empty folder gives the same files, byte for byte."""
    subprocess.run(
        ["sh", str(PROTO / "generate.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        timeout=GENERATE_S_MAX,
        check=True,
    )
    fresh, committed = generated_files(tmp_path), generated_files(PROTO)
    assert sorted(fresh) == sorted(committed)
    stale = [name for name in sorted(fresh) if fresh[name] != committed[name]]
    assert stale == [], "run `make proto`"


def test_the_generator_is_the_pinned_one() -> None:
    """pyproject pins grpcio-tools exactly, that version is installed, and grpcio's floor is not above it."""
    project = tomllib.loads((PROTO.parent / "pyproject.toml").read_text())["project"]
    pinned = [line for line in project["optional-dependencies"]["dev"] if line.startswith("grpcio-tools")]
    assert pinned == [f"grpcio-tools=={version('grpcio-tools')}"]
    floors = [match[1] for line in project["dependencies"] if (match := re.fullmatch(r"grpcio>=([\d.]+)", line))]
    assert len(floors) == 1
    assert version("grpcio-tools").startswith(floors[0])
