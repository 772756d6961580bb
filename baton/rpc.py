"""The serving side of gRPC: one server per process, and the edge where domain errors become statuses.

Handlers raise `BatonError`; nothing else in the project speaks of status codes. Every call has a deadline (I10):
internal calls without one are refused, public calls get a default, long-lived streams are exempt by name.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio

from baton.binding import check_can_bind, port_in_use
from baton.config import fixed, setting
from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.health import HEALTH_SERVICE, REFLECTION_SERVICE
from baton.liveness import LivenessConfig
from baton.log import get_log
from baton.rpc_wakes import whole_wakes
from baton.status import to_status

log = get_log("rpc")
_T = TypeVar("_T")
if TYPE_CHECKING:
    from baton.health_service import HealthService

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]

RPCS_UNTIMED_MAX: Final = 1024
"""Calls beyond `rpcs_max` for health checks and long-lived streams, so that a full node still answers them."""
PING_INTERVAL_MS_MIN: Final = 50
"""Clients that ping more often than this without data are disconnected."""
CLIENT_LIVENESS: Final = LivenessConfig(heartbeat_ms=10_000, answer_ms_max=5_000)
"""Pings of a silent connection whose caller is no node. One that leaves them unanswered has its calls ended."""
PUBLIC_SERVICES: Final = frozenset({"baton.v1.Inference"})
"""Called by clients, who may leave the deadline out."""

UNTIMED_METHODS: Final = frozenset(
    {
        "/baton.v1.Directory/Watch",
        "/baton.v1.Decode/Subscribe",
        "/baton.v1.Transfer/Liveness",
        f"/{HEALTH_SERVICE}/Check",
        f"/{HEALTH_SERVICE}/Watch",
        f"/{REFLECTION_SERVICE}/ServerReflectionInfo",
    }
)
"""Live as long as their caller, or are called by tools that set no deadline; keepalive ends them when it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """Limits of one server."""

    message_bytes_max: int = setting(
        16 * 1024 * 1024,
        "bytes of one gRPC message, and of the body of an HTTP call",
        "Clients send longer prompts than fit.",
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
    """When to try again, returned when there are too many calls."""
    handler_end_ms_max: int = fixed(5_000)
    """How long a stopping server waits for the handlers of calls that it has cancelled."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
        if self.public_deadline_ms_default > self.public_deadline_ms_max:
            raise InvalidField("public_deadline_ms_default", "must not exceed public_deadline_ms_max")


def time_left_s(context: _Context, limits: RpcLimits) -> float:
    """Seconds until the current call ends by its deadline, or by the server's default or maximum for public calls."""
    left_s = _deadline_left_s(context)
    return min(
        limits.public_deadline_ms_default / 1e3 if left_s is None else left_s,
        limits.public_deadline_ms_max / 1e3,
    )


class RpcServer:
    """One gRPC server with health, reflection and the error edge. Lives on one event loop."""

    def __init__(self, *, limits: RpcLimits, rng: random.Random, liveness: LivenessConfig | None = None) -> None:
        """`liveness` is for a server whose callers are nodes; without it they are pinged as clients."""
        self._limits = limits
        self._liveness = liveness or CLIENT_LIVENESS
        self._services: list[tuple[str, Callable[[Any, grpc.aio.Server], None], object]] = []
        self._edge = _Edge(limits=limits, rng=rng, refused=lambda error: self.refused(error))
        self.refused: Callable[[BatonError], None] = lambda _error: None
        """Called with the error of each public call that is refused before its handler has it."""
        self._server: grpc.aio.Server | None = None
        self._health: HealthService | None = None

    def add(self, service: str, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Serve `service` (full name, "baton.v1.Node") by `servicer`; `register` is the generated add function."""
        assert self._server is None, "add before start"
        self._services.append((service, register, servicer))

    async def start(self, listen: str) -> int:
        """Bind `listen` ("host:port", port 0 for any) and serve; not ready yet. Returns the bound port.

        Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT; nothing is left running then.
        """
        assert self._server is None, "started twice"
        host, port = split_endpoint(listen)
        await check_can_bind(listen)
        server = self._build()
        try:
            bound = server.add_insecure_port(join_endpoint(host, port))
        except RuntimeError as error:  # gRPC does not say why; the usual reasons were ruled out just before
            raise port_in_use(host, port, "listen") from error
        await server.start()
        self._server = server
        return bound

    def set_ready(self, ready: bool) -> None:
        """Flip readiness, and with it the health of each service. Liveness stays as it is."""
        assert self._server is not None, "set_ready before start"
        if self._health is not None:
            self._health.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` to end, cancel the rest and see their handlers end. Idempotent.

        A handler that does not end within `handler_end_ms_max` of being cancelled is logged and left.
        """
        if self._server is None:
            return
        await self._server.stop(grace_s if grace_s > 0 else None)
        # gRPC has closed the calls by now, but does not wait for what their handlers still do.
        left = await self._edge.ended(self._limits.handler_end_ms_max / 1e3)
        if left:
            log.error("handlers still running after stop", methods=",".join(sorted(left)))

    def _build(self) -> grpc.aio.Server:
        limits = self._limits
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.message_bytes_max),
            ("grpc.max_send_message_length", limits.message_bytes_max),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
            *self._liveness.ping_options(None),
        ]
        calls_max = limits.rpcs_max + RPCS_UNTIMED_MAX
        with whole_wakes():
            server = grpc.aio.server(interceptors=[self._edge], maximum_concurrent_rpcs=calls_max, options=options)
        names = [service for service, _, _ in self._services]
        for _, register, servicer in self._services:
            register(servicer, server)
        self._add_health(names, server)
        return server

    def _add_health(self, names: list[str], server: grpc.aio.Server) -> None:
        """Health and reflection. Nodes do not need them of each other, so a machine without the packages serves."""
        try:
            from grpc_health.v1 import health_pb2_grpc
            from grpc_reflection.v1alpha import reflection

            from baton.health_service import HealthService
        except ImportError as error:
            log.warning(
                "no health checks and no reflection here: install grpcio-health-checking and grpcio-reflection",
                missing=error.name,
            )
            return
        self._health = HealthService(names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*names, HEALTH_SERVICE, REFLECTION_SERVICE], server)


