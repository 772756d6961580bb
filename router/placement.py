"""Which prefill node gets a request: the one with the smallest expected time to its first token. Pure, but for one log.

Expected TTFT = (tokens left to compute there + tokens of this prompt that it has not cached) / its rate. What this
router has sent since the last report counts at once, or a burst would all go to the node that was idle then. What its
sibling workers have sent counts 200 ms later at most.

A resumption computes prompt and answer so far again on one prefill node, whose region must hold both. So an answer may
grow on a decode node until it cannot be resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.ids import Incarnation, RequestKey
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.wire import ModelInfo, NodeRecord, Role

log = get_log("router")


def region_tokens(record: NodeRecord) -> int:
    """Tokens that the node's region holds when nothing else is in it; 0 while its record does not say."""
    return record.model.tokens_in(record.load.blocks.total) if record.model is not None else 0


def may_hold(record: NodeRecord, tokens: int) -> bool:
    """Whether the node may be able to compute so many tokens at some time. One whose region is not known may."""
    return not 0 < region_tokens(record) < tokens


ANSWERS_PER_REGION = 32
"""Requests that name no limit and have room on a decode node at a time, however long their answers become."""
ANSWER_TOKENS_MIN = 256
"""What a request that names no limit may always have, though fewer than `ANSWERS_PER_REGION` then have room."""


