"""Breaks the data connections of a running process from outside, as a fault of the kernel or the network would.

The descriptor is fetched with pidfd_getfd(2) and shut down: both ends see the end of the connection, and neither of
them had a hand in it. The process itself goes on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvtransfer.transport import TransportName
from kvtransfer.transports.shm import ADDRESS_PREFIX

_PIDFD_GETFD: Final = 438
"""The same number on every architecture."""
_LISTENS: Final = 0x10000
"""SO_ACCEPTCON in the Flags column of /proc/net/unix."""
_TCP_ESTABLISHED: Final = "01"
_TCP_LISTEN: Final = "0A"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def break_connections(pid: int, transport: TransportName, *, control_port: int) -> int:
    """Shut down every data connection that this receiver process has accepted; how many there were.

    `control_port` is the one of its gRPC server, which is left alone. Raises PermissionError where we may not trace the
    process.
    """
    sockets = dict(_sockets(pid))
    own = set(sockets.values())
    inodes = set(_shm_accepted() if transport is TransportName.SHM else _tcp_accepted(own, control_port))
    # All are fetched before the first is shut down: its end ends others, and their numbers go to new connections.
    with ExitStack() as fetched:
        found = [sock for fd, inode in sockets.items() if inode in inodes and (sock := _fetch(pid, fd)) is not None]
        for sock in found:
            fetched.enter_context(sock)
        for sock in found:
            with suppress(OSError):  # it has just ended by itself
                sock.shutdown(socket.SHUT_RDWR)
        return len(found)


def _shm_accepted() -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith(ADDRESS_PREFIX) and not int(fields[3], 16) & _LISTENS:
            yield fields[6]


def _tcp_accepted(own: set[str], control_port: int) -> Iterator[str]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows = [(int(f[1].rpartition(":")[2], 16), f[3], f[9]) for f in lines if f[9] in own]
    ports = {port for port, state, _ in rows if state == _TCP_LISTEN} - {control_port}
    return (inode for port, state, inode in rows if port in ports and state == _TCP_ESTABLISHED)


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    """Descriptors of the process that are sockets, each with its inode."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                yield int(name), target.removeprefix("socket:[").removesuffix("]")


def _fetch(pid: int, fd: int) -> socket.socket | None:
    """The process's socket as one of our own; None where it has just ended by itself."""
    pidfd = os.pidfd_open(pid)
    try:
        own_fd = _LIBC.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if own_fd < 0 and ctypes.get_errno() == errno.EBADF:
            return None
        if own_fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    return socket.socket(fileno=own_fd)


__all__ = ["break_connections"]