class _Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler: admission, deadline, errors to statuses."""

    def __init__(
        self, *, limits: RpcLimits, rng: random.Random, refused: Callable[[BatonError], None] = lambda _error: None
    ) -> None:
        self._limits = limits
        self._rng = rng
        self._refused = refused
        self._running = 0
        self._tasks: dict[asyncio.Task[Any], str] = {}

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
        return None if handler is None else self._wrap(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            streaming = handler.stream_stream if handler.request_streaming else handler.unary_stream
            assert streaming is not None, method
            write_all = _write_all if inspect.isasyncgenfunction(streaming) else _let_write

            async def stream(request: Any, context: _Context) -> None:
                await self._run(method, context, lambda: write_all(streaming, request, context))

            make_stream = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make_stream(stream, **codecs)
        single = handler.stream_unary if handler.request_streaming else handler.unary_unary
        assert single is not None, method

        async def unary(request: Any, context: _Context) -> Any:
            return await self._run(method, context, lambda: single(request, context))  # type: ignore[arg-type]

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, **codecs)

    async def _run(self, method: str, context: _Context, body: Callable[[], Awaitable[_T]]) -> _T:
        scope: asyncio.Timeout | None = None
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = method
        task.add_done_callback(self._tasks.pop)
        try:
            with self._slot(method):
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
        except Exception as error:
            if isinstance(error, TimeoutError) and scope is not None and scope.expired():
                failure = BatonError(Reason.DEADLINE, "The server's time limit for this call has passed.")
            else:
                failure = self._internal()
                log.exception("handler failed", method=method, incident=failure.metadata["incident"])
        status = to_status(failure)
        # gRPC keeps the abort, whose traceback keeps this frame: the failure and its frames are not to stay with it.
        del failure
        await context.abort_with_status(status)
        raise AssertionError("abort_with_status returned")

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
        if _service_of(method) in PUBLIC_SERVICES:
            limit_s = time_left_s(context, self._limits)
            return None if left_s is not None and left_s <= limit_s else limit_s
        if left_s is None:
            raise BatonError(Reason.NO_DEADLINE, f"{method} needs a deadline: set a timeout on the call.")
        return None

    @contextmanager
    def _slot(self, method: str) -> Iterator[None]:
        if method in UNTIMED_METHODS:
            yield
            return
        if self._running >= self._limits.rpcs_max:
            if _service_of(method) in PUBLIC_SERVICES:
                self._refused(self._full())
            raise self._full()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _full(self) -> BatonError:
        return BatonError(
            Reason.TOO_MANY_CALLS,
            f"This server is answering {self._running} calls already, its limit; try again later.",
            retry_after_ms=self._limits.busy_retry_ms,
        )


async def _let_write(behavior: Callable[..., Any], request: Any, context: _Context) -> None:
    """Run a streaming handler that writes by itself."""
    await behavior(request, context)


async def _write_all(behavior: Callable[..., Any], request: Any, context: _Context) -> None:
    """Run a streaming handler that is a generator. It is closed here and now when the call ends early, not when
    the garbage collector finds it: what a request holds is freed by its handler's `finally`."""
    messages: AsyncIterator[Any]
    async with aclosing(behavior(request, context)) as messages:
        async for message in messages:
            await context.write(message)


def _deadline_left_s(context: _Context) -> float | None:
    # The stubs say float; without a deadline it is None.
    left_s: float | None = context.time_remaining()
    return left_s


def _service_of(method: str) -> str:
    return method[1:].partition("/")[0]
