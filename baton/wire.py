"""Node records and headers: frozen values here, protocol buffers on the wire. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeVar

from batonpb import common_pb2, directory_pb2

from baton.endpoint import check_reachable
from baton.errors import BatonError, Reason, bad_field
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle

LOCAL_TRANSPORT: Final = "local"
"""In place of a transport's name: a mixed node has kept the request, and nothing was written."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_E = TypeVar("_E", bound=IntEnum)


class Role(IntEnum):
    """Same names and numbers as baton.v1.Role."""

    ROUTER = 1
    PREFILL = 2
    DECODE = 3
    MIXED = 4
    """Both halves, over one region."""

    def serves(self, role: Role) -> bool:
        """Whether a node of this role does what `role` does."""
        return self is role or (self is Role.MIXED and role in (Role.PREFILL, Role.DECODE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What must agree before two nodes hand KV over (I9)."""

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
    """How the weights are rounded for computing; empty: not at all. Apart from the fingerprint."""
    quantisation_must_agree: bool = False
    """This node hands over only with nodes of the same quantisation."""


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
    """Within cached: kept from eviction."""

    @property
    def total(self) -> int:
        """Blocks of the region; 0 in a record without this figure."""
        return self.quarantined + self.writer_owned + self.held + self.cached + self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node says it is."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    """Of prompts, still to compute: cached and computed ones are not counted."""
    blocks: BlockLoad = BlockLoad()
    prefill_tokens_per_s: float = 0.0
    """Measured; 0 while unknown."""
    swapped_out_requests: int = 0
    """Running sequences whose KV is not all on the device now."""
    host_blocks_filled: int = 0
    host_blocks_free: int = 0
    transports_given_up: int = 0
    """Transports no longer offered to some peer, counted over the peers."""
    control_loop_lag_ms_max: int = 0
    """Lately; see `baton.loop_lag`."""
    requests_taken: int = 0
    """Since the start of the process. Two reports between which a request came and went differ by it, so that everybody
    is told of the second: of one that says what the last one said, nobody is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What one node says of itself to the directory. Hints: the node's own answer is the truth.

    `sequence` rises with every push of one incarnation; `Membership` sets it. Other nodes see it rise when there is
    something new in the record, not with every heartbeat. `model` is None for a router.
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


def check_name(name: str) -> NodeName:
    """`name` as a node name. Raises BatonError BAD_NAME."""
    if not _NAME.fullmatch(name):
        raise BatonError(
            Reason.BAD_NAME,
            f"'{name}' is no node name: use 1 to 63 letters, digits or '._-', beginning with a letter or digit.",
            field="name",
        )
    return NodeName(name)


def check_record(message: directory_pb2.NodeRecord) -> None:
    """Refuse a record that nobody could use. Raises BatonError BAD_NAME, BAD_ENDPOINT or BAD_FIELD."""
    check_name(message.name)
    check_reachable(message.endpoint)
    if message.incarnation == 0:
        raise bad_field("incarnation", "The incarnation must not be 0: draw a random 64-bit number at process start.")
    if message.role == common_pb2.ROLE_UNSPECIFIED:
        raise bad_field("role", "The record must have a role.")
    if message.lifecycle == common_pb2.LIFECYCLE_UNSPECIFIED:
        raise bad_field("lifecycle", "The record must have a lifecycle state.")


def record_to_proto(record: NodeRecord) -> directory_pb2.NodeRecord:
    return directory_pb2.NodeRecord(
        name=record.name,
        role=f"ROLE_{record.role.name}",
        incarnation=record.incarnation,
        endpoint=record.endpoint,
        lifecycle=f"LIFECYCLE_{record.lifecycle.name}",
        model=None if record.model is None else model_to_proto(record.model),
        load=load_to_proto(record.load),
        transports=record.transports,
        sequence=record.sequence,
    )


def record_from_proto(message: directory_pb2.NodeRecord) -> NodeRecord:
    """Raises BatonError for a record that `check_record` refuses, or with a role or state unknown to this version."""
    check_record(message)
    return NodeRecord(
        name=NodeName(message.name),
        role=_enum(Role, message.role, "role"),
        incarnation=Incarnation(message.incarnation),
        endpoint=message.endpoint,
        lifecycle=_enum(Lifecycle, message.lifecycle, "lifecycle"),
        model=model_from_proto(message.model) if message.HasField("model") else None,
        load=load_from_proto(message.load),
        transports=tuple(message.transports),
        sequence=message.sequence,
    )


def model_to_proto(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        context_len_max=model.context_len_max,
        eos_token_ids=model.eos_token_ids,
        layout_hash=model.layout_hash,
        block_size=model.block_size,
        protocol_min=model.protocol_min,
        protocol_max=model.protocol_max,
        quantisation=model.quantisation,
        quantisation_must_agree=model.quantisation_must_agree,
    )


def model_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        context_len_max=message.context_len_max,
        eos_token_ids=tuple(message.eos_token_ids),
        layout_hash=message.layout_hash,
        block_size=message.block_size,
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
        quantisation=message.quantisation,
        quantisation_must_agree=message.quantisation_must_agree,
    )


def load_to_proto(load: NodeLoad) -> directory_pb2.NodeLoad:
    blocks = load.blocks
    return directory_pb2.NodeLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        waiting_tokens=load.waiting_tokens,
        blocks=common_pb2.BlockCounts(
            quarantined=blocks.quarantined,
            writer_owned=blocks.writer_owned,
            held=blocks.held,
            cached=blocks.cached,
            free=blocks.free,
            promised=blocks.promised,
            pinned=blocks.pinned,
        ),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        swapped_out_requests=load.swapped_out_requests,
        host_blocks_filled=load.host_blocks_filled,
        host_blocks_free=load.host_blocks_free,
        transports_given_up=load.transports_given_up,
        control_loop_lag_ms_max=load.control_loop_lag_ms_max,
        requests_taken=load.requests_taken,
    )


