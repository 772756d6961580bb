"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support.environment import SET_BY_IMPORTS

# Before torch is imported: its threads wait for each other in a loop, and there is a test process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast examples come is a matter of the machine and of what else runs on it: no test depends on it.
# The examples are the same in every run, so that a run can be repeated; `--hypothesis-profile=more` draws others.
settings.register_profile("more", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("more"), derandomize=True)
settings.load_profile("same")

LONG: Final = (
    "sim/test_sim.py",
    "faults/test_faults_quick.py",
    "explorer/test_explorer.py",
    "cluster/test_exactness.py",
    "cluster/test_mixed_exactness.py",
    "cluster/test_liveness.py",
)
"""Files that take long, however few their tests are."""


def pytest_configure() -> None:
    """A shell starts what is to run in its background with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and children
    inherit that. In the processes that the tests start these signals work: only what is ignored passes through exec."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    # Nodes make the operator's token there: not in the home folder of whoever runs the tests.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="baton-tests-state-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)
    gc.unfreeze()  # libraries look at the end of the process whether their objects were freed


@pytest.fixture(scope="module", autouse=True)
def _small_heap_to_collect() -> None:
    """Many tests collect garbage to see that nothing is left of their own. What was there before their module need not
    be looked through each time: with all that a test process imports, that would take seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _environment_is_kept() -> Iterator[None]:
    """A module leaves the environment as it found it. Else later modules start their nodes in another one."""
    before = dict(os.environ)
    yield
    assert _lasting(os.environ) == _lasting(before)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """But what pytest sets, and libraries when they are imported."""
    others = {"PYTEST_CURRENT_TEST", *SET_BY_IMPORTS}
    return {name: value for name, value in environment.items() if name not in others}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadfile --no-loadscope-reorder`: long files are handed out first, the others by the number of their
    tests, or a long one would be what the last worker is still busy with when all others have ended."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        count = Counter(_name(item) for item in items)
        items.sort(key=lambda item: _turn(_name(item), count))


def _name(item: pytest.Item) -> str:
    return str(item.path.relative_to(Path(__file__).parent))


def _turn(name: str, count: Counter[str]) -> tuple[int, int, str]:
    return (LONG.index(name) if name in LONG else len(LONG), -count[name], name)
