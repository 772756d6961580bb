"""Listening sockets of our processes, and why there is none."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Final

from baton.config import flag_name
from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason

Found = tuple[int, int, int, str, tuple[object, ...]]
"""An address as getaddrinfo says it."""

_V4_WILDCARD: Final = "0.0.0.0"


async def check_can_bind(listen: str, *, setting: str = "listen") -> None:
    """Bind `listen` and let go of it, so that a start fails early. `setting` is the key to name in the error.

    It tries each address of the host: gRPC is content with one of them, and gives no reason if it gets none.

    Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT.
    """
    host, port = split_endpoint(listen)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise _unknown_host(listen, setting, error) from error
    for bound in _bind_all(found, listen, setting):
        bound.close()


def bind_all(listen: str, *, setting: str) -> list[socket.socket]:
    """A socket bound to each address of the host, all to one port; a wildcard takes IPv4 and IPv6, as it does for gRPC.
    Nobody listens yet. May look the host's name up.

    Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT.
    """
    host, port = split_endpoint(listen)
    if host == _V4_WILDCARD and socket.has_dualstack_ipv6():
        host = "::"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise _unknown_host(listen, setting, error) from error
    return _bind_all(found, listen, setting)


def _bind_all(found: Sequence[Found], listen: str, setting: str) -> list[socket.socket]:
    bound: list[socket.socket] = []
    refusals: list[OSError] = []
    for family, kind, protocol, _, address in found:
        # Port 0 is whatever the first address gets.
        port = address[1] or (bound[0].getsockname()[1] if bound else 0)
        each = socket.socket(family, kind, protocol)
        try:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
            each.bind((address[0], port, *address[2:]))
            bound.append(each)
        except OSError as error:
            each.close()
            refusals.append(error)
            if error.errno == errno.EADDRINUSE:
                for other in bound:
                    other.close()
                raise port_in_use(listen, setting) from error
    if not bound:
        raise _refused(listen, setting, str(refusals[0].strerror).lower()) from refusals[0]
    return bound


def port_in_use(listen: str, setting: str) -> BatonError:
    _, port = split_endpoint(listen)
    return BatonError(
        Reason.PORT_IN_USE,
        f"Cannot listen on {listen}: the port is in use. Stop the process that has it "
        f"(`ss -ltnp 'sport = :{port}'` shows it), or choose another port with {flag_name(setting)}.",
        field=setting,
    )


def _unknown_host(listen: str, setting: str, error: socket.gaierror) -> BatonError:
    return _refused(listen, setting, f"the host is not known ({error.strerror})")


def _refused(listen: str, setting: str, why: str) -> BatonError:
    return BatonError(
        Reason.LISTEN_REFUSED,
        f"Cannot listen on {listen}: {why}. Choose an address of this machine and a port that this user may bind, "
        f"with {flag_name(setting)}.",
        field=setting,
    )
