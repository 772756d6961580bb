"""The gRPC service of a router, with a node of the test's own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from router.answers import AnswerPart
from router.config import RouterConfig
from router.key_desk import LocalDesk
from router.keys import ApiKey, KeyBook, digest_of
from router.resume import SECRET_BYTES, Place, ResumeToken
from router.service import InferenceService, _Stream

KEY = "baton-" + "a" * 43


def test_a_client_that_leaves_as_it_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer ends with the error that nobody is left to be told: that is no failure."""
    broken: list[str] = []

    async def run(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise BatonError(Reason.TAKEN_OVER, "It has gone on by another call.")

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: broken.append(context["message"]))
        service = InferenceService(MagicMock(config=RouterConfig(), run=run))
        monkeypatch.setattr(service, "_call", lambda *_: SimpleNamespace())
        call = asyncio.create_task(service._send(None, None, MagicMock(), None))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        await asyncio.sleep(0)

    asyncio.run(scene())
    assert broken == []


class Writes:
    """The client's side of a call: each write waits until the test says that it is over."""

    def __init__(self) -> None:
        self.begun: list[inference_pb2.GenerateEvent] = []
        self.ends: list[asyncio.Future[None]] = []
        self.finished = 0

    async def write(self, event: inference_pb2.GenerateEvent) -> None:
        self.begun.append(event)
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        self.finished += 1


def part(index: int) -> AnswerPart:
    return AnswerPart(first_index=index, ids=[index], text=str(index), logprobs=(), place=None)


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_stream_writes_one_message_at_a_time() -> None:
    """The first write begins in the call that brings its message; the others when the one before them is over. The sink
    is closed meanwhile, and open again once all is written. The handler waits until the answer is over and written."""

    async def scene() -> None:
        client, opened = Writes(), []
        sink = _Stream(None, client.write)
        sink.on_open = lambda: opened.append(client.finished)
        sink.started(inference_pb2.Started(request_id="r"), None)
        assert [event.started.request_id for event in client.begun] == ["r"]
        states = [sink.is_open]
        sink.tokens(part(0))
        sink.tokens(part(1))
        waits = asyncio.create_task(sink.all_written())
        for count in (1, 2, 3):
            await turn()
            assert len(client.begun) == count
            assert not waits.done()
            assert opened == []
            client.ends[-1].set_result(None)
        await turn()
        assert [list(event.tokens.ids) for event in client.begun[1:]] == [[0], [1]]
        assert opened == [3]
        assert [*states, sink.is_open] == [False, True]
        sink.tokens(part(2))
        answer = asyncio.create_task(asyncio.sleep(0))
        answer.add_done_callback(sink.ended)
        await turn()
        assert not waits.done()
        client.ends[-1].set_result(None)
        await waits
        await sink.close()
        assert client.finished == 4

    asyncio.run(scene())


def test_a_write_that_fails_ends_the_call() -> None:
    """The handler gets the error. What comes afterwards is dropped, and nothing more is written."""

    async def scene() -> None:
        client = Writes()
        sink = _Stream(None, client.write)
        sink.started(inference_pb2.Started(), None)
        sink.tokens(part(0))
        client.ends[0].set_exception(ConnectionResetError("the client has gone"))
        with pytest.raises(ConnectionResetError):
            await sink.all_written()
        sink.tokens(part(1))
        await sink.close()
        assert len(client.begun) == 1

    asyncio.run(scene())


def test_a_call_that_ends_waits_for_its_first_write_alone() -> None:
    """Its headers go out with that. A later write, which the client does not take, is not waited for."""

    async def scene() -> None:
        client = Writes()
        sink = _Stream(None, client.write)
        sink.started(inference_pb2.Started(), None)
        sink.tokens(part(0))
        closing = asyncio.create_task(sink.close())
        await turn()
        assert not closing.done()
        client.ends[0].set_result(None)
        await closing
        assert len(client.begun) == 1
        sink = _Stream(None, client.write)
        sink.started(inference_pb2.Started(), None)
        client.ends[-1].set_result(None)
        await turn()
        sink.tokens(part(1))
        await sink.close()
        sink.tokens(part(2))
        assert len(client.begun) == 3
        assert client.finished == 2

    asyncio.run(scene())


def test_a_write_that_fails_behind_the_end_leaves_nothing_behind() -> None:
    """The client is gone, and its call is over. When gRPC then fails the write, nobody is told that there is room, and
    the error, whose traceback leads to the stream, is not kept by it: such a cycle would stay for long."""

    async def scene() -> None:
        client, opened = Writes(), []
        sink = _Stream(None, client.write)
        sink.on_open = lambda: opened.append(client.finished)
        sink.started(inference_pb2.Started(), None)
        client.ends[-1].set_result(None)
        await turn()
        sink.tokens(part(0))
        await sink.close()
        client.ends[-1].set_exception(ConnectionResetError("the client has gone"))
        await turn()
        gone = weakref.ref(sink)
        gc.disable()
        try:
            del sink
            client.ends.clear()
            await turn()
            assert (gone(), opened) == (None, [1])
        finally:
            gc.enable()

    asyncio.run(scene())


def test_a_write_may_let_others_run() -> None:
    """It yields without a future, as sleep(0) does."""

    async def scene() -> None:
        begun: list[inference_pb2.GenerateEvent] = []

        async def write(event: inference_pb2.GenerateEvent) -> None:
            await asyncio.sleep(0)
            begun.append(event)

        sink = _Stream(None, write)
        sink.tokens(part(0))
        sink.tokens(part(1))
        answer = asyncio.create_task(asyncio.sleep(0))
        answer.add_done_callback(sink.ended)
        await sink.all_written()
        await sink.close()
        assert [list(event.tokens.ids) for event in begun] == [[0], [1]]

    asyncio.run(scene())


def test_a_key_ends_as_many_answers_a_minute_as_it_may_begin() -> None:
    """One, by Forget. A second call is told to wait, and no node is asked."""
    key = ApiKey(name="a", sha256=digest_of(KEY), requests_per_minute=1)
    forgotten: list[str | None] = []

    async def forget(_token: ResumeToken, name: str | None, _ended: Any) -> None:
        forgotten.append(name)

    async def scene() -> None:
        book = KeyBook([key], blind=b"blind", now_s=0.0)
        desk = LocalDesk(book, rng=Random(1), cut_former=lambda _token, _name: False)
        service = InferenceService(MagicMock(config=RouterConfig(), forget=forget), desk)
        context = MagicMock()
        context.invocation_metadata.return_value = (("authorization", f"Bearer {KEY}"),)
        token = ResumeToken(secret=b"s" * SECRET_BYTES, seed=1, digest=2, places=(Place(),))
        request = inference_pb2.ForgetRequest(resume_token=token.encode())
        await service._forget(request, context)
        with pytest.raises(BatonError) as caught:
            await service._forget(request, context)
        assert caught.value.reason is Reason.RATE_LIMIT_EXCEEDED

    asyncio.run(scene())
    assert forgotten == ["a"]
