"""The receiver's comparing of sampled records with what their writers read at the source, and what came of it."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from batonpb import transfer_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, GrantId
from baton.log import get_log
from cachestore.layout import Layout
from kvtransfer.checksum_thread import INLINE_BYTES_MAX, ChecksumThread
from kvtransfer.checksums import CorruptRecords, RecordChecksums, differing
from kvtransfer.receiver_messages import RecordsChecked, ReportCorrupt
from kvtransfer.transport import TransportName

log = get_log("receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterPlace:
    """A writer process, for people. `transport` is that of its newest connection."""

    name: str
    host: str
    transport: TransportName


def checksums_from_proto(request: transfer_pb2.CommitRequest) -> RecordChecksums | None:
    """None where the Commit carries none: its writer samples nothing."""
    if not request.checksums and not request.checksum_layers and not request.checksum_blocks:
        return None
    return RecordChecksums(
        layers_R=np.array(request.checksum_layers, dtype=np.uint32),
        blocks_R=np.array(request.checksum_blocks, dtype=np.uint32),
        crcs_R=np.array(request.checksums, dtype=np.uint32),
    )


class RecordChecks:
    """Samples of grants whose Commit has come, and the results. Control thread only; the reading may be elsewhere."""

    def __init__(
        self, thread: ChecksumThread, layout: Layout, *, num_blocks: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Takes the thread over: `close` closes it."""
        self.records = 0
        """Compared so far."""
        self.corrupt: Counter[tuple[str, str]] = Counter()
        """Refused handoffs by (writer's name, transport)."""
        self._thread = thread
        self._layout = layout
        self._num_blocks = num_blocks
        self._loop = loop
        self._sent: dict[GrantId, RecordChecksums] = {}
        self._found: dict[GrantId, CorruptRecords] = {}

    def keep(self, grant: GrantId, sent: RecordChecksums, blocks: Collection[BlockId]) -> None:
        """The Commit's word about an uncommitted grant with these blocks, until it is compared. A repeat says the same.

        Raises BatonError BAD_FIELD for checksums that cannot be of this grant.
        """
        problem = sent.problem(self._layout, blocks)
        if problem is not None:
            raise bad_field("checksums", f"These are no checksums of this grant's records: {problem}.")
        self._sent.setdefault(grant, sent)

    def forget(self, grant: GrantId) -> None:
        """Nobody asks about it any more."""
        self._sent.pop(grant, None)
        self._found.pop(grant, None)

    async def run(self, grant: GrantId, then: Callable[[RecordsChecked], None]) -> None:
        """Compare, then say so. Of a grant that is forgotten before or meanwhile nothing is said, and nothing kept."""
        sent = self._sent.get(grant)
        if sent is None:
            return
        offsets_RS = sent.offsets(self._layout, self._num_blocks)
        nbytes_S = np.array([self._layout.record_bytes], dtype=np.int64)
        if len(sent) * self._layout.record_bytes <= INLINE_BYTES_MAX:
            found_R = self._thread.now(offsets_RS, nbytes_S)
        else:
            found_R = await asyncio.wrap_future(self._thread.submit(offsets_RS, nbytes_S), loop=self._loop)
        if self._sent.pop(grant, None) is None:
            return
        self.records += len(sent)
        corrupt = differing(sent, found_R)
        if corrupt is not None:
            self._found[grant] = corrupt
        then(RecordsChecked(grant=grant, intact=corrupt is None))

    def report(self, instruction: ReportCorrupt, writer: WriterPlace) -> None:
        """Loud: memory, a network card or a bus between the two is not to be trusted."""
        found = self._found[instruction.grant]
        self.corrupt[writer.name, writer.transport.value] += 1
        log.error(
            "CORRUPT RECORDS",
            request=instruction.key.request,
            attempt=instruction.key.attempt,
            writer=writer.name,
            writer_host=writer.host,
            host=socket.gethostname(),
            pair=f"{instruction.pair.writer:x}>{instruction.pair.receiver:x}",
            transport=writer.transport.value,
            corrupt=found.count,
            checked=found.checked,
            layer_block=found.told(),
        )

    def error(self, grant: GrantId) -> BatonError:
        """What the Commit is answered with, and each repeat of it."""
        found = self._found[grant]
        return BatonError(
            Reason.DATA_CORRUPT,
            f"{found.count} of {found.checked} sampled records are not here as they were read at the source: memory, a "
            "network card or a bus of one of the two machines is failing. Nothing of this handoff is used.",
            metadata={"layer_block": found.told(), "host": socket.gethostname(), "corrupt": str(found.count)},
        )

    def close(self) -> None:
        """Returns when nothing reads the region any more."""
        self._thread.close()
