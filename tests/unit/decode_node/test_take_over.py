"""A decode node whose resumable requests change hands: left, taken over, forgotten, at each stage of their life."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest
from batonpb import common_pb2, decode_pb2, transfer_pb2

from baton.ids import Epoch, GrantId, Incarnation, Pair, ReserveNumber
from decode_node.node import DecodeNode
from kvtransfer.transport import Seal, TransportName
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.node_states import decode_state
from tests.support.played_router import STATE, TAG, PlayedRouter, key_of

SLOW = {"engine.mock_layer_delay_ms": 0.5}
LONG = 3_000
PROMPT = random_prompt(random.Random(15), 50)
FORMER, LATER, THIRD = 0xA, 0xB, 0xC


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One decode node, and three routers; the first two have their streams."""

    cluster: InProcessCluster
    node: DecodeNode
    former: PlayedRouter
    later: PlayedRouter
    third: PlayedRouter

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        await until(self.cluster, what, holds)

    async def running(self, request: str = "one", max_tokens: int = LONG) -> None:
        """The former router has tokens of an answer that goes on."""
        assert (await self.former.prefill(request, PROMPT, max_tokens))[-1] == "handed_off"
        await self.until("tokens", lambda: len(self.former.tokens.get((request, 0), ())) > 1)

    async def finished(self, request: str = "one", max_tokens: int = 20) -> None:
        """The former router has the whole answer, and has not acknowledged it."""
        await self.former.prefill(request, PROMPT, max_tokens)
        await self.until("the end", lambda: (request, 0) in self.former.ends)

    async def left(self, *, ended: bool = False) -> None:
        await self.former.leave(key_of("one"), ended=ended)
        await self.until("the leave", lambda: all(job.output.left for job in self.node._by_key.values()))

    async def nothing_left(self) -> None:
        await self.until("nothing left", lambda: not decode_state(self.node).lives and not len(self.node.streams))
        assert not decode_state(self.node).known
        await assert_conserved(self.cluster)


@asynccontextmanager
async def scene(**flags: object) -> AsyncIterator[Scene]:
    async with inprocess(mock_spec(decode_flags={"orphan_ms": 600_000, **flags})) as cluster:
        routers = [PlayedRouter(cluster, incarnation) for incarnation in (FORMER, LATER, THIRD)]
        try:
            for router in routers[:2]:
                await router.subscribe()
            yield Scene(
                cluster=cluster,
                node=cluster.decode["decode-0"],
                former=routers[0],
                later=routers[1],
                third=routers[2],
            )
        finally:
            for router in routers:
                await router.close()


def played(play: Callable[[Scene], Awaitable[None]], **flags: object) -> None:
    async def scenario() -> None:
        async with scene(**flags) as each:
            await play(each)

    asyncio.run(scenario())


def test_a_running_request_changes_hands() -> None:
    """A second router takes over a running request: it gets the tokens from index 0 and the end; the former one gets
    TAKEN_OVER, and its tokens are a beginning of the answer."""

    async def play(s: Scene) -> None:
        await s.running(max_tokens=400)
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: ("one", 1) in s.later.ends)
        expected = mock_tokens(PROMPT, 400)
        assert s.later.ends == {("one", 1): "LENGTH"}
        assert (s.later.first, s.later.tokens) == ({("one", 1): 0}, {("one", 1): expected})
        assert s.former.ends == {("one", 0): "TAKEN_OVER"}
        had = s.former.tokens["one", 0]
        assert had == expected[: len(had)]
        await s.later.done(key_of("one", 1))
        await s.nothing_left()

    played(play, **SLOW)


