"""What the regions of nodes let a request become, by their records. Pure, but for a line in the log.

A resumption computes prompt and answer so far again, on one prefill node, whose region must hold the whole: attention
reads all of it to the end. So an answer may grow in a decode node beyond what any prefill node could take up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.wire import ModelInfo, NodeRecord, Role

log = get_log("router")


def region_tokens(record: NodeRecord) -> int:
    """Tokens that the node's region holds when nothing else is in it; 0 where its record does not tell (yet)."""
    return record.load.blocks.total * record.model.block_size if record.model is not None else 0


def may_hold(record: NodeRecord, tokens: int) -> bool:
    """Whether the node may be able to compute so many tokens at some time. One whose region is not known may."""
    return not 0 < region_tokens(record) < tokens


ANSWERS_PER_REGION = 32
"""So many requests that name no limit have room on a decode node at a time, whatever they come to."""
ANSWER_TOKENS_MIN = 256
"""A request that names no limit may have so many tokens, though fewer than `ANSWERS_PER_REGION` then have room."""


def answer_tokens(prompt_tokens: int, records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """Output tokens of a request that names no limit: what the model's context leaves, within a share of the region.

    A decode node promises an answer all the blocks that it may come to need (DESIGN I5). So prompt and answer together
    take at most 1 / ANSWERS_PER_REGION of the smallest region of a decode node that is ready, less its pins and a block
    of its engine's own, or a few chats would fill it; but an answer is never cut below ANSWER_TOKENS_MIN for it.
    """
    usable = [
        record.load.blocks.total - record.load.blocks.pinned - 1
        for record in records
        if record.role.serves(Role.DECODE) and record.lifecycle is Lifecycle.READY and region_tokens(record)
    ]
    share = min(usable, default=0) // ANSWERS_PER_REGION * model.block_size
    return min(max(share - prompt_tokens, ANSWER_TOKENS_MIN), model.context_len_max - prompt_tokens)


def tokens_max(records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """What prompt and answer may have together on the nodes that are there, however it is shared between them: the
    model's context, or what the largest region of the kind of node with the smaller ones holds beside idle pins.
    Answers may grow beyond that where decode nodes have more."""

    def unpinned(record: NodeRecord) -> int:
        return region_tokens(record) - record.load.blocks.pinned * model.block_size

    return min(_most(records, model, role, unpinned) for role in (Role.PREFILL, Role.DECODE))


def _most(
    records: Sequence[NodeRecord], model: ModelInfo, role: Role, tokens_of: Callable[[NodeRecord], int] = region_tokens
) -> int:
    """What one node of the role holds at most, within the model's context; that where none is there, or not known."""
    sizes = [
        tokens_of(record) if region_tokens(record) else model.context_len_max
        for record in records
        if record.role.serves(role) and record.model is not None and record.model.fingerprint == model.fingerprint
    ]
    return min(max(sizes, default=model.context_len_max), model.context_len_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgrown:
    """Decode nodes let a request grow to more tokens than any prefill node could take up."""

    decode_tokens: int
    prefill_tokens: int


def outgrown(records: Sequence[NodeRecord]) -> Outgrown | None:
    """None where every answer could be resumed, or where one kind of node is not there."""

    def most(role: Role) -> int:
        reach = [
            min(region_tokens(record), record.model.context_len_max)
            for record in records
            if record.model is not None and record.role.serves(role)
        ]
        return max(reach, default=0)

    decode_tokens, prefill_tokens = most(Role.DECODE), most(Role.PREFILL)
    if 0 < prefill_tokens < decode_tokens:
        return Outgrown(decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)
    return None


class RegionWatch:
    """Tells the log when regions are smaller than the model's context, and when answers may outgrow the prefill nodes:
    each state of it once."""

    def __init__(self) -> None:
        self._told: Outgrown | None = None
        self._told_limits = (0, 0)

    def look(self, records: Sequence[NodeRecord]) -> None:
        self._look_at_context(records)
        found = outgrown(records)
        if found is not None and found != self._told:
            log.warning(
                "answers may outgrow the prefill nodes: one that is longer is lost with its decode node. Give prefill "
                "nodes as large a region as decode nodes (engine.num_blocks)",
                tokens_to_be_resumed_max=found.prefill_tokens,
                tokens_max=found.decode_tokens,
            )
        self._told = found

    def _look_at_context(self, records: Sequence[NodeRecord]) -> None:
        model = next((record.model for record in records if record.model is not None), None)
        if model is None:
            return
        # Not what is left beside pins: that changes with each request that reads one.
        decode_tokens = _most(records, model, Role.DECODE)
        prompt_tokens = min(decode_tokens, _most(records, model, Role.PREFILL))
        found = (prompt_tokens, decode_tokens)
        if found != self._told_limits and prompt_tokens < model.context_len_max:
            log.info(
                "requests that no region holds are refused, though the model's context is longer: give nodes of both "
                "kinds more blocks (engine.num_blocks) where prompts of more than prompt_tokens_max, or prompts with "
                "answers of more than tokens_max, are to come",
                prompt_tokens_max=prompt_tokens,
                tokens_max=decode_tokens,
                context=model.context_len_max,
            )
        self._told_limits = found
