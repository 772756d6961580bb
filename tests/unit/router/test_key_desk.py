"""What a call is admitted to by its API key, in a router's only process and in one of its workers: the same."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import pytest
from batonpb import worker_pb2
from batonpb.worker_pb2 import FromWorker, ToWorker

from baton.errors import BatonError, Reason
from baton.ids import RequestId
from baton.tracing import Traceparent
from router.key_desk import KeyDesk, LocalDesk
from router.keys import ApiKey, KeyBook, KeyUse, digest_of, new_key
from router.request import ClientCall, Priority
from router.resume import SECRET_BYTES, Place, ResumeToken
from router.worker_channel import WorkerChannel
from router.worker_keys import KeyCounter, RemoteDesk, WorkerKeys

SECRET: Final = "baton-" + "a" * 43
TOKEN: Final = ResumeToken(secret=b"s" * SECRET_BYTES, seed=1, digest=2, places=(Place(),))


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One of two, and the parent's side of it, in this process."""

    desk: RemoteDesk
    keys: WorkerKeys
    channel: WorkerChannel[FromWorker, ToWorker]
    parents: WorkerChannel[ToWorker, FromWorker]
    formers: list[Callable[[], None]] = field(default_factory=list)
    """End a connection that the worker serves."""

    def end_former(self, asked: worker_pb2.EndFormer) -> FromWorker:
        assert ResumeToken.decode(asked.resume_token) == TOKEN
        formers, self.formers = self.formers, []
        for end in formers:
            end()
        return FromWorker(former_ended=worker_pb2.FormerEnded(found=bool(formers)))

    async def close(self) -> None:
        await self.channel.close()
        await self.parents.close()

    def die(self) -> None:
        self.keys.end()


@dataclass(slots=True, kw_only=True, eq=False)
class Scene:
    book: KeyBook
    counter: KeyCounter
    workers: list[Worker]

    @property
    def use(self) -> KeyUse:
        return self.book.use_of("a")


def entry(**limits: object) -> ApiKey:
    return ApiKey(name="a", sha256=digest_of(SECRET), **limits)  # type: ignore[arg-type]


def worker_of(counter: KeyCounter) -> Worker:
    ours, theirs = socket.socketpair()
    parents = WorkerChannel(ours, ToWorker, FromWorker, on_lost=lambda _why: None)
    channel = WorkerChannel(theirs, FromWorker, ToWorker, on_lost=lambda _why: None)
    made = Worker(desk=RemoteDesk(channel, rng=Random(1)), keys=counter.add(parents), channel=channel, parents=parents)
    channel.on_question("end_former", made.end_former)
    made.keys.begin()
    return made


@asynccontextmanager
async def opened(key: ApiKey) -> AsyncIterator[Scene]:
    book = KeyBook([key], blind=b"blind", now_s=asyncio.get_running_loop().time())
    counter = KeyCounter(book)
    scene = Scene(book=book, counter=counter, workers=[worker_of(counter) for _ in range(2)])
    try:
        for worker in scene.workers:
            await until(lambda desk=worker.desk: knows(desk))  # type: ignore[misc]
        yield scene
    finally:
        for worker in scene.workers:
            await worker.close()


def play(key: ApiKey, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20), opened(key) as scene:
            await scenario(scene)

    asyncio.run(limited())


def knows(desk: KeyDesk, secret: str = SECRET) -> bool:
    try:
        desk.find(f"Bearer {secret}")
    except BatonError:
        return False
    return True


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if is_so():
            return
        await asyncio.sleep(0.0001)
    raise AssertionError("it never was so")


async def refused(call: Awaitable[object]) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await call
    return caught.value


def client_call() -> ClientCall:
    return ClientCall(id=RequestId("r"), trace=Traceparent.new(Random(1), sampled=False), deadline_s=9.0)


