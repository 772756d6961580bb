"""Which decode processes have which prefixes, as far as this prefill node knows: what it has sent there itself. Pure.

Hints, like the reports of room: a wrong one costs the transfer of blocks that would have been skipped elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from baton.ids import Incarnation
from baton.wire import NodeRecord
from prefill_node.placement import Instead
from prefill_node.placement import room as reported_room

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
        return reported_room(record) - (taken if sequence == record.sequence else 0)
