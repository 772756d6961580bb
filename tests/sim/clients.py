"""A client that outlives its router: it attaches anywhere with the token of its last event, sometimes at two routers
at once, sometimes after a pause, sometimes never again.

It does more, and stranger things, than a client should, and judges what comes of each call: see `Resumed._allowed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import Any

import grpc
import grpc.aio
from batonpb import inference_pb2, inference_pb2_grpc

from baton.client.course import Call, Course, GiveUp, RouterBook
from baton.errors import BatonError, Reason
from baton.liveness import LivenessConfig
from baton.rpc import ChannelLimits
from baton.status import from_rpc_error
from tests.sim.cluster import Kind, Process, SimCluster
from tests.sim.judge import DEADLINE_S, OVERLOAD, WRONG_AT_ALL_TIMES, Hearing, Judge
from tests.sim.profiles import OUTPUT_TOKENS_MIN
from tests.sim.reader import Reader
from tests.sim.rpc import SimChannels

RETRY_S = 0.02
RETRY_DOUBLINGS_MAX = 5
"""A client waits the longer the more of its requests have failed: else most of the requests of a run would be those
that are turned away while a router is gone, of which nothing is to be learnt."""
PINGS = LivenessConfig(heartbeat_ms=150, answer_ms_max=300)
HANDOFF_S = 0.02
FORGETS_MAX = 6
FORGET_S = 2.0
AWAY_S = (0.0, 0.0, 0.05, 0.5, 4.0)
"""How long a client stays away that has lost its connection: at most, and then longer than nodes wait."""
SILENT_S = (0.7, 3.0, 0.0, 0.0)
"""After so long without an event a client thinks its connection lost; 0: it waits on."""
TWO_AT_ONCE = 0.1
"""Share of the attaches that go to two routers."""
FORGET_LATER = frozenset(
    {
        Reason.NODE_DRAINING,
        Reason.PEER_UNREACHABLE,
        Reason.INCARNATION_MISMATCH,
        Reason.DIRECTORY_LOST,
        Reason.TOO_MANY_CALLS,
        Reason.DEADLINE,
    }
)
"""What a Forget may end with."""
LOST = BatonError(Reason.PEER_UNREACHABLE, "The client has lost its connection.")


class Client:
    """A process of its own, and its channels to routers."""

    def __init__(self, cluster: SimCluster, name: str, rng: Random) -> None:
        self.cluster = cluster
        self.process = cluster.processes[name] = cluster.new_process(name, Kind.CLIENT)
        self._rng = rng
        self._channels = SimChannels(limits=ChannelLimits(liveness=PINGS), process=self.process)
        self._stubs: dict[str, inference_pb2_grpc.InferenceStub] = {}

    @property
    def routers(self) -> list[Process]:
        return [self.cluster.processes[name] for name in self.cluster.names(Kind.ROUTER)]

    def router(self) -> Process | None:
        """One drawn at random; None if it is not up."""
        router = self._rng.choice(self.routers)
        return router if is_up(router) else None

    def stub(self, router: Process) -> Any:
        endpoint = router.runtime.endpoint if router.runtime is not None else ""
        if endpoint not in self._stubs:
            self._stubs[endpoint] = inference_pb2_grpc.InferenceStub(self._channels.get(endpoint))
        return self._stubs[endpoint]


def is_up(router: Process) -> bool:
    return router.ready and router.alive


class Fate(Enum):
    """What a client does in the middle of an answer."""

    STAYS = "nothing"
    CUT = "loses its connection, and attaches"
    TWICE = "attaches elsewhere while it still listens"
    FORGETS = "wants no more"
    FORGETS_APART = "tells another router so, and still listens"
    VANISHES = "never comes back"


class Stream:
    """One call for a part of the answer."""

    def __init__(self, call: Any, router: Process, reader: Reader, hearing: Hearing, *, bare: bool = False) -> None:
        self.call = call
        self.reader = reader
        self.hearing = hearing
        self.bare = bare
        """The request was not sent along."""
        self.dropped = False
        """The client has given the call up itself."""
        self.failure: BatonError | None = None
        self.by_router = False
        """Has written the failure."""
        self.was_up = is_up(router)
        self._had = len(reader.tokens)

    @property
    def tokens(self) -> int:
        """That this call has brought."""
        return len(self.reader.tokens) - self._had

    def drop(self) -> None:
        self.dropped = True
        self.call.cancel()

    @property
    def beaten(self) -> bool:
        """By another call of this client's, one that it has made earlier or later."""
        return self.by_router and self.failure is not None and self.failure.reason is Reason.TAKEN_OVER

    @property
    def too_bare(self) -> bool:
        """The request itself is needed."""
        return self.bare and self.failure is not None and self.failure.reason is Reason.NOT_RESUMABLE


