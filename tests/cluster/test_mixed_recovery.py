"""Mixed nodes that lose each other, are drained in the middle of a handoff, or come back as another process."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from batonpb import node_pb2

from baton.errors import Reason
from baton.lifecycle import Lifecycle, LifecycleEvent
from node.peers import OUT_OF_REACH
from tests.cluster.test_mixed_protocol import MIN, cancel, directly, key
from tests.faults.cluster import faulty, mixed_spec
from tests.support.cluster_harness import assert_conserved, error_of, mock_spec, mock_tokens, random_prompt, wait_for
from tests.support.inprocess_cluster import MARK, REACHED_S_MAX, InProcessCluster, Point, inprocess, until

HERE, THERE = "mixed-0", "mixed-1"
LONG, SHORT = 200, 20


@asynccontextmanager
async def two_nodes(**flags: object) -> AsyncIterator[InProcessCluster]:
    spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags={"handoff_tokens_min": MIN, **flags})
    async with inprocess(spec) as cluster:
        yield cluster


def incarnation(cluster: InProcessCluster, name: str) -> int:
    return cluster.runtimes[name].incarnation


async def granted_by(
    cluster: InProcessCluster, request: str, tokens: int, *, count: int = 40, avoid: tuple[str, ...] = ()
) -> str:
    """Which node writes the answer of a request to HERE whose router does not reach those to `avoid`."""
    prompt, avoided = random_prompt(random.Random(request), tokens), [incarnation(cluster, name) for name in avoid]
    granted = await directly(cluster, HERE, key(request), prompt, count, [], avoid=avoided)
    (name,) = [name for name in (HERE, THERE) if incarnation(cluster, name) == granted]
    assert await cancel(cluster, name, key(request))
    return name


def out_of_reach(cluster: InProcessCluster, name: str) -> int:
    status = node_pb2.NodeStatus()
    cluster.peers[name].add_status(status)
    (counter,) = [counter for counter in status.counters if counter.name == OUT_OF_REACH]
    return int(counter.value)


def test_a_long_prompt_is_kept_while_no_other_node_is_reached() -> None:
    """The directory still lists the other node as ready. It is handed to again as soon as it is reached again."""

    async def scenario() -> None:
        async with two_nodes() as cluster:
            assert await granted_by(cluster, "before", LONG) == THERE
            stream = cluster.peers[HERE].liveness[cluster.runtimes[THERE].incarnation]
            stream.out_of_reach = True
            assert await granted_by(cluster, "meanwhile", LONG) == HERE
            assert (out_of_reach(cluster, HERE), out_of_reach(cluster, THERE)) == (1, 0)
            stream.out_of_reach = False
            assert await granted_by(cluster, "after", LONG) == THERE
            assert out_of_reach(cluster, HERE) == 0
            taken = [cluster.runtimes[name].record().load.requests_taken for name in (HERE, THERE)]
            assert taken == [3, 2], "a request that is kept is one"
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_what_the_router_does_not_reach_writes_no_answer_while_there_is_another() -> None:
    """The other node, then this one, then both: what would be handed over is kept, what would be kept is handed over,
    and where the router reaches neither all is as if it had not said so."""

    async def scenario() -> None:
        async with two_nodes() as cluster:
            assert await granted_by(cluster, "long", LONG) == THERE
            assert await granted_by(cluster, "short", SHORT) == HERE
            assert await granted_by(cluster, "long, not there", LONG, avoid=(THERE,)) == HERE
            assert await granted_by(cluster, "short, not here", SHORT, avoid=(HERE,)) == THERE
            assert await granted_by(cluster, "long, nowhere", LONG, avoid=(HERE, THERE)) == THERE
            assert await granted_by(cluster, "short, nowhere", SHORT, avoid=(HERE, THERE)) == HERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("flags", [{"local_fallback": "never"}, {"engine.num_blocks": 30}], ids=["never", "no region"])
def test_a_node_that_may_not_keep_it_hands_it_over_all_the_same(flags: dict[str, object]) -> None:
    """By its policy, or because prompt and answer would never fit: better a node that the router may reach again."""

    async def scenario() -> None:
        spec = mock_spec(
            prefill=0, decode=0, mixed=2, mixed_flags={"handoff_tokens_min": MIN}, node_flags={HERE: flags}
        )
        async with inprocess(spec) as cluster:
            assert await granted_by(cluster, "long", LONG, count=600, avoid=(THERE,)) == THERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("other", ["out of reach", "not ready", "too small"])
def test_a_prompt_whose_answer_only_the_other_node_could_hold(other: str) -> None:
    """This node's region is too small for prompt and answer. While the other node is out of reach or cordoned the
    request is told to come again, and is taken when the other one is back; where that is too small as well it is told
    so for good."""

    async def scenario() -> None:
        small = [HERE, THERE] if other == "too small" else [HERE]
        flags: dict[str, dict[str, object]] = {name: {"engine.num_blocks": 30} for name in small}
        spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags={"handoff_tokens_min": MIN}, node_flags=flags)
        async with inprocess(spec) as cluster:
            prompt, node = random_prompt(random.Random(74), LONG), cluster.prefill[HERE]
            stream, drain = None, cluster.runtimes[THERE].drain
            if other == "out of reach":
                assert await granted_by(cluster, "before", LONG, count=600) == THERE
                stream = cluster.peers[HERE].liveness[cluster.runtimes[THERE].incarnation]
                stream.out_of_reach = True
            elif other == "not ready":
                drain.order(LifecycleEvent.CORDON, "a test")
                await until(cluster, "the other to be cordoned", lambda: node.decode_nodes.ready == 0)
            error = await error_of(directly(cluster, HERE, key("meanwhile"), prompt, 600, []))
            if other == "too small":
                assert (error.reason, error.retry_after_ms) == (Reason.PROMPT_TOO_LONG, None)
                return
            assert error.reason is Reason.NO_DECODE_NODE
            assert error.retry_after_ms == (200 if stream is not None else 1_000)
            if stream is not None:
                answer = await cluster.client.generate(prompt, max_tokens=600)
                assert (answer.ids, answer.stats.prefill_node) == (mock_tokens(prompt, 600), THERE)
                stream.out_of_reach = False
            else:
                drain.order(LifecycleEvent.UNCORDON, "a test")
                await until(cluster, "the other to be ready", lambda: node.decode_nodes.ready == 1)
            assert await granted_by(cluster, "after", LONG, count=600) == THERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "other", [{"engine.num_blocks": 30}, {"engine.block_size": 8}], ids=["too small", "incompatible"]
)
def test_a_short_prompt_stays_where_the_node_that_the_router_reaches_cannot_take_it(other: dict[str, object]) -> None:
    """The policy is to keep nothing that is long. The router does not reach this node, and the other one never takes
    prompt and answer: it is kept, as if the router reached neither."""

    async def scenario() -> None:
        flags = {"handoff_tokens_min": MIN, "local_fallback": "never"}
        spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags=flags, node_flags={THERE: other})
        async with inprocess(spec) as cluster:
            assert await granted_by(cluster, "long answer", SHORT, count=600, avoid=(HERE,)) == HERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_that_the_router_does_not_reach_keeps_nothing_while_another_is_only_full() -> None:
    """The policy is to keep what finds the others full, and the other node has one place, which is taken. A request
    whose router reaches this node, or neither, is kept; one whose router reaches only the other is told to come again,
    and is taken there when the place is free."""

    async def scenario() -> None:
        flags = {"handoff_tokens_min": MIN, "local_fallback": "full"}
        one_slow = {"requests_max": 1, "engine.mock_layer_delay_ms": 5}
        spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags=flags, node_flags={THERE: one_slow})
        async with inprocess(spec) as cluster:
            rng, there = random.Random(75), cluster.decode[THERE]
            holder = await directly(cluster, THERE, key("holder"), random_prompt(rng, SHORT), 2_000, [])
            assert (holder, there.requests) == (incarnation(cluster, THERE), 1)
            assert await granted_by(cluster, "reached", LONG) == HERE
            assert await granted_by(cluster, "neither", LONG, avoid=(HERE, THERE)) == HERE
            prompt, avoid = random_prompt(rng, LONG), [incarnation(cluster, HERE)]
            error = await error_of(directly(cluster, HERE, key("not here"), prompt, 40, [], avoid=avoid))
            assert error.reason is Reason.DECODE_FULL
            assert await cancel(cluster, THERE, key("holder"))
            await until(cluster, "the place to be free", lambda: there.requests == 0)
            assert await granted_by(cluster, "not here, again", LONG, avoid=(HERE,)) == THERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_requests_wait_for_room_here_where_the_router_reaches_no_other_node() -> None:
    """This node holds one of three such requests at a time, the other is idle, and not reached by their router. They
    wait for each other as on a node that is alone: none is refused, and none is handed over."""

    async def scenario() -> None:
        spec = mock_spec(prefill=0, decode=0, mixed=2, blocks=40, mixed_flags={"handoff_tokens_min": MIN})
        async with inprocess(spec) as cluster:
            rng, avoid, here = random.Random(77), [incarnation(cluster, THERE)], incarnation(cluster, HERE)
            names = [f"waiting-{number}" for number in range(3)]
            calls = [
                directly(cluster, HERE, key(name), random_prompt(rng, 160), 320, [], avoid=avoid) for name in names
            ]
            assert await asyncio.gather(*calls) == [here] * 3
            assert cluster.runtimes[THERE].record().load.requests_taken == 0
            for name in names:
                await cancel(cluster, HERE, key(name))
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_whose_other_half_answers_no_reserve() -> None:
    """The other node lives and answers all but Reserves. What it was to be handed is kept after one Reserve's time, and
    nothing is left of that; it is handed to as before once it answers."""

    async def scenario() -> None:
        async with two_nodes(**{"writer.reserve_ms_max": 1_000}) as cluster:
            gate = cluster.gates[Point.RESERVE_ARRIVED]
            gate.close()
            prompt = [MARK, *random_prompt(random.Random(71), LONG)]
            granted = await directly(cluster, HERE, key("marked"), prompt, 40, [])
            assert gate.reached.is_set()
            assert granted == incarnation(cluster, HERE)
            gate.open()
            assert await cancel(cluster, HERE, key("marked"))
            await until(cluster, "nothing to be left of it", lambda: not cluster.traces())
            assert await granted_by(cluster, "after", LONG) == THERE
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("half", ["reads", "writes"])
def test_a_drain_in_the_middle_of_a_handoff(half: str) -> None:
    """One node hands a request over to the other, and is in its second layer when the one that reads the prompt, or the
    one that is to write the answer, is drained. The handoff goes on, and so does the answer, on the node that is
    drained; the drain waits for both. What is asked meanwhile there is nobody to hand to: the other node keeps it."""

    async def scenario() -> None:
        async with two_nodes() as cluster:
            rng, gate = random.Random(72), cluster.gates[Point.LAYER]
            gate.close()
            cluster.layer_held = (0, 1)
            prompt = [MARK, *random_prompt(rng, LONG)]
            marked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=60))
            await asyncio.wait_for(gate.reached.wait(), REACHED_S_MAX)
            (reads,) = [name for name, node in cluster.prefill.items() if node.requests]
            (writes,) = {HERE, THERE} - {reads}
            drained, other = (reads, writes) if half == "reads" else (writes, reads)
            runtime = cluster.runtimes[drained]
            runtime.drain.order(LifecycleEvent.DRAIN, "a test")
            holds = runtime.holds()
            assert (holds.grants_written, holds.grants_received) == ((1, 0) if half == "reads" else (0, 1))
            assert (runtime.lifecycle.state, runtime.drain.safe_to_delete) == (Lifecycle.DRAINING, False)

            prompts = [random_prompt(rng, length) for length in (LONG, SHORT, LONG, SHORT)]
            calls = [asyncio.create_task(cluster.client.generate(p, max_tokens=20)) for p in prompts]
            if half == "reads":
                await asyncio.wait(calls)  # the other engine is free
                assert not marked.done()
            else:
                await until(cluster, "all to be queued", lambda: cluster.prefill[other].requests == 1 + len(calls))
            gate.open()
            for asked, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
                assert answer.ids == mock_tokens(asked, 20)
                assert (answer.stats.prefill_node, answer.stats.decode_node) == (other, other)
            answer = await marked
            assert answer.ids == mock_tokens(prompt, 60)
            assert (answer.stats.prefill_node, answer.stats.decode_node) == (reads, writes)
            await until(cluster, "the drain to end", lambda: runtime.drain.safe_to_delete)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_node_killed_and_started_again_is_another_one_to_both_halves() -> None:
    """Requests go from each of three nodes to each other. One is killed and started again at once, by the same name and
    on its port: the others hand over to the new process and take from it, and soon have nothing in their books of the
    old one, neither as a receiver nor as a writer."""

    async def scenario() -> None:
        rng, names = random.Random(73), [f"mixed-{number}" for number in range(3)]
        ways = set[tuple[str, str]]()
        async with faulty(mixed_spec()) as cluster:

            async def every_way() -> bool:
                prompts = [random_prompt(rng, 100) for _ in range(6)]
                answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=20) for p in prompts))
                assert [answer.ids for answer in answers] == [mock_tokens(prompt, 20) for prompt in prompts]
                ways.update((answer.stats.prefill_node, answer.stats.decode_node) for answer in answers)
                return ways >= {(a, b) for a in names for b in names if a != b}

            async def forgotten() -> bool:
                statuses = await cluster.statuses()
                known = {pair.peer_incarnation for status in statuses.values() for pair in status.pairs}
                known |= {writer.writer_incarnation for status in statuses.values() for writer in status.writers}
                return old not in known

            await wait_for(every_way, "handoffs every way", story=cluster.story)
            old = (await cluster.status(THERE)).record.incarnation
            cluster.send_signal(THERE, signal.SIGKILL)
            await cluster.killed(THERE)
            await cluster.restart(THERE)
            ways.clear()
            await wait_for(every_way, "handoffs every way again", story=cluster.story)
            await wait_for(forgotten, "the old process to be out of the books", story=cluster.story)
            await assert_conserved(cluster)

    asyncio.run(scenario())
