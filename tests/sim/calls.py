"""One gRPC call over the simulated network, at both ends.

Messages of one call arrive in order, calls overtake each other. A call on a lossy link breaks, before it was served or
after. A cut link holds what is on its way, until it heals or keepalive ends the connection. Calls that are idempotent
by contract may be served twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    from tests.sim.cluster import Process
    from tests.sim.rpc import SimChannel, SimServer

WINDOW_MESSAGES = 1
"""Messages of a stream that may be on their way unread; the next write waits."""
SERVED_TWICE = frozenset(
    f"/baton.v1.{method}"
    for method in (
        "Transfer/Reserve",
        "Transfer/Renew",
        "Transfer/Commit",
        "Transfer/Release",
        "Transfer/Revoke",
        "Decode/Cancel",
        "Decode/Resolve",
        "Directory/Push",
        "Directory/Remove",
    )
)
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_EMPTY = grpc.aio.Metadata()
Status = tuple[grpc.StatusCode, str, Any]


def _error(status: Status) -> grpc.aio.AioRpcError:
    code, details, trailers = status
    return grpc.aio.AioRpcError(code, _EMPTY, grpc.aio.Metadata(*(trailers or ())), details=details)


class Call:
    """One call, as its client has it. Awaited (one answer) or iterated (a stream of them)."""

    __slots__ = (
        "_arrives_s",
        "_channel",
        "_client",
        "_connected",
        "_consumer",
        "_deserialise",
        "_messages",
        "_requests_s",
        "_served",
        "_status",
        "_streams",
        "_timer",
        "_waiter",
        "method",
    )

    def __init__(self, channel: SimChannel, method: str, deserialise: Callable[[bytes], Any], *, streams: bool) -> None:
        self.method = method
        self._channel = channel
        self._client = channel.process
        self._deserialise = deserialise
        self._messages: deque[Any] = deque()
        self._status: Status | None = None
        self._streams = streams
        self._connected = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: Any = None
        self._served: ServedCall | None = None
        self._consumer: asyncio.Task[None] | None = None
        self._requests_s = 0.0
        self._arrives_s = 0.0

    # The caller's side.

    def begin(self, data: bytes | None, timeout: float | None, metadata: Any) -> None:
        """Send it off. `data` None: the requests are a stream of their own."""
        loop = self._client.loop
        if timeout is not None:
            self._timer = loop.call_later(timeout, self._expire)
        channel, network = self._channel, self._client.network
        server = network.servers.get(channel.endpoint)
        self._client.calls_out[self] = None
        if server is None:  # nobody listens: its end is known already
            loop.call_later(network.rng.random() * 0.002, self._end, (_UNAVAILABLE, "connection refused", None))
            return
        other = server.process.loop
        if channel.connected is not server:
            if not network.reaches(loop, other):
                self._client.cluster.excuses.broken(self._client, server.process)
                delay_s = channel.limits.connect_ms_max / 1000
                loop.call_later(delay_s, self._end, (_UNAVAILABLE, "failed to connect", None))
                return
            channel.connected = server
        link = network.link(loop.name, other.name)
        lost_after = False
        if link.loss > 0 and network.rng.random() < link.loss:
            self._client.cluster.excuses.broken(self._client, server.process)
            if network.rng.random() < 0.5:
                delay_s = network.rng.random() * 0.05
                loop.call_later(delay_s, self._end, (_UNAVAILABLE, "the connection was reset", None))
                return
            lost_after = True
        served = self._served = ServedCall(self, server, lost_after=lost_after)
        server.process.calls_in[self] = None
        if data is not None:
            network.note(loop, other, data)
        self._requests_s = network.send(loop, other, 0.0, served.arrive, data, timeout, metadata)
        if link.duplication > 0 and self.method in SERVED_TWICE and network.rng.random() < link.duplication:
            again = ServedCall(None, server, method=self.method)
            late_s = network.world.now_s + network.rng.random() * 0.5
            network.send(loop, other, late_s, again.arrive, data, timeout, metadata)

    def stream_requests(self, requests: AsyncIterator[Any], serialise: Callable[[Any], bytes]) -> None:
        if not self.done():
            self._consumer = self._client.loop.create_task(self._consume(requests, serialise), name="requests")

    async def _consume(self, requests: AsyncIterator[Any], serialise: Callable[[Any], bytes]) -> None:
        async for request in requests:
            served, client = self._served, self._client
            if self.done() or served is None:
                return
            data = serialise(request)
            client.network.note(client.loop, served.process.loop, data)
            self._requests_s = client.network.send(
                client.loop, served.process.loop, self._requests_s, served.take_request, data
            )
        if self._served is not None and not self.done():
            served = self._served
            self._client.network.send(
                self._client.loop, served.process.loop, self._requests_s, served.take_request, None
            )

    def done(self) -> bool:
        return self._status is not None

    async def answer(self) -> Any:
        """Of a call with one answer. Raises AioRpcError."""
        while not self._messages and self._status is None:
            await self._news()
        if self._messages:
            return self._messages.popleft()
        assert self._status is not None
        raise _error(self._status)

    async def initial_metadata(self) -> None:
        while not self._connected and not self._messages and self._status is None:
            await self._news()

    async def wait_for_connection(self) -> None:
        while not self._connected and not self._messages and self._status is None:
            await self._news()
        if self._status is not None and self._status[0] is not grpc.StatusCode.OK:
            raise _error(self._status)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    raise StopAsyncIteration
                raise _error(self._status)
            await self._news()
        if self._served is not None:
            self._served.taken()
        return self._messages.popleft()

    async def aclose(self) -> None:
        """Of the iterator: the call goes on."""

    async def code(self) -> grpc.StatusCode:
        while self._status is None:
            await self._news()
        return self._status[0]

    async def _news(self) -> None:
        waiter = self._waiter = self._client.loop.create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiter = None

    def cancel(self) -> bool:
        """The caller wants no more; the server is told."""
        if self._status is not None:
            return False
        self._end((grpc.StatusCode.CANCELLED, "cancelled by the caller", None))
        self._tell_cancelled()
        return True

    def abort_callers(self) -> None:
        """The channel is closed under the call: whoever waits sees his task cancelled, as with grpc.aio."""
        waiter = self._waiter
        self.cancel()
        if waiter is not None:
            waiter.cancel()

    def _expire(self) -> None:
        if self._status is None:
            self._end((grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded", None))
            self._tell_cancelled()

    def _tell_cancelled(self) -> None:
        served = self._served
        if served is not None:
            self._client.network.send(self._client.loop, served.process.loop, self._requests_s, served.cancelled)

    # What the network brings.

    def break_off(self, why: str) -> None:
        """The connection has ended."""
        self._end((_UNAVAILABLE, why, None))

    def take(self, data: bytes) -> None:
        if self._status is None:
            self._messages.append(self._deserialise(data))
            if not self._streams:
                self._end((grpc.StatusCode.OK, "", None))
            else:
                self._wake()

    def take_initial(self) -> None:
        self._connected = True
        self._wake()

    def take_status(self, status: Status) -> None:
        self._end(status)

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        self._client.calls_out.pop(self, None)
        if self._served is not None:
            self._served.process.calls_in.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._consumer is not None:
            self._consumer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def server(self) -> Process | None:
        return None if self._served is None else self._served.process

    @property
    def client(self) -> Process:
        return self._client


class ServedCall:
    """One call, as its server has it; is the context that handlers get."""

    __slots__ = (
        "_answers_s",
        "_call",
        "_deadline_s",
        "_lost_after",
        "_metadata",
        "_method",
        "_over",
        "_requests",
        "_server",
        "_status",
        "_task",
        "_timer",
        "_under_way",
        "_waiter",
        "_writer",
        "process",
    )

    def __init__(self, call: Call | None, server: SimServer, *, method: str = "", lost_after: bool = False) -> None:
        """`call` None: a duplicate whose answer nobody gets."""
        self.process = server.process
        self._call = call
        self._method = call.method if call is not None else method
        self._server = server
        self._status: Status = (grpc.StatusCode.OK, "", None)
        self._lost_after = lost_after
        self._requests: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: Any = None
        self._deadline_s: float | None = None
        self._metadata: Any = ()
        self._under_way = 0
        self._answers_s = 0.0
        self._over = False

    @property
    def client(self) -> Process | None:
        return None if self._call is None else self._call.client

    # What the network brings, on the server's loop.

    def arrive(self, data: bytes | None, timeout: float | None, metadata: Any) -> None:
        if self._over:
            return
        handler = self._server.handler(self._method)
        if handler is None:
            self._send_status((_UNAVAILABLE, "the server is stopping", None))
            return
        loop = self.process.loop
        self._metadata = metadata or ()
        if timeout is not None:
            self._deadline_s = loop.time() + timeout
            self._timer = loop.call_later(timeout, self.cancelled)
        self._server.calls[self] = None
        self._task = loop.create_task(self._serve(handler, data), name=self._method)

    def take_request(self, data: bytes | None) -> None:
        self._requests.append(data)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancelled(self) -> None:
        """The client has cancelled, its deadline has passed, or its connection has ended."""
        self._over = True
        if self._task is not None:
            self._task.cancel()

    def taken(self) -> None:
        """The client has read one message (called from there: the news of it travels)."""
        self._under_way -= 1
        writer = self._writer
        if writer is not None and self._call is not None:
            self._writer = None
            client = self._call.client
            client.network.send(client.loop, self.process.loop, 0.0, _set, writer)

    # Serving.

    async def _serve(self, handler: Any, data: bytes | None) -> None:
        try:
            if data is not None:
                self._requests += (data, None)
            requests = self._read_requests(handler)  # of a unary call the wrapped handler reads the bytes itself
            if handler.response_streaming:
                await handler.stream_stream(requests, self)
            else:
                response = await handler.stream_unary(requests, self)
                if self._status[0] is grpc.StatusCode.OK:
                    self._send(handler.response_serializer(response))
            self._send_status(self._status)
        except grpc.aio.AbortError:
            return  # the status is on its way
        finally:
            self._over = True
            self._call = self._task = None  # they refer to this one too: circles
            self._server.calls.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()

    async def _read_requests(self, handler: Any) -> AsyncIterator[Any]:
        while (data := await self.read()) is not grpc.aio.EOF:
            yield handler.request_deserializer(data)

    def _send(self, data: bytes) -> None:
        call = self._call
        if call is None or self._over:
            return
        if self._lost_after and not call._streams:
            self._send_status((_UNAVAILABLE, "the connection was reset", None))
            return
        loop, network = self.process.loop, self.process.network
        network.note(loop, call.client.loop, data)
        self._answers_s = network.send(loop, call.client.loop, self._answers_s, call.take, data)

    def _send_status(self, status: Status) -> None:
        call = self._call
        if call is not None and (call._streams or status[0] is not grpc.StatusCode.OK):
            if self._lost_after:
                status = (_UNAVAILABLE, "the connection was reset", None)
            self._answers_s = self.process.network.send(
                self.process.loop, call.client.loop, self._answers_s, call.take_status, status
            )

    # The context that handlers see.

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self.process.loop.time())

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        """Each process is a machine of its own to the limits of addresses, all clients are one."""
        return self.process.cluster.peer(self.client.name if self.client is not None else "")

    async def read(self) -> Any:
        while not self._requests:
            waiter = self._waiter = self.process.loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        data = self._requests.popleft()
        return grpc.aio.EOF if data is None else data

    async def send_initial_metadata(self, _metadata: Any) -> None:
        call = self._call
        if call is not None:
            self._answers_s = self.process.network.send(
                self.process.loop, call.client.loop, self._answers_s, call.take_initial
            )

    async def write(self, message: Any) -> None:
        if self._lost_after and self.process.network.rng.random() < 0.3:
            await self.abort_with_status((_UNAVAILABLE, "the connection was reset", None))
        handler = self._server.handlers[self._method]
        self._send(handler.response_serializer(message))
        self._under_way += 1
        while self._under_way > WINDOW_MESSAGES:
            self._writer = self.process.loop.create_future()
            await self._writer

    async def abort_with_status(self, status: Any) -> None:
        code, details, trailers = status
        self._send_status((code, details, trailers))
        raise grpc.aio.AbortError

    def set_code(self, code: Any) -> None:
        """With the next two: what the call ends with once its handler returns."""
        self._status = (code, *self._status[1:])

    def set_details(self, details: str) -> None:
        self._status = (self._status[0], details, self._status[2])

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._status = (*self._status[:2], metadata)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
