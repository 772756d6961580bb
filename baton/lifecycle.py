"""The life of a node, which the node owns: STARTING -> READY -> DRAINING -> DRAINED -> STOPPED, and CORDONED. A
router is a LAME_DUCK before it is DRAINING.

The state machine is pure. Only `install_signal_handlers` touches the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from types import FrameType
from typing import Final, Protocol

from baton.errors import BatonError, Reason

HISTORY_MAX: Final = 16
"""Changes of state that a node remembers for its errors."""


class Lifecycle(IntEnum):
    """Same names and numbers as baton.v1.Lifecycle."""

    STARTING = 1
    READY = 2
    CORDONED = 3
    """Takes nothing new and keeps what it has; can become READY again."""
    DRAINING = 4
    """Takes nothing new and finishes what it has; can become READY again until the process is stopping."""
    DRAINED = 5
    """Holds nothing, and has checked that."""
    STOPPED = 6
    LAME_DUCK = 7
    """Takes requests, but wants none: clients are to find other routers before it is DRAINING."""


class LifecycleEvent(Enum):
    STARTED = "started"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    LEAVE = "leave"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    EMPTY = "empty"  # no request, no grant, no unacknowledged outbound write
    STOP = "stop"


TRANSITIONS: Final[Mapping[tuple[Lifecycle, LifecycleEvent], Lifecycle]] = {
    (Lifecycle.STARTING, LifecycleEvent.STARTED): Lifecycle.READY,
    (Lifecycle.STARTING, LifecycleEvent.STOP): Lifecycle.STOPPED,
    (Lifecycle.READY, LifecycleEvent.CORDON): Lifecycle.CORDONED,
    (Lifecycle.READY, LifecycleEvent.UNCORDON): Lifecycle.READY,
    (Lifecycle.READY, LifecycleEvent.LEAVE): Lifecycle.LAME_DUCK,
    (Lifecycle.READY, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
    (Lifecycle.READY, LifecycleEvent.UNDRAIN): Lifecycle.READY,
    (Lifecycle.CORDONED, LifecycleEvent.CORDON): Lifecycle.CORDONED,
    (Lifecycle.CORDONED, LifecycleEvent.UNCORDON): Lifecycle.READY,
    (Lifecycle.CORDONED, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
    (Lifecycle.LAME_DUCK, LifecycleEvent.LEAVE): Lifecycle.LAME_DUCK,
    (Lifecycle.LAME_DUCK, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
    (Lifecycle.LAME_DUCK, LifecycleEvent.UNDRAIN): Lifecycle.READY,
    (Lifecycle.DRAINING, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
    (Lifecycle.DRAINING, LifecycleEvent.UNDRAIN): Lifecycle.READY,
    (Lifecycle.DRAINING, LifecycleEvent.EMPTY): Lifecycle.DRAINED,
    # The drain's time limit has passed: the owner gives up what is left before the process ends.
    (Lifecycle.DRAINING, LifecycleEvent.STOP): Lifecycle.STOPPED,
    (Lifecycle.DRAINED, LifecycleEvent.DRAIN): Lifecycle.DRAINED,
    (Lifecycle.DRAINED, LifecycleEvent.UNDRAIN): Lifecycle.READY,
    (Lifecycle.DRAINED, LifecycleEvent.STOP): Lifecycle.STOPPED,
    (Lifecycle.STOPPED, LifecycleEvent.STOP): Lifecycle.STOPPED,
}
"""All that may happen; anything else is an error. An event that changes nothing is allowed."""


class Readiness(Protocol):
    """What those who serve requests ask of a lifecycle: a node's own one, or the one that a worker is told of."""

    @property
    def ready(self) -> bool:
        """Whether new requests are to come here."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether those that come are served."""
        ...


class NodeLifecycle:
    """The state of one node, and its history."""

    def __init__(self, *, now_s: float) -> None:
        self._state = Lifecycle.STARTING
        self._since_s = now_s
        self._history: deque[tuple[float, Lifecycle, str]] = deque([(now_s, self._state, "")], maxlen=HISTORY_MAX)

    @property
    def state(self) -> Lifecycle:
        return self._state

    @property
    def ready(self) -> bool:
        """Whether new requests are to come here."""
        return self._state is Lifecycle.READY

    @property
    def takes_requests(self) -> bool:
        """Whether those that come are served."""
        return self._state in (Lifecycle.READY, Lifecycle.LAME_DUCK)

    @property
    def ended_empty(self) -> bool:
        """STOPPED, directly after DRAINED."""
        return [state for _, state, _ in self._history][-2:] == [Lifecycle.DRAINED, Lifecycle.STOPPED]

    def handle(self, event: LifecycleEvent, *, now_s: float, why: str = "") -> Lifecycle:
        """Apply `event` and return the new state. `story` shows `why` ("SIGTERM", "weights loaded").

        Raises BatonError BAD_LIFECYCLE, with nothing changed, if the table has no such transition.
        """
        new = TRANSITIONS.get((self._state, event))
        if new is None:
            possible = ", ".join(e.value for (state, e) in TRANSITIONS if state is self._state)
            raise BatonError(
                Reason.BAD_LIFECYCLE,
                f"Cannot {event.value}: the node is {self._state.name}, where only {possible} can follow. "
                f"So far: {self.story()}.",
                metadata={"state": self._state.name, "event": event.name},
            )
        if new is not self._state:
            self._state = new
            self._history.append((now_s, new, why))
        return new

    def story(self) -> str:
        """The changes so far: "STARTING, READY after 2.1 s (weights loaded)"."""
        parts = []
        for at_s, state, why in self._history:
            when = f" after {at_s - self._since_s:.1f} s" if state is not Lifecycle.STARTING else ""
            parts.append(f"{state.name}{when}" + (f" ({why})" if why else ""))
        return ", ".join(parts)


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop,
    on_stop: Callable[[signal.Signals], None],
    *,
    on_drain: Callable[[signal.Signals], None] | None = None,
) -> Callable[[], None]:
    """The first SIGINT or SIGTERM calls `on_stop` on the loop; a further one ends the process at once (130, 143).

    With `on_drain`, a first SIGTERM calls that instead, and a SIGINT after it still calls `on_stop`. Main thread only.
    A terminal sends Ctrl-C to every process of its foreground group: a parent that stops its children itself must start
    them in sessions of their own, or they get two signals. Returns the function that restores the previous handlers.
    """
    caught = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.getsignal(signum) for signum in caught}

    def end_at_once(*signums: signal.Signals) -> None:
        # A plain handler runs between any two bytecodes, even when the loop is stuck.
        for each in signums:
            loop.remove_signal_handler(each)
            signal.signal(each, _exit_now)

    def first(signum: signal.Signals) -> None:
        end_at_once(*caught)
        on_stop(signum)

    def drain(signum: signal.Signals) -> None:
        assert on_drain is not None
        end_at_once(signum)
        on_drain(signum)

    def restore() -> None:
        for signum in caught:
            loop.remove_signal_handler(signum)
            signal.signal(signum, before[signum])

    loop.add_signal_handler(signal.SIGINT, first, signal.SIGINT)
    loop.add_signal_handler(signal.SIGTERM, first if on_drain is None else drain, signal.SIGTERM)
    return restore


def _exit_now(signum: int, _: FrameType | None) -> None:
    os._exit(128 + signum)
