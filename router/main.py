"""Puts a router together, runs it until it is asked to stop, and takes it apart in the reverse order. No torch here."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from batonpb import pins_pb2_grpc

from baton.clock import Clock
from baton.drain import Holdings
from baton.endpoint import is_loopback, join_endpoint, split_endpoint
from baton.errors import BatonError, Reason
from baton.http2_front import Ended, native_front
from baton.known_nodes import KnownNodes
from baton.listen import check_can_bind
from baton.log import get_log
from baton.runtime import NodeRuntime, Progress
from baton.tasks import Tasks
from baton.wire import NodeLoad, Role
from engine.model_config import ModelError, SamplingDefaults, load_sampling_defaults, resolve_model
from router.config import RouterConfig
from router.doors import Door, Doors
from router.key_file import KeyFile
from router.keys import authorization_of
from router.local_taker import LocalTaker
from router.node import RouterNode
from router.pins import PinKeeper, PinsService
from router.prompts import PromptEncoder
from router.request import INT_DIGITS_MAX, NEUTRAL
from router.service import INFERENCE_SERVICE, InferenceService

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from router.http_server import HttpServer
    from router.metrics import RouterMetrics

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
    rng = Random(secrets.randbits(64))

    known = KnownNodes(config.known_nodes_file)

    def follow_directory() -> None:
        node.follow_directory(runtime.membership.nodes())
        pins.follow_directory()
        if not runtime.membership.stale:
            known.follow(runtime.membership.nodes())

    runtime = NodeRuntime(
        config,
        Role.ROUTER,
        admin_listen=config.admin_listen,
        clock=Clock(),
        rng=rng,
        on_change=follow_directory,
        lame_duck_ms=config.lame_duck_ms,
        last_known=known.read,
    )
    await runtime.check_listen()
    keys = await KeyFile.open(config.api_keys_file) if config.api_keys_file is not None else None
    for setting in ("http_listen", "metrics_listen"):
        if getattr(config, setting) is not None:
            await check_can_bind(getattr(config, setting), setting=setting)
    metrics = _make_metrics(config, runtime, keys)
    node = _make_node(config, runtime, metrics, await asyncio.to_thread(_folder, config.model))
    http: dict[str, HttpServer] = {}
    doors, taker = _make_doors(config, node, metrics)
    _set_runtime(runtime, node, doors, taker, http)
    _add_inference(config, node, runtime, keys)
    pins = await _open_pins(config, node, runtime)
    renewing = Tasks(asyncio.get_running_loop(), log, broken="pins are no longer renewed")
    renewing.spawn(pins.run())
    reloading = Tasks(asyncio.get_running_loop(), log, broken="API keys are no longer read anew")
    if keys is not None:
        reloading.spawn(keys.follow())
    try:
        others = _open_http(config, node, metrics, keys, http, runtime.membership.trouble)
        await _open_doors(config, runtime, doors, taker, http, others)
        endpoint = await runtime.open()
        if keys is None:
            _warn_of_strangers(config)
        on_ready(endpoint, admin=runtime.admin_endpoint, **others)
        await runtime.drain.serve_until(stop, drain, drain_ms_max=config.drain_ms_max)
    finally:
        await runtime.leave()
        await renewing.cancel()
        await reloading.cancel()
        doors.close()
        await asyncio.gather(runtime.stop_serving(), *(each.stop() for each in http.values()))
        await taker.close()
        await node.close()
        await runtime.close()
        await known.close()


def _set_runtime(
    runtime: NodeRuntime, node: RouterNode, doors: Doors, taker: LocalTaker, http: Mapping[str, HttpServer]
) -> None:
    def upkeep() -> None:
        node.upkeep()
        doors.upkeep()
        taker.upkeep()

    runtime.upkeep = upkeep
    runtime.holds = lambda: Holdings(requests=max(node.requests, _calls(runtime, http)))
    runtime.follow_lifecycle = lambda: _follow_lifecycle(runtime, http, doors)
    runtime.load = lambda: NodeLoad(waiting_requests=node.waiting, running_requests=node.requests - node.waiting)


def _make_node(
    config: RouterConfig, runtime: NodeRuntime, metrics: RouterMetrics | None, folder: Path | None
) -> RouterNode:
    """Raises BatonError where the model's folder is broken."""
    return RouterNode(
        config=config,
        incarnation=runtime.incarnation,
        lifecycle=runtime.lifecycle,
        channels=runtime.channels,
        prompts=PromptEncoder.load(folder, chars_max=config.prompt_chars_max),
        clock=runtime.clock,
        rng=runtime.rng,
        token_bytes=secrets.token_bytes,
        sampling_defaults=_sampling_defaults(folder) if config.generation_config else NEUTRAL,
        received=metrics.received if metrics is not None else None,
        check_known=runtime.membership.check_known,
    )


def _add_inference(config: RouterConfig, node: RouterNode, runtime: NodeRuntime, keys: KeyFile | None) -> None:
    runtime.server.trust_proxies(config.trusted_networks())
    runtime.server.on_refused(partial(node.request_log.refused, door="grpc"))
    if keys is not None:
        runtime.server.check_callers_by(lambda metadata: keys.book.find(authorization_of(metadata)))
    inference = InferenceService(node, keys.book if keys is not None else None)
    runtime.server.add(INFERENCE_SERVICE, InferenceService.add_to_server, inference)


