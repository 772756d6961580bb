"""A prefill node fetches a prompt's leading blocks from another node. The mock engine's tokens are a hash of the bytes
that it reads back: one wrong byte changes them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

import kvtransfer.receiver
import node.fetch_costs
import node.fetching
import node.peers
from baton.errors import BatonError, Reason
from baton.ids import GrantId, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import Owner
from cachestore.prefix_cache import DIGEST_BYTES
from decode_node.node import DecodeNode
from kvtransfer.writer import Handoff, StepWrites, WriterPeer
from node.fetching import Fetches, FetchOwner
from node.landing import MARKS_MAX
from node.sources import Prefix, Wait
from prefill_node.node import PrefillNode
from tests.support.cluster_harness import Answer, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.steering import Slow, Steering, compute_slowly, connected, steered

SIZE = 16
BLOCKS = 20
PROMPT_TOKENS = BLOCKS * SIZE + 3

Scene = Callable[[InProcessCluster, Steering], Coroutine[Any, Any, None]]


def play(scene: Scene, **spec: Any) -> None:
    """Two prefill nodes, the second of which fetches whatever it can, and a decode node."""

    async def scenario() -> None:
        async with inprocess(mock_spec(**{"prefill": 2, "decode": 1, **spec})) as cluster:
            with steered(cluster) as steering:
                compute_slowly(cluster, "prefill-1")
                await connected(cluster, "prefill-1", "prefill-0")
                await scene(cluster, steering)
            nodes: tuple[PrefillNode | DecodeNode, ...] = (*cluster.prefill.values(), *cluster.decode.values())
            await until(cluster, "nothing to be left", lambda: not any(each.holds().left() for each in nodes))
            for each in nodes:
                counts = each.ledger.check()
                assert counts.cached + counts.free == counts.total, counts

    asyncio.run(scenario())


async def ask(cluster: InProcessCluster, prompt: list[int], count: int = 8, **sampling: Any) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count, **sampling)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_another_prefill_node_has_is_not_computed_again(transport: str) -> None:
    """The first node has computed a prompt. The second is asked for it too: all of its full blocks but the last come
    from the first, and the tokens are the same."""
    prompt = random_prompt(random.Random(1), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.computed, sources.cached_device) == (BLOCKS * SIZE, 3, 0)
        assert sources.fetched_from == "prefill-0"
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.computed, sources.cached_device) == (0, 3, BLOCKS * SIZE)
        status = (await cluster.statuses())["prefill-1"].fetches
        assert [(each.owner, each.fetches, each.tokens) for each in status] == [("prefill-0", 1, BLOCKS * SIZE)]
        (pair,) = [p for p in (await cluster.statuses())["prefill-0"].pairs if p.peer == "prefill-1"]
        assert pair.bytes_fetched == pair.bytes_moved == status[0].nbytes > 0
        assert pair.transport == transport

    play(scene, both={"transports": transport})


def test_the_first_fetch_of_a_pair() -> None:
    """The owner has never written to the second node: it connects, and all comes with the first prompt that names it.
    What that took is known from then on, apart from what fetching takes."""
    prompt = random_prompt(random.Random(1), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        steering.prefill = "prefill-2"
        await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-2"]
        fetches = cluster.fetches["prefill-1"]
        before_s = fetches.costs.connect_s
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.fetched_from) == (BLOCKS * SIZE, "prefill-2")
        assert fetches.costs.connect_s != before_s
        assert refusals(cluster) == (1, 0, 0)

    play(scene, prefill=3)


def test_an_owner_that_takes_long_to_connect_is_waited_for_once() -> None:
    """It is given up after what a prompt may lose (`LOST_SHARE_MAX`), and nobody is charged. While it
    still connects, other prompts are not held up; once it has, it is asked."""
    rng = random.Random(2)
    prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(3)]
    may_go_on = asyncio.Event()
    real_connect = WriterPeer.connect

    async def connect(self: WriterPeer) -> None:
        if self.address.name == "prefill-1":
            await may_go_on.wait()
        await real_connect(self)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        compute_slowly(cluster, "prefill-1", 0.001)
        steering.prefill = "prefill-2"
        for prompt in prompts:
            await ask(cluster, prompt)
        fetches = cluster.fetches["prefill-1"]
        steering.prefill, steering.owners = "prefill-1", ["prefill-2"]
        with patch.object(WriterPeer, "connect", connect):
            for prompt in prompts[:2]:
                assert (await ask(cluster, prompt)).stats.sources.computed == len(prompt)
                (connecting,) = fetches._connecting.values()
            may_go_on.set()
            assert await connecting.over
        assert refusals(cluster) == (0, 0, 0) and fetches.costs.total.cost is None
        compute_slowly(cluster, "prefill-1")
        assert (await ask(cluster, prompts[2])).stats.sources.fetched_from == "prefill-2"

    play(scene, prefill=3)


def test_an_owner_of_other_kv_is_left_alone_for_long() -> None:
    """It says so when it is to connect."""
    prompt = random_prompt(random.Random(3), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        steering.prefill = "prefill-2"
        await ask(cluster, prompt)
        with REFUSALS["another root"](cluster):
            await is_computed(cluster, steering, prompt, owner="prefill-2")
        fetches = cluster.fetches["prefill-1"]
        (paused,) = [until_s - fetches._loop.time() for (_, what), until_s in fetches._pauses.items() if not what]
        assert paused > node.fetching.UNFIT_PAUSE_MS / 2000
        assert refusals(cluster) == (0, 1, 0)

    play(scene, prefill=3)


def test_only_what_is_missing_is_fetched() -> None:
    """The second node has the beginning of a prompt already: the rest comes."""
    rng = random.Random(2)
    prompt = random_prompt(rng, PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill = "prefill-1"
        await ask(cluster, prompt[: 5 * SIZE + 1])
        steering.owners = ["prefill-0"]
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.cached_device, sources.computed) == ((BLOCKS - 5) * SIZE, 5 * SIZE, 3)

    play(scene)


def test_the_next_turn_computes_new_tokens_only() -> None:
    """The decode node has prompt and answer of a turn. The next one's prompt has both, and comes to a prefill node that
    has neither: but for the block that was not full, only its new tokens are computed."""
    rng = random.Random(3)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await connected(cluster, "prefill-1", "decode-0")
        talk = random_prompt(rng, PROMPT_TOKENS)
        talk += (await ask(cluster, talk, 45)).ids
        # The KV of the last token drawn is never written.
        known = (len(talk) - 1) // SIZE * SIZE
        talk += random_prompt(rng, 30)
        steering.prefill, steering.owners = "prefill-1", ["decode-0"]
        sources = (await ask(cluster, talk, 20)).stats.sources
        assert (sources.fetched, sources.fetched_from) == (known, "decode-0")
        assert sources.computed == len(talk) - known

    play(scene)


def refusals(cluster: InProcessCluster) -> tuple[int, int, int]:
    """Fetches of the second node that have brought something, were refused, and failed."""
    figures = cluster.fetches["prefill-1"].costs.owners.values()
    return sum(f.times.count for f in figures), sum(f.refused for f in figures), sum(f.failed for f in figures)


async def is_computed(
    cluster: InProcessCluster, steering: Steering, prompt: list[int], *, owner: str = "prefill-0"
) -> None:
    steering.prefill, steering.owners = "prefill-1", [owner]
    sources = (await ask(cluster, prompt)).stats.sources
    assert (sources.fetched, sources.computed) == (0, len(prompt))


async def is_fetched(cluster: InProcessCluster, steering: Steering, prompt: list[int]) -> None:
    """All whole blocks, from prefill-0."""
    steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
    assert (await ask(cluster, prompt)).stats.sources.fetched == BLOCKS * SIZE


REFUSALS: dict[str, Callable[[InProcessCluster], Any]] = {
    "busy": lambda cluster: patch.object(node.fetching, "FETCHES_OWNED_MAX", 0),
    "draining": lambda cluster: patch.object(cluster.runtimes["prefill-0"].lifecycle, "_state", Lifecycle.CORDONED),
    "another root": lambda cluster: patch.object(
        cluster.fetches["prefill-1"], "_pool", replace(cluster.fetches["prefill-1"]._pool, model=other_root(cluster))
    ),
    "evicted": lambda cluster: evicted(cluster),
    "waited for": lambda cluster: patch.object(cluster.prefill["prefill-0"]._transfers.owner, "spare", lambda: -3),
}


def other_root(cluster: InProcessCluster) -> Any:
    return replace(cluster.prefill["prefill-1"].pool.model, kv_root=b"another")


def evicted(cluster: InProcessCluster) -> Any:
    owner = cluster.prefill["prefill-0"].pool.blocks
    assert owner.prefix_cache.evict_until(owner.ledger.num_blocks)
    return nullcontext()


@pytest.mark.parametrize("why", REFUSALS)
def test_an_owner_that_refuses_costs_nothing(why: str) -> None:
    """It is busy, cordoned, has another root, has evicted the blocks, or requests there wait for them: the prompt is
    computed."""
    prompt = random_prompt(random.Random(4), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        with REFUSALS[why](cluster):
            await is_computed(cluster, steering, prompt)
        brought, refused, failed = refusals(cluster)
        assert (brought, failed) == (0, 0) and refused >= 1

    play(scene)


def test_a_caller_of_a_version_that_sends_no_digests() -> None:
    """The owner computes them."""
    prompt = random_prompt(random.Random(22), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        with asked_with(digests=b""):
            await is_fetched(cluster, steering, prompt)
        assert refusals(cluster) == (1, 0, 0)

    play(scene)


def test_digests_of_another_length_are_refused() -> None:
    prompt = random_prompt(random.Random(23), PROMPT_TOKENS)
    said: list[BatonError] = []
    real_serve = FetchOwner.serve

    async def serve(self: FetchOwner, request: Any) -> Any:
        try:
            return await real_serve(self, request)
        except BatonError as error:
            said.append(error)
            raise

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        with asked_with(digests=bytes(DIGEST_BYTES)), patch.object(FetchOwner, "serve", serve):
            await is_computed(cluster, steering, prompt)
        assert [(error.reason, error.field) for error in said] == [(Reason.BAD_FIELD, "digests")]

    play(scene)


@contextmanager
def asked_with(**fields: Any) -> Iterator[None]:
    """Fetches that ask for something do so with these fields."""
    real_ask = Fetches._ask

    async def ask(self: Fetches, owner: Owner, request: Any, **others: Any) -> Any:
        if request.tokens:
            for name, value in fields.items():
                setattr(request, name, value)
        return await real_ask(self, owner, request, **others)

    with patch.object(Fetches, "_ask", ask):
        yield


def test_a_grant_that_is_let_go_ends_the_wait() -> None:
    """It is revoked in mid-fetch: the prompt is computed at once, though it might wait for long."""
    prompt = random_prompt(random.Random(24), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        fetches = cluster.fetches["prefill-1"]
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        granted = asyncio.Event()
        with patch.object(Handoff, "all_filled", lambda _handoff, _blocks: granted.set()):
            asking = asyncio.create_task(ask(cluster, prompt))
            await granted.wait()
            (grant,) = fetches._granted
            fetch = fetches._granted[grant]
            steering.owners = []
            fetches._receiver.cancel(fetch.key)
            assert fetch.arrived.done() and grant not in fetches._granted
            sources = (await asking).stats.sources
        assert (sources.fetched, sources.computed) == (0, PROMPT_TOKENS)

    play(scene)


def test_the_next_owner_is_asked_where_the_first_refuses() -> None:
    """Two nodes have the prompt. The first one named is cordoned: the second brings it."""
    prompt = random_prompt(random.Random(12), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await connected(cluster, "prefill-1", "prefill-2")
        for steering.prefill in ("prefill-0", "prefill-2"):
            await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0", "prefill-2"]
        with REFUSALS["draining"](cluster):
            sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.fetched_from) == (BLOCKS * SIZE, "prefill-2")
        assert refusals(cluster) == (1, 1, 0)

    play(scene, prefill=3)


def test_no_fetch_across_salts() -> None:
    """One prompt of two tenants: what one has had computed is not fetched for the other."""
    prompt = random_prompt(random.Random(5), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await cluster.client.generate(prompt, max_tokens=2, cache_salt="one")
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        sources = (await cluster.client.generate(prompt, max_tokens=2, cache_salt="two")).stats.sources
        assert (sources.fetched, sources.computed) == (0, len(prompt))
        sources = (await cluster.client.generate(prompt, max_tokens=2, cache_salt="one")).stats.sources
        assert sources.fetched == BLOCKS * SIZE

    play(scene)


def test_an_owner_that_has_ended_costs_nothing() -> None:
    prompt = random_prompt(random.Random(6), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        runtime = cluster.runtimes["prefill-0"]
        await ask(cluster, prompt)
        await cluster.stop_node("prefill-0")
        del cluster.prefill["prefill-0"], cluster.peers["prefill-0"], cluster.fetches["prefill-0"]
        cluster.runtimes["gone"] = runtime
        steering.owners = ["gone"]
        steering.prefill = "prefill-1"
        sources = (await ask(cluster, prompt)).stats.sources
        del cluster.runtimes["gone"]
        assert (sources.fetched, sources.computed) == (0, len(prompt))

    play(scene)


class OnlySilenceEnds(Slow):
    """A prompt takes three seconds, and may lose a share of that; what is fetched of it is worth any time."""

    def of(self, first: int, end: int) -> float:
        return 3.0

    def saved(self, first: int, end: int) -> float:
        return 1e6 * (end - first)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("layers", [0, 1, None])
def test_an_owner_that_stops_in_mid_fetch_is_given_up(layers: int | None, transport: str) -> None:
    """Granted, it writes so many layers, or all, and nothing more is heard of it. It is expected to take a quarter of
    an hour, but is given up when nothing has come for as long as the prompt may lose. The prompt is computed; the owner
    gives the grant back, and its blocks are free again. Meanwhile both count in a drain. It has failed when that
    happens `SILENT_MAX` times in a row, and is paused."""
    rng = random.Random(7)
    prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(node.fetching.SILENT_MAX)]
    real_layers_done = StepWrites.layers_done

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        cluster.prefill["prefill-1"].gatherer._computing = OnlySilenceEnds()
        for prompt in prompts:
            await ask(cluster, prompt)
        under_way = []

        def never(handoff: Handoff, blocks: int) -> None:
            under_way.append([cluster.prefill[n].holds().left() for n in ("prefill-0", "prefill-1")])

        def layers_done(step: StepWrites, first: int, end: int) -> None:
            if not step.handoff.is_fetch or layers is None:
                real_layers_done(step, first, end)
            elif first < layers:
                real_layers_done(step, first, layers)

        with patch.object(Handoff, "all_filled", never), patch.object(StepWrites, "layers_done", layers_done):
            for failed, prompt in enumerate(prompts):
                assert refusals(cluster) == (0, 0, failed)
                assert all(digest for _, digest in cluster.fetches["prefill-1"]._pauses)
                await is_computed(cluster, steering, prompt)
        assert not all(digest for _, digest in cluster.fetches["prefill-1"]._pauses)
        assert len(under_way) == len(prompts)
        owner, receiver = under_way[0]
        assert owner["fetches_under_way"] == 1 and owner["grants_written"] == 1
        assert receiver["fetches_under_way"] == 1 and receiver["grants_received"] == 1
        assert refusals(cluster) == (0, 0, len(prompts))

    with patch.object(node.fetch_costs, "FIXED_S", 1e3):
        play(scene, both={"transports": transport})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_fetch_brings_is_seen_to_come(transport: str) -> None:
    """All marks are there when the owner may write, and all are counted as gone when the blocks have come."""
    prompt = random_prompt(random.Random(8), PROMPT_TOKENS)
    real_at_work = Wait.at_work
    counts: list[Callable[[], int]] = []
    seen: list[int] = []

    def at_work(self: Wait, blocks: int, come: Callable[[], int] | None = None) -> None:
        assert come is not None
        counts.append(come)
        seen.append(come())
        real_at_work(self, blocks, come)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        with patch.object(Wait, "at_work", at_work):
            await is_fetched(cluster, steering, prompt)
        assert (seen, counts[0]()) == ([0], MARKS_MAX)

    play(scene, both={"transports": transport})


def test_an_owner_that_writes_for_another_prompt_is_not_silent() -> None:
    """It writes one after the other. Of the first prompt nothing comes, but all of a second one."""
    rng = random.Random(9)
    prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(2)]

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        for prompt in prompts:
            await ask(cluster, prompt)
        fetches = cluster.fetches["prefill-1"]
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        granted = asyncio.Event()
        with (
            patch.object(Handoff, "all_filled", lambda _handoff, _blocks: granted.set()),
            patch.object(StepWrites, "layers_done", lambda *_: None),
        ):
            asking = asyncio.create_task(cluster.client.generate(prompts[0], max_tokens=2))
            await granted.wait()
        ((fetch,),) = [list(fetches._granted.values())]
        assert fetches._come_from(fetch.owner) == 0
        assert (await ask(cluster, prompts[1])).stats.sources.fetched == BLOCKS * SIZE
        assert fetches._come_from(fetch.owner) == MARKS_MAX
        asking.cancel()
        await asyncio.wait([asking])

    play(scene)


def test_an_owner_that_asks_for_room_late_is_asked_for_other_prompts() -> None:
    """It promotes a prompt's blocks for longer than the prompt may wait: that one is computed, and nobody is blamed.
    The next prompt is fetched from it at once. One that is silent `SILENT_MAX` times in a row has failed."""
    rng = random.Random(21)
    prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(2 + node.fetching.SILENT_MAX)]

    async def serve(self: FetchOwner, request: Any, receiver: Any) -> Any:
        await asyncio.Event().wait()

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        for prompt in prompts:
            await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        compute_slowly(cluster, "prefill-1", 0.004)
        with patch.object(FetchOwner, "_serve", serve):
            await is_computed(cluster, steering, prompts[0])
        assert refusals(cluster) == (0, 0, 0)
        compute_slowly(cluster, "prefill-1")
        assert (await ask(cluster, prompts[1])).stats.sources.fetched == BLOCKS * SIZE
        compute_slowly(cluster, "prefill-1", 0.004)
        with patch.object(FetchOwner, "_serve", serve):
            for prompt in prompts[2:]:
                assert refusals(cluster)[2] == 0
                await is_computed(cluster, steering, prompt)
        assert refusals(cluster) == (1, 0, 1)

    play(scene)


@pytest.mark.parametrize("ends", ["prefill-0", "prefill-1"])
def test_a_node_that_ends_in_mid_fetch(ends: str) -> None:
    """The owner ends: its caller computes. The caller ends: the router goes on with another node. Nothing is left
    at the one that stays."""
    prompt = random_prompt(random.Random(11), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        granted = asyncio.Event()
        with patch.object(Handoff, "all_filled", lambda _handoff, _blocks: granted.set()):
            asking = asyncio.create_task(ask(cluster, prompt))
            await granted.wait()
            steering.owners = []
            steering.prefill = "prefill-0" if ends == "prefill-1" else "prefill-1"
            await cluster.stop_node(ends)
            for books in (cluster.prefill, cluster.peers, cluster.fetches):
                del books[ends]
            answer = await asking
        assert answer.stats.sources.fetched == 0

    play(scene, both={"stop_grace_ms": 100})


def test_a_client_that_leaves_in_mid_fetch_leaves_nothing_behind() -> None:
    """Its owner is not blamed, though the fetch takes longer than expected."""
    prompt = random_prompt(random.Random(8), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        granted = asyncio.Event()
        with patch.object(Handoff, "all_filled", lambda _handoff, _blocks: granted.set()):
            asking = asyncio.create_task(cluster.client.generate(prompt, max_tokens=2))
            await granted.wait()
            asking.cancel()
            await asyncio.wait([asking])
            await until(cluster, "the request to end", lambda: not cluster.prefill["prefill-1"].holds().left())
        fetches = cluster.fetches["prefill-1"]
        assert (refusals(cluster), fetches.costs.total.cost, dict(fetches._pauses)) == ((0, 0, 0), None, {})

    with patch.object(node.fetch_costs, "FIXED_S", 0.0), patch.object(node.fetch_costs, "BYTE_S", 0.0):
        play(scene)


def test_the_time_is_over_as_the_blocks_come() -> None:
    """The fetch is cancelled after its blocks have been entered, before it can say so: its owner is not blamed."""
    prompt = random_prompt(random.Random(8), PROMPT_TOKENS)
    real_committed = Fetches.committed

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        fetches, prefill = cluster.fetches["prefill-1"], cluster.prefill["prefill-1"]
        tokens = prompt[: BLOCKS * SIZE]
        runtime = cluster.runtimes["prefill-0"]
        owner = Owner(name="prefill-0", endpoint=runtime.endpoint, incarnation=runtime.incarnation, blocks=BLOCKS)
        chain = prefill.pool.blocks.prefix_cache.chain(tokens, b"")
        offer = fetches.offer(Prefix(tokens=tokens, salt=b"", chain=chain, owners=[owner]), 0)
        assert offer is not None
        async with asyncio.timeout(60) as timer:

            def committed(self: Fetches, *args: Any) -> None:
                real_committed(self, *args)
                timer.reschedule(self._loop.time())

            with patch.object(Fetches, "committed", committed), pytest.raises(asyncio.CancelledError):
                await fetches.bring(offer, Wait(timer=timer))
        assert (refusals(cluster), fetches.costs.total.cost, dict(fetches._pauses)) == ((0, 0, 0), None, {})
        assert prefill.pool.blocks.prefix_cache.indexed(chain[-1])

    with patch.object(node.fetch_costs, "FIXED_S", 0.0), patch.object(node.fetch_costs, "BYTE_S", 0.0):
        play(scene)


class ClosesPeers:
    """Stands for a store that takes so long that the owner closes its idle writers meanwhile."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster

    async def bring_all(self, tokens: object, salt: object) -> None:
        peers = self._cluster.peers["prefill-0"]
        with patch.object(node.peers, "WRITERS_IDLE_MAX", 0):
            peers.upkeep()
        await until(self._cluster, "the writers to be closed", lambda: not peers._peers)


