"""Whether a process can listen at its address, and the error where it cannot."""

from __future__ import annotations

import asyncio
import errno
import socket

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason


async def check_can_bind(listen: str, *, setting: str = "listen") -> None:
    """Bind `listen` and let go of it: to fail before a long start rather than after it. `setting` is its key.

    Each address of its host: gRPC would be content with one of them, and names no reason if none.

    Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT.
    """
    host, port = split_endpoint(listen)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise _listen_refused(host, port, setting, f"the host is not known ({error.strerror})") from error
    refusals: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(host, port, setting) from error
            refusals.append(error)
    if len(refusals) == len(found):
        raise _listen_refused(host, port, setting, str(refusals[0].strerror).lower()) from refusals[0]


def port_in_use(host: str, port: int, setting: str) -> BatonError:
    return BatonError(
        Reason.PORT_IN_USE,
        f"Cannot listen on {join_endpoint(host, port)}: the port is in use. Stop the process that has it "
        f"(`ss -ltnp 'sport = :{port}'` shows it), or choose another port with {_flag(setting)}.",
        field=setting,
    )


def _listen_refused(host: str, port: int, setting: str, why: str) -> BatonError:
    return BatonError(
        Reason.LISTEN_REFUSED,
        f"Cannot listen on {join_endpoint(host, port)}: {why}. Choose an address of this machine and a port "
        f"that this user may bind, with {_flag(setting)}.",
        field=setting,
    )


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")
