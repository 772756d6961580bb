"""One worker of a router that has several: a process that serves the connections which its parent gives it. It ends
with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from batonpb import worker_pb2

from baton.clock import Clock
from baton.endpoint import parse_address
from baton.errors import BatonError, Reason
from baton.event_loop import collect_seldom, new_event_loop
from baton.grpc_core import WakeReader
from baton.http2_front import native_front
from baton.ids import Incarnation, NodeName
from baton.log import LogFormat, LogLevel, get_log, set_up_logging
from baton.loop_lag import LoopLag
from baton.repeats import RepeatLog
from baton.rpc import ChannelLimits, Channels, RpcServer
from baton.tasks import Tasks
from baton.tls import open_tls
from baton.wire import NodeRecord, record_from_proto
from router.config import RouterConfig
from router.doors import Door
from router.http_slots import Slot
from router.node import RouterNode
from router.request import INT_DIGITS_MAX
from router.resume import ResumeToken
from router.serving import Serving
from router.worker_channel import WorkerChannel
from router.worker_keys import RemoteDesk

if TYPE_CHECKING:
    from router.metrics import RouterMetrics

log = get_log("worker")

BEAT_MS: Final = 100
"""Between two looks at what the parent is to know, and at how late the loop is."""
REPORT_BEATS_MAX: Final = 2
"""Of which so many may pass without a report: the parent gives a silent worker no connection after `SILENT_S`."""
UPKEEP_BEATS: Final = 10
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The first message."""

    config: RouterConfig
    folder: Path | None
    """The model's."""
    log_level: LogLevel
    log_format: LogFormat


class ClusterView:
    """What the parent has told of the cluster and of its own life."""

    def __init__(self) -> None:
        self.ready = False
        self.takes_requests = False
        self.lifecycle_number = 0
        self.trouble = ""
        self._refusal: worker_pb2.NodesKnown | None = None
        self._records: dict[NodeName, NodeRecord] = {}

    def follow_lifecycle(self, news: worker_pb2.WorkerLifecycle) -> None:
        self.ready, self.takes_requests, self.lifecycle_number = news.ready, news.takes_requests, news.number

    def follow_nodes(self, news: worker_pb2.NodesKnown) -> list[NodeRecord]:
        """The records as they are now."""
        changed = {record.name: record for record in map(record_from_proto, news.changed)}
        names = map(NodeName, news.names)
        self._records = {name: changed.get(name) or self._records[name] for name in names}
        self.trouble = news.trouble
        self._refusal = news if news.refusal_reason else None
        return list(self._records.values())

    def check_known(self) -> None:
        """Raises BatonError where the parent does not know the nodes well enough to place new requests."""
        if (news := self._refusal) is not None:
            raise BatonError(Reason(news.refusal_reason), news.refusal, retry_after_ms=news.refusal_retry_after_ms)


