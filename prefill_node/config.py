"""Configuration of a prefill node. Section `[prefill]`, environment `BATON_PREFILL_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.errors import InvalidField, check_positive
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from baton.pod import PodConfig
from baton.rpc import RpcLimits
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.negotiation import DEFAULT_TRANSPORTS, FallbackConfig, check_transports
from kvtransfer.transport import RegionKind, TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from kvtransfer.writer import WriterConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    name: str = field(metadata={"help": "name of this node, unique in the cluster"})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port of gRPC; port 0 takes any"})
    advertise: str | None = field(default=None, metadata={"help": "host:port that peers reach; default: what listens"})
    directory: str = field(default="127.0.0.1:7070", metadata={"help": DIRECTORY_HELP})
    engine: EngineConfig
    writer: WriterConfig = field(default_factory=WriterConfig)
    transports: tuple[TransportName, ...] = field(
        default=DEFAULT_TRANSPORTS, metadata={"help": "data transports offered to decode nodes, best first"}
    )
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    shm: ShmConfig = field(default_factory=ShmConfig)
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    pod: PodConfig = field(default_factory=PodConfig)
    queue_max: int = field(default=256, metadata={"help": "requests that wait for a place in the engine"})
    resumed_queue_max: int = field(
        default=256, metadata={"help": "requests in the middle of their answer that wait too, ahead of the others"}
    )
    decode_tries_max: int = field(default=3, metadata={"help": "decode nodes asked for one request before giving up"})
    affinity_blocks_max: int = field(
        default=65_536, metadata={"help": "prompt blocks remembered as sent to decode nodes, all of these together"}
    )
    busy_retry_ms: int = field(default=200, metadata={"help": "a full queue is worth another try after this at least"})
    rate_age_ms_max: int = field(
        default=10_000, metadata={"help": "how long a measured rate is told to the routers; afterwards it is unknown"}
    )
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def __post_init__(self) -> None:
        check_transports(self.transports, region_kind(self.engine))
        if self.writer.checksum_fraction and region_kind(self.engine) is RegionKind.DEVICE:
            raise InvalidField(
                "writer.checksum_fraction",
                "must be 0 where the region is on a device: a record is posted before the device has computed it",
            )
        check_directory_setting(self.directory)
        check_positive(
            self,
            "queue_max",
            "resumed_queue_max",
            "decode_tries_max",
            "affinity_blocks_max",
            "busy_retry_ms",
            "rate_age_ms_max",
            "drain_ms_max",
            "stop_grace_ms",
        )
