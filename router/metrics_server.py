"""The router's metrics over HTTP, for Prometheus: on a port of their own, which clients need not reach."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.metrics import RouterMetrics


async def _nothing() -> None:
    pass


def metrics_app(metrics: RouterMetrics, fetch: Callable[[], Awaitable[None]] = _nothing) -> Starlette:
    """`fetch` is awaited first: it gets what is counted elsewhere."""

    async def text(request: Request) -> Response:
        await fetch()
        # Thousands of API keys take a tenth of a second.
        body, content_type = await asyncio.to_thread(metrics.text, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Starlette(routes=[Route("/metrics", text)])