@pytest.mark.parametrize("where", ["here", "in the parent"])
def test_a_call_carries_what_its_key_may(where: str) -> None:
    """Name, priority, salt and special tokens; each prompt counts once, by whichever answer to it comes first, and
    answers each. What it was given ends with it, once. An answer that its client has left counts until the client ends
    it, and not again by what is heard late of it; to end answers has a rate."""

    async def scenario(scene: Scene) -> None:
        local = LocalDesk(scene.book, rng=Random(1), cut_former=lambda _token, _key_name: False)
        desk: KeyDesk = local if where == "here" else scene.workers[0].desk
        key = desk.find(f"Bearer {SECRET}")
        keyed, use = await desk.admit(key), scene.use
        await keyed.widen(2)
        assert (use.requests, use.running) == (1, 2)
        for prompt in (1, 0, 1):
            call = keyed.sign(client_call(), prompt=prompt)
            assert (call.id, call.key_name, call.priority) == ("r", "a", Priority.HIGH)
            assert (call.key_salt, call.special_tokens) == ("s", True)
            await call.take_prompt(5)
            call.take_output(2)
        headers = await desk.headers(key)
        assert (use.prompt_tokens, use.output_tokens) == (10, 6)
        assert headers == use.headers(asyncio.get_running_loop().time())
        call.left(RequestId("one"), 0)
        keyed.end()
        keyed.end()
        await until(lambda: use.running == 0)
        error = await refused(wide(desk, key, 3))
        assert (error.reason, error.metadata) == (Reason.RATE_LIMIT_EXCEEDED, {"limit": "concurrency"})
        desk.ended(key, RequestId("one"))
        call.left(RequestId("one"), 0)
        await wide(desk, key, 3)
        await until(lambda: use.running == 0)
        use.follow(replace(use.key, requests_per_minute=1), asyncio.get_running_loop().time())
        await desk.end_answers(key)
        assert (await refused(desk.end_answers(key))).metadata == {"limit": "requests"}

    play(
        entry(priority="high", cache_salt="s", special_tokens=True, concurrency=3, requests_per_minute=1_000_000_000),
        scenario,
    )


async def wide(desk: KeyDesk, key: ApiKey, answers: int) -> None:
    keyed = await desk.admit(key)
    try:
        await keyed.widen(answers)
    finally:
        keyed.end()


def test_limits_hold_for_both_workers_together() -> None:
    """Three calls at a time, of ten that come to both at once; five a minute; 100 tokens a minute, of which an answer
    takes some."""

    async def scenario(scene: Scene) -> None:
        one, two = (worker.desk for worker in scene.workers)
        key = one.find(f"Bearer {SECRET}")
        found = await asyncio.gather(*(desk.admit(key) for desk in (one, two) * 5), return_exceptions=True)
        taken = [call for call in found if not isinstance(call, BaseException)]
        assert len(taken) == scene.use.running == 3
        for call in taken[1:]:
            call.end()
        await until(lambda: scene.use.running == 1)
        for desk in (one, two):
            (await desk.admit(key)).end()
        assert (await refused(two.admit(key))).metadata == {"limit": "requests"}
        taken[0].sign(client_call()).take_output(50)
        await taken[0].sign(client_call()).take_prompt(40)
        assert (await refused(taken[0].sign(client_call(), prompt=1).take_prompt(40))).metadata == {"limit": "tokens"}
        assert (await two.headers(key))["x-ratelimit-remaining-tokens"] == "10"

    play(entry(concurrency=3, requests_per_minute=5, tokens_per_minute=100), scenario)


def test_what_an_answer_takes_is_told_without_a_question() -> None:
    """And only what is new."""

    async def scenario(scene: Scene) -> None:
        desk = scene.workers[0].desk
        for count in (3, 4):
            desk.take_output(scene.use.key, count)
        await until(lambda: scene.use.output_tokens == 7)
        desk.take_output(scene.use.key, 1)
        await until(lambda: scene.use.output_tokens == 8)

    play(entry(), scenario)


