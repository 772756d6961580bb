"""gRPC's pings, in effect: each end of a connection finds out by itself that the other no longer answers.

No ping is sent here. When a link is cut or a process stopped, each end of each connection over it gets the time at
which its ping would have gone unanswered for too long (`baton.liveness`); if nothing has changed by then the connection
ends for that end, and the news of it goes to the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from baton.liveness import LivenessConfig
from tests.sim.cluster import SimCluster
from tests.sim.loop import ProcessState
from tests.sim.network import Network
from tests.sim.rpc import break_client_end, break_server_end

WHY = "keepalive: ping unanswered"


class Pings:
    """Ends connections of processes that do not answer."""

    def __init__(self, cluster: SimCluster, network: Network, *, rng: Random) -> None:
        self._cluster = cluster
        self._network = network
        self._rng = rng

    def stopped(self, name: str) -> None:
        """Call when the process has just been stopped."""
        victim = self._cluster.processes[name]
        stops = victim.loop.stops

        def still() -> bool:
            return victim.loop.state is ProcessState.STOPPED and victim.loop.stops == stops

        for other in list(self._cluster.processes):
            if other != name:
                self._watch(other, name, still)

    def cut(self, one: str, other: str) -> None:
        """Call when a link between the two has just been cut."""
        links = self._network.link(one, other), self._network.link(other, one)
        cuts = [link.cuts for link in links]

        def still() -> bool:
            return any(link.cut and link.cuts == before for link, before in zip(links, cuts, strict=True))

        self._watch(one, other, still)
        self._watch(other, one, still)

    def _watch(self, watcher: str, name: str, still: Callable[[], bool]) -> None:
        """`watcher` pings `name`, as the client of one connection and as the server of another."""
        processes = self._cluster.processes
        for limits in {channel.limits.liveness for channel in processes[watcher].channels}:
            self._cluster.world.after(self._answer_s(limits), self._client_gives_up, watcher, name, still)
        server = processes[watcher].server
        if server is not None:
            self._cluster.world.after(self._answer_s(server.liveness), self._server_gives_up, watcher, name, still)

    def _answer_s(self, config: LivenessConfig) -> float:
        return (config.heartbeat_ms * self._rng.random() + config.answer_ms_max) / 1000

    def _client_gives_up(self, watcher: str, name: str, still: Callable[[], bool]) -> None:
        client, server = self._cluster.processes[watcher], self._cluster.processes[name]
        if still() and client.loop.state is ProcessState.RUNNING:
            break_client_end(client, server, WHY)

    def _server_gives_up(self, watcher: str, name: str, still: Callable[[], bool]) -> None:
        server, client = self._cluster.processes[watcher], self._cluster.processes[name]
        if still() and server.loop.state is ProcessState.RUNNING:
            break_server_end(client, server, WHY)
