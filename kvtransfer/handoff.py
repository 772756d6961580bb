"""One handoff as the prefill node holds it: whom it goes to, what has been posted, how it ended; and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batonpb import common_pb2

from baton.config import fixed
from baton.errors import BatonError, InvalidField
from baton.ids import BlockId, Epoch, GrantId, RequestKey, ReserveNumber
from kvtransfer.checksums import SourceSample
from kvtransfer.plan import Int64Array
from kvtransfer.protocol.writer import AllPosted, HandoffCancelled, HandoffEnd
from kvtransfer.step_writes import StepWrites
from kvtransfer.transport import Seal, WriterLink

if TYPE_CHECKING:
    from kvtransfer.writer import WriterPeer

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """Times and limits of the writer's side of a handoff, for each receiver."""

    reserve_ms_max: int = field(
        default=1_000,
        metadata={
            "help": "how long a Reserve may go unanswered; a healthy node answers at once",
            "when": "The network or the decode nodes stand still for longer without being dead.",
        },
    )
    call_ms_max: int = field(
        default=2_000,
        metadata={
            "help": "how long any other call to a receiver may go unanswered",
            "when": "As reserve_ms_max.",
        },
    )
    stall_ms_max: int = field(
        default=10_000,
        metadata={
            "help": "a handoff whose posted writes make no progress for this long is given up",
            "when": "The network stands still for longer, or other decode nodes should be tried sooner.",
        },
    )
    checksum_fraction: float = field(
        default=0.0,
        metadata={
            "help": "share of the records, 0 to 1, that the decode node compares with a checksum before it "
            "takes a handoff; 0 compares none",
            "when": "Bad hardware is suspected. It costs compute on both sides.",
        },
    )
    retry_ms_min: int = fixed(20)
    """First pause before an unanswered call is repeated."""
    retry_ms_max: int = fixed(1_000)
    """Longest such pause."""
    drift_per_mille: int = fixed(20)
    """Margin taken off a lease because two clocks run at different rates."""
    unacked_bytes_max: int = fixed(1 << 30)
    """Posted bytes to one receiver without an acknowledgement, beyond which nothing new goes there."""
    pinned_blocks_max: int = fixed(65_536)
    """Source blocks pinned for one receiver, beyond which nothing new goes there."""

    def __post_init__(self) -> None:
        if not 0 <= self.checksum_fraction <= 1:
            raise InvalidField("checksum_fraction", f"is {self.checksum_fraction}; must be between 0 and 1")
        for name in self.__slots__:
            if name != "checksum_fraction" and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.drift_per_mille >= 1000:
            raise ValueError("drift_per_mille must be under 1000")


@dataclass(slots=True, eq=False, kw_only=True)
class Handoff:
    """One handoff, from Reserve to its end. Changed by its `WriterPeer` only.

    `granted` is set when writing may start (None), or to what says why not. `ended` is set once, with how it ended.
    `sources_released` is called once if it was ever granted: the transport has let go of the source blocks.
    """

    peer: WriterPeer
    number: ReserveNumber
    key: RequestKey
    granted: asyncio.Future[BatonError | None]
    ended: asyncio.Future[HandoffEnd]
    metadata: Metadata
    """Request id and trace context, sent along with the calls of this handoff."""
    sources_released: Callable[[], None] | None
    """None once it has been called: what it refers to may in turn refer to this, and the two would be freed by the
    collector only."""
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    grant: GrantId = GrantId(b"")
    epoch: Epoch = Epoch(0)
    dst_blocks: list[BlockId] = field(default_factory=list)
    prefix_skip: int = 0
    lease_ends_s: float = 0.0
    lease_ms: int = 0
    renewal: asyncio.TimerHandle | None = None
    """When the lease is first renewed."""
    link: WriterLink | None = None
    pinned_blocks: int = 0
    writes_outstanding: int = 0
    bytes_outstanding: int = 0
    writes: int = 0
    bytes_written: int = 0
    progress_s: float = 0.0
    seal: Seal | None = None
    steps: set[StepWrites] = field(default_factory=set)
    """Planned and not finished: an engine step may be posting them right now."""
    retries: int = 0
    sample: SourceSample | None = None
    """What goes along with the Commit; None where nothing is sampled."""
    revoke_waiters: list[asyncio.Future[bool]] = field(default_factory=list)

    def may_post(self) -> bool:
        return self.peer.machine.may_post(self.number)

    def plan_step(self, src_blocks_B: Int64Array, dst_blocks_B: Int64Array, layers: range) -> StepWrites:
        """Raises WriteOutOfBounds: a block that the grant does not open."""
        return StepWrites.plan_for(self, src_blocks_B, dst_blocks_B, layers)

    def all_posted(self, first_token: int, first_logprobs: common_pb2.TokenLogprobs | None = None) -> None:
        """Seal and commit. Nothing is posted afterwards."""
        self.first_token, self.first_logprobs = first_token, first_logprobs
        if self.peer.observer is not None:
            self.peer.observer.all_posted(self.key)
        self.peer.handle(AllPosted(number=self.number))

    def cancel(self) -> None:
        """Give it up: drain, then tell the receiver. Idempotent; nothing happens once it has ended."""
        self.peer.handle(HandoffCancelled(number=self.number))
