"""What the prefill half of a mixed node needs of the other half, to keep a request instead of handing it over.

A node that only prefills has no `LocalRunner`: it hands every request over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from batonpb import prefill_pb2

from baton.ids import RequestKey
from engine.core import TokenEvent
from engine.sequence import Sequence
from prefill_node.local_policy import LocalFallback, LocalPolicy

if TYPE_CHECKING:
    from prefill_node.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """A request that the other half has taken on. `first` gets its first token, or the ABORTED event."""

    seq: Sequence
    first: asyncio.Future[TokenEvent]


class LocalRunner(Protocol):
    """The decode half of a mixed node, as its prefill half sees it. Control thread only."""

    policy: LocalPolicy

    @property
    def requests(self) -> int:
        """Requests of that half, which have or will have a place in the engine; the kept ones are among them."""
        ...

    @property
    def has_place(self) -> bool:
        """Within its limit of requests."""
        ...

    def stands_back(self, job: Job) -> bool:
        """Whether what room there is goes to requests in the middle of their answer before this one. It has an end,
        which nobody tells: look again every second or so."""
        ...

    def avoided(self, job: Job) -> bool:
        """Whether the request's router says that it does not get what this node writes."""
        ...

    def never(self, job: Job) -> str | None:
        """Why the request can never run here, whatever is free. None: it can."""
        ...

    def growth(self, job: Job) -> int:
        """Blocks to set aside for its answer, on top of the prompt's."""
        ...

    def granted(self) -> prefill_pb2.Granted:
        """This node, as a router is told of a decode node."""
        ...

    def start(self, job: Job) -> LocalRun | None:
        """Run it from its prompt on; holds its blocks and promises its growth. None: there is no room.

        Raises BatonError CANCELLED where the router has let go of this attempt already.
        """
        ...

    def commit(self, key: RequestKey) -> None:
        """The first token is on its way to the router: from here on the request is the other half's."""
        ...

    def cancel(self, key: RequestKey) -> None:
        """Give it up, wherever it is. Idempotent."""
        ...


def asks_avoided(local: LocalRunner | None, job: Job) -> bool:
    """Whether the request is handed over even to a decode node that its router does not reach, where there is no other:
    not where it may run here (`local`; None: a node that only prefills) and its router reaches this node."""
    if local is None or local.policy.fallback is LocalFallback.NEVER:
        return True
    return local.avoided(job) or local.never(job) is not None
