"""What is posted on a writer's link and is not complete. One queue for every transport.

A transport supplies two things. `cut` divides a batch into parts: chunks of a copy, frames of tcp, chains of work
requests. Its lanes carry the parts: threads that copy, streams, queue pairs. All else is here: the bounds check, the
order, grants that are abandoned, the completion of each batch, writes in doubt when a link breaks, and how far a link
has come, by which a drain is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from baton.ids import GrantId
from baton.tasks import call_loop
from kvtransfer.transport import DeviceError, WriteOps, check_ops

Completed = Callable[[GrantId, int, int, bool], None]
"""Called on the loop's thread with (grant, writes, bytes, copied); the figures are those of the posted batch."""

ABANDONED_GRANTS_MAX = 1 << 20
"""Abandoned grants that one link remembers."""


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """A part of a batch; each transport's `cut` adds its own fields."""

    nbytes: int


PartT = TypeVar("PartT", bound=Part)
LoanT = TypeVar("LoanT")
LoanT_co = TypeVar("LoanT_co", covariant=True)


@dataclass(slots=True, kw_only=True, eq=False)
class OpsPart(Part):
    """A part that is copies and nothing else; the arrays are contiguous."""

    ops: WriteOps


@dataclass(slots=True, kw_only=True, eq=False)
class Batch(Generic[PartT]):
    """One post. `left_bytes` are in no part that was taken, `parts_out` were taken and are not over."""

    grant: GrantId
    ops: WriteOps
    total_bytes: int
    parts: Iterator[PartT]
    left_bytes: int
    completed: Completed | None
    """Called in place of the queue's own."""
    late: bool = False
    """It waits for a device to compute its sources, or has: nothing of it is lent to whoever posts."""
    computed: bool = True
    parts_out: int = 0
    copied: bool = True

    @property
    def over(self) -> bool:
        return not self.parts_out and not self.left_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Taken(Generic[PartT]):
    """A part that a lane carries."""

    number: int
    lane: int
    batch: Batch[PartT]
    part: PartT


class Lanes(Protocol[LoanT_co]):
    """What carries a queue's parts. Both are called with the queue's lock held, by any thread, and do not wait."""

    def offer(self, batch: Batch[Any]) -> LoanT_co | None:
        """A batch waits, behind those before it: have it taken. What is returned, whoever posts carries itself.

        What it raises the post raises: the batch was not taken then.
        """

    def stop(self) -> None:
        """Nothing waits any more, and nothing will: wake whoever waits for it."""


