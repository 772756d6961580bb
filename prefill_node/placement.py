"""Which decode nodes to ask, in which order. Pure: records and randomness in, records out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeRecord
from cachestore.block_manager import growth_blocks
from kvtransfer.negotiation import differences

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
        told = "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(unfit.items()))
        raise BatonError(Reason.INCOMPATIBLE_NODE, f"No decode node fits this prefill node. {told}.")
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
