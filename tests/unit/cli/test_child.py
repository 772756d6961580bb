"""One child process: what it says, how it ends, how it is made to end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cli.child import SUPERVISOR_ENV, Child, describe_exit, stop_children

WAIT_S_MAX = 60
ENDLESS_MS = 60_000
SAYS_READY = (
    "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "print('ready node-0 127.0.0.1:4242 admin=127.0.0.1:4243', flush=True)"
)
SLEEPS = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {SAYS_READY}; {SLEEPS}"
POLITE = f"import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); {SAYS_READY}; {SLEEPS}"


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            await scene

    asyncio.run(limited())


def make(tmp_path: Path, script: str, on_progress: Callable[..., None] = lambda *news: None) -> Child:
    return Child(
        name="node-0",
        command=[sys.executable, "-c", script],
        env=os.environ,
        log_path=tmp_path / "node-0.log",
        on_progress=on_progress,
    )


def test_a_child_tells_progress_and_readiness(tmp_path: Path) -> None:
    """Lines of progress come first, then the endpoints; the rest of its output is of no interest."""

    async def scene() -> None:
        heard: list[tuple[object, ...]] = []
        progress = """print('progress {"what": "loading", "done": 1, "total": 4}', flush=True)"""
        child = make(tmp_path, f"{progress}; print('hello'); {SAYS_READY}; {SLEEPS}", lambda *news: heard.append(news))
        assert await child.wait_ready()
        assert (child.ready.result(), child.others) == ("127.0.0.1:4242", {"admin": "127.0.0.1:4243"})
        assert heard == [("loading", 1, 4)]
        assert await stop_children([child], grace_ms=ENDLESS_MS) == []
        assert child.exited.result() == -signal.SIGINT

    play(scene())


def test_a_child_ends_before_it_is_ready(tmp_path: Path) -> None:
    """Its status and the end of its log are there to be shown."""

    async def scene() -> None:
        child = make(tmp_path, "import sys; [print(i, file=sys.stderr) for i in range(100)]; sys.exit(3)")
        assert not await child.wait_ready()
        assert child.exited.result() == 3
        assert child.log_tail() == "\n".join(f"  | {i}" for i in range(85, 100))
        assert child.own_words() == ""
        child.send_signal(signal.SIGTERM)

    play(scene())


def test_a_child_that_says_what_is_wrong(tmp_path: Path) -> None:
    """What follows the last `error: ` of its log is its message, of however many lines."""

    async def scene() -> None:
        child = make(tmp_path, r"import sys; sys.stderr.write('12:00 INFO\nerror: Wrong:\n  --a: b\n'); sys.exit(2)")
        assert not await child.wait_ready()
        assert child.own_words() == "Wrong:\n  --a: b"

    play(scene())


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    """It ignores SIGINT: after the grace time it is killed, and named."""

    async def scene() -> None:
        child = make(tmp_path, DEAF)
        assert await child.wait_ready()
        assert await stop_children([child], grace_ms=1) == [child]
        assert child.exited.result() == -signal.SIGKILL

    play(scene())


def test_a_stopped_child_can_still_end_well(tmp_path: Path) -> None:
    """SIGSTOP keeps a process from hearing SIGINT; it is continued."""

    async def scene() -> None:
        child = make(tmp_path, POLITE)
        assert await child.wait_ready()
        child.send_signal(signal.SIGSTOP)
        assert await stop_children([child], grace_ms=ENDLESS_MS) == []
        assert child.exited.result() == 0

    play(scene())


def test_stopping_is_interrupted(tmp_path: Path) -> None:
    """The stop itself is cancelled while it waits for a deaf child: that child is killed, not left."""

    async def scene() -> None:
        child = make(tmp_path, DEAF)
        assert await child.wait_ready()
        stopping = asyncio.ensure_future(stop_children([child], grace_ms=ENDLESS_MS))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert await child.exited == -signal.SIGKILL

    play(scene())


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    """The system's refusal comes at once, with nothing left open."""

    async def scene() -> None:
        with pytest.raises(FileNotFoundError):
            Child(
                name="node-0",
                command=[str(tmp_path / "nothing")],
                env=os.environ,
                log_path=tmp_path / "node-0.log",
                on_progress=lambda *news: None,
            )

    play(scene())


def test_how_an_exit_is_described() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"


BORN = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
from cli.child import tie_to_supervisor
print(tie_to_supervisor(), flush=True)
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("deaf")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_a_child_is_born() -> None:
    """The terminal's SIGINT hits the child before it has a session of its own: that one is dropped, a later one counts.

    This is what `Child` does for its process, with the signal sent at the worst moment.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.run(
            [sys.executable, "-c", BORN],
            env={**os.environ, SUPERVISOR_ENV: str(os.getpid())},
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
            check=False,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (child.stdout, child.stderr, child.returncode) == ("True\ninterrupted\n", "", 0)


def test_a_child_starts_with_the_terminals_signals_blocked(tmp_path: Path) -> None:
    """Until it says otherwise: SIGINT is in its mask, and not in this process's mask afterwards."""

    async def scene() -> None:
        blocked = (
            "import signal; mask = signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
            "print('ready node-0', signal.SIGINT in mask, flush=True)"
        )
        child = make(tmp_path, f"{blocked}; {SLEEPS}")
        assert await child.wait_ready()
        assert child.ready.result() == "True"
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert await stop_children([child], grace_ms=ENDLESS_MS) == []

    play(scene())


WATCHED = """
import ctypes, signal
from cli.child import tie_to_supervisor
tie_to_supervisor()
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
print("tied", flush=True)
signal.pause()
"""
WATCHING = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, sys.argv[2]: str(os.getpid())})
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_watches_its_supervisor() -> None:
    """The kernel has forgotten to kill it (here it was told to), and it ends with its supervisor all the same."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", WATCHING, WATCHED, SUPERVISOR_ENV], stdout=subprocess.PIPE, text=True
    )
    try:
        assert supervisor.stdout is not None
        child = os.pidfd_open(int(supervisor.stdout.readline()))
        assert supervisor.stdout.readline() == "tied\n"
    finally:
        supervisor.kill()
        supervisor.wait(timeout=WAIT_S_MAX)
    try:
        assert select.select([child], [], [], WAIT_S_MAX)[0] == [child]
        assert supervisor.stdout.read() == ""
    finally:
        os.close(child)
        supervisor.stdout.close()