def test_a_dead_worker_holds_nothing() -> None:
    """What it had admitted is over, what it had asked for is not admitted; the other one's calls go on."""

    async def scenario(scene: Scene) -> None:
        one, two = scene.workers
        key = one.desk.find(f"Bearer {SECRET}")
        await one.desk.admit(key)
        kept = await two.desk.admit(key)
        waiting = asyncio.create_task(one.desk.admit(key))
        await asyncio.sleep(0.01)
        await one.close()
        one.die()
        assert (await refused(waiting)).reason is Reason.PEER_UNREACHABLE
        assert scene.use.running == 1
        (await two.desk.admit(key)).end()
        kept.end()
        await until(lambda: scene.use.running == 0)

    play(entry(concurrency=2), scenario)


def test_a_client_that_leaves_before_its_call_is_admitted() -> None:
    """Its key has no room. When there is some, it is not for that call."""

    async def scenario(scene: Scene) -> None:
        one, two = (worker.desk for worker in scene.workers)
        key = one.find(f"Bearer {SECRET}")
        held = await two.admit(key)
        for _ in range(3):
            waiting = asyncio.create_task(one.admit(key))
            await asyncio.sleep(0)
            waiting.cancel()
        held.end()
        await until(lambda: scene.use.running == 0)
        (await one.admit(key)).end()
        assert (scene.use.requests, scene.use.refused.total()) == (2, 0)

    play(entry(concurrency=1), scenario)


def test_a_client_that_leaves_before_its_parent_hears_of_the_call() -> None:
    """The parent is busy. When it reads again, the question and the end of the call are there together, and the call
    holds nothing. The next one has all the room."""

    async def scenario(scene: Scene) -> None:
        worker, loop = scene.workers[0], asyncio.get_running_loop()
        key = worker.desk.find(f"Bearer {SECRET}")
        loop.remove_reader(worker.parents._sock)
        waiting = asyncio.create_task(worker.desk.admit(key))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        worker.desk.tell()
        loop.add_reader(worker.parents._sock, worker.parents._read)
        keyed = await worker.desk.admit(key)
        assert (scene.use.running, scene.use.requests) == (1, 1)
        keyed.end()
        await until(lambda: scene.use.running == 0)

    play(entry(concurrency=2), scenario)


def test_a_call_that_attaches_ends_its_former_connection_at_the_other_worker() -> None:
    """The key may have one answer, and a worker serves it. Its client comes back to the other one, and is let in; a
    client with another token is not."""

    async def scenario(scene: Scene) -> None:
        one, two = scene.workers
        key = one.desk.find(f"Bearer {SECRET}")
        one.formers.append((await one.desk.admit(key)).end)
        keyed = await two.desk.admit(key, former=lambda: TOKEN)
        assert scene.use.running == 1
        assert (await refused(one.desk.admit(key, former=lambda: TOKEN))).metadata == {"limit": "concurrency"}
        keyed.end()
        await until(lambda: scene.use.running == 0)

    play(entry(concurrency=1), scenario)


def test_the_keys_of_a_changed_file_reach_workers() -> None:
    """A new one is found, one that is gone is not; a call that a worker lets in before it hears of that is refused."""
    secret, text = new_key("b" * 43, {"name": "b"})
    assert "b" in text

    async def scenario(scene: Scene) -> None:
        desk = scene.workers[0].desk
        gone = desk.find(f"Bearer {SECRET}")
        scene.book.replace([ApiKey(name="b", sha256=digest_of(secret))], 0.0)
        assert (await refused(desk.admit(gone))).reason is Reason.INVALID_API_KEY
        scene.counter.follow()
        for worker in scene.workers:
            await until(lambda desk=worker.desk: knows(desk, secret))  # type: ignore[misc]
            assert not knows(worker.desk)

    play(entry(), scenario)
