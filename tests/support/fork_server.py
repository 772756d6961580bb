"""Starts baton's commands by fork(2) from a process that has everything imported already.

A node spends about a second of processor time on imports, one with a model engine four: more than most tests need for
everything else. Here one server for each set of imports lives as long as the test process, and a command is a fork of
it. From then on it is what `baton ...` makes of it: it runs `cli.main` with its own arguments, environment, session and
files, and it is a child of the test process as one that subprocess starts is. So with processes that have failpoints.

A process with an unusual environment is started by exec, like a user's; so are the clusters of `baton up`, those of a
rolling restart and everything that tests the start itself. BATON_TESTS_EXEC=1 starts every process that way.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast
from unittest.mock import patch

import cli
import cli.services
import cli.supervisor
import engine.models
import engine.native
from cli.child import Child
from cli.services import Service, serve_function
from tests.support.environment import SET_BY_IMPORTS
from tests.support.loop_holds import HOLDS_ENV, watched

EXEC_ENV: Final = "BATON_TESTS_EXEC"
REQUEST_BYTES_MAX: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_COMMAND: Final = [sys.executable, "-P", "-m"]
_MODULES: Final = {"cli.main": "run", "tests.faults.node": "main"}
"""What may follow, and its function that takes the arguments."""
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TERMINAL: Final = ("COLUMNS", "COMP_WORDS", "COMP_CWORD")
_OWN: Final = frozenset({*_THREADS, *_TERMINAL, *SET_BY_IMPORTS, "PYTEST_CURRENT_TEST", "TMPDIR"})
"""Variables that may differ from the server's: read after the start, or of no matter."""
_LIBRARIES: Final = ("httptools", "starlette.applications", "prometheus_client", "jinja2.sandbox", "tokenizers")
"""What a router imports when it serves HTTP or text."""
_servers: dict[bool, ForkServer] = {}
"""By whether they have torch."""


class ForkServer:
    """The test process's end of one server."""

    def __init__(self, *, torch: bool) -> None:
        self.environment = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.support.fork_server", str(theirs.fileno()), *(["torch"] * torch)],
                env={**self.environment, **dict.fromkeys(_THREADS, "1")},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours

    def start(self, command: Sequence[str], env: Mapping[str, str], files: Sequence[int], *, node: bool) -> int:
        """A process that runs this command; its pid. It is a child of this process. `files` are its
        stdin, stdout and stderr. A `node` has Ctrl-C blocked at first, as `Child` starts it."""
        request = json.dumps({"words": command[len(_COMMAND) :], "env": dict(env), "node": node}).encode()
        assert len(request) <= REQUEST_BYTES_MAX, len(request)
        with _adopting():
            socket.send_fds(self._socket, [request], list(files))
            answer = self._socket.recv(64)
        assert answer, "the fork server has ended"
        return int(answer)


class ForkedProcess:
    """What Child uses of a Popen."""

    def __init__(self, pid: int, stdout: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb")
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, signum: int) -> None:
        """Does nothing to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


class ForkedChild(Child):
    """A Child whose process is forked where its environment allows it."""

    def _start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        server = _server_for(command, env)
        if server is None:
            return super()._start(command, env, log)
        read, write = os.pipe()
        with open(os.devnull, "rb") as nothing:
            try:
                pid = server.start(command, env, [nothing.fileno(), write, log.fileno()], node=True)
            except BaseException:
                os.close(read)
                raise
            finally:
                os.close(write)
        return cast("subprocess.Popen[bytes]", ForkedProcess(pid, read))


def run_forked(
    command: Sequence[str], env: Mapping[str, str], stdin: str, *, timeout_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Run a command of baton's to its end. None where it cannot be forked. Raises TimeoutExpired; it is killed then."""
    server = _server_for(command, env)
    if server is None:
        return None
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode(errors="surrogateescape"))
        given.seek(0)
        files = [given.fileno(), out.fileno(), err.fileno()]
        pid = server.start(command, env, files, node=False)
        pidfd = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([pidfd], [], [], timeout_s)
        finally:
            os.close(pidfd)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        if not ended:
            raise subprocess.TimeoutExpired(list(command), timeout_s, *texts)
        return subprocess.CompletedProcess(list(command), os.waitstatus_to_exitcode(status), *texts)


