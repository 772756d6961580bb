"""What is left of a request in the processes that have had it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.garbage_scenes import ENDS

PLAY_S_MAX = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("ends", list(ENDS))
def test_nothing_of_a_request_outlives_it(ends: str) -> None:
    """Played in a process of its own: what other tests have left in this one would be counted, and kept, too."""
    played = subprocess.run(
        [sys.executable, "-m", "tests.support.garbage_scenes", ends],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PLAY_S_MAX,
        check=False,
    )
    assert played.returncode == 0, played.stderr
