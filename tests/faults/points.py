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
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

ARMED_ENV: Final = "FAULTS_ARMED_FILE"
ASK_S_MAX: Final = 30.0
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


SIGNAL_POINTS: Final = tuple(point for point in Failpoint if point is not Failpoint.LANDED)
"""Where processes are killed and stopped. Landed is hardly apart from the points around it, to a process."""


class Side(Enum):
    """Whom to strike, as seen from the request that is hit. The value begins the name of such a process."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    DIRECTORY = "directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What is armed. Exactly one of `signum`, `ask_port` and `flip` is set."""

    point: Failpoint
    nth: int
    """At the nth time that the request gets there."""
    mark: int
    """First token of the prompt of the request to hit."""
    side: Side
    pids: Mapping[str, int]
    """Of all processes, by name."""
    signum: int = 0
    ask_port: int = 0
    """Where the test listens that does the deed."""
    flip: bool = False
    """Whoever reaches it flips a bit of one of the request's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What became of it."""

    target: str
    at_s: float
    """On the machine's monotonic clock, just before the blow."""
    here: str
    """The process in which the request was."""
    peer: str
    """The one at the other end of its handoff."""


class Trigger:
    """The test's end: one file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.armed = folder / "armed.json"
        self._struck = folder / "struck.json"

    def arm(self, strike: Strike) -> None:
        self.disarm()
        fields = asdict(strike) | {"point": strike.point.value, "side": strike.side.value, "pids": dict(strike.pids)}
        _write(self.armed, json.dumps(fields))

    def disarm(self) -> None:
        for path in (self.armed, self._struck):
            path.unlink(missing_ok=True)

    def struck(self) -> Struck | None:
        """None while nobody has got there."""
        try:
            return Struck(**json.loads(self._struck.read_text()))
        except FileNotFoundError:
            return None


class Failpoints:
    """A node's end. `reach` may be called on any thread; each point is reached on one thread only."""

    def __init__(self, armed: Path, *, own_name: str) -> None:
        self._armed = armed
        self._own_name = own_name
        self._counts: Counter[tuple[Failpoint, str]] = Counter()

    def reach(self, point: Failpoint, *, mark: int, request: str, peer: str) -> bool:
        """The request whose prompt begins with `mark` is here; `peer` is the node at the other end of its handoff.

        True: the caller is to flip a bit.
        """
        try:
            fields = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return False
        strike = Strike(**{**fields, "point": Failpoint(fields["point"]), "side": Side(fields["side"])})
        if (point, mark) != (strike.point, strike.mark):
            return False
        self._counts[point, request] += 1
        return self._counts[point, request] == strike.nth and self._claim(strike, peer)

    def _claim(self, strike: Strike, peer: str) -> bool:
        """Strike, if nobody has. True where that is the caller's to do."""
        claimed = self._armed.with_name(f"claimed-{os.getpid()}.json")
        try:
            os.rename(self._armed, claimed)
        except FileNotFoundError:
            return False  # another process was first
        names = [name for name in strike.pids if name.startswith(strike.side.value)]
        both = (self._own_name, peer)
        target = next((name for name in names if len(names) == 1 or name in both), None)
        assert target is not None, (strike, both)
        struck = Struck(target=target, at_s=time.monotonic(), here=self._own_name, peer=peer)
        _write(claimed.with_name("struck.json"), json.dumps(asdict(struck)))
        claimed.unlink()
        if strike.ask_port:
            _ask(strike.ask_port)
        elif strike.signum:
            os.kill(strike.pids[target], signal.Signals(strike.signum))
        return strike.flip


def _ask(port: int) -> None:
    """Returns when the test has closed the connection, having done it."""
    with socket.create_connection(("127.0.0.1", port), timeout=ASK_S_MAX) as connection:
        connection.recv(1)


def _write(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    os.rename(unfinished, path)
