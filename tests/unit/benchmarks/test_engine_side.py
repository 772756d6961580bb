"""The processes that benchmarks/engine.py measures: asked line by line, and gone afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.engine_side import Side, SideFailed

ANSWERS = """
import os, sys
print("a greeting\\n{}", flush=True)
for number, _ in enumerate(sys.stdin):
    print('{"round": %d, "process": %d}' % (number, os.getpid()), flush=True)
"""
FAILS = "import sys; print('{}', flush=True); sys.stdin.readline(); sys.exit('no memory')"


def side(program: str, folder: Path) -> Side:
    return Side([sys.executable, "-c", program], {}, folder)


def test_rounds_are_answered_by_one_process_that_is_gone_afterwards(tmp_path: Path) -> None:
    """Two rounds, with the process stopped before each: the same one answers both, and does not outlive the block."""
    with side(ANSWERS, tmp_path) as asked:
        found = [asked.round(), asked.round()]
    process = int(found[0]["process"])
    assert found == [{"round": 0, "process": process}, {"round": 1, "process": process}]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_side_that_ends_says_why(tmp_path: Path) -> None:
    """A process that gives up in a round: the error carries what it wrote to stderr."""
    with side(FAILS, tmp_path) as asked, pytest.raises(SideFailed, match=r"ended:\nno memory"):
        asked.round()


def test_a_side_that_never_starts_is_an_error(tmp_path: Path) -> None:
    """A process that ends before it is ready: the error comes from the constructor."""
    with pytest.raises(SideFailed, match="ended"):
        side("import sys; sys.exit('no model')", tmp_path)
