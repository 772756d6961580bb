"""Failpoints: where in a request's life a fault strikes, and how the strike is told to the process that gets there.

The test writes one *armed* file. The process in which the marked request reaches the point claims the file by
renaming it, which one process alone can do, says when, and strikes: by a signal, or by asking the test to do it and
waiting until it has. So a fault comes once, exactly there, and nobody sleeps to hit it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

ARMED_ENV: Final = "BATON_TESTS_ARMED"
ASK_S_MAX: Final = 120.0
"""How long a node waits for the test to strike, when the test has died."""


class Failpoint(Enum):
    """In the order of a request's life."""

    RESERVE_SENT = "reserve-sent"
    """Reserve has arrived; the decode node has not seen it."""
    RESERVED = "reserved"
    """Granted; the answer is on its way."""
    LAYER = "layer"
    """One layer's records have been posted, others are to come. On the engine's thread."""
    SEALED = "sealed"
    """The seal has been posted behind the last record."""
    LANDED = "landed"
    """Its seal is being read: all its records lie in the decode node's region."""
    COMMIT_SENT = "commit-sent"
    """Commit has arrived; the decode node has not seen it."""
    COMMITTED = "committed"
    """Commit and seals are there; the request has not run yet."""
    DECODING = "decoding"
    """In the middle of the answer."""
    FINISHED = "finished"
    """The last token has been sampled; no router has it."""
    FORGET = "forget"
    """The client has the whole answer and has said so; the router has not seen it."""
    ATTACH = "attach"
    """A client has asked a router to go on with the answer; the router has not seen it."""
    TAKE_OVER = "take-over"
    """That router asks the decode node, which has not seen it."""
    TAKEN_OVER = "taken-over"
    """The decode node has said yes; the answer is on its way."""
    FETCH_GRANTED = "granted"
    """A fetch of the prompt's leading blocks is granted; the answer is on its way to their owner."""
    FETCH_LAYER = "fetch-layer"
    """The owner has posted one layer's records of it, others are to come."""
    FETCH_SEAL = "seal"
    """All records are written; the owner is about to post the seal."""
    FETCH_COMMIT_SENT = "fetch-commit-sent"
    """Its Commit has arrived; the receiver has not seen it."""


SIGNAL_POINTS: Final = (
    Failpoint.RESERVE_SENT,
    Failpoint.RESERVED,
    Failpoint.LAYER,
    Failpoint.SEALED,
    Failpoint.COMMIT_SENT,
    Failpoint.COMMITTED,
    Failpoint.DECODING,
)
"""Where all processes are killed and stopped. Landed is hardly apart from the points around it, to a process."""
END_POINTS: Final = (Failpoint.FINISHED, Failpoint.FORGET)
NTH: Final = {Failpoint.LAYER: 6, Failpoint.DECODING: 20, Failpoint.FETCH_LAYER: 2}
"""Second layer, of the second chunk where it is computed; twentieth token behind the first. Elsewhere the
first time."""


class Side(Enum):
    """Whom to strike, as seen from the request that is hit: which half of it a mixed node has is of the request."""

    PREFILL = "prefill"
    """The node that reads the prompt."""
    DECODE = "decode"
    """The node that writes the answer."""
    ROUTER = "router"
    """The one that serves it."""
    DIRECTORY = "directory"
    OWNER = "owner"
    """The node that a fetch takes KV from."""
    RECEIVER = "receiver"
    """The one that fetches it."""
    CLIENT = "client"
    """Whose request it is: never struck, but an end of links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who serves a request, as far as the process knows that it has reached."""

    writer: str
    """The node that read the request's prompt; of a fetch, the owner."""
    receiver: str
    """The one that writes its answer: the same where it is kept. Of a fetch, the node that asked for it."""
    router: str
    """A name, or an incarnation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One process, and the signal for it; 0 where only the test strikes."""

    side: Side
    signum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What is armed."""

    point: Failpoint
    nth: int
    """At the nth time that the request gets there."""
    mark: int
    """First token of the prompt of the request to hit."""
    hits: tuple[Hit, ...]
    """All at once."""
    pids: Mapping[str, int]
    """Of all processes, by name."""
    routers: Mapping[str, str]
    """Their names, by incarnation."""
    ask_port: int = 0
    """Where the test listens that strikes first, or 0."""
    flip: bool = False
    """Whoever reaches it flips a bit of one of the request's records."""
    then: Strike | None = None
    """Armed before this one strikes. Its hits are the process in which it is reached, and ones never started again."""
    number: int = 0
    """How many came before this one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=lambda value: value.value)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        hits = tuple(Hit(side=Side(hit["side"]), signum=hit["signum"]) for hit in fields["hits"])
        then = cls.from_fields(fields["then"]) if fields["then"] else None
        return cls(**{**fields, "point": Failpoint(fields["point"]), "hits": hits, "then": then})


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What became of it."""

    targets: list[str]
    """In the order of the hits."""
    at_s: float
    """On the machine's monotonic clock, just before the blow."""
    writer: str
    receiver: str
    router: str

    @property
    def target(self) -> str:
        return self.targets[0]


