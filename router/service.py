"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from batonpb import inference_pb2, inference_pb2_grpc

from baton.errors import BatonError
from baton.ids import RequestId
from baton.rpc import time_left_s
from baton.tracing import CallMetadata, Traceparent, new_request_id, read_metadata
from router.node import CutOff, RouterNode, client_guard
from router.request import ClientCall


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference, for clients."""

    def __init__(self, node: RouterNode) -> None:
        self._node = node

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        async with client_guard() as cut_off, aclosing(self._events(request, context, cut_off)) as events:
            async for event in events:
                await context.write(event)

    def _events(
        self, request: inference_pb2.GenerateRequest, context: Any, cut_off: CutOff | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        called, rng = self._admit(context), self._node.rng
        parent = called.traceparent
        call = ClientCall(
            id=called.request_id or new_request_id(rng),
            trace=parent.child(rng) if parent is not None else Traceparent.new(rng, sampled=False),
            deadline_s=asyncio.get_running_loop().time() + time_left_s(context, self._node.config.rpc),
            choice=request.sampling.choice,
            cut_off=cut_off,
        )
        return self._node.generate(request, call)

    def _admit(self, context: Any) -> CallMetadata:
        """Raises BatonError, which the log has too."""
        request_id: RequestId | None = None
        try:
            called = read_metadata(context.invocation_metadata())
            request_id = called.request_id
            self._node.check_open()
        except BatonError as error:
            self._node.request_log.refused(error, door="grpc", request_id=request_id)
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
