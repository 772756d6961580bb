"""A router that answers 10, 11, 12, ... over gRPC, and breaks off, refuses or waits as it is told. In this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.errors import BatonError
from baton.grpc_core import whole_wakes
from baton.status import to_status

WAIT_S_MAX = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One call: the answer up to this many tokens, and then this end. Without an end the answer is whole."""

    tokens: int = 0
    end: BatonError | grpc.StatusCode | str = "cut"
    """An error of the router; a status of gRPC; "cut": the stream ends as if that were all; "hold": until the client
    leaves."""


@dataclass(slots=True)
class Seen:
    """What a call has brought."""

    method: str
    message: Any
    metadata: dict[str, str]


@dataclass(slots=True)
class RouterDouble(inference_pb2_grpc.InferenceServicer):
    """Plays what `plays` has, a call each, then whole answers of `tokens` tokens."""

    tokens: int = 5
    plays: deque[Play] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    forgot: threading.Event = field(default_factory=threading.Event)
    holds: threading.Event = field(default_factory=threading.Event)
    """A call is held."""
    left: threading.Event = field(default_factory=threading.Event)
    """The client has left a call that is held."""
    address: str = ""

    @property
    def methods(self) -> list[str]:
        return [seen.method for seen in self.seen]

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self._note("Generate", request, context)
        return self._events(0, context, resumable=request.resumable)

    def Attach(self, request: inference_pb2.AttachRequest, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        self._note("Attach", request, context)
        assert request.resume_token == f"behind {len(request.output.ids)}"
        return self._events(len(request.output.ids), context, resumable=True)

    def GenerateUnary(self, request: inference_pb2.GenerateRequest, context: Any) -> inference_pb2.GenerateResponse:
        self._note("GenerateUnary", request, context)
        answer = inference_pb2.GenerateResponse(request_id="call", reason=common_pb2.FINISH_REASON_LENGTH)
        for event in self._events(0, context, resumable=False):
            answer.ids.extend(event.tokens.ids)
            answer.text += event.tokens.text
        return answer

    def Forget(self, request: inference_pb2.ForgetRequest, context: Any) -> inference_pb2.ForgetReply:
        self.forgotten.append(request.resume_token)
        self.forgot.set()
        return inference_pb2.ForgetReply()

    def _note(self, method: str, request: Any, context: Any) -> None:
        self.seen.append(Seen(method, request, dict(context.invocation_metadata())))

    def _events(self, have: int, context: Any, *, resumable: bool) -> Iterator[inference_pb2.GenerateEvent]:
        play = self.plays.popleft() if self.plays else None
        if play is not None and play.end == "hold":
            context.add_callback(self.left.set)

        def event(index: int, **what: Any) -> inference_pb2.GenerateEvent:
            return inference_pb2.GenerateEvent(resume_token=f"behind {index}" if resumable else "", **what)

        yield event(have, started=inference_pb2.Started(request_id="call"))
        for index in range(have, self.tokens if play is None else play.tokens):
            tokens = inference_pb2.Tokens(first_index=index, ids=[10 + index], text=f"{index} ")
            yield event(index + 1, tokens=tokens)
        if play is None:
            stats = inference_pb2.RequestStats(output_tokens=self.tokens)
            finished = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, stats=stats)
            yield event(self.tokens, finished=finished)
        elif isinstance(play.end, BatonError):
            context.abort_with_status(to_status(play.end))
        elif isinstance(play.end, grpc.StatusCode):
            context.abort(play.end, "Socket closed")
        elif play.end == "hold":
            self.holds.set()
            self.left.wait(WAIT_S_MAX)


@contextmanager
def router_doubles(*routers: RouterDouble) -> Iterator[str]:
    """Serve them; their addresses, with commas between."""
    servers = []
    try:
        for router in routers:
            with whole_wakes():
                # Pings of a client are no attack.
                server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.http2.max_ping_strikes", 0)])
            servers.append(server)
            inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
            router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
        yield ",".join(router.address for router in routers)
    finally:
        for router in routers:
            router.left.set()
        for server in servers:
            server.stop(None).wait()
