"""Copies and socket calls in C, without the interpreter's lock; each has a plain way beside it for where C is not."""

from __future__ import annotations

from kvtransfer.native.copy import native_copy
from kvtransfer.native.sockets import native_sockets


def preload() -> None:
    """Load, and the first time build, what the transports will ask for. May take a second."""
    native_copy()
    native_sockets()
