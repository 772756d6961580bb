"""When a mixed node keeps a request instead of handing it over. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum
from typing import Final

from baton.errors import InvalidField, Reason

TAKES_NONE_NOW: Final = frozenset(
    {Reason.DECODE_FULL, Reason.PAIR_FENCING, Reason.TOO_MANY_PEERS, Reason.TOO_MANY_CALLS}
)
"""The decode node may have room later."""
NOT_THERE: Final = frozenset(
    {
        Reason.NO_DECODE_NODE,
        Reason.PEER_UNREACHABLE,
        Reason.DEADLINE,
        Reason.INCARNATION_MISMATCH,
        Reason.INCOMPATIBLE_NODE,
        Reason.NODE_DRAINING,
        Reason.PROMPT_TOO_LONG,
        Reason.HANDOFF_FAILED,
    }
)
"""The decode node does not answer, is leaving, or will never take this request."""


class LocalFallback(Enum):
    """When a mixed node keeps a prompt that is long enough for a handoff."""

    NEVER = "never"
    UNREACHABLE = "unreachable"  # no decode node answers
    FULL = "full"  # or those that do have no room now


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """Which requests a mixed node keeps. `handoff_tokens_min` counts prompt tokens that the node has not cached."""

    handoff_tokens_min: int
    fallback: LocalFallback

    def __post_init__(self) -> None:
        if self.handoff_tokens_min < 0:
            raise InvalidField("handoff_tokens_min", f"must not be negative, not {self.handoff_tokens_min}")


def is_kept(policy: LocalPolicy, *, prompt_tokens: int, cached_tokens: int, decode_nodes: int) -> bool:
    """Whether the request runs here, and no decode node is asked; `decode_nodes` are known and ready."""
    if prompt_tokens - cached_tokens < policy.handoff_tokens_min:
        return True
    return decode_nodes == 0 and policy.fallback is not LocalFallback.NEVER


def falls_back(policy: LocalPolicy, refusals: Set[Reason]) -> bool:
    """Whether the request runs here after all, if no decode node has granted, for these reasons."""
    if policy.fallback is LocalFallback.NEVER:
        return False
    counted = NOT_THERE | TAKES_NONE_NOW if policy.fallback is LocalFallback.FULL else NOT_THERE
    return refusals <= counted
