"""The standard health service (grpc.health.v1), over a plain table of named services.

It replaces the library's servicer: there, when one of two watchers of a service leaves, the other one gets no more
notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVENESS: Final = ("", "live")
"""Serving from start to end: only a process that should be killed may stop answering it."""
READINESS: Final = "ready"
if TYPE_CHECKING:
    HealthContext = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Liveness is always SERVING; readiness and the named services flip together. One event loop, no lock."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services) | {READINESS}
        self._ready = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Set readiness and notify the watchers."""
        self._ready = ready
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: HealthContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("No service of this name here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: HealthContext) -> None:
        sent = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()

    def _status(self, service: str) -> int:
        responses = health_pb2.HealthCheckResponse
        if service in LIVENESS:
            return int(responses.SERVING)
        if service not in self._services:
            return int(responses.SERVICE_UNKNOWN)
        return int(responses.SERVING if self._ready else responses.NOT_SERVING)
