"""A client whose router is a function: what the commands do when answers come, stop and fail."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio
from batonpb import inference_pb2

from baton.client import AsyncClient, BatonError
from baton.status import to_status

Events = AsyncGenerator[inference_pb2.GenerateEvent, None]


class ScriptedClient(AsyncClient):
    """`answer(request)` gives the events of each call, and raises what `broken` or `refused` return."""

    def __init__(self, answer: Callable[[inference_pb2.GenerateRequest], Events]) -> None:
        super().__init__("nowhere:1")
        self._answer = answer

    def stub(self, router: int) -> Any:
        return self

    def Generate(self, request: inference_pb2.GenerateRequest, **_: object) -> Any:
        return _Call(self._answer(request))


class _Call:
    def __init__(self, events: Events) -> None:
        self._events = events

    def __aiter__(self) -> Events:
        return self._events

    def cancel(self) -> None:
        pass


def started() -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(started=inference_pb2.Started(request_id="r"))


def broken() -> grpc.aio.AioRpcError:
    """The connection is gone."""
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details="Socket closed")


def refused(error: BatonError) -> grpc.aio.AioRpcError:
    """The router says so."""
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)
