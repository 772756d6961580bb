"""Configuration of a decode node. Section `[decode]`, environment `BATON_DECODE_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.errors import InvalidField, check_positive
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from baton.pod import PodConfig
from baton.retry_time import RESUMED_PAUSE_MS_MAX, RESUMED_WAIT_MS_MIN
from baton.rpc import RpcLimits
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.negotiation import DEFAULT_TRANSPORTS, check_transports
from kvtransfer.receiver import ReceiverConfig
from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from node.host_tier import SpillConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    name: str = field(metadata={"help": "name of this node, unique in the cluster"})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port of gRPC; port 0 takes any"})
    advertise: str | None = field(default=None, metadata={"help": "host:port that peers reach; default: what listens"})
    directory: str = field(default="127.0.0.1:7070", metadata={"help": DIRECTORY_HELP})
    engine: EngineConfig
    spill: SpillConfig = field(default_factory=SpillConfig)
    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    transports: tuple[TransportName, ...] = field(
        default=DEFAULT_TRANSPORTS, metadata={"help": "data transports offered to prefill nodes"}
    )
    data_listen: str | None = field(
        default=None,
        metadata={
            "help": "host:port of tcp data connections; default: any port of the host in listen, as for rdma, ucx"
        },
    )
    data_advertise_host: str | None = field(
        default=None, metadata={"help": "host that prefill nodes reach for data; default: the one in advertise"}
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
    requests_max: int = field(default=64, metadata={"help": "requests granted and running at a time"})
    finished_max: int = field(default=4_096, metadata={"help": "finished answers kept until the router has them"})
    finished_ms_max: int = field(default=60_000, metadata={"help": "how long a finished answer is kept"})
    orphan_ms: int = field(default=10_000, metadata={"help": "a request whose router is away this long is cancelled"})
    resumed_wait_ms: int = field(
        default=1_500,
        metadata={"help": "how long new requests stand back for one in the middle of its answer that found no room"},
    )
    resumed_hold_ms_max: int = field(
        default=5_000,
        metadata={"help": "how long they do so at most for one that asks again and again, from when it first asked"},
    )
    busy_retry_ms: int = field(default=200, metadata={"help": "a full node is worth another try after this at least"})
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def __post_init__(self) -> None:
        check_transports(self.transports, region_kind(self.engine))
        check_directory_setting(self.directory)
        if self.requests_max > self.engine.sequences_max:
            raise InvalidField("requests_max", f"must not exceed engine.sequences_max ({self.engine.sequences_max})")
        check_positive(self, "requests_max", "finished_max", "finished_ms_max", "orphan_ms", "busy_retry_ms")
        check_positive(self, "drain_ms_max", "stop_grace_ms")
        if self.resumed_wait_ms < RESUMED_WAIT_MS_MIN:
            raise InvalidField(
                "resumed_wait_ms",
                f"must be at least {RESUMED_WAIT_MS_MIN}, not {self.resumed_wait_ms}: routers ask again for such a "
                f"request after up to {RESUMED_PAUSE_MS_MAX} ms, and its way here takes time too",
            )
        if self.resumed_hold_ms_max < self.resumed_wait_ms:
            raise InvalidField(
                "resumed_hold_ms_max",
                f"must not be less than resumed_wait_ms ({self.resumed_wait_ms}), not {self.resumed_hold_ms_max}",
            )
