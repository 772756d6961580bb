"""The client's side of Generate, for `baton generate` and the demo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.rpc_client import Channels, rpc_errors

Show = Callable[[inference_pb2.Tokens], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """Sampling as a client states it; what is None is left to the router's defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_proto(self) -> inference_pb2.Sampling:
        return inference_pb2.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    request_id: str
    ids: tuple[int, ...]
    text: str
    reason: common_pb2.FinishReason
    stats: inference_pb2.RequestStats


class InferenceClient:
    """Calls one router. Does not own `channels`."""

    def __init__(self, router: str, *, channels: Channels, timeout_s: float) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self._peer = f"router at {router}"
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
        """Run one request to its end over the stream; `show` is called with each batch of tokens. Raises BatonError.

        Asserts what every client is promised: each token index once and in order, one end.
        """
        request_id, text, finished = "", "", None
        ids: list[int] = []
        async with aclosing(self.events(request)) as events:
            async for event in events:
                assert finished is None, "an event after the end"
                kind = event.WhichOneof("event")
                if kind == "started":
                    request_id = event.started.request_id
                elif kind == "tokens":
                    assert event.tokens.first_index == len(ids), (event.tokens.first_index, len(ids))
                    ids += event.tokens.ids
                    text += event.tokens.text
                    if show is not None:
                        show(event.tokens)
                elif kind == "finished":
                    finished = event.finished
        assert finished is not None, "the stream ended without an end of the answer"
        return Answer(request_id=request_id, ids=tuple(ids), text=text, reason=finished.reason, stats=finished.stats)

    async def generate_unary(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Run one request to its end with the unary call. Raises BatonError."""
        with rpc_errors(self._peer):
            reply: inference_pb2.GenerateResponse = await self._stub.GenerateUnary(request, timeout=self._timeout_s)
        return Answer(
            request_id=reply.request_id, ids=tuple(reply.ids), text=reply.text, reason=reply.reason, stats=reply.stats
        )
