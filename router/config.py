"""Configuration of a router. Section `[router]`, environment `BATON_ROUTER_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.errors import check_positive
from baton.membership import MembershipConfig
from baton.rpc import RpcLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    name: str = field(default="router-0", metadata={"help": "name of this router, unique in the cluster"})
    listen: str = field(default="127.0.0.1:7000", metadata={"help": "host:port of gRPC; port 0 takes any"})
    advertise: str | None = field(default=None, metadata={"help": "host:port that peers reach; default: what listens"})
    directory: str = field(default="127.0.0.1:7070", metadata={"help": DIRECTORY_HELP})
    model: str | None = field(default=None, metadata={"help": "model whose tokenizer to use; none: ids only"})
    http_listen: str | None = field(
        default=None, metadata={"help": "host:port of the OpenAI endpoints and /metrics over HTTP; none: off"}
    )
    http_connections_max: int = field(default=2_048, metadata={"help": "HTTP connections at a time"})
    http_body_ms_max: int = field(
        default=60_000, metadata={"help": "how long the head of an HTTP call may take, and then its body"}
    )
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    max_tokens_default: int = field(default=256, metadata={"help": "output tokens of a request that names no limit"})
    prompt_chars_max: int = field(default=2_000_000, metadata={"help": "characters of a prompt that is sent as text"})
    requests_max: int = field(default=1_024, metadata={"help": "requests in this router at a time"})
    placement_wait_ms_max: int = field(
        default=5_000, metadata={"help": "how long a request may look for a node with room before it is refused"}
    )
    placement_retry_ms: int = field(default=50, metadata={"help": "pause between two looks"})
    decode_lost_ms: int = field(
        default=3_000, metadata={"help": "a decode node out of reach this long fails its requests"}
    )
    cancel_ms_max: int = field(default=1_000, metadata={"help": "how long one cancel call to a node may take"})
    cancel_tries_max: int = field(default=3, metadata={"help": "cancel calls before the node is left to its timers"})
    prefix_blocks_max: int = field(default=65_536, metadata={"help": "prompt blocks remembered for each prefill node"})
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def __post_init__(self) -> None:
        check_directory_setting(self.directory)
        check_positive(
            self,
            "max_tokens_default",
            "prompt_chars_max",
            "requests_max",
            "placement_wait_ms_max",
            "placement_retry_ms",
            "decode_lost_ms",
            "cancel_ms_max",
            "cancel_tries_max",
            "prefix_blocks_max",
            "drain_ms_max",
            "stop_grace_ms",
            "http_connections_max",
            "http_body_ms_max",
        )
