"""`baton doctor`: whether RDMA and UCX work on this machine, step by step: what is missing, and what to do.

It looks at everything through paths that can be replaced, and opens nothing but, at the end, the libraries.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import click

from baton.native import load
from cli.invocation import EXIT_ERROR
from cli.output import JSON, format_table, output_option, print_json
from kvtransfer.transports.rdma import WHAT_GPUS_NEED
from kvtransfer.transports.rdma_ports import RdmaPort, choose_port, find_ports
from kvtransfer.transports.rdma_verbs import DISTRIBUTION_FOLDERS, SOURCE, RdmaUnavailable, load_verbs
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import UcxUnavailable, destruction_fences, installed, try_ucx

CAP_IPC_LOCK = 14
"""Its bit among the capabilities (linux/capability.h): memory may be locked without limit."""
_API_VERSION = (1, 17)
_FIELD_FEATURES, _FEATURES_RMA_AM = 1, 1 << 1 | 1 << 6
_PARAMS_BYTES = 1 << 10
"""More than ucp_params has, of which we set the first two fields: which others count, and the features."""


class Verdict(Enum):
    """Of one check. Only MISSING keeps RDMA from working; OPTIONAL has nothing to do with it."""

    GOOD = "ok"
    SLOWER = "slower"
    MISSING = "missing"
    OPTIONAL = "not used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Verdict
    text: str
    todo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where to look, and what this process may."""

    sysfs: Path = Path("/sys")
    devices: Path = Path("/dev")
    proc: Path = Path("/proc")
    verbs_folders: tuple[Path, ...] = DISTRIBUTION_FOLDERS
    memlock_bytes: Callable[[], int] = field(default=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def _finding(what: str, text: str, todo: str = "", *, else_: Verdict = Verdict.MISSING) -> Finding:
    """GOOD where there is nothing to do."""
    return Finding(what=what, verdict=else_ if todo else Verdict.GOOD, text=text, todo=todo)


def check_rdma(machine: Machine | None = None, *, region_bytes: int = 0, wanted: str = "") -> list[Finding]:
    """All that a node needs to offer rdma for a region of this size, on the device `wanted` (empty: any)."""
    machine = machine or Machine()
    ports = find_ports(machine.sysfs)
    return [
        *_device(ports, wanted),
        *(_character_device(port, machine) for port in ports),
        *_libraries(machine),
        _memory(machine, region_bytes),
        _gpu_memory(machine),
    ]


def works(findings: list[Finding]) -> bool:
    return all(finding.verdict is not Verdict.MISSING for finding in findings)


def _device(ports: list[RdmaPort], wanted: str) -> Iterator[Finding]:
    if not ports:
        todo = (
            "load the driver of the card (such as mlx5_ib); without a card, Soft-RoCE: modprobe rdma_rxe && "
            "rdma link add rxe0 type rxe netdev eth0"
        )
        yield _finding("device", "no RDMA device", todo)
        return
    usable = choose_port(ports, wanted) is not None
    for port in ports:
        name, todo = f"{port.device}:{port.number}", ""
        if port.state != "ACTIVE":
            text, todo = f"{name} is {port.state}", "bring its network interface up: ip link set DEVICE up"
        elif not port.gids:
            text, todo = f"{name} has no address", "give its network interface one: ip address add ..."
        else:
            gid = port.best_gid
            text = f"{name} is active, {gid.kind.name} at index {gid.index}{f' of {gid.netdev}' if gid.netdev else ''}"
        yield _finding("device", text, todo, else_=Verdict.SLOWER if usable else Verdict.MISSING)
    if wanted and not usable:
        yield _finding("device", f"{wanted} cannot be used", "name one of the above in rdma.device, or none")


def _character_device(port: RdmaPort, machine: Machine) -> Finding:
    path = machine.devices / "infiniband" / port.uverbs
    if not port.uverbs:
        text = f"{port.device} is not open to programs: the module ib_uverbs is not loaded"
        return _finding("module", text, "modprobe ib_uverbs")
    if not path.exists():
        todo = "pass the device into the container (--device /dev/infiniband), or run udev"
        return _finding("module", f"{path} is not there", todo)
    if not os.access(path, os.R_OK | os.W_OK):
        todo = f"let this user read and write {path} (group rdma, a udev rule)"
        return _finding("module", f"{path} may not be opened", todo)
    return _finding("module", f"{port.device} by {path}")


def _libraries(machine: Machine) -> Iterator[Finding]:
    text, todo = "loaded", ""
    try:
        load_verbs(machine.verbs_folders)
    except RdmaUnavailable as error:
        text, _, todo = str(error).partition("; ")
    yield _finding("pyverbs", text, todo)
    library = load(SOURCE)
    todo = "apt-get install gcc libibverbs-dev, then start again: it is built at its first use"
    yield _finding("poster", library.status, "" if library.handle is not None else todo)


def _memory(machine: Machine, region_bytes: int) -> Finding:
    """The whole region is pinned, which counts against the limit of locked memory unless a capability lifts that."""
    limit = machine.memlock_bytes()
    if limit == resource.RLIM_INFINITY:
        return _finding("memory", "memory may be locked without limit")
    if _capabilities(machine.proc) >> CAP_IPC_LOCK & 1:
        return _finding("memory", "memory may be locked: capability IPC_LOCK")
    text = f"{limit:,} bytes of memory may be locked" + (f", the region has {region_bytes:,}" if region_bytes else "")
    todo = "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), or the capability IPC_LOCK (containers)"
    # Without a size to compare with: the usual default is far below any region.
    enough = limit >= region_bytes if region_bytes else limit > 1 << 30
    return _finding("memory", text, "" if enough else todo)


def _gpu_memory(machine: Machine) -> Finding:
    """What can be seen without a GPU's context. A node finds out only when it registers the region whether the GPU's
    driver makes a dma-buf of it and the card's driver takes it: its log and `baton describe` say."""
    try:
        driver = (machine.proc / "driver/nvidia/version").read_text()
    except OSError:
        return _finding("regions", "memory of the host; there is no NVIDIA driver, and no GPU's to register")
    ways = ["as dma-bufs (open kernel modules)"] if "Open Kernel Module" in driver else []
    if (machine.sysfs / "module/nvidia_peermem").exists():
        ways.append("as peer memory (nvidia_peermem)")
    if ways:
        return _finding("regions", f"memory of the host, and of GPUs {' or '.join(ways)}")
    text = "memory of the host; regions on GPUs go by tcp: neither open kernel modules nor nvidia_peermem"
    return _finding("regions", text, WHAT_GPUS_NEED, else_=Verdict.SLOWER)


def _capabilities(proc: Path) -> int:
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def check_ucx(tls: str) -> Finding:
    """One line. Makes an agent, which loads NIXL and UCX into this process, and destroys it."""
    if installed() is None:
        todo = "pip install 'baton-serve[ucx]', only where `transports` is to name ucx"
        return _finding("ucx", "NIXL is not installed", todo, else_=Verdict.OPTIONAL)
    try:
        used = try_ucx(tls)
    except UcxUnavailable as error:
        return _finding("ucx", str(error), "look at what UCX has said", else_=Verdict.OPTIONAL)
    fence = "fenced by the receiver alone" if destruction_fences(used) else "a fence needs the writer, or its death"
    here = ", ".join(ucx_here()) or "of unknown transports"
    return _finding("ucx", f"{installed()} with UCX {here}; with {used!r} {fence}")


def ucx_here() -> list[str]:
    """UCX transports of this machine, as UCX prints them. Empty: unknown. UCX is loaded into this process."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp" in line}
    if not loaded:
        return []
    ucp, libc = ctypes.CDLL(loaded.pop()), ctypes.CDLL(None)
    params = (ctypes.c_uint64 * (_PARAMS_BYTES // 8))(_FIELD_FEATURES, _FEATURES_RMA_AM)
    context, text, nbytes = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_size_t()
    if ucp.ucp_init_version(*_API_VERSION, params, None, ctypes.byref(context)):
        return []
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(nbytes)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    ucp.ucp_cleanup(context)
    printed = (text.value or b"").decode()
    libc.free(text)
    return transports_in(printed)


def transports_in(printed: str) -> list[str]:
    """Of what `ucp_context_print_info` prints, for each device a line "# resource 3 : md 2 dev 1 flags -- tcp/eth0"."""
    names = [line.split()[-1].partition("/")[0] for line in printed.splitlines() if " resource " in line]
    return list(dict.fromkeys(names))


@click.command()
@click.option(
    "--region-bytes", type=click.IntRange(min=0), default=0, show_default=True, metavar="BYTES",
    help="Size of the KV region to register; 0 if unknown.",
)  # fmt: skip
@click.option("--device", default="", metavar="NAME", help="Check this device, such as mlx5_0:1.  [default: any]")
@output_option
def doctor(region_bytes: int, device: str, output: str) -> int:
    """Check whether RDMA works on this machine.

    Each line is one thing that the transport rdma needs; where it is missing, the command says what to do. The exit
    status is 0 if RDMA works for a process of this user, else 1: nodes then use the next best transport. The line "ucx"
    is about the transport ucx, which needs none of the others.

    \b
    Example:
      baton doctor --region-bytes 8000000000
    """
    findings = check_rdma(Machine(), region_bytes=region_bytes, wanted=device)
    ready = works(findings)
    findings.append(check_ucx(UcxConfig().tls))
    if output == JSON:
        data = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
        print_json({"rdma": ready, "findings": data})
    else:
        click.echo(_text(findings, ready))
    return 0 if ready else EXIT_ERROR


def _text(findings: list[Finding], ready: bool) -> str:
    rows = [(finding.what, finding.verdict.value, finding.text) for finding in findings]
    lines = [format_table(("CHECK", "VERDICT", "FOUND"), rows), ""]
    lines += [f"To do ({finding.what}): {finding.todo}" for finding in findings if finding.todo]
    slower = any(finding.verdict is Verdict.SLOWER for finding in findings)
    works = f"RDMA works here{', though not at its best' if slower else ''}."
    return "\n".join([*lines, works if ready else "RDMA does not work here."])
