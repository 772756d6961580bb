"""Limits that the ports and links of all transports share. They are fixed; tests pass others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from baton.errors import check_positive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_limits(limits: DataclassInstance, *, but: Collection[str] = ()) -> None:
    """Every whole number must be positive, except those named in `but`. Raises InvalidField."""
    numbers = [each.name for each in fields(limits) if isinstance(getattr(limits, each.name), int)]
    check_positive(limits, *(name for name in numbers if name not in but))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    """Limits of one receiving port. A connection counts until there is evidence for its end, not until EOF."""

    connections_max: int = 256
    """Connections at a time that have proved themselves. The setting `receiver.connections_max`."""
    pairs_max: int = 1024
    """Writer processes expected, connected or being fenced. The setting `receiver.pairs_max`."""
    handshakes_max: int = 64
    """Connections at a time that have not proved themselves yet: strangers can only fill this."""
    handshake_ms_max: int = 5000
    """How long a handshake may take."""
    accept_pause_ms: int = 100
    """How long no connection is accepted after the process ran out of file descriptors."""

    def __post_init__(self) -> None:
        check_limits(self)


PORT_LIMITS: Final = PortLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Limits of one writer's link."""

    connect_ms_max: int = 5000
    """How long connecting and the handshake may take."""
    seals_waiting_max: int = 4096
    """Seals that wait for a receiver that does not take them."""
    drain_ms_max: int = 2000
    """How long writes of an abandoned grant may make no progress before the link ends."""
    bye_ms_max: int = 2000
    """How long closing waits for the receiver to take what is on its way. On shm: how long it tries to say BYE."""

    def __post_init__(self) -> None:
        check_limits(self)


LINK_LIMITS: Final = LinkLimits()
