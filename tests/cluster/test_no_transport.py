"""A node none of whose transports works does not start."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import InvalidField
from kvtransfer.transport import RegionKind, TransportName
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.ucx import UcxUnavailable
from node import pool

NEITHER = (TransportName.RDMA, TransportName.UCX)


@pytest.mark.parametrize("remote_writes", [False, True])
def test_a_node_with_nothing_to_offer_does_not_start(monkeypatch: pytest.MonkeyPatch, remote_writes: bool) -> None:
    """Two transports are named that need what is not here: a node that writes to others, or that others write to, says
    so instead of being ready for nobody. Nothing is open then that would have to be closed."""

    def missing(error: Exception) -> Callable[..., None]:
        def refuse(*_: object, **__: object) -> None:
            raise error

        return refuse

    monkeypatch.setattr(pool, "RdmaMemory", missing(RdmaUnavailable("no device")))
    monkeypatch.setattr(pool, "try_ucx", missing(UcxUnavailable("no NIXL")))
    config: Any = SimpleNamespace(transports=NEITHER, rdma=None, ucx=SimpleNamespace(tls="all"))
    region: Any = SimpleNamespace(kind=RegionKind.HOST, array_U8=bytes(1))
    nothing: Any = None
    with pytest.raises(InvalidField, match="names none that works on this machine; `baton doctor` says why"):
        pool.open_transports(config, region, nothing, remote_writes=remote_writes)