def load_from_proto(message: directory_pb2.NodeLoad) -> NodeLoad:
    blocks = message.blocks
    return NodeLoad(
        waiting_requests=message.waiting_requests,
        running_requests=message.running_requests,
        waiting_tokens=message.waiting_tokens,
        blocks=BlockLoad(
            quarantined=blocks.quarantined,
            writer_owned=blocks.writer_owned,
            held=blocks.held,
            cached=blocks.cached,
            free=blocks.free,
            promised=blocks.promised,
            pinned=blocks.pinned,
        ),
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        swapped_out_requests=message.swapped_out_requests,
        host_blocks_filled=message.host_blocks_filled,
        host_blocks_free=message.host_blocks_free,
        transports_given_up=message.transports_given_up,
        control_loop_lag_ms_max=message.control_loop_lag_ms_max,
        requests_taken=message.requests_taken,
    )


def make_header(*, sender: Incarnation, receiver: Incarnation | None) -> common_pb2.Header:
    """The header of a message; `receiver` None is "whoever answers there"."""
    return common_pb2.Header(sender=sender, receiver=0 if receiver is None else receiver)


def check_header(header: common_pb2.Header, *, own: Incarnation, receiver_optional: bool = False) -> Incarnation:
    """The sender of a message that is meant for this process (I7).

    Raises BatonError INCARNATION_MISMATCH where it is meant for another one, BAD_FIELD where it names no sender.
    """
    if header.sender == 0:
        raise bad_field("header.sender", "The header must name the sender's incarnation.")
    if header.receiver != own and not (receiver_optional and header.receiver == 0):
        raise BatonError(
            Reason.INCARNATION_MISMATCH,
            f"This process is incarnation {own:016x}, the message is for {header.receiver:016x}: the node has "
            "restarted since, and what was agreed with its predecessor is void. Look it up again.",
            metadata={"incarnation": f"{own:016x}"},
        )
    return Incarnation(header.sender)


def _enum(kind: Callable[[int], _E], value: int, name: str) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        raise bad_field(name, f"Unknown {name} {value}: the record was written by a later version.") from error
