"""Who reaches whom, and how fast. Links between nodes can be slow, lossy, or cut in one direction.

A link carries what gRPC and data connections put on it. It never loses one message of a connection, since tcp does not:
what is sent into a cut waits there until the cut heals, and connections may break; what is "lost" breaks its call.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.loop import Handle, ProcessLoop, ProcessState, World

if TYPE_CHECKING:
    from tests.sim.rpc import SimServer

_STAMP = struct.Struct("<dII")
CLIENT = "client-"
"""What the names of clients begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    delay_s_min: float = 0.000_2
    delay_s_max: float = 0.001_5
    client_s: float = 0.0
    """How much farther away clients are."""
    resent_s_max: float = 0.05
    """How late at most what waited in a cut comes after it has healed."""


@dataclass(slots=True)
class Link:
    """One direction between two nodes, by name."""

    cut: bool = False
    cuts: int = 0
    """How often it has been cut so far."""
    delay_s_max: float = 0.0
    """While above 0: messages take up to so long, and overtake each other."""
    loss: float = 0.0
    """Probability that a call on it breaks: before it is served, or after."""
    duplication: float = 0.0
    """Probability that a call is served twice (those that may be)."""
    far_s: float = 0.0
    floor_s: float = 0.0
    held: list[Handle] | None = None

    @property
    def calm(self) -> bool:
        return not self.cut and self.delay_s_max == self.loss == self.duplication == 0.0


class Network:
    """Links by (sender, receiver), and the servers that listen. Draws from a generator of its own."""

    def __init__(self, world: World, times: NetworkTimes, *, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.servers: dict[str, SimServer] = {}
        """By endpoint."""
        self.data_ports: dict[str, Any] = {}
        """By address (`data.SimPort`)."""
        self.messages = 0
        self.digest = 0
        """Checksum over every message: sender, receiver, time and content. Two runs agree in it or differ."""
        self._times = times
        self._spread_s = times.delay_s_max - times.delay_s_min
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, sender: str, receiver: str) -> Link:
        link = self._links.get((sender, receiver))
        if link is None:
            link = self._links[sender, receiver] = Link()
            if CLIENT in (sender[: len(CLIENT)], receiver[: len(CLIENT)]):
                link.far_s = self._times.client_s
        return link

    def reaches(self, sender: ProcessLoop, receiver: ProcessLoop) -> bool:
        """Both directions are open and both processes run: a new connection can be made."""
        return (
            sender.state is receiver.state is ProcessState.RUNNING
            and not self.link(sender.name, receiver.name).cut
            and not self.link(receiver.name, sender.name).cut
        )

    def send(
        self,
        sender: ProcessLoop,
        receiver: ProcessLoop,
        not_before_s: float,
        callback: Callable[..., object],
        *args: Any,
    ) -> float:
        """Call back on the receiver's loop when the message arrives; returns that time, or the earliest one known.

        `not_before_s` keeps the order on one stream: it does not arrive before what was sent earlier there.
        """
        if sender.state is ProcessState.DEAD:
            return not_before_s
        world, rng = self.world, self.rng
        self.messages += 1
        link = self.link(sender.name, receiver.name)
        handle = Handle(receiver, callback, args)
        if link.cut:
            if link.held is None:
                link.held = []
            link.held.append(handle)
            return not_before_s
        delay_s = self._times.delay_s_min + self._spread_s * rng.random() + link.far_s
        if link.delay_s_max > 0:
            delay_s += link.delay_s_max * rng.random()
        at_s = world.now_s + delay_s
        if at_s < not_before_s:
            at_s = not_before_s
        if at_s < link.floor_s:
            at_s = link.floor_s
        world.schedule(at_s, handle)
        return at_s

    def note(self, sender: ProcessLoop, receiver: ProcessLoop, data: bytes) -> None:
        """Enter content into the digest."""
        stamp = _STAMP.pack(self.world.now_s, sender.mark, receiver.mark)
        self.digest = zlib.crc32(data, zlib.crc32(stamp, self.digest))

    def cut(self, sender: str, receiver: str) -> None:
        link = self.link(sender, receiver)
        if not link.cut:
            link.cut = True
            link.cuts += 1

    def heal(self, sender: str, receiver: str) -> None:
        """What waited in the cut is sent again, in order."""
        link = self.link(sender, receiver)
        if not link.cut:
            return
        link.cut = False
        held, link.held = link.held or [], None
        at_s = self.world.now_s + self._times.resent_s_max * self.rng.random()
        for handle in held:
            self.world.schedule(at_s, handle)
        link.floor_s = at_s if held else link.floor_s

    def calm(self) -> None:
        """Heal everything."""
        for (sender, receiver), link in list(self._links.items()):
            self.heal(sender, receiver)
            link.delay_s_max = link.loss = link.duplication = 0.0
