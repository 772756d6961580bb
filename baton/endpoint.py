"""Addresses: `host:port` as text, as in configuration and node records, or a Redis server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

from baton.errors import BatonError, Reason

PORT_MAX: Final = 65535
REDIS_PORT: Final = 6379
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A Redis server and its login. As text it has no password."""

    host: str
    port: int = REDIS_PORT
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: Mapping[str, Any] = field(default_factory=dict)
    """Options by the names that the `redis` package gives them."""

    def __str__(self) -> str:
        return f"redis{'s' if self.tls else ''}://{join_endpoint(self.host, self.port)}/{self.database}"


def split_endpoint(text: str) -> tuple[str, int]:
    """Host (an IPv6 address without its brackets) and port of `text`. Raises BatonError BAD_ENDPOINT."""
    if "://" in text:
        raise _bad(text, "expected host:port alone, as in 127.0.0.1:7000, and nothing like http:// before it")
    host, colon, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _bad(text, "an IPv6 address needs brackets, as in [::1]:7000")
    if not colon or not host or any(c.isspace() or c in "/[]" for c in host):
        raise _bad(text, "expected host:port, as in 127.0.0.1:7000")
    if not re.fullmatch("[0-9]{1,5}", port_text) or int(port_text) > PORT_MAX:
        raise _bad(text, f"the port must be a number from 0 to {PORT_MAX}")
    return host, int(port_text)


def join_endpoint(host: str, port: int) -> str:
    """The inverse of `split_endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_reachable(text: str) -> None:
    """Refuse an endpoint that peers cannot call: a wildcard address or port 0. Raises BatonError BAD_ENDPOINT."""
    host, port = split_endpoint(text)
    if host in _WILDCARDS:
        raise _bad(text, "a wildcard address is for listening; advertise an address that the other nodes can reach")
    if port == 0:
        raise _bad(text, "port 0 is for listening; advertise the port that was bound")


def from_here(text: str) -> str:
    """The address at which this machine reaches what listens at `text`; for a wildcard address, the loopback."""
    host, port = split_endpoint(text)
    if host not in _WILDCARDS:
        return text
    return join_endpoint("::1" if ":" in host else "127.0.0.1", port)


def source_of(host: str) -> str:
    """What counts as one peer in limits: an IPv4 address, or the /64 of an IPv6 address, which one peer may own."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def is_trusted(address: Address, proxies: Sequence[Network]) -> bool:
    return any(address in network for network in proxies)


def parse_address(text: str) -> Address | None:
    """Also with a port, and in brackets, as proxies write it. None: this is no address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_loopback(text: str) -> bool:
    """Whether what is sent to this endpoint stays on this machine, by its address alone."""
    host, _ = split_endpoint(text)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bad(text: str, why: str) -> BatonError:
    return BatonError(Reason.BAD_ENDPOINT, f"'{text}' is not a usable endpoint: {why}.", field="endpoint")
