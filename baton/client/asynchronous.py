"""The client for asyncio: `Course` decides, this calls routers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any, Final, Self, TypedDict, Unpack

import grpc
import grpc.aio
from batonpb import inference_pb2, inference_pb2_grpc

from baton.client.answer import Answer, AnswerBuilder, Piece, Prompt, Sampling, request_message
from baton.client.course import Call, Course, GiveUp, RouterBook
from baton.endpoint import check_reachable
from baton.errors import BatonError, Reason
from baton.grpc_core import ping_options, whole_wakes
from baton.status import from_rpc_error, is_of_node
from baton.tracing import REQUEST_ID

log = logging.getLogger("baton.client")

TIMEOUT_S_DEFAULT: Final = 300.0
CALL_S_MAX: Final = 7 * 24 * 3600.0
"""gRPC takes far longer times for past ones."""
CLOSED: Final = "This client is closed."
CONNECT_MS_MAX: Final = 1_000
"""For one attempt to connect to a router."""
RECONNECT_MS_MAX: Final = 500
HEARTBEAT_MS: Final = 1_000
"""Pause between pings of a router that says nothing."""
HEARTBEAT_ANSWER_MS_MAX: Final = 2_000
"""A router that leaves a ping unanswered for so long is lost. With the pause far below a decode node's `orphan_ms`: an
answer whose router has stopped is still there when the client asks for it."""
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one message. Many log-probabilities in one are large."""
FORGET_MS_MAX: Final = 2_000
FORGETS_MAX: Final = 4_096
"""Under way at the same time. Beyond them answers wait for their nodes to forget them by themselves."""
DNS_PREFIX: Final = "dns:///"
_ROUND_ROBIN: Final = '{"loadBalancingConfig": [{"round_robin": {}}]}'


class ClientOptions(TypedDict, total=False):
    api_key: str | None
    timeout_s: float
    """How long a whole answer may take, with all that the client does to get it. Default 300."""
    connect_timeout_s: float | None
    """How long to look for a router that answers. Each is tried in any case. Default: as long as an answer may take."""
    retries_max: int | None
    """Failures in a row that a request survives. Default: all that there is time for, of which 30 refusals."""
    credentials: grpc.ChannelCredentials | None
    """Of TLS, for a proxy in front of the routers. Default: plain connections."""


class RequestOptions(TypedDict, total=False):
    sampling: Sampling | None
    model: str | None
    """Refuse an answer of any other model."""
    cache_salt: str | None
    """Share cached prefixes only with requests of the same salt."""
    timeout_s: float | None
    """In place of the client's."""
    resumable: bool
    """The answer outlives its router: the client goes on with it at another one. Default: unless `prompt_logprobs` are
    asked for, which do not."""
    request_id: str | None
    """What logs and traces call it. Default: the router's choice."""


