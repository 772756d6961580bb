"""Puts a router together, runs it until it is asked to stop, and takes it apart in the reverse order. No torch here."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from batonpb import node_pb2, pins_pb2_grpc

from baton.clock import Clock
from baton.drain import Holdings
from baton.endpoint import is_loopback, join_endpoint, split_endpoint
from baton.errors import BatonError
from baton.http2_front import native_front
from baton.known_nodes import KnownNodes
from baton.listen import check_can_bind
from baton.log import get_log
from baton.runtime import NodeRuntime, Progress
from baton.tasks import Tasks
from baton.wire import NodeLoad, Role
from router.config import RouterConfig
from router.doors import Door, Doors
from router.key_desk import KeyDesk, LocalDesk
from router.key_file import KeyFile
from router.node import RouterNode
from router.pins import PinKeeper, PinsService
from router.prompts import PromptEncoder
from router.request import INT_DIGITS_MAX
from router.request_log import RequestLog
from router.service import INFERENCE_SERVICE
from router.serving import Serving, model_folder
from router.worker_keys import KeyCounter
from router.worker_pool import WorkerPool

if TYPE_CHECKING:
    from router.http_server import HttpServer
    from router.metrics import FigureValues, RouterMetrics

log = get_log("router")


async def serve(
    config: RouterConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[..., None],
    progress: Progress,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the router cannot start.

    `on_ready` gets the endpoint, and by name where else it serves: `admin`, `http`, `metrics`.
    """
    del progress
    sys.set_int_max_str_digits(INT_DIGITS_MAX)
    known = KnownNodes(config.known_nodes_file)

    def follow_directory() -> None:
        staff.follow_directory(runtime.membership.nodes())
        pins.follow_directory()
        if not runtime.membership.stale:
            known.follow(runtime.membership.nodes())

    runtime = NodeRuntime(
        config,
        Role.ROUTER,
        admin_listen=config.admin_listen,
        clock=Clock(),
        rng=Random(secrets.randbits(64)),
        on_change=follow_directory,
        lame_duck_ms=config.lame_duck_ms,
        last_known=known.read,
    )
    await runtime.check_listen()
    keys = await KeyFile.open(config.api_keys_file) if config.api_keys_file is not None else None
    await _check_ports(config)
    metrics = _make_metrics(config, runtime, keys)
    folder = await model_folder(config.model)
    refusals = RequestLog(runtime.clock.monotonic_s)
    doors = Doors(config, refused=partial(_refused, refusals, metrics))
    staff: _OneProcess | _Workers = (_OneProcess if config.workers == 1 else _Workers)(
        config, runtime, doors, folder=folder, metrics=metrics, keys=keys
    )
    _follow(runtime, doors, staff, refusals)
    pins = await _open_pins(config, staff, runtime)
    background = _keep_up(pins, keys)
    metrics_server: HttpServer | None = None
    try:
        others = {}
        if metrics is not None:
            metrics_server, others["metrics"] = _open_metrics(config, metrics, staff, runtime)
        await staff.start()
        if config.http_listen is not None:
            others["http"] = _open_http(config.http_listen, doors)
        endpoint = await runtime.open()
        if keys is None:
            _warn_of_strangers(config)
        on_ready(endpoint, admin=runtime.admin_endpoint, **others)
        await runtime.drain.serve_until(stop, drain, drain_ms_max=config.drain_ms_max)
    finally:
        await runtime.leave()
        await background.cancel()
        doors.close()
        await asyncio.gather(
            runtime.stop_serving(), staff.stop(), *([metrics_server.stop()] if metrics_server is not None else [])
        )
        await staff.close()
        await runtime.close()
        await known.close()
        refusals.close()


def _keep_up(pins: PinKeeper, keys: KeyFile | None) -> Tasks:
    background = Tasks(asyncio.get_running_loop(), log, broken="pins or API keys are no longer kept up")
    background.spawn(pins.run())
    if keys is not None:
        background.spawn(keys.follow())
    return background


