"""Events and instructions of the receiver's machine: what happened, and what its shell is to do about it.

The two sides talk about the same thing under two names: the *number* of a Reserve within its pair (known to the writer
from the start) and the *grant* (drawn by the receiver, known to the writer once granted).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.ids import BlockId, Epoch, GrantId, Pair, RequestKey, ReserveNumber


class Refusal(Enum):
    """Why a Reserve was not granted."""

    BUSY = "busy"  # no room now; ask again later or elsewhere
    STALE = "stale"  # the writer has let go of this number already, or it was answered and forgotten
    CANCELLED = "cancelled"  # the request let go of this attempt
    SPAN = "span"  # too far above the writer's lowest live number
    FENCING = "fencing"  # the pair's right to write is being taken back


class TimerKind(Enum):
    LEASE = "lease"  # the writer has not renewed: start taking its right back
    REVOKE = "revoke"  # no evidence yet: repeat, then fence, then quarantine


# Events.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveAsked:
    """`grant` is a fresh random id, used if granted; `prefix` are cached blocks that the shell keeps held meanwhile."""

    pair: Pair
    number: ReserveNumber
    lowest_live: ReserveNumber
    key: RequestKey
    grant: GrantId
    blocks_new: int
    prefix: tuple[BlockId, ...] = ()
    promise: int = 0
    host_backed: bool = False
    """The promise may be covered by host memory (see `cachestore.ledger`)."""
    room: bool = True
    """False when the shell has no room for it, whatever the ledger says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewAsked:
    pair: Pair
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class SealLanded:
    pair: Pair
    grant: GrantId
    epoch: Epoch
    writes: int
    bytes_written: int
    channel: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAsked:
    """`writes` and `bytes_written` are totals over `channels` data channels."""

    pair: Pair
    grant: GrantId
    writes: int
    bytes_written: int
    channels: int = 1
    sampled: bool = False
    """It carries checksums, which are to be compared before it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsChecked:
    """The answer to CheckRecords: whether the sampled records are here as the writer read them at the source."""

    grant: GrantId
    intact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLetGo:
    """The writer's own word, after draining: it does not write under `number`, nor under any below `lowest_live`."""

    pair: Pair
    number: ReserveNumber
    lowest_live: ReserveNumber
    adrift: bool = False
    """Its link ended with writes of `number` on their way, which may land yet: no evidence for that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFenced:
    """Evidence from the transport: no connection of the pair up to `epoch` can write any more."""

    pair: Pair
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSuspected:
    """Something outside says the writer is gone (its incarnation left the directory): take its right back now."""

    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The request lets go of this attempt and all before it (client gone, deadline, newer attempt)."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """The committed sequence is finished and has dropped its own references."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveAsked:
    """Did this attempt commit? If not it never will."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTimerFired:
    grant: GrantId
    kind: TimerKind


ReceiverEvent = (
    ReserveAsked
    | RenewAsked
    | SealLanded
    | CommitAsked
    | RecordsChecked
    | WriterLetGo
    | PairFenced
    | WriterSuspected
    | RequestCancelled
    | RequestEnded
    | ResolveAsked
    | GrantTimerFired
)

# Instructions.


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGranted:
    pair: Pair
    number: ReserveNumber
    grant: GrantId
    epoch: Epoch
    blocks: tuple[BlockId, ...]
    prefix: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRefused:
    pair: Pair
    number: ReserveNumber
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRenew:
    pair: Pair
    grant: GrantId
    renewed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit:
    """Answers every Commit of the grant that is still waiting."""

    pair: Pair
    grant: GrantId
    committed: bool
    corrupt: bool = False
    """Not committed because sampled records are not what the writer sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecords:
    """Seals and commit are here and agree: compare the sample, then say RecordsChecked. Comes once for a grant."""

    pair: Pair
    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCorrupt:
    """The sample differs, in blocks that nobody but the grant's writer could have written."""

    pair: Pair
    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLetGo:
    """Answers every LetGo of this number that waits; if writes were adrift, only now that a fence has stopped them."""

    pair: Pair
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResolve:
    key: RequestKey
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRevoke:
    pair: Pair
    number: ReserveNumber
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePair:
    """Ask the transport for evidence about all connections of the pair up to `epoch`; ends in PairFenced, or never."""

    pair: Pair
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """Committed and sealed: the prompt's KV is in the region; run it."""

    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """The request of a committed grant was cancelled: take its sequence out of the engine."""

    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetGrant:
    """The machine knows this grant no more: the shell drops what it kept for it."""

    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGrantTimer:
    """Arms the timer anew; one of each kind for a grant."""

    grant: GrantId
    kind: TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGrantTimers:
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRefused:
    """A message of a wrong epoch, or seals that contradict the commit: refused and counted."""

    pair: Pair
    what: str
    """One of a few fixed texts: a counter's name."""
    detail: str = ""


ReceiverInstruction = (
    AnswerGranted
    | AnswerRefused
    | AnswerRenew
    | AnswerCommit
    | CheckRecords
    | ReportCorrupt
    | AnswerLetGo
    | AnswerResolve
    | SendRevoke
    | FencePair
    | ScheduleRequest
    | StopRequest
    | ForgetGrant
    | StartGrantTimer
    | StopGrantTimers
    | CountRefused
)
