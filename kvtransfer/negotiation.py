"""Whether two nodes may hand KV to each other (I9), and over which transport: what both sides offer, best first,
less what cannot work or has failed too often."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.config import fixed
from baton.errors import BatonError, InvalidField, Reason
from baton.wire import ModelInfo
from kvtransfer.transport import RegionKind, TransportName

PROTOCOL_MIN = 3
PROTOCOL_MAX = 3
"""Versions of the Transfer protocol that this build speaks. 2: `writes_in_doubt` of Release and Revoke, without which a
receiver must not believe a writer's claim. 3: two calls are named Release and
Liveness, and all transports use one control channel."""

SAME_HOST_ONLY = frozenset({TransportName.CUDA_IPC, TransportName.SHM})

ANOTHER_MACHINE: Final = "another machine"
OTHER_MEMORY: Final = "one region is in host memory, the other on a device"
NOT_THERE: Final = "not offered there"
NOT_HERE: Final = "not offered here"
LOST_THERE: Final = "its device there is lost"
"""Why a pair does not use a transport. See `rejected_transports`."""

_HOST_PARTS: Final = ("machine", "user", "network namespace", "PID namespace")

DATA_GOES_ELSEWHERE = frozenset({TransportName.RDMA, TransportName.UCX})
"""Their links are made over a TCP connection, which says nothing of the devices' way to each other. rdma proves that
before a link counts as made, ucx with its first writes."""

SERVED_BY: Final[Mapping[RegionKind, frozenset[TransportName]]] = {
    RegionKind.HOST: frozenset({TransportName.SHM, TransportName.RDMA, TransportName.UCX, TransportName.TCP}),
    RegionKind.DEVICE: frozenset({TransportName.CUDA_IPC, TransportName.RDMA, TransportName.TCP}),
}
"""Which transports can read and write a region of each kind: the one place that says so. rdma reaches device memory
where the card can register it (`rdma_device`), tcp through pinned memory of the host (`kvtransfer.device.staging`)."""

DEFAULT_TRANSPORTS = (TransportName.CUDA_IPC, TransportName.SHM, TransportName.RDMA, TransportName.TCP)
"""Those that do not serve the node's kind of region are left out. So is rdma, silently where there is no device,
and with a warning where one cannot be used for the region (`rdma_device`). ucx is used where a configuration names it
(docs/transports.md says why)."""


COOLDOWN_MS_MIN: Final = 30_000
"""How long a transport is not offered after it was given up for the first time; each further time doubles it."""
COOLDOWN_MS_MAX: Final = 1_800_000
"""The longest that a transport is not offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig:
    """When a writer stops offering a transport to one receiver process, until its cooldown is over."""

    failures_max: int = fixed(2)
    """Failed links of one transport to a receiver within the window before it is given up."""
    failure_window_ms: int = fixed(60_000)
    """The window in which failed links are counted."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise InvalidField(name, f"must be positive, not {getattr(self, name)}")


def differences(own: ModelInfo, peer: ModelInfo) -> list[str]:
    """What keeps the two apart, in words; empty when they may hand over."""
    found = []
    if own.fingerprint != peer.fingerprint:
        found.append(f"weights or model configuration ({own.name} {own.fingerprint}, {peer.name} {peer.fingerprint})")
    if own.block_size != peer.block_size:
        found.append(f"block_size ({own.block_size}, {peer.block_size})")
    elif own.layout_hash != peer.layout_hash:
        found.append(f"record layout ({own.layout_hash}, {peer.layout_hash})")
    if own.protocol_max < peer.protocol_min or peer.protocol_max < own.protocol_min:
        found.append(
            f"protocol versions ({own.protocol_min}-{own.protocol_max}, {peer.protocol_min}-{peer.protocol_max})"
        )
    must_agree = own.quantisation_must_agree or peer.quantisation_must_agree
    if must_agree and own.quantisation != peer.quantisation:
        found.append(f"quantisation of the weights ({own.quantisation or 'none'}, {peer.quantisation or 'none'})")
    return found


def check_compatible(*, own: ModelInfo, peer: ModelInfo, peer_name: str) -> None:
    """Raises BatonError INCOMPATIBLE_NODE that names every difference."""
    found = differences(own, peer)
    if found:
        raise BatonError(
            Reason.INCOMPATIBLE_NODE,
            f"This node and {peer_name} differ in {'; '.join(found)}. Nodes of one cluster must run the same model "
            "with the same block size: start one of them anew with the other's settings.",
            metadata={"differs": "; ".join(found)},
        )


def serving(transports: Sequence[TransportName], region: RegionKind) -> tuple[TransportName, ...]:
    """Those of `transports` that serve such a region, in their order."""
    return tuple(transport for transport in transports if transport in SERVED_BY[region])


def check_transports(transports: Sequence[TransportName], region: RegionKind) -> None:
    """Raises InvalidField unless `transports` names at least one that serves the node's region, and none twice."""
    if not transports or len(set(transports)) != len(transports):
        raise InvalidField("transports", "must name at least one transport, none of them twice")
    if not serving(transports, region):
        fit = ", ".join(transport.value for transport in TransportName if transport in SERVED_BY[region])
        raise InvalidField(
            "transports", f"names none that serves this node's region, which is in {region.value}: {fit}"
        )


