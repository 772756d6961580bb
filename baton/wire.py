"""Node records and headers. In the program they are frozen values, on the wire protocol buffers. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeVar

from batonpb import common_pb2, directory_pb2
from google.protobuf.message import Message

from baton.endpoint import check_reachable
from baton.errors import BatonError, Reason, bad_field
from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle

LOCAL_TRANSPORT: Final = "local"
"""Stands in place of a transport's name when a mixed node keeps the request and writes nothing."""
RESUME_STATE_BYTES_MAX: Final = 1 << 20
"""What a router may ask a node to keep for each resumable request."""
GRAMMAR_BYTES_MAX: Final = 64 * 1024
"""Of a grammar as it is written."""
JSON_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of a JSON text. Bounded: a model may else write white space up to max_tokens."""
TIME_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of the classes that times are counted in."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of nodes, pins and API keys."""
_E = TypeVar("_E", bound=IntEnum)


class Times:
    """How long something has taken since the start, in classes: what a histogram shows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TIME_BOUNDS_S) + 1)
        """Up to each bound, but not to one before it; and longer ones."""
        self.total_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class Role(IntEnum):
    """Same names and numbers as baton.v1.Role."""

    ROUTER = 1
    PREFILL = 2
    DECODE = 3
    MIXED = 4
    """A prefill node and a decode node that share one region."""

    def serves(self, role: Role) -> bool:
        """Whether a node of this role does the work of `role`."""
        return self is role or (self is Role.MIXED and role in (Role.PREFILL, Role.DECODE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What two nodes compare before they hand KV over (I9)."""

    name: str
    fingerprint: str
    vocab_size: int
    context_len_max: int
    eos_token_ids: tuple[int, ...]
    layout_hash: str
    block_size: int
    protocol_min: int
    protocol_max: int
    quantisation: str = ""
    """How the weights are quantised; empty: not at all. The fingerprint does not cover it."""
    quantisation_must_agree: bool = False
    """This node hands over only with nodes of the same quantisation."""
    layer_groups: int = 1
    """Groups of layers, each with a block of its own for `block_size` tokens."""
    kv_root: bytes = b""
    """Names what makes this node's KV (`cachestore.prefix_cache.kv_root`): only nodes of one root share cached KV."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a region that hold so many tokens."""
        return -(-tokens // self.block_size) * self.layer_groups

    def tokens_in(self, blocks: int) -> int:
        """Tokens that so many blocks hold."""
        return blocks // self.layer_groups * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoad:
    """Blocks of a region by class (I4). Their sum is the region, but for `promised`, a count that is set aside within
    free + cached (and host memory, where there is some), and `pinned`."""

    quarantined: int = 0
    writer_owned: int = 0
    held: int = 0
    cached: int = 0
    free: int = 0
    promised: int = 0
    pinned: int = 0
    """Also counted in cached; they are not evicted."""

    @property
    def total(self) -> int:
        """Blocks of the region; 0 in a record without this figure."""
        return self.quarantined + self.writer_owned + self.held + self.cached + self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """What one tier of a node's cache has, as the node reports it. See the message of the same name."""

    tier: str
    blocks: int = 0
    blocks_max: int = 0
    block_bytes: int = 0
    blocks_pinned: int = 0
    blocks_hit: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
    blocks_evicted_unused: int = 0
    blocks_lost: int = 0
    blocks_refused: int = 0
    promotions: int = 0
    promotion_s: float = 0.0
    promotion_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLoad:
    """KV that a node has moved since its start. See the message of the same name."""

    handoff_bytes: int = 0
    served_bytes: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    fetches_refused: int = 0
    fetches_failed: int = 0
    fetch_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node is, as it reports it."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    """Prompt tokens still to compute; cached and computed ones are not counted."""
    blocks: BlockLoad = BlockLoad()
    prefill_tokens_per_s: float = 0.0
    """Measured; 0 while unknown."""
    swapped_out_requests: int = 0
    """Running sequences whose KV is not all on the device now."""
    host_blocks_filled: int = 0
    host_blocks_free: int = 0
    fetch_tokens_per_s: float = 0.0
    """Prompt tokens whose KV it fetches from others, measured; 0 while it has fetched none."""
    transports_given_up: int = 0
    """Transports no longer offered to some peer, counted over the peers."""
    control_loop_lag_ms_max: int = 0
    """In the last half minute or so; see `baton.loop_lag`."""
    requests_taken: int = 0
    """Since the process started. The directory passes on only a report that differs from the last one. By this count
    two reports differ when a request came and went between them."""
    tiers: tuple[TierLoad, ...] = ()
    """The region first, then the tiers below it."""
    moved: MovedLoad = MovedLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What one node reports about itself to the directory. A hint: the node's own answer is the truth.

    `Membership` raises `sequence` with every push of one incarnation. Other nodes see it rise when something else in
    the record changes, not with every heartbeat. `model` is None for a router. `admin_endpoint` is empty where commands
    call `endpoint` too.
    """

    name: NodeName
    role: Role
    incarnation: Incarnation
    endpoint: str
    lifecycle: Lifecycle
    model: ModelInfo | None = None
    load: NodeLoad = field(default_factory=NodeLoad)
    transports: tuple[str, ...] = ()
    sequence: int = 0
    admin_endpoint: str = ""

    @property
    def command_endpoint(self) -> str:
        """Where Node and Pins are served."""
        return self.admin_endpoint or self.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A node that has KV of a prompt, as a router knows it."""

    name: str
    endpoint: str
    incarnation: Incarnation
    blocks: int
    """Leading full blocks of the prompt, in positions."""


def check_name(name: str) -> NodeName:
    """`name` as a node name. Raises BatonError BAD_NAME."""
    if not NAME.fullmatch(name):
        raise BatonError(
            Reason.BAD_NAME,
            f"'{name}' is no node name: use 1 to 63 letters, digits or '._-', beginning with a letter or digit.",
            field="name",
        )
    return NodeName(name)


def check_record(message: directory_pb2.NodeRecord) -> None:
    """Raises BatonError BAD_NAME, BAD_ENDPOINT or BAD_FIELD for a record that nobody could use."""
    check_name(message.name)
    check_reachable(message.endpoint)
    if message.admin_endpoint:
        check_reachable(message.admin_endpoint)
    if message.incarnation == 0:
        raise bad_field("incarnation", "The incarnation must not be 0: draw a random 64-bit number at process start.")
    if message.role == common_pb2.ROLE_UNSPECIFIED:
        raise bad_field("role", "The record must have a role.")
    if message.lifecycle == common_pb2.LIFECYCLE_UNSPECIFIED:
        raise bad_field("lifecycle", "The record must have a lifecycle state.")


def record_to_proto(record: NodeRecord) -> directory_pb2.NodeRecord:
    return directory_pb2.NodeRecord(**asdict(record))


def record_from_proto(message: directory_pb2.NodeRecord) -> NodeRecord:
    """Raises BatonError for a record that `check_record` refuses, or with a role or state unknown to this version."""
    check_record(message)
    blocks = BlockLoad(**_values(BlockLoad, message.load.blocks))
    tiers = tuple(
        TierLoad(**_values(TierLoad, tier, promotion_counts=tuple(tier.promotion_counts)))
        for tier in message.load.tiers
    )
    moved_load = message.load.moved
    moved = MovedLoad(**_values(MovedLoad, moved_load, fetch_counts=tuple(moved_load.fetch_counts)))
    return NodeRecord(
        **_values(
            NodeRecord,
            message,
            role=_enum(Role, message.role, "role"),
            lifecycle=_enum(Lifecycle, message.lifecycle, "lifecycle"),
            model=model_from_proto(message.model) if message.HasField("model") else None,
            load=NodeLoad(**_values(NodeLoad, message.load, blocks=blocks, tiers=tiers, moved=moved)),
            transports=tuple(message.transports),
        )
    )


def model_to_proto(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(**asdict(model))


def model_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        **_values(
            ModelInfo,
            message,
            eos_token_ids=tuple(message.eos_token_ids),
            layer_groups=max(1, message.layer_groups),  # 0 from a node that does not know groups
        )
    )


def _values(cls: type[Any], message: Message, **converted: object) -> dict[str, Any]:
    """The fields of `cls`: those in `converted`, the others from the fields of the same names of `message`."""
    return {name: getattr(message, name) for name in cls.__slots__ if name not in converted} | converted


def check_header(header: common_pb2.Header, *, own: Incarnation) -> Incarnation:
    """The sender of a message to this process (I7).

    Raises BatonError INCARNATION_MISMATCH for a message to another process, BAD_FIELD if no sender is named.
    """
    if header.sender == 0:
        raise bad_field("header.sender", "The header must name the sender's incarnation.")
    check_receiver(header.receiver, own=own)
    return Incarnation(header.sender)


def check_receiver(receiver: int, *, own: Incarnation) -> None:
    """Raises BatonError INCARNATION_MISMATCH for a message to another process than this one."""
    if receiver != own:
        raise BatonError(
            Reason.INCARNATION_MISMATCH,
            f"This process is incarnation {own:016x}, the message is for {receiver:016x}: the node has "
            "restarted since, and what was agreed with its predecessor is void. Look it up again.",
            metadata={"incarnation": f"{own:016x}"},
        )


def _enum(kind: Callable[[int], _E], value: int, name: str) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        raise bad_field(name, f"Unknown {name} {value}: the record was written by a later version.") from error


def key_from_proto(key: common_pb2.RequestKey) -> RequestKey:
    return RequestKey(request=RequestId(key.request), attempt=Attempt(key.attempt))


def key_to_proto(key: RequestKey, epoch: int = 0) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=key.request, attempt=key.attempt, epoch=epoch)


def owner_from_proto(message: common_pb2.Owner) -> Owner:
    return Owner(
        name=message.name,
        endpoint=message.endpoint,
        incarnation=Incarnation(message.incarnation),
        blocks=message.blocks,
    )


def grammar_problem(spec: common_pb2.SamplingSpec) -> str | None:
    """Why a grammar does not go with these parameters; None if it does, or there is none."""
    if not spec.HasField("grammar"):
        return None
    kind = spec.grammar.WhichOneof("kind")
    if kind is None:
        return "a grammar must have a json_schema, a regex or rules"
    if (size := len(getattr(spec.grammar, kind).encode())) > GRAMMAR_BYTES_MAX:
        return f"the grammar has {size} bytes; at most {GRAMMAR_BYTES_MAX} are taken"
    if spec.min_tokens or spec.ignore_eos:
        return "a grammar says where the answer ends: leave min_tokens and ignore_eos out"
    return None
