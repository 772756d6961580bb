"""gRPC: one server per process, one channel per peer, and the edge where domain errors become statuses and back.

Handlers raise `BatonError` and callers get it; nothing else in the project knows status codes. Every call has a
deadline (I10): internal calls without one are refused, public calls get a default. `UNTIMED_METHODS` are exempt.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.call_slots import CallSlots, StreamLimit
from baton.config import fixed, setting
from baton.endpoint import (
    Network,
    check_reachable,
    is_trusted,
    join_endpoint,
    parse_address,
    source_of,
    split_endpoint,
)
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.grpc_core import whole_wakes
from baton.http2_front import Http2Front
from baton.listen import check_can_bind, port_in_use
from baton.liveness import LivenessConfig
from baton.log import get_log
from baton.operator import OPERATOR_METHODS, refuse
from baton.renewed_channel import RenewedChannel
from baton.status import from_rpc_error, to_status
from baton.tasks import end_task
from baton.tls import CertifiedCallers, Kind, Tls, peer_names

log = get_log("rpc")
_T = TypeVar("_T")
if TYPE_CHECKING:
    from baton.health import HealthService

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
RPCS_UNTIMED_MAX: Final = 1024
"""Calls of one connection beyond `rpcs_max`, for health checks and long-lived streams."""
CONNECTION_STREAMS_MAX: Final = 2_048
"""Calls of one connection in any case: a client's library keeps more of them back until others end."""
PUBLIC_MESSAGE_BYTES_MAX: Final = 3 * 1024 * 1024
"""Of one request of a client: a million tokens of any vocabulary. Parsing more, if each token has one byte, would hold
the loop for over 20 ms. Answers with log-probabilities may be larger."""
LARGE_REQUEST_BYTES: Final = 128 * 1024
"""Of requests beyond this one is parsed in each turn of the loop. It takes a millisecond and more, under the lock."""
METADATA_BYTES_MAX: Final = 16 * 1024
"""Of one call, as HTTP/2 counts. gRPC takes 16 MiB of a client that has not acknowledged its limit, and makes up to
half a million tuples of it before anybody here is asked."""
_ENTRY_BYTES: Final = 32
"""Of each entry, beside name and value."""
HANDSHAKE_MS_MAX: Final = 10_000
"""How long a connection may take to show that it speaks HTTP/2, and to acknowledge the limits that it is told."""
PUBLIC_IDLE_MS_MAX: Final = 300_000
"""How long a client's connection may go without a call. Clients connect again with the next one."""
INTERNAL_MARGIN_S: Final = 60
"""By how much a call between nodes may take longer than the longest of a client, for which it may be made."""
PROBES_MAX: Final = 64
"""Calls at the same time on the port for probes."""
TLS_CONNECTION_MS_MAX: Final = 24 * 3_600_000
"""Then a connection with TLS takes no new calls, and ends when the longest call could have: what was authenticated once
must be so again. Streams of nodes are opened anew."""
CLIENT_LIVENESS: Final = LivenessConfig(heartbeat_ms=10_000, answer_ms_max=5_000)
"""Pings of a silent connection whose caller is no node. One that leaves them unanswered has its calls ended."""
REOPEN_MS: Final = 50
REOPEN_TRIES_QUIET: Final = 40
"""A server that takes calls again tries to get its port back this often before it says that it cannot."""
PUBLIC_SERVICES: Final = frozenset({"baton.v1.Inference"})
"""Called by clients, who may leave the deadline out."""

