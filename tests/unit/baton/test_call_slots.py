"""Calls whose request does not come, or is none, over a real connection."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_network
from typing import Any

import pytest
from batonpb import decode_pb2, inference_pb2, node_pb2

from baton import call_slots
from baton.errors import BatonError, Code, Reason
from baton.rpc import LARGE_REQUEST_BYTES, PUBLIC_MESSAGE_BYTES_MAX, RpcLimits, _Edge, rpc_errors
from tests.support import raw_http2 as http2
from tests.support.rpc_harness import SERVING, Served, answer, run, serving

LIMITS = RpcLimits(rpcs_max=8)
GENERATE = "/baton.v1.Inference/GenerateUnary"
GET_STATUS = "/baton.v1.Node/GetStatus"


def half_open(served: Served, method: str) -> Any:
    """A call with a head and no request."""
    channel = served.channels.get(f"127.0.0.1:{served.port}")
    return channel.stream_unary(method)(timeout=60)


async def ended(call: Any) -> BatonError:
    with pytest.raises(BatonError) as caught, rpc_errors("server"):
        await call
    return caught.value


@asynccontextmanager
async def first_ended(calls: list[Any], count: int) -> AsyncIterator[list[BatonError]]:
    """The errors of the first that end, in any order. The others wait on during the block."""
    ends = [asyncio.create_task(ended(call)) for call in calls]
    errors = [await end for _, end in zip(range(count), asyncio.as_completed(ends), strict=False)]
    assert sum(call.done() for call in calls) == count
    yield errors
    for each in ends:
        each.cancel()
    await asyncio.wait(ends)


async def reply(_request: Any, _context: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id="done")


def test_calls_without_a_request_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than there are places for: others are answered meanwhile, checks too. All but so many are told to make
    room; the rest wait on."""
    monkeypatch.setattr(call_slots, "UNREAD_MAX", 8)

    async def scene() -> None:
        async with serving(LIMITS, inference=reply, node=answer) as served:
            calls = [half_open(served, GENERATE) for _ in range(40)]
            async with first_ended(calls, 32) as errors:
                for error in errors:
                    assert (error.reason, error.retry_after_ms) == (Reason.TOO_MANY_CALLS, LIMITS.busy_retry_ms)
                for _ in range(5):
                    done = await served.inference.GenerateUnary(inference_pb2.GenerateRequest(), timeout=20)
                    assert done.request_id == "done"
                    assert (await served.get_status()).requests == 7
                    assert await served.check("") == SERVING

    run(scene())


def test_a_call_comes_in_the_turn_in_which_the_time_of_others_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have been told, and have not left yet. It takes the place of one of them."""
    monkeypatch.setattr(call_slots, "UNREAD_MAX", 2)

    async def scene() -> None:
        slots = call_slots.CallSlots(rpcs_max=8, busy_retry_ms=1, rng=random.Random(0))
        loop = asyncio.get_running_loop()

        async def read() -> None:
            await slots.read("10.0.0.1", asyncio.Event().wait)

        late = [asyncio.create_task(read()) for _ in range(2)]
        await asyncio.sleep(0)
        for scope in slots._reads.values():
            scope.reschedule(loop.time())
        new = asyncio.create_task(read())
        await asyncio.wait(late)
        assert all(isinstance(each.exception(), BatonError) for each in late)
        assert not new.done()
        new.cancel()
        await asyncio.wait([new])
        assert not slots._reads

    run(scene())


def test_a_request_has_to_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "REQUEST_S_MAX", 0.05)

    async def scene() -> None:
        async with serving(LIMITS, inference=reply) as served:
            assert (await ended(half_open(served, GENERATE))).reason is Reason.DEADLINE

    run(scene())


def test_metadata_of_any_size_is_not_kept() -> None:
    """Of a client that does not keep to the limit it is told, which gRPC leaves to us: its call ends, and its
    connection lives on."""
    calls: list[Any] = []

    async def note(request: Any, context: Any) -> node_pb2.NodeStatus:
        calls.append(request)
        return await answer(request, context)

    async def scene() -> None:
        async with serving(LIMITS, node=note) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            large = http2.call_head(GET_STATUS, *((b"x-a", b"a" * 8_000) for _ in range(2)))
            good = http2.call_head(GET_STATUS, (b"grpc-timeout", b"20S"))
            writer.write(http2.GREETING)
            for stream, head in ((1, large[:16_000]), (3, good)):
                end = http2.END_HEADERS if head is good else 0
                writer.write(http2.frame(http2.HEADERS, end, stream, head))
                if not end:
                    writer.write(http2.frame(http2.CONTINUATION, http2.END_HEADERS, stream, large[16_000:]))
                writer.write(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"")))
            over: list[int] = []
            while len(over) < 2:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == http2.HEADERS and head[4] & http2.END_STREAM:
                    over.append(int.from_bytes(head[5:], "big"))
            writer.close()
            assert (sorted(over), len(calls)) == ([1, 3], 1)

    run(scene())


@pytest.mark.parametrize("sends", [b"", b"\xff\xff", None])
def test_what_is_no_request(sends: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no message, or none at all: the caller's error, and no line in the log. No bytes at all are an
    empty message."""

    async def requests() -> Any:
        if sends is not None:
            yield sends

    async def scene() -> None:
        async with serving(LIMITS, node=answer) as served:
            channel = served.channels.get(f"127.0.0.1:{served.port}")
            call = channel.stream_unary(GET_STATUS)(requests(), timeout=20)
            if sends == b"":
                assert node_pb2.NodeStatus.FromString(await call).requests == 7
            else:
                error = await ended(call)
                assert (error.reason, error.code) == (Reason.BAD_FIELD, Code.INVALID_ARGUMENT)

    run(scene())
    assert not caplog.records


