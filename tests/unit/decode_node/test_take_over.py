"""A decode node whose resumable requests change hands: left, taken over, forgotten, at each stage of their life."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from batonpb import common_pb2, decode_pb2, transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import Epoch, GrantId, Incarnation, Pair, RequestId, ReserveNumber
from baton.wire import RESUME_STATE_BYTES_MAX
from decode_node.job import GONE_MAX, GoneRequests, check_resumable
from decode_node.node import DecodeNode
from kvtransfer.transport import Seal, TransportName
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.node_states import decode_state
from tests.support.played_router import STATE, TAG, PlayedRouter, key_of

SLOW = {"engine.mock_layer_delay_ms": 0.5}
LONG = 3_000
PROMPT = random_prompt(random.Random(15), 50)
WORDS = ("take over", "take over", "leave", "leave ended", "done", "cancel", "resolve", "break")
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
        await s.running(max_tokens=200)
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: ("one", 1) in s.later.ends)
        expected = mock_tokens(PROMPT, 200)
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
        with pytest.raises(BatonError, match="Another router has taken the request one over"):
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


@pytest.mark.slow
def test_two_take_overs() -> None:
    """A second router takes a running request over, then a third: each gets the tokens from index 0, the third one to
    the end, and what the second says afterwards changes nothing."""

    async def play(s: Scene) -> None:
        await s.running(max_tokens=300)
        await s.third.subscribe()
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("tokens", lambda: ("one", 1) in s.later.tokens)
        assert await s.third.take_over(key_of("one")) == ("TAKEN", 2)
        assert await s.later.cancel(key_of("one", 1))
        await s.later.leave(key_of("one", 1), ended=True)
        assert await s.later.resolve(key_of("one", 1)) == (False, True)
        await s.until("the end", lambda: ("one", 2) in s.third.ends)
        expected = mock_tokens(PROMPT, 300)
        assert (s.third.ends, s.third.tokens) == ({("one", 2): "LENGTH"}, {("one", 2): expected})
        had = s.later.tokens["one", 1]
        assert had == expected[: len(had)] and s.later.ends == {("one", 1): "TAKEN_OVER"}
        await s.third.done(key_of("one", 2))
        await s.nothing_left()

    played(play, **SLOW)


@pytest.mark.slow
def test_a_router_takes_over_what_it_has_itself() -> None:
    """The client has attached at the router that still believes to serve it: the tokens come again from index 0, under
    the new epoch, and no word that it has lost the request."""

    async def play(s: Scene) -> None:
        await s.running(max_tokens=200)
        assert await s.former.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: s.former.ends == {("one", 1): "LENGTH"})
        assert s.former.tokens["one", 1] == mock_tokens(PROMPT, 200)
        await s.former.done(key_of("one"))
        assert len(s.node.streams) == 1, "by an older epoch"
        await s.former.done(key_of("one", 1))
        await s.nothing_left()

    played(play, **SLOW)


def test_a_left_request_runs_on() -> None:
    """Its router leaves it. A Cancel by the prefill node whose call ended with that, which may come first, or by the
    router itself, does not end it. Another router takes it over, and gets it whole."""

    async def play(s: Scene) -> None:
        await s.running(max_tokens=200)
        assert await s.third.cancel(key_of("one"))
        await s.left()
        assert await s.third.cancel(key_of("one")) and await s.former.cancel(key_of("one"))
        had = len(s.former.tokens["one", 0])
        await s.until("it to go on", lambda: len(decode_state(s.node).jobs[0].output.tokens) > had + 20)
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: ("one", 1) in s.later.ends)
        assert s.later.tokens == {("one", 1): mock_tokens(PROMPT, 200)}
        assert s.former.ends == {}, "it has left, and is told nothing"
        await s.later.done(key_of("one", 1))
        await s.nothing_left()

    played(play, **SLOW)


def test_a_left_request_that_nobody_takes_over_is_an_orphan() -> None:
    """After orphan_ms it is cancelled. A router that comes too late finds nothing, and may compute it anew."""

    async def play(s: Scene) -> None:
        await s.running()
        await s.left()
        await s.nothing_left()
        assert s.node.pool.engine.counters.tokens_drawn < LONG - 1, "it ran to its end"
        assert await s.later.take_over(key_of("one")) == ("ABSENT", 0)

    played(play, orphan_ms=200, **SLOW)


def test_a_finished_answer_waits_for_its_client() -> None:
    """Sent to its end, and left: it is kept, and counts for a drain. Two routers after each other get it whole. The
    client's word forgets it; from then on the answer is OVER, and FOREIGN for others."""

    async def play(s: Scene) -> None:
        await s.finished()
        await s.left()
        assert (s.node.requests, s.node.holds().answers_unacknowledged) == (0, 1)
        assert await s.later.take_over(key_of("one"), tag=b"x" * 32) == ("FOREIGN", 0)
        for epoch in (1, 2):
            assert await s.later.take_over(key_of("one")) == ("TAKEN", epoch)
            await s.until("the end", lambda: ("one", epoch) in s.later.ends)  # noqa: B023
            assert s.later.tokens["one", epoch] == mock_tokens(PROMPT, 20)
            assert s.later.ends["one", epoch] == "LENGTH"
            await s.later.leave(key_of("one", epoch))
        await s.left()
        assert await s.former.take_over(key_of("one"), forget=True) == ("OVER", 0)
        await s.nothing_left()
        assert s.node.holds().left() == {}
        assert await s.later.take_over(key_of("one"), forget=True) == ("OVER", 0)
        assert await s.later.take_over(key_of("one")) == ("OVER", 0)
        assert await s.later.take_over(key_of("one"), tag=b"x" * 32) == ("FOREIGN", 0)

    played(play)