UNTIMED_STREAMS: Final[Mapping[str, StreamLimit]] = {
    "/baton.v1.Directory/Watch": StreamLimit(of_address=512, in_all=1024),
    "/baton.v1.Decode/Subscribe": StreamLimit(of_address=256, in_all=512),
    "/baton.v1.Holdings/Watch": StreamLimit(of_address=256, in_all=512),
    "/baton.v1.Transfer/Liveness": StreamLimit(of_address=512, in_all=1024),
    f"/{HEALTH_SERVICE}/Watch": StreamLimit(of_address=256, in_all=512),
    **{f"/{name}/ServerReflectionInfo": StreamLimit(of_address=16, in_all=64) for name in REFLECTION_SERVICES},
}
"""Live as long as their caller; keepalive ends them when it is gone."""
UNTIMED_METHODS: Final = frozenset({*UNTIMED_STREAMS, f"/{HEALTH_SERVICE}/Check"})
"""These, and what is called by tools that set no deadline, and always answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """Limits of one server."""

    message_bytes_max: int = setting(
        16 * 1024 * 1024,
        "bytes of one gRPC message; a client's request may have 3 MiB at most",
        "Requests between nodes, or answers, are larger: long prompts, or many log-probabilities.",
    )
    rpcs_max: int = setting(
        1024,
        "calls at the same time, health checks and long-lived streams not counted",
        "The process has the memory and the cores to serve more clients than this.",
    )
    public_deadline_ms_default: int = setting(
        300_000,
        "deadline of a client's call that names none",
        "Clients name no deadline, and their answers take longer.",
    )
    public_deadline_ms_max: int = setting(
        3_600_000, "longest deadline of a client's call", "Answers take more than an hour, or none should take as long."
    )
    busy_retry_ms: int = fixed(200)
    """When to try again, returned to nodes when there are too many calls."""
    handler_end_ms_max: int = fixed(5_000)
    """How long a stopping server waits for the handlers of calls that it has cancelled."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
        if self.public_deadline_ms_default > self.public_deadline_ms_max:
            raise InvalidField("public_deadline_ms_default", "must not exceed public_deadline_ms_max")


def client_source(context: _Context, proxies: Sequence[Network]) -> str | None:
    """Whom a public call counts for in limits by address; None for a proxy of ours."""
    return _source(_host(context), proxies)


def time_left_s(context: _Context, limits: RpcLimits) -> float:
    """Seconds until the current public call ends, by its deadline or by the server's default or maximum."""
    left_s = _deadline_left_s(context)
    return min(
        limits.public_deadline_ms_default / 1e3 if left_s is None else left_s, limits.public_deadline_ms_max / 1e3
    )


