"""Configuration of a router. Section `[router]`, environment `BATON_ROUTER_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from baton.runtime import ProcessConfig
from router.pin_config import PinKeeperConfig, PinnedPrefix
from router.retries import RetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    name: str = setting("router-0", "name of this router, unique in the cluster", "There is more than one router.")
    listen: str = setting(
        "127.0.0.1:7000",
        "host:port of gRPC; port 0 takes any",
        "Clients or nodes are on other machines, or the port is in use.",
    )
    model: str | None = setting(
        None, "model whose tokenizer to use; none: requests must have token ids", "Clients send text or chats."
    )
    http_listen: str | None = setting(
        None,
        "host:port of the OpenAI endpoints and of /metrics over HTTP; none: off",
        "Clients use HTTP, or Prometheus scrapes the router.",
    )
    http_connections_max: int = setting(
        2_048, "HTTP connections at the same time", "More clients keep connections open."
    )
    http_body_ms_max: int = fixed(60_000)
    """How long the head of an HTTP call may take, and then its body."""
    max_tokens_default: int | None = setting(
        None,
        "output tokens of a request that names no limit; none: what the context leaves, at most so many that "
        "prompt and answer take 1/32 of the smallest decode region, and no fewer than 256",
        "Answers are cut off, or fewer requests run together because each is promised too many blocks.",
    )
    generation_config: bool = setting(
        True,
        "sampling values that a request does not name come from the model's generation_config.json; off: "
        "temperature 1 and nothing else",
        "Clients count on the defaults of the API instead of those of the model.",
    )
    prompt_chars_max: int = setting(2_000_000, "characters of a prompt that is sent as text", "Prompts are longer.")
    requests_max: int = setting(
        1_024, "requests in this router at the same time", "The cluster serves more than this, or memory is short."
    )
    placement_wait_ms_max: int = setting(
        5_000,
        "how long a request may look for a node with room before it is refused",
        "Clients should wait longer in a full cluster, or be refused sooner.",
    )
    placement_retry_ms: int = fixed(50)
    """Pause between two looks for a node; it doubles, up to 400 ms for a resumed request."""
    client_tokens_unread_max: int = setting(
        2_048,
        "tokens kept for a client that does not read; with more it is disconnected",
        "Slow clients are cut off in long answers, or memory is short.",
    )
    client_stall_ms: int = setting(
        1_000,
        "how long such a client must have read nothing before it is disconnected",
        "Clients pause for longer in the middle of an answer.",
    )
    retries: RetryConfig = field(default_factory=RetryConfig)
    cancel_ms_max: int = fixed(1_000)
    """How long one cancel call to a node may take."""
    cancel_tries_max: int = fixed(3)
    """Cancel calls before the node is left to its timers."""
    prefix_blocks_max: int = setting(
        65_536,
        "prompt blocks remembered for each prefill node, to send requests where their prefix is cached",
        "Nodes cache more blocks than this. Each takes about 100 bytes here.",
    )
    pinned_prefixes: tuple[PinnedPrefix, ...] = setting(
        (),
        "prefixes that nodes keep cached: JSON; in the file [[router.pinned_prefixes]]",
        "A system prompt should stay cached though it is not asked for in a while.",
    )
    pins: PinKeeperConfig = field(default_factory=PinKeeperConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
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
            "client_tokens_unread_max",
            "client_stall_ms",
            "cancel_ms_max",
            "cancel_tries_max",
            "prefix_blocks_max",
            "http_connections_max",
            "http_body_ms_max",
        )
