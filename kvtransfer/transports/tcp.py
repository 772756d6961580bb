"""Transport for any network: the writer sends records from its region, the receiver takes them into its own.

`tcp_wire` has the messages, `tcp_receiver` and `tcp_stream` the receiver's port and its receive threads, `tcp_connect`,
`tcp_writer`, `tcp_queue` and `tcp_frames` the writer's handshake, link, queue and frames, `tcp_payload` what calls the
kernel, `tcp_socket` the socket options.
"""

from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp_connect import TcpConnectError
from kvtransfer.transports.tcp_receiver import TcpReceiverPort
from kvtransfer.transports.tcp_stream import StreamLimits
from kvtransfer.transports.tcp_wire import RefusalReason
from kvtransfer.transports.tcp_writer import TcpWriterLink

__all__ = [
    "RefusalReason",
    "StreamLimits",
    "TcpConfig",
    "TcpConnectError",
    "TcpReceiverPort",
    "TcpWriterLink",
]
