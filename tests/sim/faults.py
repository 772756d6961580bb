"""What goes wrong, and when: drawn from the seed, one fault after another, some at the same time.

Every fault ends by itself. `Faults.calm` ends all of them: cuts are healed, stopped processes continued, dead ones
started again under their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.sim.cluster import PACE_S, Kind, SimCluster
from tests.sim.load import Load
from tests.sim.loop import ProcessState
from tests.sim.network import CLIENT, Network
from tests.sim.pings import Pings
from tests.sim.profiles import DIRECTORY
from tests.sim.rpc import break_between

AFTERMATH_S = 8.0
"""How long after its end a fault may still cost requests: leases, lost streams, records that run out."""
BUSY_S_MAX = 0.01
PREFILL = "/baton.v1.Prefill/Prefill"
STOP_S = 2.0
"""How long an orderly stop may take."""
SERVING = (Kind.ROUTER, Kind.PREFILL, Kind.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How often what happens. `weights` by the names of `Faults`' methods."""

    mean_gap_s: float = 0.03
    at_once_max: int = 5
    weights: tuple[tuple[str, int], ...] = (
        ("crash", 6),
        ("stop", 6),
        ("stop_long", 1),
        ("busy", 4),
        ("cut", 3),
        ("cut_one_way", 4),
        ("cut_long", 1),
        ("lose", 4),
        ("duplicate", 4),
        ("delay", 4),
        ("reset_links", 4),
        ("reset_calls", 3),
        ("jump", 2),
        ("slow", 2),
        ("slow_data", 4),
        ("lose_directory", 2),
        ("shut_down", 1),
    )


