"""Transport between processes of one machine: the receiver's region is a memfd, the writer maps it and copies into it.

`shm_wire` has the messages, `shm_receiver` the receiver's port, `shm_writer` the writer's handshake, link and copying
threads. What the writers' links of all transports share is in `writer_link` and `post_queue`.
"""

from kvtransfer.transport import TooManyPairs, WriteOutOfBounds
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm_receiver import ShmPortLimits, ShmReceiverPort
from kvtransfer.transports.shm_wire import RefusalReason
from kvtransfer.transports.shm_writer import ShmConnectError, ShmLinkLimits, ShmWriterLink, copy_turns

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
