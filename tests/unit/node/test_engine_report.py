"""What a node says of the ways on which its bytes move."""

from __future__ import annotations

import pytest

from kvtransfer.native.copy import copies_by
from kvtransfer.transport import RegionKind, TransportName
from kvtransfer.transports import rdma_verbs
from kvtransfer.transports.rdma_verbs import posts_by
from kvtransfer.transports.tcp import moved_by
from node.pool import transport_facts

IPC, SHM, RDMA, UCX, TCP = (
    TransportName.CUDA_IPC, TransportName.SHM, TransportName.RDMA, TransportName.UCX, TransportName.TCP,
)  # fmt: skip


def test_what_is_not_offered_is_told_and_what_cannot_be_is_not() -> None:
    """The configuration names five: of those that would serve a region in host memory, two do not work here. What moves
    the bytes of the others is told."""
    assert transport_facts((IPC, SHM, RDMA, UCX, TCP), RegionKind.HOST, ["shm", "tcp"]) == {
        "copies by": copies_by(),
        "tcp moved by": moved_by(),
        "not offered": "rdma, ucx: not usable here, `baton doctor` says why",
    }
    assert transport_facts((SHM,), RegionKind.HOST, ["shm"]) == {"copies by": copies_by()}


def test_a_region_on_a_device_is_reached_in_other_ways() -> None:
    """Neither shm nor what copies in host memory says anything there; cuda_ipc does, where the device refused it."""
    assert transport_facts((IPC, SHM, RDMA, TCP), RegionKind.DEVICE, ["rdma", "tcp"]) == {
        "rdma posted by": posts_by(),
        "not offered": "cuda_ipc: not usable here, `baton doctor` says why",
    }


@pytest.mark.parametrize(("library", "reported"), [(object(), "native"), (None, "nothing: no native library")])
def test_rdma_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch, library: object, reported: str) -> None:
    monkeypatch.setattr(rdma_verbs, "rdma_library", lambda: library)
    assert posts_by() == reported