async def _check_ports(config: RouterConfig) -> None:
    """Raises BatonError."""
    for setting in ("http_listen", "metrics_listen"):
        if getattr(config, setting) is not None:
            await check_can_bind(getattr(config, setting), setting=setting)


def _open_http(listen: str, doors: Doors) -> str:
    """The endpoint. Raises BatonError."""
    bound = doors.open(Door.HTTP, listen, setting="http_listen")
    return join_endpoint(split_endpoint(listen)[0], bound)


class _OneProcess:
    """This process serves the clients."""

    def __init__(
        self,
        config: RouterConfig,
        runtime: NodeRuntime,
        doors: Doors,
        *,
        folder: Path | None,
        metrics: RouterMetrics | None,
        keys: KeyFile | None,
    ) -> None:
        """Raises BatonError where the model's folder is broken."""
        self._config = config
        self._runtime = runtime
        self._doors = doors

        def make_desk(node: RouterNode) -> KeyDesk:
            assert keys is not None
            return LocalDesk(keys.book, rng=node.rng, cut_former=node.cut_former)

        self._serving = Serving(
            config,
            incarnation=runtime.incarnation,
            lifecycle=runtime.lifecycle,
            channels=runtime.channels,
            server=runtime.server,
            clock=runtime.clock,
            rng=runtime.rng,
            folder=folder,
            metrics=metrics,
            make_desk=make_desk if keys is not None else None,
            check_known=runtime.membership.check_known,
            directory_trouble=runtime.membership.trouble,
            closed=doors.closed,
        )
        node = self._serving.node
        self.prompts, self.model, self.warm = node.prompts, node.model, node.warm
        self.follow_directory = node.follow_directory
        self.upkeep, self.stop, self.close = self._serving.upkeep, self._serving.stop, self._serving.close

    async def start(self) -> None:
        """Raises BatonError. Without the front gRPC listens itself."""
        native = await asyncio.to_thread(native_front)
        if native is not None:
            self._serving.stand_behind_front(native, self._open_grpc())
            assert self._serving.taker.front is not None
            self._serving.taker.front.opened = self._doors.resume
        self._doors.add(self._serving.taker)

    def _open_grpc(self) -> int:
        return self._doors.open(Door.GRPC, self._config.listen, setting="listen")

    @property
    def requests(self) -> int:
        return self._serving.requests

    def load(self) -> NodeLoad:
        node = self._serving.node
        return NodeLoad(waiting_requests=node.waiting, running_requests=node.requests - node.waiting)

    def follow_lifecycle(self) -> None:
        self._serving.follow_lifecycle(self._runtime.lifecycle)

    async def fetch_figures(self) -> list[FigureValues]:
        return []

    def pids(self) -> list[int]:
        return []


class _Workers:
    """Other processes do."""

    def __init__(
        self,
        config: RouterConfig,
        runtime: NodeRuntime,
        doors: Doors,
        *,
        folder: Path | None,
        metrics: RouterMetrics | None,
        keys: KeyFile | None,
    ) -> None:
        """Raises BatonError where the model's folder is broken."""
        counter = KeyCounter(keys.book) if keys is not None else None
        if keys is not None and counter is not None:
            keys.changed = counter.follow
        self._config = config
        self._runtime = runtime
        self._doors = doors
        self._pool = pool = WorkerPool(
            config,
            folder=folder,
            doors=doors,
            lifecycle=runtime.lifecycle,
            clock=runtime.clock,
            keys=counter,
            check_known=runtime.membership.check_known,
            directory_trouble=runtime.membership.trouble,
        )
        if metrics is not None:
            from router.metrics import Figures

            pool.dead_figures = Figures()
        self.prompts = PromptEncoder.load(folder, chars_max=config.prompt_chars_max, tool_form=config.tool_parser)
        self.model, self.warm, self.follow_directory = pool.model, pool.warm, pool.follow_directory
        self.follow_lifecycle, self.upkeep, self.stop = pool.follow_lifecycle, pool.upkeep, pool.stop
        self.fetch_figures, self.pids = pool.fetch_figures, pool.pids
        runtime.status = self._tell_status

    async def start(self) -> None:
        """Raises BatonError."""
        await self._pool.start()
        server = self._runtime.server
        server.add(INFERENCE_SERVICE, lambda *_: None, None)  # its health is asked at probe_listen
        server.stand_aside(self._doors.open(Door.GRPC, self._config.listen, setting="listen"))

    @property
    def requests(self) -> int:
        return self._pool.requests

    def load(self) -> NodeLoad:
        waiting, requests = self._pool.waiting, self._pool.requests
        return NodeLoad(
            waiting_requests=waiting,
            running_requests=max(0, requests - waiting),
            control_loop_lag_ms_max=self._pool.loop_lag_ms_max,
        )

    async def close(self) -> None:
        """They have ended."""

    def _tell_status(self, status: node_pb2.NodeStatus) -> None:
        status.counters.add(name="workers", value=self._pool.ready)
        status.counters.add(name="workers that have ended", value=self._pool.ended)


