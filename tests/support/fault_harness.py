"""What the tests of faults share: requests that must be exact, and ways to see from outside where a request is.

"In the middle of a handoff" is seen by GetStatus: the decode node has blocks that a writer owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from batonpb import (
    common_pb2,
    directory_pb2,
    directory_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

from baton.rpc import rpc_errors
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    collect,
    make_request,
    mock_tokens,
    wait_for,
)

PROMPT_TOKENS = 1500
PROMPT_BLOCKS = 94
FAST_MEMBERSHIP = {"membership.heartbeat_ms": 100, "membership.ttl_ms": 600}
SLOW_PREFILL = {"engine.mock_layer_delay_ms": 40}
"""Three chunks of four layers: half a second in the middle of a handoff."""
SLOW_DECODE = {"engine.mock_layer_delay_ms": 0.5}
ROUTER = 0xFEED


async def ask_exactly(cluster: RunningCluster, prompt: list[int], count: int) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


async def until(cluster: RunningCluster, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    await wait_for(holds, what, story=cluster.story)


async def writer_owns_blocks(cluster: RunningCluster, decode: str) -> None:
    async def holds() -> bool:
        return (await cluster.status(decode)).record.load.blocks.writer_owned > 0

    await until(cluster, f"a handoff to {decode}", holds)


Ask = Callable[[], Coroutine[Any, Any, Answer]]


async def ask_until_handoff(
    cluster: RunningCluster, decode: str, *, long: Ask, short: Ask | None = None, requests_min: int = 0
) -> list[asyncio.Task[Answer]]:
    """Keep two `long` and eight `short` requests going until a handoff to this decode node is under way, and every
    decode node has `requests_min` requests at least. All that were asked. The next is asked as soon as one has ended,
    however rarely we look."""
    calls: list[asyncio.Task[Answer]] = []

    async def keep_asking(ask: Ask) -> None:
        failed = False
        while not failed:
            call = asyncio.create_task(ask())
            calls.append(call)
            await asyncio.wait([call])
            failed = call.exception() is not None  # which is for whoever awaits the calls

    async def holds() -> bool:
        statuses = await cluster.statuses()
        fewest = min(status.requests for name, status in statuses.items() if name.startswith("decode"))
        return fewest >= requests_min and statuses[decode].record.load.blocks.writer_owned > 0

    feeds = [long] * 2 + ([short] * 8 if short is not None else [])
    asking = [asyncio.create_task(keep_asking(ask)) for ask in feeds]
    try:
        await until(cluster, f"a handoff to {decode}", holds)
    finally:
        for each in asking:
            each.cancel()
    return calls


async def directory_lists(cluster: RunningCluster, name: str, listed: bool) -> None:
    stub = directory_pb2_grpc.DirectoryStub(cluster.channel("directory"))

    async def holds() -> bool:
        reply = await stub.List(directory_pb2.ListRequest(), timeout=CALL_S_MAX)
        return any(record.name == name for record in reply.records) is listed

    await until(cluster, f"{name} in the directory: {listed}", holds)


async def prefill_directly(cluster: RunningCluster, name: str, request: str, prompt: list[int]) -> list[str]:
    """Send a request to this prefill node, as a router of our own; the kinds of its events. Raises BatonError."""
    status = await cluster.status(name)
    message = prefill_pb2.PrefillRequest(
        header=common_pb2.Header(sender=ROUTER, receiver=status.record.incarnation),
        key=common_pb2.RequestKey(request=request),
        prompt=prompt,
        sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=20),
        router=ROUTER,
    )
    call: Any = prefill_pb2_grpc.PrefillStub(cluster.channel(name)).Prefill(message, timeout=CALL_S_MAX)
    with rpc_errors(name):
        return [event.WhichOneof("event") async for event in call]


async def with_tokens(cluster: RunningCluster, prompt: list[int], count: int) -> asyncio.Task[Answer]:
    """Ask, and return once the answer has begun to come from the decode node."""
    call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=count), timeout=CALL_S_MAX)
    stream = aiter(call)
    events: list[inference_pb2.GenerateEvent] = []
    while sum(len(event.tokens.ids) for event in events) < 3:
        events.append(await anext(stream))

    async def rest() -> AsyncIterator[inference_pb2.GenerateEvent]:
        for event in events:
            yield event
        async for event in stream:
            yield event

    async def read() -> Answer:
        with rpc_errors("router-0"):
            return await collect(rest())

    return asyncio.create_task(read())