def answer_tokens(prompt_tokens: int, records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """Output tokens of a request that names no limit: what the model's context leaves, within a share of the region.

    A decode node promises an answer all the blocks that it may need (I5), so a few chats could fill it. Therefore
    prompt and answer together get 1 / ANSWERS_PER_REGION of the smallest region of a ready decode node, without its
    pinned blocks and the engine's own one; but the answer gets at least ANSWER_TOKENS_MIN.
    """
    usable = [
        record.load.blocks.total - record.load.blocks.pinned - 1
        for record in records
        if record.role.serves(Role.DECODE) and record.lifecycle is Lifecycle.READY and region_tokens(record)
    ]
    share = model.tokens_in(min(usable, default=0) // ANSWERS_PER_REGION)
    return min(max(share - prompt_tokens, ANSWER_TOKENS_MIN), model.context_len_max - prompt_tokens)


def tokens_max(records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """What prompt and answer may have together: the model's context, or what both a prefill node and a decode node hold
    beside idle pins. Answers may grow beyond that where decode nodes have more."""
    return min(_most(records, model, role, beside_pins=True) for role in (Role.PREFILL, Role.DECODE))


def _most(records: Sequence[NodeRecord], model: ModelInfo, role: Role, *, beside_pins: bool = False) -> int:
    """What one node of the role holds at most, within the model's context; that where none is there, or not known."""

    def holds(record: NodeRecord) -> int:
        if not region_tokens(record):
            return model.context_len_max
        pinned = record.load.blocks.pinned if beside_pins else 0
        return region_tokens(record) - model.tokens_in(pinned)

    sizes = [
        holds(record)
        for record in records
        if record.role.serves(role) and record.model is not None and record.model.fingerprint == model.fingerprint
    ]
    return min(max(sizes, default=model.context_len_max), model.context_len_max)


def outgrown(records: Sequence[NodeRecord]) -> tuple[int, int] | None:
    """Tokens of the longest request that could be resumed, and of the longest that decode nodes let grow, where that is
    more than any prefill node could take up. Else None, as where one kind of node is not there."""

    def most(role: Role) -> int:
        reach = [
            min(region_tokens(record), record.model.context_len_max)
            for record in records
            if record.model is not None and record.role.serves(role)
        ]
        return max(reach, default=0)

    prefill_tokens, decode_tokens = most(Role.PREFILL), most(Role.DECODE)
    return (prefill_tokens, decode_tokens) if 0 < prefill_tokens < decode_tokens else None


class RegionWatch:
    """Logs when regions are smaller than the model's context, and when answers may outgrow the prefill nodes: each
    state of it once."""

    def __init__(self) -> None:
        self._outgrown: tuple[int, int] | None = None
        self._limits = (0, 0)

    def look(self, records: Sequence[NodeRecord]) -> None:
        self._look_at_context(records)
        found = outgrown(records)
        if found is not None and found != self._outgrown:
            log.warning(
                "an answer may become too long to be resumed: longer than tokens_to_be_resumed_max it is lost with its "
                "decode node. Give prefill nodes as large a region as decode nodes (engine.num_blocks)",
                tokens_to_be_resumed_max=found[0],
                tokens_max=found[1],
            )
        self._outgrown = found

    def _look_at_context(self, records: Sequence[NodeRecord]) -> None:
        model = next((record.model for record in records if record.model is not None), None)
        if model is None:
            return
        # Not what is left beside pins: that changes with each request that reads one.
        decode_tokens = _most(records, model, Role.DECODE)
        found = (min(decode_tokens, _most(records, model, Role.PREFILL)), decode_tokens)
        if found != self._limits and found[0] < model.context_len_max:
            log.info(
                "requests that no region holds are refused, though the model's context is longer. Give nodes of both "
                "kinds more blocks (engine.num_blocks) for prompts of more than prompt_tokens_max, or prompts with "
                "answers of more than tokens_max",
                prompt_tokens_max=found[0],
                tokens_max=found[1],
                context=model.context_len_max,
            )
        self._limits = found


RATE_UNKNOWN_TOKENS_PER_S = 1_000.0
"""Assumed while no node has measured itself; only ratios between nodes matter."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """What this router believes of one prefill process."""

    sequence: int = -1
    waiting_tokens: int = 0
    """To compute there: as last reported, and of what was sent since then."""
    sent: dict[RequestKey, int] = field(default_factory=dict)
    """Tokens to compute of requests sent since the last report, less what the node probably has cached."""
    sent_by_siblings: int = 0
    """Tokens that other workers of this router have sent since the last report, as they last said."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Prompt blocks sent there, least recently used first: an approximation of its prefix cache."""


class Placement:
    """Mutable, owned by the router's loop. `blocks_max` bounds what is remembered for each node."""

    def __init__(self, *, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._nodes: dict[Incarnation, _Node] = {}

    def update(self, records: Iterable[NodeRecord]) -> None:
        """Take the latest reports in; forget processes that are gone."""
        records = list(records)
        present = {record.incarnation for record in records}
        self._nodes = {i: node for i, node in self._nodes.items() if i in present}
        for record in records:
            node = self._nodes.setdefault(record.incarnation, _Node())
            if record.sequence != node.sequence:
                node.sequence, node.waiting_tokens = record.sequence, record.load.waiting_tokens
                node.sent.clear()
                node.sent_by_siblings = 0

    def on_their_way(self) -> dict[Incarnation, int]:
        """Tokens sent to each process since its last report."""
        return {incarnation: sum(node.sent.values()) for incarnation, node in self._nodes.items() if node.sent}

    def follow_siblings(self, tokens: Mapping[Incarnation, int]) -> None:
        """What the other workers of this router have on their way to each process."""
        for incarnation, node in self._nodes.items():
            node.sent_by_siblings = tokens.get(incarnation, 0)

    def pick(self, records: Sequence[NodeRecord], hashes: Sequence[bytes], prompt_tokens: int) -> NodeRecord:
        """The node with the smallest expected TTFT; ties go to the emptiest, then by name. `records` is not empty.

        One that has not measured itself yet is taken to be as fast as the fastest, or it would never get to measure.
        """
        fastest = max([r.load.prefill_tokens_per_s for r in records]) or RATE_UNKNOWN_TOKENS_PER_S

        def rank(record: NodeRecord) -> tuple[float, int, str]:
            rate = record.load.prefill_tokens_per_s or fastest
            ttft_s = self.expected_ttft_s(record, hashes, prompt_tokens, rate)
            return ttft_s, self._waiting_tokens(record), record.name

        return min(records, key=rank)

    def expected_ttft_s(self, record: NodeRecord, hashes: Sequence[bytes], prompt_tokens: int, rate: float) -> float:
        """`rate` is what the node computes, in tokens a second."""
        uncached_tokens = self._uncached_tokens(record, hashes, prompt_tokens)
        return (self._waiting_tokens(record) + uncached_tokens) / rate

    def _uncached_tokens(self, record: NodeRecord, hashes: Sequence[bytes], prompt_tokens: int) -> int:
        """Tokens of a prompt that the node would have to compute. The last one is always computed."""
        block_size = record.model.block_size if record.model is not None else 1
        return max(1, prompt_tokens - self.cached_blocks(record.incarnation, hashes) * block_size)

    def cached_blocks(self, incarnation: Incarnation, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the node probably has."""
        node = self._nodes.get(incarnation)
        if node is None:
            return 0
        return next((count for count, digest in enumerate(hashes) if digest not in node.blocks), len(hashes))

    def sent(
        self, record: NodeRecord, key: RequestKey, hashes: Sequence[bytes], prompt_tokens: int
    ) -> Callable[[], None]:
        """Count a request as placed there; call the result when it has left the node's queue or failed."""
        node = self._nodes.setdefault(record.incarnation, _Node())
        node.waiting_tokens -= node.sent.get(key, 0)
        node.sent[key] = self._uncached_tokens(record, hashes, prompt_tokens)
        node.waiting_tokens += node.sent[key]
        for digest in hashes:
            node.blocks[digest] = None
            node.blocks.move_to_end(digest)
        while len(node.blocks) > self._blocks_max:
            node.blocks.popitem(last=False)

        def left() -> None:
            node.waiting_tokens -= node.sent.pop(key, 0)

        return left

    def _waiting_tokens(self, record: NodeRecord) -> int:
        node = self._nodes.get(record.incarnation)
        return record.load.waiting_tokens if node is None else node.waiting_tokens + node.sent_by_siblings
