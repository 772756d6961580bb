"""Types of options that several commands share. What is no time, no number or no text is refused before anything is
sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

TOKEN_ID_MAX: Final = (1 << 32) - 1
_F = TypeVar("_F", bound=Callable[..., Any])


def options(*decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Gives a command all of these options; its help shows them in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class Number(click.ParamType[float]):
    """A finite number, from `low` to `high`."""

    name = "number"

    def __init__(self, low: float = -math.inf, high: float = math.inf) -> None:
        self._low, self._high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(click.FLOAT.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"'{value}' is no finite number", param, ctx)
        if not self._low <= number <= self._high:
            self.fail(f"'{value}' is not from {self._low:g} to {self._high:g}", param, ctx)
        return number


SECONDS: Final = Number(0.001, 86_400.0)


def timeout_option(default_s: float, help_text: str) -> Callable[[_F], _F]:
    """`--timeout SECONDS`, which the command gets as `timeout_s`."""
    return click.option(
        "--timeout", "timeout_s", type=SECONDS, default=default_s, show_default=True, metavar="SECONDS",
        help=help_text,
    )  # fmt: skip


UINT32: Final = click.IntRange(0, TOKEN_ID_MAX)
UINT64: Final = click.IntRange(0, (1 << 64) - 1)


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
        return tuple(UINT32.convert(number, param, ctx) for number in numbers)


class IdBias(click.ParamType[tuple[int, float]]):
    """A token id and what is added to its score."""

    name = "ID=VALUE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, equals, bias = str(value).partition("=")
        if not (token and equals and bias):
            self.fail(f"'{value}' is no bias of a token id; write it like 17=-2.5", param, ctx)
        return UINT32.convert(click.INT(token, param, ctx), param, ctx), Number().convert(bias, param, ctx)


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
