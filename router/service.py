"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from batonpb import inference_pb2, inference_pb2_grpc

from baton.errors import BatonError
from baton.ids import RequestId
from baton.rpc import RpcLimits, time_left_s
from baton.tracing import CallMetadata, Traceparent, new_request_id, read_metadata
from router.node import ClientGuard, RouterNode, not_taken


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference, for clients."""

    def __init__(
        self, node: RouterNode, *, limits: RpcLimits, rng: random.Random, takes_requests: Callable[[], bool]
    ) -> None:
        self._node = node
        self._limits = limits
        self._rng = rng
        self._takes_requests = takes_requests

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        async with ClientGuard() as guard, aclosing(self._events(request, context, guard.cut_off)) as events:
            async for event in events:
                await context.write(event)

    async def _events(
        self,
        request: inference_pb2.GenerateRequest,
        context: Any,
        cut_off: Callable[[BatonError], None] | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        called = self._let_in(context)
        parent = called.traceparent
        trace = parent.child(self._rng) if parent is not None else Traceparent.new(self._rng, sampled=False)
        request_id = called.request_id or new_request_id(self._rng)
        deadline_s = asyncio.get_running_loop().time() + time_left_s(context, self._limits)
        events = self._node.generate(
            request,
            request_id=request_id,
            trace=trace,
            deadline_s=deadline_s,
            choice=request.sampling.choice,
            cut_off=cut_off,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    def _let_in(self, context: Any) -> CallMetadata:
        """Raises BatonError, told to the log too."""
        request_id: RequestId | None = None
        try:
            called = read_metadata(context.invocation_metadata())
            request_id = called.request_id
            if not self._takes_requests():
                raise not_taken()
        except BatonError as error:
            self._node.refused(error, door="grpc", request_id=request_id)
            raise
        return called

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        async with aclosing(self._events(request, context)) as events:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "started":
                    response.request_id = event.started.request_id
                elif kind == "tokens":
                    response.ids.extend(event.tokens.ids)
                    response.text += event.tokens.text
                    response.logprobs.extend(event.tokens.logprobs)
                else:
                    response.reason = event.finished.reason
                    response.stats.CopyFrom(event.finished.stats)
        return response
