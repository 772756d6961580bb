"""Engine threads that are stuck inside a step, for good as far as the nodes know: everything else goes on.

Blocked: the thread waits without the interpreter lock, as in a kernel that does not return. Busy: it computes in the
interpreter without a pause, and passes the lock on only when it is made to.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from batonpb import node_pb2, node_pb2_grpc

from cli.supervisor import ROUTER_NAME
from kvtransfer.protocol.receiver import GrantState
from kvtransfer.writer import WriterPeer
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt, wait_for
from tests.support.inprocess_cluster import MARK, InProcessCluster, inprocess, until

HELD_S_MAX = 60.0
PROMPT_TOKENS = 100
BLOCKS = 300
FAST = {"membership.heartbeat_ms": 50, "membership.ttl_ms": 10_000}


class Stuck:
    """Engine threads that come here stay until `free`."""

    def __init__(self, *, busy: bool) -> None:
        self.inside: set[str] = set()
        self._busy = busy
        self._free = threading.Event()

    def hold(self, name: str) -> None:
        self.inside.add(name)
        if not self._busy:
            assert self._free.wait(HELD_S_MAX)
        while not self._free.is_set():
            sum(range(1_000))

    def free(self) -> None:
        self._free.set()


class _HoldingSink:
    """Holds the engine thread after the second layer of a step."""

    def __init__(self, sink: Any, hold: Callable[[], None]) -> None:
        self._sink = sink
        self._hold = hold

    def layer_done(self, layer: int) -> None:
        self._sink.layer_done(layer)
        if layer == 1:
            self._hold()


@asynccontextmanager
async def stuck_cluster(*, busy: bool, **decode_flags: object) -> AsyncIterator[tuple[InProcessCluster, Stuck]]:
    """Both engines get stuck in a step with the marked prompt, or the sequence after it."""
    stuck = Stuck(busy=busy)
    patient = {"writer.stall_ms_max": 60_000}
    spec = mock_spec(blocks=BLOCKS, both=FAST, router_flags=FAST, prefill_flags=patient, decode_flags=decode_flags)
    async with inprocess(spec) as cluster:
        engines = {name: node.pool.engine for name, node in cluster.prefill.items()}
        engines |= {name: node.pool.engine for name, node in cluster.decode.items()}
        for name, engine in engines.items():
            real_run = engine.run

            def run(batch: Any, sink: Any, name: str = name, real_run: Any = real_run) -> Any:
                if any(piece.tokens[0] == MARK for piece in batch.slices):
                    sink = _HoldingSink(sink, lambda: stuck.hold(name))
                return real_run(batch, sink)

            engine.run = run  # type: ignore[method-assign]
        try:
            yield cluster, stuck
        finally:
            stuck.free()


async def heartbeats(cluster: InProcessCluster, name: str) -> None:
    """Three more of its reports reach the directory.

    Asked there: the other nodes are not told of a report that says the same as the one before it, and a stuck node has
    nothing new to say.
    """
    directory = cluster.runtimes[ROUTER_NAME].directory

    async def sequence() -> int:
        (record,) = [r for r in (await directory.list()).records if r.name == name]
        return record.sequence

    first = await sequence()

    async def three_more() -> bool:
        return await sequence() >= first + 3

    await wait_for(three_more, f"heartbeats of {name}", story=cluster.story)


async def answers_status(cluster: InProcessCluster, name: str) -> node_pb2.NodeStatus:
    async with grpc.aio.insecure_channel(cluster.endpoints[name]) as channel:
        status: node_pb2.NodeStatus = await node_pb2_grpc.NodeStub(channel).GetStatus(
            node_pb2.GetStatusRequest(), timeout=HELD_S_MAX
        )
    assert status.record.name == name
    assert any("control loop lag" in counter.name for counter in status.counters)
    return status


def all_free(cluster: InProcessCluster) -> bool:
    grants = cluster.decode["decode-0"].receiver.grants
    blocks = grants.ledger.books()
    return grants.unreleased == 0 and blocks.writer_owned + blocks.quarantined + blocks.held == 0


@pytest.mark.parametrize("busy", [False, True], ids=["blocked", "busy"])
def test_a_stuck_prefill_engine_gives_its_grants_back(busy: bool) -> None:
    """The prefill engine is stuck between two layers of a handoff. The node reports, answers for its status, and when
    the client leaves it lets go of the grant with its word: the decode node's blocks are free, not quarantined, while
    the engine is still stuck. Freed, it serves again."""

    async def scenario() -> None:
        async with stuck_cluster(busy=busy) as (cluster, stuck):
            prompt = [MARK, *random_prompt(random.Random(1), PROMPT_TOKENS - 1)]
            call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=4))
            await until(cluster, "the engine to be stuck", lambda: bool(stuck.inside))
            assert stuck.inside == {"prefill-0"}
            await heartbeats(cluster, "prefill-0")
            assert (await answers_status(cluster, "prefill-0")).grants_written == 1
            assert not all_free(cluster)
            call.cancel()
            await until(cluster, "the decode node's blocks", lambda: all_free(cluster))
            assert (await answers_status(cluster, "prefill-0")).unacknowledged_writes == 0
            stuck.free()
            await assert_conserved(cluster)
            assert (await cluster.client.generate([7, 8], max_tokens=3)).ids == mock_tokens([7, 8], 3)

    asyncio.run(scenario())


@pytest.mark.parametrize("busy", [False, True], ids=["blocked", "busy"])
def test_a_node_with_a_stuck_engine_takes_lapsed_grants_back(busy: bool) -> None:
    """Both engines are stuck, the decode node's in an answer and the prefill node's in another handoff, whose lease is
    renewed no more. The decode node's reaper takes the grant back, the writer gives its word, the blocks are free."""

    async def no_renewals(_self: WriterPeer, _handoff: Any) -> None:
        pass

    async def scenario() -> None:
        rng = random.Random(2)
        flags = {"receiver.lease_ms": 300, "receiver.revoke_ms": 200}
        async with stuck_cluster(busy=busy, **flags) as (cluster, stuck):
            receiver = cluster.decode["decode-0"].receiver
            running = asyncio.create_task(
                cluster.client.generate([*random_prompt(rng, 20)], max_tokens=400)
            )  # of no mark: it runs until the next one's step
            await until(cluster, "an answer", lambda: receiver.grants.states()[GrantState.COMMITTED] == 1)
            hold_decode(cluster, stuck)
            await until(cluster, "the decode engine to be stuck", lambda: "decode-0" in stuck.inside)
            with patch.object(WriterPeer, "_keep_lease", no_renewals):
                prompt = [MARK, *random_prompt(rng, PROMPT_TOKENS - 1)]
                call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=4))
                await until(cluster, "both engines to be stuck", lambda: len(stuck.inside) == 2)
                await until(cluster, "the lapsed grant's end", lambda: receiver.grants.unreleased == 1)
                blocks = receiver.grants.ledger.books()
                assert (blocks.writer_owned, blocks.quarantined) == (0, 0)
            await heartbeats(cluster, "decode-0")
            await answers_status(cluster, "decode-0")
            call.cancel()
            running.cancel()
            stuck.free()
            await assert_conserved(cluster)
            assert (await cluster.client.generate([7, 8], max_tokens=3)).ids == mock_tokens([7, 8], 3)

    asyncio.run(scenario())


def hold_decode(cluster: InProcessCluster, stuck: Stuck) -> None:
    """The decode engine's next step does not end."""
    engine = cluster.decode["decode-0"].pool.engine
    real_run = engine.run

    def run(batch: Any, sink: Any) -> Any:
        stuck.hold("decode-0")
        return real_run(batch, sink)

    engine.run = run  # type: ignore[method-assign]
