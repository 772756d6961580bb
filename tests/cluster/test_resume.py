"""Answers whose nodes are lost: every client has the whole answer, exactly, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from baton.rpc import rpc_errors
from cli.services import Service
from engine.demo_model import write_demo_model
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    assert_conserved,
    collect,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.exactness_cluster import LLAMA
from tests.support.inprocess_cluster import MARK, Point, inprocess

FAST = {"membership.heartbeat_ms": 100, "membership.ttl_ms": 600}
ROUTER_FLAGS: dict[str, object] = {**FAST, "liveness.reconnect_ms_max": 300, "placement_wait_ms_max": 20_000}
SLOW_DECODE = {"engine.mock_layer_delay_ms": 1}
PROMPT_SEED = 71
LOAD_TOKENS = 500
"""So many that the first of forty answers goes on for long when the last has begun."""
REAL_TOKENS = 900


class Asked:
    """A streamed request whose tokens can be waited for."""

    def __init__(self, cluster: RunningCluster, prompt: Any, **request: Any) -> None:
        self._call: Any = cluster.client.stub.Generate(make_request(prompt, **request), timeout=CALL_S_MAX)
        self._events: list[inference_pb2.GenerateEvent] = []
        self._news = asyncio.Event()
        self._story = cluster.story
        self.answer = asyncio.create_task(self._read())

    async def tokens(self, count: int) -> None:
        async def holds() -> bool:
            return self.answer.done() or sum(len(event.tokens.ids) for event in self._events) >= count

        await wait_for(holds, f"{count} tokens", story=self._story)

    async def _read(self) -> Answer:
        with rpc_errors("router-0"):
            return await collect(self._keep())

    async def _keep(self) -> Any:
        async for event in self._call:
            self._events.append(event)
            yield event


async def kill(cluster: RunningCluster, name: str) -> None:
    cluster.send_signal(name, signal.SIGKILL)
    await cluster.wait_exit(name)
    cluster.set_down(name)


async def runner_of(cluster: RunningCluster) -> str:
    """The decode node that runs the only request."""
    statuses = await cluster.statuses()
    (name,) = [name for name, status in statuses.items() if name.startswith("decode") and status.requests]
    return name


def test_a_second_node_dies_and_it_is_given_up() -> None:
    """Two decode nodes die with one request: it may be what kills them, and the third one is spared. Its client is told
    so; another request runs there."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(PROMPT_SEED)
        asked = Asked(cluster, random_prompt(rng, 40), max_tokens=3_000)
        for tokens in (20, 400):
            await asked.tokens(tokens)
            await kill(cluster, await runner_of(cluster))
            if tokens == 20:

                async def resumed() -> bool:
                    statuses = await cluster.statuses()
                    return any(s.requests for name, s in statuses.items() if name.startswith("decode"))

                await wait_for(resumed, "the request on another node", story=cluster.story)
        error = await error_of(asked.answer)
        assert error.reason is Reason.ATTEMPTS_SPENT, error
        assert "2 of them with the death of a node" in error.message
        prompt = random_prompt(rng, 50)
        assert (await cluster.client.generate(prompt, max_tokens=10)).ids == mock_tokens(prompt, 10)
        await assert_conserved(cluster)

    spec = mock_spec(decode=3, both=FAST, router_flags=ROUTER_FLAGS, decode_flags=SLOW_DECODE)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_a_decode_node_is_killed_under_load() -> None:
    """Forty answers run on two nodes and one of them is killed. All are complete and exact, those of the dead node
    resumed behind what their clients had; nobody's first token comes twice. The router's log says once that the node
    is lost, and of each cancel once that it was not heard."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(PROMPT_SEED + 1)
        prompts = [random_prompt(rng, rng.randrange(1, 120)) for _ in range(40)]
        asked = [
            Asked(cluster, prompt, max_tokens=LOAD_TOKENS, temperature=0.7, seed=i) for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(each.tokens(10) for each in asked))
        await kill(cluster, "decode-1")
        answers = await asyncio.gather(*(each.answer for each in asked))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.ids == mock_tokens(prompt, LOAD_TOKENS, temperature=0.7, seed=i), (i, answer.stats)
        assert {answer.stats.resumptions for answer in answers} == {0, 1}
        assert {answer.stats.decode_node for answer in answers} == {"decode-0"} | {
            answer.stats.decode_node for answer in answers if not answer.stats.resumptions
        }
        await assert_conserved(cluster)
        log = cluster.log_text("router-0").splitlines()
        assert len([line for line in log if "node lost" in line and "node=decode-1" in line]) == 1
        unheard = [line for line in log if "cancel unanswered" in line]
        assert len(unheard) <= sum(answer.stats.resumptions for answer in answers)

    spec = mock_spec(prefill=2, decode=2, blocks=2000, both=FAST, router_flags=ROUTER_FLAGS, decode_flags=SLOW_DECODE)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_nothing_is_left_to_run_it_on() -> None:
    """The only decode node dies in mid-answer. The client has a clear error when the time to look for another is over;
    one that waits longer has the rest of its answer when the node is started again."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(PROMPT_SEED + 2)
        prompt = random_prompt(rng, 30)
        asked = Asked(cluster, prompt, max_tokens=500)
        await asked.tokens(20)
        await kill(cluster, "decode-0")
        await cluster.cluster.start_process("decode-0")
        cluster.set_down("decode-0", False)
        answer = await asked.answer
        assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 500), 1)
        await assert_conserved(cluster)

        asked = Asked(cluster, prompt, max_tokens=3_000)
        await asked.tokens(20)
        await kill(cluster, "decode-0")
        error = await error_of(asked.answer)
        assert error.reason in (Reason.NO_DECODE_NODE, Reason.PEER_UNREACHABLE), error
        await assert_conserved(cluster)

    flags = {**ROUTER_FLAGS, "retries.resume_wait_ms_max": 8_000}
    spec = mock_spec(both=FAST, router_flags=flags, decode_flags=SLOW_DECODE)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_client_that_leaves_while_its_request_waits_for_a_node() -> None:
    """Its decode node is dead and nobody else is there: the cancel ends the waiting, and nothing is left."""

    async def scenario(cluster: RunningCluster) -> None:
        asked = Asked(cluster, random_prompt(random.Random(PROMPT_SEED + 3), 30), max_tokens=3_000)
        await asked.tokens(20)
        await kill(cluster, "decode-0")

        async def looking() -> bool:
            return "resume" in cluster.log_text("router-0")

        await wait_for(looking, "the router to notice", story=cluster.story)
        asked.answer.cancel()
        await asyncio.wait([asked.answer])
        await assert_conserved(cluster)

    with running(mock_spec(both=FAST, router_flags=ROUTER_FLAGS, decode_flags=SLOW_DECODE)) as cluster:
        cluster.run(scenario(cluster))


