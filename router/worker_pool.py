"""The workers of a router, as their parent has them: processes that serve the connections which they are given.

The parent tells them what the cluster is like and where the router is in its life, and adds up what they report. What
one has on its way to prefill nodes the others hear of within two reports, so that they do not all choose the same node.
A connection is the parent's until the worker has taken it: if the worker dies before, another one gets it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batonpb import worker_pb2

from baton.clock import Clock
from baton.endpoint import Address
from baton.errors import BatonError, Reason
from baton.http2_front import native_front
from baton.ids import NodeName
from baton.lifecycle import Readiness
from baton.log import get_log, logging_set_up
from baton.tasks import Tasks
from baton.wire import ModelInfo, NodeRecord, Role, record_to_proto
from cachestore.holder_index import HolderIndex
from router.config import RouterConfig
from router.doors import Door, Doors
from router.http_slots import Slot
from router.prefill_nodes import PrefillNodes
from router.supervision import Kill, Supervision
from router.worker import WorkerSetup
from router.worker_channel import WorkerChannel
from router.worker_keys import KeyCounter, WorkerKeys

if TYPE_CHECKING:
    from router.metrics import Figures

log = get_log("workers")

TICK_MS: Final = 200
"""Between two looks for workers that have stopped, or are to be started again."""
SIBLINGS_MS: Final = 100
"""How long news of what the others have on their way waits for more of it."""
METRICS_MS_MAX: Final = 500
"""How long a worker may take to say what it has counted; then what it said last counts."""
LAST_WORDS_MS_MAX: Final = 1_000
"""How long what a worker has written may take to be read once the process has ended."""
STOP_MARGIN_S: Final = 7.0
"""Beyond the grace time: for handlers that end late."""
_COMMAND: Final = (sys.executable, "-P", "-c", "from router.worker import main; main()")
"""-P: a folder of the user's that is called router is not ours."""
_Channel = WorkerChannel[worker_pb2.ToWorker, worker_pb2.FromWorker]


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess:
    """One process, from its start to its end."""

    number: int
    process: asyncio.subprocess.Process
    channel: _Channel
    able: Callable[[], bool]
    lost: asyncio.Event
    """Nothing more comes from it."""
    keys: WorkerKeys | None
    ready: bool = False
    stopping: bool = False
    report: worker_pb2.WorkerReport = field(default_factory=worker_pb2.WorkerReport)
    siblings: dict[int, int] = field(default_factory=dict)
    """What it was told that the others have on their way."""
    told: dict[NodeName, NodeRecord] = field(default_factory=dict)
    trouble: str = ""
    """Of the directory, as it was told."""
    untaken: dict[int, socket.socket] = field(default_factory=dict)
    """Connections given to it, by number, that are not its own yet."""
    values: Any = field(default_factory=dict)
    """What it has counted, as it last said."""

    def is_able(self, door: Door) -> bool:
        return self.able() and (door is Door.HTTP or self.report.grpc_open)

    def take(self, door: Door, sock: socket.socket, peer: Address | None, slot: Slot, number: int) -> None:
        self.untaken[number] = sock
        connection = worker_pb2.NewConnection(
            number=number, door=door.value, peer="" if peer is None else str(peer), surplus=slot is Slot.SURPLUS
        )
        self.channel.send(worker_pb2.ToWorker(connection=connection), sock)


