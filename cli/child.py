"""One child process under a supervisor: how it is started, what it says, how it ends.

A child prints to stdout `progress JSON` any number of times and `ready NAME ENDPOINT` once, with `WHAT=ENDPOINT` behind
it for what else it serves; its log goes to stderr, which is a file. It is in a session of its own, so that Ctrl-C in a
terminal reaches the supervisor only, and it has itself killed when the supervisor dies (`tie_to_supervisor`).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from cli.invocation import ERROR_PREFIX

SUPERVISOR_ENV: Final = "BATON_SUPERVISOR_PID"
"""Set for children: the process whose end is theirs too."""
OUTPUT_LINE_BYTES_MAX: Final = 4096
LOG_TAIL_LINES_MAX: Final = 15
LOG_TAIL_BYTES_MAX: Final = 16 * 1024
KILL_MS_MAX: Final = 10_000
"""How long the kernel may take to end a killed process."""
_PR_SET_PDEATHSIG: Final = 1
_TERMINAL_SIGNALS: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What a terminal sends to its whole foreground group. Blocked in a child that does not call `tie_to_supervisor`."""


def tie_to_supervisor() -> bool:
    """In a child, first thing: end when the supervisor dies, however it dies. False without a supervisor.

    Two ways, of which either is enough. The kernel kills this process when the thread that started it ends (prctl(2),
    PR_SET_PDEATHSIG), whatever is running here; and a thread of our own waits on the supervisor's pidfd.
    """
    named = os.environ.pop(SUPERVISOR_ENV, None)
    if named is None:
        return False
    supervisor = int(named)
    _take_signals_again()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    try:
        pidfd = os.pidfd_open(supervisor)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != supervisor:  # it died before the kernel knew what we want; its number may be another's by now
        os._exit(1)
    threading.Thread(target=_end_with, args=(pidfd,), name="supervisor-watch", daemon=True).start()
    return True


def _end_with(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)


@contextmanager
def _own_session_first() -> Iterator[None]:
    """Around the start of a child: until it has a session of its own it is in the terminal's foreground group, and a
    Ctrl-C of just then would end it. It is born with the signal blocked, and drops it (`_take_signals_again`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_signals_again() -> None:
    handlers = {signum: signal.getsignal(signum) for signum in _TERMINAL_SIGNALS}
    for signum in _TERMINAL_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # drops what is pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


class Child:
    """A process that was started. Lives on one event loop; `exited` is set when it has been reaped.

    Start it from a thread that outlives it: the kernel kills it when that thread ends.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        """Starts the process. Raises OSError where the system refuses, with nothing left behind.

        `on_progress` gets what the child does before it is ready, how much is done and how much there is.
        """
        self.name = name
        self.log_path = log_path
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str] = self._loop.create_future()
        """The endpoint."""
        self.others: dict[str, str] = {}
        """The other endpoints of one that is ready, by what they are for."""
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The exit status, negative for a signal."""
        self._output = b""
        with log_path.open("ab") as log, _own_session_first():
            self._process = self._start(command, {**env, SUPERVISOR_ENV: str(os.getpid())}, log)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._stdout: IO[bytes] = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._stdout.fileno(), self._read_output)
        self._loop.add_reader(self._pidfd, self._reap)

    def _start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process, in a session of its own; its stdout is a pipe. Raises OSError."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )

    @property
    def running(self) -> bool:
        return not self.exited.done()

    async def wait_ready(self) -> bool:
        """True when it says it is ready, False when it ends before."""
        either: tuple[asyncio.Future[Any], ...] = (self.ready, self.exited)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self.ready.done() and self.running

    def send_signal(self, signum: int) -> None:
        """Does nothing to a process that has ended."""
        self._process.send_signal(signum)

    def terminate(self) -> None:
        """Ask it to stop now; a stopped (SIGSTOP) one is continued, or it would not hear.

        A node that is ready takes SIGTERM as an order to finish what it has (`cli.services`), so that one gets SIGINT;
        before, SIGINT may be blocked still.
        """
        self.send_signal(signal.SIGINT if self.ready.done() else signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """The last lines of its log, indented; empty where there are none."""
        return "\n".join(f"  | {line}" for line in self._last_lines()[-LOG_TAIL_LINES_MAX:])

    def own_words(self) -> str:
        """The error that it ended with, where it said one to its user (see `cli.main`); else empty."""
        lines = self._last_lines()
        starts = [index for index, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
        return "\n".join(lines[starts[-1] :]).removeprefix(ERROR_PREFIX) if starts else ""

    def _last_lines(self) -> list[str]:
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_TAIL_BYTES_MAX))
            return log.read().decode(errors="replace").splitlines()

    def _read_output(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._close_output()
            return
        *lines, self._output = (self._output + data).split(b"\n")
        self._output = self._output[-OUTPUT_LINE_BYTES_MAX:]
        for line in lines:
            self._take_line(line.decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "progress":
            news = json.loads(rest)
            self._on_progress(news["what"], news["done"], news["total"])
        elif word == "ready" and not self.ready.done():
            _, endpoint, *others = rest.split()
            self.others = dict(each.split("=", 1) for each in others)
            self.ready.set_result(endpoint)

    def _reap(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self._stdout.closed:
            self._read_output()
        self._close_output()
        self.exited.set_result(status)

    def _close_output(self) -> None:
        if not self._stdout.closed:
            self._loop.remove_reader(self._stdout.fileno())
            self._stdout.close()


def describe_exit(status: int) -> str:
    """ "exited with status 1", "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


async def stop_children(children: Sequence[Child], *, grace_ms: int) -> list[Child]:
    """Ask all of them to stop, kill those that take longer than `grace_ms`; returns those that were killed.

    All are reaped when this returns. If it is cancelled, or the kernel does not end one within KILL_MS_MAX, the rest
    are killed without waiting.
    """
    running = [child for child in children if child.running]
    try:
        for child in running:
            child.terminate()
        late = await _still_running(running, grace_ms)
        for child in late:
            child.send_signal(signal.SIGKILL)
        stuck = await _still_running(late, KILL_MS_MAX)
    except BaseException:
        for child in running:
            child.send_signal(signal.SIGKILL)
        raise
    assert not stuck, [(child.name, child.pid) for child in stuck]
    return late


async def _still_running(children: Sequence[Child], wait_ms: int) -> list[Child]:
    if children:
        await asyncio.wait({child.exited for child in children}, timeout=wait_ms / 1e3)
    return [child for child in children if child.running]
