"""A conversation as the terminal keeps it, and what a line that the user types means. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from batonpb import inference_pb2

MARK: Final = "/"
"""A line that begins with it is an order to the command; twice, and it is a message that begins with it."""


class Order(Enum):
    """What a line orders."""

    HELP = "help"
    RESET = "reset"
    SYSTEM = "system"
    STATS = "stats"
    EXIT = "exit"


ORDERS_HELP: Final = (
    "/reset        begin again; the system message stays\n"
    "/system TEXT  set the system message; without TEXT there is none\n"
    "/stats        what happened to the last request\n"
    "/help         this list\n"
    "/exit         end (or Ctrl-D)\n"
    "//...         a message that begins with /\n"
    "Ctrl-C stops an answer and keeps the conversation; a second one ends it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of input: an order with its text, or a message to the model (`order` None)."""

    order: Order | None
    text: str


class UnknownOrder(ValueError):
    """The line orders something that there is not; the message says so."""


def parse_line(line: str) -> Line | None:
    """None for a line with nothing in it. Raises UnknownOrder."""
    text = line.strip()
    if not text:
        return None
    if text.startswith(MARK * 2):
        return Line(order=None, text=text.removeprefix(MARK))
    if not text.startswith(MARK):
        return Line(order=None, text=text)
    word, _, rest = text.removeprefix(MARK).partition(" ")
    if word not in {order.value for order in Order}:
        raise UnknownOrder(f"There is no {MARK}{word[:40]}; {MARK}help lists what there is.")
    return Line(order=Order(word), text=rest.strip())


class Conversation:
    """The system message, and the turns that were answered. Bounded by the model's context, which the router checks."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """Empty: none."""
        self._turns: list[tuple[str, str]] = []

    def __len__(self) -> int:
        """Turns."""
        return len(self._turns)

    def messages(self, said: str) -> inference_pb2.Chat:
        """All of it, with `said` as the user's next message."""
        chat = inference_pb2.Chat()
        if self.system:
            chat.messages.add(role="system", content=self.system)
        for user, assistant in self._turns:
            chat.messages.add(role="user", content=user)
            chat.messages.add(role="assistant", content=assistant)
        chat.messages.add(role="user", content=said)
        return chat

    def keep(self, said: str, answer: str) -> None:
        """The turn belongs to the conversation from now on."""
        self._turns.append((said, answer))

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns.clear()
