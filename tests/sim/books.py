"""A ledger's books, watched: what has changed is looked at after every callback of the simulation (I4).

The ledger's own arrays are replaced by ones that tell which blocks were written. Of those each is judged by itself: it
is in one class, it is in the free list if and only if nobody has it, and its writer is a grant that is open here. What
that leaves out (a change that went past the lists, a grant whose blocks were never given) the full recount of `checks`
finds, which comes at longer intervals.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NoReturn

from baton.ids import BlockId, GrantId
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import GrantState

if TYPE_CHECKING:
    from tests.sim.cluster import Process

OVER = (GrantState.FENCED, GrantState.RELEASED, GrantState.COMMITTED)
"""No writer is left."""


class LedgerWatch:
    """What the watched books say, counted apart from the ledger's own sums."""

    def __init__(self, ledger: Ledger, process: Process) -> None:
        self.changed: list[BlockId] = []
        self.free = set(map(BlockId, ledger._free))
        self.promised = 0
        self.doubled: BlockId | None = None
        """A block that was put into the free list twice."""
        self._touched = process.loop.world.touched
        self._process = process
        self._writers: list[GrantId | None] = [None] * ledger.num_blocks
        self._busy = [False] * ledger.num_blocks
        self._idle = ledger.num_blocks
        assert len(self.free) == ledger.num_blocks and not ledger._promises, "to be watched from the start"
        books: Any = ledger
        self._holds = books._holds = _Counts("I", ledger._holds)
        self._writer = books._writer = _Writers(ledger._writer)
        self._cached = books._cached = _Flags(ledger._cached)
        self._quarantined = books._quarantined = _Flags(ledger._quarantined)
        for watched in (self._holds, self._writer, self._cached, self._quarantined):
            watched.watch = self
        books._free = _FreeList("I", ledger._free)
        books._free.watch = self
        books._promises = _Promises(self)

    def touch(self) -> None:
        """To be looked at when the callback under way is over."""
        self._touched[self] = None

    def look(self) -> None:
        """Judge what has changed."""
        changed, self.changed = self.changed, []
        process = self._process
        if not process.alive:
            return
        for block in dict.fromkeys(changed):
            problem = self._judge(block)
            if problem is not None:
                process.cluster.violation(f"{process.name}: block {block}: {problem}")
        if self.doubled is not None:
            process.cluster.violation(f"{process.name}: block {self.doubled} is twice in the free list")
        if self.promised > self._idle:
            process.cluster.violation(f"{process.name}: {self.promised} blocks promised, {self._idle} could be given")

    def _judge(self, block: BlockId) -> str | None:
        holds, writer, cached = self._holds[block], self._writer[block], bool(self._cached[block])
        busy = bool(holds) or writer is not None
        if (busy or cached) is (block in self.free) or holds < 0 or (writer is not None and cached):
            free = block in self.free
            return f"{holds} holds, writer {writer!r}, cached {cached}, in the free list: {free}"
        if writer is None and self._quarantined[block]:
            return "quarantined, and has no writer"
        if busy is not self._busy[block]:
            self._busy[block] = busy
            self._idle += -1 if busy else 1
        before = self._writers[block]
        if before is not writer:
            self._writers[block] = writer
            return self._judge_writers(block, before, writer)
        return None

    def _judge_writers(self, block: BlockId, before: GrantId | None, now: GrantId | None) -> str | None:
        receiver = self._process.receiver
        if receiver is None:
            return f"it has a writer, {now!r}, in a node that grants nothing"
        grants = receiver.grants._grants
        old = grants.get(before) if before is not None else None
        if old is not None and before != now and old.state not in OVER:
            return f"its writer {before!r} is gone, whose grant is {old.state}"
        new = grants.get(now) if now is not None else None
        if now is not None and (new is None or new.state in OVER or block not in new.blocks):
            return f"its writer is {now!r}, whose grant is {new!r}"
        return None


def _never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a change that is not watched")


class _Watched:
    """A value for each block."""

    watch: LedgerWatch

    def noted(self, block: BlockId) -> None:
        watch = self.watch
        if not watch.changed:
            watch.touch()
        watch.changed.append(block)

    append = extend = insert = remove = clear = sort = reverse = pop = __delitem__ = __iadd__ = _never


class _Writers(_Watched, list[Any]):
    def __setitem__(self, block: Any, value: Any, _set: Any = list.__setitem__) -> None:
        _set(self, block, value)
        self.noted(block)


class _Flags(_Watched, bytearray):
    def __setitem__(self, block: Any, value: Any, _set: Any = bytearray.__setitem__) -> None:
        _set(self, block, value)
        self.noted(block)


class _Counts(_Watched, array):  # type: ignore[type-arg]
    def __setitem__(self, block: Any, value: Any, _set: Any = array.__setitem__) -> None:
        _set(self, block, value)
        self.noted(block)


class _FreeList(array):  # type: ignore[type-arg]
    """Which of these blocks are in it is kept apart."""

    watch: LedgerWatch

    def append(self, block: Any) -> None:
        watch = self.watch
        super().append(block)
        if block in watch.free:
            watch.doubled = block
        watch.free.add(block)
        watch.touch()
        watch.changed.append(block)

    def pop(self, index: Any = -1) -> BlockId:
        watch = self.watch
        block = BlockId(super().pop(index))
        watch.free.discard(block)
        watch.touch()
        watch.changed.append(block)
        return block

    extend = fromlist = frombytes = insert = remove = clear = reverse = _never
    __setitem__ = __delitem__ = __iadd__ = _never


class _Promises(dict[Hashable, int]):
    """Their sum is kept apart."""

    def __init__(self, watch: LedgerWatch) -> None:
        super().__init__()
        self._watch = watch

    def __setitem__(self, key: Hashable, count: int) -> None:
        watch = self._watch
        watch.promised += count - self.get(key, 0)
        super().__setitem__(key, count)
        watch.touch()

    def pop(self, key: Hashable, default: Any = None) -> Any:
        left = super().pop(key, default)
        self._watch.promised -= left or 0
        self._watch.touch()
        return left

    update = setdefault = popitem = clear = __delitem__ = __ior__ = _never
