"""Names for everything that can happen: control messages get a bit of the network's mask, events a number.

The network is the set of all control messages ever sent. Any of them may arrive at any time, any number of times, or
never: that is loss, duplication, reordering and delay without a bound on the messages in flight. A message leaves the
set only when no delivery of it can change anything any more (see `minds` of the two parts), so nothing is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.receiver import ReceiverEvent
from kvtransfer.protocol.writer import WriterEvent


@dataclass(frozen=True, slots=True)
class Message:
    """`writer` is the incarnation of the writer that sent it or that it is for."""

    to_receiver: bool
    writer: int
    event: ReceiverEvent | WriterEvent


class Messages:
    """Interns messages (bits 0, 1, ...) and local events (-1, -2, ...). Both kinds of number name an event."""

    def __init__(self) -> None:
        self.items: list[Message] = []
        self._bits: dict[Message, int] = {}
        self._local: list[ReceiverEvent | WriterEvent] = []
        self._local_numbers: dict[ReceiverEvent | WriterEvent, int] = {}

    def bit(self, message: Message) -> int:
        number = self._bits.get(message)
        if number is None:
            number = self._bits[message] = len(self.items)
            self.items.append(message)
        return 1 << number

    def intern(self, event: ReceiverEvent | WriterEvent) -> int:
        number = self._local_numbers.get(event)
        if number is None:
            self._local.append(event)
            number = self._local_numbers[event] = -len(self._local)
        return number

    def event(self, number: int) -> ReceiverEvent | WriterEvent:
        return self.items[number].event if number >= 0 else self._local[-number - 1]
