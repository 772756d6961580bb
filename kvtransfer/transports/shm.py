"""Transport between processes of one machine: the receiver's region is a memfd, the writer maps it and copies into it.

`shm_wire` has the messages, `shm_receiver` the receiver's port, `shm_connect`, `shm_writer` and `shm_copy` the writer's
handshake, link and copying threads. What all transports share is in `base_link` and `link_end`, `base_port` and
`acceptor`, `pair_fence` and `port_fences` (who may still write), `posted_writes`, `drains` and `loop_calls`.
"""

from kvtransfer.transport import TooManyPairs, WriteOutOfBounds
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm_connect import ShmConnectError
from kvtransfer.transports.shm_receiver import ShmPortLimits, ShmReceiverPort
from kvtransfer.transports.shm_wire import RefusalReason
from kvtransfer.transports.shm_writer import ShmLinkLimits, ShmWriterLink, copy_turns

__all__ = [
    "RefusalReason",
    "ShmConfig",
    "ShmConnectError",
    "ShmLinkLimits",
    "ShmPortLimits",
    "ShmReceiverPort",
    "ShmWriterLink",
    "TooManyPairs",
    "WriteOutOfBounds",
    "copy_turns",
]
