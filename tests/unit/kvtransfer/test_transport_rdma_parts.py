"""Words of rdma on the wire, ports found in a made-up sysfs, and what the doctor says of made-up machines."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import doctor
from cli.doctor import Machine, Verdict, check_rdma, works
from kvtransfer.transports import rdma_verbs
from kvtransfer.transports.control_channel import MalformedMessage
from kvtransfer.transports.rdma import (
    LinkEnds,
    QpAddress,
    RdmaWelcome,
    RegionAddress,
)
from kvtransfer.transports.rdma_ports import GidKind, choose_port, counters_of, find_ports, why_lost
from kvtransfer.transports.rdma_verbs import (
    RdmaUnavailable,
    channel_fd,
    cq_address,
    load_verbs,
    qp_address,
)
from kvtransfer.transports.settings import QPS_MAX, UNANSWERED_MS_MAX, RdmaConfig
from tests.support.cli_harness import run_baton

U64 = st.integers(0, (1 << 64) - 1)
U24 = st.integers(0, (1 << 24) - 1)
ENDS = st.builds(
    LinkEnds,
    gid=st.binary(min_size=16, max_size=16),
    lid=st.integers(0, 65535),
    mtu=st.integers(1, 5),
    ethernet=st.booleans(),
    seals_max=st.integers(1, 65535),
    qps=st.lists(st.builds(QpAddress, number=U24, first_packet=U24), min_size=1, max_size=QPS_MAX).map(tuple),
)
U32 = st.integers(0, (1 << 32) - 1)
WELCOMES = st.builds(
    RdmaWelcome, region_nbytes=U64, probe_base=U64, probe_rkey=U32, ends=st.builds(LinkEnds.encode, ENDS)
)


@given(ENDS, WELCOMES)
def test_payloads_come_out_as_they_went_in(ends: LinkEnds, welcome: RdmaWelcome) -> None:
    """Cut short, or longer, they are refused."""
    assert LinkEnds.decode(ends.encode()) == ends
    assert RdmaWelcome.decode(welcome.encode()) == welcome
    for broken in (ends.encode()[:-1], ends.encode() + b"x", b""):
        with pytest.raises(MalformedMessage):
            LinkEnds.decode(broken)
    for broken in (welcome.encode()[:19], welcome.encode()[:-1]):
        with pytest.raises(MalformedMessage):
            LinkEnds.decode(RdmaWelcome.decode(broken).ends)


@given(ENDS, st.integers(0, 600), st.integers(1, 255))
def test_a_changed_byte_is_another_end_or_none(ends: LinkEnds, at: int, change: int) -> None:
    """Never an error of ours: other ends, or a refusal."""
    payload = bytearray(ends.encode())
    payload[at % len(payload)] ^= change
    with contextlib.suppress(MalformedMessage):
        assert LinkEnds.decode(bytes(payload)) != ends


def test_the_region_travels_in_the_address() -> None:
    """There and back, an IPv6 host too; what is none is refused."""
    for listens in ("10.0.0.1:7000", "[::1]:7000", "host:7000"):
        address = RegionAddress(listens=listens, base=0x7F00_1234_5000, rkey=0xABCD)
        assert RegionAddress.decode(address.encode()) == address
    for bad in ("10.0.0.1:7000", "10.0.0.1:7000/zz/1", "10.0.0.1:7000/1/1/1"):
        with pytest.raises(ValueError, match=r"unpack|literal"):
            RegionAddress.decode(bad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"qps": 0},
        {"qps": 17},
        {"retries_max": 0},
        {"retries_max": 8},
        {"ack_timeout_code": 0},
        {"ack_timeout_code": 32},
        {"traffic_class": -1},
        {"traffic_class": 256},
    ],
)
def test_settings_out_of_range(wrong: dict[str, int]) -> None:
    """Each is refused by its name. A timeout of code 0 would be none at all."""
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        RdmaConfig(**wrong)  # type: ignore[arg-type]


def test_a_write_that_nobody_acknowledges_fails_in_time() -> None:
    """Timeout and repeats together have a limit: half a second by default, hours are refused."""
    assert 500 < RdmaConfig().unanswered_ms < 600
    assert RdmaConfig(ack_timeout_code=19).unanswered_ms < UNANSWERED_MS_MAX
    for code, retries in ((20, 7), (22, 1), (31, 1)):
        with pytest.raises(
            ValueError, match=f"^ack_timeout_code is {code}, with retries_max {retries}: .* at most 30,000"
        ):
            RdmaConfig(ack_timeout_code=code, retries_max=retries)


V2, V1 = "RoCE v2", "IB/RoCE v1"
LOCAL, IPV4, EMPTY = (
    "fe80:0000:0000:0000:aabb:ccff:fedd:eeff",
    "0000:0000:0000:0000:0000:ffff:0a00:0001",
    ":".join(["0000"] * 8),
)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def make_device(
    root: Path,
    name: str,
    gids: list[tuple[str, str]],
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    uverbs: str = "",
) -> Path:
    port = root / "class/infiniband" / name / "ports/1"
    write(port / "state", state)
    write(port / "link_layer", layer)
    for index, (gid, kind) in enumerate(gids):
        write(port / "gids" / str(index), gid)
        if kind:
            write(port / "gid_attrs/types" / str(index), kind)
            write(port / "gid_attrs/ndevs" / str(index), "eth0")
    if uverbs:
        write(root / "class/infiniband_verbs" / uverbs / "ibdev", name)
    return port


def test_the_best_address_of_the_best_device_is_found(tmp_path: Path) -> None:
    """RoCE v2 with an address that can be routed before InfiniBand, link-local and v1; a port that is down is none."""
    make_device(tmp_path, "mlx5_0", [(LOCAL, V1), (LOCAL, V2)], uverbs="uverbs0")
    make_device(tmp_path, "mlx5_1", [(LOCAL, V1), (EMPTY, ""), (IPV4, V1), (IPV4, V2)], uverbs="uverbs1")
    make_device(tmp_path, "mlx5_2", [(IPV4, V2)], state="1: DOWN", uverbs="uverbs2")
    make_device(tmp_path, "mlx5_3", [(LOCAL, V1)], layer="InfiniBand", uverbs="uverbs3")
    make_device(tmp_path, "mlx5_4", [(IPV4, V2)])
    ports = find_ports(tmp_path)
    assert [port.works for port in ports] == [True, True, False, True, False]
    best = choose_port(ports, "")
    assert best is not None and best.device == "mlx5_1"
    assert (best.best_gid.index, best.best_gid.kind, best.best_gid.netdev) == (3, GidKind.ROCE_V2, "eth0")
    named = choose_port(ports, "mlx5_3:1")
    assert named is not None and named.best_gid.kind is GidKind.INFINIBAND
    assert choose_port(ports, "mlx5_2") is None
    assert choose_port(ports, "mlx5_0:2") is None
    assert find_ports(tmp_path / "nothing") == []


def test_a_port_is_lost_with_its_device_its_link_or_its_address(tmp_path: Path) -> None:
    folder = make_device(tmp_path, "rxe0", [(IPV4, V2)], uverbs="uverbs0")
    (port,) = find_ports(tmp_path)
    assert why_lost(port, tmp_path) == ""
    write(folder / "gids/0", EMPTY)
    assert why_lost(port, tmp_path) == "the port has lost its address"
    write(folder / "state", "1: DOWN")
    assert why_lost(port, tmp_path) == "the port is down"
    (tmp_path / "class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert why_lost(port, tmp_path) == "the device has been taken away"


def test_counters_are_what_the_device_has(tmp_path: Path) -> None:
    folder = make_device(tmp_path, "rxe0", [])
    write(folder / "hw_counters/sent_pkts", "12")
    write(folder / "counters/port_rcv_data", "34")
    write(folder / "hw_counters/lifespan", "N/A (no PMA)")
    assert counters_of("rxe0", 1, tmp_path) == {"sent_pkts": 12, "port_rcv_data": 34}
    assert counters_of("rxe1", 1, tmp_path) == {}


def test_pyverbs_that_is_not_there_or_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what to do about it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delitem(__import__("sys").modules, "pyverbs", raising=False)
    with pytest.raises(RdmaUnavailable, match="apt-get install python3-pyverbs"):
        load_verbs((tmp_path,))
    write(tmp_path / "pyverbs/device.cpython-27-x86_64-linux-gnu.so", "")
    with pytest.raises(RdmaUnavailable, match=r"another Python \(device\.cpython-27"):
        load_verbs((tmp_path,))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Where everything is as it should be."""
    make_device(tmp_path / "sys", "rxe0", [(IPV4, V2)], uverbs="uverbs0")
    write(tmp_path / "dev/infiniband/uverbs0", "")
    write(tmp_path / "proc/self/status", "Name:\tbaton\nCapEff:\t0000000000000000")
    monkeypatch.setattr(doctor, "load_verbs", lambda _: None)
    return Machine(
        sysfs=tmp_path / "sys",
        devices=tmp_path / "dev",
        proc=tmp_path / "proc",
        verbs_folders=(),
        memlock_bytes=lambda: resource.RLIM_INFINITY,
    )


