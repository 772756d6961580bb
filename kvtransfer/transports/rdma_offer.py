"""Whether a node offers rdma: it does where it was not forbidden and a device works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_device import RDMA_LIMITS
from kvtransfer.transports.rdma_memory import RdmaMemory
from kvtransfer.transports.rdma_ports import find_ports
from kvtransfer.transports.rdma_poster import rdma_library
from kvtransfer.transports.rdma_regions import RdmaRegion
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.settings import RdmaConfig

log = get_log("rdma")


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRegistration:
    """One registration for both halves of a node, made and closed by whoever lends it. None: rdma is not offered.

    Open to remote writes for the receiving half; of the writing half's queue pairs none takes any.
    """

    memory: RdmaMemory | None


def register_if_usable(
    transports: Sequence[TransportName],
    region: RdmaRegion,
    config: RdmaConfig,
    loop: asyncio.AbstractEventLoop,
    *,
    remote_writes: bool,
) -> RdmaMemory | None:
    """The region, registered once as a whole; the caller closes it. None: rdma is not to be offered, or cannot be,
    which is logged. May take seconds: the region is pinned.

    Raises:
        InvalidField: rdma alone is to be offered, and it does not work here.
    """
    if TransportName.RDMA not in transports:
        return None
    try:
        memory = RdmaMemory(region=region, config=config, loop=loop, remote_writes=remote_writes, limits=RDMA_LIMITS)
    except RdmaUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has rdma alone, which does not work here: {error}. `baton doctor` tells more"
            ) from error
        # On a machine without any such device that is nothing to warn of.
        (log.warning if find_ports() else log.debug)("rdma is not offered", reason=str(error))
        return None
    rdma_library()  # built now if it has to be, and not by the first link, with everything else waiting
    device = memory.device
    assert device is not None
    # That there is no dma-buf is nothing to warn of: peer memory moves the same bytes the same way.
    log.info(
        "rdma is offered",
        device=device.port.device,
        port=device.port.number,
        gid=device.port.best_gid.kind.name,
        region=device.registration.told,
    )
    return memory
