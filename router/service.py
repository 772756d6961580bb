"""The router's gRPC service: messages in, messages out, everything else in `RouterNode`.

A stream's tokens come to its sink, which writes them; what comes while a write waits is written behind it.
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
from router.line import priority_from_proto
from router.node import CUT_OFF, RouterNode
from router.prompts import PromptEncoder
from router.request import ClientCall, read_attach, read_message, with_priority
from router.resume import Place, Resume, ResumeToken, check_same, request_digest
from router.text_workers import SHORT_BYTES_MAX

_T = TypeVar("_T")
_Write = Coroutine[Any, Any, None]
"""Of one message."""

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
                await desk.end_answers(key)
            token = ResumeToken.decode(request.resume_token)
            if desk is None or key is None:
                await self._node.forget(token, None)
            else:
                await self._node.forget(token, key.name, partial(desk.ended, key))
        return inference_pb2.ForgetReply()

    async def _send(
        self,
        request: inference_pb2.GenerateRequest | None,
        resume: Resume | None,
        context: Any,
        keyed: KeyedCall | None,
    ) -> None:
        sink = _Stream(resume, context.write)
        answer = asyncio.create_task(self._node.run(request, self._call(request, context, keyed, resume), sink))
        answer.add_done_callback(sink.ended)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as sink.scope:
                    await sink.all_written()
            await answer
        finally:
            sink.scope = None
            if not answer.done():
                answer.cancel()
                await asyncio.wait([answer])
            await sink.close()
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
            shown=self._node.prompts.shown(resume.reading) if resume is not None else frozenset(),
        )
        asked = priority_from_proto(request.priority) if request is not None else None
        return with_priority(call if keyed is None else keyed.sign(call), asked)

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
        end = answer.end
        response.reason = end.reason
        response.stats.CopyFrom(end.stats)
        response.prompt_logprobs.extend(end.prompt_logprobs)
        if (stop := end.WhichOneof("stop")) is not None:
            setattr(response, stop, getattr(end, stop))
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
    """The sink of one call. A message's write begins in the call of the node's that brings it, and no task wakes up for
    it: the handler's waits until all is written."""

    def __init__(self, resume: Resume | None, write: Callable[[inference_pb2.GenerateEvent], _Write]) -> None:
        """`write` waits for nothing but futures of the loop."""
        self.on_open: Callable[[], None] | None = None
        self.is_open = True
        self.scope: asyncio.Timeout | None = None
        """Around the writing; None once that has ended."""
        self._resume = resume
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._events: deque[inference_pb2.GenerateEvent] = deque()
        self._writing: _Write | None = None
        self._first: asyncio.Future[None] | None = None
        """Done with the call's first write; None before that."""
        self._failure: BaseException | None = None
        """Of a write: nothing is written any more."""
        self._closed = False
        self._all_written = asyncio.Event()
        self._over = False

    def started(self, started: inference_pb2.Started, place: Place | None) -> None:
        self._put(inference_pb2.GenerateEvent(started=started), place)

    def tokens(self, part: AnswerPart) -> None:
        event = inference_pb2.GenerateEvent()
        tokens = event.tokens
        tokens.first_index = part.first_index
        tokens.ids.extend(part.ids)
        tokens.text = part.text
        if part.logprobs:
            tokens.logprobs.extend(part.logprobs)
        self._put(event, part.place)

    def token(self, index: int, token: int, text: str) -> None:
        self.tokens(AnswerPart(index, (token,), text, (), None))

    def finished(self, finished: inference_pb2.Finished, place: Place | None) -> None:
        self._put(inference_pb2.GenerateEvent(finished=finished), place)

    def ended(self, answer: asyncio.Task[None]) -> None:
        """Nothing more comes."""
        self._over = True
        if self._writing is None:
            self._all_written.set()
        error = None if answer.cancelled() else answer.exception()
        if self.scope is not None and isinstance(error, BatonError) and error.reason in CUT_OFF:
            self.scope.reschedule(self._loop.time())

    async def all_written(self) -> None:
        """Until the answer is over and written. Raises what a write raises."""
        await self._all_written.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Nothing more is written. The call's first write, with its headers, ends before: if the call ended without it,
        gRPC would send them again with the error, and the call would never end. It is small, and does not wait for the
        client."""
        self._closed, self.on_open = True, None
        self._events.clear()
        if self._first is not None and not self._first.done():
            await asyncio.wait([self._first], timeout=FIRST_WRITE_MS_MAX / 1000)
        self._failure = None  # it leads back to this

    def _put(self, event: inference_pb2.GenerateEvent, place: Place | None) -> None:
        if place is not None and self._resume is not None:
            event.resume_token = self._resume.token(place).encode()
        if self._failure is not None or self._closed:
            return
        self._events.append(event)
        if self._writing is None:
            self._write_all()
        self.is_open = self._writing is None

    def _write_all(self) -> None:
        """Write until a write has to wait, or nothing is left."""
        while self._writing is None and self._events:
            self._writing = self._write(self._events.popleft())
            if self._first is None:
                self._first = self._loop.create_future()
            self._step()

    def _step(self) -> None:
        """Let the write go on, up to the future that it waits for or to its end."""
        assert self._writing is not None
        try:
            future = self._writing.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the handler raises it
            if self._closed:  # a client that is gone fails the last write after the end
                error.__traceback__ = None  # it leads back to this
            else:
                self._failure = error
            self._events.clear()
            self._all_written.set()
        else:
            if future is None:  # it only lets others run
                self._loop.call_soon(self._go_on)
            else:
                future._asyncio_future_blocking = False  # as a task does: it is waited for
                future.add_done_callback(self._go_on)
            return
        self._writing = None
        assert self._first is not None
        if not self._first.done():
            self._first.set_result(None)

    def _go_on(self, _future: asyncio.Future[Any] | None = None) -> None:
        self._step()
        self._write_all()
        if self._writing is not None or self._failure is not None or self._closed:
            return
        self.is_open = True
        if self.on_open is not None:
            self.on_open()
        if self._over and self._writing is None:
            self._all_written.set()
