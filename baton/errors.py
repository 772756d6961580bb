"""The errors that leave a node or a command. Pure: `baton.status` maps them to gRPC statuses and back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any, Final


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
    """What is wrong, for machines, and the code that goes with it unless the error says otherwise.

    Part of the public interface: never renamed, never given another meaning.
    """

    _value_: str
    code: Code

    def __new__(cls, value: str, code: Code = Code.UNKNOWN) -> Reason:
        reason = object.__new__(cls)
        reason._value_, reason.code = value, code
        return reason

    # The request itself is wrong: sending it again does not help.
    EMPTY_PROMPT = "EMPTY_PROMPT", Code.INVALID_ARGUMENT
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG", Code.INVALID_ARGUMENT
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE", Code.INVALID_ARGUMENT
    SAMPLING_OUT_OF_RANGE = "SAMPLING_OUT_OF_RANGE", Code.INVALID_ARGUMENT
    BAD_FIELD = "BAD_FIELD", Code.INVALID_ARGUMENT
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX", Code.INVALID_ARGUMENT
    BAD_CONFIG = "BAD_CONFIG", Code.INVALID_ARGUMENT
    BAD_NAME = "BAD_NAME", Code.INVALID_ARGUMENT
    BAD_ENDPOINT = "BAD_ENDPOINT", Code.INVALID_ARGUMENT
    BAD_REQUEST_ID = "BAD_REQUEST_ID", Code.INVALID_ARGUMENT
    NO_DEADLINE = "NO_DEADLINE", Code.INVALID_ARGUMENT
    NO_TOKENIZER = "NO_TOKENIZER", Code.FAILED_PRECONDITION
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE", Code.FAILED_PRECONDITION

    # Who sends it is not known, or may not.
    UNAUTHENTICATED = "UNAUTHENTICATED", Code.UNAUTHENTICATED
    INVALID_API_KEY = "INVALID_API_KEY", Code.UNAUTHENTICATED
    PERMISSION_DENIED = "PERMISSION_DENIED", Code.PERMISSION_DENIED

    # What it names is not here, or is here already.
    UNKNOWN_MODEL = "UNKNOWN_MODEL", Code.NOT_FOUND
    UNKNOWN_NODE = "UNKNOWN_NODE", Code.NOT_FOUND
    UNKNOWN_GRANT = "UNKNOWN_GRANT", Code.NOT_FOUND
    NAME_IN_USE = "NAME_IN_USE", Code.ALREADY_EXISTS
    PORT_IN_USE = "PORT_IN_USE", Code.ALREADY_EXISTS
    REQUEST_EXISTS = "REQUEST_EXISTS", Code.ALREADY_EXISTS

    # The model folder.
    MODEL_MISSING = "MODEL_MISSING", Code.NOT_FOUND
    MODEL_BROKEN = "MODEL_BROKEN", Code.FAILED_PRECONDITION
    MODEL_UNSUPPORTED = "MODEL_UNSUPPORTED", Code.FAILED_PRECONDITION

    # No room now: the retry time says when to come back.
    RATE_LIMIT_EXCEEDED = "RATE_LIMIT_EXCEEDED", Code.RESOURCE_EXHAUSTED
    QUEUE_FULL = "QUEUE_FULL", Code.RESOURCE_EXHAUSTED
    DECODE_FULL = "DECODE_FULL", Code.RESOURCE_EXHAUSTED
    DIRECTORY_FULL = "DIRECTORY_FULL", Code.RESOURCE_EXHAUSTED
    PINS_FULL = "PINS_FULL", Code.RESOURCE_EXHAUSTED
    TOO_MANY_CALLS = "TOO_MANY_CALLS", Code.RESOURCE_EXHAUSTED
    TOO_MANY_PEERS = "TOO_MANY_PEERS", Code.RESOURCE_EXHAUSTED

    # The cluster is not in the state that the call needs.
    NO_PREFILL_NODE = "NO_PREFILL_NODE", Code.UNAVAILABLE
    NO_DECODE_NODE = "NO_DECODE_NODE", Code.UNAVAILABLE
    NODE_DRAINING = "NODE_DRAINING", Code.UNAVAILABLE
    DIRECTORY_LOST = "DIRECTORY_LOST", Code.UNAVAILABLE
    PEER_UNREACHABLE = "PEER_UNREACHABLE", Code.UNAVAILABLE
    PAIR_FENCING = "PAIR_FENCING", Code.UNAVAILABLE
    INCARNATION_MISMATCH = "INCARNATION_MISMATCH", Code.FAILED_PRECONDITION
    INCOMPATIBLE_NODE = "INCOMPATIBLE_NODE", Code.FAILED_PRECONDITION
    BAD_LIFECYCLE = "BAD_LIFECYCLE", Code.FAILED_PRECONDITION
    LISTEN_REFUSED = "LISTEN_REFUSED", Code.FAILED_PRECONDITION

    # It was begun and did not end well.
    GRANT_REVOKED = "GRANT_REVOKED", Code.ABORTED
    HANDOFF_FAILED = "HANDOFF_FAILED", Code.ABORTED
    DATA_CORRUPT = "DATA_CORRUPT", Code.DATA_LOSS
    TAKEN_OVER = "TAKEN_OVER", Code.ABORTED
    SCORES_NOT_FINITE = "SCORES_NOT_FINITE", Code.INTERNAL
    ATTEMPTS_SPENT = "ATTEMPTS_SPENT", Code.ABORTED
    NOT_RESUMABLE = "NOT_RESUMABLE", Code.ABORTED
    DEADLINE = "DEADLINE", Code.DEADLINE_EXCEEDED
    CANCELLED = "CANCELLED", Code.CANCELLED
    SLOW_CLIENT = "SLOW_CLIENT", Code.CANCELLED
    UNIMPLEMENTED = "UNIMPLEMENTED", Code.UNIMPLEMENTED
    INTERNAL = "INTERNAL", Code.INTERNAL
    UNRECOGNISED = "UNRECOGNISED", Code.UNKNOWN
    """A peer's reason that this version does not know; metadata["reason"] has its text."""


REGION_BLOCKS_KEY: Final = "region_blocks"
"""In the metadata of PROMPT_TOO_LONG: this prefill node's region is too small, and another one's may do."""


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
        self.code = reason.code if code is None else code
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.metadata: dict[str, str] = dict(metadata or {})

    def reworded(self, message: str) -> BatonError:
        """The same error with another message."""
        return BatonError(
            self.reason,
            message,
            code=self.code,
            field=self.field,
            retry_after_ms=self.retry_after_ms,
            metadata=self.metadata,
        )

    def __reduce__(self) -> Any:
        values = (self.reason, self.message, self.code, self.field, self.retry_after_ms, self.metadata)
        return _made_again, values

    def __repr__(self) -> str:
        return f"BatonError({self.code.name}, {self.reason.name}, {self.message!r})"


def _made_again(
    reason: Reason, message: str, code: Code, field: str | None, retry_after_ms: int | None, metadata: dict[str, str]
) -> BatonError:
    return BatonError(reason, message, code=code, field=field, retry_after_ms=retry_after_ms, metadata=metadata)


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
