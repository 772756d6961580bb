"""Links between living processes: gRPC connections cut or dark, tcp data connections cut or garbled."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from cli.services import Service
from cli.supervisor import DIRECTORY_NAME, ClusterSpec
from tests.faults.cluster import FaultyCluster, faulty
from tests.faults.load import Asked, Load
from tests.faults.outcome import Outcome
from tests.faults.points import END_POINTS, Failpoint, Hit, Side, Struck
from tests.faults.proxy import Dark, Proxy, Spoil
from tests.faults.questions import Questions
from tests.faults.signals import ask_marked, nothing_left, settle
from tests.support.ports import free_ports

PROXY_HOST: Final = "127.0.0.2"
"""Where data connections are made to; the receiver listens on the same port of 127.0.0.1."""
CLIENT_NAME: Final = Side.CLIENT.value
"""This process, as the owner of connections."""
SPOIL_AFTER_BYTES: Final = 400
"""Into the frame that comes next: behind its head and its table, within a record."""


class Ill(Enum):
    """What befalls a gRPC link."""

    CUT = "cut"
    """Its connections end, and new ones are made."""
    DARK = "dark"
    """Nothing passes until everybody has noticed; then it heals, and what was held back arrives."""
    DEAF = "deaf"
    """So, from the second to the first only."""


class LinkCluster:
    """A cluster with a proxy before each router, prefill and decode node, and one before each data
    port of a node."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.cluster = cluster
        self.trigger = cluster.trigger
        self.grpc: dict[str, Proxy] = {}
        self.data: dict[str, Proxy] = {}

    def heal(self) -> None:
        for proxy in (*self.grpc.values(), *self.data.values()):
            proxy.heal()


