"""When a request may end in an error, kept from outside the code under test.

With `lost_allowed` any fault near the request is an excuse. Without it only these are:

1. The end of its router, orderly or not. For an error that no node has written also the client's way to it: the router
   stood still, or the connection between the two was broken.
2. Its own deadline (`DEADLINE_S`, less what the router's clock has leapt ahead meanwhile).
3. ATTEMPTS_SPENT after the death of nodes: at least `deaths_max` of the links between its router, prefill and decode
   nodes were lost while it ran, each by a process's end or by its own, or shortly before: a loss is noticed later.
4. Nothing to run on: the router looked for nodes (`LOOKED_FOR`) as long as it is to, and all that time no route
   (router, prefill node, decode node, the directory's word of both) was open for `ROUTE_S` at a stretch.

A full line is an answer of a healthy cluster too, as long as the request had no token (`load.OVERLOAD`). Full nodes are
none: without a token the request waits for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from baton.errors import BatonError, Reason
from baton.ids import RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import Role
from router.resume import Place
from router.retries import RetryConfig
from tests.sim.cluster import PACE_S, Kind, Process, SimCluster
from tests.sim.loop import ProcessState
from tests.sim.network import Network
from tests.sim.profiles import PLACEMENT_WAIT_MS_MAX, RESUME_WAIT_MS_MAX
from tests.support.noticed import noticed_ms_max

ROUTE_S = 3.0
SERVED_S = 10.0
"""A client that tries all the time has its answer when a route has been open for so long."""
LOOK_S = 0.05
CLOCK_SHARE = 0.97
"""Of a time limit that has certainly passed here when it has passed by a clock of another rate."""
LOOKED_FOR = frozenset(
    {
        Reason.NO_PREFILL_NODE,
        Reason.NO_DECODE_NODE,
        Reason.DECODE_FULL,
        Reason.QUEUE_FULL,
        Reason.TOO_MANY_CALLS,
        Reason.NODE_DRAINING,
        Reason.PAIR_FENCING,
        Reason.PEER_UNREACHABLE,
        Reason.INCARNATION_MISMATCH,
        Reason.HANDOFF_FAILED,
    }
)
KEPT_MAX = 4_096
Route = tuple[Process, Process, Process]


class Excuses:
    """Told of what happens to processes and connections; asked when a request has ended in an error."""

    def __init__(self, cluster: SimCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network
        self._losses: deque[tuple[float, frozenset[str]]] = deque(maxlen=KEPT_MAX)
        self._ends: dict[str, float] = {}
        """When each router last ended, by its name."""
        self._away: dict[str, float] = {}
        """Until when each router was out of its clients' reach."""
        self._leapt_s: dict[str, float] = {}
        self._open: dict[Route, float] = {}
        """Routes that are open, and since when."""
        self._closed: deque[tuple[str, float, float]] = deque(maxlen=KEPT_MAX)
        """Those that were open for `ROUTE_S`: router, from, to."""

    # What happens.

    def look_sometimes(self) -> None:
        self._look()
        self._cluster.world.after(LOOK_S, self.look_sometimes)

    def ended(self, process: Process) -> None:
        """The process is dead, or has ended by itself."""
        self._losses.append((self._now_s, frozenset({process.name})))
        self.ending(process.name)

    def broken(self, one: Process, other: Process) -> None:
        """A connection, or a call on it, has been broken."""
        self._losses.append((self._now_s, frozenset({one.name, other.name})))
        for process, peer in ((one, other), (other, one)):
            if process.kind is Kind.CLIENT:
                self.away(peer.name)

    def ending(self, router: str, within_s: float = 0.0) -> None:
        """It has ended, or is about to, in order."""
        self._ends[router] = max(self._ends.get(router, 0.0), self._now_s + within_s)

    def away(self, router: str, for_s: float = 0.0) -> None:
        self._away[router] = max(self._away.get(router, 0.0), self._now_s + for_s)

    def leapt(self, name: str, by_s: float) -> None:
        self._leapt_s[name] = self.leaps_s(name) + by_s

    def leaps_s(self, name: str) -> float:
        """By how much this node's clock has leapt ahead so far."""
        return self._leapt_s.get(name, 0.0)

    def forget(self) -> None:
        """Nothing that was excuses anything from here on."""
        self._losses.clear()
        self._away.clear()
        self._ends.clear()

    # What it excuses.

    def ends(self, router: str, began_s: float) -> bool:
        process = self._cluster.processes[router]
        return not process.alive or process.stopping.is_set() or self._ends.get(router, -1.0) >= began_s

    def way_lost(self, router: str, began_s: float) -> bool:
        state = self._cluster.processes[router].loop.state
        return state is not ProcessState.RUNNING or self._away.get(router, -1.0) >= began_s

    def spent(self, router: str, began_s: float) -> bool:
        routers = set(self._cluster.names(Kind.ROUTER)) - {router}
        others = routers | set(self._cluster.names(Kind.DIRECTORY))
        from_s = began_s - noticed_ms_max(self._cluster.profile.liveness) / 1000 / CLOCK_SHARE
        hits = sum(at_s >= from_s and not (names & others) for at_s, names in self._losses)
        return hits >= RetryConfig().deaths_max

    def nowhere(self, error: BatonError, router: str, *, since_s: float, leapt_s: float, tokens: int) -> bool:
        """`since_s`: when the request last made progress; `leapt_s`: what its router's clock has leapt since."""
        if error.reason not in LOOKED_FOR:
            return False
        wait_s = (RESUME_WAIT_MS_MAX if tokens else PLACEMENT_WAIT_MS_MAX) / 1000 * CLOCK_SHARE - leapt_s
        if self._now_s - since_s < wait_s:
            return False
        from_s = max(since_s, self._now_s - wait_s)
        spans = [(since, self._now_s) for route, since in self._open.items() if route[0].name == router]
        spans += [(since, to) for name, since, to in self._closed if name == router]
        return all(min(to, self._now_s) - max(since, from_s) < ROUTE_S for since, to in spans)

    def unserved(self, since_s: float) -> bool:
        """No router had a route for so long that a client had to come through. (Of a resumable request, whose client
        has tried all the time.)"""
        spans = [(since, self._now_s) for since in self._open.values()]
        spans += [(since, to) for _, since, to in self._closed]
        return all(to - max(since, since_s) < SERVED_S for since, to in spans)

    def remembers(self, router: Process, place: Place) -> object | None:
        """Whether the node of the place knows that the request is forgotten, and this router reaches it: what does not
        change while that is so, or None."""
        key = RequestKey(request=place.request, attempt=place.attempt)
        for node in self._cluster.processes.values():
            if node.runtime is not None and node.runtime.incarnation == place.decode:
                knows = node.forgotten.get(key, 0.0) > node.loop.time() and _knows(router, node, Role.DECODE)
                if not (knows and self._works(node) and self._works(router) and self._calm(router, node)):
                    return None
                links = self._network.link(router.name, node.name), self._network.link(node.name, router.name)
                losses = sum(names <= {router.name, node.name} for _, names in self._losses)
                stops = router.loop.stops, node.loop.stops
                return losses, stops, [link.cuts for link in links], self.leaps_s(router.name)
        return None

    # Routes.

    @property
    def _now_s(self) -> float:
        return self._cluster.world.now_s

    def _look(self) -> None:
        now_s, found = self._now_s, set(self._routes())
        for route in [route for route in self._open if route not in found]:
            since_s = self._open.pop(route)
            if now_s - since_s >= ROUTE_S:
                self._closed.append((route[0].name, since_s, now_s))
        for route in found:
            self._open.setdefault(route, now_s)

    def _routes(self) -> Iterator[Route]:
        up = [process for process in self._cluster.processes.values() if self._works(process)]
        decode = [process for process in up if process.kind is Kind.DECODE]
        for prefill in (process for process in up if process.kind is Kind.PREFILL):
            handed_to = [d for d in decode if self._calm(prefill, d) and _knows(prefill, d, Role.DECODE)]
            for router in (process for process in up if process.kind is Kind.ROUTER) if handed_to else ():
                if self._calm(router, prefill) and _knows(router, prefill, Role.PREFILL):
                    yield from ((router, prefill, d) for d in handed_to if self._calm(router, d))

    def _works(self, process: Process) -> bool:
        loop = process.loop
        return (
            process.alive
            and process.ready
            and loop.state is ProcessState.RUNNING
            and loop.slowness == 1.0
            and process.pace_s == PACE_S
            and not process.stopping.is_set()
        )

    def _calm(self, one: Process, other: Process) -> bool:
        return self._network.link(one.name, other.name).calm and self._network.link(other.name, one.name).calm


def _knows(process: Process, other: Process, role: Role) -> bool:
    """Has the directory's word of it."""
    if process.runtime is None or other.runtime is None:
        return False
    own = other.runtime.incarnation
    return any(
        record.incarnation == own and record.lifecycle is Lifecycle.READY
        for record in process.runtime.membership.nodes(role)
    )
