"""Configuration of a router. Section `[router]`, environment `BATON_ROUTER_*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path

from baton.config import fixed, setting
from baton.endpoint import Network
from baton.errors import InvalidField, check_positive
from baton.rpc import RpcLimits
from baton.runtime import ProcessConfig
from baton.tls import check_listens
from baton.wire import NAME
from router.answer_forms import ToolForm
from router.request import CACHE_SALT_BYTES_MAX
from router.retries import RetryConfig

WORKERS_MAX = 64
PIN_TTL_MS_MAX = 366 * 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """One prefix: exactly one of `text`, `token_ids` and `system` is set."""

    name: str
    text: str | None = None
    """The start of text prompts."""
    token_ids: tuple[int, ...] | None = None
    system: str | None = None
    """The system message of chats, rendered by the model's template."""
    cache_salt: str | None = None
    ttl_ms: int | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            problem = "use 1 to 63 letters, digits or '._-', beginning with a letter or digit"
            raise InvalidField("name", f"'{self.name[:80]}' is no name of a pin: {problem}")
        given = [each for each in (self.text, self.token_ids, self.system) if each is not None]
        if len(given) != 1:
            raise InvalidField("prefix", f"of text, token_ids and system exactly one must be set, not {len(given)}")
        if not given[0]:
            raise InvalidField("prefix", "is empty: there is nothing to pin")
        if self.token_ids is not None and not all(0 <= token < 1 << 32 for token in self.token_ids):
            raise InvalidField("token_ids", "has a number that is not a token id")
        if self.cache_salt is not None and not 0 < len(self.cache_salt.encode()) <= CACHE_SALT_BYTES_MAX:
            raise InvalidField(
                "cache_salt", f"must have 1 to {CACHE_SALT_BYTES_MAX} bytes of UTF-8; leave it out for none"
            )
        if self.ttl_ms is not None and not 0 < self.ttl_ms <= PIN_TTL_MS_MAX:
            raise InvalidField(
                "ttl_ms", f"is {self.ttl_ms}; it must be 1 to {PIN_TTL_MS_MAX}; leave it out to keep the pin for good"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PinKeeperConfig:
    count_max: int = setting(
        64,
        "pinned prefixes that this router keeps",
        "More prefixes are pinned. Their blocks are taken from the region of every node.",
    )
    lease_ms: int = setting(
        60_000,
        "how long nodes keep a pin that no router renews; routers renew three times as often",
        "Pins should stay longer while all routers are away, or go sooner.",
    )
    call_ms_max: int = fixed(2_000)
    """How long one node may take to answer about one pin."""

    def __post_init__(self) -> None:
        check_positive(self, "count_max", "lease_ms", "call_ms_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    name: str = setting("router-0", "name of this router, unique in the cluster", "There is more than one router.")
    listen: str = setting(
        "127.0.0.1:7000",
        "host:port of gRPC; port 0 takes any",
        "Clients or nodes are on other machines, or the port is in use.",
    )
    admin_listen: str = setting(
        "127.0.0.1:0",
        "host:port of gRPC for operators (status, drain, pins); port 0 takes any",
        "Commands run on other machines, or firewalls need a fixed port. Clients must not reach it.",
    )
    model: str | None = setting(
        None, "model whose tokenizer to use; none: requests must have token ids", "Clients send text or chats."
    )
    tool_parser: ToolForm | None = setting(
        None,
        "form in which the model writes calls of tools; none: as its chat template shows",
        "Chats with tools are refused as the form is not known, or calls come as text.",
    )
    http_listen: str | None = setting(
        None,
        "host:port of the OpenAI endpoints over HTTP; none: off",
        "Clients use HTTP.",
    )
    metrics_listen: str | None = setting(
        None, "host:port of /metrics over HTTP; none: off", "Prometheus scrapes the router. Clients need not reach it."
    )
    api_keys_file: Path | None = setting(
        None,
        "TOML file of API keys (`baton key new` makes them), taken anew when it changes; none: everybody may ask",
        "Clients that you do not trust reach the router, or some clients are to get less than others.",
    )
    workers: int = setting(
        1,
        "processes that serve this router's clients; with more than one, a parent beside them owns the ports",
        "One core is not enough for the router's streams. Each needs a core and its own memory.",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "names that clients may call the model by, the first of them the usual one; none: the model's own",
        "Clients ask for a model by a name that is not its folder's.",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origins whose pages may call the HTTP endpoints, such as https://chat.example.org, or * for all; none: off",
        "Pages in browsers call the router, and no proxy in front answers for it.",
    )
    http_connections_max: int = setting(
        2_048, "HTTP connections at the same time", "More clients keep connections open."
    )
    http_body_bytes_max: int = setting(4 << 20, "bytes of the body of an HTTP call", "Clients send longer prompts.")
    http_head_ms_max: int = fixed(10_000)
    """How long the head of an HTTP call may take."""
    http_body_ms_max: int = fixed(60_000)
    """How long its body may take."""
    http_body_ms_free: int = fixed(10_000)
    """How long of it may pass before the rate of its bytes counts."""
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "networks whose X-Forwarded-For says where an HTTP call comes from",
        "Clients come through a proxy: without this they share the connections that one address may have.",
    )
    max_tokens_default: int | None = setting(
        None,
        "output tokens of a request that names no limit; none: what the context leaves, but prompt and answer take "
        "at most 1/32 of the smallest decode region, and the answer always gets 256",
        "Answers are cut off, or fewer requests run together because each is promised too many blocks.",
    )
    generation_config: bool = setting(
        True,
        "sampling values that a request does not name come from the model's generation_config.json; off: "
        "temperature 1 and nothing else",
        "Clients expect the defaults of the API, not those of the model.",
    )
    prompt_chars_max: int = setting(2_000_000, "characters of a prompt that is sent as text", "Prompts are longer.")
    rpc: RpcLimits = field(default_factory=lambda: RpcLimits(rpcs_max=4_096))
    """More calls than requests that nodes have and that wait: the line refuses, not the server."""
    requests_max: int = setting(
        1_024,
        "requests of this router that nodes have at the same time; others wait in line",
        "The cluster serves more than this, or memory is short.",
    )
    line_requests_max: int = setting(
        1_024,
        "requests that wait in line in this router; one more is refused with 429",
        "Clients should be refused sooner in a full cluster, or come in larger bursts (see rpc.rpcs_max and "
        "http_connections_max too).",
    )
    placement_wait_ms_max: int = setting(
        5_000,
        "how long a request may look for a node while none is ready or reached; waiting for room does not count",
        "Nodes are restarted or replaced, and clients should wait until they are back.",
    )
    placement_retry_ms: int = fixed(50)
    """Pause between two looks for a node, or for room; it doubles a few times."""
    client_tokens_unread_max: int = setting(
        2_048,
        "tokens kept for a client that does not read; with more it is disconnected",
        "Slow clients are cut off in long answers, or memory is short.",
    )
    client_stall_ms: int = setting(
        1_000,
        "how long a client with too many unread tokens must have read nothing before it is disconnected",
        "Clients pause for longer in the middle of an answer.",
    )
    lame_duck_ms: int = setting(
        5_000,
        "how long a router that is to end or to be drained is not ready, but serves new requests still",
        "Load balancers look at readiness less often than this, or nothing stands before the router (0: none).",
    )
    known_nodes_file: Path | None = setting(
        None,
        "file that the router keeps the last known nodes in, to serve from them when it starts while the directory is "
        "away; none: it waits for the directory",
        "Routers are restarted or added while the directory may be away. Each needs a file of its own.",
    )
    retries: RetryConfig = field(default_factory=RetryConfig)
    cancel_ms_max: int = fixed(1_000)
    """How long one cancel call to a node may take."""
    cancel_tries_max: int = fixed(3)
    """Cancel calls before the node is left to its timers."""
    pinned_prefixes: tuple[PinnedPrefix, ...] = setting(
        (),
        "prefixes that nodes keep cached: JSON; in the file [[router.pinned_prefixes]]",
        "A system prompt should stay cached even while nobody uses it.",
    )
    pins: PinKeeperConfig = field(default_factory=PinKeeperConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        check_listens(self, "admin_listen")
        names = [prefix.name for prefix in self.pinned_prefixes]
        if len(set(names)) < len(names) or len(names) > self.pins.count_max:
            raise InvalidField("pinned_prefixes", f"must have different names and be {self.pins.count_max} at most")
        if self.max_tokens_default is not None:
            check_positive(self, "max_tokens_default")
        self.trusted_networks()
        if self.workers > WORKERS_MAX:
            raise InvalidField("workers", f"must be {WORKERS_MAX} at most, not {self.workers}")
        numbers = [name for name, kind in RouterConfig.__annotations__.items() if kind == "int"]
        check_positive(self, *(name for name in numbers if name != "lame_duck_ms" or self.lame_duck_ms))

    def trusted_networks(self) -> tuple[Network, ...]:
        try:
            return tuple(map(ip_network, self.trusted_proxies))
        except ValueError as error:
            raise InvalidField("trusted_proxies", f"must be networks like 10.0.0.0/8: {error}") from error