class WorkerPool:
    """Lives on the parent's loop. Call `start` once, and `stop` at the end."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        folder: Path | None,
        doors: Doors,
        lifecycle: Readiness,
        clock: Clock,
        keys: KeyCounter | None,
        check_known: Callable[[], None],
        directory_trouble: Callable[[], str],
    ) -> None:
        """`folder` is the model's. `keys` is None where none are needed. `check_known` and `directory_trouble` as
        for `Serving`."""
        self._config = config
        self._doors = doors
        self._lifecycle = lifecycle
        self._lifecycle_number = 0
        self._clock = clock
        self._keys = keys
        self._check_known = check_known
        self._directory_trouble = directory_trouble
        level, log_format = logging_set_up()
        self._setup = pickle.dumps(WorkerSetup(config=config, folder=folder, log_level=level, log_format=log_format))
        self._supervision = Supervision(config.workers, now_s=clock.monotonic_s())
        self._workers: dict[int, WorkerProcess] = {}
        self._records: Sequence[NodeRecord] = ()
        self._nodes = PrefillNodes(HolderIndex(), clock.monotonic_s)
        loop = asyncio.get_running_loop()
        self._all_ready: asyncio.Future[None] = loop.create_future()
        self._tasks = Tasks(loop, log, broken="a worker is no longer watched")
        self._ticking = Tasks(loop, log, broken="workers are no longer watched")
        self._stopping = False
        self._loop = loop
        self._telling_siblings: asyncio.TimerHandle | None = None
        self.ended = 0
        """Workers that have ended unasked."""
        self.dead_figures: Figures | None = None
        """What workers that have ended had counted; None: nobody wants to know."""

    async def start(self) -> None:
        """Start all, and wait until they are ready. Raises BatonError where one cannot, or where there is no C
        compiler."""
        if await asyncio.to_thread(native_front) is None:
            text = "More than one worker needs a C compiler (cc): install one, or set workers to 1."
            raise BatonError(Reason.BAD_CONFIG, text, field="workers")
        self._ticking.spawn(self._tick_forever())
        await self._all_ready

    async def stop(self) -> None:
        """Give running answers the grace time, and end all. Idempotent."""
        self._supervision.stop()
        self._stopping = True
        grace_ms = self._config.stop_grace_ms
        for worker in self._workers.values():
            if worker.ready:
                worker.stopping = True
                worker.channel.send(worker_pb2.ToWorker(stop_within_ms=grace_ms))
            else:
                _end_early(worker)
        await self._tasks.drain(grace_ms + 1000 * STOP_MARGIN_S)
        await self._ticking.cancel()
        await self._tasks.cancel()
        if self._telling_siblings is not None:
            self._telling_siblings.cancel()
        self._all_ready.cancel()

    # What they do.

    @property
    def requests(self) -> int:
        """Of all of them. One that has not heard of the last change of the lifecycle may still take one."""
        return sum(self._requests(worker) for worker in self._workers.values() if worker.ready)

    def _requests(self, worker: WorkerProcess) -> int:
        up_to_date = worker.report.lifecycle == self._lifecycle_number
        return max(worker.report.requests, 0 if up_to_date else 1)

    @property
    def ready(self) -> int:
        """Workers that serve, or would."""
        return sum(worker.ready for worker in self._workers.values())

    @property
    def waiting(self) -> int:
        return sum(worker.report.waiting for worker in self._workers.values())

    @property
    def loop_lag_ms_max(self) -> int:
        return max((worker.report.loop_lag_ms_max for worker in self._workers.values()), default=0)

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        return self._nodes.model()

    async def warm(self, prompt: Sequence[int], salt: str | None) -> None:
        """Compute a prompt under a salt, by way of one of the workers. Raises BatonError."""
        able = [worker for worker in self._workers.values() if worker.able()]
        if not able:
            raise BatonError(Reason.PEER_UNREACHABLE, "No worker of this router is ready.", retry_after_ms=1_000)
        worker = min(able, key=lambda each: each.report.requests)
        try:
            async with asyncio.timeout(self._config.rpc.public_deadline_ms_default / 1e3):
                await worker.channel.ask(worker_pb2.ToWorker(warm=worker_pb2.Warm(prompt=prompt, salt=salt)))
        except TimeoutError as error:
            raise BatonError(Reason.DEADLINE, "A worker did not compute the prompt in time.") from error

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values()]

    async def fetch_figures(self) -> list[Any]:
        """What all have counted, those that have ended too."""
        await asyncio.gather(*(self._fetch(worker) for worker in list(self._workers.values())))
        # A copy: a worker that ends while these are added up would count twice.
        dead = [] if self.dead_figures is None else [deepcopy(self.dead_figures.values)]
        return [*dead, *(worker.values for worker in self._workers.values())]

    async def _fetch(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            return
        with suppress(TimeoutError, BatonError):
            async with asyncio.timeout(METRICS_MS_MAX / 1e3):
                wanted = worker_pb2.ToWorker(metrics_wanted=worker_pb2.MetricsWanted())
                worker.values = pickle.loads((await worker.channel.ask(wanted)).values)

    # What they are told.

    def follow_directory(self, records: Sequence[NodeRecord]) -> None:
        self._records = records
        self._nodes.follow([record for record in records if record.role.serves(Role.PREFILL)])
        for worker in self._workers.values():
            self._tell_nodes(worker)

    def follow_lifecycle(self) -> None:
        self._lifecycle_number += 1
        for worker in self._workers.values():
            self._tell_lifecycle(worker)

    def upkeep(self) -> None:
        """Every second."""
        for worker in self._workers.values():
            if worker.trouble or self._directory_trouble():
                self._tell_nodes(worker)

    def _tell_nodes(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            return
        changed = [record for record in self._records if worker.told.get(record.name) != record]
        worker.told = {record.name: record for record in self._records}
        worker.siblings = {}  # a node's new report may have the worker begin to count anew
        worker.trouble = self._directory_trouble()
        news = worker_pb2.NodesKnown(
            changed=map(record_to_proto, changed), names=list(worker.told), trouble=worker.trouble
        )
        try:
            self._check_known()
        except BatonError as error:
            news.refusal_reason, news.refusal = error.reason.value, error.message
            news.refusal_retry_after_ms = error.retry_after_ms or 0
        worker.channel.send(worker_pb2.ToWorker(nodes=news))

    def _tell_lifecycle(self, worker: WorkerProcess) -> None:
        if worker.ready and self._lifecycle_number:
            news = worker_pb2.WorkerLifecycle(
                ready=self._lifecycle.ready,
                takes_requests=self._lifecycle.takes_requests,
                number=self._lifecycle_number,
            )
            worker.channel.send(worker_pb2.ToWorker(lifecycle=news))

    def _tell_siblings_soon(self) -> None:
        if self._telling_siblings is None:
            self._telling_siblings = self._loop.call_later(SIBLINGS_MS / 1000, self._tell_siblings)

    def _tell_siblings(self) -> None:
        """Each what all others have on their way, where it does not know."""
        self._telling_siblings = None
        total: Counter[int] = Counter()
        for worker in self._workers.values():
            total.update({share.incarnation: share.tokens for share in worker.report.shares})
        for worker in self._workers.values():
            own = {share.incarnation: share.tokens for share in worker.report.shares}
            others = {i: left for i, count in total.items() if (left := count - own.get(i, 0))}
            if worker.ready and others != worker.siblings:
                worker.siblings = others
                shares = [worker_pb2.PrefillShare(incarnation=i, tokens=n) for i, n in others.items()]
                worker.channel.send(worker_pb2.ToWorker(siblings=worker_pb2.Siblings(shares=shares)))

    # How they live.

    async def _tick_forever(self) -> None:
        while True:
            self._tick()
            await self._clock.sleep_s(TICK_MS / 1000)

    def _tick(self) -> None:
        for due in self._supervision.tick(self._clock.monotonic_s()):
            if isinstance(due, Kill):
                worker = self._workers.get(due.worker)
                log.error("a worker is killed", worker=due.worker, pid=worker and worker.process.pid, why=due.why)
                if worker is not None:  # else its process is being made: `_live` kills it
                    _kill(worker.process)
            else:
                self._tasks.spawn(self._live(due.worker))

    async def _live(self, number: int) -> None:
        """One worker, from its start to its end."""
        try:
            worker = await self._spawn(number)
        except OSError as error:
            log.error("a worker cannot be started", worker=number, problem=error.strerror)
            self._fail_start(number)
            self._supervision.died(number, self._clock.monotonic_s())
            return
        if self._stopping:
            _end_early(worker)
        elif self._supervision.killed(number):
            _kill(worker.process)
        try:
            await worker.process.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_MS_MAX / 1e3):
                    await worker.lost.wait()
        finally:
            _kill(worker.process)
            await worker.channel.close()
            await worker.process.wait()
            self._bury(worker)
        self._tick()

    async def _spawn(self, number: int) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_COMMAND, str(theirs.fileno()), pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL
                )
            except BaseException:
                ours.close()
                raise
        lost = asyncio.Event()

        def on_lost(_why: str) -> None:
            lost.set()
            _kill(process)

        channel = WorkerChannel(ours, worker_pb2.ToWorker, worker_pb2.FromWorker, on_lost=on_lost)
        worker = self._workers[number] = WorkerProcess(
            number=number,
            process=process,
            channel=channel,
            able=lambda: channel.open and self._supervision.able(number, self._clock.monotonic_s()),
            lost=lost,
            keys=self._keys.add(channel) if self._keys is not None else None,
        )
        channel.on("ready", lambda _ready: self._is_ready(worker))
        channel.on("report", lambda report: self._take_report(worker, report))
        channel.on("taken", lambda taken: worker.untaken.pop(taken).close())
        channel.on("closed", self._take_closed)
        start = worker_pb2.WorkerStart(setup=self._setup, worker=number)
        channel.send(worker_pb2.ToWorker(start=start))
        return worker

    def _is_ready(self, worker: WorkerProcess) -> None:
        worker.ready = True
        self._supervision.heard(worker.number, self._clock.monotonic_s())
        if worker.keys is not None:
            worker.keys.begin()
        self._tell_nodes(worker)
        self._tell_lifecycle(worker)
        self._tell_siblings_soon()
        self._doors.add(worker)
        if not self._all_ready.done() and sum(each.ready for each in self._workers.values()) == self._config.workers:
            self._all_ready.set_result(None)

    def _take_closed(self, closed: worker_pb2.ClosedConnections) -> None:
        for number in closed.numbers:
            self._doors.closed(number)

    def _take_report(self, worker: WorkerProcess, report: worker_pb2.WorkerReport) -> None:
        if not worker.ready:
            return
        if report.shares or worker.report.shares:
            self._tell_siblings_soon()
        worker.report = report
        self._supervision.heard(worker.number, self._clock.monotonic_s())
        self._doors.resume()

    def _bury(self, worker: WorkerProcess) -> None:
        """Its connections are over, but for those that it had not taken."""
        del self._workers[worker.number]
        self._tell_siblings_soon()  # what it had sent counts no more
        if worker.keys is not None:
            worker.keys.end()
        self._supervision.died(worker.number, self._clock.monotonic_s())
        if not worker.stopping:
            self.ended += 1
            code = worker.process.returncode
            log.error("a worker has ended", worker=worker.number, pid=worker.process.pid, code=code)
        if self.dead_figures is not None:
            self.dead_figures.include([worker.values], gauges=False)
        if not worker.ready:
            self._fail_start(worker.number)
            return
        for number in self._doors.remove(worker):
            sock = worker.untaken.get(number)
            if sock is None:
                self._doors.closed(number)
            else:
                self._doors.take_again(number, sock)

    def _fail_start(self, number: int) -> None:
        if not self._all_ready.done():
            text = f"Worker {number} of this router ended before it was ready. The log says why."
            self._all_ready.set_exception(BatonError(Reason.INTERNAL, text))


def _end_early(worker: WorkerProcess) -> None:
    """It has no clients yet, and understands nothing but its start."""
    worker.stopping = True
    _kill(worker.process)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        if process.returncode is None:
            process.kill()
