"""What every receiving port does alike, however bytes get into its region: it listens, admits pairs, and counts."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, Generic, TypeVar

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import DataEndpoint, ReceiverEvents, TransportName, WriteRanges
from kvtransfer.transports.control_channel import RefusalReason
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.pair_fence import PortFences
from kvtransfer.transports.receiver_port import Acceptor, listen_on
from kvtransfer.transports.tcp_socket import tune
from kvtransfer.transports.words_connection import WordsConnection

LimitsT = TypeVar("LimitsT", bound=PortLimits)
ReasonT = TypeVar("ReasonT", bound=Enum)
ConnectionT = TypeVar("ConnectionT")
WordsT = TypeVar("WordsT", bound=WordsConnection)


class BasePort(ABC, Generic[LimitsT, ReasonT, ConnectionT]):
    """The part of `kvtransfer.transport.ReceiverPort` that no transport has for itself. Loop's thread."""

    transport: ClassVar[TransportName]

    def __init__(
        self,
        *,
        listener: socket.socket,
        address: str,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        limits: LimitsT,
        reasons: type[ReasonT],
    ) -> None:
        """Takes the listening socket over, and accepts from the loop's next turn on. `reasons` are the wire's to refuse
        with: those named in `NotAdmitted` and here are among them."""
        self.address = address
        self._events = events
        self._loop = loop
        self._randomness = randomness
        self._limits = limits
        self._reasons = reasons
        self._fences = PortFences(
            transport=self.transport, events=events, loop=loop, randomness=randomness, pairs_max=limits.pairs_max
        )
        self._connections: dict[int, ConnectionT] = {}
        self._connections_made = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[ReasonT] = Counter()
        self._closed = False
        self._acceptor = Acceptor(
            listener,
            loop=loop,
            admit=self._admit,
            paused=lambda: self._refused.update([reasons["DESCRIPTORS"]]),
            pause_ms=limits.accept_pause_ms,
        )

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        """See `ReceiverPort.expect`.

        Raises:
            PairBeingFenced: a fence of this epoch has not ended yet.
            TooManyPairs: `pairs_max` pairs are expected, connected or being fenced.
        """
        secret = self._fences.expect(pair, epoch)
        return DataEndpoint(transport=self.transport, address=self._address_told(), secret=secret, epoch=epoch)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Does nothing: a writer that has the region, or its key, is bounded by its own library alone."""

    def forbid(self, grant: GrantId) -> bool:
        """Does nothing; see `allow`."""
        del grant
        return True

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            "transport": self.transport.value,
            "address": self.address,
            "connections_made": self._connections_made,
            "fences_waiting": self._fences.waiting,
            "fences_ended": self._fences.ended,
            "refused": {reason.name: count for reason, count in self._refused.items()},
        }

    def _address_told(self) -> str:
        """`DataEndpoint.address`."""
        return self.address

    @abstractmethod
    def _admit(self, sock: socket.socket) -> None:
        """A new connection, which does not block; it is the port's."""


class ListeningPort(BasePort[LimitsT, ReasonT, WordsT]):
    """A port on tcp: for tcp's streams themselves, or for the words of rdma and ucx."""

    def __init__(
        self,
        *,
        listen: str,
        advertise_host: str | None,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        limits: LimitsT,
        reasons: type[ReasonT],
    ) -> None:
        """Listens at once. Writers are told `advertise_host` instead of the host in `listen`, where there is one.

        Raises:
            BatonError: BAD_ENDPOINT.
            OSError: the address cannot be listened on.
        """
        listener, address = listen_on(listen, advertise_host, backlog=limits.handshakes_max)
        super().__init__(
            listener=listener,
            address=address,
            events=events,
            loop=loop,
            randomness=randomness,
            limits=limits,
            reasons=reasons,
        )

    def _admit(self, sock: socket.socket) -> None:
        handshaking = sum(map(self._handshaking, self._connections.values()))
        self._connections_made += 1
        connection = self._connection(self._connections_made, sock)
        self._connections[self._connections_made] = connection
        if handshaking >= self._limits.handshakes_max:
            self._refuse(connection, self._reasons["HANDSHAKES_MAX"])
            return
        try:
            tune(sock)
        except OSError:
            self._drop(connection)  # reset before it was looked at
            return
        self._loop.add_reader(sock, self._read, connection)
        connection.handshake_timer = self._loop.call_later(
            self._limits.handshake_ms_max / 1000, self._handshake_late, connection
        )

    def _secret(self, connection: WordsT, pair: Pair, epoch: Epoch) -> bytes | None:
        """The secret to be proved; None: the connection has been refused. To be asked with the HELLO, and again with
        the ANSWER: a fence, or a newer epoch, may have come in between."""
        secret = self._fences.secret(pair, epoch)
        if isinstance(secret, RefusalReason):
            self._refuse(connection, self._reasons[secret.name])
            return None
        return secret

    def _handshake_late(self, connection: WordsT) -> None:
        self._refuse(connection, self._reasons["DEADLINE"])

    @abstractmethod
    def _connection(self, number: int, sock: socket.socket) -> WordsT: ...

    @abstractmethod
    def _handshaking(self, connection: WordsT) -> bool:
        """It has not proved itself."""

    @abstractmethod
    def _read(self, connection: WordsT) -> None:
        """Something has come."""

    @abstractmethod
    def _refuse(self, connection: WordsT, reason: ReasonT) -> None:
        """Count, tell the peer, close."""

    @abstractmethod
    def _drop(self, connection: WordsT) -> None:
        """The end of it, without a word."""