@asynccontextmanager
async def struck_by_test(cluster: FaultyCluster, strike: asyncio.Queue[Struck]) -> AsyncIterator[int]:
    """The port at which a node asks for the blow. It goes on when `task_done` was called for what it put here."""

    async def asked(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        struck = cluster.trigger.struck()
        assert struck is not None
        strike.put_nowait(struck)
        await strike.join()
        writer.close()

    server = await asyncio.start_server(asked, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


class Stage(Protocol):
    """A cluster, and what stands around it to be broken."""

    @property
    def cluster(self) -> FaultyCluster: ...

    def heal(self) -> None:
        """All is well again."""
        ...


_S = TypeVar("_S", bound=Stage)


class Played(ABC, Generic[_S]):
    """The common course of a case in which the test strikes: load, a marked request, the blow, and the reckoning."""

    __slots__ = ()

    point: Failpoint

    @property
    def struck_side(self) -> Side:
        """Who must serve again, of whatever the test does."""
        return Side.DECODE

    @property
    def also_killed(self) -> tuple[Side, ...]:
        """At the same time as the test strikes."""
        return ()

    @property
    def router_struck(self) -> bool:
        """It, or the client's way to it."""
        return Side.ROUTER in self.also_killed

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def strike(self, stage: _S, struck: Struck) -> None:
        """Raises AssertionError where there is nothing to strike at."""

    def touched(self, struck: Struck) -> set[str]:
        """Nodes beside those that `struck` names, which must serve again too."""
        return set()

    async def ask(self, cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
        """Ask what is struck, and return when it is."""
        return await ask_marked(cluster, load, questions)

    async def meanwhile(self, stage: _S, questions: Questions, outcome: Outcome) -> None:
        """When all have their answers, before all is well again."""

    async def run(self, stage: _S, questions: Questions) -> Outcome:
        """Raises AssertionError where the case itself could not be played."""
        cluster, outcome = stage.cluster, Outcome(case=self.name)
        strikes: asyncio.Queue[Struck] = asyncio.Queue()
        async with Load(cluster.asker, questions) as load, struck_by_test(cluster, strikes) as port:
            hits = (Hit(side=self.struck_side), *(Hit(side=side, signum=signal.SIGKILL) for side in self.also_killed))
            await cluster.arm(point=self.point, mark=questions.mark, hits=hits, ask_port=port)
            hit, _ = await self.ask(cluster, load, questions)
            struck = await strikes.get()
            try:
                self.strike(stage, struck)
            finally:
                strikes.task_done()
            for name in struck.targets[1:]:
                await cluster.killed(name)
            try:
                await hit.task
                await load.finish()
                await self.meanwhile(stage, questions, outcome)
            finally:
                stage.heal()
        outcome.count(load.asked, hit, struck_s=struck.at_s, router_struck=self.router_struck)
        if self.also_killed:
            await nothing_left(cluster, outcome)
            for name in struck.targets[1:]:
                await cluster.restart(name)
        await settle(cluster, questions, sorted({*struck.targets, *self.touched(struck)}), outcome)
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCase(Played[LinkCluster]):
    ends: tuple[Side, Side]
    ill: Ill
    point: Failpoint
    kind: str = ""
    """Begins the name of a case that is not on prefill and decode nodes."""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.ill.value}-{self.ends[0].value}-{self.ends[1].value}-at-{self.point.value}"

    @property
    def struck_side(self) -> Side:
        return self.ends[1]

    @property
    def router_struck(self) -> bool:
        return Side.ROUTER in self.also_killed or Side.CLIENT in self.ends

    def touched(self, struck: Struck) -> set[str]:
        return {_name(side, struck) for side in self.ends if side is not Side.CLIENT}

    def strike(self, stage: LinkCluster, struck: Struck) -> None:
        first, second = (_name(side, struck) for side in self.ends)
        for owner, name in ((first, second), (second, first)):
            proxy = stage.grpc.get(name)
            if proxy is None:
                continue  # nobody calls a client
            if self.ill is Ill.DARK:
                proxy.darken(owner)
            elif self.ill is Ill.DEAF:
                proxy.darken(owner, Dark.REPLIES if owner == first else Dark.REQUESTS)
            else:
                cut = proxy.cut(owner)
                assert cut or owner == second, f"{owner} has no connection to {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCase(Played[LinkCluster]):
    spoil: Spoil
    point: Failpoint = Failpoint.LAYER
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}data-{self.spoil.value}-at-{self.point.value}"

    def strike(self, stage: LinkCluster, struck: Struck) -> None:
        writer, receiver = _name(Side.PREFILL, struck), _name(Side.DECODE, struck)
        after = 0 if self.spoil is Spoil.CUT and self.point is not Failpoint.LAYER else SPOIL_AFTER_BYTES
        spoiled = stage.data[receiver].spoil(writer, self.spoil, after_bytes=after)
        assert spoiled, f"{writer} has no data connection to {receiver}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneCase(Played[LinkCluster]):
    """Nothing passes between one node and any other, neither calls nor data, either way, until everybody has done
    without it. The directory still hears of it, and tells everybody that it is well."""

    side: Side
    point: Failpoint
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}alone-{self.side.value}-at-{self.point.value}"

    def touched(self, struck: Struck) -> set[str]:
        return {_name(self.side, struck)}

    def strike(self, stage: LinkCluster, struck: Struck) -> None:
        alone = _name(self.side, struck)
        others = [name for name in stage.cluster.cluster.names if name not in (alone, DIRECTORY_NAME)]
        for proxies in (stage.grpc, stage.data):
            for name, proxy in proxies.items():
                for owner in others if name == alone else [alone]:
                    proxy.darken(owner)


def _name(side: Side, struck: Struck) -> str:
    names = {Side.PREFILL: struck.writer, Side.DECODE: struck.receiver, Side.ROUTER: struck.router}
    return names.get(side) or side.value


def _with_proxies(spec: ClusterSpec, *, data: bool) -> tuple[ClusterSpec, Mapping[str, int], Mapping[str, int]]:
    """The same, reached through proxies; the ports of those for gRPC and for data, by the name behind them."""
    services = dict(spec.processes())
    nodes = [name for name, service in services.items() if service is not Service.DIRECTORY]
    receivers = [name for name in nodes if services[name].has_engine] if data else []
    ports = free_ports(len(nodes) + len(receivers))
    grpc_ports = dict(zip(nodes, ports, strict=False))
    data_ports = dict(zip(receivers, ports[len(nodes) :], strict=True))
    flags: dict[str, Mapping[str, object]] = {name: dict(spec.node_flags[name]) for name in services}
    for name, port in grpc_ports.items():
        if services[name].has_engine:  # who calls a router is told where
            flags[name] = {**flags[name], "advertise": f"127.0.0.1:{port}"}
    for name, port in data_ports.items():
        flags[name] = {**flags[name], "data_listen": f"127.0.0.1:{port}", "data_advertise_host": PROXY_HOST}
    return replace(spec, node_flags=flags), grpc_ports, data_ports


