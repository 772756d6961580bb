"""Clients of several routers, which go on at another one where they lose the one that they have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from batonpb import inference_pb2, inference_pb2_grpc

from baton.rpc import rpc_errors
from tests.faults.questions import Question
from tests.support.cluster_harness import Answer, collect, make_request

ANSWER_S_MAX: Final = 150.0
"""For each answer, over all tries. One that takes longer is lost."""
PAUSE_S: Final = 0.05
_GONE: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})


class Asker(Protocol):
    async def ask(self, question: Question, *, came: Callable[[], None], attached: Callable[[], None]) -> Answer:
        """Calls `came` with each part that has tokens, `attached` when it goes on after a lost connection.

        Raises BatonError where there is no answer, AssertionError where an index is missing or repeated.
        """
        ...

    async def close(self) -> None: ...


class GrpcAsker:
    """Asks the first of these routers, and the others where it must."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(endpoint, options=options) for endpoint in endpoints]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]

    async def ask(self, question: Question, *, came: Callable[[], None], attached: Callable[[], None]) -> Answer:
        request = make_request(question.prompt, max_tokens=question.max_tokens, **question.sampling)
        if question.salt:
            request.cache_salt = question.salt
        request.resumable = True
        with rpc_errors("the routers"):
            return await collect(self._events(request, came, attached))

    async def _events(
        self, request: inference_pb2.GenerateRequest, came: Callable[[], None], attached: Callable[[], None]
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        loop, ids = asyncio.get_running_loop(), list[int]()
        until_s, token, turn, over = loop.time() + ANSWER_S_MAX, "", 0, False
        while not over:
            stub, left_s = self._stubs[turn % len(self._stubs)], until_s - loop.time()
            known = inference_pb2.TokenIds(ids=ids)
            again = inference_pb2.AttachRequest(resume_token=token, request=request, output=known)
            call: Any = stub.Attach(again, timeout=left_s) if token else stub.Generate(request, timeout=left_s)
            try:
                async for event in call:
                    begins, over = event.HasField("started"), event.HasField("finished")
                    if begins and token:
                        attached()
                        continue
                    assert event.resume_token, event
                    token = event.resume_token
                    ids.extend(event.tokens.ids)
                    if event.HasField("tokens"):
                        came()
                    yield event
            except grpc.aio.AioRpcError as error:
                if error.code() not in _GONE or loop.time() > until_s:
                    raise
                turn += 1
                await asyncio.sleep(PAUSE_S)
        await self._forget(token, turn)

    async def _forget(self, token: str, turn: int) -> None:
        for stub in self._stubs[turn % len(self._stubs) :] + self._stubs:
            try:
                await stub.Forget(inference_pb2.ForgetRequest(resume_token=token), timeout=5)
            except grpc.aio.AioRpcError:
                continue
            return

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
