"""One writer's connection at the receiver: its limits, its state, and the queue pairs that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.log import get_log
from kvtransfer.transports import rdma_wire as wire
from kvtransfer.transports.rdma_device import QueuePairFailed, QueuePairs
from kvtransfer.transports.rdma_memory import Hold, RdmaMemory
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.rdma_wire import RefusalReason
from kvtransfer.transports.seal_gather import SealGather
from kvtransfer.transports.words_connection import WordsConnection

log = get_log("rdma")


class NotWelcome(Exception):
    """Why there are no queue pairs for a writer."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class Connection(WordsConnection):
    """`qps` from the moment that it may write until they are destroyed; then it is forgotten."""

    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    hello: wire.Hello | None = None
    destroy_timer: asyncio.TimerHandle | None = None
    qps: QueuePairs | None = None
    hold: Hold | None = None
    probed: set[int] = field(default_factory=set)
    """Queue pairs of which the probe has come."""
    seals: SealGather | None = None
    """From the moment that all have, and the link is made. Nothing of a grant comes down one that is not."""

    @property
    def writer(self) -> str:
        """For people; it has said HELLO."""
        assert self.hello is not None
        return f"{self.hello.pair.writer:x}"

    def open_qps(self, memory: RdmaMemory, hello: wire.Hello, randomness: Callable[[int], bytes]) -> None:
        """Acquire the device and make as many queue pairs as the writer has. Raises NotWelcome: nothing is kept."""
        try:
            hold = memory.acquire()
        except RdmaUnavailable as error:
            raise NotWelcome(RefusalReason.DEVICE) from error
        if hello.ends.ethernet != hold.device.ethernet:
            hold.release()
            raise NotWelcome(RefusalReason.LINK_LAYER)
        try:
            self.qps = QueuePairs(hold.device, len(hello.ends.qps), randomness, sends=False)
        except QueuePairFailed as error:
            hold.release()
            log.warning("no queue pairs for a writer", reason=str(error))
            raise NotWelcome(RefusalReason.QUEUE_PAIR) from error
        self.hold = hold

    def welcome(self, secret: bytes) -> wire.Welcome:
        """What the writer is told of its queue pairs' other ends."""
        assert self.hello is not None and self.qps is not None and self.hold is not None
        nbytes, probes, ends = self.hold.device.nbytes, self.hold.device.probes, self.qps.ends
        proof = wire.receiver_proof(secret, self.hello, self.nonce, nbytes, probes, ends)
        return wire.Welcome(proof=proof, region_nbytes=nbytes, probes=probes, ends=ends)

    def probe_came(self, qp: int, number: int) -> bool:
        """The first immediate on a queue pair, which is its index. False: it is not, or not the first."""
        if qp in self.probed or number != qp:
            return False
        self.probed.add(qp)
        return True

    def _encode(self, message: wire.Message) -> bytes:
        return wire.encode(message)

    def leave_behind(self) -> None:
        """Its queue pairs cannot be destroyed, and nobody will try any more: they stay until the process ends."""
        assert self.hold is not None
        self.cancel_destroy()
        self.hold.leave_behind()
        log.error(
            "queue pairs are left to the end of the process: they cannot be destroyed",
            writer=self.writer,
        )

    def cancel_destroy(self) -> None:
        """Try no more, until somebody does again."""
        if self.destroy_timer is not None:
            self.destroy_timer.cancel()
            self.destroy_timer = None
