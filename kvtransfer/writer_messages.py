"""Events and instructions of the writer's machine, all within one pair: what happened, and what its shell is to do.

A handoff goes by the *number* of its Reserve; see `receiver_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.ids import Epoch, GrantId, RequestKey, ReserveNumber
from kvtransfer.receiver_messages import Refusal


class HandoffEnd(Enum):
    """How a handoff ended, as the writer sees it."""

    COMMITTED = "committed"
    REFUSED = "refused"
    REVOKED = "revoked"
    CORRUPT = "corrupt"
    CANCELLED = "cancelled"
    LEASE_LAPSED = "lease_lapsed"
    LINK_LOST = "link_lost"
    UNANSWERED = "unanswered"
    PEER_GONE = "peer_gone"


# Events.


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAsked:
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveGranted:
    number: ReserveNumber
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused:
    number: ReserveNumber
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveUnanswered:
    """The call failed: whether there is a grant is unknown."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesPosted:
    number: ReserveNumber
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesCompleted:
    """The local transport has let go of the sources of `writes` posted writes (landed, or abandoned)."""

    number: ReserveNumber
    writes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesDropped:
    """A posted write or the seal will never arrive (a copy failed, the link ended): the handoff cannot succeed."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesAdrift:
    """The link ended with posted writes on their way: they complete here, and may land yet. Comes before completion."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPosted:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswered:
    number: ReserveNumber
    committed: bool
    corrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnanswered:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRefused:
    """The receiver has revoked the grant."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeAsked:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCancelled:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLapsed:
    """No renewal was answered in time, counted from the sending of the last one that was."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGoAnswered:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGoUnanswered:
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The data connection of this epoch is gone: nothing more can be posted on it."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The receiver process has ended: nobody is left to be told anything."""


WriterEvent = (
    HandoffAsked
    | ReserveGranted
    | ReserveRefused
    | ReserveUnanswered
    | WritesPosted
    | WritesCompleted
    | WritesDropped
    | WritesAdrift
    | AllPosted
    | CommitAnswered
    | CommitUnanswered
    | RenewRefused
    | RevokeAsked
    | HandoffCancelled
    | LeaseLapsed
    | LetGoAnswered
    | LetGoUnanswered
    | LinkLost
    | PeerGone
)

# Instructions.


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReserve:
    number: ReserveNumber
    lowest_live: ReserveNumber
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWriting:
    number: ReserveNumber
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSeal:
    """To be sent on the data channel behind all writes of the grant."""

    number: ReserveNumber
    grant: GrantId
    epoch: Epoch
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    number: ReserveNumber
    grant: GrantId
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonWrites:
    """Post no more, copy no more of what is queued."""

    number: ReserveNumber
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSources:
    """No write of this handoff is outstanding and none will follow: its source blocks may be released. Comes once."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLetGo:
    number: ReserveNumber
    lowest_live: ReserveNumber
    adrift: bool = False
    """No evidence: see WriterLetGo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRevoke:
    """Answers every Revoke of this number that waits."""

    number: ReserveNumber
    adrift: bool = False
    """No evidence: see WriterLetGo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd:
    """How the handoff ended. Comes once for each number."""

    number: ReserveNumber
    end: HandoffEnd


WriterInstruction = (
    SendReserve
    | StartWriting
    | SendSeal
    | SendCommit
    | AbandonWrites
    | ReleaseSources
    | SendLetGo
    | AnswerRevoke
    | ReportEnd
)