class PostQueue(Generic[PartT, LoanT]):
    """Batches of one link, first in first out. Each that is posted ends in one `completed`.

    The queue has no limit of its own: whoever posts bounds the bytes that are not complete. After `stop`, or for an
    abandoned grant, what was not taken completes uncopied, and what was taken completes when its lane is through.

    `lock` is free for the lanes to use: a condition that may be entered again, on which their threads may wait.
    """

    def __init__(
        self,
        cut: Callable[[WriteOps], Iterable[PartT]],
        lanes: Lanes[LoanT],
        *,
        src_nbytes: int,
        dst_nbytes: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        in_doubt: Callable[[GrantId], None] | None = None,
    ) -> None:
        """`cut` is called by whoever posts. Its parts may be lazy: they are asked for one by one, with the lock held.

        `in_doubt` is called on the loop's thread for each grant with parts on their way when the lanes are lost
        (`lose`), before these complete.
        """
        self.lock = threading.Condition()
        self.stopped = False
        self.moved = 0
        """Rises with each part that is over; lanes may add to it. See `BaseWriterLink._mark`."""
        self.writes_copied = 0
        self.bytes_copied = 0
        self.batches_abandoned = 0
        self._cut = cut
        self._lanes = lanes
        self._src_nbytes, self._dst_nbytes = src_nbytes, dst_nbytes
        self._loop = loop
        self._completed = completed
        self._in_doubt = in_doubt
        self._after: Callable[[Callable[[bool], None]], None] | None = None
        self._uncomputed: Callable[[GrantId], object] = self.abandon
        self._waiting: deque[Batch[PartT]] = deque()
        self._out: dict[int, Taken[PartT]] = {}
        self._next_number = 0
        self._abandoned: set[GrantId] = set()
        self._uncompleted: dict[GrantId, int] = {}
        self._lanes_used: dict[GrantId, int] = {}

    def post_behind(
        self, after: Callable[[Callable[[bool], None]], None], uncomputed: Callable[[GrantId], object]
    ) -> None:
        """From now on batches wait for the device that computes their sources. Before the first post.

        For lanes that know of no stream: an RDMA card reads memory at once, whatever a stream has queued.
        `after` is `EventPoster.after`; a batch is taken once that has called back. If it never will, `uncomputed` gets
        the grant, on the loop's thread, and abandons it.
        """
        self._after, self._uncomputed = after, uncomputed

    # Any thread.

    def post(self, grant: GrantId, ops: WriteOps, completed: Completed | None = None) -> LoanT | None:
        """Queue one batch; returns at once. The arrays belong to the queue until it is complete.

        The caller carries what is returned, as its lanes define.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
            DeviceError: neither; the device that computes the sources has failed. Not raised for a batch that an
                `abandon` or `stop` has completed meanwhile.
        """
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        total_bytes = ops.total_bytes
        batch = Batch(
            grant=grant,
            ops=ops,
            total_bytes=total_bytes,
            parts=iter(self._cut(ops)),
            left_bytes=total_bytes,
            completed=completed,
            late=self._after is not None,
            computed=self._after is None,
        )
        with self.lock:
            self._uncompleted[grant] = self._uncompleted.get(grant, 0) + 1
            batch.copied = not (self.stopped or grant in self._abandoned)
            if not batch.copied or not total_bytes:
                self._complete(batch)
                return None
            self._waiting.append(batch)
            if self._after is None:
                try:
                    return self._lanes.offer(batch)
                except BaseException:
                    self._take_back(batch)
                    raise
        self._post_after(batch, self._after)
        return None

    @property
    def batches_waiting(self) -> int:
        """Of which something has not been taken."""
        with self.lock:
            return len(self._waiting)

    def gives_up(self, grant: GrantId) -> bool:
        """Nothing of this grant need be carried any more."""
        with self.lock:
            return self.stopped or grant in self._abandoned

    def finished(self, taken: Taken[PartT], *, copied: bool) -> None:
        """The lane reads nothing of it any more. `copied`: it has landed."""
        with self.lock:
            if self._part_over(taken, copied=copied):
                self._complete(taken.batch)

    @property
    def on_the_way(self) -> bool:
        """Something was taken and is not finished."""
        with self.lock:
            return bool(self._out)

    # For the lanes, with the lock held.

    @property
    def waits(self) -> bool:
        """`take` would give something."""
        return bool(self._waiting) and self._waiting[0].computed

    def waits_alone(self, batch: Batch[PartT]) -> bool:
        """Nothing has been taken of this batch, and no other waits."""
        return len(self._waiting) == 1 and self._waiting[0] is batch and not batch.parts_out

    def take(self, lane: int) -> Taken[PartT] | None:
        """The next part, for this lane to carry until `finished`; None: nothing waits."""
        if not self._waiting or not self._waiting[0].computed:
            return None
        batch = self._waiting[0]
        part = next(batch.parts)
        batch.parts_out += 1
        batch.left_bytes -= part.nbytes
        if not batch.left_bytes:
            self._waiting.popleft()
        self._next_number += 1
        taken = Taken(number=self._next_number, lane=lane, batch=batch, part=part)
        self._out[taken.number] = taken
        self._lanes_used[batch.grant] = self._lanes_used.get(batch.grant, 0) | 1 << lane
        return taken

    # Loop's thread.

    def finished_here(self, takens: Iterable[Taken[PartT]], *, copied: bool) -> None:
        """`finished` for several, without the detour by way of the loop's queue, which costs another turn of it."""
        with self.lock:
            over = [taken.batch for taken in takens if self._part_over(taken, copied=copied)]
            for batch in over:
                self._count(batch)
        if len(over) == 1:
            self._deliver(over[0])
            return
        with contextlib.ExitStack() as every:  # each is reported, whatever another's completion raises
            for batch in reversed(over):
                every.callback(self._deliver, batch)

    def uncompleted(self, grant: GrantId) -> int:
        """Batches of this grant whose `completed` has not been called yet."""
        with self.lock:
            return self._uncompleted.get(grant, 0)

    def lanes_to_seal(self, grant: GrantId) -> int:
        """Which lanes the grant's parts took, as a mask; the first where it took none. Once for each seal."""
        with self.lock:
            return self._lanes_used.pop(grant, 0) or 1

    def abandon(self, grant: GrantId) -> bool:
        """Take nothing more of this grant. Remembered until `forget`.

        False: `ABANDONED_GRANTS_MAX` is reached, and all has been stopped instead. The link has to end, for it must not
        forget one that may still be posted.
        """
        with self.lock:
            self._abandoned.add(grant)
            self._drop(lambda batch: batch.grant == grant)
            if len(self._abandoned) <= ABANDONED_GRANTS_MAX:
                return True
        self.stop()
        return False

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for this grant any more: it need not be remembered as abandoned."""
        with self.lock:
            self._abandoned.discard(grant)
            self._lanes_used.pop(grant, None)

    def lanes_with(self, grant: GrantId) -> list[int]:
        """The lanes that carry something of this grant."""
        with self.lock:
            return sorted({taken.lane for taken in self._out.values() if taken.batch.grant == grant})

    def stop(self) -> None:
        """As `abandon`, for every grant. Idempotent; does not wait. Any thread."""
        with self.lock:
            self.stopped = True
            self._drop(lambda _: True)
            self._lanes.stop()

    def lose(self) -> None:
        """The lanes are gone and read nothing any more: what they had completes, uncopied. Any thread.

        What was not taken has never left. Where the rest is, nobody knows: its grants are in doubt.
        """
        self.stop()
        with self.lock:
            lost = list(self._out.values())
            if self._in_doubt is not None:
                for grant in {taken.batch.grant for taken in lost}:
                    call_loop(self._loop, self._in_doubt, grant)
            for taken in lost:
                self.finished(taken, copied=False)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        with self.lock:
            figures: dict[str, object] = {
                "writes": self.writes_copied,
                "bytes": self.bytes_copied,
                "batches_abandoned": self.batches_abandoned,
            }
            if self._after is not None:
                figures["batches_uncomputed"] = sum(not batch.computed for batch in self._waiting)
            return figures

    # Sources that a device computes.

    def _post_after(self, batch: Batch[PartT], after: Callable[[Callable[[bool], None]], None]) -> None:
        try:
            after(lambda computed: self._when_computed(batch, computed))
        except BaseException as error:
            with self.lock:
                waited = batch in self._waiting
                self._take_back(batch)
            # An abandon or the end may have completed it meanwhile: then it was taken, and is not refused as well.
            if waited or not isinstance(error, DeviceError):
                raise

    def _when_computed(self, batch: Batch[PartT], computed: bool) -> None:
        """On the poster's thread, or, if not computed, on any."""
        if not computed:
            call_loop(self._loop, self._uncomputed, batch.grant)
            return
        with self.lock:
            batch.computed = True
            if batch in self._waiting:
                self._lanes.offer(batch)

    # With the lock held.

    def _take_back(self, batch: Batch[PartT]) -> None:
        """It was not posted, unless it has completed."""
        taken = [number for number, each in self._out.items() if each.batch is batch]
        if not taken and batch not in self._waiting:
            return
        for number in taken:
            del self._out[number]
        with contextlib.suppress(ValueError):
            self._waiting.remove(batch)
        self._discount(batch)

    def _part_over(self, taken: Taken[PartT], *, copied: bool) -> bool:
        """True: so is its batch."""
        del self._out[taken.number]
        self.moved += 1
        batch = taken.batch
        batch.parts_out -= 1
        batch.copied = batch.copied and copied
        return batch.over

    def _drop(self, which: Callable[[Batch[PartT]], bool]) -> None:
        """Take nothing more of these. One of which a part is out completes with the last of them."""
        kept: deque[Batch[PartT]] = deque()
        held_up = bool(self._waiting) and not self._waiting[0].computed
        for batch in self._waiting:
            if not which(batch):
                kept.append(batch)
                continue
            batch.left_bytes, batch.copied = 0, False
            if batch.over:
                self._complete(batch)
        self._waiting = kept
        if held_up and self.waits:
            self._lanes.offer(kept[0])  # offered before, behind one that was not computed

    def _complete(self, batch: Batch[PartT]) -> None:
        self._count(batch)
        call_loop(self._loop, self._deliver, batch)

    def _count(self, batch: Batch[PartT]) -> None:
        if batch.copied:
            self.writes_copied += len(batch.ops.src)
            self.bytes_copied += batch.total_bytes
        else:
            self.batches_abandoned += 1

    def _discount(self, batch: Batch[PartT]) -> None:
        left = self._uncompleted[batch.grant] - 1
        if left:
            self._uncompleted[batch.grant] = left
        else:
            del self._uncompleted[batch.grant]

    # Without it, on the loop's thread.

    def _deliver(self, batch: Batch[PartT]) -> None:
        with self.lock:
            self._discount(batch)
        completed = batch.completed or self._completed
        completed(batch.grant, len(batch.ops.src), batch.total_bytes, batch.copied)
