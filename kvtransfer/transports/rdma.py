"""Transport over RDMA (RoCE, InfiniBand): the writer's device writes straight into the receiver's registered region.

`rdma_wire` has the messages, `rdma_ports` finds devices, `rdma_verbs`
imports pyverbs, `rdma_regions` registers a region wherever it lies, `rdma_device` has the opened device and the queue
pairs, `rdma_memory` the registered region and what happens when the device goes and comes, `rdma_receiver` and
`rdma_connection` the receiver's port, `rdma_connect`, `rdma_writer`, `rdma_queue` and `rdma_poster` the writer's
handshake, link, queue and posting (`native/rdma_poster.c`), `rdma_offer` whether it is offered at all, and
`rdma_checks` what `baton doctor` looks at. `chain_link`, `connect_words` and `seal_gather` are ucx's too.
"""

from kvtransfer.transports.rdma_connect import RdmaConnectError, RdmaLinkLimits, RdmaUnproved
from kvtransfer.transports.rdma_device import RdmaLimits
from kvtransfer.transports.rdma_memory import RdmaMemory
from kvtransfer.transports.rdma_receiver import RdmaReceiverPort
from kvtransfer.transports.rdma_regions import DeviceBytes, HostBytes, RdmaRegion
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.rdma_wire import RefusalReason
from kvtransfer.transports.rdma_writer import RdmaWriterLink
from kvtransfer.transports.settings import RdmaConfig

__all__ = [
    "DeviceBytes",
    "HostBytes",
    "RdmaConfig",
    "RdmaConnectError",
    "RdmaLimits",
    "RdmaLinkLimits",
    "RdmaMemory",
    "RdmaReceiverPort",
    "RdmaRegion",
    "RdmaUnavailable",
    "RdmaUnproved",
    "RdmaWriterLink",
    "RefusalReason",
]
