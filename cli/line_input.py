"""Lines that a user types, or that a script pipes in."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, Protocol

import click

from cli.parameters import not_utf8

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""One message; four times as many characters as routers take by default."""
PROMPT: Final = "> "


class LineSource(Protocol):
    """Where messages come from."""

    interactive: bool
    """A user sits there."""

    def next(self) -> str | None:
        """The next line without its end, None at the end of input. Blocks. Raises KeyboardInterrupt, UsageError."""


class TypedLines:
    """From a terminal, with line editing and earlier lines where Python has readline."""

    interactive = True

    def __init__(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it once it is there)

    def next(self) -> str | None:
        try:
            return input(PROMPT)
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise not_utf8("the line") from None


class PipedLines:
    """From stdin that is no terminal, or whose output is none: nothing but the lines is read, and no prompt shown."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._read = 0

    def next(self) -> str | None:
        assert sys.stdin is not None
        raw = sys.stdin.buffer.readline(LINE_BYTES_MAX + 1)
        if not raw:
            return None
        self._read += 1
        if len(raw) > LINE_BYTES_MAX:
            raise click.UsageError(f"line {self._read} of stdin is longer than {LINE_BYTES_MAX} bytes.")
        try:
            return raw.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise not_utf8(f"line {self._read} of stdin") from None


def open_lines() -> LineSource:
    """Raises UsageError where stdin is closed."""
    if sys.stdin is None:
        raise click.UsageError("stdin is closed; messages were to come from there.")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TypedLines()
    return PipedLines(interactive=sys.stdin.isatty())