def _calls(runtime: NodeRuntime, http: Mapping[str, HttpServer]) -> int:
    """Of clients, under way: those that are being read are no requests yet."""
    return runtime.server.public_calls + (http["http"].calls if "http" in http else 0)


def _follow_lifecycle(runtime: NodeRuntime, http: Mapping[str, HttpServer], doors: Doors) -> None:
    runtime.server.set_open(runtime.lifecycle.takes_requests)
    doors.set_open(Door.GRPC, runtime.lifecycle.takes_requests)
    if "http" in http:
        http["http"].keep_connections(runtime.lifecycle.ready, idle=runtime.lifecycle.takes_requests)


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


def _open_http(
    config: RouterConfig,
    node: RouterNode,
    metrics: RouterMetrics | None,
    keys: KeyFile | None,
    servers: dict[str, HttpServer],
    directory_trouble: Callable[[], str],
) -> dict[str, str]:
    """Make what serves over HTTP, and add it to `servers`; the endpoints of what is no door. Raises BatonError."""
    endpoints = {}
    if config.http_listen is not None:
        from router.http_keys import KeyedApp
        from router.http_server import HttpServer, OpenAiApp

        app: ASGIApp = OpenAiApp(node, directory_trouble).asgi()
        if keys is not None:
            app = KeyedApp(app, keys.book, rng=node.rng, request_log=node.request_log, end_former=node.end_former)
        servers["http"] = HttpServer(app, config, rng=node.rng, refused=partial(node.request_log.refused, door="http"))
    if metrics is not None:
        from router.http_server import HttpServer
        from router.metrics_server import metrics_app

        assert config.metrics_listen is not None
        servers["metrics"] = HttpServer(metrics_app(metrics), config, rng=node.rng)
        endpoints["metrics"] = servers["metrics"].start(config.metrics_listen, setting="metrics_listen")
    return endpoints


def _make_doors(config: RouterConfig, node: RouterNode, metrics: RouterMetrics | None) -> tuple[Doors, LocalTaker]:
    def refused(door: Door, error: BatonError) -> None:
        node.request_log.refused(error, door=door.label)
        if metrics is not None:
            metrics.connection_refused(door)

    def ended(why: Ended) -> None:
        if metrics is not None:
            metrics.connection_ended(why)

    doors = Doors(config, refused=refused)
    taker = LocalTaker(doors.closed, proxies=config.trusted_networks(), ended=ended)
    return doors, taker


async def _open_doors(
    config: RouterConfig,
    runtime: NodeRuntime,
    doors: Doors,
    taker: LocalTaker,
    http: Mapping[str, HttpServer],
    endpoints: dict[str, str],
) -> None:
    """Listen at the public ports. Without the front gRPC listens itself. Raises BatonError."""
    native = await asyncio.to_thread(native_front)
    if native is not None:
        front = taker.open_front(native, rng=runtime.rng, now_s=runtime.clock.monotonic_s)
        front.opened = doors.resume
        runtime.server.stand_behind(front, doors.open(Door.GRPC, config.listen, setting="listen"))
    taker.http = http["http"].take if "http" in http else None
    doors.add(taker)
    if config.http_listen is not None:
        bound = doors.open(Door.HTTP, config.http_listen, setting="http_listen")
        endpoints["http"] = join_endpoint(split_endpoint(config.http_listen)[0], bound)


def _warn_of_strangers(config: RouterConfig) -> None:
    for name, listen in (("listen", config.listen), ("http_listen", config.http_listen)):
        if listen is not None and not is_loopback(listen):
            log.warning("whoever reaches this address may use the cluster: set api_keys_file", port=name, listen=listen)


async def _open_pins(config: RouterConfig, node: RouterNode, runtime: NodeRuntime) -> PinKeeper:
    """Serve baton.v1.Pins and take the configured pins in. Raises BatonError where one of these cannot be encoded."""
    keeper = PinKeeper(
        config=config.pins,
        incarnation=runtime.incarnation,
        nodes=runtime.membership.nodes,
        channels=runtime.channels,
        clock=runtime.clock,
        warm=node.warm,
    )
    for prefix in config.pinned_prefixes:
        tokens = await asyncio.to_thread(node.prompts.encode_pin, prefix)
        keeper.add(prefix, tokens, from_config=True, warm=config.pins.warm_configured)
    service = PinsService(keeper, node.prompts, model=node.model)
    runtime.admin.add("baton.v1.Pins", pins_pb2_grpc.add_PinsServicer_to_server, service)
    return keeper


def _sampling_defaults(folder: Path | None) -> SamplingDefaults:
    """Raises BatonError MODEL_BROKEN."""
    if folder is None:
        return NEUTRAL
    try:
        defaults = load_sampling_defaults(folder)
    except ModelError as error:
        text = f"{error}. Mend it, or set generation_config to false."
        raise BatonError(Reason.MODEL_BROKEN, text, field="generation_config") from error
    if defaults != NEUTRAL:
        log.info("requests that name no sampling values get the model's", **asdict(defaults))
    return defaults


def _folder(model: str | None) -> Path | None:
    """Raises BatonError MODEL_MISSING."""
    try:
        return resolve_model(model, weights=False) if model is not None else None
    except ModelError as error:
        raise BatonError(Reason.MODEL_MISSING, str(error), field="model") from error
