"""Posting what a device is still computing, over a transport that no stream can order: an RDMA card reads at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from baton.log import get_log
from kvtransfer.device.driver import POLL_INTERVAL_S, DeviceEvent, DeviceStreams
from kvtransfer.transport import DeviceError

log = get_log("device")


class EventPoster:
    """One thread that waits for points in a device's streams. A node has one for all its links, and closes it last."""

    def __init__(self, *, streams: DeviceStreams, name: str, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        """Starts the thread."""
        self._streams = streams
        self._poll_interval_s = poll_interval_s
        self._wake = threading.Condition()
        self._waiting: deque[tuple[DeviceEvent, Callable[[bool], None]]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._poll, name=name, daemon=True)
        self._thread.start()

    def after(self, then: Callable[[bool], None]) -> None:
        """Call `then` once the device has passed what the calling thread's stream has queued so far. Any thread;
        returns at once, and how many wait is for the caller to bound.

        In the order of these calls, on the poster's thread: with True; with False, at any place in that order and on
        any thread, if the device has failed or the poster is closed. `then` neither waits nor raises.

        Raises DeviceError.
        """
        event = self._streams.current().record()
        with self._wake:
            if not self._stopped:
                self._waiting.append((event, then))
                self._wake.notify()
                return
        then(False)

    def close(self) -> None:
        """Wait for nothing any more; the thread has ended when this returns. Idempotent."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _poll(self) -> None:
        try:
            while (oldest := self._oldest()) is not None:
                event, then = oldest
                while not event.done():
                    with self._wake:
                        if self._stopped:
                            return
                        self._wake.wait(self._poll_interval_s)
                with self._wake:
                    self._waiting.popleft()
                then(True)
        except DeviceError as error:
            log.error("the device failed: nothing that it computes is sent any more", reason=str(error))
        finally:
            with self._wake:
                self._stopped = True
                left, self._waiting = self._waiting, deque()
            for _, then in left:
                then(False)

    def _oldest(self) -> tuple[DeviceEvent, Callable[[bool], None]] | None:
        with self._wake:
            while not self._waiting and not self._stopped:
                self._wake.wait()
            return None if self._stopped else self._waiting[0]
