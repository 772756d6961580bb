"""Where the requests of an in-process cluster are computed, and which owners their Prefill calls name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from batonpb import common_pb2, prefill_pb2

from baton.wire import Owner
from node.computing_cost import ComputingCost
from prefill_node.node import PrefillNode
from router.placement import Choice, Placement
from tests.support.inprocess_cluster import InProcessCluster


class Steering:
    """Set `prefill` and `owners` before a request."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self.prefill = "prefill-0"
        self.owners: Sequence[str] = ()
        self.owner_blocks = 1_000_000
        """What the call says of each owner."""

    def name_owners(self, request: prefill_pb2.PrefillRequest) -> None:
        del request.owners[:]
        for name in self.owners:
            runtime = self._cluster.runtimes[name]
            owner = common_pb2.Owner(name=name, endpoint=runtime.endpoint, incarnation=runtime.incarnation)
            owner.blocks = self.owner_blocks
            request.owners.append(owner)


@contextmanager
def steered(cluster: InProcessCluster) -> Iterator[Steering]:
    steering = Steering(cluster)
    real_prefill = PrefillNode.prefill

    def prefill(self: PrefillNode, request: prefill_pb2.PrefillRequest, **kwargs: Any) -> Any:
        steering.name_owners(request)
        return real_prefill(self, request, **kwargs)

    real_pick = Placement.pick

    def pick(self: Placement, tokens: Sequence[int], salt: bytes, **kwargs: Any) -> Choice:
        among = np.array([record.name == steering.prefill for record in self.records])
        return real_pick(self, tokens, salt, **{**kwargs, "among": among})

    with patch.object(PrefillNode, "prefill", prefill), patch.object(Placement, "pick", pick):
        yield steering


class Slow(ComputingCost):
    """Computing that is believed to take a second a token, whatever is measured: all that can be fetched is."""

    def __init__(self, token_s: float = 1.0) -> None:
        super().__init__(fixed_s=0.0, token_s=token_s)

    def measured(self, tokens: int, pairs: float, seconds: float) -> None:
        pass


def compute_slowly(cluster: InProcessCluster, name: str, token_s: float = 1.0) -> None:
    node = cluster.prefill[name]
    node.gatherer._computing = Slow(token_s)


async def connected(cluster: InProcessCluster, receiver: str, owner: str) -> None:
    """Have the owner connect, as a first prompt does that names it, and wait for that."""
    fetches = cluster.fetches[receiver]
    record = next(r for r in cluster.runtimes[receiver].membership.nodes() if r.name == owner)
    named = Owner(name=owner, endpoint=record.endpoint, incarnation=record.incarnation, blocks=1)
    assert await fetches.connect(named), f"{owner} did not connect to {receiver}"
