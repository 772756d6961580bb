"""The streams of all decode processes that one router knows: made on first use, dropped when nobody needs them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestKey
from baton.repeats import RepeatLog
from baton.rpc_client import Channels
from baton.tasks import Tasks
from baton.wire import NodeRecord, Role
from router.config import RouterConfig
from router.subscriptions import DecodeSubscription, Inbox

LOST_RETRY_MS: Final = 1_000
"""Between two tries at a lost stream that no news of the directory calls for."""


class DecodeStreams:
    """Lives on the router's loop, whose tasks it uses."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        own: Incarnation,
        channels: Channels,
        inboxes: Mapping[RequestKey, Inbox],
        tasks: Tasks,
        clock: Clock,
        repeats: RepeatLog,
        dropped: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        """`inboxes` has that of each attempt that goes on. `dropped(endpoint)` is called behind a stream's end, for
        what else the router has at that endpoint."""
        self._config = config
        self._own = own
        self._channels = channels
        self._inboxes = inboxes
        self._tasks = tasks
        self._clock = clock
        self._repeats = repeats
        self._dropped = dropped
        self._subscriptions: dict[Incarnation, DecodeSubscription] = {}

    @property
    def subscriptions(self) -> tuple[DecodeSubscription, ...]:
        return tuple(self._subscriptions.values())

    def get(self, name: str, endpoint: str, incarnation: Incarnation) -> DecodeSubscription:
        """The stream of this process."""
        subscription = self._subscriptions.get(incarnation)
        if subscription is None:
            subscription = self._subscriptions[incarnation] = DecodeSubscription(
                name=name,
                endpoint=endpoint,
                incarnation=incarnation,
                own=self._own,
                channels=self._channels,
                liveness=self._config.liveness,
                clock=self._clock,
                live=self._inboxes,
                repeats=self._repeats,
            )
        return subscription

    def use(self, endpoint: str) -> bool:
        """Whether one of them goes there."""
        return any(subscription.endpoint == endpoint for subscription in self._subscriptions.values())

    def out_of_reach(self) -> set[Incarnation]:
        """Processes that this router has lost and not reached since: what is sent there may well be lost too.

        Their streams are tried again at each news of the directory, and by this question `LOST_RETRY_MS` apart:
        without a directory nobody else would.
        """
        now_s = self._clock.monotonic_s()
        for stream in self._subscriptions.values():
            if stream.out_of_reach and stream.lost and now_s - stream.lost_s >= LOST_RETRY_MS / 1000:
                stream.open()
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.out_of_reach}

    def silent(self) -> set[Incarnation]:
        """Those of `out_of_reach` that answer nothing; the others take calls, and fail their streams only."""
        return {incarnation for incarnation, stream in self._subscriptions.items() if stream.silent}

    def follow(self, records: Sequence[NodeRecord]) -> None:
        """What the directory says: streams are opened to all that are there; those to processes that are gone and serve
        nothing are dropped."""
        alive = {record.incarnation for record in records}
        decode_nodes = [record for record in records if record.role.serves(Role.DECODE)]
        owners = {record.endpoint: record.incarnation for record in decode_nodes}
        for record in decode_nodes:
            self.get(record.name, record.endpoint, record.incarnation).open()
        for incarnation, subscription in list(self._subscriptions.items()):
            if incarnation not in alive and owners.get(subscription.endpoint, incarnation) != incarnation:
                subscription.restarted()
            if incarnation not in alive and subscription.idle:
                del self._subscriptions[incarnation]
                self._tasks.spawn(self._drop(subscription))

    async def has_committed(self, subscription: DecodeSubscription, key: RequestKey) -> bool:
        """Whether the decode node says that the attempt goes on there. Bounded tries; no answer is a no."""
        limits = self._config.retries
        for _ in range(limits.resolve_tries_max):
            try:
                return await subscription.resolve(key, timeout_s=limits.resolve_ms_max / 1000)
            except BatonError as error:
                self._repeats.info("resolve unanswered", peer=subscription.name, request=key.request, why=error.message)
                if error.reason is Reason.INCARNATION_MISMATCH:
                    break
        return False

    def let_go(self, subscription: DecodeSubscription, inbox: Inbox) -> None:
        """The attempt is over: the decode node forgets a finished answer, and is told to stop an unfinished one."""
        subscription.remove(inbox)
        if inbox.finish is None:
            self._tasks.spawn(self._cancel(subscription, inbox.key))
        else:
            subscription.users -= 1

    async def close(self) -> None:
        for subscription in self._subscriptions.values():
            await subscription.close()

    async def _cancel(self, subscription: DecodeSubscription, key: RequestKey) -> None:
        """Bounded tries; a node that answers none of them is left to its own timers."""
        limits, why = self._config, ""
        try:
            for _ in range(limits.cancel_tries_max):
                try:
                    await subscription.cancel(key, "the router let go", timeout_s=limits.cancel_ms_max / 1000)
                    return
                except BatonError as error:
                    if error.reason is Reason.INCARNATION_MISMATCH:
                        return
                    why = error.message
            tell = self._repeats.info if subscription.out_of_reach else self._repeats.warning
            tell(
                "cancel unanswered", peer=subscription.name, request=key.request, tries=limits.cancel_tries_max, why=why
            )
        finally:
            subscription.users -= 1

    async def _drop(self, subscription: DecodeSubscription) -> None:
        self._repeats.over(subscription.name, "it is gone")
        await subscription.close()
        await self._dropped(subscription.endpoint)
