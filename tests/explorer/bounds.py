"""What one exploration covers, and the words that all parts of the explorer share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from baton.ids import Attempt, GrantId, Incarnation, Pair, RequestId, RequestKey, ReserveNumber
from kvtransfer.protocol.receiver import ReceiverLimits
from kvtransfer.protocol.writer import WriterMachine
from tests.support.grant_scripts import AdmittingReceiver

if TYPE_CHECKING:
    from tests.explorer.data_path import DataPath

RECEIVER = Incarnation(1)
BYTES_PER_WRITE = 8


class Profile(Enum):
    """How bytes get from one side to the other, and what its fence can know."""

    CHANNEL = "channel"
    """tcp: writes and seals in order on one connection per epoch; bytes may be under way long after it broke, and land
    if the receiver admits their grant."""
    RDMA = "rdma"
    """As CHANNEL, but what is under way lands whatever the receiver thinks of its grant, until a fence has completed.
    The writer knows of a write that it has landed, or after the connection broke that it is in doubt. A link that is
    not made, because its probes are lost, is like none: nothing of a grant is ever on it."""
    SHM = "shm"
    """Stores by the writer's own threads: nothing is under way, nothing can be refused; a fence waits for its BYE,
    or its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """One exploration. Everything that is not bounded here happens at any time and any number of times."""

    profile: Profile
    keys: tuple[RequestKey, ...]
    """The handoffs that are asked for, in this order, over all incarnations of the writer."""
    crashes_max: int
    suspicions_max: int = 0
    """How often the directory says that a living writer is gone."""
    writes_per_grant: int = 1
    lets_go_of_requests: bool = True
    """Cancel and Resolve at the receiver."""
    links_break: bool = True
    """Connections break without a fence too."""
    forgets_pairs: bool = False
    """The books of a dead writer's pair are dropped as soon as they may be."""
    first_epoch_max: int = 3
    """None are dropped once epochs begin here: no epoch is given twice, so they would rise for ever."""
    writers_give_peers_up: bool = False
    """A writer takes a living receiver for gone (as one does that is shutting down)."""
    writes_land_apart: bool = False
    """CHANNEL: a write lands in a step of its own, not only together with its completion or the seal behind it."""
    samples: bool = False
    """Every Commit carries checksums; a comparison ends at any time, either way."""
    fetches: bool = False
    """What commits is a fetch: its block goes into the prefix cache and is held by nobody, and a Reserve that finds no
    free block evicts it."""
    merges: bool = True
    """Do not visit states that can do no more than others (see `Network` and `search`)."""
    receiver: type[AdmittingReceiver] = AdmittingReceiver
    writer: type[WriterMachine] = WriterMachine
    data_path: type[DataPath] | None = None
    """A transport without one of its guards; None: the profile's own."""
    receiver_limits: ReceiverLimits = field(
        default_factory=lambda: ReceiverLimits(
            live_span_max=3,
            tombstones_max=64,
            revoke_rounds_before_fence=1,
            revoke_rounds_before_quarantine=2,
        )
    )


class Violation(AssertionError):
    """A state, or a step into it, that breaks an invariant."""


def key(request: str, attempt: int) -> RequestKey:
    return RequestKey(request=RequestId(request), attempt=Attempt(attempt))


SAME_REQUEST = (key("a", 1), key("a", 2))
TWO_REQUESTS = (key("a", 1), key("b", 1))
SAME_ATTEMPT = (key("a", 1), key("a", 1))


def pair_of(writer: int) -> Pair:
    """The pair of the writer's `writer`-th process with the receiver process at hand."""
    return Pair(receiver=RECEIVER, writer=Incarnation(writer + 1))


def writer_index(pair: Pair) -> int:
    return pair.writer - 1


def grant_of(writer: int, number: int) -> GrantId:
    """Grant ids name what they were drawn for: at most one grant is ever given to a number, which is checked."""
    return GrantId(bytes((writer, number)))


def writer_of_grant(grant: GrantId) -> int:
    return grant[0]


def number_of(grant: GrantId) -> ReserveNumber:
    return ReserveNumber(grant[1])
