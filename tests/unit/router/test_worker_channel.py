"""Messages, sockets, questions and answers between a router's parent and a worker."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from batonpb import worker_pb2
from batonpb.worker_pb2 import FromWorker, ToWorker

from baton.errors import BatonError, Code, Reason
from router import worker_channel
from router.worker_channel import WorkerChannel


@dataclass(kw_only=True)
class Ends:
    parent: WorkerChannel[ToWorker, FromWorker]
    worker: WorkerChannel[FromWorker, ToWorker]
    lost: list[tuple[str, str]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def ends(*, sndbuf: int | None = None) -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    if sndbuf is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    lost: list[tuple[str, str]] = []
    news = asyncio.Event()

    def note(side: str, why: str) -> None:
        lost.append((side, why))
        news.set()

    parent = WorkerChannel(ours, ToWorker, FromWorker, on_lost=lambda why: note("parent", why))
    worker = WorkerChannel(theirs, FromWorker, ToWorker, on_lost=lambda why: note("worker", why))
    try:
        async with asyncio.timeout(20):
            yield Ends(parent=parent, worker=worker, lost=lost, news=news)
    finally:
        await parent.close()
        await worker.close()


def test_messages_longer_than_the_kernel_takes_come_whole_and_in_order() -> None:
    async def situation() -> None:
        async with ends(sndbuf=4_096) as both:
            heard: asyncio.Queue[bytes] = asyncio.Queue()
            both.worker.on("keys_changed", lambda message: heard.put_nowait(message.keys))
            sent = [bytes([number]) * size for number, size in enumerate((0, 3_000_000, 1, 700, 90_000))]
            for each in sent:
                both.parent.send(ToWorker(keys_changed=worker_pb2.KeysChanged(keys=each)))
            assert [await heard.get() for _ in sent] == sent

    asyncio.run(situation())


def test_each_socket_comes_with_its_own_message_behind_a_full_buffer() -> None:
    """Sockets that were queued between long messages: each is told apart by what its other end says."""

    async def situation() -> None:
        async with ends(sndbuf=4_096) as both:
            taken: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

            def take(message: worker_pb2.NewConnection, sock: socket.socket | None) -> None:
                assert sock is not None
                with sock:
                    taken.put_nowait((message.number, sock.recv(10)))

            both.worker.on_socket("connection", take)
            both.worker.on("keys_changed", lambda _message: None)
            kept = []
            for number in range(20):
                near, far = socket.socketpair()
                far.send(f"I am {number}".encode())
                kept += [near, far]
                both.parent.send(ToWorker(keys_changed=worker_pb2.KeysChanged(keys=b"x" * 5_000)))
                both.parent.send(ToWorker(connection=worker_pb2.NewConnection(number=number)), near)
            assert [await taken.get() for _ in range(20)] == [(n, f"I am {n}".encode()) for n in range(20)]
            for each in kept:
                each.close()

    asyncio.run(situation())


def test_a_socket_for_which_no_descriptor_is_left() -> None:
    """Its message says so. What comes before is taken once, and each further socket with its own message."""

    async def situation() -> None:
        async with ends() as both:
            taken: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

            def take(message: worker_pb2.NewConnection, sock: socket.socket | None) -> None:
                taken.put_nowait((message.number, b"" if sock is None else sock.recv(10)))
                if sock is not None:
                    sock.close()

            both.worker.on_socket("connection", take)
            both.worker.on("stop_within_ms", lambda ms: taken.put_nowait((ms, b"stop")))
            files = resource.getrlimit(resource.RLIMIT_NOFILE)
            for number in range(2):
                near, far = socket.socketpair()
                far.send(b"hello")
                both.parent.send(ToWorker(stop_within_ms=number))
                both.parent.send(ToWorker(connection=worker_pb2.NewConnection(number=number)), near)
                try:
                    if number == 0:
                        resource.setrlimit(resource.RLIMIT_NOFILE, (3, files[1]))
                    found = [await taken.get(), await taken.get()]
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, files)
                assert found == [(number, b"stop"), (number, b"hello" if number else b"")]
                near.close()
                far.close()

    asyncio.run(situation())


def test_both_sides_ask_at_once_and_each_gets_its_own_answer() -> None:
    async def situation() -> None:
        async with ends() as both:
            both.parent.on_question("key_headers", lambda name: ToWorker(key=worker_pb2.KeyAnswer(headers={"k": name})))

            async def samples(_asked: worker_pb2.MetricsWanted) -> FromWorker:
                await asyncio.sleep(0)
                return FromWorker(metrics=worker_pb2.MetricSamples(values=b"a 1\n"))

            both.worker.on_long_question("metrics_wanted", samples)
            questions = [FromWorker(key_headers=name) for name in "abc"]
            *keys, metrics = await asyncio.gather(
                *map(both.worker.ask, questions),
                both.parent.ask(ToWorker(metrics_wanted=worker_pb2.MetricsWanted())),
            )
            assert [each.headers["k"] for each in keys] == ["a", "b", "c"]
            assert metrics.values == b"a 1\n"

    asyncio.run(situation())


def test_a_refusal_is_raised_where_it_was_asked_with_all_its_parts() -> None:
    async def situation() -> None:
        refusal = BatonError(
            Reason.RATE_LIMIT_EXCEEDED,
            "Too many.",
            code=Code.ABORTED,
            field="n",
            retry_after_ms=7,
            metadata={"limit": "3"},
        )

        def refuse(_name: str) -> ToWorker:
            raise refusal

        async with ends() as both:
            both.parent.on_question("key_headers", refuse)
            with pytest.raises(BatonError) as raised:
                await both.worker.ask(FromWorker(key_headers="a"))
        found = raised.value
        assert (found.reason, found.message, found.code) == (refusal.reason, refusal.message, refusal.code)
        assert (found.field, found.retry_after_ms, found.metadata) == ("n", 7, {"limit": "3"})

    asyncio.run(situation())


def test_a_retry_time_of_years_is_told_as_the_longest() -> None:
    async def situation() -> None:
        def refuse(_name: str) -> ToWorker:
            raise BatonError(Reason.RATE_LIMIT_EXCEEDED, "Too many.", retry_after_ms=10**12)

        async with ends() as both:
            both.parent.on_question("key_headers", refuse)
            with pytest.raises(BatonError) as raised:
                await both.worker.ask(FromWorker(key_headers="a"))
        assert raised.value.retry_after_ms == worker_channel.RETRY_MS_MAX

    asyncio.run(situation())


def test_a_bug_of_one_handler_fails_that_question_only() -> None:
    async def situation() -> None:
        def fail(name: str) -> ToWorker:
            if name == "bad":
                raise ValueError
            return ToWorker(key=worker_pb2.KeyAnswer())

        async with ends() as both:
            both.parent.on_question("key_headers", fail)
            with pytest.raises(BatonError, match="its log says why"):
                await both.worker.ask(FromWorker(key_headers="bad"))
            await both.worker.ask(FromWorker(key_headers="good"))

    asyncio.run(situation())


@pytest.mark.parametrize("gone", ["parent", "worker"])
def test_an_end_that_is_gone_is_told_once_and_fails_what_was_asked(gone: str) -> None:
    async def situation() -> None:
        async with ends() as both:
            never = asyncio.Event()

            async def never_answer(_asked: object) -> FromWorker:
                await never.wait()
                raise AssertionError

            async def never_answer_either(_asked: object) -> ToWorker:
                await never.wait()
                raise AssertionError

            both.worker.on_long_question("warm", never_answer)
            both.parent.on_long_question("key_headers", never_answer_either)
            asking = (
                asyncio.create_task(both.worker.ask(FromWorker(key_headers="a")))
                if gone == "parent"
                else asyncio.create_task(both.parent.ask(ToWorker(warm=worker_pb2.Warm())))
            )
            await asyncio.sleep(0)
            stays = "worker" if gone == "parent" else "parent"
            await getattr(both, gone).close()
            with pytest.raises(BatonError) as raised:
                await asking
            assert raised.value.reason is Reason.PEER_UNREACHABLE
            assert [side for side, _ in both.lost] == [stays]
            with pytest.raises(BatonError):
                await both.worker.ask(FromWorker(key_headers="a"))

    asyncio.run(situation())


def test_a_peer_that_reads_nothing_is_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def situation() -> None:
        monkeypatch.setattr(worker_channel, "UNSENT_BYTES_MAX", 1_000_000)
        ours, theirs = socket.socketpair()
        lost: list[str] = []
        channel = WorkerChannel(ours, ToWorker, FromWorker, on_lost=lost.append)
        sends = 0
        while channel.open and sends < 1_000:
            channel.send(ToWorker(keys_changed=worker_pb2.KeysChanged(keys=b"x" * 100_000)))
            sends += 1
        assert len(lost) == 1
        assert sends < 1_000
        await channel.close()
        theirs.close()

    asyncio.run(situation())


def test_sockets_whose_message_never_became_whole_are_closed() -> None:
    """The parent dies in the middle of a frame: the worker keeps no descriptor of it."""

    async def situation() -> None:
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        near, far = socket.socketpair()
        before = len(os.listdir("/proc/self/fd"))
        channel = WorkerChannel(theirs, FromWorker, ToWorker, on_lost=lambda _why: lost.set())
        socket.send_fds(ours, [b"\x10\x00\x00\x00\x01half"], [near.fileno()])
        near.close()
        ours.close()
        async with asyncio.timeout(20):
            await lost.wait()
        await channel.close()
        far.setblocking(False)
        assert far.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) == before - 3
        far.close()

    asyncio.run(situation())