def test_an_owner_that_looks_long_connects_again() -> None:
    """While its tiers are asked, its writer to the second node is closed as idle. A new one writes."""
    prompt = random_prompt(random.Random(13), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        owner = cluster.prefill["prefill-0"]._transfers.owner
        store: Any = ClosesPeers(cluster)
        with patch.object(owner, "_pool", replace(owner._pool, store=store)):
            await is_fetched(cluster, steering, prompt)
        assert refusals(cluster) == (1, 0, 0)

    play(scene)


def test_blocks_that_may_be_broken_when_they_have_come() -> None:
    """The sixth one is spoiled as it is about to be entered: five have come, and the others are fetched anew."""
    prompt = random_prompt(random.Random(14), PROMPT_TOKENS)
    real_committed = Fetches.committed
    spoiled: list[int] = []

    def committed(self: Fetches, key: RequestKey, grant: GrantId) -> None:
        if not spoiled:
            spoiled.append(self._granted[grant].blocks[5])
            self._pool.ledger.spoil(self._granted[grant].blocks[5])
        real_committed(self, key, grant)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        with patch.object(Fetches, "committed", committed):
            await is_fetched(cluster, steering, prompt)
        total = cluster.fetches["prefill-1"].costs.total
        assert (total.times.count, total.tokens, total.failed) == (2, BLOCKS * SIZE, 0)

    play(scene)


def test_blocks_that_turn_out_to_be_broken_are_not_sent() -> None:
    """The scores of a sequence at the owner are not numbers, after its blocks were found for a fetch."""
    prompt = random_prompt(random.Random(12), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        owner, real = cluster.prefill["prefill-0"].pool.blocks, WriterPeer.reserve

        async def reserve(self: WriterPeer, key: RequestKey, request: Any, **others: Any) -> Handoff:
            handoff = await real(self, key, request, **others)
            if handoff.is_fetch:
                owner.prefix_cache.forget(owner.match_prompt(prompt, b""))
            return handoff

        with patch.object(WriterPeer, "reserve", reserve):
            await is_computed(cluster, steering, prompt)
        assert refusals(cluster) == (0, 0, 1)
        assert owner.match_prompt(prompt, b"") == []

    play(scene)


def test_two_nodes_with_full_pools_fetch_from_each_other() -> None:
    """Each has filled its region with prompts of its own, and is asked for those of the other, four at once: whatever
    is fetched or computed, all is answered."""
    rng = random.Random(9)
    of = {name: [random_prompt(rng, PROMPT_TOKENS) for _ in range(4)] for name in ("prefill-0", "prefill-1")}

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        compute_slowly(cluster, "prefill-0")
        await connected(cluster, "prefill-0", "prefill-1")
        for name, prompts in of.items():
            steering.prefill = name
            for prompt in prompts:
                await ask(cluster, prompt)
        asked: list[asyncio.Task[Answer]] = []
        steering.owners = list(of)
        for mine, others in (("prefill-0", "prefill-1"), ("prefill-1", "prefill-0")):
            steering.prefill = mine
            asked += [asyncio.create_task(ask(cluster, prompt)) for prompt in of[others]]
            count = len(asked)
            await until(cluster, "all to be placed", lambda count=count: len(cluster.router.streams.inboxes) >= count)  # type: ignore[misc]
        answers = await asyncio.gather(*asked)
        assert sum(answer.stats.sources.fetched for answer in answers) > 0

    play(scene, blocks=4 * (BLOCKS + 1))


def test_idle_pairs_are_fenced_beyond_a_limit() -> None:
    """The least recently used goes first. An owner that has been fenced connects again when it is named."""
    prompt = random_prompt(random.Random(10), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        receiver = cluster.fetches["prefill-1"]._receiver
        await connected(cluster, "prefill-1", "decode-0")
        with patch.object(kvtransfer.receiver, "PAIRS_IDLE_MAX", 1):
            receiver.upkeep()
            await until(cluster, "one pair to be left", lambda: len(receiver._writers) == 1)
        assert [place.name for place in receiver._writers.values()] == ["decode-0"]
        await connected(cluster, "prefill-1", "prefill-0")
        await is_fetched(cluster, steering, prompt)

    play(scene)


def test_what_a_request_waits_for_is_not_spare() -> None:
    """A mixed node writes one long answer, and has no room for a second: what is spare for fetches lacks all blocks
    that the second one will need, those of its answer too."""

    async def scenario() -> None:
        rng, flags = random.Random(11), {"engine.mock_layer_delay_ms": 50}
        async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, blocks=20, mixed_flags=flags)) as cluster:
            node = cluster.prefill["mixed-0"]
            prompts = [random_prompt(rng, 40) for _ in range(2)]
            asked = [asyncio.create_task(cluster.client.generate(prompt, max_tokens=150)) for prompt in prompts]
            await until(cluster, "the second to wait", lambda: len(node._queue) == 1)
            assert node.spare_blocks == node.ledger.available - (40 + 150 - 2) // SIZE - 1 < 0
            for asking in asked:
                asking.cancel()
            await asyncio.wait(asked)
            await until(cluster, "nothing to be left", lambda: not node.holds().left())

    asyncio.run(scenario())
