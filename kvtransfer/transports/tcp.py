"""Transport for any network: the writer sends records from its region, the receiver takes them into its own.

`tcp_wire` has the messages, `tcp_receiver` and `tcp_stream` the receiver's port and its receive threads, `tcp_writer`
the writer's handshake and link, `tcp_lanes` its frames and streams, `tcp_payload` what calls the kernel, `tcp_socket`
the socket options.
"""

from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp_receiver import TcpReceiverPort
from kvtransfer.transports.tcp_stream import StreamLimits
from kvtransfer.transports.tcp_wire import RefusalReason
from kvtransfer.transports.tcp_writer import TcpConnectError, TcpWriterLink

__all__ = [
    "RefusalReason",
    "StreamLimits",
    "TcpConfig",
    "TcpConnectError",
    "TcpReceiverPort",
    "TcpWriterLink",
]