@contextmanager
def forked_children() -> Iterator[None]:
    """Within it supervisors (`cli.supervisor.Cluster`) fork their children."""
    with patch.object(cli.supervisor, "Child", ForkedChild):
        yield


def _server_for(command: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    head = len(_COMMAND)
    if EXEC_ENV in os.environ or list(command[:head]) != _COMMAND or command[head] not in _MODULES:
        return None
    torch = "mock" not in command[head:] and command[head + 1 : head + 2] in (["prefill"], ["decode"], ["mixed"])
    server = _servers.get(torch)
    if server is None:
        server = _servers[torch] = ForkServer(torch=torch)
    names = {*env, *server.environment} - _OWN
    unusual = [
        name for name in names if not name.startswith("BATON_") and env.get(name) != server.environment.get(name)
    ]
    assert not unusual or HOLDS_ENV not in env, f"only a fork is watched, and {unusual} differ from the fork server's"
    return None if unusual else server


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it orphans among this process's descendants become its own children: a fork's parent ends at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    for on in (1, 0):
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, on, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        if on:
            try:
                yield
            except BaseException:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
                raise


def _serve(server: socket.socket, parent: int) -> list[str]:
    """Fork a process for every request. Returns only in such a process: the module to run, and its arguments."""
    while True:
        data, fds, _, _ = socket.recv_fds(server, REQUEST_BYTES_MAX, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not forked"
        pid_read, pid_write = os.pipe()
        go_read, go_write = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid:
                os.write(pid_write, str(pid).encode())
                os._exit(0)
            os.close(go_write)
            os.read(go_read, 1)  # by now the fork's parent has ended, and the test process is it
            assert os.getppid() == parent, (os.getppid(), parent)
            server.detach()
            _become(request["env"], fds, node=request["node"])
            words: list[str] = request["words"]
            return words
        os.waitpid(middle, 0)
        server.send(os.read(pid_read, 64))
        for fd in (pid_read, pid_write, go_read, go_write, *fds):
            os.close(fd)


def _become(env: Mapping[str, str], fds: Sequence[int], *, node: bool) -> None:
    """Make of this fork what subprocess makes of a child: session, environment, descriptors, signals."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for fd, place in zip(fds, (0, 1, 2), strict=True):
        os.dup2(fd, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for name, place in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        was = getattr(sys, name)
        setattr(sys, name, os.fdopen(place, was.mode, encoding=was.encoding, errors=was.errors, closefd=False))
    if node:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP))  # as Child does


def _import_all(*, torch: bool) -> None:
    """What some node imports before it is ready, torch apart: more than another needs, and nothing starts a thread."""
    importlib.import_module("cli.services")
    if not torch:
        for file in Path(cli.__path__[0]).glob("[!_]*.py"):
            if file.stem != "main":
                importlib.import_module(f"cli.{file.stem}")
    for service in Service:
        serve_function(service)
    for library in _LIBRARIES:
        importlib.import_module(library)
    if torch:
        for package in (engine, engine.models, engine.native):
            for file in Path(package.__path__[0]).glob("[!_]*.py"):
                importlib.import_module(f"{package.__name__}.{file.stem}")


def _main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(fileno=int(sys.argv[1])) as server:
        _import_all(torch=sys.argv[2:] == ["torch"])
        module, *arguments = _serve(server, parent)
    made = importlib.import_module(module)
    if (holds := os.environ.get(HOLDS_ENV)) is not None:
        cli.services._serve = watched(cli.services._serve, Path(holds))
    sys.argv[:] = [str(Path(made.__file__ or "")), *arguments]
    sys.exit(getattr(made, _MODULES[module])(arguments))


if __name__ == "__main__":
    _main()
