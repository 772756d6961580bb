"""Which transports a node's region is offered by, without the node."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, UcxConfig
from node.pool import RegionTransports, open_transports
from node.regions import PoolRegion

RDMA, UCX, TCP = TransportName.RDMA, TransportName.UCX, TransportName.TCP


async def offer(region: PoolRegion, *transports: TransportName, remote_writes: bool = True) -> RegionTransports:
    """As `open_transports`, and closed again."""
    config: Any = SimpleNamespace(transports=transports, rdma=RdmaConfig(), ucx=UcxConfig())
    async with AsyncExitStack() as opened:
        return open_transports(config, region, opened, remote_writes=remote_writes)
