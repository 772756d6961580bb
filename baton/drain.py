"""A node's orders about its own life (cordon, drain and back), and the proof that a drain is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from baton.clock import Clock, first_of
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle, LifecycleEvent, NodeLifecycle
from baton.log import get_log
from baton.tasks import end_task

log = get_log("drain")

PROOF_MS: Final = 50
"""Time between two looks of a draining node at what it still holds."""
WHY_CHARS_MAX: Final = 100
DRAINING_RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a node still answers for. A drain is over when `left` is empty."""

    requests: int = 0
    answers_unacknowledged: int = 0
    grants_received: int = 0
    grants_quarantined: int = 0
    """Also counted in `grants_received`. Their blocks end with the process, so they do not delay a drain."""
    grants_written: int = 0
    unacknowledged_writes: int = 0
    fetches_under_way: int = 0
    """As receiver and as owner."""

    def left(self) -> dict[str, int]:
        """What delays a drain, by name; without zeros."""
        counts: dict[str, int] = asdict(self)
        counts["grants_received"] -= counts.pop("grants_quarantined")
        return {what: count for what, count in counts.items() if count}


def node_draining(own: Incarnation) -> BatonError:
    """The error of a node that takes no new requests."""
    return BatonError(
        Reason.NODE_DRAINING,
        "This node takes no new requests: it is cordoned, draining or about to end.",
        retry_after_ms=DRAINING_RETRY_MS,
        metadata={"incarnation": f"{own:016x}"},
    )


def refused_by(error: BatonError, incarnation: Incarnation) -> bool:
    """Whether `error` says that this process takes no new requests, and not another one that it asked."""
    return error.reason is Reason.NODE_DRAINING and error.metadata.get("incarnation") == f"{incarnation:016x}"


class NodeDrain:
    """Cordon, drain and back, of one node; on its event loop."""

    def __init__(
        self,
        lifecycle: NodeLifecycle,
        *,
        clock: Clock,
        holds: Callable[[], Holdings],
        changed: Callable[[], None],
        lame_duck_ms: int = 0,
    ) -> None:
        """`holds` says what the node holds now. `changed` is called after every change of state. `lame_duck_ms` is how
        long a READY node that is to be drained takes requests still."""
        self._lifecycle = lifecycle
        self._clock = clock
        self._holds = holds
        self._changed = changed
        self._lame_duck_ms = lame_duck_ms
        self._drains_at_s = 0.0
        """When a LAME_DUCK is DRAINING."""
        self._stopping = False
        self._proving: asyncio.Task[None] | None = None

    @property
    def safe_to_delete(self) -> bool:
        """The drain is over, and the node still holds nothing."""
        return self._lifecycle.state is Lifecycle.DRAINED and not self._holds().left()

    def order(self, event: LifecycleEvent, why: str) -> None:
        """CORDON, UNCORDON, DRAIN or UNDRAIN; a repeat changes nothing. Returns at once; a drain goes on by itself.

        Raises BatonError BAD_LIFECYCLE if the state does not allow it, and for anything but DRAIN in a process that is
        stopping.
        """
        assert event not in (LifecycleEvent.LEAVE, LifecycleEvent.EMPTY)
        if self._stopping and event is not LifecycleEvent.DRAIN:
            raise BatonError(
                Reason.BAD_LIFECYCLE,
                f"Cannot {event.value}: the process is stopping. Start the node again instead. "
                f"So far: {self._lifecycle.story()}.",
                metadata={"state": self._lifecycle.state.name, "event": event.name},
            )
        if event is LifecycleEvent.DRAIN and self._lame_duck_ms and self._lifecycle.takes_requests:
            if self._lifecycle.ready:
                self._drains_at_s = self._clock.monotonic_s() + self._lame_duck_ms / 1e3
            event = LifecycleEvent.LEAVE
        self._handle(event, why)
        if self._goes_on() and (self._proving is None or self._proving.done()):
            self._proving = asyncio.create_task(self._prove(), name="drain")

    async def serve_until(self, stop: asyncio.Event, drain: asyncio.Event | None, *, drain_ms_max: int) -> None:
        """Return at `stop`, or after `drain` as soon as the node is empty or `drain_ms_max` has passed."""
        if drain is None:
            await stop.wait()
            return
        await first_of(stop.wait(), drain.wait())
        if stop.is_set():
            return
        self._stopping = True
        self.order(LifecycleEvent.DRAIN, "asked to end")
        if self._proving is not None:
            lame_duck_s = max(0.0, self._drains_at_s - self._clock.monotonic_s())
            limit_s = lame_duck_s + drain_ms_max / 1e3
            await first_of(stop.wait(), asyncio.wait([self._proving]), self._clock.sleep_s(limit_s))
        if self._lifecycle.state is not Lifecycle.DRAINED:
            left = ", ".join(f"{what}: {count}" for what, count in self._holds().left().items())
            log.warning("drain given up", limit_ms=drain_ms_max, stopped=stop.is_set(), left=left)

    async def close(self) -> None:
        """Idempotent."""
        await end_task(self._proving)

    def _handle(self, event: LifecycleEvent, why: str) -> None:
        before = self._lifecycle.state
        after = self._lifecycle.handle(event, now_s=self._clock.monotonic_s(), why=why[:WHY_CHARS_MAX])
        if after is not before:
            log.info("lifecycle", state=after.name, why=why[:WHY_CHARS_MAX])
            self._changed()

    def _goes_on(self) -> bool:
        """Whether the drain is not over, after a look at what it waits for."""
        lame_duck = self._lifecycle.state is Lifecycle.LAME_DUCK
        if lame_duck and self._clock.monotonic_s() >= self._drains_at_s:
            self._handle(LifecycleEvent.DRAIN, "the lame-duck time is over")
        if self._lifecycle.state is Lifecycle.DRAINING and not self._holds().left():
            self._handle(LifecycleEvent.EMPTY, "nothing is left")
        return self._lifecycle.state in (Lifecycle.LAME_DUCK, Lifecycle.DRAINING)

    async def _prove(self) -> None:
        while self._goes_on():
            await self._clock.sleep_s(PROOF_MS / 1e3)
