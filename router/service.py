"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`.

A stream's tokens come to its sink; the handler's task writes them, and what comes meanwhile waits for its next message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from batonpb import inference_pb2
from google.protobuf.message import DecodeError

from baton.errors import BatonError, bad_field
from baton.rpc import client_source, time_left_s
from baton.tracing import Traceparent, new_request_id, read_metadata
from router.answers import AnswerPart, Collected
from router.byte_shares import TextOwner
from router.key_desk import KeyDesk, KeyedCall
from router.keys import authorization_of
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

    def __init__(self, node: RouterNode, desk: KeyDesk | None = None) -> None:
        """None: everybody may ask."""
        self._node = node
        self._desk = desk
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
        with await self._admitted(context) as keyed:
            request = await self._read(read_message, raw, context, keyed)
            resume = self._node.resumable(request_digest([request], 1)) if request.resumable else None
            await self._send(request, resume, context, keyed)

    async def _attach(self, raw: bytes, context: Any) -> None:
        with await self._admitted(context, former=partial(_shown, raw)) as keyed:
            message = await self._read(read_attach, raw, context, keyed)
            with self._refusals():
                token = ResumeToken.decode(message.resume_token)
                if len(token.places) != 1:
                    raise bad_field("resume_token", "It is of a call for several answers: go on with it over HTTP.")
                request = message.request if message.HasField("request") else None
                if request is not None:
                    check_same(token, [request], field="resume_token")
                resume = Resume.attach(token, said=message.output.ids)
            await self._send(request, resume, context, keyed)

    async def _forget(self, request: inference_pb2.ForgetRequest, context: Any) -> inference_pb2.ForgetReply:
        with self._refusals():
            desk, key = self._desk, None
            if desk is not None:
                key = desk.find(authorization_of(context.invocation_metadata()))
            token = ResumeToken.decode(request.resume_token)
            if desk is None or key is None:
                await self._node.forget(token, None)
            else:
                await self._node.forget(token, key.name, partial(desk.came_back, key))
        return inference_pb2.ForgetReply()

    async def _send(
        self,
        request: inference_pb2.GenerateRequest | None,
        resume: Resume | None,
        context: Any,
        keyed: KeyedCall | None,
    ) -> None:
        sink = _Stream(resume)
        answer = asyncio.create_task(self._node.run(request, self._call(request, context, keyed, resume), sink))
        answer.add_done_callback(sink.ended)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as sink.scope:
                    await sink.write_all(context.write)
            await answer
        finally:
            sink.scope = None
            if not answer.done():
                answer.cancel()
                await asyncio.wait([answer])
            del answer  # an error that it has would refer to itself, by this frame in its traceback

    def _call(
        self,
        request: inference_pb2.GenerateRequest | None,
        context: Any,
        keyed: KeyedCall | None,
        resume: Resume | None = None,
        *,
        whole: bool = False,
    ) -> ClientCall:
        rng = self._node.rng
        with self._refusals():
            called = read_metadata(context.invocation_metadata())
        parent, now_s = called.traceparent, asyncio.get_running_loop().time()
        call = ClientCall(
            id=called.request_id or new_request_id(rng),
            trace=parent.child(rng) if parent is not None else Traceparent.new(rng, sampled=False),
            deadline_s=now_s + time_left_s(context, self._node.config.rpc),
            choice=request.sampling.choice if request is not None else 0,
            whole=whole,
            source=self._source(context),
            resume=resume,
        )
        return call if keyed is None else keyed.sign(call)

    async def _admitted(
        self, context: Any, *, former: Callable[[], ResumeToken] | None = None
    ) -> AbstractContextManager[KeyedCall | None]:
        """The call of the client's key, which ends with the context. `former` as for `KeyDesk.admit`. Raises BatonError
        INVALID_API_KEY or RATE_LIMIT_EXCEEDED, which the log has too."""
        if self._desk is None:
            return nullcontext()
        with self._refusals():
            key = self._desk.find(authorization_of(context.invocation_metadata()))
            return _ending(await self._desk.admit(key, former=former))

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
        keyed: KeyedCall | None,
    ) -> _T:
        """Raises BatonError, which the log has too."""
        node, context_len_max = self._node, self._node.context_len_max()
        with self._refusals():
            if len(raw) <= SHORT_BYTES_MAX:
                return work(node.prompts, raw, context_len_max)
            key = keyed.key.name if keyed is not None else None
            owner = TextOwner(address=self._source(context), key=key)
            return await node.texts.run(owner, work, raw, context_len_max)

    async def _generate_unary(self, raw: bytes, context: Any) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        with await self._admitted(context) as keyed:
            request = await self._read(read_message, raw, context, keyed)
            with self._refusals():
                if request.resumable:
                    raise bad_field("resumable", "Only a stream is resumable: call Generate, or leave resumable out.")
            answer = Collected()
            await self._node.run(request, self._call(request, context, keyed, whole=True), answer)
        response = inference_pb2.GenerateResponse(request_id=answer.start.request_id)
        response.text = "".join(part.text for part in answer.parts)
        for part in answer.parts:
            response.ids.extend(part.ids)
            response.logprobs.extend(part.logprobs)
        response.reason = answer.end.reason
        response.stats.CopyFrom(answer.end.stats)
        return response


@contextmanager
def _ending(keyed: KeyedCall) -> Iterator[KeyedCall]:
    try:
        yield keyed
    finally:
        keyed.end()


def _shown(raw: bytes) -> ResumeToken:
    """By a call that attaches. Raises BatonError."""
    try:
        # It has the token alone, under the same number: the rest is not parsed, however long it is.
        message = inference_pb2.ForgetRequest.FromString(raw)
    except DecodeError as error:
        raise bad_field("resume_token", "The message of the call is no AttachRequest.") from error
    return ResumeToken.decode(message.resume_token)


class _Stream:
    """The sink of one call."""

    def __init__(self, resume: Resume | None) -> None:
        self.on_open: Callable[[], None] | None = None
        self.is_open = True
        self.scope: asyncio.Timeout | None = None
        """Around the writing; None once that has ended."""
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
        if self.scope is not None and isinstance(error, BatonError) and error.reason in CUT_OFF:
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
        if not task.done():
            await asyncio.wait([task], timeout=FIRST_WRITE_MS_MAX / 1000)
