"""What the configurations of prefill, decode and mixed nodes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import fixed, setting
from baton.errors import check_positive
from baton.pod import PodConfig
from baton.runtime import ProcessConfig
from baton.tls import check_listens
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.link import DEFAULT_TRANSPORTS, check_transports
from kvtransfer.receiver import ReceiverConfig
from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from kvtransfer.writer import WriterConfig
from node.regions import region_kind
from node.store import StoreConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(ProcessConfig):
    """Raises InvalidField for values that do not fit each other."""

    engine: EngineConfig
    transports: tuple[TransportName, ...] = setting(
        DEFAULT_TRANSPORTS,
        "data transports offered to other nodes, best first",
        "A transport must not be used, ucx is wanted, or the order does not suit the network.",
    )
    shm: ShmConfig = field(default_factory=ShmConfig)
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    pod: PodConfig = field(default_factory=PodConfig)
    writer: WriterConfig = field(default_factory=WriterConfig)
    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    data_listen: str | None = setting(
        None,
        "host:port of tcp data connections; none: any port of the host in listen, as for rdma and ucx",
        "Data goes through a network of its own, or firewalls need a fixed port.",
    )
    data_advertise_host: str | None = setting(
        None, "host that writers reach for data; none: the host in advertise", "Data goes through a network of its own."
    )
    busy_retry_ms: int = fixed(200)
    """A full queue or node is worth another try after this at least."""

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        check_transports(self.transports, region_kind(self.engine))
        check_positive(self, "busy_retry_ms")
        check_listens(self, "listen", "data_listen")