def test_a_caller_who_leaves_in_the_middle_of_its_request_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Forty times: nothing is logged as if it were our fault, and all places are free again."""

    async def scene() -> None:
        async with serving(LIMITS, inference=reply) as served:
            for _ in range(10):
                calls = [half_open(served, GENERATE) for _ in range(4)]
                await asyncio.gather(*(call.wait_for_connection() for call in calls))
                for call in calls:
                    call.cancel()
                    with suppress(asyncio.CancelledError):
                        await call
            assert await served.check("") == SERVING

    run(scene())
    assert not caplog.records


@pytest.mark.parametrize("trusted", [False, True])
def test_one_address_leaves_places_to_others(trusted: bool) -> None:
    """Eight places: six for the clients of one address, unless it is a proxy's. Nodes may have the rest."""

    async def scene() -> None:
        gate, running = asyncio.Event(), asyncio.Semaphore(0)

        async def wait(_request: Any, _context: Any) -> inference_pb2.GenerateResponse:
            running.release()
            await gate.wait()
            return inference_pb2.GenerateResponse()

        async with serving(LIMITS, inference=wait, node=answer) as served:
            if trusted:
                served.server.trust_proxies([ip_network("127.0.0.0/8")])
            ask = served.inference.GenerateUnary
            calls = [ask(inference_pb2.GenerateRequest(), timeout=20) for _ in range(7 if trusted else 6)]
            for _ in calls:
                await running.acquire()
            assert (await served.get_status()).requests == 7
            if not trusted:
                error = await ended(ask(inference_pb2.GenerateRequest(), timeout=20))
                assert error.reason is Reason.TOO_MANY_CALLS
                assert error.retry_after_ms in (1_000, 2_000)
            gate.set()
            await asyncio.gather(*calls)

    run(scene())


def test_one_large_request_is_parsed_in_a_turn_of_the_loop() -> None:
    """Eight come at once. Between any two of them the loop turns, so that others have their turn."""
    turns: list[int] = []
    count = itertools.count()

    async def turn() -> None:
        while True:
            next(count)
            await asyncio.sleep(0)

    class Large:
        async def read(self) -> bytes:
            return bytes(LARGE_REQUEST_BYTES + 1)

    async def scene() -> None:
        edge = _Edge(limits=LIMITS, rng=random.Random(1))
        large: Any = Large()
        turning = asyncio.create_task(turn())
        await asyncio.gather(*(edge._request(large, lambda raw: turns.append(next(count))) for _ in range(8)))
        turning.cancel()
        assert len(turns) == 8
        assert all(later - earlier > 1 for earlier, later in itertools.pairwise(turns))

    run(scene())


def test_a_stopping_server_waits_for_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with serving(LIMITS, inference=reply) as served:
            calls = [half_open(served, GENERATE) for _ in range(4)]
            await asyncio.gather(*(call.wait_for_connection() for call in calls))
            assert await served.check("") == SERVING
            await served.server.stop(0)
            for call in calls:
                await ended(call)

    run(scene())
    assert not caplog.records


def test_a_client_may_send_less_than_it_gets() -> None:
    """Over 3 MiB of a request are too many where clients call; a node's is taken. An answer may be larger."""
    body = "x" * PUBLIC_MESSAGE_BYTES_MAX

    async def large(_request: Any, _context: Any) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(request_id=body)

    async def known(_request: Any, _context: Any) -> decode_pb2.CancelReply:
        return decode_pb2.CancelReply(known=True)

    async def scene() -> None:
        async with serving(inference=large) as served:
            got = await served.inference.GenerateUnary(inference_pb2.GenerateRequest(), timeout=20)
            assert got.request_id == body
            call = served.inference.GenerateUnary(inference_pb2.GenerateRequest(text=body), timeout=20)
            assert (await ended(call)).reason is Reason.BAD_FIELD
        async with serving(decode=known) as served:
            got = await served.decode.Cancel(decode_pb2.CancelRequest(reason=body), timeout=20)
            assert got.known

    run(scene())
