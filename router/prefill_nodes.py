"""The prefill nodes that one router knows, and which of them a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeRecord
from router.job import Job
from router.placement import Placement, chain_hashes


class PrefillNodes:
    """Lives on the router's loop."""

    def __init__(self, known: Callable[[], Sequence[NodeRecord]], *, blocks_max: int) -> None:
        """`known` is what the directory says at each call; `blocks_max` as for `Placement`."""
        self._known = known
        self._looked_at: Sequence[NodeRecord] | None = None
        self._ready: list[NodeRecord] = []
        """Of `_looked_at`: looked through when the directory says something else, not for each request."""
        self._placement = Placement(blocks_max=blocks_max)
        self._drained: dict[Incarnation, int] = {}
        """Processes that refused work, each with the sequence of the record that had said they take some."""

    def ready(self) -> list[NodeRecord]:
        """Those that take requests. Not to be changed."""
        known = self._known()
        if known is not self._looked_at:
            self._looked_at = known
            self._ready = [r for r in known if r.lifecycle is Lifecycle.READY and r.model is not None]
        return self._ready

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        for record in self.ready():
            assert record.model is not None
            return record.model
        raise BatonError(
            Reason.NO_PREFILL_NODE,
            f"No prefill node is ready ({len(self._known())} known). Start one, or wait for one to come up.",
            retry_after_ms=1_000,
        )

    def place(self, job: Job, key: RequestKey) -> tuple[NodeRecord, Callable[[], None]]:
        """Where the next attempt goes, and what to call when that has ended. Raises BatonError NO_PREFILL_NODE."""
        model = self.model()
        tokens = (*job.checked.prompt, *job.output)
        hashes = chain_hashes(tokens, model.block_size, job.checked.cache_salt)
        job.block_size = model.block_size
        fit = self._fit(model)
        untried = [r for r in fit if r.incarnation not in job.avoid]
        if not untried:
            job.avoid.clear()
        record = self._placement.pick(untried or fit, hashes, len(tokens))
        return record, self._placement.sent(record, key, hashes, len(tokens))

    def untried(self, job: Job) -> bool:
        """Whether there is one that has not failed this request since all had."""
        return bool(self.ready()) and any(r.incarnation not in job.avoid for r in self._fit(self.model()))

    def _fit(self, model: ModelInfo) -> list[NodeRecord]:
        fit = [r for r in self.ready() if r.model is not None and r.model.fingerprint == model.fingerprint]
        return [r for r in fit if self._drained.get(r.incarnation) != r.sequence] or fit

    def refused(self, record: NodeRecord) -> None:
        """It takes no work, whatever this record says: its own answer counts until a later record says otherwise."""
        self._drained[record.incarnation] = record.sequence

    def follow(self) -> set[str]:
        """New load reports. The endpoints of all that are there."""
        records = self._known()
        self._looked_at = None
        self._placement.update(records)
        sequences = {record.incarnation: record.sequence for record in records}
        self._drained = {i: sequence for i, sequence in self._drained.items() if sequences.get(i) == sequence}
        return {record.endpoint for record in records}