def check_some_work(working: Sequence[TransportName]) -> None:
    """Raises InvalidField where none is left of several that may be missing. Its own check says why."""
    if not working:
        raise InvalidField("transports", "names none that works on this machine; `baton doctor` says why")


def host_identity(proc: Path = Path("/proc")) -> str:
    """The same for two processes that can share memory: one boot of one machine, one user, and the namespaces that the
    shm transport meets in (network, for its sockets) and watches its writers in (process ids)."""
    return _hash("|".join(_host(proc)))


def host_parts(proc: Path = Path("/proc")) -> list[str]:
    """What `host_identity` is made of, each by itself, in the order of `_HOST_PARTS`."""
    return [_hash(part) for part in _host(proc)]


def _host(proc: Path) -> list[str]:
    parts = [(proc / "sys/kernel/random/boot_id").read_text().strip(), str(os.geteuid())]
    return parts + [os.readlink(proc / "self/ns" / kind) for kind in ("net", "pid")]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def host_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """What keeps two processes with these `host_parts` from sharing memory; "": nothing does."""
    if len(one) != len(_HOST_PARTS) or len(other) != len(_HOST_PARTS):
        return "another machine, user or namespace"
    differ = [name for name, a, b in zip(_HOST_PARTS, one, other, strict=True) if a != b]
    if _HOST_PARTS[0] in differ:
        return ANOTHER_MACHINE
    return f"another {' and '.join(differ)}" if differ else ""


def choose(offered: Iterable[str], own: Sequence[TransportName], *, same_host: bool) -> TransportName | None:
    """The first of the writer's offers that this receiver has too and that can work between the two; None: no such."""
    for name in offered:
        for transport in own:
            if transport.value == name and (same_host or transport not in SAME_HOST_ONLY):
                return transport
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTransport:
    """A better transport that a pair does not use, and why, as its writer sees it ("here")."""

    transport: str
    why: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.why})"

    @property
    def expected(self) -> bool:
        """Nothing that anybody could mend: the log reports it without a warning."""
        return self.why in (ANOTHER_MACHINE, OTHER_MEMORY)