class Worker:
    """Lives on one loop. Made once the first message is there."""

    def __init__(
        self,
        channel: WorkerChannel[worker_pb2.FromWorker, worker_pb2.ToWorker],
        setup: WorkerSetup,
    ) -> None:
        """Raises BatonError."""
        self._config = config = setup.config
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._clock = Clock()
        rng = Random(secrets.randbits(64))
        self._view = ClusterView()
        self._loop_lag = LoopLag(self._clock)
        self._metrics = self._make_metrics()
        self._channels = Channels(limits=ChannelLimits(liveness=config.liveness), rng=rng, tls=open_tls(config))
        self._server = RpcServer(limits=config.rpc, rng=rng)
        self._desk = RemoteDesk(channel, rng=rng) if config.api_keys_file is not None else None
        self._serving = Serving(
            config,
            incarnation=Incarnation(rng.getrandbits(64) | 1),
            lifecycle=self._view,
            channels=self._channels,
            server=self._server,
            clock=self._clock,
            rng=rng,
            folder=setup.folder,
            metrics=self._metrics,
            make_desk=self._make_desk if self._desk is not None else None,
            check_known=self._view.check_known,
            directory_trouble=lambda: self._view.trouble,
            closed=self._closed,
        )
        self._reported = worker_pb2.WorkerReport()
        self._beats_silent = 0
        self._closed_numbers: list[int] = []
        self._repeats = RepeatLog(log, self._loop.time)
        self._stop: asyncio.Future[float] = self._loop.create_future()
        self._tasks = Tasks(self._loop, log, broken="a worker's task broke off")

    async def run(self) -> None:
        """Until the parent says stop."""
        native = native_front()
        assert native is not None, "the parent has looked"
        self._serving.stand_behind_front(native, 0)
        await self._server.start("127.0.0.1:0")
        self._listen_to_parent()
        collect_seldom()
        self._channel.send(worker_pb2.FromWorker(ready=worker_pb2.WorkerReady()))
        self._report()
        self._tasks.spawn(self._beat_forever())
        log.info("worker ready", pid=os.getpid())
        grace_s = await self._stop
        await asyncio.gather(self._server.stop(grace_s), self._serving.stop())
        await self._serving.close()
        if self._desk is not None:
            self._desk.tell()
        await self._tasks.cancel()
        self._repeats.close()
        await self._channels.close()
        await self._channel.close()

    def _make_desk(self, _node: RouterNode) -> RemoteDesk:
        assert self._desk is not None
        return self._desk

    def _make_metrics(self) -> RouterMetrics | None:
        if self._config.metrics_listen is None:
            return None
        from router.metrics import RouterMetrics

        metrics = RouterMetrics(tuple)
        self._loop_lag.report = metrics.look_at_loop
        return metrics

    def _listen_to_parent(self) -> None:
        channel = self._channel
        channel.on_socket("connection", self._take)
        channel.on("nodes", self._follow_nodes)
        channel.on("lifecycle", self._follow_lifecycle)
        channel.on("siblings", self._follow_siblings)
        channel.on("stop_within_ms", self._begin_to_stop)
        channel.on_question("metrics_wanted", self._tell_metrics)
        channel.on_question("end_former", self._end_former)
        channel.on_long_question("warm", self._warm)

    def _begin_to_stop(self, grace_ms: int) -> None:
        if not self._stop.done():
            self._stop.set_result(grace_ms / 1000)

    def _take(self, news: worker_pb2.NewConnection, sock: socket.socket | None) -> None:
        """From the answer on it is this worker's alone: nothing of it has been read before."""
        self._channel.send(worker_pb2.FromWorker(taken=news.number))
        door, peer = Door(news.door), parse_address(news.peer) if news.peer else None
        if sock is None:
            self._repeats.warning(
                "no descriptor is left for a connection: raise the limit of open files", peer=door.label
            )
            self._closed(news.number)
            return
        if not self._serving.taker.is_able(door):  # it has just been told to take none
            sock.close()
            self._closed(news.number)
            return
        sock.setblocking(False)
        self._serving.taker.take(door, sock, peer, Slot.SURPLUS if news.surplus else Slot.REGULAR, news.number)

    def _closed(self, number: int) -> None:
        if not self._closed_numbers:
            self._loop.call_soon(self._tell_closed)
        self._closed_numbers.append(number)

    def _tell_closed(self) -> None:
        numbers, self._closed_numbers = self._closed_numbers, []
        self._channel.send(worker_pb2.FromWorker(closed=worker_pb2.ClosedConnections(numbers=numbers)))

    def _follow_lifecycle(self, news: worker_pb2.WorkerLifecycle) -> None:
        self._view.follow_lifecycle(news)
        self._server.set_ready(news.ready)
        self._serving.follow_lifecycle(self._view)
        self._report()

    def _follow_nodes(self, news: worker_pb2.NodesKnown) -> None:
        self._serving.node.follow_directory(self._view.follow_nodes(news))
        self._reported = worker_pb2.WorkerReport()  # what is on its way counts from here: as much as before is news too

    def _follow_siblings(self, news: worker_pb2.Siblings) -> None:
        self._serving.node.follow_siblings({Incarnation(each.incarnation): each.tokens for each in news.shares})

    def _tell_metrics(self, _wanted: worker_pb2.MetricsWanted) -> worker_pb2.FromWorker:
        values: dict[str, Any] = dict(self._metrics.figures.values) if self._metrics is not None else {}
        return worker_pb2.FromWorker(metrics=worker_pb2.MetricSamples(values=pickle.dumps(values)))

    def _end_former(self, asked: worker_pb2.EndFormer) -> worker_pb2.FromWorker:
        found = self._serving.node.cut_former(ResumeToken.decode(asked.resume_token), asked.key_name)
        return worker_pb2.FromWorker(former_ended=worker_pb2.FormerEnded(found=found))

    async def _warm(self, wanted: worker_pb2.Warm) -> worker_pb2.FromWorker:
        await self._serving.node.warm(tuple(wanted.prompt), wanted.salt if wanted.HasField("salt") else None)
        return worker_pb2.FromWorker(warm_done=worker_pb2.WarmDone())

    def _report(self) -> None:
        node = self._serving.node
        shares = [worker_pb2.PrefillShare(incarnation=i, tokens=count) for i, count in node.on_their_way().items()]
        report = worker_pb2.WorkerReport(
            requests=self._serving.requests,
            waiting=node.waiting,
            shares=shares,
            loop_lag_ms_max=round(self._loop_lag.max_ms),
            lifecycle=self._view.lifecycle_number,
            grpc_open=self._serving.taker.is_able(Door.GRPC),
        )
        self._beats_silent += 1
        if report != self._reported or self._beats_silent >= REPORT_BEATS_MAX:
            self._reported, self._beats_silent = report, 0
            self._channel.send(worker_pb2.FromWorker(report=report))

    async def _beat_forever(self) -> None:
        """One timer for all that a worker does again and again: each wakes the process, which costs more than the
        work."""
        for number in count(1):
            began_s = self._loop.time()
            await asyncio.sleep(BEAT_MS / 1000)
            self._loop_lag.look(self._loop.time() - began_s - BEAT_MS / 1000)
            if number % UPKEEP_BEATS == 0:
                self._serving.upkeep()
                self._repeats.upkeep()
            self._report()


async def _work(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[worker_pb2.WorkerStart] = loop.create_future()
    channel = WorkerChannel(sock, worker_pb2.FromWorker, worker_pb2.ToWorker, on_lost=_parent_is_gone)
    channel.on("start", first.set_result)
    start = await first
    setup: WorkerSetup = pickle.loads(start.setup)
    set_up_logging(node=f"{setup.config.name}/{start.worker}", level=setup.log_level, log_format=setup.log_format)
    try:
        await Worker(channel, setup).run()
    except BatonError as error:
        log.error("this worker cannot start", problem=error.message)
        sys.exit(1)


def _parent_is_gone(_why: str) -> None:
    os._exit(1)


def main() -> None:
    # A terminal sends its signals to all processes of the router; this one ends when its parent says so.
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.set_int_max_str_digits(INT_DIGITS_MAX)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    WakeReader.one_loop = True
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_work(sock))
    sys.stderr.flush()
    os._exit(0)
