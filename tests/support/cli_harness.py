"""Runs the `baton` command as a user does, and makes sure that nothing of it is left.

Every process started here has a mark in its environment, which its children inherit: `Foreground.processes` finds them
all, whatever became of their parents.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.fork_server import run_forked
from tests.support.ports import free_ports

RUN_S_MAX: Final = 60.0
PROCESSES_MAX: Final = 1000
EXEC_LOOKS_MAX: Final = 1000
"""How often to look at a process that has no environment, before it is taken for one that was given none."""
_MARK: Final = "CLI_HARNESS_MARK"
BATON: Final = (sys.executable, "-P", "-m", "cli.main")


def clean_env(**more: str) -> dict[str, str]:
    """This environment without any setting for baton."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "COLUMNS": "100", **more}


def run_baton(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    environment = clean_env(**(env or {}))
    forked = run_forked([*BATON, *arguments], environment, stdin, timeout_s=RUN_S_MAX)
    if forked is not None:
        return forked
    return subprocess.run(
        [*BATON, *arguments],
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )


class Foreground:
    """A baton command that runs until it is stopped; its output is two files. `with` it: nothing is left at the end."""

    def __init__(self, *arguments: str, folder: Path, env: dict[str, str] | None = None) -> None:
        """`folder` takes the output, and is the only place where the command makes temporary files."""
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._arguments = arguments
        self._env = clean_env(**{_MARK: self.mark, "TMPDIR": str(self.temporary)}, **(env or {}))
        self._seen: set[int] = set()
        self._out_path, self._err_path = folder / "stdout", folder / "stderr"

    def __enter__(self) -> Self:
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*BATON, *self._arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self._env
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def out(self) -> str:
        return self._out_path.read_text()

    @property
    def err(self) -> str:
        return self._err_path.read_text()

    def wait_for(self, text: str) -> None:
        """Until `text` is in its output. Fails where the command ends first or RUN_S_MAX is over."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            for _ in range(round(RUN_S_MAX * 100)):
                if text in self.out + self.err:
                    return
                # Woken at once by the end of the process; files cannot be waited for.
                if select.select([pidfd], [], [], 0.01)[0] and text not in self.out + self.err:
                    break
        finally:
            os.close(pidfd)
        raise AssertionError(f"no {text!r} in:\n{self.out}\n{self.err}")

    def stop(self, signum: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(timeout=RUN_S_MAX)

    def processes(self) -> list[int]:
        """All living processes that were started by this command, itself too."""
        mark = f"{_MARK}={self.mark}".encode()
        folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
        found = sorted(int(folder.name) for folder in folders if _has_mark(folder, mark))
        self._seen.update(found)
        return found

    def wait_all_ended(self) -> list[str]:
        """Wait for every process that it started, itself too; what those are that still live after RUN_S_MAX.

        Those that `processes` or `children` have named before are waited for to the end: a process gives up its
        environment, by which they are found, some time before its files.
        """
        for _ in range(PROCESSES_MAX):
            living = self.processes()
            if not living and not self._seen:
                break
            pid = self._seen.pop() if self._seen else living[0]
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                ended, _, _ = select.select([pidfd], [], [], RUN_S_MAX)
            finally:
                os.close(pidfd)
            if not ended:
                break
        return [_portrait(pid) for pid in self.processes()]

    def children(self) -> dict[str, int]:
        """Its living children by the name that they were given."""
        found = {}
        for pid in self.processes():
            if pid != self.process.pid:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if "--name" in arguments:
                    found[arguments[arguments.index("--name") + 1]] = pid
        return found

    def files(self) -> list[Path]:
        """What it has left in the temporary folder."""
        return sorted(self.temporary.rglob("*"))


def _has_mark(folder: Path, mark: bytes) -> bool:
    for _ in range(EXEC_LOOKS_MAX):
        try:
            environment = (folder / "environ").read_bytes()
            if environment:
                return mark in environment.split(b"\0")
            # A kernel thread and a process that has ended have no program either; in the middle of execve(2) the new
            # program is there, and its environment is not yet.
            (folder / "exe").readlink()
        except OSError:  # it has just ended
            return False
        os.sched_yield()
    return False


def _portrait(pid: int) -> str:
    """What a process is and what it is doing, for the report of a failed test."""
    facts = [str(pid)]
    for name in ("cmdline", "status", "wchan", "syscall", "stack"):
        try:
            facts.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_bytes().decode().replace(chr(0), ' ')}")
        except OSError as error:
            facts.append(f"{name}: {error}")
    return "\n".join(facts)


@contextmanager
def taken_port() -> Iterator[str]:
    """An endpoint that somebody listens at; afterwards whoever asks for it may have it, and nobody else is given it."""
    port = free_ports(1)[0]
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        yield f"127.0.0.1:{port}"


def free_endpoint() -> str:
    """An endpoint where nobody listens, a moment ago at least, and that nobody is given who does not ask for it."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def is_free(endpoint: str) -> bool:
    """Whether nobody listens there. (That somebody else's connection has the number by now is no matter.)"""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


INTERRUPT_LOOK_S: Final = 0.1
_ECHO: Final = b"^C\n"
"""What a terminal itself may show for Ctrl-C."""
_CLOSED: Final = -1
REST_BYTES_MAX: Final = 4_000
"""Of a terminal's text in a failed test's report."""


class Terminal:
    """A baton command in a terminal of its own, where keys are pressed. `with` it: the command is gone at the end."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        # No escape sequences around what is typed.
        self._env = clean_env(TERM="dumb", INPUTRC="/dev/null", **(env or {}))
        self._shown = b""
        self._read = 0

    def __enter__(self) -> Self:
        self._master, slave = os.openpty()
        try:
            # Another process makes the terminal its own: this one has threads and may not fork Python code.
            self.process = subprocess.Popen(
                ["setsid", "--ctty", *BATON, *self._arguments], stdin=slave, stdout=slave, stderr=slave, env=self._env
            )
        finally:
            os.close(slave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def hang_up(self) -> int:
        """Close the terminal, as a window is closed, and wait for the command's end; its exit status."""
        self._close()
        return self.process.wait(timeout=RUN_S_MAX)

    def _close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = _CLOSED

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C at a prompt, and wait until it has been seen.

        CPython's `input` sees a signal only while it waits for keys; one that comes just before that wait is seen with
        the next signal, so a harmless one follows until something is shown.
        """
        self.press("\x03")
        for _ in range(round(RUN_S_MAX / INTERRUPT_LOOK_S)):
            ready, _, _ = select.select([self._master], [], [], INTERRUPT_LOOK_S)
            if ready and (not self._take() or self._shown[self._read :].strip(_ECHO)):
                break
            self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, text: str) -> str:
        """Until `text` is shown; all that has been since the last wait, up to and with it."""
        wanted = text.encode()
        while (found := self._shown.find(wanted, self._read)) < 0:
            assert self._take(), f"no {text!r} in:\n{self._rest()}"
        begin, self._read = self._read, found + len(wanted)
        return self._shown[begin : self._read].decode(errors="replace")

    def wait_for_more(self) -> None:
        """Until anything is shown after what was waited for."""
        while len(self._shown) == self._read:
            assert self._take(), "nothing more is shown"

    def end(self) -> tuple[int, str]:
        """Wait for the command's end: its exit status, and what it has shown since the last wait."""
        while self._take():
            pass
        return self.process.wait(timeout=RUN_S_MAX), self._rest()

    def _take(self) -> bool:
        """More of what is shown; False at the end of it."""
        ready, _, _ = select.select([self._master], [], [], RUN_S_MAX)
        assert ready, f"nothing more is shown after:\n{self._rest()}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self._shown += data.replace(b"\r", b"")
        return bool(data)

    def _rest(self) -> str:
        return self._shown[self._read :][-REST_BYTES_MAX:].decode(errors="replace")
