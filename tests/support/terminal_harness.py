"""The `baton` command in a terminal, as a user sits before it: keys are pressed, what is shown is waited for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from types import TracebackType
from typing import Final, Self

from tests.support.cli_harness import BATON, RUN_S_MAX, clean_env

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