class Resumed:
    """One resumable request, over all its calls. Which router is asked next, when, and when no more, decides the real
    client's `Course`."""

    def __init__(self, client: Client, reader: Reader, judge: Judge, rng: Random, *, leavers: float) -> None:
        self.reader = reader
        self.lost = ""
        """Why it has ended without the whole answer, though its client wanted it."""
        self.left = False
        self.attaches = 0
        self._client = client
        self._judge = judge
        self._rng = rng
        self._fate = self._draw_fate(leavers)
        self._turn_at = 0 if rng.random() < 0.3 else rng.randrange(OUTPUT_TOKENS_MIN)
        """The client turns to its fate with so many tokens; without one, in the middle of the handoff."""
        self._cuts = rng.choice((1, 1, 2, 4))
        self._silent_s = rng.choice(SILENT_S)
        self._began_s = judge.now_s()
        self._with_request = False
        self._forgotten = self._forgetting = False
        self._calls = 0
        count = len(client.routers)
        self._book = RouterBook(count, first=rng.randrange(count))
        self._course = Course(self._book, began_s=self._began_s, timeout_s=DEADLINE_S, rng=rng)

    def _draw_fate(self, leavers: float) -> Fate:
        dice = self._rng.random()
        if dice < leavers:
            return self._rng.choice((Fate.FORGETS, Fate.FORGETS_APART, Fate.VANISHES))
        dice = self._rng.random()
        return Fate.CUT if dice < 0.15 else Fate.TWICE if dice < 0.25 else Fate.STAYS

    async def run(self) -> None:
        """Ends with the whole answer, with `left`, with `lost`, or with what is wrong in `reader.wrong`."""
        course, older = self._course, list[Stream]()
        while True:
            await asyncio.sleep(course.call.after_s)
            best = await self._listen_all([*older, *self._ask(course.call)])
            self.reader = best.reader
            if self.reader.wrong or self.left:
                return
            if self.reader.finished:
                if self._rng.random() < 0.8:
                    await self._forget()
                return
            older = [best] if best.failure is None and not best.dropped else []
            failure = LOST if best.failure is None or best.beaten or best.too_bare else best.failure
            by_router = best.by_router and failure is not LOST
            if isinstance(course.failed(failure, by_router=by_router, now_s=self._judge.now_s()), GiveUp):
                self.lost = failure.reason.value if by_router else "no answer of any router in time"
                self._judge_end(by_router=by_router)
                for stream in older:
                    stream.drop()
                return

    def _judge_end(self, *, by_router: bool) -> None:
        """A router's own word was judged when it came."""
        if not (by_router or self._judge.lost_allowed or self._judge.excuses.unserved(self._began_s)):
            took_s = self._judge.now_s() - self._began_s
            self.reader.wrong = f"given up after {took_s:.3f} s, with {len(self.reader.tokens)} tokens"

    # Calls.

    def _ask(self, called: Call) -> list[Stream]:
        """One call, or two at once."""
        count = 2 if called.attach and self._rng.random() < TWO_AT_ONCE else 1
        numbers = (called.router, self._rng.randrange(len(self._client.routers)))[:count]
        return [self._begin(self._client.routers[number], attach=called.attach) for number in numbers]

    def _begin(self, router: Process, *, attach: bool) -> Stream:
        hearing = self._judge.hearing(router.name, self._course.deadline_s - self._judge.now_s())
        stub, reader, timeout_s = self._client.stub(router), self.reader.fork(), hearing.timeout_s
        self._calls += 1
        if not attach:
            return Stream(stub.Generate(reader.question.message(), timeout=timeout_s), router, reader, hearing)
        self.attaches += 1
        bare = not self._with_request and self._rng.random() < 0.2
        request = inference_pb2.AttachRequest(resume_token=reader.token)
        if not bare:
            request.request.CopyFrom(reader.question.message())
            if not reader.question.plain or self._rng.random() < 0.5:
                request.output.ids.extend(reader.tokens)
        return Stream(stub.Attach(request, timeout=timeout_s), router, reader, hearing, bare=bare)

    async def _listen_all(self, streams: Sequence[Stream]) -> Stream:
        """Until one has the whole answer or all have ended, or until the client turns; the one that has most."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._listen(stream), name="listen") for stream in streams]
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if any(stream.reader.finished or stream.reader.wrong for stream in streams):
                break
        best = next((stream for stream in streams if stream.reader.wrong), None) or max(
            streams, key=lambda s: (s.reader.finished, not s.beaten, len(s.reader.tokens), s.failure is None)
        )
        for stream in streams:
            if stream is not best:
                stream.drop()
        if waiting:
            await asyncio.wait(waiting)
        return best

    async def _listen(self, stream: Stream) -> None:
        reader, judge = stream.reader, self._judge
        if self._silent_s:
            asyncio.get_running_loop().call_later(self._silent_s, self._look, stream)
        try:
            async for event in stream.call:
                reader.take(event)
                judge.heard(stream.hearing)
                self._course.heard(attachable=bool(reader.token), new=event.WhichOneof("event") != "started")
                if reader.wrong:
                    return
                if self._fate is not Fate.STAYS and len(reader.tokens) >= self._turn_at and not reader.finished:
                    await self._turn(stream)
                    if stream.dropped or self._fate is Fate.TWICE:
                        return
                if reader.question.reads_slowly_s:
                    await asyncio.sleep(reader.question.reads_slowly_s)
            if not reader.finished:
                reader.wrong = "the stream ended without `finished` or an error"
        except grpc.aio.AioRpcError as error:
            if not stream.dropped:
                self._take_error(error, stream)

    def _look(self, stream: Stream) -> None:
        """Has the stream been silent for too long?"""
        quiet_s = self._judge.now_s() - stream.hearing.heard_s
        if stream.failure is not None or stream.dropped or stream.reader.finished:
            return
        if quiet_s >= self._silent_s - 1e-6:
            stream.drop()
        else:
            asyncio.get_running_loop().call_later(self._silent_s - quiet_s, self._look, stream)

    # What the client does by itself.

    async def _turn(self, stream: Stream) -> None:
        """To its fate, in the middle of an answer."""
        fate = self._fate
        if not stream.reader.tokens:
            await asyncio.sleep(HANDOFF_S * self._rng.random())
        if fate is Fate.CUT:
            stream.drop()
            self._cuts -= 1
            self._turn_at = len(stream.reader.tokens) + self._rng.randrange(1, 12)
            self._fate = Fate.CUT if self._cuts else Fate.STAYS
            await asyncio.sleep(self._rng.choice(AWAY_S) * self._rng.random())
        elif fate is Fate.TWICE:
            pass
        elif fate is Fate.VANISHES:
            stream.drop()
            self.left = True
        else:
            self._fate = Fate.STAYS
            self.left = True
            if fate is Fate.FORGETS:
                stream.drop()
            self.reader = stream.reader
            await self._forget()
            if self._forgotten and self._rng.random() < 0.5:
                await self._ask_again(stream.reader)
            if not self._forgotten:
                stream.drop()

    async def _forget(self) -> None:
        """Say so to any router, a few times."""
        self._forgetting = True
        for tries in range(FORGETS_MAX):
            router = self._client.router()
            if router is not None:
                request = inference_pb2.ForgetRequest(resume_token=self.reader.token)
                try:
                    await self._client.stub(router).Forget(request, timeout=FORGET_S)
                except grpc.aio.AioRpcError as error:
                    failure = from_rpc_error(error)
                    if error.trailing_metadata() and failure.reason not in FORGET_LATER:
                        self.reader.wrong = f"Forget ends with {failure!r}"
                        return
                else:
                    self._forgotten = True
                    return
            await asyncio.sleep(RETRY_S * 2**tries * (1 + self._rng.random()))

    async def _ask_again(self, reader: Reader) -> None:
        """For what was forgotten: it stays so."""
        router = self._client.router()
        if router is None:
            return
        kept = self._judge.excuses.remembers(router, reader.place)
        hearing = self._judge.hearing(router.name)
        request = inference_pb2.AttachRequest(resume_token=reader.token, request=reader.question.message())
        call = self._client.stub(router).Attach(request, timeout=FORGET_S)
        try:
            async for _ in call:
                if kept is not None and kept == self._judge.excuses.remembers(router, reader.place):
                    reader.wrong = "a request that was forgotten goes on"
                return
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if error.trailing_metadata() and failure.reason is not Reason.CANCELLED:
                self._take_error(error, Stream(call, router, reader, hearing))
        finally:
            call.cancel()

    # What comes of a call.

    def _take_error(self, error: grpc.aio.AioRpcError, stream: Stream) -> None:
        failure, wire, reader = from_rpc_error(error), not error.trailing_metadata(), stream.reader
        stream.failure, stream.by_router = failure, not wire
        if reader.finished:
            lost = wire and self._judge.excused(failure, stream.hearing, tokens=stream.tokens, wire=True)
            if not (lost or (stream.by_router and (self._forgetting or (stream.beaten and self._calls > 1)))):
                reader.wrong = f"an error after `finished`: {failure!r}"
        elif not self._allowed(failure, stream, wire=wire):
            reader.wrong = self._judge.unexplained(failure, stream.hearing, tokens=stream.tokens)
        if failure.reason is Reason.NOT_RESUMABLE:
            self._with_request = True

    def _allowed(self, failure: BatonError, stream: Stream, *, wire: bool) -> bool:
        """May this one call end so? (The request goes on by another one, unless `Course` gives it up.)"""
        reason, hearing, tokens = failure.reason, stream.hearing, stream.tokens
        if wire:
            return not stream.was_up or self._judge.excused(failure, hearing, tokens=tokens, wire=True)
        if reason in WRONG_AT_ALL_TIMES:
            return False
        if reason in OVERLOAD:
            return True
        if reason is Reason.TAKEN_OVER:
            return self._calls > 1 or self._forgetting
        if reason is Reason.NOT_RESUMABLE:
            return stream.bare
        if reason is Reason.CANCELLED:
            return self._forgetting
        if reason is Reason.DEADLINE and not self._judge.lost_allowed:
            return self._judge.deadline_passed(hearing)  # the end of a router is no excuse here, nor for the next
        if reason is Reason.ATTEMPTS_SPENT and not self._judge.lost_allowed:
            return self._judge.excuses.spent(hearing.router, hearing.began_s)
        return self._judge.excused(failure, hearing, tokens=tokens, wire=False)
