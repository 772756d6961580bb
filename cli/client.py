"""The client's side of Generate, for `baton generate`, `baton chat` and the demo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import click
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.errors import BatonError, Reason
from baton.rpc_client import Channels, rpc_errors
from cli.parameters import timeout_option

router_option: Final = click.option(
    "--router", default="127.0.0.1:7000", show_default=True, metavar="HOST:PORT", help="Where the router is.",
)  # fmt: skip
answer_timeout_option: Final = timeout_option(300.0, "How long a whole answer may take.")

Show = Callable[[inference_pb2.Tokens], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    request_id: str
    ids: tuple[int, ...]
    text: str
    reason: common_pb2.FinishReason
    stats: inference_pb2.RequestStats
    logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
    """One for each id where they were asked for."""


class AnswerBuilder:
    """Puts an answer together from its events.

    Asserts what every client is promised: each token index once and in order, one end.
    """

    def __init__(self) -> None:
        self.text = ""
        """What there is so far."""
        self.request_id = ""
        """Set as soon as the router has taken the request."""
        self._ids: list[int] = []
        self._logprobs: list[common_pb2.TokenLogprobs] = []
        self._finished: inference_pb2.Finished | None = None

    def push(self, event: inference_pb2.GenerateEvent) -> None:
        assert self._finished is None, "an event after the end"
        kind = event.WhichOneof("event")
        if kind == "started":
            self.request_id = event.started.request_id
        elif kind == "tokens":
            assert event.tokens.first_index == len(self._ids), (event.tokens.first_index, len(self._ids))
            self._ids += event.tokens.ids
            self._logprobs += event.tokens.logprobs
            self.text += event.tokens.text
        elif kind == "finished":
            self._finished = event.finished

    def answer(self) -> Answer:
        """The whole answer, when its stream has ended."""
        assert self._finished is not None, "the stream ended without an end of the answer"
        return Answer(
            request_id=self.request_id,
            ids=tuple(self._ids),
            text=self.text,
            reason=self._finished.reason,
            stats=self._finished.stats,
            logprobs=tuple(self._logprobs),
        )


class InferenceClient:
    """Calls one router. Does not own `channels`."""

    def __init__(self, router: str, *, channels: Channels, timeout_s: float) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self._peer = _named(router)
        self._stub = inference_pb2_grpc.InferenceStub(channels.get(router))
        self._timeout_s = timeout_s

    async def events(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        """The events of one streamed request. Closing the generator, or cancelling its task, cancels the request.

        Raises BatonError: the router's, or PEER_UNREACHABLE or DEADLINE.
        """
        call = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            with rpc_errors(self._peer):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def generate(self, request: inference_pb2.GenerateRequest, show: Show | None = None) -> Answer:
        """Run one request to its end over the stream; `show` is called with each batch of tokens. Raises BatonError."""
        builder = AnswerBuilder()
        async with aclosing(self.events(request)) as events:
            async for event in events:
                builder.push(event)
                if show is not None and event.HasField("tokens"):
                    show(event.tokens)
        return builder.answer()

    async def generate_unary(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Run one request to its end with the unary call. Raises BatonError."""
        with rpc_errors(self._peer):
            reply: inference_pb2.GenerateResponse = await self._stub.GenerateUnary(request, timeout=self._timeout_s)
        return Answer(
            request_id=reply.request_id,
            ids=tuple(reply.ids),
            text=reply.text,
            reason=reply.reason,
            stats=reply.stats,
            logprobs=tuple(reply.logprobs),
        )


def no_router(error: BatonError, router: str) -> BatonError:
    """What to say instead of `error` where no router answers at all; `error` itself where it is something else.

    The same reason may come from the router itself, about another node; that text stands.
    """
    if error.reason is not Reason.PEER_UNREACHABLE or not error.message.startswith(_named(router)):
        return error
    return BatonError(
        error.reason,
        f"No router answers at {router}. Is the cluster running (`baton up`)? Name another place with --router "
        "HOST:PORT.",
    )


def unreached(router: str) -> BatonError:
    """The error that `no_router` has its words for: no connection came about."""
    return BatonError(Reason.PEER_UNREACHABLE, f"{_named(router)} does not answer.")


def broken_off(error: BatonError) -> BatonError:
    """The same error, of an answer that the user has seen a part of."""
    return BatonError(
        error.reason,
        f"The answer broke off. {error.message}",
        code=error.code,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )


def _named(router: str) -> str:
    return f"The router at {router}"
