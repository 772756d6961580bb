"""Puts a router together, runs it until it is asked to stop, and takes it apart in the reverse order. No torch here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from batonpb import inference_pb2_grpc

from baton.clock import SystemClock
from baton.drain import Holdings
from baton.errors import BatonError, Reason
from baton.log import get_log
from baton.rpc import check_can_bind
from baton.runtime import NodeRuntime, NodeSettings, Progress
from baton.wire import NodeLoad, Role
from engine.hub import resolve_model
from engine.model_config import ModelError
from router.config import RouterConfig
from router.node import RouterNode
from router.service import InferenceService
from router.text import TextCodec

if TYPE_CHECKING:
    from router.http_server import HttpServer
    from router.metrics import RouterMetrics

log = get_log("router")


async def serve(
    config: RouterConfig,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    on_ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """Run until `stop`, or until `drain` has emptied it. Raises BatonError when the router cannot start."""
    del progress
    rng = Random(secrets.randbits(64))
    runtime = NodeRuntime(
        _settings(config),
        clock=SystemClock(),
        rng=rng,
        on_change=lambda: node.follow_directory(runtime.membership.nodes(Role.DECODE)),
    )
    await runtime.check_listen()
    if config.http_listen is not None:
        await check_can_bind(config.http_listen)
    folder = await asyncio.to_thread(_folder, config.model)
    codec = TextCodec.load(folder) if folder is not None else None
    metrics = _metrics(runtime) if config.http_listen is not None else None
    node = RouterNode(
        config=config,
        incarnation=runtime.incarnation,
        prefill_nodes=lambda: runtime.membership.nodes(Role.PREFILL),
        channels=runtime.channels,
        codec=codec,
        loop=asyncio.get_running_loop(),
        rng=rng,
        observer=metrics,
        check_known=runtime.membership.check_known,
    )

    runtime.holds = lambda: Holdings(requests=node.requests)
    runtime.load = lambda: NodeLoad(running_requests=node.requests)
    service = InferenceService(
        node, limits=config.rpc, rng=rng, takes_requests=lambda: runtime.lifecycle.takes_requests
    )
    runtime.server.add("baton.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, service)
    http: HttpServer | None = None
    try:
        endpoint = await runtime.open()
        if metrics is not None:
            http = _open_http(config, node, codec, folder, metrics, runtime)
        on_ready(endpoint)
        await runtime.serve_until(stop, drain)
    finally:
        await runtime.leave()
        await asyncio.gather(
            runtime.server.stop(config.stop_grace_ms / 1000), *([http.stop()] if http is not None else [])
        )
        await node.close()
        await runtime.close()


def _metrics(runtime: NodeRuntime) -> RouterMetrics:
    from router.metrics import RouterMetrics

    nodes = runtime.membership.nodes
    return RouterMetrics(lambda: [*nodes(Role.PREFILL), *nodes(Role.DECODE)])


def _open_http(
    config: RouterConfig,
    node: RouterNode,
    codec: TextCodec | None,
    folder: Path | None,
    metrics: RouterMetrics,
    runtime: NodeRuntime,
) -> HttpServer:
    """Imports the HTTP libraries only here: a router without HTTP does not load them."""
    from router.chat_template import ChatTemplate
    from router.http_server import HttpServer, OpenAiApp

    assert config.http_listen is not None
    app = OpenAiApp(
        node,
        config=config,
        codec=codec,
        template=ChatTemplate.load(folder) if folder is not None else None,
        metrics=metrics,
        rng=runtime.rng,
        takes_requests=lambda: runtime.lifecycle.takes_requests,
    )
    server = HttpServer(app.asgi(), config)
    log.info("HTTP is served", endpoint=server.start(config.http_listen))
    return server


def _folder(model: str | None) -> Path | None:
    if model is None:
        return None
    try:
        return resolve_model(model, weights=False)
    except ModelError as error:
        raise BatonError(Reason.MODEL_MISSING, str(error), field="model") from error


def _settings(config: RouterConfig) -> NodeSettings:
    return NodeSettings(
        name=config.name,
        role=Role.ROUTER,
        listen=config.listen,
        advertise=config.advertise,
        directory=config.directory,
        membership=config.membership,
        rpc=config.rpc,
        liveness=config.liveness,
        stop_grace_ms=config.stop_grace_ms,
        drain_ms_max=config.drain_ms_max,
    )