class AsyncClient:
    """Asks routers. Belongs to the event loop that it is first used on; close it, or use it by `async with`."""

    def __init__(self, routers: str | Sequence[str] = "127.0.0.1:7000", **options: Unpack[ClientOptions]) -> None:
        """`routers`: addresses as host:port, also several in one text with commas between, or dns:///name:port for all
        routers that a name stands for. Raises BatonError BAD_ENDPOINT or INVALID_API_KEY, TypeError or ValueError."""
        _check_options(options, ClientOptions.__annotations__)
        api_key = options.get("api_key")
        if api_key is not None and not all("!" <= character <= "~" for character in api_key):
            raise BatonError(Reason.INVALID_API_KEY, "The API key must be ASCII without spaces.", field="api_key")
        self._targets = _targets(routers)
        self._options = options
        self._rng = random.Random()
        dns = any(target.startswith(DNS_PREFIX) for target in self._targets)
        self._book = RouterBook(len(self._targets), first=self._rng.randrange(len(self._targets)), changing=dns)
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._stubs: dict[int, Any] = {}
        self._forgets: set[asyncio.Task[None]] = set()
        self._askings: set[_Asking] = set()
        self._closed = False

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Answer:
        """The whole answer. Cancelling the task cancels the request. Raises BatonError."""
        async with self._stream(prompt, options, unary=not _resumable(options)) as stream:
            async for _ in stream:
                pass
        return stream.answer

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncStream:
        """The answer as it comes. Nothing is sent before the first piece is asked for."""
        return self._stream(prompt, options)

    def _stream(self, prompt: Prompt, options: RequestOptions, *, unary: bool = False) -> AsyncStream:
        _check_options(options, RequestOptions.__annotations__)
        request = request_message(
            prompt,
            options.get("sampling"),
            options.get("model"),
            options.get("cache_salt"),
            resumable=_resumable(options),
        )
        timeout_s = options.get("timeout_s")
        if timeout_s is None:
            timeout_s = self._options.get("timeout_s", TIMEOUT_S_DEFAULT)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0.")
        request_id = options.get("request_id")
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            text = "A request id has 1 to 64 letters, digits or '._:-'."
            raise BatonError(Reason.BAD_REQUEST_ID, text, field="request_id")
        return AsyncStream(_Asking(self, request, timeout_s=timeout_s, request_id=request_id, unary=unary))

    async def settle(self) -> None:
        """Wait until the routers know which answers this client has. For a loop that is about to rest; bounded."""
        if self._forgets:
            await asyncio.wait(self._forgets, timeout=2 * FORGET_MS_MAX / 1e3)

    async def close(self) -> None:
        """Ends what is under way: who waits for it gets a RuntimeError. Idempotent."""
        for asking in self._askings:
            asking.leave()
        self._closed = True
        await self.settle()
        for forgetting in self._forgets:
            forgetting.cancel()
        channels, self._channels, self._stubs = list(self._channels.values()), {}, {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # For its streams.

    def course(self, timeout_s: float, now_s: float) -> Course:
        """Of a new request."""
        options = self._options
        return Course(
            self._book,
            began_s=now_s,
            timeout_s=timeout_s,
            rng=self._rng,
            connect_timeout_s=options.get("connect_timeout_s"),
            retries_max=options.get("retries_max"),
        )

    @property
    def closed(self) -> bool:
        return self._closed

    def follow(self, asking: _Asking) -> None:
        """It begins: `close` ends it. Raises RuntimeError."""
        self.check_open()
        self._askings.add(asking)

    def follow_no_more(self, asking: _Asking) -> None:
        self._askings.discard(asking)

    def check_open(self) -> None:
        """Raises RuntimeError."""
        if self._closed:
            raise RuntimeError(CLOSED)

    def stub(self, router: int) -> Any:
        stub = self._stubs.get(router)
        if stub is None:
            credentials = self._options.get("credentials")
            with whole_wakes():
                if credentials is None:
                    channel = grpc.aio.insecure_channel(self._targets[router], options=_channel_options())
                else:
                    channel = grpc.aio.secure_channel(self._targets[router], credentials, options=_channel_options())
            self._channels[router] = channel
            stub = self._stubs[router] = inference_pb2_grpc.InferenceStub(channel)
        return stub

    def metadata(self, request_id: str | None) -> list[tuple[str, str]]:
        api_key = self._options.get("api_key")
        found = [] if api_key is None else [("authorization", f"Bearer {api_key}")]
        return found if request_id is None else [*found, ("x-request-id", request_id)]

    def peer(self, router: int) -> str:
        """What errors call it."""
        return f"The router at {self._targets[router]}"

    def forget(self, resume_token: str, router: int) -> None:
        """Tell routers, in the background, that the request of this token is over."""
        if len(self._forgets) < FORGETS_MAX and not self._closed:
            forgetting = asyncio.get_running_loop().create_task(self._forget(resume_token, router))
            self._forgets.add(forgetting)
            forgetting.add_done_callback(self._forgets.discard)

    async def _forget(self, resume_token: str, router: int) -> None:
        """Asks that router first, and one more where it does not answer."""
        request = inference_pb2.ForgetRequest(resume_token=resume_token)
        for _ in range(2):
            try:
                await self.stub(router).Forget(request, timeout=FORGET_MS_MAX / 1e3, metadata=self.metadata(None))
            except grpc.aio.AioRpcError as error:
                log.debug("%s was not told that an answer is over: %s", self.peer(router), error.details())
                router = self._book.pick(asyncio.get_running_loop().time(), not_again=router)
            else:
                return


class AsyncStream(AsyncIterator[Piece]):
    """One answer as it comes. Whoever leaves it early closes it, best by `async with`: that ends the request."""

    def __init__(self, asking: _Asking) -> None:
        """Made by `AsyncClient.stream`."""
        self._builder = asking.builder
        self._pieces = asking.pieces()

    @property
    def answer(self) -> Answer:
        """What there is so far; `finish` says whether that is all."""
        return self._builder.answer()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces  # the shortest way to each piece

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Leave it: an answer that is not whole is cancelled. Idempotent."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Asking:
    """One request on its way. Nothing here refers to its stream: a stream that nobody holds is closed at once."""

    def __init__(
        self,
        client: AsyncClient,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float,
        request_id: str | None,
        unary: bool,
    ) -> None:
        self.builder = AnswerBuilder()
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._metadata = client.metadata(request_id)
        self._unary = unary
        self._call: Any = None
        self._router = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Raises BatonError, and RuntimeError where the client is closed."""
        client, builder, now_s = self._client, self.builder, asyncio.get_running_loop().time
        course = client.course(self._timeout_s, now_s())
        over = False
        client.follow(self)
        try:
            while True:
                called = course.call
                if called.after_s:
                    await asyncio.sleep(called.after_s)
                client.check_open()
                self._call = call = self._open(called, course.deadline_s - now_s())
                failure: BatonError | None = None
                by_router = False
                try:
                    async for event in call:
                        piece = builder.push(event)
                        course.heard(attachable=bool(builder.resume_token), new=piece is not None)
                        if piece is not None:
                            yield piece
                except grpc.aio.AioRpcError as error:
                    failure, by_router = from_rpc_error(error, peer=client.peer(called.router)), is_of_node(error)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or task.cancelling() or not client.closed:
                        raise
                finally:
                    call.cancel()
                if builder.complete:
                    return
                client.check_open()
                next_step = self._failed(course, failure, by_router=by_router)
                if isinstance(next_step, GiveUp):
                    over = next_step.over
                    raise next_step.error
        finally:
            client.follow_no_more(self)
            if not over:
                self._forget()

    def leave(self) -> None:
        """The client is about to be closed."""
        if self._call is not None:
            self._call.cancel()
        self._forget()

    def _forget(self) -> None:
        if self.builder.resume_token:
            self._client.forget(self.builder.resume_token, self._router)

    def _failed(self, course: Course, failure: BatonError | None, *, by_router: bool) -> Call | GiveUp:
        """What follows after a call that has ended before the answer."""
        peer = self._client.peer(course.call.router)
        if failure is None:
            failure = BatonError(Reason.PEER_UNREACHABLE, f"{peer} has ended the answer before its end.")
        if not by_router:
            failure.metadata.setdefault(UNREACHED_KEY, peer)
        next_step = course.failed(failure, by_router=by_router, now_s=asyncio.get_running_loop().time())
        if isinstance(next_step, Call):
            what = "going on with the answer" if next_step.attach else "asking again"
            log.info("%s in %.3f s: %s", what, next_step.after_s, failure.message)
        return next_step

    def _open(self, called: Call, left_s: float) -> Any:
        """A call whose events can be iterated over, and that can be cancelled."""
        stub, request, metadata = self._client.stub(called.router), self._request, self._metadata
        timeout_s = min(max(left_s, 1e-3), CALL_S_MAX)
        self.builder.attaching, self._router = called.attach, called.router
        if called.attach:
            attach = inference_pb2.AttachRequest(
                resume_token=self.builder.resume_token,
                request=request,
                output=inference_pb2.TokenIds(ids=self.builder.ids),
            )
            return stub.Attach(attach, timeout=timeout_s, metadata=metadata)
        if self._unary:
            return _Whole(stub.GenerateUnary(request, timeout=timeout_s, metadata=metadata))
        return stub.Generate(request, timeout=timeout_s, metadata=metadata)


class _Whole:
    """A unary call as the events of a stream."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        answer: inference_pb2.GenerateResponse = await self._call
        event = inference_pb2.GenerateEvent
        yield event(started=inference_pb2.Started(request_id=answer.request_id))
        yield event(tokens=inference_pb2.Tokens(ids=answer.ids, text=answer.text, logprobs=answer.logprobs))
        finished = inference_pb2.Finished(reason=answer.reason, stats=answer.stats)
        finished.prompt_logprobs.extend(answer.prompt_logprobs)
        yield event(finished=finished)


UNREACHED_KEY: Final = "unreached"
"""In the metadata of an error: the router that did not answer, or was lost."""


def _resumable(options: RequestOptions) -> bool:
    sampling = options.get("sampling")
    return options.get("resumable", sampling is None or sampling.prompt_logprobs is None)


def _check_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError."""
    for name in set(given) - set(known):
        in_sampling = " It goes into sampling=Sampling(...)." if name in Sampling.__slots__ else ""
        raise TypeError(f"There is no option '{name}'. There are: {', '.join(known)}.{in_sampling}")


def _targets(routers: str | Sequence[str]) -> list[str]:
    """gRPC's targets. Raises BatonError BAD_ENDPOINT."""
    texts = [routers] if isinstance(routers, str) else routers
    found = [text.strip() for given in texts for text in given.split(",") if text.strip()]
    if not found:
        raise BatonError(Reason.BAD_ENDPOINT, "There is no router to call: name one as host:port.", field="routers")
    for target in found:
        check_reachable(target.removeprefix(DNS_PREFIX))
    return found


def _channel_options() -> list[tuple[str, Any]]:
    return [
        *ping_options(HEARTBEAT_MS, HEARTBEAT_ANSWER_MS_MAX, idle=False),
        ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
        ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
        ("grpc.initial_reconnect_backoff_ms", CONNECT_MS_MAX // 20),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        # gRPC's name for the time one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS_MAX),
        # A router that starts again may have another address.
        ("grpc.dns_min_time_between_resolutions_ms", RECONNECT_MS_MAX),
        # Of one address it is what there is; of a name in DNS, each router in turn.
        ("grpc.service_config", _ROUND_ROBIN),
        # What is tried again, and where, is decided above.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
