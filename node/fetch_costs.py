"""What fetches from other nodes cost this node, and what they have brought: of each owner, and of all together.

Pure; the caller passes the time in. An owner that was not measured lately is believed to be as all of them together
are. What is believed of all comes nearer to the first belief with the time that nothing is measured, as a node that
believes fetching to be slow fetches nothing, and so never measures it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final

from baton.wire import FetchLoad, Owner, PairLoad, Times
from node.sources import LinearCost

OWNERS_MAX: Final = 1_024
"""Whose figures are kept, least recently used dropped first."""
COST_AGE_MS_MAX: Final = 60_000
"""What was measured of an owner before that says nothing of it."""
COST_HALF_LIFE_MS: Final = 600_000
"""Of what was measured of all together, from then on: where fetching takes twice as long as computing, so long passes
until it is tried again, which costs a part of one prompt's time."""
FIXED_S: Final = 0.005
BYTE_S: Final = 1e-11
"""What is believed before the first fetch: less than it takes anywhere, as what is believed to be slow is never tried,
and so never measured."""
PAIRS_TOLD_MAX: Final = 8
"""Owners of which a load report says what they cost: those used last."""
CONNECT_S: Final = 0.02
"""What connecting is believed to take, before it was measured."""
SIGN_S: Final = 0.001
"""What an owner is believed to take until it asks for room, before that was measured lately of any."""
SILENT_TIMES: Final = 2
"""Who has not asked for room in time would have done so later, nobody knows when."""
TIMES_KEPT: Final = 8
"""How many measurements of either are remembered, about."""


class OwnerFigures:
    """What one owner has brought, or all of them together, and what that took."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = self.nbytes = self.refused = self.failed = 0
        self.times = Times()
        """Of fetches that brought something."""
        self.cost: LinearCost | None = None
        """Of so many bytes, once measured."""
        self.measured_s = 0.0
        self.sign_s, self.sign_measured_s = SIGN_S, -math.inf
        """What it takes until it asks for room."""
        self.come = 0
        """Marks that fetches which are over have seen gone (`node/landing.py`)."""
        self.silent = 0
        """How often in a row the time was over before it brought anything."""

    def ages(self, now_s: float) -> int:
        """How many times `COST_AGE_MS_MAX` ago it was measured last."""
        return int((now_s - self.measured_s) * 1000 / COST_AGE_MS_MAX)

    def has_sign(self, now_s: float) -> bool:
        return (now_s - self.sign_measured_s) * 1000 < COST_AGE_MS_MAX


class FetchCosts:
    """Control thread only."""

    def __init__(self) -> None:
        self.total = OwnerFigures("")
        self.owners: OrderedDict[int, OwnerFigures] = OrderedDict()
        """By incarnation."""
        self.connect_s = CONNECT_S
        """What it takes to connect an owner."""

    def of(self, owner: Owner) -> OwnerFigures:
        figures = self.owners.get(owner.incarnation)
        if figures is None:
            figures = self.owners[owner.incarnation] = OwnerFigures(owner.name)
            if len(self.owners) > OWNERS_MAX:
                self.owners.popitem(last=False)
        self.owners.move_to_end(owner.incarnation)
        return figures

    def cost(self, owner: Owner, now_s: float) -> LinearCost:
        """Of so many bytes from this owner."""
        figures = self.of(owner)
        return self.of_any(now_s) if figures.cost is None or figures.ages(now_s) else figures.cost

    def of_any(self, now_s: float) -> LinearCost:
        """The same of an owner of whom nothing is known."""
        total = self.total
        if total.cost is None:
            return LinearCost.believed(FIXED_S, BYTE_S)
        ages = total.ages(now_s)
        if ages == 0:
            return total.cost
        # In steps, so that a load report does not change all the time.
        share = 2 ** (-(ages - 1) * COST_AGE_MS_MAX / COST_HALF_LIFE_MS)
        fixed_s, unit_s = (
            measured_s if measured_s < believed_s else believed_s + share * (measured_s - believed_s)
            for measured_s, believed_s in ((total.cost.fixed_s, FIXED_S), (total.cost.unit_s, BYTE_S))
        )
        return LinearCost.believed(fixed_s, unit_s)

    def measured(self, owner: Owner, nbytes: int, seconds: float, now_s: float) -> None:
        """A fetch of so many bytes took so long, or was given up then."""
        believed, figures = self.of_any(now_s), self.of(owner)
        if figures.cost is None or figures.ages(now_s):
            figures.cost = LinearCost.believed(believed.fixed_s, believed.unit_s)
        if believed is not self.total.cost:
            self.total.cost = believed
        for each, cost in ((figures, figures.cost), (self.total, believed)):
            cost.measured(nbytes, seconds)
            each.measured_s = now_s

    def load(self, now_s: float, token_bytes: float) -> FetchLoad:
        """For whoever places prompts; nothing before the first measurement."""
        if self.total.cost is None:
            return FetchLoad()
        cost = self.of_any(now_s)
        lately = (
            PairLoad(owner=owner, fixed_s=figures.cost.fixed_s, token_s=figures.cost.unit_s * token_bytes)
            for owner, figures in reversed(self.owners.items())
            if figures.cost is not None and not figures.ages(now_s)
        )
        return FetchLoad(
            fixed_s=cost.fixed_s, token_s=cost.unit_s * token_bytes, pairs=tuple(islice(lately, PAIRS_TOLD_MAX))
        )

    def brought(self, owner: Owner, *, tokens: int, nbytes: int, seconds: float) -> None:
        """Count a fetch that has brought something."""
        for figures in (self.of(owner), self.total):
            figures.tokens += tokens
            figures.nbytes += nbytes
            figures.times.add(seconds)

    def refused(self, owner: Owner) -> None:
        for figures in (self.of(owner), self.total):
            figures.refused += 1

    def failed(self, owner: Owner) -> None:
        for figures in (self.of(owner), self.total):
            figures.failed += 1

    def connected(self, seconds: float) -> None:
        """Connecting an owner took so long."""
        self.connect_s += (seconds - self.connect_s) / TIMES_KEPT

    def sign_s(self, owner: Owner, now_s: float) -> float:
        """What an owner takes until it asks for room, the first sign that it is at work."""
        return next((each.sign_s for each in (self.of(owner), self.total) if each.has_sign(now_s)), SIGN_S)

    def signed(self, owner: Owner, seconds: float, now_s: float) -> None:
        """It took so long."""
        self._learn_sign((self.of(owner), self.total), owner, seconds, now_s)

    def silent(self, owner: Owner, seconds: float, now_s: float) -> None:
        """It was given up then: that says nothing of others. It counts as `SILENT_TIMES` as long, or one that is always
        silent would seem to come just in time."""
        self._learn_sign((self.of(owner),), owner, SILENT_TIMES * seconds, now_s)

    def _learn_sign(self, figures: Iterable[OwnerFigures], owner: Owner, seconds: float, now_s: float) -> None:
        before_s = self.sign_s(owner, now_s)
        for each in figures:
            lately_s = each.sign_s if each.has_sign(now_s) else before_s
            each.sign_s, each.sign_measured_s = lately_s + (seconds - lately_s) / TIMES_KEPT, now_s