def test_a_finished_answer_is_kept_for_resume_ms() -> None:
    """Counted from when its router leaves it: before, the router may take as long as it likes. A router that fetches
    it later and dies has it for finished_ms_max."""

    async def play(s: Scene) -> None:
        await s.finished()
        (job,) = s.node._by_key.values()
        now_s = asyncio.get_running_loop().time
        assert job.timer is not None and (job.timer.when() or 0) - now_s() > 100
        await s.left()
        assert (job.timer.when() or 0) - now_s() < 0.3
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        assert (job.timer.when() or 0) - now_s() > 100
        await s.later.leave(key_of("one", 1))
        await s.nothing_left()
        assert await s.later.take_over(key_of("one")) == ("ABSENT", 0)

    played(play, resume_ms=250, finished_ms_max=600_000)


def test_what_a_router_still_reads_outlasts_what_was_left() -> None:
    """The node has more finished answers than it keeps. The oldest one's router has not acknowledged it yet; the later
    ones are nobody's. Those go."""

    async def play(s: Scene) -> None:
        await s.finished("one")
        for request in ("two", "three"):
            await s.former.prefill(request, PROMPT, 20)
            await s.until("the end", lambda request=request: (request, 0) in s.former.ends)  # type: ignore[misc]
            await s.former.leave(key_of(request))
        await s.until("two left", lambda: sum(job.output.left for job in s.node._by_key.values()) == 2)
        s.node.config = replace(s.node.config, finished_max=1)
        s.node.reap()
        await s.until("one answer", lambda: len(s.node.streams) == 1)
        assert [key.request for key in s.node._by_key] == ["one"]
        await s.former.done(key_of("one"))
        await s.nothing_left()

    played(play)


def test_a_stop_string_has_ended_the_answer() -> None:
    """Only the router sees that. It leaves the request with that word: nothing more is computed, and the answer is
    kept as one that has stopped. The next router gets what there was, and the end."""

    async def play(s: Scene) -> None:
        await s.running()
        await s.left(ended=True)
        await s.until("it to leave the engine", lambda: not s.node.requests)
        drawn = s.node.pool.engine.counters.tokens_drawn
        assert drawn < LONG - 1
        await assert_conserved(s.cluster)
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: s.later.ends == {("one", 1): "STOP"})
        ids = s.later.tokens["one", 1]
        assert len(s.former.tokens["one", 0]) <= len(ids) and ids == mock_tokens(PROMPT, len(ids))
        assert await s.third.take_over(key_of("one"), forget=True) == ("OVER", 0)
        await s.nothing_left()

    played(play, **SLOW)


@pytest.mark.parametrize("left", [False, True])
def test_the_client_forgets_a_running_request(left: bool) -> None:
    """Whether a router has it or not: it is cancelled, a router that has it is told, and nobody runs it again."""

    async def play(s: Scene) -> None:
        await s.running()
        if left:
            await s.left()
        assert await s.later.take_over(key_of("one"), tag=b"x" * 32, forget=True) == ("FOREIGN", 0)
        assert await s.later.take_over(key_of("one"), forget=True) == ("OVER", 0)
        await s.nothing_left()
        await s.until("the word", lambda: s.former.ends == ({} if left else {("one", 0): "TAKEN_OVER"}))
        for attempt in (0, 1):
            with pytest.raises(BatonError, match="Another router has taken the request one over"):
                await s.former.prefill("one", PROMPT, LONG, attempt=attempt)
            assert await s.former.resolve(key_of("one", attempt=attempt)) == (False, True)
            assert await s.later.take_over(key_of("one", attempt=attempt)) == ("OVER", 0)
        await s.former.subscribe({("one", 0): 1})
        await s.until("the word", lambda: s.former.ends == {("one", 0): "TAKEN_OVER"})

    played(play, **SLOW)