def missing(machine: Machine, **asked: object) -> list[tuple[str, str]]:
    findings = check_rdma(machine, **asked)  # type: ignore[arg-type]
    assert works(findings) == all(f.verdict is not Verdict.MISSING for f in findings)
    assert all(f.todo for f in findings if f.verdict is not Verdict.GOOD)
    return [(f.what, f.text) for f in findings if f.verdict is Verdict.MISSING]


def changed(machine: Machine, **fields: object) -> Machine:
    names = ("sysfs", "devices", "proc", "verbs_folders", "memlock_bytes")
    return Machine(**{**{name: getattr(machine, name) for name in names}, **fields})


def test_a_machine_with_everything_works(machine: Machine) -> None:
    assert missing(machine) == []
    assert missing(machine, wanted="rxe0:1") == []
    assert missing(machine, wanted="mlx5_0") == [("device", "mlx5_0 cannot be used")]


def test_each_thing_that_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One after the other taken away: the device, its link, its address, the module, the file, pyverbs, the memory."""
    assert missing(changed(machine, sysfs=tmp_path / "none")) == [("device", "no RDMA device")]
    write(machine.sysfs / "class/infiniband/rxe0/ports/1/state", "1: DOWN")
    assert missing(machine) == [("device", "rxe0:1 is DOWN")]
    write(machine.sysfs / "class/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    write(machine.sysfs / "class/infiniband/rxe0/ports/1/gids/0", EMPTY)
    assert missing(machine) == [("device", "rxe0:1 has no address")]
    write(machine.sysfs / "class/infiniband/rxe0/ports/1/gids/0", IPV4)
    (machine.devices / "infiniband/uverbs0").unlink()
    assert missing(machine) == [("module", f"{machine.devices}/infiniband/uverbs0 is not there")]
    write(machine.devices / "infiniband/uverbs0", "")

    def no_verbs(_: object) -> None:
        raise RdmaUnavailable("pyverbs is not installed; install it")

    with monkeypatch.context() as patch:
        patch.setattr(doctor, "load_verbs", no_verbs)
        assert missing(machine) == [("pyverbs", "pyverbs is not installed")]
    (machine.sysfs / "class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert [what for what, _ in missing(machine)] == ["module"]


def test_locked_memory_is_compared_with_the_region(machine: Machine) -> None:
    """A small limit is one too small, unless the region is smaller or the capability lifts it."""
    small = changed(machine, memlock_bytes=lambda: 8 << 20)
    assert [what for what, _ in missing(small)] == ["memory"]
    assert missing(small, region_bytes=1 << 20) == []
    assert [what for what, _ in missing(small, region_bytes=1 << 30)] == ["memory"]
    write(machine.proc / "self/status", "CapEff:\t0000000000004000")
    assert missing(small, region_bytes=1 << 30) == []


OPEN_MODULES = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
OTHER_MODULES = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@pytest.mark.parametrize(
    ("driver", "peermem", "verdict", "says"),
    [
        ("", False, Verdict.GOOD, "there is no NVIDIA driver"),
        (OPEN_MODULES, False, Verdict.GOOD, "memory of the host, and of GPUs as dma-bufs (open kernel modules)"),
        (OPEN_MODULES, True, Verdict.GOOD, "as dma-bufs (open kernel modules) or as peer memory (nvidia_peermem)"),
        (OTHER_MODULES, True, Verdict.GOOD, "memory of the host, and of GPUs as peer memory (nvidia_peermem)"),
        (OTHER_MODULES, False, Verdict.SLOWER, "regions on GPUs go by tcp: neither open kernel modules nor"),
    ],
)
def test_how_memory_of_gpus_can_be_registered_is_told(
    machine: Machine, driver: str, peermem: bool, verdict: Verdict, says: str
) -> None:
    """It keeps rdma from nothing but regions on GPUs."""
    if driver:
        write(machine.proc / "driver/nvidia/version", driver)
    if peermem:
        write(machine.sysfs / "module/nvidia_peermem/initstate", "live")
    (found,) = (finding for finding in check_rdma(machine) if finding.what == "regions")
    assert (found.verdict, says in found.text) == (verdict, True), found
    assert ("modprobe nvidia_peermem" in found.todo) == (verdict is Verdict.SLOWER)
    assert missing(machine) == []


def test_the_command_says_whether_it_works_and_ends_so() -> None:
    """On whatever machine this is: the exit code is the verdict, and each line has what to do where it is missing."""
    done = run_baton("doctor", "-o", "json")
    reported = json.loads(done.stdout)
    assert done.returncode == (0 if reported["rdma"] else 1)
    assert {finding["what"] for finding in reported["findings"]} >= {"device", "pyverbs", "poster", "memory"}
    assert all(bool(finding["todo"]) == (finding["verdict"] != "ok") for finding in reported["findings"])
    text = run_baton("doctor").stdout
    assert ("RDMA works here" in text) == reported["rdma"]


class Wrapper:
    """An object with a pointer where pyverbs' objects have one; to another Python object, or to nothing."""

    __slots__ = ("first",)
    first: bytes
    qp_num, cqe = 77, 5


@pytest.mark.parametrize("look", [channel_fd, qp_address, cq_address])
@pytest.mark.parametrize("set_", [True, False])
def test_structures_of_pyverbs_are_looked_at_before_they_are_used(look: Callable[[Any], int], set_: bool) -> None:
    """Something else is where a structure of libibverbs was expected, or nothing: an error, and no crash."""
    wrapper = Wrapper()
    if set_:
        wrapper.first = bytes(4096)
    with pytest.raises(RdmaUnavailable, match="pyverbs"):
        look(wrapper)


def test_an_object_without_room_for_a_pointer_is_no_wrapper() -> None:
    with pytest.raises(RdmaUnavailable, match="object has no structure"):
        qp_address(object())


def test_rdma_is_unavailable_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler and nothing built: the reason, and what to install."""
    monkeypatch.setattr(rdma_verbs, "rdma_library", lambda: None)
    monkeypatch.setattr(rdma_verbs, "load", lambda _: SimpleNamespace(status="not built: no C compiler was found"))
    with pytest.raises(RdmaUnavailable, match=r"not built: no C compiler was found; install a C compiler"):
        qp_address(Wrapper())
