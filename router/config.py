"""Configuration of a router. Section `[router]`, environment `BATON_ROUTER_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.directory_setting import DIRECTORY_HELP, check_directory_setting
from baton.errors import InvalidField, check_positive
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from baton.rpc import RpcLimits
from router.pin_config import PinKeeperConfig, PinnedPrefix
from router.retries import RetryConfig


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
    http_send_buffer_bytes: int = field(
        default=131_072, metadata={"help": "bytes that the kernel may keep of what an HTTP client has not read"}
    )
    http_body_ms_max: int = field(
        default=60_000, metadata={"help": "how long the head of an HTTP call may take, and then its body"}
    )
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    rpc: RpcLimits = field(default_factory=RpcLimits)
    max_tokens_default: int | None = field(
        default=None,
        metadata={
            "help": "output tokens of a request that names no limit; none: what the context leaves, at most so many "
            "that prompt and answer take 1/32 of the smallest decode region, and no fewer than 256"
        },
    )
    generation_config: bool = field(
        default=True,
        metadata={
            "help": "sampling values that a request does not name come from the model's generation_config.json; off: "
            "temperature 1 and nothing else"
        },
    )
    prompt_chars_max: int = field(default=2_000_000, metadata={"help": "characters of a prompt that is sent as text"})
    requests_max: int = field(default=1_024, metadata={"help": "requests in this router at a time"})
    placement_wait_ms_max: int = field(
        default=5_000, metadata={"help": "how long a request may look for a node with room before it is refused"}
    )
    placement_retry_ms: int = field(
        default=50,
        metadata={"help": "pause between two looks; it doubles, up to 400 ms for one in the middle of its answer"},
    )
    client_tokens_unread_max: int = field(
        default=2_048, metadata={"help": "tokens kept for a client that does not read; with more it is cut off"}
    )
    client_stall_ms: int = field(
        default=1_000, metadata={"help": "how long such a client has taken nothing, so that a burst cuts nobody off"}
    )
    handed_off_ms_max: int = field(
        default=1_000, metadata={"help": "how long a finished answer waits for the prefill node's word on its handoff"}
    )
    retries: RetryConfig = field(default_factory=RetryConfig)
    cancel_ms_max: int = field(default=1_000, metadata={"help": "how long one cancel call to a node may take"})
    cancel_tries_max: int = field(default=3, metadata={"help": "cancel calls before the node is left to its timers"})
    prefix_blocks_max: int = field(default=65_536, metadata={"help": "prompt blocks remembered for each prefill node"})
    pinned_prefixes: tuple[PinnedPrefix, ...] = field(
        default=(), metadata={"help": "prefixes that nodes keep cached: JSON; in the file [[router.pinned_prefixes]]"}
    )
    pins: PinKeeperConfig = field(default_factory=PinKeeperConfig)
    drain_ms_max: int = field(
        default=60_000, metadata={"help": "how long SIGTERM waits for running requests before they are given up"}
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "how long running calls may take to end at a stop"})

    def __post_init__(self) -> None:
        check_directory_setting(self.directory)
        names = [prefix.name for prefix in self.pinned_prefixes]
        if len(set(names)) < len(names) or len(names) > self.pins.count_max:
            raise InvalidField(
                "pinned_prefixes", f"must have names of their own, at most {self.pins.count_max} of them"
            )
        if self.max_tokens_default is not None:
            check_positive(self, "max_tokens_default")
        check_positive(
            self,
            "prompt_chars_max",
            "requests_max",
            "placement_wait_ms_max",
            "placement_retry_ms",
            "handed_off_ms_max",
            "client_tokens_unread_max",
            "client_stall_ms",
            "cancel_ms_max",
            "cancel_tries_max",
            "prefix_blocks_max",
            "drain_ms_max",
            "stop_grace_ms",
            "http_connections_max",
            "http_send_buffer_bytes",
            "http_body_ms_max",
        )
