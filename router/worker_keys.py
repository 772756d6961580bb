"""API keys of a router with workers. The parent has the book and counts; a worker asks it on their channel.

So limits hold for all workers together. A worker finds a caller's key by itself, in its copy of the file's entries, and
says what its answers have used every TELL_MS, and before each question. A worker that dies holds nothing any more.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Final

from batonpb import worker_pb2
from batonpb.worker_pb2 import FromWorker, ToWorker

from baton.errors import BatonError, Reason
from baton.ids import RequestId
from router.key_desk import FORMER_LOOK_MS, FORMER_LOOKS_MAX, signed, wait_for_room
from router.key_file import BLIND_BYTES
from router.keys import ENDED_EPOCH, Admission, ApiKey, KeyBook, KeyUse
from router.request import ClientCall
from router.resume import ResumeToken
from router.worker_channel import WorkerChannel

TELL_MS: Final = 100
"""Between two messages of how many tokens answers have used."""
ANSWER_MS_MAX: Final = 5_000
"""How long the parent may take to answer a question about a key."""
ENDING_LOOKS_MAX: Final = 5
"""How often the parent looks for room for one answer more: that of another worker may have ended a moment ago, and its
client may have been faster than the news of that."""


class RemoteDesk:
    """A worker's `KeyDesk`."""

    def __init__(self, channel: WorkerChannel[FromWorker, ToWorker], *, rng: Random) -> None:
        self._channel = channel
        self._rng = rng
        self._loop = loop = asyncio.get_running_loop()
        self._book = KeyBook((), blind=secrets.token_bytes(BLIND_BYTES), now_s=loop.time())
        """To find keys in: nothing is counted here."""
        self._numbers = itertools.count(1)
        self._output: Counter[str] = Counter()
        """Tokens by key, since the last news; the rest below too."""
        self._whereabouts: list[worker_pb2.KeyUsed] = []
        """Of clients."""
        self._ended: list[int] = []
        self._due: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        channel.on("keys_changed", self._follow)

    def find(self, authorization: str | bytes | None) -> ApiKey:
        return self._book.find(authorization).key

    async def admit(self, key: ApiKey, *, former: Callable[[], ResumeToken] | None = None) -> RemoteCall:
        number = next(self._numbers)
        asked = worker_pb2.KeyAdmit(
            admission=number, key_name=key.name, spread=self._rng.random(), attaches=former is not None
        )
        if former is not None:
            with suppress(BatonError):
                asked.resume_token = former().encode()
        call = RemoteCall(self, key, number)
        try:
            await self.ask(FromWorker(key_admit=asked))
        except BaseException:
            call.end()  # the parent may have taken it in
            raise
        return call

    async def end_answers(self, key: ApiKey) -> None:
        await self.ask(FromWorker(key_end_answers=key.name))

    def ended(self, key: ApiKey, request: RequestId) -> None:
        self.came_back(key, request, ENDED_EPOCH)

    def came_back(self, key: ApiKey, request: RequestId, epoch: int) -> None:
        self._whereabouts.append(worker_pb2.KeyUsed(key_name=key.name, came_back=request, epoch=epoch))
        self._tell_soon()

    def leave(self, key: ApiKey, request: RequestId, epoch: int) -> None:
        self._whereabouts.append(worker_pb2.KeyUsed(key_name=key.name, left=request, epoch=epoch))
        self._tell_soon()

    async def headers(self, key: ApiKey) -> dict[str, str]:
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return {}
        with suppress(BatonError):
            return dict((await self.ask(FromWorker(key_headers=key.name))).headers)
        return {}

    def take_output(self, key: ApiKey, tokens: int) -> None:
        self._output[key.name] += tokens
        if self._due is None:
            self._due = self._loop.call_later(TELL_MS / 1000, self.tell)

    def call_ended(self, admission: int) -> None:
        self._ended.append(admission)
        self._tell_soon()

    async def ask(self, question: FromWorker) -> worker_pb2.KeyAnswer:
        """What has happened before is told before. Raises BatonError."""
        self.tell()
        try:
            async with asyncio.timeout(ANSWER_MS_MAX / 1000):
                answer: worker_pb2.KeyAnswer = await self._channel.ask(question)
                return answer
        except TimeoutError as error:
            text = f"The router's parent process has not answered within {ANSWER_MS_MAX} ms. Try again."
            raise BatonError(Reason.PEER_UNREACHABLE, text, retry_after_ms=1_000) from error

    def tell(self) -> None:
        """Tell the parent what is new."""
        for timer in (self._due, self._soon):
            if timer is not None:
                timer.cancel()
        self._due = self._soon = None
        if not (self._output or self._whereabouts or self._ended):
            return
        news = worker_pb2.KeyNews(used=self._whereabouts, ended=self._ended)
        for name, count in self._output.items():
            news.used.append(worker_pb2.KeyUsed(key_name=name, output_tokens=count))
        self._output.clear()
        self._whereabouts.clear()
        self._ended.clear()
        self._channel.send(FromWorker(key_news=news))

    def _tell_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self.tell)

    def _follow(self, news: worker_pb2.KeysChanged) -> None:
        keys: tuple[ApiKey, ...] = pickle.loads(news.keys)
        self._book.replace(keys, self._loop.time())


