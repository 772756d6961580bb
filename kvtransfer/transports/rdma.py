"""Transport over RDMA (RoCE, InfiniBand): the writer's device writes straight into the receiver's registered region.

`rdma_wire` has the messages, `rdma_config` what is asked of the device, `rdma_ports` finds devices, `rdma_verbs`
imports pyverbs, `rdma_device` has the opened device and the queue pairs, `rdma_memory` the registered region and what
happens when the device goes and comes, `rdma_receiver` and `rdma_connection` the receiver's port, `rdma_connect`,
`rdma_writer`, `rdma_queue` and `rdma_poster` the writer's handshake, link, queue and posting (`native/rdma_poster.c`),
`rdma_offer` whether it is offered at all, and `rdma_checks` what `baton doctor` looks at. `chain_link`, `connect_words`
and `seal_gather` are ucx's too.
"""

from kvtransfer.transports.rdma_config import RdmaConfig
from kvtransfer.transports.rdma_connect import RdmaConnectError, RdmaUnproved, RdmaWriterConfig
from kvtransfer.transports.rdma_connection import RdmaReceiverConfig
from kvtransfer.transports.rdma_memory import RdmaMemory
from kvtransfer.transports.rdma_receiver import RdmaReceiverPort
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.rdma_wire import RefusalReason
from kvtransfer.transports.rdma_writer import RdmaWriterLink

__all__ = [
    "RdmaConfig",
    "RdmaConnectError",
    "RdmaMemory",
    "RdmaReceiverConfig",
    "RdmaReceiverPort",
    "RdmaUnavailable",
    "RdmaUnproved",
    "RdmaWriterConfig",
    "RdmaWriterLink",
    "RefusalReason",
]
