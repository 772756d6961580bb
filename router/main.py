"""Puts a router together, runs it until it is asked to stop, and takes it apart in the reverse order. No torch here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from random import Random

from batonpb import inference_pb2_grpc

from baton.clock import SystemClock
from baton.drain import Holdings
from baton.errors import BatonError, Reason
from baton.runtime import NodeRuntime, NodeSettings, Progress
from baton.wire import NodeLoad, Role
from engine.hub import resolve_model
from engine.model_config import ModelError
from router.config import RouterConfig
from router.node import RouterNode
from router.service import InferenceService
from router.text import TextCodec


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
    codec = await asyncio.to_thread(_codec, config.model)
    node = RouterNode(
        config=config,
        incarnation=runtime.incarnation,
        prefill_nodes=lambda: runtime.membership.nodes(Role.PREFILL),
        channels=runtime.channels,
        codec=codec,
        loop=asyncio.get_running_loop(),
        rng=rng,
    )

    runtime.holds = lambda: Holdings(requests=node.requests)
    runtime.load = lambda: NodeLoad(running_requests=node.requests)
    service = InferenceService(
        node, limits=config.rpc, rng=rng, takes_requests=lambda: runtime.lifecycle.takes_requests
    )
    runtime.server.add("baton.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, service)
    try:
        on_ready(await runtime.open())
        await runtime.serve_until(stop, drain)
    finally:
        await runtime.leave()
        await runtime.server.stop(config.stop_grace_ms / 1000)
        await node.close()
        await runtime.close()


def _codec(model: str | None) -> TextCodec | None:
    if model is None:
        return None
    try:
        return TextCodec.load(resolve_model(model, weights=False))
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
        stop_grace_ms=config.stop_grace_ms,
        drain_ms_max=config.drain_ms_max,
    )