def _follow(runtime: NodeRuntime, doors: Doors, staff: _OneProcess | _Workers, refusals: RequestLog) -> None:
    def upkeep() -> None:
        staff.upkeep()
        doors.upkeep()
        refusals.upkeep()

    def follow_lifecycle() -> None:
        staff.follow_lifecycle()
        doors.set_open(Door.GRPC, runtime.lifecycle.takes_requests)

    runtime.upkeep = upkeep
    runtime.holds = lambda: Holdings(requests=staff.requests)
    runtime.follow_lifecycle = follow_lifecycle
    runtime.load = staff.load


def _refused(refusals: RequestLog, metrics: RouterMetrics | None, door: Door, error: BatonError) -> None:
    """A connection, for want of a place."""
    refusals.refused(error, door=door.label)
    if metrics is not None:
        metrics.connection_refused(door)


def _make_metrics(config: RouterConfig, runtime: NodeRuntime, keys: KeyFile | None) -> RouterMetrics | None:
    if config.metrics_listen is None:
        return None
    # Here and below: a router without HTTP does not load its libraries.
    from router.metrics import RouterMetrics

    metrics = RouterMetrics(
        runtime.membership.nodes,
        directory_lost=lambda: runtime.membership.stale,
        keys=keys.book.uses if keys is not None else tuple,
    )
    runtime.loop_lag.report = metrics.look_at_loop
    return metrics


def _open_metrics(
    config: RouterConfig, metrics: RouterMetrics, staff: _OneProcess | _Workers, runtime: NodeRuntime
) -> tuple[HttpServer, str]:
    """The server, and its endpoint. Raises BatonError."""
    from router.http_server import HttpServer
    from router.metrics_server import metrics_app

    async def fetch() -> None:
        metrics.of_workers = await staff.fetch_figures()
        metrics.worker_pids = staff.pids()

    assert config.metrics_listen is not None
    server = HttpServer(metrics_app(metrics, fetch), config, rng=runtime.rng)
    return server, server.start(config.metrics_listen, setting="metrics_listen")


def _warn_of_strangers(config: RouterConfig) -> None:
    for name, listen in (("listen", config.listen), ("http_listen", config.http_listen)):
        if listen is not None and not is_loopback(listen):
            log.warning("whoever reaches this address may use the cluster: set api_keys_file", port=name, listen=listen)


async def _open_pins(config: RouterConfig, staff: _OneProcess | _Workers, runtime: NodeRuntime) -> PinKeeper:
    """Serve baton.v1.Pins and take the configured pins in. Raises BatonError where one of these cannot be encoded."""
    keeper = PinKeeper(
        config=config.pins,
        incarnation=runtime.incarnation,
        nodes=runtime.membership.nodes,
        channels=runtime.channels,
        clock=runtime.clock,
        warm=staff.warm,
    )
    for prefix in config.pinned_prefixes:
        tokens = await asyncio.to_thread(staff.prompts.encode_pin, prefix)
        keeper.add(prefix, tokens, from_config=True, warm=True)
    service = PinsService(keeper, staff.prompts, model=staff.model)
    runtime.admin.add("baton.v1.Pins", pins_pb2_grpc.add_PinsServicer_to_server, service)
    return keeper