class RemoteCall:
    def __init__(self, desk: RemoteDesk, key: ApiKey, number: int) -> None:
        self._desk = desk
        self._number = number
        self._over = False
        self.key = key

    async def widen(self, answers: int) -> None:
        if answers > 1:
            await self._desk.ask(FromWorker(key_widen=worker_pb2.KeyWiden(admission=self._number, answers=answers)))

    def sign(self, call: ClientCall, *, prompt: int = 0) -> ClientCall:
        desk, key = self._desk, self.key
        return signed(
            call,
            key,
            take_prompt=partial(self._take_prompt, prompt),
            take_output=partial(desk.take_output, key),
            left=partial(desk.leave, key),
            came_back=partial(desk.came_back, key),
        )

    async def _take_prompt(self, prompt: int, tokens: int) -> None:
        asked = worker_pb2.KeyPrompt(admission=self._number, prompt=prompt, tokens=tokens)
        await self._desk.ask(FromWorker(key_prompt=asked))

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._desk.call_ended(self._number)


class KeyCounter:
    """The parent's side, of all workers."""

    def __init__(self, book: KeyBook) -> None:
        self.book = book
        self.workers: list[WorkerKeys] = []

    def add(self, channel: WorkerChannel[ToWorker, FromWorker]) -> WorkerKeys:
        """Answer what a worker asks."""
        worker = WorkerKeys(self, channel)
        self.workers.append(worker)
        return worker

    def follow(self) -> None:
        """The book has other keys now."""
        keys = self.pickled()
        for worker in self.workers:
            worker.tell(keys)

    def pickled(self) -> bytes:
        return pickle.dumps(tuple(use.key for use in self.book.uses()))

    async def end_former(self, use: KeyUse, resume_token: str) -> bool:
        """A client comes back to this router, which still serves its former connection: that is to leave the client's
        key room for the new call. Whether there was one."""
        asked = [worker.end_former(use.key.name, resume_token) for worker in self.workers if worker.holds(use)]
        return any(await asyncio.gather(*asked))


class WorkerKeys:
    """What one worker's calls hold. Its owner calls `end` when the worker is gone."""

    def __init__(self, counter: KeyCounter, channel: WorkerChannel[ToWorker, FromWorker]) -> None:
        self._counter = counter
        self._book = counter.book
        self._channel = channel
        self._now_s = asyncio.get_running_loop().time
        self._admissions: dict[int, Admission | None] = {}
        """By the worker's numbers; None: it waits."""
        self._knows_keys = False
        channel.on_long_question("key_admit", self._admit, begin=self._wait)
        channel.on_question("key_widen", self._widen)
        channel.on_question("key_prompt", self._take_prompt)
        channel.on_question("key_headers", self._headers)
        channel.on_question("key_end_answers", self._end_answers)
        channel.on("key_news", self._take_news)

    def begin(self) -> None:
        """The worker is ready. Called before it gets connections."""
        self._knows_keys = True
        self.tell(self._counter.pickled())

    def tell(self, keys: bytes) -> None:
        if self._knows_keys:
            self._channel.send(ToWorker(keys_changed=worker_pb2.KeysChanged(keys=keys)))

    def end(self) -> None:
        """All that it holds is over."""
        self._counter.workers.remove(self)
        for admission in self._admissions.values():
            if admission is not None:
                admission.end()
        self._admissions.clear()

    def holds(self, use: KeyUse) -> bool:
        return any(admission is not None and admission.use is use for admission in self._admissions.values())

    async def end_former(self, key_name: str, resume_token: str) -> bool:
        question = worker_pb2.EndFormer(key_name=key_name, resume_token=resume_token)
        with suppress(TimeoutError, BatonError):
            async with asyncio.timeout(FORMER_LOOKS_MAX * FORMER_LOOK_MS / 1000):
                answer: worker_pb2.FormerEnded = await self._channel.ask(ToWorker(end_former=question))
                return answer.found
        return False

    def _wait(self, asked: worker_pb2.KeyAdmit) -> None:
        """At once: the news that the call has ended may come with the question."""
        self._admissions[asked.admission] = None

    async def _admit(self, asked: worker_pb2.KeyAdmit) -> ToWorker:
        number = asked.admission
        try:
            use = self._book.use_of(asked.key_name)
            if use.full:
                found = bool(asked.resume_token) and await self._counter.end_former(use, asked.resume_token)
                await wait_for_room(use, FORMER_LOOKS_MAX if found else ENDING_LOOKS_MAX)
            if number not in self._admissions:
                raise BatonError(Reason.CANCELLED, "The call has ended.")
            admission = use.admit(self._now_s(), spread=asked.spread, attaches=asked.attaches)
        except BaseException:
            self._admissions.pop(number, None)
            raise
        self._admissions[number] = admission
        return _granted()

    def _widen(self, asked: worker_pb2.KeyWiden) -> ToWorker:
        self._admission(asked.admission).widen(asked.answers)
        return _granted()

    def _take_prompt(self, asked: worker_pb2.KeyPrompt) -> ToWorker:
        self._admission(asked.admission).take_prompt(asked.prompt, asked.tokens, self._now_s())
        return _granted()

    def _admission(self, number: int) -> Admission:
        admission = self._admissions[number]
        assert admission is not None, number
        return admission

    def _headers(self, key_name: str) -> ToWorker:
        return _granted(headers=self._book.use_of(key_name).headers(self._now_s()))

    def _end_answers(self, key_name: str) -> ToWorker:
        self._book.use_of(key_name).end_answers(self._now_s())
        return _granted()

    def _take_news(self, news: worker_pb2.KeyNews) -> None:
        for each in news.used:
            with suppress(BatonError):  # the key has gone
                use = self._book.use_of(each.key_name)
                if each.output_tokens:
                    use.take_output(each.output_tokens, self._now_s())
                if each.left:
                    use.leave(RequestId(each.left), each.epoch, self._now_s())
                if each.came_back:
                    use.come_back(RequestId(each.came_back), each.epoch, self._now_s())
        for number in news.ended:
            if (admission := self._admissions.pop(number, None)) is not None:
                admission.end()


def _granted(**fields: Any) -> ToWorker:
    return ToWorker(key=worker_pb2.KeyAnswer(**fields))
