"""What the tests of the text workers have them do. The processes find these functions by their names."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from baton.errors import BatonError, Reason
from router.prompts import PromptEncoder

POLL_S = 0.005


def pid(_prompts: PromptEncoder, _raw: bytes | bytearray) -> int:
    return os.getpid()


def thread(_prompts: PromptEncoder, _raw: bytes | bytearray) -> int:
    return threading.get_ident()


def echo(_prompts: PromptEncoder, _raw: bytes | bytearray, text: str) -> str:
    return text


def refuse(_prompts: PromptEncoder, _raw: bytes | bytearray) -> None:
    raise BatonError(Reason.BAD_FIELD, "The test says so.", field="prompt", retry_after_ms=7, metadata={"a": "b"})


def fail(_prompts: PromptEncoder, _raw: bytes | bytearray) -> float:
    return 1 / 0


def end(_prompts: PromptEncoder, _raw: bytes | bytearray) -> None:
    os._exit(3)


def seen(path: str) -> None:
    while not Path(path).exists():
        time.sleep(POLL_S)


def wait_for(_prompts: PromptEncoder, _raw: bytes | bytearray, path: str) -> int:
    """Until there is such a file."""
    Path(f"{path}.begun").touch()
    seen(path)
    return os.getpid()