def test_what_the_former_router_says_later_changes_nothing() -> None:
    """It had been stopped while another router took the request over. Continued, it cancels, resolves, acknowledges,
    leaves, and subscribes anew, for this attempt and for a later one, whose Reserve is refused: it is told TAKEN_OVER,
    and the answer goes on."""

    async def play(s: Scene) -> None:
        await s.running()
        await s.former.cut()
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.former.subscribe({("one", 0): 2})
        await s.until("the word", lambda: s.former.ends == {("one", 0): "TAKEN_OVER"})
        assert await s.former.cancel(key_of("one"))
        assert await s.former.cancel(key_of("one", attempt=1))
        assert await s.former.resolve(key_of("one")) == (False, True)
        assert await s.former.resolve(key_of("one", attempt=1)) == (False, True)
        assert await s.former.take_over(key_of("one", attempt=1)) == ("ABSENT", 0)
        await s.former.done(key_of("one"))
        await s.former.leave(key_of("one"), ended=True)
        with pytest.raises(grpc.aio.AioRpcError, match="Another router has taken the request one over"):
            await s.former.prefill("one", PROMPT, LONG, attempt=1)
        have = len(s.later.tokens["one", 1])
        await s.until("it to go on", lambda: len(s.later.tokens["one", 1]) > have + 20)
        assert s.later.ends == {}
        assert await s.later.cancel(key_of("one", 1))
        await s.nothing_left()
        # What it has lost it does not get back when the other has let go.
        assert await s.former.resolve(key_of("one")) == (False, True)

    played(play, **SLOW)


def test_a_request_that_was_reserved_only_is_given_up() -> None:
    """Its router asks another to go on before the commit: there is nothing to take over, a Commit that comes later is
    refused, and the former router learns that it has lost the request. A wrong tag changes nothing."""

    async def play(s: Scene) -> None:
        grant, pair = reserved(s.node)
        key = key_of("one")
        assert await s.later.take_over(key, tag=b"x" * 32) == ("FOREIGN", 0)
        assert s.node.requests == 1
        assert await s.later.take_over(key) == ("ABSENT", 0)
        await s.until("the word", lambda: s.former.ends == {("one", 0): "TAKEN_OVER"})
        commit = transfer_pb2.CommitRequest(grant=grant.grant, first_token=1)
        assert not await s.node.commit(commit, pair)
        assert await s.former.resolve(key) == (False, True)
        await s.until("its life to end", lambda: not s.node.requests)
        await s.node.receiver.release(pair, ReserveNumber(1), ReserveNumber(2))
        await s.nothing_left()

    played(play)


def test_a_request_that_has_just_committed_is_taken_over() -> None:
    """The Commit has been accepted in this turn of the loop; the engine does not have it yet. Its tokens come on the
    stream of the router that takes it over, all of them, and the former one is told."""

    async def play(s: Scene) -> None:
        grant, pair = reserved(s.node)
        seal = Seal(grant=GrantId(grant.grant), epoch=Epoch(grant.epoch), writes=0, bytes_written=0)
        s.node.receiver.seal_landed(pair, seal)
        assert await s.node.commit(transfer_pb2.CommitRequest(grant=grant.grant, first_token=7), pair)
        (job,) = decode_state(s.node).jobs
        asked = decode_pb2.TakeOverRequest(key=key_of("one"), tag=TAG, deadline_left_ms=60_000)
        reply = s.node.take_over(asked, Incarnation(LATER))
        assert (reply.outcome, reply.epoch, reply.state) == (decode_pb2.TAKE_OVER_OUTCOME_TAKEN, 1, STATE)
        assert not job.output.opened
        await s.until("the end", lambda: s.later.ends == {("one", 1): "LENGTH"})
        assert (s.later.first["one", 1], s.later.tokens["one", 1][0], len(s.later.tokens["one", 1])) == (0, 7, 4)
        assert s.former.ends == {("one", 0): "TAKEN_OVER"} and s.former.tokens == {}
        await s.later.done(key_of("one", 1))
        await s.node.receiver.release(pair, ReserveNumber(1), ReserveNumber(2))
        await s.nothing_left()

    played(play)


def reserved(node: DecodeNode) -> tuple[transfer_pb2.Grant, Pair]:
    """A grant for a resumable request of the former router, with 4 tokens to write."""
    pair = Pair(receiver=node.receiver.incarnation, writer=Incarnation(77))
    node.receiver.connect(pair, "127.0.0.1:1", TransportName.TCP)
    request = transfer_pb2.ReserveRequest(
        number=1,
        lowest_live=1,
        key=key_of("one"),
        prompt=[5] * 40,
        sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=4, ignore_eos=True),
        router=FORMER,
        deadline_left_ms=60_000,
        resumable=common_pb2.Resumable(tag=TAG, state=STATE),
    )
    return node.reserve(request, pair).granted, pair
