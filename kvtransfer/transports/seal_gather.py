"""A seal of rdma or ucx comes in parts: its message, and a number beside the data, on each way that the data took."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.ids import Epoch
from kvtransfer.transport import Seal

_NUMBER_MASK = 0xFFFF_FFFF
"""What comes beside the data has 32 bits of a seal's number."""


class SealFault(Enum):
    """How a writer breaks the protocol of seals; each wire has a reason of this name to refuse it with."""

    SEAL = "a part that cannot be, or that has come before"
    SEALS_MAX = "too many seals of which a part is missing"


class SealRefused(Exception):
    """The writer breaks the protocol."""

    def __init__(self, fault: SealFault) -> None:
        super().__init__(fault.name)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSeal:
    """`number` is the writer's, to answer with."""

    number: int
    seal: Seal


@dataclass(slots=True, kw_only=True)
class _Parts:
    """Of one seal: its message with the ways that it names, and the ways on which its number has come, as bits."""

    told: WholeSeal | None = None
    named: int = 0
    arrived: int = 0


class SealGather:
    """Puts the parts of each seal together, in whichever order they come. Pure."""

    def __init__(self, *, epoch: Epoch, ways: int, seals_max: int) -> None:
        """`ways`: queue pairs of rdma; 1 for ucx. `seals_max`: seals of which a part may be missing."""
        self._epoch = epoch
        self._ways = ways
        self._seals_max = seals_max
        self._parts: dict[int, _Parts] = {}

    @property
    def waiting(self) -> bool:
        """A message has come whose numbers have not, or not all."""
        return any(parts.told is not None for parts in self._parts.values())

    def told(self, number: int, seal: Seal, ways_mask: int = 1) -> WholeSeal | None:
        """The message of a seal: returned if it is whole now. Raises SealRefused."""
        if seal.epoch != self._epoch or not 0 < ways_mask < 1 << self._ways:
            raise SealRefused(SealFault.SEAL)
        parts = self._of(number)
        if parts.told is not None:
            raise SealRefused(SealFault.SEAL)
        parts.told, parts.named = WholeSeal(number=number, seal=seal), ways_mask
        return self._whole(number, parts)

    def arrived(self, number: int, way: int = 0) -> WholeSeal | None:
        """A number beside the data: the seal if it is whole now. Raises SealRefused."""
        parts = self._of(number)
        if parts.arrived >> way & 1:
            raise SealRefused(SealFault.SEAL)
        parts.arrived |= 1 << way
        return self._whole(number, parts)

    def _of(self, number: int) -> _Parts:
        number &= _NUMBER_MASK
        if number not in self._parts and len(self._parts) >= self._seals_max:
            raise SealRefused(SealFault.SEALS_MAX)
        return self._parts.setdefault(number, _Parts())

    def _whole(self, number: int, parts: _Parts) -> WholeSeal | None:
        if parts.told is None or parts.arrived != parts.named:
            return None
        del self._parts[number & _NUMBER_MASK]
        return parts.told
