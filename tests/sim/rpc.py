"""gRPC's surface over the simulated network: `Channels` for callers, `RpcServer` for nodes.

The generated stubs and services, `baton.rpc`'s edge (admission, deadlines, statuses) and serialisation are the real
ones. Here and in `calls`: what grpc.aio does around them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError
from baton.liveness import LivenessConfig
from baton.rpc import CLIENT_LIVENESS, ChannelLimits, RpcLimits, _Edge
from tests.sim.calls import Call, ServedCall

if TYPE_CHECKING:
    from random import Random

    from tests.sim.cluster import Process


class SimChannel:
    """What stubs are made with."""

    def __init__(self, process: Process, endpoint: str, limits: ChannelLimits) -> None:
        self.process = process
        self.endpoint = endpoint
        self.limits = limits
        self.connected: SimServer | None = None
        process.channels[self] = None

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Coroutine[Any, Any, Any]:
            made = Call(self, method, response_deserializer, streams=False)
            made.begin(request_serializer(request), timeout, metadata)
            return made.answer()

        return call

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Call:
            made = Call(self, method, response_deserializer, streams=True)
            made.begin(request_serializer(request), timeout, metadata)
            return made

        return call

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(requests: Any, timeout: float | None = None, metadata: Any = None) -> Call:
            made = Call(self, method, response_deserializer, streams=True)
            made.begin(None, timeout, metadata)
            made.stream_requests(requests, request_serializer)
            return made

        return call


class SimChannels:
    """`baton.rpc.Channels`, for the process that makes it."""

    def __init__(self, *, limits: ChannelLimits, process: Process) -> None:
        self._limits = limits
        self._process = process
        self._channels: dict[str, SimChannel] = {}
        self._closed = False

    def get(self, endpoint: str) -> SimChannel:
        assert not self._closed, "get after close"
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = SimChannel(self._process, endpoint, self._limits)
        return channel

    async def drop(self, endpoint: str) -> None:
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            self._close(channel)

    async def close(self) -> None:
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            self._close(channel)

    def _close(self, channel: SimChannel) -> None:
        del self._process.channels[channel]
        for call in [call for call in self._process.calls_out if call._channel is channel]:
            call.abort_callers()


class SimServer:
    """`baton.rpc.RpcServer`, for the process that makes it."""

    def __init__(self, *, limits: RpcLimits, rng: Random, liveness: LivenessConfig | None, process: Process) -> None:
        self.process = process
        self.liveness = liveness or CLIENT_LIVENESS
        self.edge = _Edge(limits=limits, rng=rng)
        self.limits = limits
        self.handlers: dict[str, Any] = {}
        self.calls: dict[ServedCall, None] = {}
        self._services: list[tuple[str, Callable[[Any, Any], None], object]] = []
        self._place = self._endpoint = ""

    def on_refused(self, refused: Callable[[BatonError], None]) -> None:
        self.edge.refused = refused

    def authorize_by(self, _authorize: Any) -> None:
        """Nobody gives orders here."""

    def trust_proxies(self, _networks: Any) -> None:
        """Clients come from addresses of their own here."""

    def add(self, service: str, register: Callable[[Any, Any], None], servicer: object) -> None:
        self._services.append((service, register, servicer))

    async def start(self, listen: str, *, probe_listen: None) -> int:
        del probe_listen
        for _, register, servicer in self._services:
            register(servicer, self)
        self._place = listen
        self._listen()
        return int(listen.rpartition(":")[2])

    def add_generic_rpc_handlers(self, services: Any) -> None:
        for service in services:
            for method, handler in service._method_handlers.items():
                self.handlers[method] = self.edge._wrap(method, handler)

    def add_registered_method_handlers(self, _service: str, _handlers: dict[str, Any]) -> None:
        """Generated code calls this too."""

    def handler(self, method: str) -> Any:
        """None once the server takes no more calls."""
        return self.handlers[method] if self._endpoint else None

    def set_ready(self, _ready: bool) -> None:
        """Nobody asks for health here."""

    @property
    def public_calls(self) -> int:
        return self.edge.public_calls

    def set_open(self, wanted: bool) -> None:
        """Take calls, or none. Those that have begun go on."""
        if not self._place:
            return
        if not wanted:
            self.unlisten()
        elif not self._endpoint:
            self._listen()

    def _listen(self) -> None:
        assert self._place not in self.process.network.servers, (self._place, "in use")
        self._endpoint = self._place
        self.process.network.servers[self._endpoint] = self

    def unlisten(self) -> None:
        if self._endpoint:
            del self.process.network.servers[self._endpoint]
            self._endpoint = ""

    async def stop(self, grace_s: float) -> None:
        self.unlisten()
        await self.edge.ended(grace_s)
        for served in list(self.calls):
            served.cancelled()
        await self.edge.ended(self.limits.handler_end_ms_max / 1000)


def break_connections(process: Process, why: str, *, both_ends: bool) -> None:
    """End every call that `process` makes or serves. Peers learn of it when the news reaches them.

    `both_ends`: so does the process itself (its connections were reset; else it is dead).
    """
    network = process.network
    for call in list(process.calls_out):
        served = call._served
        if served is not None:
            network.send(process.loop, served.process.loop, 0.0, served.cancelled)
        if both_ends:
            call.break_off(why)
    for call in list(process.calls_in):
        network.send(process.loop, call.client.loop, 0.0, call.break_off, why)
    server = process.server
    for served in list(server.calls) if both_ends and server is not None else ():
        network.send(process.loop, process.loop, 0.0, served.cancelled)


def break_between(client: Process, server: Process, why: str) -> None:
    """One connection ends: the client knows at once, the server when the news reaches it."""
    break_client_end(client, server, why)


def break_client_end(client: Process, server: Process, why: str) -> bool:
    """The client's end of a connection is closed; the server learns of it when the news gets there. False: there is
    none."""
    found = _disconnect(client, server)
    for call in [call for call in client.calls_out if call.server is server]:
        found = True
        call.break_off(why)
        served = call._served
        assert served is not None
        client.network.send(client.loop, server.loop, 0.0, served.cancelled)
    if found:
        client.cluster.excuses.broken(client, server)
    return found


def break_server_end(client: Process, server: Process, why: str) -> bool:
    """The server's end is closed; the client learns of it when the news gets there. False: there is none."""
    network = server.network
    found = [served for served in (server.server.calls if server.server is not None else ()) if served.client is client]
    for served in found:
        server.loop.call_soon(served.cancelled)
    for call in [call for call in server.calls_in if call.client is client]:
        network.send(server.loop, client.loop, 0.0, call.break_off, why)
    network.send(server.loop, client.loop, 0.0, _disconnect, client, server)
    if found:
        client.cluster.excuses.broken(client, server)
    return bool(found)


def _disconnect(client: Process, server: Process) -> bool:
    """The next call makes a new connection."""
    found = [c for c in client.channels if c.connected is not None and c.connected is server.server]
    for channel in found:
        channel.connected = None
    return bool(found)
