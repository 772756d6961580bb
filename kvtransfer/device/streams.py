"""What the transfers need of a device's streams. CUDA's in `cuda_streams`; the tests have a simulator.

Events and streams are given back to the device that made them, and to no other: hence their types are open.

A stream runs what is queued on it in order; two streams run in any order but for what `wait` adds. Nothing here blocks.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from kvtransfer.transport import WriteOps

POLL_INTERVAL_S = 50e-6
"""Between two looks at the oldest event: short beside a layer, long beside the look."""


class DeviceError(Exception):
    """The device, or its driver, has refused; the text says what was asked and what to do."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Any thread; never blocks. What was queued before is visible then.

        Raises DeviceError: the device has failed. That is no evidence that what was queued has stopped writing.
        """


class DeviceStream(Protocol):
    def record(self) -> DeviceEvent:
        """The point behind all that is queued now."""

    def wait(self, event: Any) -> None:
        """What is queued from now on runs after `event`; the caller does not wait."""


class DeviceStreams(Protocol):
    """The streams of one device."""

    def current(self) -> DeviceStream:
        """The one that the calling thread computes on."""

    def side(self) -> DeviceStream:
        """A new one."""

    def copy(self, stream: Any, dst: Any, src: Any, ops: WriteOps) -> None:
        """Queue copies between two memories of the device, or one of them and pinned memory of the host; the arrays of
        `ops` may be reused at once. Raises DeviceError."""


def wait_for(event: DeviceEvent) -> None:
    """Block until the stream has passed it: for as long as the device takes. Raises DeviceError."""
    while not event.done():
        time.sleep(POLL_INTERVAL_S)
