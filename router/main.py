"""Puts a router together, runs it until it is asked to stop, and takes it apart in the reverse order. No torch here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from batonpb import inference_pb2, inference_pb2_grpc, pins_pb2_grpc

from baton.clock import Clock
from baton.drain import Holdings
from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.membership import Membership
from baton.rpc import check_can_bind
from baton.runtime import NodeRuntime, Progress
from baton.tracing import Traceparent, new_request_id
from baton.wire import NodeLoad, Role
from engine.model_config import ModelError, SamplingDefaults, load_sampling_defaults, resolve_model
from router.chat import ChatEncoder
from router.config import RouterConfig
from router.node import RouterNode
from router.pins import PinKeeper, PinsService, PrefixEncoder
from router.prefill_nodes import NOT_READY_RETRY_MS
from router.request import NEUTRAL
from router.service import InferenceService
from router.text import TextCodec

if TYPE_CHECKING:
    from router.chat_template import ChatTemplate
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

    def follow_directory() -> None:
        node.follow_directory(runtime.membership.nodes())
        pins.follow_directory()

    runtime = NodeRuntime(config, Role.ROUTER, clock=Clock(), rng=rng, on_change=follow_directory)
    await runtime.check_listen()
    if config.http_listen is not None:
        await check_can_bind(config.http_listen, setting="http_listen")
    folder = await asyncio.to_thread(_folder, config.model)
    codec = TextCodec.load(folder) if folder is not None else None
    template = _template(folder)
    defaults = _sampling_defaults(folder) if config.generation_config else NEUTRAL
    chats = ChatEncoder(codec=codec, template=template, chars_max=config.prompt_chars_max)
    metrics = _metrics(runtime) if config.http_listen is not None else None
    if metrics is not None:
        runtime.loop_lag.told = metrics.loop_lag_s.observe
    node = RouterNode(
        config=config,
        incarnation=runtime.incarnation,
        prefill_nodes=lambda: runtime.membership.nodes(Role.PREFILL),
        channels=runtime.channels,
        codec=codec,
        chats=chats,
        loop=asyncio.get_running_loop(),
        rng=rng,
        sampling_defaults=defaults,
        observer=metrics,
        check_known=runtime.membership.check_known,
    )

    runtime.holds = lambda: Holdings(requests=node.requests)
    runtime.load = lambda: NodeLoad(running_requests=node.requests)
    runtime.upkeep = node.upkeep
    service = InferenceService(
        node, limits=config.rpc, rng=rng, takes_requests=lambda: runtime.lifecycle.takes_requests
    )
    runtime.server.on_refused(lambda error: node.refused(error, door="grpc"))
    runtime.server.add("baton.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, service)
    pins = await _open_pins(config, node, PrefixEncoder(codec, template, chars_max=config.prompt_chars_max), runtime)
    renewing = asyncio.create_task(pins.run(), name="pins")
    renewing.add_done_callback(_log_failure)
    http: HttpServer | None = None
    try:
        endpoint = await runtime.open()
        if metrics is not None:
            http = _open_http(config, node, codec, chats, metrics, runtime)
        on_ready(endpoint)
        await runtime.serve_until(stop, drain)
    finally:
        await runtime.leave()
        renewing.cancel()
        await asyncio.wait([renewing])
        await asyncio.gather(
            runtime.server.stop(config.stop_grace_ms / 1000), *([http.stop()] if http is not None else [])
        )
        await node.close()
        await runtime.close()


async def _open_pins(config: RouterConfig, node: RouterNode, encoder: PrefixEncoder, runtime: NodeRuntime) -> PinKeeper:
    """Serve baton.v1.Pins and take the configured pins in. Raises BatonError where one of these cannot be encoded."""
    nodes, rng = runtime.membership.nodes, runtime.rng

    async def warm(tokens: Sequence[int], salt: str | None) -> None:
        # Two tokens: with one, no decode node would be asked.
        sampling = inference_pb2.Sampling(temperature=0, max_tokens=2, ignore_eos=True)
        prompt = inference_pb2.TokenIds(ids=tokens)
        request = inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling, cache_salt=salt)
        deadline_s = asyncio.get_running_loop().time() + config.rpc.public_deadline_ms_default / 1e3
        trace = Traceparent.new(rng, sampled=False)
        answer = node.generate(request, request_id=new_request_id(rng), trace=trace, deadline_s=deadline_s)
        async with aclosing(answer) as events:
            async for _ in events:
                pass

    keeper = PinKeeper(
        config=config.pins,
        incarnation=runtime.incarnation,
        nodes=lambda: list({r.incarnation: r for r in (*nodes(Role.PREFILL), *nodes(Role.DECODE))}.values()),
        channels=runtime.channels,
        clock=runtime.clock,
        warm=warm,
    )
    for prefix in config.pinned_prefixes:
        tokens = await asyncio.to_thread(encoder.encode, prefix)
        keeper.add(prefix, tokens, from_config=True, warm=config.pins.warm_configured)
    service = PinsService(keeper, encoder, model=node.model, clock=runtime.clock)
    runtime.server.add("baton.v1.Pins", pins_pb2_grpc.add_PinsServicer_to_server, service)
    return keeper


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("pins are no longer renewed", exc_info=task.exception())


def _metrics(runtime: NodeRuntime) -> RouterMetrics:
    from router.metrics import RouterMetrics

    membership = runtime.membership
    return RouterMetrics(
        lambda: [record for record in membership.nodes() if record.role is not Role.ROUTER],
        directory_lost=lambda: membership.stale,
    )


def _check_cluster(membership: Membership) -> None:
    """Raises BatonError DIRECTORY_LOST or NO_DECODE_NODE where each request would end so."""
    membership.check_known()
    decode_nodes = membership.nodes(Role.DECODE)
    if not any(record.lifecycle is Lifecycle.READY for record in decode_nodes):
        raise BatonError(
            Reason.NO_DECODE_NODE,
            f"No decode node is ready ({len(decode_nodes)} known). Start one, or wait for one to come up.",
            retry_after_ms=NOT_READY_RETRY_MS,
        )


def _open_http(
    config: RouterConfig,
    node: RouterNode,
    codec: TextCodec | None,
    chats: ChatEncoder,
    metrics: RouterMetrics,
    runtime: NodeRuntime,
) -> HttpServer:
    """Imports the HTTP libraries only here: a router without HTTP does not load them."""
    from router.http_server import HttpServer, OpenAiApp

    assert config.http_listen is not None
    app = OpenAiApp(
        node,
        config=config,
        codec=codec,
        chats=chats,
        metrics=metrics,
        rng=runtime.rng,
        takes_requests=lambda: runtime.lifecycle.takes_requests,
        check_cluster=lambda: _check_cluster(runtime.membership),
    )
    server = HttpServer(app.asgi(), config, refused=lambda error: node.refused(error, door="http"))
    log.info("HTTP is served", endpoint=server.start(config.http_listen))
    return server


def _template(folder: Path | None) -> ChatTemplate | None:
    """Imports the template language only here: a router without a model does not load it."""
    if folder is None:
        return None
    from router.chat_template import ChatTemplate

    try:
        return ChatTemplate.load(folder)
    except BatonError as error:
        # Whoever sends plain prompts needs none.
        log.warning("chats are refused: the model's template is of no use", why=error.message)
        return None


def _sampling_defaults(folder: Path | None) -> SamplingDefaults:
    """Raises BatonError MODEL_BROKEN."""
    if folder is None:
        return NEUTRAL
    try:
        defaults = load_sampling_defaults(folder)
    except ModelError as error:
        raise BatonError(
            Reason.MODEL_BROKEN, f"{error}. Mend it, or set generation_config to false.", field="generation_config"
        ) from error
    if defaults != NEUTRAL:
        log.info("requests that name no sampling values get the model's", **asdict(defaults))
    return defaults


def _folder(model: str | None) -> Path | None:
    if model is None:
        return None
    try:
        return resolve_model(model, weights=False)
    except ModelError as error:
        raise BatonError(Reason.MODEL_MISSING, str(error), field="model") from error
