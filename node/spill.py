"""Moves the blocks of swapped-out sequences to host memory and back, as `SpillPolicy` decides. Control thread only.

No step has a swapped-out sequence in it, so its blocks are copied beside the steps of the others. Its block table is a
list of `_Unit`s, shared with other swapped-out sequences. A unit leaves the device when nobody else holds its block,
and comes back for all its holders; what the prefix cache has of it is taken from there.

A copy under way owns its block on both sides: a sequence that ends meanwhile leaves its references to be dropped when
the copy has ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Literal

from baton.config import fixed, setting
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.ids import BlockId, RequestKey
from baton.runtime import Progress
from cachestore.block_manager import BlockManager
from cachestore.host_blocks import HostBlockId, HostBlocks
from cachestore.layout import Layout
from cachestore.ledger import ConservationError
from cachestore.spill_policy import CopyBack, CopyOut, SpillPolicy, SpillState, Standing, SwapOut
from engine.core import Engine
from engine.scheduler import Sequence
from kvtransfer.device.region import DeviceRegion
from node.copiers import BlockCopier, BlockCopy, BlockPlaces, MemoryBelow, open_memory_below
from node.regions import PoolRegion

HOST_BLOCKS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillConfig:
    """Overcommit of the device pool, and the host memory behind it."""

    host_blocks: int = setting(
        0,
        "blocks of host memory that sequences of a decode node may be swapped out to; 0: no overcommit",
        "Answers are shorter than their limits, and more of them should run than fit in the worst case.",
    )
    headroom_blocks: int = setting(
        4,
        "blocks that each running sequence should find free after one is swapped out, and before one comes back",
        "Sequences are swapped out and in again all the time (raise it).",
    )
    copy_blocks_max: int = fixed(64)
    """Blocks of one copy; a longer one is cut."""
    pinned_bytes_max: int = fixed(1 << 40)
    """Where the region is on a GPU all of host_blocks are pinned, for no other use."""

    def __post_init__(self) -> None:
        check_positive(self, "headroom_blocks", "copy_blocks_max", "pinned_bytes_max")
        if not 0 <= self.host_blocks <= HOST_BLOCKS_MAX:
            raise InvalidField("host_blocks", f"is {self.host_blocks}; must be 0 (off) to {HOST_BLOCKS_MAX}")
        if self.host_blocks and self.host_blocks <= self.headroom_blocks:
            raise InvalidField(
                "host_blocks",
                f"is {self.host_blocks}; must be 0 (off) or more than headroom_blocks ({self.headroom_blocks}), which "
                "are kept as a reserve to swap through",
            )


_Way = Literal["out", "back"]


@dataclass(slots=True, eq=False)
class _SwappedOut:
    seq: Sequence
    units: list[_Unit] = field(default_factory=list)
    copies: int = 0
    """Copies under way that were begun for it."""


@dataclass(slots=True, eq=False)
class _Unit:
    """On the device when `device` is set, else in host memory; in a copy, both are. Each holder has one reference."""

    group: int
    """Layer group whose records it has."""
    device: BlockId | None
    host: HostBlockId | None = None
    holders: list[_SwappedOut] = field(default_factory=list)
    copying: _Way | None = None
    left_behind: int = 0
    """References of sequences that ended during the copy."""


@dataclass(slots=True, kw_only=True)
class SpillCounters:
    """Totals since the start: sequences, blocks, and their bytes."""

    swapped_out: int = 0
    copied_out: int = 0
    copied_back: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    merged: int = 0
    """Blocks that came back without a copy."""


class Spill:
    """Overcommit of one engine: implements `engine.scheduler.Overcommit`."""

    def __init__(
        self, *, config: SpillConfig, engine: Engine, blocks: BlockManager, layout: Layout, copier: BlockCopier
    ) -> None:
        """Takes the engine over as its `overcommit`. Nothing is swapped out or copied yet."""
        self.config = config
        self.host = HostBlocks(config.host_blocks)
        self.counters = SpillCounters()
        self._engine = engine
        self._blocks = blocks
        self._ledger = blocks.ledger
        self._layout = layout
        self._copier = copier
        self._policy = SpillPolicy(headroom_blocks=config.headroom_blocks, growth_blocks=blocks.groups)
        self._swapped_out: dict[RequestKey, _SwappedOut] = {}
        self._on_device: dict[BlockId, _Unit] = {}
        self._runners: dict[RequestKey, Sequence] = {}
        self._freeing = 0
        self._broken: BaseException | None = None
        self._set_host_room()
        assert engine.scheduler.overcommit is None and not engine.has_work
        engine.scheduler.overcommit = self

    def report(self) -> dict[str, int]:
        """For the node's status."""
        return {
            "sequences swapped out": len(self._swapped_out),
            "sequences swapped out since start": self.counters.swapped_out,
            "host blocks": self.host.num_blocks,
            "host blocks free": self.host.free,
            "host blocks filled": self.host.filled,
            "host blocks in a copy": self.host.copying,
            "bytes copied out": self.counters.bytes_out,
            "bytes copied back": self.counters.bytes_back,
            "blocks back without a copy": self.counters.merged,
        }

    @property
    def busy(self) -> bool:
        """Sequences are swapped out: nothing new should be taken in until they are back."""
        return bool(self._swapped_out)

    def headroom(self) -> int:
        """Blocks that the running sequences should find free, beside what a new one takes."""
        seqs = [seq for seq in self._runners.values() if seq.key not in self._swapped_out]
        return sum(min(self.config.headroom_blocks, self._promise_left(seq)) for seq in seqs)

    # What the engine calls (Overcommit).

    def before_step(self, runners: Several[Sequence]) -> None:
        """See `Overcommit.before_step`. Raises what a copy failed with: promises behind host memory cannot be kept
        without it, so the engine loop ends, and with it the node. Its requests go on at other nodes."""
        if self._broken is not None:
            raise self._broken
        self._runners = {seq.key: seq for seq in runners}
        needs = {seq.key: self._engine.scheduler.blocks_needed(seq) for seq in runners}
        pressure = sum(needs.values()) > self._ledger.growable + self._freeing
        instructions = self._policy.before_step(
            growable=max(0, self._ledger.growable),
            freeing=self._freeing,
            host_free=self.host.free,
            runners=[self._running(seq, needs[seq.key], pressure) for seq in runners],
            swapped_out=[self._standing(each, pressure or not runners) for each in self._swapped_out.values()],
        )
        for instruction in instructions:
            match instruction:
                case SwapOut(key=key):
                    self._engine.swap_out(self._runners.pop(key))
                case CopyOut(key=key, blocks=blocks):
                    self._copy_out(self._swapped_out[key], blocks)
                case CopyBack(key=key, blocks=blocks):
                    self._copy_back(self._swapped_out[key], blocks)

    def lets_step(self, runners: Several[Sequence]) -> bool:
        """See `Overcommit.lets_step`: nobody is swapped out, and there is room for all that the runners need."""
        if self._broken is not None or self._swapped_out:
            return False
        self._runners = {seq.key: seq for seq in runners}
        return sum(map(self._engine.scheduler.blocks_needed, runners)) <= self._ledger.growable

    def swapped_out(self, seq: Sequence) -> None:
        """See `Overcommit.swapped_out`."""
        owner = self._swapped_out[seq.key] = _SwappedOut(seq)
        for index, block in enumerate(seq.block_table):
            unit = self._on_device.setdefault(block, _Unit(index % self._blocks.groups, block))
            unit.holders.append(owner)
            owner.units.append(unit)
        seq.block_table.clear()
        self.counters.swapped_out += 1

    def left(self, seq: Sequence) -> None:
        """See `Overcommit.left`."""
        self._runners.pop(seq.key, None)
        self._policy.left(seq.key)
        owner = self._swapped_out.pop(seq.key, None)
        for unit in owner.units if owner is not None else ():
            assert owner is not None
            unit.holders.remove(owner)
            if unit.copying:
                unit.left_behind += 1
            elif unit.device is not None:
                self._blocks.release([unit.device])
                self._forget_if_unheld(unit)
            elif not unit.holders:
                self._free_host(unit)
        self._set_host_room()

    def check(self) -> None:
        """Recount host memory and where everything swapped out is. Raises ConservationError."""
        self.host.check()
        units = {id(unit): unit for owner in self._swapped_out.values() for unit in owner.units}.values()
        filled = sum(unit.device is None for unit in units)
        if filled != self.host.filled:
            raise ConservationError(f"{filled} blocks are in host memory, {self.host.filled} by its books")
        for unit in units:
            if unit.device is not None and self._ledger.holders(unit.device) < len(unit.holders):
                raise ConservationError(f"block {unit.device} has lost references of swapped-out sequences")
        if self._ledger.host_room != self._room():
            raise ConservationError(f"host room {self._ledger.host_room} in the ledger, {self._room()} here")

    # What the policy instructs.

    def _copy_out(self, owner: _SwappedOut, count: int) -> None:
        units = [unit for unit in reversed(owner.units) if self._may_leave(unit)][:count]
        hosts = self.host.begin_out(len(units))
        for unit, host in zip(units, hosts, strict=True):
            unit.host, unit.copying = host, "out"
        self._freeing += len(units)
        self._start(owner, units, "out")

    def _copy_back(self, owner: _SwappedOut, count: int) -> None:
        count -= self._merge(owner, count)
        absent = [unit for unit in owner.units if unit.device is None][:count]
        for unit in absent:
            assert unit.host is not None
            self.host.begin_back(unit.host)
        self._set_host_room()
        for unit, block in zip(absent, self._blocks.allocate(len(absent)), strict=True):
            self._put_on_device(unit, block)
            self._blocks.ledger.hold([block] * (len(unit.holders) - 1))
            unit.copying = "back"
        self._start(owner, absent, "back")

    def _swap_in(self, owner: _SwappedOut) -> None:
        for unit in owner.units:
            assert unit.device is not None and unit.copying is None, owner.seq.key
            unit.holders.remove(owner)
            self._forget_if_unheld(unit)
            owner.seq.block_table.append(unit.device)
        self._engine.scheduler.swap_in(owner.seq)

    # Copies.

    def _start(self, owner: _SwappedOut, units: list[_Unit], way: _Way) -> None:
        pieces = self._pieces(units)
        owner.copies += len(pieces)
        for piece in pieces:
            copy = BlockCopy(
                out=way == "out",
                group=piece[0].group,
                device=tuple(unit.device for unit in piece if unit.device is not None),
                host=tuple(unit.host for unit in piece if unit.host is not None),
            )
            self._copier.start(copy, lambda error, piece=piece: self._ended(owner, piece, way, error))  # type: ignore[misc]
        if owner.copies == 0:
            self._copies_ended(owner)

    def _pieces(self, units: list[_Unit]) -> list[list[_Unit]]:
        """What is copied at once: units of one group, not too many."""
        most = self.config.copy_blocks_max
        by_group = [[unit for unit in units if unit.group == group] for group in range(self._blocks.groups)]
        return [of[start : start + most] for of in by_group for start in range(0, len(of), most)]

    def _ended(self, owner: _SwappedOut, units: list[_Unit], way: _Way, error: BaseException | None) -> None:
        if error is not None:
            self._broken = error
            self._engine.changed()
            return
        for unit in units:
            unit.copying = None
            assert unit.device is not None
            self._blocks.release([unit.device] * unit.left_behind)
            unit.left_behind = 0
            if way == "out":
                self._is_out(unit)
            else:
                self._free_host(unit)
                self._forget_if_unheld(unit)
        nbytes = len(units) * self._layout.block_bytes(units[0].group)
        if way == "out":
            self.counters.copied_out += len(units)
            self.counters.bytes_out += nbytes
            self._freeing -= len(units)
        else:
            self.counters.copied_back += len(units)
            self.counters.bytes_back += nbytes
        self._set_host_room()
        owner.copies -= 1
        if owner.copies == 0:
            self._copies_ended(owner)
        self._engine.changed()

    def _is_out(self, unit: _Unit) -> None:
        assert unit.device is not None and unit.host is not None
        wanted_here = self._ledger.holders(unit.device) > len(unit.holders) or self._ledger.is_pinned(unit.device)
        if not unit.holders or wanted_here:
            # All have ended; or somebody has found the block in the prefix cache meanwhile, or pinned it: it stays.
            self._free_host(unit)
            self._forget_if_unheld(unit)
            return
        self.host.fill(unit.host)
        self._blocks.release([unit.device] * len(unit.holders))
        del self._on_device[unit.device]
        unit.device = None

    def _copies_ended(self, owner: _SwappedOut) -> None:
        if self._swapped_out.get(owner.seq.key) is owner:
            absent = sum(unit.device is None or unit.copying is not None for unit in owner.units)
            if self._policy.copies_done(owner.seq.key, absent=absent):
                self._swap_in(self._swapped_out.pop(owner.seq.key))

    def _merge(self, owner: _SwappedOut, blocks_max: int) -> int:
        """Take from the prefix cache what it has of the absent full blocks. How many those were."""
        seq, merged = owner.seq, 0
        if blocks_max == 0:
            return 0
        cached = self._blocks.prefix_cache.match(seq.tokens, seq.cache_salt, self._blocks.full_blocks(seq.computed))
        for unit, block in zip(owner.units, cached, strict=False):
            if merged < blocks_max and unit.device is None and block not in self._on_device:
                self._blocks.ledger.hold([block] * len(unit.holders))
                self._free_host(unit)
                self._put_on_device(unit, block)
                merged += 1
        self.counters.merged += merged
        self._set_host_room()
        return merged

    def _may_leave(self, unit: _Unit, others: int = 0) -> bool:
        """Only swapped-out sequences (and `others` more that are about to be) hold it, none comes back, and it is not
        pinned: copying it out would free nothing."""
        if unit.device is None or unit.copying or self._ledger.is_pinned(unit.device):
            return False
        if self._ledger.holders(unit.device) != len(unit.holders) + others:
            return False
        return all(self._policy.state_of(each.seq.key) is not SpillState.RETURNING for each in unit.holders)

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
        self.host.release(unit.host)
        unit.host = None

    def _set_host_room(self) -> None:
        self._ledger.host_room = self._room()

    def _room(self) -> int:
        # A reserve is not admitted against: else a full device and full host memory could not trade places.
        return self.host.num_blocks - self.host.filled - self.config.headroom_blocks

    # What the policy gets.

    def _running(self, seq: Sequence, need: int, pressure: bool) -> Standing:
        spillable = 0
        if pressure:
            for index, block in enumerate(seq.block_table):
                unit = self._on_device.get(block) or _Unit(index % self._blocks.groups, block)
                spillable += self._may_leave(unit, others=1)
        return Standing(key=seq.key, age=seq.age, promise_left=self._promise_left(seq), need=need, spillable=spillable)

    def _standing(self, owner: _SwappedOut, pressure: bool) -> Standing:
        return Standing(
            key=owner.seq.key,
            age=owner.seq.age,
            promise_left=self._promise_left(owner.seq),
            spillable=sum(map(self._may_leave, owner.units)) if pressure else 0,
            absent=sum(unit.device is None or unit.copying == "out" for unit in owner.units),
        )

    def _promise_left(self, seq: Sequence) -> int:
        return self._ledger.promise_left(seq.promise_key) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The overcommit of a pool, and the host memory behind it."""

    memory: MemoryBelow
    spill: Spill


async def open_host_memory(
    config: SpillConfig,
    *,
    below: PoolRegion,
    layout: Layout,
    engine: Engine,
    blocks: BlockManager,
    name: str,
    progress: Progress,
) -> HostMemory:
    """Make the memory, and put the engine under overcommit. `below` is the pool's region.

    Raises BatonError BAD_CONFIG: there is too little memory, or it cannot be pinned.
    """
    places = BlockPlaces(layout=layout, device_blocks=blocks.ledger.num_blocks, host_blocks=config.host_blocks)
    nbytes = places.host_nbytes
    if isinstance(below, DeviceRegion) and nbytes > config.pinned_bytes_max:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"spill.host_blocks is {config.host_blocks}, or {nbytes:,} bytes, all of them pinned since the region "
            f"is on a device; at most {config.pinned_bytes_max:,} may be. Set fewer blocks.",
            field="spill.host_blocks",
        )
    memory = await open_memory_below(below, places, name=f"{name}-spill", field="spill.host_blocks", progress=progress)
    spill = Spill(config=config, engine=engine, blocks=blocks, layout=layout, copier=memory.copier)
    return HostMemory(memory=memory, spill=spill)
