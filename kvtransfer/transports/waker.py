"""A descriptor that a thread sleeps on, for others to wake it."""

from __future__ import annotations

import os
import threading


class Waker:
    """Any number of calls wake the thread once."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._woken = False

    def wake(self) -> None:
        """From any thread."""
        with self._lock:
            if not self._woken:
                self._woken = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """The thread is awake: calls from now on wake it again."""
        with self._lock:
            if self._woken:
                self._woken = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
