"""Messages that change nobody but the network: sent at once, so that no state is visited for them alone."""

from __future__ import annotations

from tests.explorer.bounds import Violation
from tests.explorer.messages import Messages
from tests.explorer.receiver_part import ReceiverInfo, ReceiverPart
from tests.explorer.writer_part import WriterInfo, WriterPart


class Network:
    """Completes the set of messages of a state."""

    def __init__(self, messages: Messages, receivers: ReceiverPart, writers: WriterPart, *, merges: bool) -> None:
        self._messages = messages
        self._receivers = receivers
        self._writers = writers
        self._merges = merges
        self._known: dict[tuple[int, int, int], int] = {}

    def completed(self, receiver: ReceiverInfo, writer: WriterInfo, net: int) -> int:
        """The network without what matters no more; with `merges`, also with every message added that a step sends
        which has no other effect.

        What is possible with fewer messages in the network is possible with more: each may arrive at any time, or
        never. So the states before such a step need no visit of their own.
        """
        asked = (receiver.id, writer.id, net)
        known = self._known.get(asked)
        if known is None:
            known = self._known[asked] = self._complete(receiver, writer, net)
        return known

    def _complete(self, receiver: ReceiverInfo, writer: WriterInfo, net: int) -> int:
        while True:
            before = net = self._minded(receiver, writer, net)
            if not self._merges:
                return net
            for event in writer.unanswered:
                net |= self._sent_by_writer(writer, event)
            rest = before
            while rest:
                bit = rest & -rest
                rest ^= bit
                number = bit.bit_length() - 1
                if self._messages.items[number].to_receiver:
                    net |= self._sent_by_receiver(receiver, number)
                else:
                    net |= self._sent_by_writer(writer, number)
            net = self._minded(receiver, writer, net)
            if net == before:
                return net

    def _minded(self, receiver: ReceiverInfo, writer: WriterInfo, net: int) -> int:
        minds = self._receivers.minds(receiver) | self._writers.minds(writer)
        return net & minds & writer.alive

    def _sent_by_receiver(self, receiver: ReceiverInfo, event: int) -> int:
        """What it sends if nothing else comes of the event. One that breaks an invariant is a step to be seen."""
        try:
            effect = self._receivers.effect(receiver, event)
        except Violation:
            return 0
        return effect.sent if effect.to is receiver else 0

    def _sent_by_writer(self, writer: WriterInfo, event: int) -> int:
        try:
            effect = self._writers.effect(writer, event)
        except Violation:
            return 0
        return effect.sent if effect.to is writer else 0