class Trigger:
    """The test's end: files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.armed = folder / "armed.json"

    def arm(self, strike: Strike) -> None:
        self.disarm()
        _write(self.armed, strike.to_json())

    def disarm(self) -> None:
        for path in (self.armed, *self.armed.parent.glob("struck-*.json")):
            path.unlink(missing_ok=True)

    def struck(self, number: int = 0) -> Struck | None:
        """By the first strike, or the one after so many. None while nobody has got there."""
        try:
            return Struck(**json.loads(_struck_file(self.armed, number).read_text()))
        except FileNotFoundError:
            return None


class Failpoints:
    """A node's end. `reach` may be called on any thread; each point is reached on one thread only."""

    def __init__(self, armed: Path, *, own_name: str) -> None:
        self._armed = armed
        self._own_name = own_name
        self._counts: Counter[tuple[Failpoint, str]] = Counter()

    def reach(self, point: Failpoint, *, mark: int, request: str, ends: Ends) -> bool:
        """The request whose prompt begins with `mark` is here. True: the caller is to flip a bit."""
        try:
            fields = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return False
        strike = Strike.from_fields(fields)
        if (point, mark) != (strike.point, strike.mark):
            return False
        self._counts[point, request] += 1
        return self._counts[point, request] == strike.nth and self._claim(strike, ends)

    def _claim(self, strike: Strike, ends: Ends) -> bool:
        """Strike, if nobody has. True where that is the caller's to do."""
        claimed = self._armed.with_name(f"claimed-{os.getpid()}.json")
        try:
            os.rename(self._armed, claimed)
        except FileNotFoundError:
            return False  # another process was first
        own = self._own_name
        ends = replace(ends, router=strike.routers.get(ends.router, ends.router))
        nodes = {Side.PREFILL: ends.writer, Side.DECODE: ends.receiver, Side.ROUTER: ends.router}
        nodes |= {Side.OWNER: ends.writer, Side.RECEIVER: ends.receiver}
        targets = [nodes.get(hit.side) or hit.side.value for hit in strike.hits]
        struck = Struck(targets=targets, at_s=time.monotonic(), **asdict(ends))
        _write(_struck_file(self._armed, strike.number), json.dumps(asdict(struck)))
        claimed.unlink()
        if strike.then is not None:
            _write(self._armed, replace(strike.then, number=strike.number + 1).to_json())
        if strike.ask_port:
            _ask(strike.ask_port)
        blows = [
            (os.getpid() if target == own else strike.pids[target], hit.signum)
            for hit, target in zip(strike.hits, targets, strict=True)
            if hit.signum
        ]
        for pid, signum in sorted(blows, key=lambda blow: blow[0] == os.getpid()):  # itself last
            os.kill(pid, signal.Signals(signum))
        return strike.flip


def _struck_file(armed: Path, number: int) -> Path:
    return armed.with_name(f"struck-{number}.json")


def _ask(port: int) -> None:
    """Returns when the test has closed the connection, having done it."""
    with socket.create_connection(("127.0.0.1", port), timeout=ASK_S_MAX) as connection:
        connection.recv(1)


def _write(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    os.rename(unfinished, path)
