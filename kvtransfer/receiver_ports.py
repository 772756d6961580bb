"""A node's receiving ports, one for each transport that it offers, seen as one.

A pair's epoch is one over all transports, so evidence about the pair is evidence from every port that it used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import (
    DataEndpoint,
    PairBeingFenced,
    ReceiverEvents,
    ReceiverPort,
    Seal,
    TransportName,
    WriteRanges,
)


class ReceiverPorts:
    """Passes calls to the ports and their events on to `events`; is itself the ports' `ReceiverEvents`.

    Control thread only. `add` every port before the first other call.
    """

    def __init__(self, events: ReceiverEvents) -> None:
        self._events = events
        self._ports: dict[TransportName, ReceiverPort] = {}
        self._closed_last: list[Callable[[], Awaitable[None]]] = []
        self._withdrawn: set[TransportName] = set()
        self._used: dict[Pair, set[TransportName]] = {}
        self._fences: dict[tuple[Pair, Epoch], dict[TransportName, str | None]] = {}

    def add(self, port: ReceiverPort) -> None:
        """Takes the port over: `close` closes it."""
        assert port.transport not in self._ports, port.transport
        self._ports[port.transport] = port

    def close_last(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have this called by `close`, after the ports: it may be called twice."""
        self._closed_last.append(close)

    def offer(self, transport: TransportName, works: bool) -> None:
        """Whether new links may use this transport; one whose device is lost is withdrawn until it is back."""
        (self._withdrawn.discard if works else self._withdrawn.add)(transport)

    @property
    def transports(self) -> tuple[TransportName, ...]:
        """Those that work at the moment."""
        return tuple(name for name in self._ports if name not in self._withdrawn)

    @property
    def withdrawn(self) -> tuple[TransportName, ...]:
        """Those that do not work at the moment, and will again when their device is back."""
        return tuple(name for name in self._ports if name in self._withdrawn)

    def describe(self) -> dict[TransportName, dict[str, object]]:
        """Counters and gauges of each port."""
        return {name: port.describe() for name, port in self._ports.items()}

    def expect(self, pair: Pair, epoch: Epoch, transport: TransportName) -> DataEndpoint:
        """See `ReceiverPort.expect`.

        Raises:
            PairBeingFenced: evidence about this epoch is still to come, from this port or another.
        """
        if any(fenced == pair and at >= epoch for fenced, at in self._fences):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        endpoint = self._ports[transport].expect(pair, epoch)
        self._used.setdefault(pair, set()).add(transport)
        return endpoint

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """See `ReceiverPort.allow`."""
        for port in self._ports.values():
            port.allow(pair, epoch, grant, ranges)

    def forbid(self, grant: GrantId) -> bool:
        """See `ReceiverPort.forbid`: False if any port has no evidence."""
        proved = [port.forbid(grant) for port in self._ports.values()]
        return all(proved)

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`: `writer_gone` comes once every port that the pair was expected on has evidence."""
        waits = self._fences.setdefault((pair, epoch), {})
        for transport in self._used.get(pair) or set(self._ports):
            if transport not in waits:
                waits[transport] = None
                self._ports[transport].fence(pair, epoch)

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self._events.seal_landed(pair, seal)

    def port_events(self, transport: TransportName) -> ReceiverEvents:
        """The `events` to make the port of this transport with."""
        return _PortEvents(self, transport)

    def writer_gone_from(self, transport: TransportName, pair: Pair, epoch: Epoch, evidence: str) -> None:
        """One port's evidence. Unasked (a dead writer, a lost connection) it makes the other ports fence as well."""
        waits = self._fences.setdefault((pair, epoch), {})
        waits[transport] = evidence
        self.fence(pair, epoch)
        if all(told is not None for told in waits.values()):
            del self._fences[pair, epoch]
            if len(waits) == 1:
                told = evidence
            else:
                told = "; ".join(f"{name.value}: {waits[name]}" for name in TransportName if name in waits)
            self._events.writer_gone(pair, epoch, told)

    def forget(self, pair: Pair) -> None:
        """The writer process is known to have ended and nothing of it is left."""
        self._used.pop(pair, None)

    async def close(self) -> None:
        """Close every port. No event is delivered any more."""
        for port in self._ports.values():
            await port.close()
        for close in self._closed_last:
            await close()


class _PortEvents:
    def __init__(self, ports: ReceiverPorts, transport: TransportName) -> None:
        self._ports = ports
        self._transport = transport

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self._ports.seal_landed(pair, seal)

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self._ports.writer_gone_from(self._transport, pair, epoch, evidence)
