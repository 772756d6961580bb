"""What the configurations of prefill, decode and mixed nodes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import fixed
from baton.errors import check_positive
from baton.pod import PodConfig
from baton.runtime import NodeConfig
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.negotiation import DEFAULT_TRANSPORTS, check_transports
from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingNodeConfig(NodeConfig):
    """Raises InvalidField for values that do not fit each other."""

    engine: EngineConfig
    transports: tuple[TransportName, ...] = field(
        default=DEFAULT_TRANSPORTS,
        metadata={
            "help": "data transports offered to other nodes, best first",
            "when": "A transport must not be used, ucx is wanted, or the order does not suit the network.",
        },
    )
    shm: ShmConfig = field(default_factory=ShmConfig)
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    pod: PodConfig = field(default_factory=PodConfig)
    busy_retry_ms: int = fixed(200)
    """A full queue or node is worth another try after this at least."""

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        check_transports(self.transports, region_kind(self.engine))
        check_positive(self, "busy_retry_ms")
