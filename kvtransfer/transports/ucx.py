"""Transport over what UCX finds (RoCE, InfiniBand, EFA, tcp, shared memory), through NIXL's Python package.

Optional, and never chosen unless `transports` names it. `ucx_wire` has the messages, `ucx_nixl` the agent of one link
(NIXL is imported there, when the first is made), `ucx_receiver` and `ucx_connection` the receiver's port, `ucx_connect`
and `ucx_writer` the writer's handshake and link, `ucx_offer` whether it is offered, `ucx_checks` what `baton doctor`
looks at. Half of the link is rdma's too (`chain_link`, `rdma_queue`), as are seals and words of the handshake
(`seal_gather`, `connect_words`).
"""

from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx_connect import UcxConnectError
from kvtransfer.transports.ucx_nixl import UcxUnavailable
from kvtransfer.transports.ucx_receiver import UcxReceiverPort
from kvtransfer.transports.ucx_wire import RefusalReason
from kvtransfer.transports.ucx_writer import UcxWriterLink

__all__ = [
    "RefusalReason",
    "UcxConfig",
    "UcxConnectError",
    "UcxReceiverPort",
    "UcxUnavailable",
    "UcxWriterLink",
]
