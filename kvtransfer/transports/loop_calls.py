"""From a transport's thread to the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call on the loop's thread, in the order of these calls. From any thread; dropped if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        # At the end of the process the loop may be closed first; then there is nobody left to tell.
        if not loop.is_closed():
            raise
