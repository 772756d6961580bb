"""What becomes of a client that does not read: it is cut off, before what it leaves takes room from others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from baton.errors import BatonError, Reason
from baton.ids import RequestId
from baton.log import get_log
from router.config import RouterConfig
from router.observer import ObservedRequest
from router.subscriptions import Inbox

log = get_log("router")


def slow_client(unread: int) -> BatonError:
    return BatonError(
        Reason.SLOW_CLIENT,
        f"The client has left {unread} tokens unread, more than are kept for it (client_tokens_unread_max); the "
        "request was cancelled. Read faster, or ask for fewer tokens at a time.",
        metadata={"unread": str(unread)},
    )


def unread_limit(
    config: RouterConfig,
    loop: asyncio.AbstractEventLoop,
    observed: ObservedRequest,
    cut_off: Callable[[BatonError], None],
    request_id: RequestId,
) -> Callable[[Inbox], None]:
    """What looks at an inbox each time that something was put into it, and cuts its client off where it does not read.

    Many tokens may come at once for a client that reads, so that it must have left some for a while, too.
    """

    def look(inbox: Inbox) -> None:
        if inbox.unread <= config.client_tokens_unread_max or inbox.writing_s is None:
            return
        if (loop.time() - inbox.writing_s) * 1000 > config.client_stall_ms:
            error = slow_client(inbox.unread)
            observed.failed(error.reason)
            log.warning("client cut off", request=request_id, key=inbox.key.request, unread=inbox.unread)
            cut_off(error)

    return look


class ClientGuard:
    """Around everything that writes to one client: `cut_off` ends it, even in a write that waits for the client.

    Raises the error given to `cut_off` at its end. One event loop; for one task.
    """

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._error: BatonError | None = None
        self._over = False

    def cut_off(self, error: BatonError) -> None:
        """The first call counts; nothing happens once the block is over."""
        if self._error is None and not self._over:
            self._error = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> ClientGuard:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            told, self._error = self._error, None
            assert told is not None
            try:
                raise told from None
            finally:
                del told  # or it would refer to itself, by this frame in its traceback