def rejected_transports(
    chosen: TransportName,
    offered: Sequence[str],
    own: Sequence[TransportName],
    *,
    withdrawn: Sequence[TransportName] = (),
    apart: str = "",
) -> tuple[RejectedTransport, ...]:
    """Why a pair uses none that is better than `chosen`: a reason for each that one of the two offers.

    `offered` and `own` as for `choose`; `withdrawn`: what the receiver would offer with its device at work; `apart`:
    the `host_difference` of the two. What the writer ranks below `chosen` is not better.
    """
    there = {transport.value for transport in own}
    lost = {transport.value for transport in withdrawn}
    found = []
    for name in offered[: list(offered).index(chosen.value)]:
        why = _why_not(name, on_this_side=offered, on_the_other=there, apart=apart) or NOT_THERE
        found.append(RejectedTransport(transport=name, why=LOST_THERE if name in lost else why))
    order = [transport.value for transport in TransportName]
    for name in order[: order.index(chosen.value)]:
        if name in there | lost and name not in offered:
            why = _why_not(name, on_this_side=there, on_the_other=offered, apart=apart)
            found.append(RejectedTransport(transport=name, why=why or NOT_HERE))
    return tuple(found)


def _why_not(name: str, *, on_this_side: Collection[str], on_the_other: Collection[str], apart: str) -> str:
    """What is between the two, whether the other side offers it or not; "": nothing is."""
    same_host = {transport.value for transport in SAME_HOST_ONLY}
    if name not in same_host:
        return ""
    if apart:
        return apart
    return OTHER_MEMORY if any(other in on_the_other and other not in on_this_side for other in same_host) else ""


class Offers:
    """What one writer offers to one receiver process, best first. Pure; the caller passes the time in.

    A transport that fails too often is given up for a cooldown. The caller asks for it back with `restore`, and makes
    the next link with what `names` says then.
    """

    def __init__(self, transports: Sequence[TransportName], config: FallbackConfig) -> None:
        self._config = config
        self._transports = tuple(transports)
        self._failures: dict[TransportName, deque[float]] = {}
        self._times_given_up: Counter[TransportName] = Counter()
        self._retry_s: dict[TransportName, float] = {}

    @property
    def names(self) -> list[str]:
        return [transport.value for transport in self._offered]

    @property
    def given_up(self) -> list[TransportName]:
        """Not offered, in the order in which they were given up."""
        return list(self._retry_s)

    def cooldown_left_s(self, transport: TransportName, now_s: float) -> float:
        """Until `restore` offers one of `given_up` again."""
        return max(0.0, self._retry_s[transport] - now_s)

    def better_restorable(self, used: TransportName, now_s: float) -> bool:
        """Whether `restore` would offer one that ranks above `used`."""
        return any(t in self._restorable(now_s) for t in self._transports[: self._transports.index(used)])

    def restore(self, now_s: float) -> list[TransportName]:
        """Offer those again whose cooldown is over, and return them. One that fails within the window from now on is
        given up again at once."""
        restored = self._restorable(now_s)
        for transport in restored:
            del self._retry_s[transport]
            self._failures[transport].extend([now_s] * (self._config.failures_max - 1))
        return restored

    def failed(self, transport: TransportName, now_s: float, *, worked: bool = True) -> bool:
        """A link of this transport could not be made, or broke. True if it has just been given up for the next best.

        `worked` False: what was sent on it, writes or a probe, did not arrive. Where that is how devices look that do
        not reach each other, it is given up at once. The last that is left is never given up.
        """
        offered = self._offered
        if transport not in offered:
            return False
        failures = self._failures.setdefault(transport, deque(maxlen=self._config.failures_max))
        failures.append(now_s)
        recent = now_s - failures[0] <= self._config.failure_window_ms / 1000
        hopeless = not worked and transport in DATA_GOES_ELSEWHERE
        often = recent and len(failures) == self._config.failures_max
        if not (hopeless or often) or transport is offered[-1]:
            return False
        doublings = min(self._times_given_up[transport], 16)
        self._retry_s[transport] = now_s + min(COOLDOWN_MS_MIN << doublings, COOLDOWN_MS_MAX) / 1000
        self._times_given_up[transport] += 1
        return True

    def _restorable(self, now_s: float) -> list[TransportName]:
        return [transport for transport, retry_s in self._retry_s.items() if retry_s <= now_s]

    @property
    def _offered(self) -> list[TransportName]:
        return [transport for transport in self._transports if transport not in self._retry_s]
