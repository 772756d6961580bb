"""Why a pair does not use a better transport: a reason for each that one of the two sides offers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtransfer.link import (
    ANOTHER_MACHINE,
    LOST_THERE,
    NOBODY_CAN_MEND,
    NOT_HERE,
    NOT_THERE,
    OTHER_MEMORY,
    SERVED_BY,
    choose,
    host_difference,
    host_parts,
    rejected_transports,
)
from kvtransfer.transport import RegionKind, TransportName

IPC, SHM, RDMA, UCX, TCP = (
    TransportName.CUDA_IPC, TransportName.SHM, TransportName.RDMA, TransportName.UCX, TransportName.TCP,
)  # fmt: skip
PIDS = "another PID namespace"


@pytest.mark.parametrize(
    ("offered", "own", "withdrawn", "apart", "chosen", "reported"),
    [
        ("shm tcp", (SHM, TCP), (), "", SHM, {}),
        ("shm tcp", (SHM, TCP), (), PIDS, TCP, {"shm": PIDS}),
        ("shm tcp", (SHM, TCP), (), ANOTHER_MACHINE, TCP, {"shm": ANOTHER_MACHINE}),
        ("shm tcp", (TCP,), (), "", TCP, {"shm": NOT_THERE}),
        ("tcp", (SHM, TCP), (), "", TCP, {"shm": NOT_HERE}),
        ("tcp", (SHM, TCP), (), ANOTHER_MACHINE, TCP, {"shm": ANOTHER_MACHINE}),
        # What neither offers is not rejected.
        ("tcp", (TCP,), (), "", TCP, {}),
        ("shm rdma tcp", (SHM, TCP), (), ANOTHER_MACHINE, TCP, {"shm": ANOTHER_MACHINE, "rdma": NOT_THERE}),
        ("shm rdma tcp", (SHM, TCP), (RDMA,), ANOTHER_MACHINE, TCP, {"shm": ANOTHER_MACHINE, "rdma": LOST_THERE}),
        ("shm rdma tcp", (SHM, TCP), (RDMA,), "", SHM, {}),
        ("tcp", (TCP,), (RDMA,), "", TCP, {"rdma": NOT_HERE}),
        # The writer's order is a policy: what it puts last is not better.
        ("tcp shm", (SHM, TCP), (), "", TCP, {}),
        ("warp tcp", (SHM, UCX, TCP), (), "", TCP, {"warp": NOT_THERE, "shm": NOT_HERE, "ucx": NOT_HERE}),
        # A region on a device and one in host memory: neither's own transport would do.
        ("cuda_ipc rdma tcp", (SHM, TCP), (), "", TCP,
         {"cuda_ipc": OTHER_MEMORY, "rdma": NOT_THERE, "shm": OTHER_MEMORY}),
    ],
)  # fmt: skip
def test_each_better_transport_has_a_reason(
    offered: str,
    own: tuple[TransportName, ...],
    withdrawn: tuple[TransportName, ...],
    apart: str,
    chosen: TransportName,
    reported: dict[str, str],
) -> None:
    names = offered.split()
    assert choose(names, own, same_host=not apart) is chosen
    found = rejected_transports(chosen, names, own, withdrawn=withdrawn, apart=apart)
    assert {other.transport: other.why for other in found} == reported
    assert len(found) == len(reported)


def test_whatever_is_offered_all_that_is_better_is_told_once_and_nothing_else() -> None:
    """Every pair of offers in the default order, on one host and on two: what comes before the chosen one in the order,
    and one side has, is told once."""
    subsets = [
        tuple(t for t in TransportName if t in chosen)
        for kind in RegionKind
        for count in range(1, len(SERVED_BY[kind]) + 1)
        for chosen in itertools.combinations(SERVED_BY[kind], count)
    ]
    for writer, receiver, apart in itertools.product(subsets, subsets, ("", PIDS)):
        chosen = choose([t.value for t in writer], receiver, same_host=not apart)
        if chosen is None:
            continue
        found = rejected_transports(chosen, [t.value for t in writer], receiver, apart=apart)
        order = list(TransportName)
        better = {t.value for t in {*writer, *receiver} if order.index(t) < order.index(chosen)}
        assert sorted(other.transport for other in found) == sorted(better), (writer, receiver, apart)


def test_only_what_nobody_can_mend_is_expected() -> None:
    (machine,) = rejected_transports(TCP, ["shm", "tcp"], (SHM, TCP), apart=ANOTHER_MACHINE)
    (pids,) = rejected_transports(TCP, ["shm", "tcp"], (SHM, TCP), apart=PIDS)
    assert [other.why in NOBODY_CAN_MEND for other in (machine, pids)] == [True, False]
    assert (pids.transport, pids.why) == ("shm", "another PID namespace")


@pytest.mark.parametrize(
    ("differ", "reported"),
    [
        ("", ""),
        ("p", "another PID namespace"),
        ("u", "another user"),
        ("np", "another network namespace and PID namespace"),
        ("m", "another machine"),
        ("mnp", "another machine"),
    ],
)
def test_what_keeps_two_processes_apart(differ: str, reported: str) -> None:
    """On another machine the namespaces differ too, and that says nothing."""
    other = [f"{part}'" if part in differ else part for part in "munp"]
    assert host_difference(list("munp"), other) == reported


def test_a_peer_that_does_not_say_what_its_host_is_made_of() -> None:
    assert host_difference([], list("munp")) == "another machine, user or namespace"


def test_the_parts_of_this_host(tmp_path: Path) -> None:
    """They are the same for processes with the same identity, and one of them differs where that does."""
    assert host_difference(host_parts(), host_parts()) == ""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    (tmp_path / "self/ns/net").symlink_to(Path("/proc/self/ns/net").readlink())
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    assert host_difference(host_parts(tmp_path), host_parts()) == PIDS
