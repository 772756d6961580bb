"""A node none of whose transports works does not start."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import InvalidField
from kvtransfer.receiver import ReceiverPorts
from kvtransfer.transport import RegionKind, TransportName
from node import peers, receiver
from node.peers import Peers
from node.receiver import open_ports

NEITHER = (TransportName.RDMA, TransportName.UCX)


POOL: Any = SimpleNamespace(region=SimpleNamespace(kind=RegionKind.HOST))


def start_prefill(config: Any) -> None:
    Peers(runtime=None, config=config, pool=POOL)  # type: ignore[arg-type]


def start_decode(config: Any) -> None:
    open_ports(config, POOL, ReceiverPorts(None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "start"), [(peers, start_prefill), (receiver, start_decode)])
def test_a_node_with_nothing_to_offer_does_not_start(
    monkeypatch: pytest.MonkeyPatch, module: Any, start: Callable[[Any], None]
) -> None:
    """Two transports are named that need what is not here: the node says so instead of being ready for nobody."""

    class Loop:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("nothing is to be made")

    monkeypatch.setattr(module, "register_if_usable", lambda *_, **__: None)
    monkeypatch.setattr(module, "usable", lambda *_: False)
    monkeypatch.setattr(module.asyncio, "get_running_loop", Loop)
    part = SimpleNamespace(tls="all", copy_threads=1)
    config = SimpleNamespace(transports=NEITHER, rdma=part, ucx=part, shm=part)
    with pytest.raises(InvalidField, match="names none that works on this machine; `baton doctor` says why"):
        start(config)
