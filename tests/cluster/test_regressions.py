"""Situations of a handoff that once went wrong: each test holds one still and asserts how it must end."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from batonpb import transfer_pb2

from baton.errors import Reason
from baton.ids import RequestKey
from baton.lifecycle import LifecycleEvent
from cli.services import Service
from decode_node.node import DecodeNode
from decode_node.service import ReceiverService
from kvtransfer.native import copy as native_copies
from kvtransfer.transports import shm
from router.prefill_nodes import PrefillCalls
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    assert_conserved,
    error_of,
    make_request,
    mock_spec,
    random_prompt,
)
from tests.support.inprocess_cluster import (
    MARK,
    REACHED_S_MAX,
    InProcessCluster,
    Point,
    ask_exactly,
    inprocess,
    peer_of,
    until,
)
from tests.support.node_states import prefill_state

LAYERS = 4
"""Of the mock engine: a prompt of one chunk is sent in as many batches."""
SLOW_DECODE = {"engine.mock_layer_delay_ms": 0.5}


def marked(rng: random.Random, length: int) -> list[int]:
    return [MARK, *random_prompt(rng, length - 1)]


async def reached(cluster: InProcessCluster, point: Point) -> None:
    await asyncio.wait_for(cluster.gates[point].reached.wait(), REACHED_S_MAX)


def asking(cluster: InProcessCluster, prompt: Sequence[int], count: int = 8, **request: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(cluster.client.generate(prompt, max_tokens=count, **request))


def region_is_mapped(name: str) -> bool:
    return f"memfd:baton-{name}" in Path("/proc/self/maps").read_text()


def test_no_seal_vouches_for_a_batch_that_was_not_copied() -> None:
    """The copy of the last layer fails after the Commit has been sent: the decode node is never given the seal and the
    grant is not committed. Another attempt gives the answer, exactly, and every block comes back."""

    async def scenario() -> None:
        real_copy, commit_sent = native_copies.copy_checked, threading.Event()
        copies = 0
        died: list[type[BaseException]] = []
        committed: list[bool] = []

        def copy(*args: Any) -> None:
            nonlocal copies
            copies += 1
            if copies == LAYERS:
                assert commit_sent.wait(REACHED_S_MAX)
                raise MemoryError
            real_copy(*args)

        real_commit = DecodeNode.commit

        async def commit(self: DecodeNode, *args: Any) -> bool:
            committed.append(await real_commit(self, *args))
            return committed[-1]

        with (
            patch.object(shm, "copy_checked", copy),
            patch.object(threading, "excepthook", lambda args: died.append(args.exc_type)),
            patch.object(DecodeNode, "commit", commit),
        ):
            async with inprocess(mock_spec()) as cluster:
                prompt = marked(random.Random(1), 40)
                call = asyncio.create_task(ask_exactly(cluster, prompt))
                await reached(cluster, Point.COMMIT_TAKEN)
                assert not cluster.gates[Point.SEAL_LANDED].reached.is_set(), "sealed what was never copied"
                commit_sent.set()
                answer = await call
                assert (answer.stats.resumptions, died, committed) == (1, [MemoryError], [False, True])
                await assert_conserved(cluster)
                await ask_exactly(cluster, prompt)
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_blocks_of_a_cancelled_request_go_to_the_next_in_line() -> None:
    """One prompt fills the prefill node's region, another waits. The first client leaves while a step runs: its blocks
    come free only with the step's end, and that lets the second one go ahead."""

    async def scenario() -> None:
        rng = random.Random(2)
        async with inprocess(mock_spec(node_flags={"prefill-0": {"engine.num_blocks": 100}})) as cluster:
            node, gate = cluster.prefill["prefill-0"], cluster.gates[Point.LAYER]
            gate.close()
            call: Any = cluster.client.stub.Generate(make_request(marked(rng, 1500), max_tokens=8), timeout=CALL_S_MAX)
            await reached(cluster, Point.LAYER)
            second = [5, *random_prompt(rng, 1499)]
            waiting = asyncio.create_task(ask_exactly(cluster, second))
            await until(cluster, "the second to be queued", lambda: len(prefill_state(node).queue) == 1)
            call.cancel()
            await until(cluster, "the first to be given back", lambda: not prefill_state(node).admitted)
            assert len(prefill_state(node).queue) == 1, "admitted while the step had the blocks"
            gate.open()
            await waiting
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_node_whose_engine_loop_breaks_ends(name: str) -> None:
    """A bug ends the engine loop: `serve` ends with an error, its region is unmapped, its port is free, and a node
    started in its place serves."""

    async def scenario() -> None:
        flags = {"liveness.reconnect_ms_max": 300, "retries.resume_wait_ms_max": 1_000}
        async with inprocess(mock_spec(router_flags=flags)) as cluster:
            nodes: dict[str, Any] = {**cluster.prefill, **cluster.decode}
            host, port = cluster.endpoints[name].split(":")
            assert region_is_mapped(name)

            def breaks(*_args: Any, **_others: Any) -> None:
                raise AssertionError("a bug")

            with patch.object(nodes[name], "step_ended", breaks):
                asked = asyncio.create_task(error_of(asking(cluster, [5, 6, 7])))
                error = await asyncio.wait_for(cluster.broken(name), REACHED_S_MAX)
            assert error.reason is Reason.INTERNAL
            assert isinstance(error.__cause__, AssertionError)
            await asked
            assert not region_is_mapped(name)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
            await cluster.start_node(name, Service.PREFILL if name.startswith("prefill") else Service.DECODE)
            await ask_exactly(cluster, [5, 6, 7])
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_commit_whose_seal_is_lost_with_the_link_is_given_up() -> None:
    """The Commit waits at the decode node when the link ends, and the seal never comes: the attempt ends as a failed
    handoff, long before its client's deadline, and the next one gives the answer, from its second token on."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill_flags={"writer.call_ms_max": 300})) as cluster:
            cluster.gates[Point.SEAL].close()
            call = asyncio.create_task(ask_exactly(cluster, marked(random.Random(4), 40)))
            await reached(cluster, Point.SEAL)
            await reached(cluster, Point.COMMIT_TAKEN)
            link: Any = peer_of(cluster, "decode-0").link.now
            link._end("the test ended the link")
            cluster.gates[Point.SEAL].closed = False  # for the next attempt; the seal of this one is lost
            answer = await call
            assert answer.stats.resumptions == 1
            await assert_conserved(cluster)
            await until(cluster, "the request to be freed", lambda: not cluster.traces())
            cluster.gates[Point.SEAL].open()
            await ask_exactly(cluster, [5, 6, 7])
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_prefill_node_stops_what_the_router_never_heard_of() -> None:
    """The client leaves when the decode node has committed and the router has not read `granted`: it cannot tell the
    decode node, so the prefill node does, and nothing runs on."""

    async def scenario() -> None:
        real_take, real_cancel = PrefillCalls._take, DecodeNode.cancel
        cancelled: list[tuple[RequestKey, str]] = []

        def take(self: PrefillCalls, job: Any, inbox: Any, event: Any) -> None:
            if job.checked.prompt[0] != MARK:
                real_take(self, job, inbox, event)

        def cancel(self: DecodeNode, key: RequestKey, reason: str, *, notify_router: bool = False) -> bool:
            found = real_cancel(self, key, reason, notify_router=notify_router)
            if found:
                cancelled.append((key, reason))
            return found

        spec = mock_spec(blocks=1000, decode_flags={**SLOW_DECODE, "orphan_ms": 600_000})
        with patch.object(PrefillCalls, "_take", take), patch.object(DecodeNode, "cancel", cancel):
            async with inprocess(spec) as cluster:
                cluster.gates[Point.COMMIT_ANSWERED].close()
                request = make_request(marked(random.Random(7), 40), max_tokens=8000, ignore_eos=True)
                call: Any = cluster.client.stub.Generate(request, timeout=CALL_S_MAX)
                await reached(cluster, Point.COMMIT_ANSWERED)
                call.cancel()
                await until(cluster, "the request to be freed", lambda: not cluster.traces())
                (key,) = {key for key, _ in cancelled}
                assert cluster.is_marked(key.request)
                # By whichever is first: the prefill node, or the router, which is asked where to send tokens.
                assert cancelled[0][1] in ("the prefill node gave the request up", "no longer wanted")
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_repeated_reserve_gets_the_grant_that_has_the_last_place() -> None:
    """The decode node has one place. A Reserve takes it and comes again, since its reply was lost: the answer is the
    same grant, and the request is served; BUSY would have been another answer to the same number."""
    real = ReceiverService.Reserve
    replies: list[transfer_pb2.ReserveReply] = []

    async def twice(
        service: ReceiverService, request: transfer_pb2.ReserveRequest, context: Any
    ) -> transfer_pb2.ReserveReply:
        replies.append(await real(service, request, context))
        replies.append(await real(service, request, context))
        return replies[-1]

    async def scenario() -> None:
        rng = random.Random(7)
        async with inprocess(mock_spec(decode_flags={"requests_max": 1})) as cluster:
            await ask_exactly(cluster, random_prompt(rng, 40))
            await assert_conserved(cluster)

    with patch.object(ReceiverService, "Reserve", twice):
        asyncio.run(scenario())
    first, again = replies
    assert first.HasField("granted")
    assert again == first


@pytest.mark.parametrize("change", ["drained", "pinned"])
def test_a_repeated_reserve_gets_its_grant_where_a_new_one_would_be_refused(change: str) -> None:
    """Between a Reserve and its repeat the decode node begins to drain, or prefixes are pinned and leave too few blocks
    for the request. The grant stands, and the request is served; another request is refused as it must be."""
    real = ReceiverService.Reserve
    rng = random.Random(8)
    prompt, pinned = random_prompt(rng, 100), random_prompt(rng, 320)
    replies: list[transfer_pb2.ReserveReply] = []
    changed: list[Callable[[], object]] = []

    async def changing(
        service: ReceiverService, request: transfer_pb2.ReserveRequest, context: Any
    ) -> transfer_pb2.ReserveReply:
        if not changed:
            return await real(service, request, context)
        replies.append(await real(service, request, context))
        changed.pop()()
        replies.append(await real(service, request, context))
        return replies[-1]

    async def scenario() -> None:
        spec = mock_spec(decode_flags={"engine.num_blocks": 26}, router_flags={"placement_wait_ms_max": 200})
        async with inprocess(spec) as cluster:
            cache = cluster.decode["decode-0"].pool.blocks.prefix_cache
            chain = cache.chain(pinned, b"")
            lifecycle = cluster.runtimes["decode-0"].lifecycle
            await ask_exactly(cluster, pinned, 2)
            await assert_conserved(cluster)
            if change == "drained":
                changed.append(lambda: lifecycle.handle(LifecycleEvent.DRAIN, now_s=0.0))
            else:
                changed.append(lambda: cache.pin(chain))
            await ask_exactly(cluster, prompt, 8)
            refused = await error_of(cluster.client.generate(random_prompt(rng, 100), max_tokens=8))
            drained = (Reason.NODE_DRAINING, Reason.NO_DECODE_NODE)  # the latter where it is known before it is asked
            assert refused.reason in (drained if change == "drained" else (Reason.PROMPT_TOO_LONG,))
            if change == "pinned":
                cache.unpin(chain)
            await assert_conserved(cluster)

    with patch.object(ReceiverService, "Reserve", changing):
        asyncio.run(scenario())
    first, again = replies
    assert first.HasField("granted")
    assert again == first
