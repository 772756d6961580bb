"""What serves clients in one process: a router's node, its gRPC and HTTP servers, and who takes connections for them.

It is a router's only process, or one of its workers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.http2_front import Ended, NativeFront
from baton.ids import Incarnation
from baton.lifecycle import Readiness
from baton.log import get_log
from baton.rpc import Channels, RpcServer
from engine.model_config import ModelError, SamplingDefaults, load_sampling_defaults, resolve_model
from router.config import RouterConfig
from router.key_desk import KeyDesk
from router.keys import authorization_of
from router.local_taker import LocalTaker
from router.node import RouterNode
from router.prompts import PromptEncoder
from router.request import NEUTRAL
from router.service import INFERENCE_SERVICE, InferenceService

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from router.http_server import HttpServer
    from router.metrics import RouterMetrics

log = get_log("router")

SHOWN_HEADERS: Final = ("x-request-id", "retry-after", "retry-after-ms")
"""That pages of other origins may read."""


class Serving:
    """Lives on one loop. Call `stop`, and then `close`, at the end."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        incarnation: Incarnation,
        lifecycle: Readiness,
        channels: Channels,
        server: RpcServer,
        clock: Clock,
        rng: Random,
        folder: Path | None,
        metrics: RouterMetrics | None,
        make_desk: Callable[[RouterNode], KeyDesk] | None,
        check_known: Callable[[], None],
        directory_trouble: Callable[[], str],
        closed: Callable[[int], None],
    ) -> None:
        """`folder` is the model's. `make_desk` is None where no API keys are needed. `closed` is called with the number
        of each connection that is over. Raises BatonError where the model's folder is broken."""
        self._config = config
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._server = server
        self.node = RouterNode(
            config=config,
            incarnation=incarnation,
            lifecycle=lifecycle,
            channels=channels,
            prompts=PromptEncoder.load(folder, chars_max=config.prompt_chars_max, tool_form=config.tool_parser),
            clock=clock,
            rng=rng,
            token_bytes=secrets.token_bytes,
            sampling_defaults=_sampling_defaults(folder) if config.generation_config else NEUTRAL,
            received=metrics.received if metrics is not None else None,
            check_known=check_known,
        )
        self.taker = LocalTaker(closed, proxies=config.trusted_networks(), ended=self._connection_ended)
        self._http: HttpServer | None = None
        desk = make_desk(self.node) if make_desk is not None else None
        self._add_inference(desk)
        if config.http_listen is not None:
            self._http = self._make_http(desk, directory_trouble)
            self.taker.http = self._http.take

    def stand_behind_front(self, native: NativeFront, port: int) -> None:
        """gRPC clients are given to `taker`, once the server has started; others listen at `port`."""
        front = self.taker.open_front(native, rng=self._rng, now_s=self._clock.monotonic_s)
        self._server.stand_behind(front, port)

    @property
    def requests(self) -> int:
        """Under way, or being read."""
        calls = self._server.public_calls + (self._http.calls if self._http is not None else 0)
        return max(self.node.requests, calls)

    def follow_lifecycle(self, lifecycle: Readiness) -> None:
        self._server.set_open(lifecycle.takes_requests)
        if self._http is not None:
            self._http.keep_connections(lifecycle.ready, idle=lifecycle.takes_requests)

    def upkeep(self) -> None:
        """Every second."""
        self.node.upkeep()
        self.taker.upkeep()

    async def stop(self) -> None:
        """Give running answers over HTTP the grace time. The gRPC server is stopped by its owner, at the same time."""
        if self._http is not None:
            await self._http.stop()

    async def close(self) -> None:
        """After all servers have stopped."""
        await self.taker.close()
        await self.node.close()

    def _add_inference(self, desk: KeyDesk | None) -> None:
        server = self._server
        server.trust_proxies(self._config.trusted_networks())
        server.on_refused(partial(self.node.request_log.refused, door="grpc"))
        if desk is not None:
            server.check_callers_by(lambda metadata: desk.find(authorization_of(metadata)))
        inference = InferenceService(self.node, desk)
        server.add(INFERENCE_SERVICE, InferenceService.add_to_server, inference)

    def _make_http(self, desk: KeyDesk | None, directory_trouble: Callable[[], str]) -> HttpServer:
        # A router without HTTP does not load its libraries.
        from starlette.middleware.cors import CORSMiddleware

        from router.http_keys import KeyedApp
        from router.http_server import HttpServer, OpenAiApp

        node = self.node
        app: ASGIApp = OpenAiApp(node, directory_trouble, desk).asgi()
        if desk is not None:
            app = KeyedApp(app, desk, rng=node.rng, request_log=node.request_log)
        if self._config.cors_origins:
            # Outside of the keys: what a browser asks first brings none.
            app = CORSMiddleware(
                app,
                allow_origins=self._config.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=SHOWN_HEADERS,
            )
        return HttpServer(app, self._config, rng=node.rng, refused=partial(node.request_log.refused, door="http"))

    def _connection_ended(self, why: Ended) -> None:
        if self._metrics is not None:
            self._metrics.connection_ended(why)


async def model_folder(model: str | None) -> Path | None:
    """Raises BatonError MODEL_MISSING."""
    try:
        return await asyncio.to_thread(resolve_model, model, weights=False) if model is not None else None
    except ModelError as error:
        raise BatonError(Reason.MODEL_MISSING, str(error), field="model") from error


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
