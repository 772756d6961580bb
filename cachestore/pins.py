"""Pinned prefixes of one node: names over chains of the prefix cache, each for a time, all of them within limits. Pure.

A pin names tokens, so it may come before their blocks do. It is a lease: whoever wants it to last renews it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import fixed, setting
from baton.errors import BatonError, InvalidField, Reason, bad_field, check_positive
from cachestore.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLimits:
    count_max: int = setting(64, "pinned prefixes in this node", "More prefixes are pinned.")
    region_share_max: float = setting(
        0.5,
        "share of the region that pins may take; requests have the rest to themselves",
        "Pins are refused for want of room (raise it), or requests wait for blocks (lower it).",
    )
    lease_ms_max: int = fixed(600_000)
    """How long a pin may stay without being renewed."""

    def __post_init__(self) -> None:
        check_positive(self, "count_max", "region_share_max", "lease_ms_max")
        if not self.region_share_max < 1:
            raise InvalidField("region_share_max", f"must be below 1, not {self.region_share_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """One pin as it is now."""

    name: str
    blocks: int
    """Full blocks of the prefix."""
    blocks_pinned: int
    """Those of them that are here and stay."""
    lease_left_s: float


@dataclass(slots=True, kw_only=True)
class _Pin:
    chain: tuple[bytes, ...]
    version: int
    expires_s: float


class PinTable:
    """Mutable; owned by the node's control thread. Times are seconds of one monotonic clock, passed in."""

    def __init__(self, cache: PrefixCache, *, num_blocks: int, limits: PinLimits) -> None:
        self.blocks_max = int(num_blocks * limits.region_share_max)
        self._cache = cache
        self._limits = limits
        self._pins: dict[str, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def hold(
        self, name: str, tokens: Sequence[int], salt: bytes, *, version: int, lease_s: float, now_s: float
    ) -> PinState | int:
        """Pin the full blocks of `tokens` under `name`, or renew. Of two prefixes the one of the higher version stays:
        where that is the other one, its version is returned. Raises BatonError, with nothing changed: BAD_FIELD
        for a prefix without a full block or a lease out of range, PINS_FULL beyond the limits.
        """
        self.expire(now_s)
        lease_s_max = self._limits.lease_ms_max / 1e3
        if not 0 < lease_s <= lease_s_max:
            raise bad_field(
                "lease_ms", f"lease_ms is {lease_s * 1e3:g}; it must be above 0, at most {lease_s_max * 1e3:g}."
            )
        chain = self._cache.chain(tokens, salt)
        if not chain:
            raise bad_field(
                "tokens",
                f"The prefix has {len(tokens)} tokens; it must fill at least one block of {self._cache.block_size}.",
            )
        old = self._pins.get(name)
        if old is not None and old.chain == chain:
            old.version, old.expires_s = max(old.version, version), now_s + lease_s
            self._cache.settle(chain)
            return self._state(name, old, now_s)
        # Of equal versions one must win on every node alike, or two routers would take turns.
        if old is not None and (old.version, old.chain) > (version, chain):
            return old.version
        if old is None and len(self._pins) >= self._limits.count_max:
            raise BatonError(
                Reason.PINS_FULL,
                f"{len(self._pins)} prefixes are pinned here, the limit (engine.pins.count_max). Unpin one first.",
            )
        if old is not None:
            self._cache.unpin(old.chain)
        wanted = self._cache.pinned_blocks_with(chain)
        if wanted > self.blocks_max:
            if old is not None:
                self._cache.pin(old.chain)
            raise BatonError(
                Reason.PINS_FULL,
                f"With this prefix of {len(chain) * self._cache.groups} blocks, {wanted} blocks would be pinned here; "
                f"at most {self.blocks_max} may be (engine.pins.region_share_max). Unpin one first, or pin a shorter "
                "prefix.",
            )
        self._cache.pin(chain)
        self._pins[name] = pin = _Pin(chain=chain, version=version, expires_s=now_s + lease_s)
        return self._state(name, pin, now_s)

    def drop(self, name: str, *, version: int) -> bool:
        """Unpin; False where there is no pin of this name, or one of a higher version. Idempotent."""
        pin = self._pins.get(name)
        if pin is None or pin.version > version:
            return False
        del self._pins[name]
        self._cache.unpin(pin.chain)
        return True

    def expire(self, now_s: float) -> list[str]:
        """Drop what was not renewed in time; the names. Called every second too."""
        overdue = [name for name, pin in self._pins.items() if pin.expires_s <= now_s]
        for name in overdue:
            self._cache.unpin(self._pins.pop(name).chain)
        return overdue

    def states(self, now_s: float) -> list[PinState]:
        """By name."""
        return [self._state(name, pin, now_s) for name, pin in sorted(self._pins.items())]

    def _state(self, name: str, pin: _Pin, now_s: float) -> PinState:
        return PinState(
            name=name,
            blocks=len(pin.chain) * self._cache.groups,
            blocks_pinned=self._cache.pinned_of(pin.chain),
            lease_left_s=max(0.0, pin.expires_s - now_s),
        )
