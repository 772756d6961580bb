"""What the configurations of all serving nodes have in common: a key means the same in `[prefill]`, `[decode]` and
`[mixed]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.errors import check_positive
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from baton.pod import PodConfig
from baton.rpc import RpcLimits
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.negotiation import DEFAULT_TRANSPORTS, FallbackConfig, check_transports
from kvtransfer.receiver import ReceiverConfig
from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from kvtransfer.writer import WriterConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    name: str = field(metadata={"help": "name of this node, unique in the cluster"})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port of gRPC; port 0 takes any"})
    advertise: str | None = field(default=None, metadata={"help": "host:port that peers reach; default: what listens"})
    directory: str = field(default="127.0.0.1:7070", metadata={"help": DIRECTORY_HELP})
    engine: EngineConfig
    transports: tuple[TransportName, ...] = field(
        default=DEFAULT_TRANSPORTS, metadata={"help": "data transports offered to other nodes, best first"}
    )
    shm: ShmConfig = field(default_factory=ShmConfig)
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    pod: PodConfig = field(default_factory=PodConfig)
    busy_retry_ms: int = field(
        default=200, metadata={"help": "a full queue or node is worth another try after this at least"}
    )
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def check(self) -> None:
        """For `__post_init__`. Raises InvalidField."""
        check_transports(self.transports, region_kind(self.engine))
        check_directory_setting(self.directory)
        check_positive(self, "busy_retry_ms", "drain_ms_max", "stop_grace_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterNodeConfig(NodeConfig):
    """Of a node that writes to others."""

    writer: WriterConfig = field(default_factory=WriterConfig)
    fallback: FallbackConfig = field(default_factory=FallbackConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverNodeConfig(NodeConfig):
    """Of a node that others write to."""

    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    data_listen: str | None = field(
        default=None,
        metadata={
            "help": "host:port of tcp data connections; default: any port of the host in listen, as for rdma, ucx"
        },
    )
    data_advertise_host: str | None = field(
        default=None, metadata={"help": "host that writing nodes reach for data; default: the one in advertise"}
    )