class RpcServer:
    """One gRPC server with health, reflection and the error edge. Lives on one event loop."""

    def __init__(
        self,
        *,
        limits: RpcLimits,
        rng: random.Random,
        liveness: LivenessConfig | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`liveness` is for a server whose callers are nodes; without it they are pinged as clients. With `tls` all
        callers must have a certificate."""
        self._limits = limits
        self._rng = rng
        self._liveness = liveness or CLIENT_LIVENESS
        self._services: list[tuple[str, Callable[[Any, grpc.aio.Server], None], object]] = []
        self._edge = _Edge(limits=limits, rng=rng, callers=CertifiedCallers() if tls is not None else None)
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        """None before `start`, and while no calls are taken."""
        self._closing: dict[asyncio.Task[None], grpc.aio.Server] = {}
        self._place = ""
        self._wanted_open = True
        self._reopening: asyncio.Task[None] | None = None
        self._probes: grpc.aio.Server | None = None
        self._health: HealthService | None = None
        self._front: Http2Front | None = None
        self._front_port = 0
        self._aside = False
        self._next_place = ""

    def stand_behind(self, front: Http2Front, port: int) -> None:
        """Clients come by way of `front`, from `port`, at which others listen. `start` then binds no port for them."""
        self._front, self._front_port = front, port

    def stand_aside(self, port: int) -> None:
        """Other processes serve the clients, from `port`, at which others listen. Of this server there are only the
        probes."""
        self._aside, self._front_port = True, port

    def authorize_by(self, authorize: Callable[[str, Any], Awaitable[None]]) -> None:
        """`authorize(method, context)` raises BatonError for a call of OPERATOR_METHODS that is not an operator's.
        Without it all of them are refused."""
        self._edge.authorize = authorize

    def check_callers_by(self, check: Callable[[Iterable[tuple[str, str | bytes]]], object]) -> None:
        """`check(metadata)` raises BatonError for a public call that may not be made. Its message is not read then."""
        self._edge.check_caller = check

    def trust_proxies(self, networks: Sequence[Network]) -> None:
        """Clients may have all places of the server where they come from one of these."""
        self._edge.proxies = networks

    def on_refused(self, refused: Callable[[BatonError], None]) -> None:
        """`refused` is called with the error of each public call that is refused before its handler runs."""
        self._edge.refused = refused

    def add(self, service: str, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Serve `service` (full name, "baton.v1.Node") by `servicer`; `register` is the generated add function."""
        assert not self._place, "add before start"
        self._services.append((service, register, servicer))

    async def start(self, listen: str, *, probe_listen: str | None = None) -> int:
        """Bind `listen` ("host:port", port 0 for any) and serve; not ready yet. Returns the bound port. At
        `probe_listen` everybody gets health, and nothing else.

        Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT; nothing is left running then.
        """
        assert not self._place, "started twice"
        if self._front is None and not self._aside:
            await check_can_bind(listen)
        if probe_listen is not None:
            await check_can_bind(probe_listen, setting="probe_listen")
        server = self._build()
        bound = self._front_port if self._aside else self._bind(server, listen)
        if probe_listen is not None:
            self._probes = self._build_probes()
            _bind(self._probes, probe_listen, "probe_listen", None)
            await self._probes.start()
        if self._aside:
            self._place = listen
            return bound
        await server.start()
        self._lead_clients()
        self._server, self._place = server, join_endpoint(split_endpoint(listen)[0], bound)
        return bound

    @property
    def public_calls(self) -> int:
        """Of clients, that are not over; those whose request is being read too."""
        return self._edge.public_calls

    def set_open(self, wanted: bool) -> None:
        """Take calls, or none. Returns at once.

        While closed nobody gets a connection, and those that are open end (GOAWAY) as soon as their calls have. gRPC
        knows no way but to stop the server: of calls that are on their way just then some end with CANCELLED.
        `probe_listen` stays open.
        """
        self._wanted_open = wanted
        if self._aside:
            return
        if not wanted and self._server is not None:
            server, self._server = self._server, None
            if self._front is not None:
                self._front.lead_to(None)
            longest_s = self._limits.public_deadline_ms_max / 1e3 + INTERNAL_MARGIN_S
            closing = asyncio.create_task(server.stop(longest_s), name="close")
            self._closing[closing] = server
            closing.add_done_callback(self._closing.pop)
        elif wanted and self._server is None and (self._reopening is None or self._reopening.done()):
            self._reopening = asyncio.create_task(self._reopen(), name="reopen")

    async def _reopen(self) -> None:
        for tries in range(1 << 30):
            server = self._build()
            try:
                self._bind(server, self._place)
                break
            except BatonError as error:  # the listener that was closed may take a moment
                if tries == REOPEN_TRIES_QUIET:
                    log.error("cannot take calls again: trying on", problem=error.message)
            await asyncio.sleep(REOPEN_MS / 1e3)
        await server.start()
        self._lead_clients()
        self._server = server
        self.set_open(self._wanted_open)

    def _bind(self, server: grpc.aio.Server, listen: str) -> int:
        """Where clients reach it. Raises BatonError PORT_IN_USE or LISTEN_REFUSED."""
        if self._front is None:
            return _bind(server, listen, "listen", self._tls)
        self._next_place = self._front.next_place()
        server.add_insecure_port(f"unix:{self._next_place}")
        return self._front_port

    def _lead_clients(self) -> None:
        if self._front is not None:
            self._front.lead_to(self._next_place)

    def set_ready(self, ready: bool) -> None:
        """Flip readiness, and with it the health of each service. Liveness stays as it is."""
        assert self._place, "set_ready before start"
        if self._health is not None:
            self._health.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, cancel the rest and wait for their handlers. Idempotent.

        A handler that does not end within `handler_end_ms_max` after that is logged and left.
        """
        await end_task(self._reopening)
        servers = [*self._closing.values(), *([self._server] if self._server is not None else [])]
        await asyncio.gather(*(server.stop(grace_s if grace_s > 0 else None) for server in servers))
        await asyncio.gather(*self._closing)
        if self._probes is not None:
            await self._probes.stop(None)
        # gRPC has closed the calls, but does not wait for their handlers.
        left = await self._edge.ended(self._limits.handler_end_ms_max / 1e3)
        if left:
            log.error("handlers still running after stop", methods=",".join(sorted(left)))

    def _build(self) -> grpc.aio.Server:
        limits = self._limits
        names = [service for service, _, _ in self._services]
        public = not PUBLIC_SERVICES.isdisjoint(names)
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _received_bytes_max(limits, public=public)),
            ("grpc.max_send_message_length", limits.message_bytes_max),
            ("grpc.max_concurrent_streams", min(limits.rpcs_max + RPCS_UNTIMED_MAX, CONNECTION_STREAMS_MAX)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
            ("grpc.http2.settings_timeout", HANDSHAKE_MS_MAX),
            # gRPC keeps 3 KB for each ping after the one over which it closes a connection: better it answers all.
            ("grpc.http2.max_ping_strikes", 0),
            *self._liveness.ping_options(None),
        ]
        if public:
            options += [
                ("grpc.max_connection_idle_ms", PUBLIC_IDLE_MS_MAX),
                # Or it takes whole requests off the network before anybody reads them: gigabytes of a flood.
                ("grpc.http2.bdp_probe", 0),
            ]
        if self._tls is not None:
            options += [
                ("grpc.max_connection_age_ms", TLS_CONNECTION_MS_MAX),
                ("grpc.max_connection_age_grace_ms", limits.public_deadline_ms_max + 1_000 * INTERNAL_MARGIN_S),
            ]
        calls_max = _calls_max(limits)
        with whole_wakes():
            server = grpc.aio.server(interceptors=[self._edge], maximum_concurrent_rpcs=calls_max, options=options)
        for _, register, servicer in self._services:
            register(servicer, server)
        self._add_health(names, server)
        return server

    def _build_probes(self) -> grpc.aio.Server:
        """Answers from the same table of services as the server itself."""
        edge = _Edge(limits=self._limits, rng=self._rng)
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", METADATA_BYTES_MAX),
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
            ("grpc.max_connection_idle_ms", PUBLIC_IDLE_MS_MAX),
            *CLIENT_LIVENESS.ping_options(None),
        ]
        server = grpc.aio.server(interceptors=[edge], maximum_concurrent_rpcs=PROBES_MAX, options=options)
        if self._health is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _add_health(self, names: list[str], server: grpc.aio.Server) -> None:
        """Health and reflection. Other nodes do not use them, so a machine without the packages serves too."""
        try:
            from grpc_health.v1 import health_pb2_grpc

            from baton.health import HealthService
            from baton.reflection import add_reflection
        except ImportError as error:
            log.warning(
                "no health checks and no reflection here: install grpcio-health-checking and grpcio-reflection",
                missing=error.name,
            )
            return
        self._health = self._health or HealthService(names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection([*names, HEALTH_SERVICE, *REFLECTION_SERVICES], server)


class _Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler: admission, deadline, errors to statuses."""

    def __init__(self, *, limits: RpcLimits, rng: random.Random, callers: CertifiedCallers | None = None) -> None:
        self._limits = limits
        self._rng = rng
        self._callers = callers
        self._slots = CallSlots(rpcs_max=limits.rpcs_max, busy_retry_ms=limits.busy_retry_ms, rng=rng)
        self._large = asyncio.Lock()
        self.proxies: Sequence[Network] = ()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self.refused: Callable[[BatonError], None] = lambda _error: None
        self.check_caller: Callable[[Iterable[tuple[str, str | bytes]]], object] = lambda _metadata: None
        self.authorize: Callable[[str, Any], Awaitable[None]] = refuse

    @property
    def public_calls(self) -> int:
        return sum(map(_is_public, self._tasks.values()))

    async def ended(self, timeout_s: float) -> list[str]:
        """Wait until no handler runs; the methods of those that still do after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return list(self._tasks.values())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        metadata = handler_call_details.invocation_metadata
        if len(metadata) > METADATA_BYTES_MAX // _ENTRY_BYTES or (
            sum(len(name) + len(value) + _ENTRY_BYTES for name, value in metadata) > METADATA_BYTES_MAX
        ):
            text = f"The metadata of this call has more than {METADATA_BYTES_MAX:,} bytes."
            return _refusal(to_status(BatonError(Reason.BAD_FIELD, text)))
        if _is_public(handler_call_details.method):
            try:
                self.check_caller(metadata)
            except BatonError as error:
                self.refused(error)
                return _refusal(to_status(error))
        return self._wrap(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        behavior = getattr(handler, f"{requests}_{responses}")
        if inspect.isasyncgenfunction(behavior):
            behavior = functools.partial(_write_all, behavior)
        if self._callers is not None:
            behavior = self._callers.guard(method, behavior, request_streaming=handler.request_streaming)

        read = handler.request_deserializer

        async def run(messages: Any, context: _Context) -> Any:
            async def body() -> Any:
                host = _host(context)
                request = messages
                if not handler.request_streaming:
                    request = await self._slots.read(source_of(host), lambda: self._request(context, read))
                with self._slot(method, host):
                    return await behavior(request, context)

            return await self._run(method, context, body)

        # gRPC would read the one request of a call before it says that there is a call.
        wrapped: _Handler = getattr(grpc, f"stream_{responses}_rpc_method_handler")(
            run,
            request_deserializer=read if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    async def _run(self, method: str, context: _Context, body: Callable[[], Awaitable[_T]]) -> _T | None:
        scope: asyncio.Timeout | None = None
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = method
        task.add_done_callback(self._tasks.pop)
        try:
            if method in OPERATOR_METHODS and not self._is_operator(context):
                await self.authorize(method, context)
            limit_s = self._limit_s(method, context)
            if limit_s is None:
                return await body()
            async with asyncio.timeout(limit_s) as scope:
                return await body()
        except BatonError as error:
            failure = error
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # gRPC's own: it has the status, or nobody to send it to
            raise
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            # Nobody cancelled this call: the handler let the end of another task through. gRPC would send no status.
            failure = self._internal()
            log.exception("handler ended as cancelled", method=method, incident=failure.metadata["incident"])
        except NotImplementedError:  # raised by the generated base class for what this node does not serve
            failure = BatonError(Reason.UNIMPLEMENTED, f"{method} is not served by a node of this role.")
        except DecodeError:
            failure = BatonError(Reason.BAD_FIELD, "The request is not a message of the type that this call takes.")
        except Exception as error:
            if isinstance(error, TimeoutError) and scope is not None and scope.expired():
                failure = BatonError(Reason.DEADLINE, "The server's time limit for this call has passed.")
            else:
                failure = self._internal()
                log.exception("handler failed", method=method, incident=failure.metadata["incident"])
        _set_status(context, to_status(failure))
        del failure  # its traceback keeps this frame
        return None

    def _is_operator(self, context: _Context) -> bool:
        return self._callers is not None and Kind.OPERATOR.dns_name in peer_names(context)

    def _internal(self) -> BatonError:
        """A bug of ours: the caller gets an id, the log gets the traceback under that id."""
        incident = f"{self._rng.getrandbits(64):016x}"
        return BatonError(
            Reason.INTERNAL,
            f"Internal error {incident}: the server's log has the details under this id.",
            metadata={"incident": incident},
        )

    def _limit_s(self, method: str, context: _Context) -> float | None:
        """What to enforce here, beyond the deadline that gRPC enforces."""
        if method in UNTIMED_METHODS:
            return None
        left_s = _deadline_left_s(context)
        if _is_public(method):
            limit_s = time_left_s(context, self._limits)
            return None if left_s is not None and left_s <= limit_s else limit_s
        if left_s is None:
            raise BatonError(Reason.NO_DEADLINE, f"{method} needs a deadline: set a timeout on the call.")
        longest_s = self._limits.public_deadline_ms_max / 1e3 + INTERNAL_MARGIN_S
        return longest_s if left_s > longest_s else None

    async def _request(self, context: _Context, read: Callable[[bytes], Any] | None) -> Any:
        """The one request of a call, as `read` makes it of its bytes. Raises BatonError BAD_FIELD, or DecodeError."""
        try:
            raw = await context.read()
        except grpc.aio.BaseError as error:  # the server has stopped: there is nobody to send anything to
            raise grpc.aio.AbortError from error
        if raw is grpc.aio.EOF:
            raise BatonError(Reason.BAD_FIELD, "The call has no request.")
        if len(raw) <= LARGE_REQUEST_BYTES:
            return raw if read is None else read(raw)
        async with self._large:  # one in turn
            await asyncio.sleep(0)
            return raw if read is None else read(raw)

    def _slot(self, method: str, host: str) -> AbstractContextManager[None]:
        """Raises BatonError TOO_MANY_CALLS."""
        stream = UNTIMED_STREAMS.get(method)
        if stream is not None:
            return self._slots.stream(method, stream, source_of(host))
        if method in UNTIMED_METHODS:
            return nullcontext()
        if not _is_public(method):
            return self._slots.running()
        return self._slots.public(_source(host, self.proxies), self.refused)


def _received_bytes_max(limits: RpcLimits, *, public: bool) -> int:
    return min(limits.message_bytes_max, PUBLIC_MESSAGE_BYTES_MAX) if public else limits.message_bytes_max


def _calls_max(limits: RpcLimits) -> int:
    """What gRPC is to refuse by itself: nothing that would not be refused here too. `RPCS_UNTIMED_MAX` is for health
    checks, and for calls whose request has not come."""
    return limits.rpcs_max + RPCS_UNTIMED_MAX + sum(limit.in_all for limit in UNTIMED_STREAMS.values())


def _host(context: _Context) -> str:
    """The caller's address, without its port and its zone."""
    _, _, address = context.peer().partition(":")
    return (unquote(address) if "%" in address else address).rpartition(":")[0].strip("[]").partition("%")[0]


def _source(host: str, proxies: Sequence[Network]) -> str | None:
    address = parse_address(host) if proxies else None
    return None if address is not None and is_trusted(address, proxies) else source_of(host)


def _refusal(status: grpc.Status) -> _Handler:
    """Ends a call of any kind. As it takes a stream of messages, and none of them, gRPC reads none."""

    async def refuse(_messages: Any, context: _Context) -> None:
        _set_status(context, status)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _set_status(context: _Context, status: grpc.Status) -> None:
    """What the call ends with once its handler returns. An abort would leave a circle of references, by way of its
    traceback: the collector then takes a tenth of a second for what a flood of refused calls leaves."""
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)


