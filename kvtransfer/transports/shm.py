"""Transport between processes of one machine: the receiver's region is a memfd, the writer maps it and copies into it.

`shm_wire` has the messages, `shm_fence` the receiver's book of who may still write, `shm_receiver` and `shm_writer` the
two sides, `shm_copy` the copying threads.
"""

from kvtransfer.transport import TooManyPairs
from kvtransfer.transports.shm_copy import WriteOutOfBounds
from kvtransfer.transports.shm_receiver import ShmReceiverConfig, ShmReceiverPort
from kvtransfer.transports.shm_wire import RefusalReason
from kvtransfer.transports.shm_writer import ShmConnectError, ShmWriterConfig, ShmWriterLink

__all__ = [
    "RefusalReason",
    "ShmConnectError",
    "ShmReceiverConfig",
    "ShmReceiverPort",
    "ShmWriterConfig",
    "ShmWriterLink",
    "TooManyPairs",
    "WriteOutOfBounds",
]
