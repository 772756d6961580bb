"""The other end of `router.text_workers`: a process that reads long texts for a router, until its input ends."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from baton.errors import BatonError
from router.answer_forms import ToolForm
from router.prompts import PromptEncoder
from router.request import INT_DIGITS_MAX

LENGTH_BYTES: Final = 8
"""Each message begins with so many bytes that say how long it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    folder: Path | None
    chars_max: int
    tool_form: ToolForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The answer to a text that has found a bug of ours."""

    traceback: str


def _receive(source: BinaryIO) -> bytes:
    """Nothing at the end."""
    return source.read(int.from_bytes(source.read(LENGTH_BYTES), "big"))


def _answer(work: Callable[..., Any], prompts: PromptEncoder, raw: bytes, args: tuple[Any, ...]) -> Any:
    try:
        return work(prompts, raw, *args)
    except BatonError as error:
        return error
    except Exception:  # noqa: BLE001 - the router logs it, with the request
        return Failure(traceback=traceback.format_exc())


def main() -> None:
    # A terminal sends its signals to all processes of the router; this one ends when the router has.
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    sys.set_int_max_str_digits(INT_DIGITS_MAX)
    logging.disable()  # the router has logged what is wrong with the model's folder
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    if not (first := _receive(source)):
        return
    setup: Setup = pickle.loads(first)
    prompts = PromptEncoder.load(setup.folder, chars_max=setup.chars_max, tool_form=setup.tool_form)
    while job := _receive(source):
        work, args = pickle.loads(job)
        answer = pickle.dumps(_answer(work, prompts, _receive(source), args))
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "big"))
        sink.write(answer)
        sink.flush()
