"""Carries out what `SpillPolicy` decides: whose blocks leave the device, where they are, and how they come back.

Control thread only, but for the copies themselves. Between two steps the engine asks (`before_step`); nothing of a
parked sequence is in a step, so its blocks can be copied beside the steps of the others.

A parked sequence's table is a list of `_Unit`s: one block's worth of content, on the device or in host memory, with all
the parked sequences that hold it. A unit is copied out only when nobody but parked sequences holds its block: what a
running one shares stays. A unit that comes back comes back for all its holders. And a full block whose content the
prefix cache still has (or has again) is taken from there instead of being copied.

A copy under way owns its block on either side, as a remote writer does: a sequence that ends meanwhile leaves its
references behind, to be dropped when the copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum

from baton.config import fixed
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.ids import BlockId, RequestKey
from baton.runtime import Progress
from cachestore.block_manager import BlockManager
from cachestore.host_blocks import HostBlockId, HostBlocks
from cachestore.layout import Layout
from cachestore.ledger import ConservationError, Ledger
from cachestore.spill_policy import (
    CopiesDone,
    CopyBack,
    CopyOut,
    Park,
    SequenceLeft,
    SpillEvent,
    SpillPolicy,
    SpillState,
    Standing,
    StepComes,
    Unpark,
)
from engine.core import Engine
from engine.sequence import Sequence
from kvtransfer.device.driver import DeviceError, PinnedMemory
from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from node.copiers import BlockCopier, BlockCopy, BlockPlaces, RegionCopier, StreamCopier, ThreadCopier
from node.regions import PoolRegion, let_go, on_thread, open_host_region

HOST_BLOCKS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillConfig:
    """Overcommit of the device pool, and the host memory behind it."""

    host_blocks: int = field(
        default=0,
        metadata={
            "help": "blocks of host memory that sequences of a decode node may be swapped out to; 0: no overcommit",
            "when": "Answers are shorter than their limits, and more of them should run than fit in the worst case.",
        },
    )
    headroom_blocks: int = field(
        default=4,
        metadata={
            "help": "blocks that each running sequence should find free after one is swapped out, and before "
            "one comes back",
            "when": "Sequences are swapped out and in again all the time (raise it).",
        },
    )
    pinned_bytes_max: int = field(
        default=64 << 30,
        metadata={
            "help": "bytes that host_blocks may take where the region is on a GPU: all of them are pinned, "
            "for no other use",
            "when": "host_blocks is refused although the machine has the memory.",
        },
    )
    copy_blocks_max: int = fixed(64)
    """Blocks of one copy; a longer one is cut."""

    def __post_init__(self) -> None:
        check_positive(self, "headroom_blocks", "copy_blocks_max", "pinned_bytes_max")
        if not 0 <= self.host_blocks <= HOST_BLOCKS_MAX:
            raise InvalidField("host_blocks", f"is {self.host_blocks}; must be 0 (off) to {HOST_BLOCKS_MAX}")
        if self.host_blocks and self.host_blocks <= self.reserve_blocks:
            raise InvalidField(
                "host_blocks",
                f"is {self.host_blocks}; must be 0 (off) or more than headroom_blocks ({self.headroom_blocks}), which "
                "are kept as a reserve to swap through",
            )

    @property
    def reserve_blocks(self) -> int:
        """Not admitted against: without it a full device and full host memory could not trade places."""
        return self.headroom_blocks


class _Way(Enum):
    OUT = "out"
    BACK = "back"


@dataclass(slots=True, eq=False)
class _Parked:
    seq: Sequence
    units: list[_Unit] = field(default_factory=list)
    copies: int = 0
    """Copies under way that were begun for it."""


@dataclass(slots=True, eq=False)
class _Unit:
    """On the device when `device` is set, else in host memory; in a copy, both are. Each holder has one reference."""

    device: BlockId | None
    host: HostBlockId | None = None
    holders: list[_Parked] = field(default_factory=list)
    copying: _Way | None = None
    left_behind: int = 0
    """References of sequences that ended during the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillFigures:
    """A snapshot; the last four are totals since the start, in blocks."""

    parked: int
    host_free: int
    host_copying: int
    host_filled: int
    parked_total: int
    copied_out: int
    copied_back: int
    merged: int
    """Blocks that came back without a copy."""