REAL_CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": 3},
    "stop string": {"temperature": 0.9, "seed": 9, "stop": ["never in the answer of this model"]},
}


@pytest.mark.slow
def test_a_real_model_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Each kind of request runs undisturbed, and then with its decode node killed in mid-answer: same tokens, same
    text, same finish; penalties see what came before, log-probabilities cover every token once."""
    folder = tmp_path / "model"
    write_demo_model(folder, LLAMA.model)

    async def scenario(cluster: RunningCluster) -> None:
        prompt = "the sea in the evening"
        for name, sampling in REAL_CASES.items():
            request: dict[str, Any] = {"max_tokens": REAL_TOKENS, "ignore_eos": True, **sampling}
            calm = await Asked(cluster, prompt, **request).answer
            asked = Asked(cluster, prompt, **request)
            await asked.tokens(30)
            victim = await runner_of(cluster)
            await kill(cluster, victim)
            answer = await asked.answer
            assert (answer.ids, answer.text, answer.reason) == (calm.ids, calm.text, calm.reason), name
            assert answer.stats.resumptions == 1, name
            assert len(answer.logprobs) == len(calm.logprobs) == (REAL_TOKENS if "logprobs" in request else 0), name
            for ours, theirs in zip(answer.logprobs, calm.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3), name
            await cluster.cluster.start_process(victim)
            cluster.set_down(victim, False)
        await assert_conserved(cluster)

    spec = LLAMA.spec(folder, prefill=1)
    flags = {**spec.flags, Service.ROUTER: {**spec.flags[Service.ROUTER], **ROUTER_FLAGS}}
    for service in (Service.PREFILL, Service.DECODE):
        flags[service] = {**flags[service], **FAST}
    with running(LLAMA.spec(folder, prefill=1, flags=flags)) as cluster:
        cluster.run(scenario(cluster))


def test_the_prefill_call_breaks_after_the_commit() -> None:
    """The decode node has committed and its answer to the prefill node is held; the router loses its prefill call. It
    asks the decode node, hears "committed", and takes the whole answer from there: no second attempt."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            cluster.gates[Point.COMMIT_ANSWERED].close()
            cluster.gates[Point.LAST_TOKEN].close()
            prompt = [MARK, *random_prompt(random.Random(PROMPT_SEED + 4), 40)]
            asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=50))
            await cluster.gates[Point.COMMIT_ANSWERED].reached.wait()
            await cluster.gates[Point.LAST_TOKEN].reached.wait()
            (inbox,) = cluster.router.streams.inboxes.values()
            inbox.fail(BatonError(Reason.PEER_UNREACHABLE, "The test has broken the call."))
            await wait_for(lambda: went_on(inbox), "the router to go on")
            for point in (Point.COMMIT_ANSWERED, Point.LAST_TOKEN):
                cluster.gates[point].open()
            answer = await asked
            assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 50), 0)
            await assert_conserved(cluster)

    async def went_on(inbox: Any) -> bool:
        return inbox.error is None

    asyncio.run(scenario())


def test_the_prefill_call_breaks_before_the_commit() -> None:
    """The Commit is held on its way when the router loses its prefill call: the decode node says that it has not
    committed, and refuses the Commit that comes later. The second attempt gives the answer, with the first token that
    the client had already."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=1)) as cluster:
            cluster.gates[Point.COMMIT_ARRIVED].close()
            prompt = [MARK, *random_prompt(random.Random(PROMPT_SEED + 5), 40)]
            asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=50))
            await cluster.gates[Point.COMMIT_ARRIVED].reached.wait()
            (inbox,) = cluster.router.streams.inboxes.values()

            async def has_first() -> bool:
                return len(inbox.tokens) == 1

            await wait_for(has_first, "the first token")
            inbox.fail(BatonError(Reason.PEER_UNREACHABLE, "The test has broken the call."))

            async def second() -> bool:
                return any(key.attempt == 1 for key in cluster.router.streams.inboxes)

            await wait_for(second, "the second attempt")
            cluster.gates[Point.COMMIT_ARRIVED].open()
            answer = await asked
            assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 50), 1)
            await assert_conserved(cluster)

    asyncio.run(scenario())
