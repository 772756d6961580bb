"""Where requests wait for their turn: the line, on the router's loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role
from router.config import RouterConfig
from router.job import Job
from router.line import AHEAD_MAX, TOKEN_BYTES, Line, Place, Priority, Stage


class WaitingLine:
    """Control thread only."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self._loop = asyncio.get_running_loop()
        # Each worker of a router has its share, rounded up.
        self._book = Line(
            out_max=-(-config.requests_max // config.workers),
            requests_max=-(-config.line_requests_max // config.workers),
            ahead_max=-(-AHEAD_MAX // config.workers),
            pause_ms=config.placement_retry_ms,
            rng=rng,
        )
        self._turns: dict[Place, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return self._book.waiting

    def enter(self, priority: Priority, size_bytes: int, *, comes_back: bool = False) -> Place:
        """A request has come, or `comes_back` for its answer. Raises BatonError TOO_MANY_CALLS where the line is
        full."""
        return self._book.enter(priority, size_bytes, self._loop.time(), comes_back=comes_back)

    async def first(self, job: Job) -> None:
        """Wait for the turn of a request that has been checked. Raises BatonError DEADLINE, and TOO_MANY_CALLS where
        the line is full."""
        self._book.wait(job.place, job.place.size_bytes + TOKEN_BYTES * len(job.checked.prompt))
        await self._turn(job)

    def skip(self, place: Place) -> None:
        """It does not wait: nodes have it already, or its client has the beginning of its answer."""
        self._book.skip(place)

    async def again(self, job: Job) -> None:
        """Wait for the turn of a request that nodes have no room for. Raises BatonError DEADLINE."""
        self._book.refused(job.place, self._loop.time())
        await self._turn(job)

    async def _turn(self, job: Job) -> None:
        place, began_s = job.place, self._loop.time()
        self._go()
        if place.stage is not Stage.WAITING:
            return
        turn = self._turns[place] = self._loop.create_future()
        job.observed.waits()
        try:
            async with asyncio.timeout_at(job.call.deadline_s):
                await turn
        except TimeoutError as error:
            text = "The request's deadline has passed while it waited in line for room on the nodes."
            raise BatonError(Reason.DEADLINE, text) from error
        finally:
            del self._turns[place]
            waited_s = self._loop.time() - began_s
            job.stats.line_ms += waited_s * 1000
            job.observed.waited(waited_s)

    def placed(self, place: Place) -> None:
        """A node has taken it."""
        self._book.placed(place)
        self._go()

    def searches(self, place: Place) -> None:
        """It looks for a node that is there."""
        self._book.searches(place)
        self._go()

    def leave(self, place: Place) -> None:
        """It is over."""
        self._book.leave(place)
        self._go()

    def follow(self, records: Sequence[NodeRecord]) -> None:
        """What the directory says."""
        ready = [record for record in records if record.lifecycle is Lifecycle.READY]
        self._book.prefill_nodes = sum(record.role.serves(Role.PREFILL) for record in ready)
        decode_nodes = [record for record in ready if record.role.serves(Role.DECODE)]
        self._book.reported({record.incarnation: _room(record) for record in decode_nodes})
        self._go()

    def _go(self) -> None:
        """Let those go whose turn it is."""
        for place in self._book.go(self._loop.time()):
            turn = self._turns.get(place)
            if turn is not None and not turn.done():  # else its task asks next, or is ending
                turn.set_result(None)
        wake_s = self._book.wake_s
        if self._timer is not None and self._timer.when() != wake_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and wake_s is not None:
            self._timer = self._loop.call_at(wake_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._go()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _room(record: NodeRecord) -> tuple[int, int]:
    """Blocks that new requests could have there; and the fewer run there, the more places are free."""
    blocks = record.load.blocks
    return blocks.free + blocks.cached - blocks.pinned - blocks.promised, -record.load.running_requests