class Faults:
    """Draws and carries out faults on the world's clock."""

    def __init__(self, cluster: SimCluster, network: Network, load: Load, plan: FaultPlan, *, rng: Random) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._network = network
        self._load = load
        self._plan = plan
        self._rng = rng
        self._pings = Pings(cluster, network, rng=Random(rng.getrandbits(64)))
        self._on = False
        self._active = 0
        self._kinds = [name for name, weight in plan.weights for _ in range(weight)]

    def begin(self) -> None:
        self._on = bool(self._kinds)
        self._next()

    def _next(self) -> None:
        if self._on:
            self._cluster.world.after(self._rng.expovariate(1 / self._plan.mean_gap_s), self._strike)

    def _strike(self) -> None:
        if not self._on:
            return
        if self._active < self._plan.at_once_max:
            kind = self._rng.choice(self._kinds)
            self.counts[kind] += 1
            act: Callable[[], None] = getattr(self, kind)
            act()
        self._next()

    def calm(self) -> None:
        """No more faults, and none at work."""
        self._on = False
        self._network.calm()
        for name in self._cluster.names():
            process = self._cluster.processes[name]
            process.loop.slowness, process.pace_s = 1.0, PACE_S
            process.loop.go_on()
        self._active = 0
        self._mark()
        self.keep_up()

    def keep_up(self) -> None:
        """Whoever is dead is started again (called regularly once calm: a start may fail too)."""
        for name in self._cluster.names():
            self._cluster.revive(name)

    # The span in which a request may have been hit.

    def _mark(self) -> None:
        self._load.judge.disturbed = self._active > 0
        self._load.judge.disturbed_s = max(self._load.judge.disturbed_s, self._cluster.world.now_s + AFTERMATH_S)

    def _for_a_while(self, seconds: float, undo: Callable[[], None]) -> None:
        self._active += 1
        self._mark()

        def over() -> None:
            if self._on:
                self._active -= 1
                undo()
                self._mark()

        self._cluster.world.after(seconds, over)

    def _victim(self, *kinds: Kind) -> str | None:
        names = [
            name
            for name in self._cluster.names(*(kinds or SERVING))
            if self._cluster.processes[name].loop.state is ProcessState.RUNNING and self._cluster.processes[name].alive
        ]
        return self._rng.choice(names) if names else None

    def _pair(self) -> tuple[str, str]:
        names = self._cluster.names()
        one, other = self._rng.sample(names, 2)
        return one, other

    def _span_s(self) -> float:
        return self._rng.choice((0.03, 0.3, 1.5)) * self._rng.random()

    # Faults.

    def crash(self, victim: str | None = None) -> None:
        name = victim or self._victim(Kind.ROUTER, Kind.PREFILL, Kind.PREFILL, Kind.DECODE)
        if name is None:
            return
        self._cluster.crash(name)
        self._for_a_while(
            self._rng.choice((0.0, 0.02, 0.2, 1.0, 3.0)) * self._rng.random(), lambda: self._cluster.revive(name)
        )

    def shut_down(self, victim: str | None = None) -> None:
        """SIGINT: the orderly stop."""
        name = victim or self._victim(Kind.PREFILL, Kind.DECODE, Kind.ROUTER)
        if name is None:
            return
        process = self._cluster.processes[name]
        self._cluster.excuses.ending(name, STOP_S)
        process.loop.call_soon(process.stopping.set)
        self._mark()

    def stop(self, seconds: float | None = None, victim: str | None = None) -> None:
        """SIGSTOP, and SIGCONT later."""
        name = victim or self._victim()
        if name is None:
            return
        process = self._cluster.processes[name]
        process.loop.halt()
        span_s = seconds if seconds is not None else self._span_s()
        self._cluster.excuses.away(name, span_s)
        self._pings.stopped(name)
        self._for_a_while(span_s, process.loop.go_on)

    def busy(self) -> None:
        """Its loop is busy now and then for a moment: what has come meanwhile is all there at once."""
        name = self._victim(Kind.PREFILL, Kind.DECODE, Kind.DECODE, Kind.ROUTER)
        if name is None:
            return
        loop, until_s = self._cluster.processes[name].loop, self._cluster.world.now_s + self._span_s()

        def pause() -> None:
            if self._on and loop.state is ProcessState.RUNNING and self._cluster.world.now_s < until_s:
                loop.halt()
                self._cluster.world.after(BUSY_S_MAX * self._rng.random(), resume, loop.stops)

        def resume(stops: int) -> None:
            if loop.stops == stops:  # else somebody else has stopped it since
                loop.go_on()
            self._cluster.world.after(BUSY_S_MAX * self._rng.random(), pause)

        pause()

    def stop_long(self) -> None:
        self.stop(10 + 10 * self._rng.random())

    def cut(self, seconds: float | None = None, *, both: bool = True) -> None:
        self._cut(*self._pair(), seconds, both=both)

    def _cut(self, one: str, other: str, seconds: float | None, *, both: bool) -> None:
        self._network.cut(one, other)
        if both:
            self._network.cut(other, one)
        span_s = seconds if seconds is not None else self._span_s()
        self._pings.cut(one, other)

        def undo() -> None:
            self._network.heal(one, other)
            self._network.heal(other, one)

        self._for_a_while(span_s, undo)

    def cut_one_way(self) -> None:
        self.cut(both=False)

    def cut_long(self) -> None:
        self.cut(10 + 10 * self._rng.random(), both=self._rng.random() < 0.5)

    def cut_client(self) -> None:
        """A client and a router, each of which the others reach."""
        client = self._rng.randrange(self._cluster.profile.clients)
        self._cut_router(f"{CLIENT}{client}")

    def cut_tokens(self) -> None:
        """A router and a decode node, each of which the others reach."""
        self._cut_router(self._rng.choice(self._cluster.names(Kind.DECODE)))

    def _cut_router(self, other: str) -> None:
        router = self._rng.choice(self._cluster.names(Kind.ROUTER))
        ends = (router, other) if self._rng.random() < 0.5 else (other, router)
        seconds = self._rng.choice((self._span_s(), 5 * self._rng.random()))
        self._cut(*ends, seconds, both=self._rng.random() < 0.5)

    def lose_router(self) -> None:
        """It dies, is told to end, or stands still for a while."""
        name, dice = self._victim(Kind.ROUTER), self._rng.random()
        if name is None:
            return
        if dice < 0.5:
            self.crash(name)
        elif dice < 0.7:
            self.shut_down(name)
        else:
            self.stop(5 * self._rng.random(), name)

    def _weather(self, attribute: str, value: float) -> None:
        """Some links are bad for a while."""
        names = self._cluster.names()
        links = []
        for _ in range(self._rng.choice((1, 2, len(names)))):
            one, other = self._rng.sample(names, 2)
            links += [self._network.link(one, other), self._network.link(other, one)]
        for link in links:
            setattr(link, attribute, value)

        def undo() -> None:
            for link in links:
                setattr(link, attribute, 0.0)

        self._for_a_while(self._span_s(), undo)

    def lose(self) -> None:
        self._weather("loss", self._rng.choice((0.02, 0.1, 0.4)))

    def duplicate(self) -> None:
        self._weather("duplication", self._rng.choice((0.1, 0.5)))

    def delay(self) -> None:
        self._weather("delay_s_max", self._rng.choice((0.01, 0.1, 0.8)))

    def reset_links(self) -> None:
        """Data connections of a node break."""
        name = self._victim(Kind.PREFILL)
        if name is not None:
            for link in list(self._cluster.processes[name].links):
                link.reset("connection reset by peer")
        self._mark()

    def reset_calls(self) -> None:
        """The gRPC connection between two nodes breaks."""
        one, other = (self._cluster.processes[name] for name in self._pair())
        if one.alive and other.alive and one.loop.state is other.loop.state is ProcessState.RUNNING:
            break_between(one, other, "connection reset by peer")
            break_between(other, one, "connection reset by peer")
        self._mark()

    def overtake(self) -> None:
        """A router's connection to a prefill node breaks, and the news of it is late there: what it has begun goes on,
        and comes to the decode nodes late, among the router's Resolve, its Cancel and the next attempt."""
        name = self._victim(Kind.PREFILL)
        calls = (
            [] if name is None else [call for call in self._cluster.processes[name].calls_in if call.method == PREFILL]
        )
        if name is None or not calls:
            return
        router = self._rng.choice(calls).client
        decode = self._cluster.names(Kind.DECODE)
        late = [(router.name, name, 0.8), *((sender, node, 0.1) for sender in (name, router.name) for node in decode)]
        for sender, receiver, delay_s in late:
            self._network.link(sender, receiver).delay_s_max = delay_s
        break_between(router, self._cluster.processes[name], "connection reset by peer")

        def undo() -> None:
            for sender, receiver, _ in late:
                self._network.link(sender, receiver).delay_s_max = 0.0

        self._for_a_while(0.8, undo)

    def jump(self) -> None:
        """A clock leaps ahead."""
        name = self._victim(*Kind)
        if name is not None:
            by_s = self._rng.choice((0.1, 1.0, 5.0)) * self._rng.random()
            self._cluster.processes[name].loop.jump(by_s)
            self._cluster.excuses.leapt(name, by_s)
        self._mark()

    def slow(self) -> None:
        name = self._victim(Kind.PREFILL, Kind.DECODE)
        if name is not None:
            process = self._cluster.processes[name]
            process.loop.slowness = self._rng.choice((3.0, 30.0))

            def undo() -> None:
                process.loop.slowness = 1.0

            self._for_a_while(self._span_s(), undo)

    def slow_data(self) -> None:
        """The data links of a prefill node hardly get on."""
        name = self._victim(Kind.PREFILL)
        if name is not None:
            process = self._cluster.processes[name]
            process.pace_s = self._rng.choice((0.01, 0.1, 0.5))

            def undo() -> None:
                process.pace_s = PACE_S

            self._for_a_while(self._span_s(), undo)

    def lose_directory(self) -> None:
        """It dies (and has forgotten everything when it comes back), or stops for a while."""
        if self._victim(Kind.DIRECTORY) is None:
            return
        if self._rng.random() < 0.6:
            self.crash(DIRECTORY)
        else:
            process = self._cluster.processes[DIRECTORY]
            process.loop.halt()
            self._pings.stopped(DIRECTORY)
            self._for_a_while(4 * self._rng.random(), process.loop.go_on)
