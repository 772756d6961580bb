"""Which RDMA ports this machine has, read from sysfs: no library, no privilege, nothing opened."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SYSFS = Path("/sys")
GIDS_MAX = 1024
"""Entries read of one port's table."""
GIDS_EMPTY_MAX = 16
"""Reading stops after this many empty ones: drivers fill the table from its beginning."""
_LINK_LOCAL = ipaddress.IPv6Network("fe80::/10")


class GidKind(IntEnum):
    """Ordered best first: RoCE v2 can be routed, and of its addresses an IPv4 or a global IPv6 one can."""

    ROCE_V2 = 0
    INFINIBAND = 1
    ROCE_V2_LINK_LOCAL = 2
    ROCE_V1 = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    index: int
    kind: GidKind
    raw: bytes
    """16 bytes, in network order."""
    netdev: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of one device. `state` and `link_layer` are the kernel's, such as "ACTIVE" and "Ethernet"."""

    device: str
    number: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...] = ()
    uverbs: str = ""
    """Name of the character device in /dev/infiniband; empty: the module ib_uverbs does not serve this device."""

    @property
    def works(self) -> bool:
        return self.state == "ACTIVE" and bool(self.gids) and bool(self.uverbs)

    @property
    def best_gid(self) -> Gid:
        """The first of the best kind. InfiniBand always has one."""
        return min(self.gids, key=lambda gid: (gid.kind, gid.index))


def find_ports(sysfs: Path = SYSFS) -> list[RdmaPort]:
    """All ports, ordered by name. A device that vanishes meanwhile is left out."""
    ports = []
    for device in _listed(sysfs / "class/infiniband"):
        for folder in _listed(device / "ports"):
            if folder.name.isdigit() and (state := _read(folder / "state")):
                link_layer = _read(folder / "link_layer")
                ports.append(
                    RdmaPort(
                        device=device.name,
                        number=int(folder.name),
                        state=state.partition(": ")[2] or state,
                        link_layer=link_layer,
                        gids=tuple(_gids(folder, link_layer)),
                        uverbs=_uverbs_of(device.name, sysfs),
                    )
                )
    return ports


def choose_port(ports: list[RdmaPort], wanted: str) -> RdmaPort | None:
    """The port named by `wanted` ("mlx5_0" or "mlx5_0:1"), or, if that is empty, the one with the best GID."""
    device, _, number = wanted.partition(":")
    fit = [
        port
        for port in ports
        if port.works and device in ("", port.device) and (not number or port.number == int(number))
    ]
    return min(fit, key=lambda port: (port.best_gid.kind, port.device, port.number), default=None)


def why_lost(port: RdmaPort, sysfs: Path = SYSFS) -> str:
    """Why a port that worked has stopped working; empty: it works. Cheap."""
    # The character device is what the kernel takes away first.
    if _read(sysfs / "class/infiniband_verbs" / port.uverbs / "ibdev") != port.device:
        return "the device has been taken away"
    folder = sysfs / "class/infiniband" / port.device / "ports" / str(port.number)
    if not _read(folder / "state").endswith("ACTIVE"):
        return "the port is down"
    if _read(folder / "gids" / str(port.best_gid.index)).replace(":", "") != port.best_gid.raw.hex():
        return "the port has lost its address"
    return ""


def counters_of(device: str, number: int, sysfs: Path = SYSFS) -> dict[str, int]:
    """The device's own counters of this port (`hw_counters`, `counters`)."""
    folder = sysfs / "class/infiniband" / device / "ports" / str(number)
    found = {}
    for kind in ("hw_counters", "counters"):
        for file in _listed(folder / kind):
            if (text := _read(file)).isdigit():
                found[file.name] = int(text)
    return found


def _gids(folder: Path, link_layer: str) -> list[Gid]:
    gids: list[Gid] = []
    empty = 0
    for index in range(GIDS_MAX):
        text = _read(folder / "gids" / str(index))
        if not text or empty == GIDS_EMPTY_MAX:
            break
        raw = bytes.fromhex(text.replace(":", ""))
        empty = 0 if any(raw[8:]) else empty + 1
        if empty:
            continue
        kind = _kind(_read(folder / "gid_attrs/types" / str(index)), link_layer, raw)
        if kind is not None:
            netdev = _read(folder / "gid_attrs/ndevs" / str(index))
            gids.append(Gid(index=index, kind=kind, raw=raw, netdev=netdev))
    return gids


def _kind(text: str, link_layer: str, raw: bytes) -> GidKind | None:
    """None: the kernel gives no type to an entry that is being made or taken away."""
    if text == "RoCE v2":
        return GidKind.ROCE_V2_LINK_LOCAL if ipaddress.IPv6Address(raw) in _LINK_LOCAL else GidKind.ROCE_V2
    if text == "IB/RoCE v1":
        return GidKind.INFINIBAND if link_layer == "InfiniBand" else GidKind.ROCE_V1
    return None


def _uverbs_of(device: str, sysfs: Path) -> str:
    for folder in _listed(sysfs / "class/infiniband_verbs"):
        if _read(folder / "ibdev") == device:
            return folder.name
    return ""


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str:
    """Stripped; empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
