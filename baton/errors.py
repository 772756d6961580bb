"""The errors that leave a node or a command: what is wrong, what to do about it, and a reason for machines.

Pure: no gRPC here. The mapping to a gRPC status and back is in `baton.status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final


class Code(IntEnum):
    """The canonical gRPC status codes (https://grpc.io/docs/guides/status-codes/); OK is not an error."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(Enum):
    """What is wrong, for machines. Part of the public interface: never renamed, never given another meaning."""

    # The request itself is wrong: sending it again does not help.
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    SAMPLING_OUT_OF_RANGE = "SAMPLING_OUT_OF_RANGE"
    BAD_FIELD = "BAD_FIELD"
    BAD_CONFIG = "BAD_CONFIG"
    BAD_NAME = "BAD_NAME"
    BAD_ENDPOINT = "BAD_ENDPOINT"
    BAD_REQUEST_ID = "BAD_REQUEST_ID"
    NO_DEADLINE = "NO_DEADLINE"
    NO_TOKENIZER = "NO_TOKENIZER"
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"

    # What it names is not here, or is here already.
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_NODE = "UNKNOWN_NODE"
    UNKNOWN_GRANT = "UNKNOWN_GRANT"
    NAME_IN_USE = "NAME_IN_USE"
    PORT_IN_USE = "PORT_IN_USE"
    REQUEST_EXISTS = "REQUEST_EXISTS"

    # The model folder.
    MODEL_MISSING = "MODEL_MISSING"
    MODEL_BROKEN = "MODEL_BROKEN"
    MODEL_UNSUPPORTED = "MODEL_UNSUPPORTED"

    # No room now: the retry time says when to come back.
    QUEUE_FULL = "QUEUE_FULL"
    DECODE_FULL = "DECODE_FULL"
    DIRECTORY_FULL = "DIRECTORY_FULL"
    PINS_FULL = "PINS_FULL"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    TOO_MANY_PEERS = "TOO_MANY_PEERS"

    # The cluster is not in the state that the call needs.
    NO_PREFILL_NODE = "NO_PREFILL_NODE"
    NO_DECODE_NODE = "NO_DECODE_NODE"
    NODE_DRAINING = "NODE_DRAINING"
    DIRECTORY_LOST = "DIRECTORY_LOST"
    PEER_UNREACHABLE = "PEER_UNREACHABLE"
    PAIR_FENCING = "PAIR_FENCING"
    INCARNATION_MISMATCH = "INCARNATION_MISMATCH"
    INCOMPATIBLE_NODE = "INCOMPATIBLE_NODE"
    BAD_LIFECYCLE = "BAD_LIFECYCLE"
    LISTEN_REFUSED = "LISTEN_REFUSED"

    # It was begun and did not end well.
    GRANT_REVOKED = "GRANT_REVOKED"
    HANDOFF_FAILED = "HANDOFF_FAILED"
    DATA_CORRUPT = "DATA_CORRUPT"
    SCORES_NOT_FINITE = "SCORES_NOT_FINITE"
    ATTEMPTS_SPENT = "ATTEMPTS_SPENT"
    NOT_RESUMABLE = "NOT_RESUMABLE"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    SLOW_CLIENT = "SLOW_CLIENT"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNRECOGNISED = "UNRECOGNISED"  # a peer's reason that this version does not know; metadata["reason"] has its text


_REASONS_OF: Final[Mapping[Code, tuple[Reason, ...]]] = {
    Code.INVALID_ARGUMENT: (
        Reason.EMPTY_PROMPT,
        Reason.PROMPT_TOO_LONG,
        Reason.TOKEN_OUT_OF_RANGE,
        Reason.SAMPLING_OUT_OF_RANGE,
        Reason.BAD_FIELD,
        Reason.BAD_CONFIG,
        Reason.BAD_NAME,
        Reason.BAD_ENDPOINT,
        Reason.BAD_REQUEST_ID,
        Reason.NO_DEADLINE,
    ),
    Code.NOT_FOUND: (
        Reason.UNKNOWN_MODEL,
        Reason.UNKNOWN_NODE,
        Reason.UNKNOWN_GRANT,
        Reason.MODEL_MISSING,
    ),
    Code.ALREADY_EXISTS: (Reason.NAME_IN_USE, Reason.PORT_IN_USE, Reason.REQUEST_EXISTS),
    Code.RESOURCE_EXHAUSTED: (
        Reason.QUEUE_FULL,
        Reason.DECODE_FULL,
        Reason.DIRECTORY_FULL,
        Reason.PINS_FULL,
        Reason.TOO_MANY_CALLS,
        Reason.TOO_MANY_PEERS,
    ),
    Code.FAILED_PRECONDITION: (
        Reason.NO_TOKENIZER,
        Reason.NO_CHAT_TEMPLATE,
        Reason.MODEL_BROKEN,
        Reason.MODEL_UNSUPPORTED,
        Reason.INCARNATION_MISMATCH,
        Reason.INCOMPATIBLE_NODE,
        Reason.BAD_LIFECYCLE,
        Reason.LISTEN_REFUSED,
    ),
    Code.UNAVAILABLE: (
        Reason.NO_PREFILL_NODE,
        Reason.NO_DECODE_NODE,
        Reason.NODE_DRAINING,
        Reason.DIRECTORY_LOST,
        Reason.PEER_UNREACHABLE,
        Reason.PAIR_FENCING,
    ),
    Code.ABORTED: (Reason.GRANT_REVOKED, Reason.HANDOFF_FAILED, Reason.ATTEMPTS_SPENT, Reason.NOT_RESUMABLE),
    Code.DATA_LOSS: (Reason.DATA_CORRUPT,),
    Code.DEADLINE_EXCEEDED: (Reason.DEADLINE,),
    Code.CANCELLED: (Reason.CANCELLED, Reason.SLOW_CLIENT),
    Code.UNIMPLEMENTED: (Reason.UNIMPLEMENTED,),
    Code.INTERNAL: (Reason.INTERNAL, Reason.SCORES_NOT_FINITE),
    Code.UNKNOWN: (Reason.UNRECOGNISED,),
}

CODE_OF: Final[Mapping[Reason, Code]] = {reason: code for code, reasons in _REASONS_OF.items() for reason in reasons}
"""The code that goes with a reason unless the error says otherwise."""
REGION_BLOCKS_KEY: Final = "region_blocks"
"""In the metadata of a PROMPT_TOO_LONG: one prefill node's own region is too small, and another one's may do."""


class BatonError(Exception):
    """An error that users or peers see.

    `message` is a full sentence or two: what is wrong, and what to do about it. `field` is the path of the wrong field
    of the request ("sampling.top_p"). `retry_after_ms` is set where trying again later makes sense. `metadata` holds
    short facts for machines (names, limits, counts as text).
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        code: Code | None = None,
        field: str | None = None,
        retry_after_ms: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        assert message, reason
        assert retry_after_ms is None or retry_after_ms >= 0, retry_after_ms
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.code = CODE_OF[reason] if code is None else code
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.metadata: dict[str, str] = dict(metadata or {})

    def __repr__(self) -> str:
        return f"BatonError({self.code.name}, {self.reason.name}, {self.message!r})"


class InvalidField(ValueError):
    """Raised by `__post_init__` of a configuration class: which of its fields is wrong, and what is allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field

    def __str__(self) -> str:
        return f"{self.field} {self.args[0]}"


def check_positive(config: object, *fields: str) -> None:
    """Raise InvalidField where one of these numbers of `config` is not above zero."""
    for field in fields:
        if getattr(config, field) <= 0:
            raise InvalidField(field, f"must be positive, not {getattr(config, field)}")


def bad_field(field: str, message: str, *, reason: Reason = Reason.BAD_FIELD) -> BatonError:
    """A field of a request is wrong. `message` names the value and what is allowed."""
    return BatonError(reason, message, field=field)
