"""One service in the foreground: readiness on stdout, the log on stderr, and how signals end it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_harness import RUN_S_MAX, Foreground, clean_env, is_free

LOADS_FOREVER = """
import asyncio, threading
import cli.main, cli.services

async def serve(config, *, stop, drain, on_ready, progress):
    progress("loading", 1, 4)
    await asyncio.to_thread(threading.Event().wait)

cli.services.serve_function = lambda service: serve
cli.main.run(["directory", "--listen", "127.0.0.1:0"])
"""


LIMITED = """
import resource, sys
import cli.main, cli.services

async def serve(config, *, stop, drain, on_ready, progress):
    print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)

hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
cli.services.serve_function = lambda service: serve
cli.main.run(["router", "--http-connections-max", "1000"])
"""


@pytest.mark.parametrize(("hard", "warned"), [(5_120, False), (2_048, True)])
def test_a_service_may_open_as_many_files_as_the_hard_limit_allows(hard: int, warned: bool) -> None:
    """A router starts under a soft limit of 256, which its clients would use up. Where the hard limit is too small for
    all its connections it says so, with both numbers."""
    command = [sys.executable, "-c", LIMITED, str(hard)]
    result = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert (result.returncode, result.stdout) == (0, f"({hard}, {hard})\n"), result.stderr
    assert ("few files may be open here" in result.stderr) is warned
    assert (f"limit={hard} wanted=5096" in result.stderr) is warned


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_service_says_that_it_is_ready_and_ends_well(tmp_path: Path, signum: signal.Signals) -> None:
    """Exactly one line on stdout; after the signal, status 0 and a free port."""
    with Foreground("directory", "--listen", "127.0.0.1:0", "--name", "who", folder=tmp_path) as directory:
        directory.wait_for("ready who ")
        ready = re.fullmatch(r"ready who (127\.0\.0\.1:\d+)\n", directory.out)
        assert ready is not None
        assert directory.stop(signum) == 0
        assert directory.out == ready[0]
        assert is_free(ready[1])
        log = re.sub(r"^\S+ ", "", directory.err, flags=re.MULTILINE).splitlines()
        assert [re.sub(r" (endpoint|pid)=\S+", "", line) for line in log] == [
            "INFO who process ready",
            f"INFO who process asked to stop signal={signum.name}",
            "INFO who process stopped",
        ]


def test_a_service_is_stopped_while_it_loads() -> None:
    """A thread reads a large model and cannot be interrupted: the process ends all the same, at the first signal."""
    command = [sys.executable, "-c", LOADS_FOREVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_env(), text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "directory: loading 25%\n"
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=RUN_S_MAX)
        assert process.returncode == 0
        assert rest.splitlines()[-1].endswith("process stopped before it was ready")


def test_the_environment_sets_a_key_and_a_flag_goes_first(tmp_path: Path) -> None:
    """BATON_DIRECTORY_NAME names the process; --listen wins over BATON_DIRECTORY_LISTEN, which nobody could use."""
    env = {"BATON_DIRECTORY_NAME": "by-env", "BATON_DIRECTORY_LISTEN": "nowhere"}
    with Foreground("directory", "--listen", "127.0.0.1:0", folder=tmp_path, env=env) as directory:
        directory.wait_for("ready by-env 127.0.0.1:")
        assert directory.stop(signal.SIGTERM) == 0