async def _write_all(behavior: Callable[..., Any], request: Any, context: _Context) -> None:
    """Run a streaming handler that is a generator. If the call ends early it is closed at once and not by the garbage
    collector: its `finally` frees what the request holds."""
    messages: AsyncIterator[Any]
    async with aclosing(behavior(request, context)) as messages:
        async for message in messages:
            await context.write(message)


def _deadline_left_s(context: _Context) -> float | None:
    # The stubs say float; without a deadline it is None.
    left_s: float | None = context.time_remaining()
    return left_s


def _is_public(method: str) -> bool:
    return method[1:].partition("/")[0] in PUBLIC_SERVICES


def _bind(server: grpc.aio.Server, listen: str, setting: str, tls: Tls | None) -> int:
    """The bound port. Raises BatonError PORT_IN_USE."""
    address = join_endpoint(*split_endpoint(listen))
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:  # gRPC does not say why; the usual reasons were ruled out just before
        raise port_in_use(listen, setting) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """How a process keeps its channels."""

    channels_max: int = 1024
    message_bytes_max: int = 16 * 1024 * 1024
    connect_ms_max: int = 1_000
    reconnect_ms_min: int = 50
    reconnect_ms_max: int = 500
    """A peer that restarts is reached again within about this time."""
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    """A peer that is stopped or cut off ends its calls after its `heartbeat_ms` and `answer_ms_max`."""

    def __post_init__(self) -> None:
        check_positive(self, *(name for name in self.__slots__ if name != "liveness"))
        if self.reconnect_ms_min > self.reconnect_ms_max:
            raise InvalidField("reconnect_ms_min", "must not exceed reconnect_ms_max")


