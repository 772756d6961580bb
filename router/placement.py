"""Which prefill node gets a request: the one with the smallest expected time to its first token. Pure.

Expected TTFT = (tokens left to compute there + tokens of this prompt that it has not cached) / its rate. Cached and
computed tokens are no load, neither in the node's report nor here. What this router has sent and the node has not
reported yet counts at once, or a burst would all go to the node that was idle at its last report.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.ids import Incarnation, RequestKey
from baton.wire import NodeRecord

RATE_UNKNOWN_TOKENS_PER_S = 1_000.0
"""Assumed while no node has measured itself; only ratios between nodes matter."""


def chain_hashes(prompt: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """One digest for each full block of the prompt, each over the salt and everything up to the block's end."""
    digests = []
    parent = hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block_size + 1, block_size):
        block = prompt[start : start + block_size]
        parent = hashlib.blake2b(parent + struct.pack(f"<{block_size}I", *block), digest_size=16).digest()
        digests.append(parent)
    return digests


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """What this router believes of one prefill process."""

    sequence: int = -1
    reported_tokens: int = 0
    sent: dict[RequestKey, int] = field(default_factory=dict)
    """Tokens to compute of requests sent since the last report, less what the node probably has cached."""
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
                node.sequence, node.reported_tokens = record.sequence, record.load.waiting_tokens
                node.sent.clear()

    def pick(self, records: Sequence[NodeRecord], hashes: Sequence[bytes], prompt_tokens: int) -> NodeRecord:
        """The node with the smallest expected TTFT; ties go to the emptiest, then by name. `records` is not empty.

        One that has not measured itself yet is taken to be as fast as the fastest, or it would never get to measure.
        """
        fastest = max([r.load.prefill_tokens_per_s for r in records]) or RATE_UNKNOWN_TOKENS_PER_S

        def rank(record: NodeRecord) -> tuple[float, int, str]:
            rate = record.load.prefill_tokens_per_s or fastest
            backlog = self._backlog(record)
            return self._ttft_s(record, hashes, prompt_tokens, rate, backlog), backlog, record.name

        return min(records, key=rank)

    def expected_ttft_s(self, record: NodeRecord, hashes: Sequence[bytes], prompt_tokens: int, rate: float) -> float:
        """`rate` is what the node computes, in tokens a second."""
        return self._ttft_s(record, hashes, prompt_tokens, rate, self._backlog(record))

    def _ttft_s(
        self, record: NodeRecord, hashes: Sequence[bytes], prompt_tokens: int, rate: float, backlog: int
    ) -> float:
        return (backlog + self._uncached_tokens(record, hashes, prompt_tokens)) / rate

    def _uncached_tokens(self, record: NodeRecord, hashes: Sequence[bytes], prompt_tokens: int) -> int:
        """Tokens of a prompt that the node would have to compute. The last one is always computed."""
        block_size = record.model.block_size if record.model is not None else 1
        return max(1, prompt_tokens - self.cached_blocks(record.incarnation, hashes) * block_size)

    def cached_blocks(self, incarnation: Incarnation, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the node probably has."""
        node = self._nodes.get(incarnation)
        count = 0
        if node is not None:
            blocks = node.blocks
            for digest in hashes:
                if digest not in blocks:
                    break
                count += 1
        return count

    def sent(
        self, record: NodeRecord, key: RequestKey, hashes: Sequence[bytes], prompt_tokens: int
    ) -> Callable[[], None]:
        """Count a request as placed there; call the result when it has left the node's queue or failed."""
        node = self._nodes.setdefault(record.incarnation, _Node())
        node.sent[key] = self._uncached_tokens(record, hashes, prompt_tokens)
        for digest in hashes:
            node.blocks[digest] = None
            node.blocks.move_to_end(digest)
        while len(node.blocks) > self._blocks_max:
            node.blocks.popitem(last=False)

        def left() -> None:
            node.sent.pop(key, None)

        return left

    def _backlog(self, record: NodeRecord) -> int:
        node = self._nodes.get(record.incarnation)
        if node is None:
            return record.load.waiting_tokens
        return node.reported_tokens + sum(node.sent.values())
