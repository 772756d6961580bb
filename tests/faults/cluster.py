"""A cluster of processes with failpoints, each on a port of its own that it keeps when it is started again."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from baton.clock import Clock
from baton.directory_setting import open_directory
from baton.errors import BatonError
from baton.rpc import ChannelLimits, Channels
from cli.services import Service
from cli.supervisor import Cluster, ClusterSpec
from node.peers import OUT_OF_REACH
from tests.faults.asking import Asker, GrpcAsker
from tests.faults.points import ARMED_ENV, NTH, Failpoint, Strike, Struck, Trigger
from tests.faults.web import WebAsker
from tests.support.cluster_harness import ROUTER_NAME, Client, RunningCluster, mock_spec, wait_for
from tests.support.fork_server import forked_children
from tests.support.ports import free_ports

WAIT_S_MAX: Final = 120.0
"""For everything that must come to pass: far beyond what a loaded machine takes."""
TTL_MS: Final = 1_000
MEMBERSHIP: Final[Mapping[str, object]] = {"membership.heartbeat_ms": 100, "membership.ttl_ms": TTL_MS}
CHUNK_TOKENS: Final = 128
LAYERS: Final = 4


ROUTER_FLAGS: Final[Mapping[str, object]] = {
    **MEMBERSHIP,
    "placement_wait_ms_max": 60_000,
    "retries.resume_wait_ms_max": 60_000,
    # Two of them in the cases with two faults; and a node that a busy machine keeps from answering counts as dead.
    "retries.deaths_max": 5,
}
"""Requests wait for nodes, and nothing gives them up early: a case is about what becomes of them, not about limits."""
RECEIVER_FLAGS: Final[Mapping[str, object]] = {
    "orphan_ms": 600,
    "resume_ms": 3_000,
    "receiver.lease_ms": 2_000,
    "receiver.revoke_ms": 300,
}


def faulty_spec(
    *,
    both: Mapping[str, object] | None = None,
    decode_flags: Mapping[str, object] | None = None,
    router_flags: Mapping[str, object] | None = None,
    redis: str | None = None,
    routers: int = 2,
    web: bool = False,
) -> ClusterSpec:
    """Two routers, two prefill and two decode nodes of the mock engine: four chunks of four layers for a prompt of 400
    tokens, five milliseconds for a token, and few blocks, so that they are soon used again. `redis` is the directory's
    URL. With `web` routers serve HTTP."""
    return with_ports(
        replace(
            mock_spec(
                prefill=2,
                decode=2,
                blocks=300,
                both={**MEMBERSHIP, "engine.tokens_per_step_max": CHUNK_TOKENS, **(both or {})},
                prefill_flags={"engine.mock_layer_delay_ms": 3},
                decode_flags={"engine.mock_layer_delay_ms": 1, **RECEIVER_FLAGS, **(decode_flags or {})},
                router_flags={**ROUTER_FLAGS, **(router_flags or {})},
            ),
            directory=redis,
            http="127.0.0.1:0" if web else None,
            routers=routers,
        )
    )


def mixed_spec(*, both: Mapping[str, object] | None = None) -> ClusterSpec:
    """Two routers and three mixed nodes: prompts of fewer than 64 tokens are kept, the others handed over."""
    flags: dict[str, object] = {
        **MEMBERSHIP,
        **RECEIVER_FLAGS,
        "engine.tokens_per_step_max": CHUNK_TOKENS,
        "engine.mock_layer_delay_ms": 1,
        "handoff_tokens_min": 64,
        **(both or {}),
    }
    spec = mock_spec(prefill=0, decode=0, mixed=3, blocks=300, both=flags, router_flags=ROUTER_FLAGS)
    return with_ports(replace(spec, routers=2))


def only_router_spec() -> ClusterSpec:
    """As `faulty_spec`, with one router. Answers go on without it for long enough that it can be started again."""
    return faulty_spec(decode_flags={"orphan_ms": 20_000}, routers=1)


def with_ports(spec: ClusterSpec) -> ClusterSpec:
    """The same, each process on fixed ports of 127.0.0.1."""
    services = dict(spec.processes())
    routers = [name for name, service in services.items() if service is Service.ROUTER and spec.http is not None]
    keys = [(name, "listen") for name in services] + [(name, "http_listen") for name in routers]
    node_flags: dict[str, dict[str, object]] = {name: {} for name in services}
    for (name, key), port in zip(keys, free_ports(len(keys)), strict=True):
        node_flags[name][key] = f"127.0.0.1:{port}"
    for name, flags in spec.node_flags.items():
        node_flags[name].update(flags)
    return replace(spec, node_flags=node_flags)


class _Processes(Cluster):
    """Starts `tests.faults.node` in place of `baton`."""

    def _command(self, name: str, service: Service, directory: str) -> list[str]:
        command = super()._command(name, service, directory)
        return ["tests.faults.node" if word == "cli.main" else word for word in command]


class FaultyCluster(RunningCluster):
    """Made by `faulty`. Lives on the running loop."""

    def __init__(self, spec: ClusterSpec, folder: Path) -> None:
        self.trigger = Trigger(folder)
        spec = replace(spec, start_ms_max=int(WAIT_S_MAX * 1e3))
        super().__init__(spec, asyncio.Runner())
        self.cluster = _Processes(replace(spec, env={**spec.env, ARMED_ENV: str(self.trigger.armed)}))
        self.doors: dict[str, str] = {}
        """Where clients reach the routers of these names, in place of the routers' own endpoints."""
        self.over_http = self.whole = False
        """Clients ask over HTTP; for answers in one piece."""
        self._askers: dict[str, GrpcAsker] = {}
        self._web: WebAsker | None = None

    @property
    def router_names(self) -> list[str]:
        return [name for name, service in self.cluster.spec.processes() if service is Service.ROUTER]

    def asker(self) -> Asker:
        """A client of all routers."""
        return self.web_asker() if self.over_http else self.grpc_asker()

    def grpc_asker(self, router: str = "") -> GrpcAsker:
        """Of the router of this name only, by default of all."""
        if router not in self._askers:
            endpoints = {**self.cluster.endpoints, **self.doors}
            names = [router] if router else self.router_names
            self._askers[router] = GrpcAsker([endpoints[name] for name in names])
        return self._askers[router]

    def web_asker(self) -> WebAsker:
        if self._web is None:
            endpoints = [self.cluster.others_of(name)["http"] for name in self.router_names]
            self._web = WebAsker(endpoints, whole=self.whole)
        return self._web

    async def stop(self) -> None:
        """Raises AssertionError where a process did not stop well."""
        for asker in self._askers.values():
            await asker.close()
        if self._web is not None:
            await self._web.close()
        await super().stop()
        problems = await self.cluster.stop()
        assert not problems, "\n".join(problems)

    async def arm(self, **strike: Any) -> None:
        self.trigger.arm(await self.strike(**strike))

    async def strike(self, *, point: Failpoint, nth: int = 0, **strike: Any) -> Strike:
        """At the nth time that the request gets there; 0: at one in the middle."""
        routers = {str((await self.status(name)).record.incarnation): name for name in self.router_names}
        nth = nth or NTH.get(point, 1)
        return Strike(point=point, nth=nth, pids=self.cluster.pids, routers=routers, **strike)

    async def struck(self, number: int = 0) -> Struck:
        """Wait for it."""
        struck = await self.struck_unless(None, number)
        assert struck is not None
        return struck

    async def struck_unless(self, over: asyncio.Task[None] | None, number: int = 0) -> Struck | None:
        """Wait for it. None: the request of this task is over, and never came to the point."""
        struck: Struck | None = None

        async def holds() -> bool:
            nonlocal struck
            ended = over is not None and over.done()  # asked first: whoever gets there is struck before it ends
            struck = self.trigger.struck(number)
            return ended or struck is not None

        await wait_for(holds, "the failpoint to be reached", story=self.story, timeout_s=WAIT_S_MAX)
        return struck

    async def killed(self, name: str) -> None:
        """It was sent SIGKILL: returns when it has ended."""
        self.set_down(name)
        assert await self.wait_exit(name) == -signal.SIGKILL, name

    async def restart(self, name: str) -> None:
        """Under the same name and on the same port."""
        await self.cluster.start_process(name)
        await self._forget(name)
        self.set_down(name, False)

    def go_on(self, name: str) -> None:
        self.send_signal(name, signal.SIGCONT)
        self.set_down(name, False)

    async def _forget(self, name: str) -> None:
        """Old channels wait longer and longer before they look for the new process."""
        channel = self._channels.pop(self.cluster.endpoints[name], None)
        if channel is not None:
            await channel.close()
        if name == ROUTER_NAME:
            await self.client.close()
            self.client = Client(self.cluster.router)

    async def listed(self) -> set[str]:
        """Whom the directory knows; nobody where it does not answer."""
        channels = Channels(limits=ChannelLimits())
        directory = open_directory(self.cluster.directory, channels=channels, clock=Clock())
        try:
            return {record.name for record in (await directory.list()).records}
        except BatonError:
            return set()
        finally:
            await directory.close()
            await channels.close()

    async def wait_in_reach(self) -> None:
        """Return when no node counts a decode node as out of reach."""

        async def holds() -> bool:
            statuses = await self.statuses()
            counters = [counter for status in statuses.values() for counter in status.counters]
            return not any(counter.value for counter in counters if counter.name == OUT_OF_REACH)

        await wait_for(holds, "all nodes to reach each other", story=self.story, timeout_s=WAIT_S_MAX)

    async def wait_listed(self, name: str, listed: bool) -> None:
        async def holds() -> bool:
            return (name in await self.listed()) is listed

        await wait_for(holds, f"{name} in the directory: {listed}", story=self.story, timeout_s=WAIT_S_MAX)


@asynccontextmanager
async def faulty(spec: ClusterSpec, *, forked: bool = True) -> AsyncIterator[FaultyCluster]:
    """A cluster for the length of the block; nothing of it is left afterwards. `forked` processes start within tenths
    of a second."""
    with tempfile.TemporaryDirectory(prefix="baton-faults-") as folder, forked_children() if forked else nullcontext():
        cluster = FaultyCluster(spec, Path(folder))
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