class Channels:
    """Channels by endpoint, made on first use and kept. Lives on one event loop."""

    def __init__(self, *, limits: ChannelLimits, rng: random.Random | None = None, tls: Tls | None = None) -> None:
        """`rng` spreads the pings of different channels; None: all keep the same pause. With `tls` peers must be nodes
        of the same CA."""
        self._limits = limits
        self._rng = rng
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel | RenewedChannel] = {}
        self._closed = False

    def get(self, endpoint: str) -> Any:
        """The `grpc.aio.Channel`, or what stubs need of one, to `endpoint` ("host:port"); connects in the background.
        The caller does not close it.

        Raises BatonError BAD_ENDPOINT, or TOO_MANY_PEERS beyond `channels_max`.
        """
        assert not self._closed, "get after close"
        channel = self._channels.get(endpoint)
        if channel is None:
            check_reachable(endpoint)
            if len(self._channels) >= self._limits.channels_max:
                raise BatonError(
                    Reason.TOO_MANY_PEERS,
                    f"No channel to {endpoint}: this process has {len(self._channels)} already, its limit.",
                )
            with whole_wakes():
                channel = self._open(endpoint)
            self._channels[endpoint] = channel
        return channel

    def _open(self, endpoint: str) -> grpc.aio.Channel | RenewedChannel:
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, options=self._options())
        # The certificate says that the peer is a node, not where it is.
        named = ("grpc.ssl_target_name_override", Kind.NODE.dns_name)
        return RenewedChannel(
            self._tls, lambda mine: grpc.aio.secure_channel(endpoint, mine, options=[*self._options(), named])
        )

    async def drop(self, endpoint: str) -> None:
        """Forget a peer that is gone. Stop its calls first: they end as if their tasks were cancelled."""
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all channels; stop the calls that use them first, as for `drop`. Idempotent."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _options(self) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            ("grpc.max_receive_message_length", limits.message_bytes_max),
            ("grpc.max_send_message_length", limits.message_bytes_max),
            *limits.liveness.ping_options(self._rng),
            ("grpc.initial_reconnect_backoff_ms", limits.reconnect_ms_min),
            ("grpc.max_reconnect_backoff_ms", limits.reconnect_ms_max),
            # gRPC's name for the time one attempt to connect may take.
            ("grpc.min_reconnect_backoff_ms", limits.connect_ms_max),
            # A restarted pod keeps its name and gets another address.
            ("grpc.dns_min_time_between_resolutions_ms", limits.reconnect_ms_max),
            # Peers are inside the cluster, whatever http_proxy says.
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]


async def begun(call: Any) -> bool:
    """Wait until the peer's handler has sent its initial metadata, which says that it has the call.

    False: the call is over. (True may be returned at the moment in which it fails.) Unlike `wait_for_connection`, this
    leaves what the peer wrote before a failure to be read. Cancelling the caller cancels the call.
    """
    try:
        await call.initial_metadata()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return not call.done()


@contextmanager
def rpc_errors(peer: str) -> Iterator[None]:
    """Turn a failed call inside the block into the BatonError that the peer raised, or into one that names `peer`."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer=peer) from error
