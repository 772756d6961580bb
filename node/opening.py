"""What opening a pool needs around its steps: work on threads that is not left behind, errors that hold no memory."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run it to its end, also where the caller is cancelled: it uses the region, which is closed next. What it made is
    dropped then."""
    # A future of the thread, no task: what cancels every task does not cancel it. Whoever cancels again waits as well.
    thread = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait([thread])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        thread.exception()  # told to nobody: whoever asked has been cancelled
        raise cancelled
    return thread.result()


def let_go(error: BaseException | None) -> None:
    """The frames that an error came through may still look into memory, which then could not be given back."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
