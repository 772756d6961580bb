"""Which decode nodes to ask, in which order. Pure: records and randomness in, records out."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final

from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeRecord
from cachestore.block_manager import growth_blocks
from kvtransfer.link import differences

NOBODY_TO_ASK: Final = frozenset({Reason.NO_DECODE_NODE, Reason.INCOMPATIBLE_NODE, Reason.DECODE_FULL})
"""What `order_decode_nodes` ends with."""
Instead = Callable[[Sequence[NodeRecord], NodeRecord], NodeRecord]
"""Of these nodes, the one to ask first instead of the one that room alone would choose; or that one itself."""


def room(record: NodeRecord) -> int:
    """Blocks that the node could give to a new request, by its last report."""
    blocks = record.load.blocks
    return blocks.free + blocks.cached - blocks.pinned - blocks.promised


def blocks_needed(tokens: int, prompt_tokens: int, max_tokens: int, model: ModelInfo) -> int:
    """Blocks that a request comes to hold in a decode node: for its `tokens`, prompt and answer so far, and for what it
    may draw behind them."""
    held = -(-tokens // model.block_size)
    return held + growth_blocks(
        prompt_len=prompt_tokens,
        known_len=tokens + 1,
        max_tokens=max_tokens,
        context_len_max=model.context_len_max,
        block_size=model.block_size,
        blocks_held=held,
    )


def may_hold(record: NodeRecord, blocks: int) -> bool:
    """Whether one request may come to so many blocks there at some time: what pins keep is never its own. A node whose
    region is not known may hold any."""
    region = record.load.blocks
    return region.total == 0 or blocks <= region.total - region.pinned


def ready_nodes(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Those that say they take requests."""
    return [r for r in records if r.lifecycle is Lifecycle.READY and r.model is not None]


def order_decode_nodes(
    records: Sequence[NodeRecord],
    *,
    own: ModelInfo,
    may_place: Callable[[NodeRecord], bool],
    rng: random.Random,
    tries_max: int,
    room_of: Callable[[NodeRecord], int] = room,
    instead: Instead | None = None,
    avoid: Collection[int] = (),
    blocks: int = 0,
    avoided_too: bool = True,
) -> list[NodeRecord]:
    """At most `tries_max` nodes, best first: repeatedly the roomier of two drawn at random (power of two choices).

    The reports are hints, so the best of all would be chosen by everybody at once; the node's own answer is the truth.
    Those whose region cannot hold `blocks`, by their reports, are left out, or the tries could be spent on them; where
    no other is known they are asked all the same, and say by themselves why not.
    `instead` has a say about the first one only: those after it are asked when a choice has failed.
    Those whose incarnation is in `avoid` are chosen only where there is no other, and without `avoided_too` never.
    `may_place` says whether this process may place anything new there (limits of unacknowledged writes).

    Raises BatonError NO_DECODE_NODE, INCOMPATIBLE_NODE or DECODE_FULL, when there is nobody to ask.
    """
    ready = ready_nodes(records)
    if not ready:
        raise BatonError(
            Reason.NO_DECODE_NODE,
            f"No decode node is ready ({len(records)} known). Start one, or wait for one to come up.",
            retry_after_ms=1_000,
        )
    unfit = {r.name: differences(own, r.model) for r in ready if r.model is not None}
    fit = [r for r in ready if not unfit[r.name]]
    if not fit:
        differing = "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(unfit.items()))
        raise BatonError(Reason.INCOMPATIBLE_NODE, f"No decode node fits this prefill node. {differing}.")
    large = [r for r in fit if may_hold(r, blocks)] or fit
    left = [r for r in large if may_place(r)]
    if not left:
        who = f"All {len(fit)} decode nodes"
        if len(large) < len(fit):
            names = ", ".join(sorted(r.name for r in large))
            who = f"Of {len(fit)} decode nodes those that could ever hold the request ({names})"
        raise BatonError(
            Reason.DECODE_FULL,
            f"{who} are behind with accepting writes, or out of reach.",
            retry_after_ms=200,
        )
    wanted = [r for r in left if r.incarnation not in avoid]
    if not wanted and not avoided_too:
        raise BatonError(
            Reason.NO_DECODE_NODE,
            f"The router does not reach the {len(left)} decode nodes that are in reach from here.",
            retry_after_ms=1_000,
        )
    left = wanted or left
    order: list[NodeRecord] = []
    while left and len(order) < tries_max:
        best = max(rng.sample(left, min(2, len(left))), key=room_of)
        if instead is not None and not order:
            best = instead(left, best)
        left.remove(best)
        order.append(best)
    return order


ROOM_SHARE_MIN = 0.9
"""A node that has the prefix goes first while it has this share of the room of the one that room alone would choose.
More would pile up the requests of a popular prefix on one node while others are idle."""


class DecodeAffinity:
    """Mutable; owned by the node's control thread. Remembers `blocks_max` blocks, of all processes together, in about
    220 bytes each."""

    def __init__(self, *, blocks_max: int) -> None:
        assert blocks_max > 0, blocks_max
        self._blocks_max = blocks_max
        self._sent: OrderedDict[tuple[Incarnation, bytes], None] = OrderedDict()
        """Least recently used first."""
        self._taken: dict[Incarnation, tuple[int, int]] = {}
        """Sequence of a process's last report, and blocks that we were granted there since."""

    def granted(self, record: NodeRecord, chain: Sequence[bytes], blocks: int) -> None:
        """The process has granted a prompt of this chain, and set `blocks` aside for it and its answer."""
        sequence, taken = self._taken.get(record.incarnation, (record.sequence, 0))
        self._taken[record.incarnation] = (record.sequence, blocks + (taken if sequence == record.sequence else 0))
        for digest in reversed(chain):  # the beginning of a chain is the last of it to be forgotten
            self._sent[record.incarnation, digest] = None
            self._sent.move_to_end((record.incarnation, digest))
        while len(self._sent) > self._blocks_max:
            self._sent.popitem(last=False)

    def cached(self, incarnation: Incarnation, chain: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the process probably has."""
        for count, digest in enumerate(chain):
            if (incarnation, digest) not in self._sent:
                return count
        return len(chain)

    def keep_only(self, present: set[Incarnation]) -> None:
        """Processes that are gone take no room."""
        self._taken = {incarnation: taken for incarnation, taken in self._taken.items() if incarnation in present}

    def instead(self, chain: Sequence[bytes]) -> Instead:
        """For `order_decode_nodes`: the node that has most of the chain, if it has about as much room as the best."""

        def choose(nodes: Sequence[NodeRecord], best: NodeRecord) -> NodeRecord:
            enough = ROOM_SHARE_MIN * self.room(best)
            fit = [node for node in nodes if node is best or self.room(node) >= enough]
            return max(fit, key=lambda node: (self.cached(node.incarnation, chain), node is best, self.room(node)))

        return choose

    def room(self, record: NodeRecord) -> int:
        """By its last report, less what it has granted to us since."""
        sequence, taken = self._taken.get(record.incarnation, (0, 0))
        return room(record) - (taken if sequence == record.sequence else 0)