def test_the_client_forgets_a_request_that_was_reserved_only() -> None:
    """It will not commit, and stays over."""

    async def play(s: Scene) -> None:
        grant, pair = reserved(s.node)
        assert await s.later.take_over(key_of("one"), forget=True) == ("OVER", 0)
        assert not await s.node.commit(transfer_pb2.CommitRequest(grant=grant.grant, first_token=1), pair)
        assert await s.former.resolve(key_of("one")) == (False, True)
        assert await s.later.take_over(key_of("one")) == ("OVER", 0)
        await s.node.receiver.release(pair, ReserveNumber(1), ReserveNumber(2))
        await s.nothing_left()

    played(play)


def test_what_a_router_gave_up_may_be_computed_anew() -> None:
    """Its router cancels or acknowledges an attempt, which may mean that it tries another: to a router that comes
    later it is ABSENT, not OVER. One that this node never had stays away: a tombstone refuses its Reserve."""

    async def play(s: Scene) -> None:
        await s.running("one")
        assert await s.former.cancel(key_of("one"))
        await s.finished("two")
        await s.former.done(key_of("two"))
        await s.nothing_left()
        for request in ("one", "two", "three"):
            assert await s.later.take_over(key_of(request)) == ("ABSENT", 0)
        with pytest.raises(BatonError, match="decode-0 refused: cancelled"):
            await s.former.prefill("three", PROMPT, LONG)

    played(play, **SLOW)


def test_a_request_that_is_not_resumable_stays_with_its_router() -> None:
    """Nobody can take it over, without a tag either. A Leave of it is a Done."""

    async def play(s: Scene) -> None:
        await s.former.prefill("one", PROMPT, LONG, resumable=False)
        await s.until("tokens", lambda: ("one", 0) in s.former.tokens)
        for tag in (TAG, b""):
            assert await s.later.take_over(key_of("one"), tag=tag, forget=True) == ("FOREIGN", 0)
        await s.former.leave(key_of("one"))
        await s.nothing_left()

    played(play, **SLOW)


@pytest.mark.slow
def test_the_deadline_of_the_new_call_counts() -> None:
    """The former call has a minute; the one that takes the request over has 300 ms. Its router is told that they are
    over, and the node has let go. Then a longer one replaces a shorter one."""

    async def play(s: Scene) -> None:
        await s.running()
        assert await s.later.take_over(key_of("one"), left_ms=300) == ("TAKEN", 1)
        await s.until("the deadline", lambda: s.later.ends == {("one", 1): "the request's deadline passed"})
        assert not s.node.requests
        assert await s.third.take_over(key_of("one")) == ("ABSENT", 0)
        await s.nothing_left()
        await s.running("two")
        assert await s.later.take_over(key_of("two"), left_ms=5_000) == ("TAKEN", 1)
        (job,) = decode_state(s.node).jobs
        assert job.timer is not None and 0 < (job.timer.when() or 0) - asyncio.get_running_loop().time() < 5
        assert await s.third.take_over(key_of("two"), left_ms=500_000) == ("TAKEN", 2)
        assert (job.timer.when() or 0) - asyncio.get_running_loop().time() > 400
        assert await s.third.cancel(key_of("two", 2))
        await s.nothing_left()

    played(play, **SLOW)


def test_log_probabilities_of_a_resumed_answer() -> None:
    """The attempt begins behind 30 tokens. Who takes it over gets these without log-probabilities, in a message of
    their own, and all others with theirs, as its first router got them."""

    async def play(s: Scene) -> None:
        expected = mock_tokens(PROMPT, 40)
        await s.former.prefill("one", PROMPT, 40, output=expected[:30], logprobs=1)
        await s.until("the end", lambda: ("one", 0) in s.former.ends)
        assert (s.former.first["one", 0], s.former.tokens["one", 0]) == (30, expected[30:])
        assert await s.later.take_over(key_of("one")) == ("TAKEN", 1)
        await s.until("the end", lambda: ("one", 1) in s.later.ends)
        assert (s.later.first["one", 1], s.later.tokens["one", 1]) == (0, expected)
        assert len(s.later.logprobs["one", 1]) == 10
        assert s.later.logprobs["one", 1] == s.former.logprobs["one", 0]
        await s.later.done(key_of("one", 1))
        await s.nothing_left()

    played(play)


