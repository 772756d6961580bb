"""Names of the standard health service (grpc.health.v1). The service itself is in `baton/health_service.py`."""

from __future__ import annotations

from typing import Final

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICE: Final = "grpc.reflection.v1alpha.ServerReflection"
LIVENESS: Final = ""
"""Serving from start to end: only a process that should be killed may stop answering it."""
READINESS: Final = "ready"
