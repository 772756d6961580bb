"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final

import grpc
from batonpb import inference_pb2

from baton.errors import BatonError
from baton.ids import RequestId
from baton.rpc import client_source, time_left_s
from baton.tracing import CallMetadata, Traceparent, new_request_id, read_metadata
from router.byte_shares import TextOwner
from router.keys import Admission, KeyBook, authorization_of
from router.node import CutOff, RouterNode, client_guard
from router.request import ClientCall
from router.text_jobs import read_message
from router.text_workers import SHORT_BYTES_MAX

INFERENCE_SERVICE: Final = "baton.v1.Inference"


class InferenceService:
    """baton.v1.Inference, for clients. It takes messages as bytes: a long one with many parts would hold the loop."""

    def __init__(self, node: RouterNode, keys: KeyBook | None = None) -> None:
        """None: everybody may ask."""
        self._node = node
        self._keys = keys
        self._proxies = node.config.trusted_networks()

    def add_to_server(self, server: Any) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, response_serializer=inference_pb2.GenerateEvent.SerializeToString
            ),
            "GenerateUnary": grpc.unary_unary_rpc_method_handler(
                self._generate_unary, response_serializer=inference_pb2.GenerateResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))

    async def _generate(self, raw: bytes, context: Any) -> None:
        with self._admitted(context) as admission:
            request = await self._read(raw, self._source(context), admission)
            async with (
                client_guard() as cut_off,
                aclosing(self._events(request, context, admission, cut_off)) as events,
            ):
                async for event in events:
                    await context.write(event)

    def _events(
        self,
        request: inference_pb2.GenerateRequest,
        context: Any,
        admission: Admission | None,
        cut_off: CutOff | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        called, rng = self._check(context), self._node.rng
        parent, now_s = called.traceparent, asyncio.get_running_loop().time
        call = ClientCall(
            id=called.request_id or new_request_id(rng),
            trace=parent.child(rng) if parent is not None else Traceparent.new(rng, sampled=False),
            deadline_s=now_s() + time_left_s(context, self._node.config.rpc),
            choice=request.sampling.choice,
            source=self._source(context),
            cut_off=cut_off,
        )
        return self._node.generate(request, call if admission is None else admission.sign(call, now_s))

    @contextmanager
    def _admitted(self, context: Any) -> Iterator[Admission | None]:
        """Raises BatonError INVALID_API_KEY or RATE_LIMIT_EXCEEDED, which the log has too."""
        if self._keys is None:
            yield None
            return
        try:
            use = self._keys.find(authorization_of(context.invocation_metadata()))
            admission = use.admit(asyncio.get_running_loop().time(), spread=self._node.rng.random())
        except BatonError as error:
            self._node.request_log.refused(error, door="grpc")
            raise
        try:
            yield admission
        finally:
            admission.end()

    def _check(self, context: Any) -> CallMetadata:
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

    def _source(self, context: Any) -> str | None:
        return client_source(context, self._proxies)

    async def _read(self, raw: bytes, source: str | None, admission: Admission | None) -> inference_pb2.GenerateRequest:
        """Raises BatonError, which the log has too."""
        node, context_len_max = self._node, self._node.context_len_max()
        try:
            if len(raw) <= SHORT_BYTES_MAX:
                return read_message(node.prompts, raw, context_len_max)
            owner = TextOwner(address=source, key=admission.key.name if admission is not None else None)
            return await node.texts.run(owner, read_message, raw, context_len_max)
        except BatonError as error:
            node.request_log.refused(error, door="grpc")
            raise

    async def _generate_unary(self, raw: bytes, context: Any) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        with self._admitted(context) as admission:
            request = await self._read(raw, self._source(context), admission)
            async with aclosing(self._events(request, context, admission)) as events:
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