class Spill:
    """Overcommit of one engine: implements `engine.scheduler.Overcommit`."""

    def __init__(
        self,
        *,
        config: SpillConfig,
        engine: Engine,
        blocks: BlockManager,
        ledger: Ledger,
        copier: BlockCopier,
    ) -> None:
        """Takes the engine over as its `overcommit`. Nothing is parked or copied yet."""
        self.config = config
        self.changed: Callable[[], None] = lambda: None
        """Called when copies have ended: the engine may have something to do."""
        self._engine = engine
        self._blocks = blocks
        self._ledger = ledger
        self._copier = copier
        self._host = HostBlocks(config.host_blocks)
        self._policy = SpillPolicy(headroom_blocks=config.headroom_blocks)
        self._parked: dict[RequestKey, _Parked] = {}
        self._on_device: dict[BlockId, _Unit] = {}
        self._runners: dict[RequestKey, Sequence] = {}
        self._freeing = 0
        self._broken: BaseException | None = None
        self._parked_total = self._merged = 0
        self._copied = dict.fromkeys(_Way, 0)
        self._set_host_room()
        engine.overcommit(self)

    @property
    def figures(self) -> SpillFigures:
        return SpillFigures(
            parked=len(self._parked),
            host_free=self._host.free,
            host_copying=self._host.copying,
            host_filled=self._host.filled,
            parked_total=self._parked_total,
            copied_out=self._copied[_Way.OUT],
            copied_back=self._copied[_Way.BACK],
            merged=self._merged,
        )

    def report(self, block_bytes: int) -> dict[str, int]:
        """The same in words, for the node's status; `block_bytes` is the size of one block in all layers."""
        figures = self.figures
        return {
            "sequences parked": figures.parked,
            "sequences parked since start": figures.parked_total,
            "host blocks": self._host.num_blocks,
            "host blocks free": figures.host_free,
            "host blocks filled": figures.host_filled,
            "host blocks in a copy": figures.host_copying,
            "bytes copied out": figures.copied_out * block_bytes,
            "bytes copied back": figures.copied_back * block_bytes,
            "blocks back without a copy": figures.merged,
        }

    @property
    def busy(self) -> bool:
        """Sequences are parked: nothing new should be taken in until they are back."""
        return bool(self._parked)

    def headroom(self) -> int:
        """Blocks that the running sequences should find free, beside what a new one takes."""
        seqs = [seq for seq in self._runners.values() if seq.key not in self._parked]
        return sum(min(self.config.headroom_blocks, self._promise_left(seq)) for seq in seqs)

    def state_of(self, key: RequestKey) -> SpillState | None:
        return self._policy.state_of(key)

    # What the engine tells (Overcommit).

    def before_step(self, runners: Several[Sequence]) -> None:
        """See `Overcommit.before_step`. Raises what a copy broke off with: the device has failed, or it is a bug of
        ours. Where its blocks' content is nobody knows then, so the engine cannot go on."""
        if self._broken is not None:
            raise self._broken
        self._runners = {seq.key: seq for seq in runners}
        needs = {seq.key: int(self._engine.needs_block(seq)) for seq in runners}
        pressure = sum(needs.values()) > self._ledger.growable + self._freeing
        self._handle(
            StepComes(
                growable=max(0, self._ledger.growable),
                freeing=self._freeing,
                host_free=self._host.free,
                runners=tuple(self._running(seq, needs[seq.key], pressure) for seq in runners),
                parked=tuple(self._standing(each, pressure or not runners) for each in self._parked.values()),
            )
        )

    def lets_step(self, runners: Several[Sequence]) -> bool:
        """See `Overcommit.lets_step`: nobody is parked, and there is room for all that the runners need."""
        if self._broken is not None or self._parked:
            return False
        self._runners = {seq.key: seq for seq in runners}
        return sum(map(self._engine.needs_block, runners)) <= self._ledger.growable

    def parked(self, seq: Sequence) -> None:
        """See `Overcommit.parked`."""
        parked = self._parked[seq.key] = _Parked(seq)
        for block in seq.block_table:
            unit = self._on_device.setdefault(block, _Unit(block))
            unit.holders.append(parked)
            parked.units.append(unit)
        seq.block_table.clear()
        self._parked_total += 1

    def left(self, seq: Sequence) -> None:
        """See `Overcommit.left`."""
        self._runners.pop(seq.key, None)
        self._handle(SequenceLeft(key=seq.key))
        parked = self._parked.pop(seq.key, None)
        for unit in parked.units if parked is not None else ():
            assert parked is not None
            unit.holders.remove(parked)
            if unit.copying:
                unit.left_behind += 1
            elif unit.device is not None:
                self._blocks.release([unit.device])
                self._forget_if_unheld(unit)
            elif not unit.holders:
                self._free_host(unit)
        self._set_host_room()

    def check(self) -> None:
        """Recount host memory and where everything parked is. Raises ConservationError."""
        self._host.check()
        units = {id(unit): unit for parked in self._parked.values() for unit in parked.units}.values()
        filled = sum(unit.device is None for unit in units)
        if filled != self._host.filled:
            raise ConservationError(f"{filled} blocks are in host memory, {self._host.filled} by its books")
        for unit in units:
            if unit.device is not None and self._ledger.holders(unit.device) < len(unit.holders):
                raise ConservationError(f"block {unit.device} has lost references of parked sequences")
        if self._ledger.host_room != self._room():
            raise ConservationError(f"host room {self._ledger.host_room} in the ledger, {self._room()} here")

    # What the policy instructs.

    def _handle(self, event: SpillEvent) -> None:
        for instruction in self._policy.handle(event):
            match instruction:
                case Park(key=key):
                    self._engine.park(self._runners.pop(key))
                case CopyOut(key=key, blocks=blocks):
                    self._copy_out(self._parked[key], blocks)
                case CopyBack(key=key, blocks=blocks):
                    self._copy_back(self._parked[key], blocks)
                case Unpark(key=key):
                    self._unpark(self._parked.pop(key))

    def _copy_out(self, parked: _Parked, count: int) -> None:
        units = [unit for unit in reversed(parked.units) if self._may_leave(unit)][:count]
        hosts = self._host.begin_out(len(units))
        for unit, host in zip(units, hosts, strict=True):
            unit.host, unit.copying = host, _Way.OUT
        self._freeing += len(units)
        self._start(parked, units, _Way.OUT)

    def _copy_back(self, parked: _Parked, count: int) -> None:
        count -= self._merge(parked, count)
        absent = [unit for unit in parked.units if unit.device is None][:count]
        for unit in absent:
            assert unit.host is not None
            self._host.begin_back(unit.host)
        self._set_host_room()
        for unit, block in zip(absent, self._blocks.allocate(len(absent)), strict=True):
            self._put_on_device(unit, block)
            self._blocks.hold([block] * (len(unit.holders) - 1))
            unit.copying = _Way.BACK
        self._start(parked, absent, _Way.BACK)

    def _unpark(self, parked: _Parked) -> None:
        for unit in parked.units:
            assert unit.device is not None and unit.copying is None, parked.seq.key
            unit.holders.remove(parked)
            self._forget_if_unheld(unit)
            parked.seq.block_table.append(unit.device)
        self._engine.unpark(parked.seq)

    # Copies.

    def _start(self, parked: _Parked, units: list[_Unit], way: _Way) -> None:
        most = self.config.copy_blocks_max
        pieces = [units[start : start + most] for start in range(0, len(units), most)]
        parked.copies += len(pieces)
        for piece in pieces:
            copy = BlockCopy(
                out=way is _Way.OUT,
                device=tuple(unit.device for unit in piece if unit.device is not None),
                host=tuple(unit.host for unit in piece if unit.host is not None),
            )
            self._copier.start(copy, lambda error, piece=piece: self._ended(parked, piece, way, error))  # type: ignore[misc]
        if parked.copies == 0:
            self._tell_done(parked)

    def _ended(self, parked: _Parked, units: list[_Unit], way: _Way, error: BaseException | None) -> None:
        if error is not None:
            self._broken = error
            self.changed()
            return
        for unit in units:
            unit.copying = None
            assert unit.device is not None
            self._blocks.release([unit.device] * unit.left_behind)
            unit.left_behind = 0
            if way is _Way.OUT:
                self._is_out(unit)
            else:
                self._free_host(unit)
                self._forget_if_unheld(unit)
        self._copied[way] += len(units)
        self._freeing -= len(units) if way is _Way.OUT else 0
        self._set_host_room()
        parked.copies -= 1
        if parked.copies == 0:
            self._tell_done(parked)
        self.changed()

    def _is_out(self, unit: _Unit) -> None:
        assert unit.device is not None and unit.host is not None
        wanted_here = self._ledger.holders(unit.device) > len(unit.holders) or self._ledger.is_pinned(unit.device)
        if not unit.holders or wanted_here:
            # All have ended; or somebody has found the block in the prefix cache meanwhile, or pinned it: it stays.
            self._free_host(unit)
            self._forget_if_unheld(unit)
            return
        self._host.fill(unit.host)
        self._blocks.release([unit.device] * len(unit.holders))
        del self._on_device[unit.device]
        unit.device = None

    def _tell_done(self, parked: _Parked) -> None:
        if self._parked.get(parked.seq.key) is parked:
            absent = sum(unit.device is None or unit.copying is not None for unit in parked.units)
            self._handle(CopiesDone(key=parked.seq.key, absent=absent))

    def _merge(self, parked: _Parked, blocks_max: int) -> int:
        """Take from the prefix cache what it has of the absent full blocks. How many those were."""
        seq, merged = parked.seq, 0
        if blocks_max == 0:
            return 0
        cached = self._blocks.match(seq.tokens, seq.cache_salt, seq.computed // self._blocks.block_size)
        for unit, block in zip(parked.units, cached, strict=False):
            if merged < blocks_max and unit.device is None and block not in self._on_device:
                self._blocks.hold([block] * len(unit.holders))
                self._free_host(unit)
                self._put_on_device(unit, block)
                merged += 1
        self._merged += merged
        self._set_host_room()
        return merged

    def _may_leave(self, unit: _Unit, others: int = 0) -> bool:
        """Only parked sequences (and `others` more that are about to be) hold it, none that is coming back, no pin.

        A pinned block stays on the device whoever holds it: copying it out would free nothing.
        """
        if unit.device is None or unit.copying or self._ledger.is_pinned(unit.device):
            return False
        if self._ledger.holders(unit.device) != len(unit.holders) + others:
            return False
        return all(self._policy.state_of(each.seq.key) is not SpillState.RETURNING for each in unit.holders)

    def _is_only_mine(self, block: BlockId) -> bool:
        """The same for a block that no parked sequence holds."""
        return self._ledger.holders(block) == 1 and not self._ledger.is_pinned(block)

    def _put_on_device(self, unit: _Unit, block: BlockId) -> None:
        assert block not in self._on_device, block
        unit.device = block
        self._on_device[block] = unit

    def _forget_if_unheld(self, unit: _Unit) -> None:
        if not unit.holders and not unit.copying:
            assert unit.device is not None
            del self._on_device[unit.device]

    def _free_host(self, unit: _Unit) -> None:
        assert unit.host is not None
        self._host.release(unit.host)
        unit.host = None

    def _set_host_room(self) -> None:
        self._ledger.host_room = self._room()

    def _room(self) -> int:
        return self._host.num_blocks - self._host.filled - self.config.reserve_blocks

    # What the policy is told.

    def _running(self, seq: Sequence, need: int, pressure: bool) -> Standing:
        spillable = 0
        if pressure:
            for block in seq.block_table:
                unit = self._on_device.get(block)
                spillable += self._is_only_mine(block) if unit is None else self._may_leave(unit, others=1)
        return Standing(key=seq.key, age=seq.age, promise_left=self._promise_left(seq), need=need, spillable=spillable)

    def _standing(self, parked: _Parked, pressure: bool) -> Standing:
        return Standing(
            key=parked.seq.key,
            age=parked.seq.age,
            promise_left=self._promise_left(parked.seq),
            spillable=sum(map(self._may_leave, parked.units)) if pressure else 0,
            absent=sum(unit.device is None or unit.copying is _Way.OUT for unit in parked.units),
        )

    def _promise_left(self, seq: Sequence) -> int:
        return self._ledger.promise_left(seq.promise_key) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The tier below the pool, and who moves blocks there and back. `close` comes before that of the pool's region."""

    region: Region
    pinned: PinnedMemory | None
    """The same memory as the device's copies reach it; None where the pool's region is no device's."""
    copier: ThreadCopier | StreamCopier
    spill: Spill

    def describe(self) -> str:
        """For people: how large it is."""
        return f"{self.region.nbytes:,} bytes of {'host' if self.pinned is None else 'pinned'} memory"

    def close(self) -> None:
        """Waits for the copies under way."""
        self.copier.close()
        if self.pinned is not None:
            self.pinned.close()
        self.region.close()


async def open_host_memory(
    config: SpillConfig,
    *,
    below: PoolRegion,
    layout: Layout,
    engine: Engine,
    blocks: BlockManager,
    ledger: Ledger,
    name: str,
    progress: Progress,
) -> HostMemory:
    """Make the tier, and put the engine under overcommit. `below` is the pool's region, of the ledger's blocks.

    Raises BatonError BAD_CONFIG: there is not the memory, or it cannot be pinned.
    """
    if isinstance(below, DeviceRegion):
        _check_pinned_bytes(config, layout.region_bytes(config.host_blocks))
    region = await open_host_region(layout, config.host_blocks, f"baton-{name}-host", "spill.host_blocks", progress)
    places = BlockPlaces(layout=layout, device_blocks=ledger.num_blocks, host_blocks=config.host_blocks)
    pinned = None
    copier: ThreadCopier | StreamCopier
    with ExitStack() as opened:
        opened.callback(region.close)
        if isinstance(below, DeviceRegion):
            progress("pinning", 0, region.nbytes)
            try:
                pinned, copier = await on_thread(_pin, below, region, places, name, opened)
            except BaseException as error:
                let_go(error)
                raise
            progress("pinning", region.nbytes, region.nbytes)
        else:
            copier = ThreadCopier(RegionCopier(places, device=below, host=region), name=name)
        opened.pop_all()
    return HostMemory(
        region=region,
        pinned=pinned,
        copier=copier,
        spill=Spill(config=config, engine=engine, blocks=blocks, ledger=ledger, copier=copier),
    )


def _check_pinned_bytes(config: SpillConfig, nbytes: int) -> None:
    if nbytes > config.pinned_bytes_max:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"spill.host_blocks is {config.host_blocks}, or {nbytes:,} bytes, all of them pinned since the region "
            f"is on a device; spill.pinned_bytes_max is {config.pinned_bytes_max:,}. Set fewer blocks, or allow more "
            "bytes if the machine can do without them.",
            field="spill.host_blocks",
        )


def _pin(
    below: DeviceRegion, region: Region, places: BlockPlaces, name: str, opened: ExitStack
) -> tuple[PinnedMemory, StreamCopier]:
    """Blocks. What it has made is in `opened` too, whoever still waits for it."""
    try:
        pinned = below.driver.register(region.array_U8)
        opened.callback(pinned.close)
        copier = StreamCopier(streams=below.driver.streams, places=places, device=below, host=pinned, name=name)
        opened.callback(copier.close)
        copier.rehearse()
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"{region.nbytes:,} bytes of host memory below a region on a device are pinned: {error}. Set a smaller "
            "spill.host_blocks.",
            field="spill.host_blocks",
        ) from error
    return pinned, copier
