"""One request in a decode node, what is refused of its Reserve and its Commit, and what is remembered of it later."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Final

from batonpb import common_pb2, prefill_pb2, transfer_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, GrantId, Incarnation, RequestId, RequestKey
from baton.wire import RESUME_STATE_BYTES_MAX
from decode_node.streams import RequestOutput
from engine.scheduler import Sequence
from node.pool import DevicePool, check_request

TAG_BYTES: Final = 32
"""Of a SHA-256."""
GONE_MAX: Final = 4_096
"""Beyond so many the oldest is forgotten."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request: granted to a prefill node, or kept by the mixed node that this is half of (`kept`).

    A kept one is in the engine from its prompt on; its blocks are the engine's, and `grant` only names its promise.
    """

    seq: Sequence
    """The engine's once it runs. Before, it has the prompt and what the client has of the answer, and no blocks."""
    grant: GrantId
    prefix: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    deadline_s: float
    output: RequestOutput
    committed: asyncio.Future[bool]
    """True at the commit, False when the grant is over without one. A kept request runs before its commit."""
    footprint: int
    """Blocks that it may come to hold in all."""
    resumed: bool
    """The engine has it: its blocks can be moved."""
    kept: bool
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    timer: asyncio.Timeout | None = None
    """What ends the wait that its life is in: for its end, then for somebody to fetch it."""

    @property
    def key(self) -> RequestKey:
        return self.seq.key

    @property
    def tag(self) -> bytes:
        """Who shows it may take the request over. Empty: nobody."""
        return b"" if self.output.resumable is None else self.output.resumable.tag

    @property
    def runs(self) -> bool:
        """The engine has it, or has had it."""
        return self.kept or self.is_committed

    @property
    def is_committed(self) -> bool:
        return self.committed.done() and self.committed.result()

    @property
    def goes_on(self) -> bool:
        """It is committed, and is being computed or has its whole answer."""
        lapses = self.timer is not None and self.timer.expired()
        return self.is_committed and self.output.error is None and not self.output.forgotten.is_set() and not lapses

    def reschedule(self, at_s: float) -> None:
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(at_s)


def output_of(request: transfer_pb2.ReserveRequest | prefill_pb2.PrefillRequest, seq: Sequence) -> RequestOutput:
    """Of one that begins here, with what the client has of it."""
    resumable = None
    if request.HasField("resumable"):
        resumable = common_pb2.Resumable()
        resumable.CopyFrom(request.resumable)  # the request itself need not be kept
    return RequestOutput(
        key=seq.key,
        router=Incarnation(request.router),
        resumable=resumable,
        whole=request.whole,
        tokens=list(request.output),
        first_index=len(request.output),
    )


def why_never(tokens: Tokens[int], prompt_len: int, sampling: common_pb2.SamplingSpec, pool: DevicePool) -> str | None:
    """Why this request can never run here, whatever is free."""
    blocks = pool.blocks
    try:
        check_request(tokens, prompt_len, sampling, pool.runner)
    except BatonError as error:
        return error.message.removesuffix(".")
    need = pool.footprint(len(tokens), prompt_len, sampling.max_tokens)
    if need > blocks.blocks_usable:
        return f"prompt and answer need {need} blocks, the region has {blocks.ledger.num_blocks}{blocks.less_others}"
    return None


def check_resumable(resumable: common_pb2.Resumable) -> None:
    """Raises BatonError BAD_FIELD."""
    if len(resumable.tag) != TAG_BYTES:
        raise bad_field("resumable.tag", f"A tag has {TAG_BYTES} bytes, not {len(resumable.tag)}.")
    if len(resumable.state) > RESUME_STATE_BYTES_MAX:
        raise bad_field(
            "resumable.state",
            f"A resumable request may leave {RESUME_STATE_BYTES_MAX} bytes with its node, not {len(resumable.state)}. "
            "Ask for fewer log-probabilities or stop strings, or send it without `resumable`.",
        )


def check_first_token(request: transfer_pb2.CommitRequest, *, vocab_size: int) -> None:
    """The engine continues with this token, and the router reads its log-probabilities.

    Raises BatonError TOKEN_OUT_OF_RANGE or BAD_FIELD.
    """
    logprobs = request.first_logprobs
    outside = [token for token in (request.first_token, *logprobs.top_ids) if token >= vocab_size]
    if outside:
        raise bad_field(
            "first_token",
            f"Token id {outside[0]} is outside the vocabulary of {vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    if len(logprobs.top_ids) != len(logprobs.top_logprobs):
        raise bad_field(
            "first_logprobs",
            f"{len(logprobs.top_ids)} token ids come with {len(logprobs.top_logprobs)} log-probabilities.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    tag: bytes
    epoch: int
    """By which it was had last: a router with a lower one has lost it to another."""
    over: bool
    """Its client wants no more of it."""
    until_s: float


class GoneRequests:
    """Resumable requests that another router has taken over, or whose client wants no more of them."""

    def __init__(self, *, keep_ms: int) -> None:
        self._keep_s = keep_ms / 1000
        self._gone: OrderedDict[RequestId, Gone] = OrderedDict()
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._gone)

    def add(self, request: RequestId, *, tag: bytes, epoch: int, over: bool, now_s: float) -> None:
        """What was over stays over."""
        known = self._gone.pop(request, None)
        over = over or (known is not None and known.over)
        self._gone[request] = Gone(tag=tag, epoch=epoch, over=over, until_s=now_s + self._keep_s)
        if len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

    def find(self, request: RequestId, now_s: float) -> Gone | None:
        """By any of its attempts: they have one tag, and one client."""
        known = self._gone.get(request)
        return known if known is not None and now_s < known.until_s else None

    def upkeep(self, now_s: float) -> None:
        while self._gone and next(iter(self._gone.values())).until_s <= now_s:
            self._gone.popitem(last=False)
