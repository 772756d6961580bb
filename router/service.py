"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`.

A stream's tokens come to its sink; the handler's task writes them, and what comes meanwhile waits for its next message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import grpc
from batonpb import inference_pb2
from google.protobuf.message import DecodeError

from baton.errors import BatonError, bad_field
from baton.rpc import client_source, time_left_s
from baton.tracing import Traceparent, new_request_id, read_metadata
from router.answers import AnswerPart, Collected
from router.byte_shares import TextOwner
from router.keys import Admission, KeyBook, authorization_of
from router.node import CUT_OFF, RouterNode
from router.prompts import PromptEncoder
from router.request import ClientCall, read_attach, read_message
from router.resume import Place, Resume, ResumeToken, check_same, request_digest
from router.text_workers import SHORT_BYTES_MAX

_T = TypeVar("_T")

INFERENCE_SERVICE: Final = "baton.v1.Inference"
FIRST_WRITE_MS_MAX: Final = 1_000


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
            "Attach": grpc.unary_stream_rpc_method_handler(
                self._attach, response_serializer=inference_pb2.GenerateEvent.SerializeToString
            ),
            "Forget": grpc.unary_unary_rpc_method_handler(
                self._forget,
                request_deserializer=inference_pb2.ForgetRequest.FromString,
                response_serializer=inference_pb2.ForgetReply.SerializeToString,
            ),
            "GenerateUnary": grpc.unary_unary_rpc_method_handler(
                self._generate_unary, response_serializer=inference_pb2.GenerateResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))

    async def _generate(self, raw: bytes, context: Any) -> None:
        with self._admitted(context) as admission:
            request = await self._read(read_message, raw, context, admission)
            resume = self._node.resumable(request_digest([request], 1)) if request.resumable else None
            await self._send(request, resume, context, admission)

    async def _attach(self, raw: bytes, context: Any) -> None:
        await self._end_former(raw, context)
        with self._admitted(context, attaches=True) as admission:
            message = await self._read(read_attach, raw, context, admission)
            with self._refusals():
                token = ResumeToken.decode(message.resume_token)
                if len(token.places) != 1:
                    raise bad_field("resume_token", "It is of a call for several answers: go on with it over HTTP.")
                request = message.request if message.HasField("request") else None
                if request is not None:
                    check_same(token, [request], field="resume_token")
                resume = Resume.attach(token, said=message.output.ids)
            await self._send(request, resume, context, admission)

    async def _end_former(self, raw: bytes, context: Any) -> None:
        if self._keys is None:
            return
        with suppress(BatonError, DecodeError):  # `_admitted` or `_read` says so
            use = self._keys.find(authorization_of(context.invocation_metadata()))
            if use.full:
                # It has the token alone, under the same number: the rest is not parsed, however long it is.
                message = inference_pb2.ForgetRequest.FromString(raw)
                await self._node.end_former(ResumeToken.decode(message.resume_token), use)

    async def _forget(self, request: inference_pb2.ForgetRequest, context: Any) -> inference_pb2.ForgetReply:
        with self._refusals():
            use = self._keys.find(authorization_of(context.invocation_metadata())) if self._keys else None
            token = ResumeToken.decode(request.resume_token)
            await self._node.forget(token, use)
        return inference_pb2.ForgetReply()

    async def _send(
        self,
        request: inference_pb2.GenerateRequest | None,
        resume: Resume | None,
        context: Any,
        admission: Admission | None,
    ) -> None:
        sink = _Stream(resume)
        answer = asyncio.create_task(self._node.run(request, self._call(request, context, admission, resume), sink))
        answer.add_done_callback(sink.ended)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as sink.scope:
                    await sink.write_all(context.write)
            await answer
        finally:
            answer.cancel()
            await asyncio.wait([answer])
            del answer, sink.scope  # an error that they have would refer to itself, by this frame in its traceback

    def _call(
        self,
        request: inference_pb2.GenerateRequest | None,
        context: Any,
        admission: Admission | None,
        resume: Resume | None = None,
        *,
        whole: bool = False,
    ) -> ClientCall:
        rng = self._node.rng
        with self._refusals():
            called = read_metadata(context.invocation_metadata())
        parent, now_s = called.traceparent, asyncio.get_running_loop().time
        call = ClientCall(
            id=called.request_id or new_request_id(rng),
            trace=parent.child(rng) if parent is not None else Traceparent.new(rng, sampled=False),
            deadline_s=now_s() + time_left_s(context, self._node.config.rpc),
            choice=request.sampling.choice if request is not None else 0,
            whole=whole,
            source=self._source(context),
            resume=resume,
        )
        return call if admission is None else admission.sign(call, now_s)

    @contextmanager
    def _admitted(self, context: Any, *, attaches: bool = False) -> Iterator[Admission | None]:
        """Raises BatonError INVALID_API_KEY or RATE_LIMIT_EXCEEDED, which the log has too."""
        if self._keys is None:
            yield None
            return
        with self._refusals():
            use = self._keys.find(authorization_of(context.invocation_metadata()))
            now_s = asyncio.get_running_loop().time()
            admission = use.admit(now_s, spread=self._node.rng.random(), attaches=attaches)
        try:
            yield admission
        finally:
            admission.end()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What is refused within is for the log too: no request has begun."""
        try:
            yield
        except BatonError as error:
            self._node.request_log.refused(error, door="grpc")
            raise

    def _source(self, context: Any) -> str | None:
        return client_source(context, self._proxies)

    async def _read(
        self,
        work: Callable[[PromptEncoder, bytes | bytearray, int], _T],
        raw: bytes,
        context: Any,
        admission: Admission | None,
    ) -> _T:
        """Raises BatonError, which the log has too."""
        node, context_len_max = self._node, self._node.context_len_max()
        with self._refusals():
            if len(raw) <= SHORT_BYTES_MAX:
                return work(node.prompts, raw, context_len_max)
            key = admission.key.name if admission is not None else None
            owner = TextOwner(address=self._source(context), key=key)
            return await node.texts.run(owner, work, raw, context_len_max)

    async def _generate_unary(self, raw: bytes, context: Any) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        with self._admitted(context) as admission:
            request = await self._read(read_message, raw, context, admission)
            with self._refusals():
                if request.resumable:
                    raise bad_field("resumable", "Only a stream is resumable: call Generate, or leave resumable out.")
            answer = Collected()
            await self._node.run(request, self._call(request, context, admission, whole=True), answer)
        response = inference_pb2.GenerateResponse(request_id=answer.start.request_id)
        response.text = "".join(part.text for part in answer.parts)
        for part in answer.parts:
            response.ids.extend(part.ids)
            response.logprobs.extend(part.logprobs)
        response.reason = answer.end.reason
        response.stats.CopyFrom(answer.end.stats)
        return response


class _Stream:
    """The sink of one call."""

    def __init__(self, resume: Resume | None) -> None:
        self.on_open: Callable[[], None] | None = None
        self.is_open = True
        self.scope: asyncio.Timeout
        """Around the writing."""
        self._resume = resume
        self._events: deque[inference_pb2.GenerateEvent] = deque()
        self._news = asyncio.Event()
        self._over = False

    def started(self, started: inference_pb2.Started, place: Place | None) -> None:
        self._put(inference_pb2.GenerateEvent(started=started), place)

    def tokens(self, part: AnswerPart) -> None:
        tokens = inference_pb2.Tokens(
            first_index=part.first_index, ids=part.ids, text=part.text, logprobs=part.logprobs
        )
        self._put(inference_pb2.GenerateEvent(tokens=tokens), part.place)

    def finished(self, finished: inference_pb2.Finished, place: Place | None) -> None:
        self._put(inference_pb2.GenerateEvent(finished=finished), place)

    def ended(self, answer: asyncio.Task[None]) -> None:
        """Nothing more comes."""
        self._over = True
        self._news.set()
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, BatonError) and error.reason in CUT_OFF:
            self.scope.reschedule(asyncio.get_running_loop().time())

    async def write_all(self, write: Callable[[inference_pb2.GenerateEvent], Coroutine[Any, Any, None]]) -> None:
        """What has come and comes, until the answer is over."""
        begun = False
        while True:
            while self._events:
                event = self._events.popleft()
                await (write(event) if begun else _to_its_end(write(event)))
                begun = True
            self.is_open = True
            if self.on_open is not None:
                self.on_open()
            if self._events:
                continue
            if self._over:
                return
            self._news.clear()
            await self._news.wait()

    def _put(self, event: inference_pb2.GenerateEvent, place: Place | None) -> None:
        if place is not None and self._resume is not None:
            event.resume_token = self._resume.token(place).encode()
        self._events.append(event)
        self.is_open = False
        self._news.set()


async def _to_its_end(write: Coroutine[Any, Any, None]) -> None:
    """A call's first write, with its headers: if it were cut off, gRPC would send them again with the error, and the
    call would never end. It is small, and does not wait for the client."""
    task = asyncio.ensure_future(write)
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.wait([task], timeout=FIRST_WRITE_MS_MAX / 1000)