@asynccontextmanager
async def linked(make_spec: Callable[..., ClusterSpec], *, data: bool) -> AsyncIterator[LinkCluster]:
    """A cluster behind proxies. With `data` its KV goes over tcp, through proxies too."""
    base = make_spec(both={"transports": "tcp"} if data else None)
    spec, grpc_ports, data_ports = _with_proxies(base, data=data)
    async with AsyncExitStack() as stack:
        books: list[LinkCluster] = []

        def pids() -> Mapping[str, int]:
            return {CLIENT_NAME: os.getpid(), **books[0].cluster.cluster.pids} if books else {}

        async def proxy(listen: tuple[str, int], target: tuple[str, int]) -> Proxy:
            made = Proxy(listen, target, pids=pids)
            await made.start()
            stack.push_async_callback(made.close)
            return made

        grpc_proxies, data_proxies = {}, {}
        for name, port in grpc_ports.items():
            place = str(spec.node_flags[name]["listen"]).rpartition(":")
            grpc_proxies[name] = await proxy(("127.0.0.1", port), (place[0], int(place[2])))
        for name, port in data_ports.items():
            data_proxies[name] = await proxy((PROXY_HOST, port), ("127.0.0.1", port))
        cluster = await stack.enter_async_context(faulty(spec))
        links = LinkCluster(cluster)
        links.grpc, links.data = grpc_proxies, data_proxies
        cluster.doors.update({name: f"127.0.0.1:{grpc_ports[name]}" for name in cluster.router_names})
        books.append(links)
        yield links


CASES: Final = (
    *(
        GrpcCase(ends=ends, ill=ill, point=point)
        for ill, points in (
            (Ill.CUT, (Failpoint.RESERVED, Failpoint.LAYER, Failpoint.COMMIT_SENT, Failpoint.DECODING)),
            (Ill.DARK, (Failpoint.LAYER, Failpoint.COMMIT_SENT)),
            (Ill.DEAF, (Failpoint.LAYER,)),
        )
        for ends in ((Side.ROUTER, Side.PREFILL), (Side.ROUTER, Side.DECODE), (Side.PREFILL, Side.DECODE))
        for point in points
    ),
    *(
        GrpcCase(ends=(Side.CLIENT, Side.ROUTER), ill=ill, point=point)
        for ill, points in (
            (Ill.CUT, (Failpoint.RESERVED, Failpoint.LAYER, Failpoint.COMMIT_SENT, Failpoint.DECODING, *END_POINTS)),
            (Ill.DARK, (Failpoint.LAYER, Failpoint.DECODING, Failpoint.FINISHED)),
            (Ill.DEAF, (Failpoint.DECODING,)),
        )
        for point in points
    ),
)
DATA_CASES: Final = (
    *(DataCase(spoil=spoil) for spoil in (Spoil.CUT, Spoil.LOSE_BYTE, Spoil.NOISE)),
    *(DataCase(spoil=Spoil.CUT, point=point) for point in (Failpoint.SEALED, Failpoint.COMMIT_SENT)),
)
MIXED_CASES: Final = (
    *(
        GrpcCase(ends=ends, ill=ill, point=Failpoint.LAYER, kind="mixed-")
        for ill in Ill
        for ends in ((Side.ROUTER, Side.DECODE), (Side.PREFILL, Side.DECODE))
    ),
    GrpcCase(ends=(Side.ROUTER, Side.PREFILL), ill=Ill.DARK, point=Failpoint.LAYER, kind="mixed-"),
    GrpcCase(ends=(Side.ROUTER, Side.DECODE), ill=Ill.CUT, point=Failpoint.DECODING, kind="mixed-"),
    GrpcCase(ends=(Side.PREFILL, Side.DECODE), ill=Ill.CUT, point=Failpoint.COMMIT_SENT, kind="mixed-"),
    DataCase(spoil=Spoil.CUT, kind="mixed-"),
    DataCase(spoil=Spoil.NOISE, kind="mixed-"),
    AloneCase(side=Side.PREFILL, point=Failpoint.LAYER, kind="mixed-"),
    AloneCase(side=Side.DECODE, point=Failpoint.LAYER, kind="mixed-"),
    AloneCase(side=Side.DECODE, point=Failpoint.DECODING, kind="mixed-"),
)
KEPT_CASES: Final = tuple(
    GrpcCase(ends=(Side.ROUTER, Side.DECODE), ill=ill, point=Failpoint.DECODING, kind="mixed-kept-") for ill in Ill
)