@pytest.mark.slow
def test_a_later_attempt_ends_one_that_nobody_took_over() -> None:
    """As ever: the Reserve of attempt 1 gives attempt 0 up. That is gone for routers that would take it over, and the
    new attempt can be taken over instead."""

    async def play(s: Scene) -> None:
        await s.running(max_tokens=500)
        await s.former.prefill("one", PROMPT, 500, attempt=1)
        assert await s.later.take_over(key_of("one")) == ("ABSENT", 0)
        assert await s.later.take_over(key_of("one", attempt=1)) == ("TAKEN", 1)
        assert await s.later.take_over(key_of("one", attempt=1), forget=True) == ("OVER", 0)
        await s.nothing_left()

    played(play, **SLOW)


def test_a_stopping_node_lets_go_of_what_was_left() -> None:
    """A node is told to end while it has a running request without a router and a finished answer of another: both
    end, and it ends."""

    async def play(s: Scene) -> None:
        await s.finished("two")
        await s.running("one")
        await s.former.leave(key_of("one"), key_of("two"))
        await s.until("the leave", lambda: all(job.output.left for job in s.node._by_key.values()))
        await s.node.close()
        await s.nothing_left()

    played(play, **SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_three_routers_say_anything_at_any_time(seed: int) -> None:
    """Answers run and finish while routers leave, take over, cancel, acknowledge and break off, by the epoch by which
    they are had or by an older one. Each router gets each index once, in order, as the engine drew it. At last, without
    anybody's word, every answer is forgotten and every block is free."""

    async def play(s: Scene) -> None:
        rng, routers = random.Random(seed), (s.former, s.later, s.third)
        await s.third.subscribe()
        for number in range(40):
            await s.former.prefill(f"r{number}", PROMPT, 60)
            for _ in range(8):
                router, name = rng.choice(routers), f"r{rng.randrange(max(0, number - 3), number + 1)}"
                known = decode_state(s.node).known
                epoch = next((job.output.epoch for key, job in known.items() if key.request == name), 0)
                key = key_of(name, max(0, epoch - rng.choice((0, 0, 1))))
                word = rng.choice(
                    ("take over", "take over", "leave", "leave ended", "done", "cancel", "resolve", "break")
                )
                if word == "take over":
                    await router.take_over(key)
                elif word.startswith("leave"):
                    await router.leave(key, ended=word != "leave")
                elif word == "done":
                    await router.done(key)
                elif word == "cancel":
                    await router.cancel(key)
                elif word == "resolve":
                    await router.resolve(key)
                else:
                    await router.cut()
                    await router.subscribe({each: router.first[each] + len(ids) for each, ids in router.tokens.items()})
        await s.nothing_left()
        expected = mock_tokens(PROMPT, 60)
        for router in routers:
            await router.cut()
            assert all(ids == expected[: len(ids)] for ids in router.tokens.values())
        assert sum(len(router.tokens) for router in routers) > 40

    played(play, orphan_ms=500, resume_ms=500, finished_ms_max=1_000, **SLOW)


@pytest.mark.parametrize(
    ("tag", "state", "says"),
    [
        (b"t" * 31, 0, "A tag has 32 bytes, not 31"),
        (TAG, RESUME_STATE_BYTES_MAX + 1, "may leave 1048576 bytes with its node, not 1048577"),
    ],
)
def test_what_a_resumable_request_may_bring(tag: bytes, state: int, says: str) -> None:
    """A tag that no router makes, or a state that is too large, is refused."""
    with pytest.raises(BatonError, match=says) as caught:
        check_resumable(common_pb2.Resumable(tag=tag, state=b"s" * state))
    assert caught.value.reason is Reason.BAD_FIELD


def test_what_is_over_is_remembered_for_a_while() -> None:
    """As long as finished answers are kept, and no more than the limit: the oldest goes first. What is over stays
    over, whatever is added."""
    gone = GoneRequests(keep_ms=1_000)
    keys = [RequestId(str(number)) for number in range(GONE_MAX + 1)]
    for key in keys:
        gone.add(key, tag=TAG, epoch=1, over=True, now_s=1.0)
    assert len(gone) == GONE_MAX and gone.find(keys[0], 1.0) is None
    gone.add(keys[1], tag=TAG, epoch=2, over=False, now_s=1.5)
    known = gone.find(keys[1], 2.4)
    assert known is not None and (known.epoch, known.over) == (2, True)
    assert gone.find(keys[2], 1.9) is not None and gone.find(keys[2], 2.0) is None
    gone.upkeep(2.0)
    assert len(gone) == 1
    gone.upkeep(2.5)
    assert len(gone) == 0


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
