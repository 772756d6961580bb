"""Runs a serving node from its start to its end: runtime, pool, engine loop, and the half or halves that it serves.

What is put together here is taken apart in the reverse order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import NotRequired, Protocol, TypedDict, Unpack

from batonpb import cache_pb2_grpc, holdings_pb2_grpc, node_pb2, pins_pb2_grpc

from baton.clock import Clock
from baton.drain import Holdings
from baton.log import get_log
from baton.runtime import NodeRuntime, Progress
from baton.wire import NodeLoad, Role
from cachestore.ledger import ConservationError, Ledger
from node.config import NodeConfig
from node.engine_loop import EngineLoop, StepHost, done_or_broken
from node.holdings import HoldingsService
from node.pool import DevicePool, RegionTransports, open_device_pool, open_transports, transport_facts
from node.service import CacheService, PinService
from node.spill import SpillConfig

log = get_log("ledger")

TIME_SHARE_MAX = 0.02
"""Of the control thread's time: in a very large region the recount comes less often than it is asked for."""


class ConservationWatch:
    """Recounts one ledger (I4) when asked to; counts and logs violations."""

    def __init__(self, ledger: Ledger, clock: Clock, *, beside: Sequence[Callable[[], None]] = ()) -> None:
        """`beside` recount what lies beside the ledger, and raise ConservationError too."""
        self._ledger = ledger
        self._beside = beside
        self._clock = clock
        self._next_s = 0.0
        self.errors = 0

    def check_sometimes(self) -> None:
        """The regular check, within its share of the time."""
        began_s = self._clock.monotonic_s()
        if began_s >= self._next_s:
            self.check()
            took_s = self._clock.monotonic_s() - began_s
            self._next_s = began_s + took_s / TIME_SHARE_MAX

    def check(self) -> None:
        try:
            self._ledger.check()
            for check in self._beside:
                check()
        except ConservationError as error:
            self.errors += 1
            log.error("blocks are not conserved", problem=str(error), errors=self.errors)


class ServingNode(StepHost, Protocol):
    """The part of a node that has its requests."""

    def load(self) -> NodeLoad: ...

    def holds(self) -> Holdings: ...


class Half(Protocol):
    """What a node serves: prefill, decode, or both. Control thread only. What it opens it closes by its exit stack."""

    @property
    def node(self) -> ServingNode: ...

    def open(self) -> None:
        """Listen for data connections, and add services to the node's server. Raises BatonError, InvalidField."""
        ...

    def follow_directory(self) -> None:
        """The directory has changed."""
        ...

    def upkeep(self) -> None:
        """Called every second."""
        ...

    def add_status(self, message: node_pb2.NodeStatus) -> None: ...

    async def end_requests(self) -> None:
        """Give up what runs. The server still answers."""
        ...


class Serving(TypedDict):
    """How a node is run, whatever it serves."""

    stop: asyncio.Event
    drain: NotRequired[asyncio.Event | None]
    """Ends the node as well, once it is empty."""
    on_ready: Callable[[str], None]
    """Called once, with the endpoint."""
    progress: Progress


async def serve_node(
    config: NodeConfig,
    role: Role,
    make: Callable[[NodeRuntime, DevicePool, RegionTransports, AsyncExitStack], Half],
    *,
    spill: SpillConfig | None = None,
    decodes: bool = True,
    **serving: Unpack[Serving],
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the node cannot start.

    What `make` puts on the exit stack is closed behind the engine loop, also where `make` fails. `spill` and `decodes`
    are those of `open_device_pool`.
    """
    runtime = NodeRuntime(
        config,
        role,
        pod=config.pod,
        clock=Clock(),
        rng=Random(secrets.randbits(64)),
        on_change=lambda: half.follow_directory(),
    )
    await runtime.check_listen()
    async with AsyncExitStack() as opened:
        pool = await open_device_pool(
            config.engine,
            name=config.name,
            progress=serving["progress"],
            spill=spill,
            store=config.store,
            decodes=decodes,
            transports=config.transports,
            staging=config.staging,
        )
        opened.callback(pool.close)
        opened.push_async_callback(runtime.close)
        transports = open_transports(config, pool.region, opened)
        half = make(runtime, pool, transports, opened)
        holdings = HoldingsService(
            pool.blocks.prefix_cache.holdings,
            runtime.incarnation,
            runtime.clock,
            nodes=lambda: len(runtime.membership.nodes()),
        )
        runtime.server.add("baton.v1.Holdings", holdings_pb2_grpc.add_HoldingsServicer_to_server, holdings)
        if pool.store is not None:
            pool.store.start()
            opened.push_async_callback(pool.store.stop)
        engine_loop = EngineLoop(pool.engine, half.node, name=config.name)
        stepping = asyncio.create_task(engine_loop.run(), name="engine-loop")
        try:
            half.open()
            _report(runtime, half, pool, transports)
            serving["on_ready"](await runtime.open())
            until_drained = runtime.drain.serve_until(
                serving["stop"], serving.get("drain"), drain_ms_max=config.drain_ms_max
            )
            await done_or_broken(until_drained, stepping)
        finally:
            try:
                await runtime.leave()
                await half.end_requests()
                holdings.close()
                await runtime.stop_serving()
            finally:  # a step in flight reads and writes the region
                await engine_loop.stop(stepping)


def _report(runtime: NodeRuntime, half: Half, pool: DevicePool, transports: RegionTransports) -> None:
    """Status, load and upkeep of the node."""
    spill = None if pool.host is None else pool.host.spill
    beside = [part.check for part in (spill, pool.store) if part is not None]
    watch = ConservationWatch(pool.ledger, runtime.clock, beside=beside)
    pins = PinService(pool, runtime.incarnation, runtime.clock)
    runtime.transports = tuple(transport.value for transport in transports.offered)
    facts = transport_facts(pool.transports, pool.region.kind, runtime.transports)

    def upkeep() -> None:
        pins.upkeep()
        watch.check_sometimes()
        half.upkeep()

    def status(message: node_pb2.NodeStatus) -> None:
        watch.check()
        message.conservation_errors = watch.errors
        half.add_status(message)
        if spill is not None:
            for what, count in spill.report().items():
                message.counters.add(name=f"spill: {what}", value=count)
        pins.add_status(message.prefixes)
        message.engine.padding_blocks = pool.blocks.padding_blocks
        for name, text in (*pool.describe().items(), *facts.items()):
            message.engine.facts.add(name=name, text=text)

    def load() -> NodeLoad:
        return dataclasses.replace(half.node.load(), tiers=pool.tier_loads())

    runtime.model, runtime.load, runtime.holds = pool.model, load, half.node.holds
    runtime.status, runtime.upkeep = status, upkeep
    runtime.server.add("baton.v1.NodePins", pins_pb2_grpc.add_NodePinsServicer_to_server, pins)
    cache = CacheService(pool, runtime.incarnation)
    runtime.server.add("baton.v1.Cache", cache_pb2_grpc.add_CacheServicer_to_server, cache)
