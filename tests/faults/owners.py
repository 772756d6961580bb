"""Whose a TCP connection is.

The kernel is asked about one connection at a time: reading the tables of a busy machine takes so long that peers which
connect again and again would leave no time for anything else."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

OWNER_UNKNOWN: Final = ""
_SOCK_DIAG: Final = 4
"""NETLINK_SOCK_DIAG, see sock_diag(7)."""
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_ERROR: Final = 2
"""NLMSG_ERROR, see netlink(7)."""
_HEADER: Final = struct.Struct("=IHHII")
_WHICH: Final = struct.Struct("=BBBBI")
_ID: Final = struct.Struct("!HH16s16s")
_REST: Final = struct.Struct("=III")
_INODE_AT: Final = _HEADER.size + 4 + _ID.size + _REST.size + 16
_ANY: Final = 0xFFFFFFFF


def owner_of(client: tuple[str, int], server: tuple[str, int], pids: Mapping[str, int]) -> str:
    """Which of these processes has the connection of `client` to `server`, both (IPv4 address, port), at its end."""
    inode = _inode(client, server)
    if inode is None:
        inode = _inode_in_tables(client[1], server[1])
    target = f"socket:[{inode}]"
    return next((name for name, pid in pids.items() if inode and _has(pid, target)), OWNER_UNKNOWN)


def _inode(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """0 where there is no such connection (any more); None where the kernel does not say."""
    ends = [socket.inet_aton(end[0]).ljust(16, b"\0") for end in (client, server)]
    body = _WHICH.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY) + _ID.pack(client[1], server[1], *ends)
    body += _REST.pack(0, _ANY, _ANY)
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as diag:
        diag.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = diag.recv(4096)
        kind = _HEADER.unpack_from(answer)[1]
        if kind == _BY_FAMILY:
            (inode,) = struct.unpack_from("=I", answer, _INODE_AT)
            return int(inode)
        if kind == _ERROR and struct.unpack_from("=i", answer, _HEADER.size)[0] == -errno.ENOENT:
            return 0
    return None


def _inode_in_tables(*ports: int) -> int:
    """For a kernel without sock_diag. gRPC's sockets are of IPv6 where the machine has it, for IPv4 addresses too."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            found = tuple(int(end.rpartition(":")[2], 16) for end in fields[1:3])
            if found == ports and int(fields[9]):  # 0: of a connection that is over
                return int(fields[9])
    return 0


def _has(pid: int, target: str) -> bool:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError):
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                if os.readlink(f"{folder}/{fd}") == target:
                    return True
    return False
