"""Which decode nodes to ask, in which order. Pure: records and randomness in, records out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

from baton.errors import BatonError, Reason
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeRecord
from kvtransfer.compatibility import differences

NOBODY_TO_ASK: Final = frozenset({Reason.NO_DECODE_NODE, Reason.INCOMPATIBLE_NODE, Reason.DECODE_FULL})
"""What `order_decode_nodes` ends with."""
Instead = Callable[[Sequence[NodeRecord], NodeRecord], NodeRecord]
"""Of these nodes, the one to ask first instead of the one that room alone would choose; or that one itself."""


def room(record: NodeRecord) -> int:
    """Blocks that the node could give to a new request, by its last report."""
    blocks = record.load.blocks
    return blocks.free + blocks.cached - blocks.pinned - blocks.promised


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
    avoided_too: bool = True,
) -> list[NodeRecord]:
    """At most `tries_max` nodes, best first: repeatedly the roomier of two drawn at random (power of two choices).

    The reports are hints, so the best of all would be chosen by everybody at once; the node's own answer is the truth.
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
    left = [r for r in fit if may_place(r)]
    if not left:
        raise BatonError(
            Reason.DECODE_FULL,
            f"All {len(fit)} decode nodes are behind with accepting writes, or out of reach.",
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
