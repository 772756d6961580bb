"""Configuration of a mixed node. Section `[mixed]`, environment `BATON_MIXED_*`.

A key means what it means in `[prefill]` or `[decode]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from baton.directory_setting import DIRECTORY_HELP
from baton.errors import InvalidField
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from baton.pod import PodConfig
from baton.rpc import RpcLimits
from decode_node.config import DecodeConfig
from engine.build import EngineConfig
from kvtransfer.device.staging import StagingConfig
from kvtransfer.negotiation import DEFAULT_TRANSPORTS, FallbackConfig
from kvtransfer.receiver import ReceiverConfig
from kvtransfer.transport import TransportName
from kvtransfer.transports.settings import RdmaConfig, ShmConfig, TcpConfig, UcxConfig
from kvtransfer.writer import WriterConfig
from node.host_tier import SpillConfig
from prefill_node.config import PrefillConfig
from prefill_node.local_policy import LocalFallback, LocalPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    name: str = field(metadata={"help": "name of this node, unique in the cluster"})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port of gRPC; port 0 takes any"})
    advertise: str | None = field(default=None, metadata={"help": "host:port that peers reach; default: what listens"})
    directory: str = field(default="127.0.0.1:7070", metadata={"help": DIRECTORY_HELP})
    engine: EngineConfig
    spill: SpillConfig = field(default_factory=SpillConfig, metadata={"shown": False})
    """Must be off: here so that a refusal can say why."""
    handoff_tokens_min: int = field(
        default=256, metadata={"help": "a prompt with fewer tokens that are not cached here runs here; 0: none does"}
    )
    local_fallback: LocalFallback = field(
        default=LocalFallback.UNREACHABLE,
        metadata={"help": "when longer prompts run here too: never, when no decode node is reachable, or when all are "
                  "full as well"},
    )  # fmt: skip
    writer: WriterConfig = field(default_factory=WriterConfig)
    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    transports: tuple[TransportName, ...] = field(
        default=DEFAULT_TRANSPORTS, metadata={"help": "data transports offered to other nodes, best first"}
    )
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    data_listen: str | None = field(
        default=None, metadata={"help": "host:port of tcp data connections; default: any port of the host in listen"}
    )
    data_advertise_host: str | None = field(
        default=None, metadata={"help": "host that other nodes reach for data; default: the one in advertise"}
    )
    shm: ShmConfig = field(default_factory=ShmConfig)
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    pod: PodConfig = field(default_factory=PodConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    queue_max: int = field(default=256, metadata={"help": "requests that wait for a place in the engine"})
    resumed_queue_max: int = field(
        default=256, metadata={"help": "requests in the middle of their answer that wait too, ahead of the others"}
    )
    decode_tries_max: int = field(default=3, metadata={"help": "decode nodes asked for one request before giving up"})
    affinity_blocks_max: int = field(
        default=65_536, metadata={"help": "prompt blocks remembered as sent to decode nodes, all of these together"}
    )
    requests_max: int = field(default=64, metadata={"help": "requests kept, granted and running at a time"})
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
    busy_retry_ms: int = field(
        default=200, metadata={"help": "a full queue or node is worth another try after this at least"}
    )
    rate_age_ms_max: int = field(
        default=10_000, metadata={"help": "how long a measured rate is told to the routers; afterwards it is unknown"}
    )
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def __post_init__(self) -> None:
        """Raises InvalidField, by the same checks as those of the two halves, and for overcommit."""
        if self.spill.host_blocks:
            raise InvalidField(
                "spill.host_blocks",
                f"is {self.spill.host_blocks}; must be 0 on a mixed node, whose answers share its blocks with prompts "
                "that cannot be moved. Run decode nodes where answers should spill to host memory",
            )
        self.policy()
        self.prefill_half()
        self.decode_half()

    def policy(self) -> LocalPolicy:
        return LocalPolicy(handoff_tokens_min=self.handoff_tokens_min, fallback=self.local_fallback)

    def prefill_half(self) -> PrefillConfig:
        return PrefillConfig(**self._of(PrefillConfig))

    def decode_half(self) -> DecodeConfig:
        return DecodeConfig(**self._of(DecodeConfig))

    def _of(self, half: type[Any]) -> dict[str, Any]:
        """The keys that this class shares with one of the halves: all of that one's."""
        return {each.name: getattr(self, each.name) for each in fields(half)}
