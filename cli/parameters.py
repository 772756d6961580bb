"""Types of options that several commands share: what is no time, no number or no text is refused before anything is
sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

TIMEOUT_S_MIN: Final = 0.001
TIMEOUT_S_MAX: Final = 86_400.0
TOKEN_ID_MAX: Final = (1 << 32) - 1
ID_BIAS_FORM: Final = "ID=VALUE"
_F = TypeVar("_F", bound=Callable[..., Any])


class Number(click.ParamType[float]):
    """A finite number. Its range is the router's to check, which knows it."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(click.FLOAT.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"'{value}' is no finite number", param, ctx)
        return number


class Seconds(Number):
    """A time from TIMEOUT_S_MIN to TIMEOUT_S_MAX."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if not TIMEOUT_S_MIN <= seconds <= TIMEOUT_S_MAX:
            self.fail(f"'{value}' is no usable time: {TIMEOUT_S_MIN:g} to {TIMEOUT_S_MAX:g} seconds", param, ctx)
        return seconds


def timeout_option(default_s: float, help_text: str) -> Callable[[_F], _F]:
    """`--timeout SECONDS`, which the command gets as `timeout_s`."""
    return click.option(
        "--timeout", "timeout_s", type=Seconds(), default=default_s, show_default=True, metavar="SECONDS",
        help=help_text,
    )  # fmt: skip


class Whole(click.ParamType[int]):
    """An unsigned whole number of at most this many bits."""

    name = "n"

    def __init__(self, bits: int) -> None:
        self._max = (1 << bits) - 1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(click.INT.convert(value, param, ctx))
        if not 0 <= number <= self._max:
            self.fail(f"{number} is out of range: 0 to {self._max}", param, ctx)
        return number


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Token ids with commas between them."""

    name = "1,2,3"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is no list of numbers; write it like 1,2,3", param, ctx)
        if any(number < 0 or number > TOKEN_ID_MAX for number in numbers):
            self.fail(f"'{value}' has a number that is no token id (0 to {TOKEN_ID_MAX})", param, ctx)
        return numbers


class IdBias(click.ParamType[tuple[int, float]]):
    """A token id and what is added to its score."""

    name = ID_BIAS_FORM

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        left, _, right = str(value).partition("=")
        if not (left.isascii() and left.isdigit() and len(left) <= len(str(TOKEN_ID_MAX))):
            self.fail(f"'{value}' does not begin with a token id; write it like 17=-2.5", param, ctx)
        if int(left) > TOKEN_ID_MAX:
            self.fail(f"{left} is no token id (0 to {TOKEN_ID_MAX})", param, ctx)
        try:
            bias = float(right)
        except ValueError:
            self.fail(f"'{value}' does not end in a number; write it like 17=-2.5", param, ctx)
        if not math.isfinite(bias):
            self.fail(f"'{value}' does not end in a finite number", param, ctx)
        return int(left), bias


def check_utf8(text: str, what: str) -> None:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates (PEP 383). Raises UsageError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise not_utf8(what) from None


def read_stdin(what: str) -> str:
    """All of it, for an argument that is `-`. Raises UsageError where it is closed, or no text."""
    if sys.stdin is None:
        raise click.UsageError(f"stdin is closed; {what} was to come from there.")
    try:
        # Not the locale's encoding, which may let anything pass. Line ends as text has them.
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise not_utf8(what) from None


def not_utf8(what: str) -> click.UsageError:
    return click.UsageError(f"{what} is not UTF-8")
