"""The calls that the writer's machine instructs, each a task of its own: its answer, or none, becomes an event."""

from __future__ import annotations

import asyncio
import socket
from typing import Final, Protocol

from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import BlockId, Epoch, GrantId, RequestKey, ReserveNumber
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.handoff import Handoff, WriterConfig
from kvtransfer.protocol.writer import (
    CommitAnswered,
    CommitUnanswered,
    LeaseLapsed,
    ReleaseAnswered,
    ReleaseUnanswered,
    RenewRefused,
    ReserveGranted,
    ReserveRefused,
    ReserveUnanswered,
    SendCommit,
    SendRelease,
    SendReserve,
    WriterEvent,
    WritesDropped,
)
from kvtransfer.writer_calls import PeerAddress, ReceiverCalls, refusal_error

log = get_log("writer")

COMMIT_FAILED: Final = "commit call failed"
RELEASE_FAILED: Final = "release call failed"


class ErrandHost(Protocol):
    """The writer's shell, as its errands see it."""

    def handoff(self, number: ReserveNumber) -> Handoff | None:
        """None: it is over."""
        ...

    def handle(self, event: WriterEvent) -> None: ...

    def peer_gone(self) -> None:
        """The receiver turned out to be another process."""
        ...


class Errands:
    """Coroutines for the shell to spawn. Control thread only; none raises, all have their deadlines."""

    def __init__(
        self,
        *,
        address: PeerAddress,
        calls: ReceiverCalls,
        host: ErrandHost,
        loop: asyncio.AbstractEventLoop,
        config: WriterConfig,
        repeats: RepeatLog,
    ) -> None:
        self._address = address
        self._repeats = repeats
        self._calls = calls
        self._host = host
        self._loop = loop
        self._config = config

    async def cancel(self, key: RequestKey) -> None:
        """One call, at best."""
        try:
            await self._calls.cancel(key, "the prefill node gave the request up")
        except BatonError as error:
            self._repeats.info("cancel unanswered", peer=self._address.name, request=key.request, error=error.message)

    async def await_commit(self, handoff: Handoff) -> None:
        """The link ended behind a Commit: if the seal still arrived, the Commit is answered within one call's time."""
        await asyncio.wait([handoff.ended], timeout=self._config.call_ms_max / 1000)
        if not handoff.ended.done():
            self._host.handle(WritesDropped(number=handoff.number))

    async def reserve(self, instruction: SendReserve, request: transfer_pb2.ReserveRequest) -> None:
        """Ask once, and tell the handoff what it was granted, or why it was not."""
        number = instruction.number
        handoff = self._host.handoff(number)
        if handoff is None:
            return  # given up before it was sent
        sent_s = self._loop.time()
        try:
            reply = await self._calls.reserve(request, instruction, handoff.metadata)
        except BatonError as error:
            _fail_grant(handoff, error)
            if error.reason is Reason.INCARNATION_MISMATCH:
                self._host.peer_gone()
            self._host.handle(ReserveUnanswered(number=number))
            return
        if reply.WhichOneof("answer") != "granted":
            _fail_grant(handoff, refusal_error(reply, self._address.name))
            self._host.handle(ReserveRefused(number=number))
        elif self._host.handoff(number) is not None:
            grant = reply.granted
            handoff.grant = GrantId(grant.grant)
            handoff.dst_blocks = [BlockId(b) for b in grant.blocks]
            handoff.prefix_skip = grant.prefix_skip
            self._set_lease(handoff, sent_s, grant.lease_ms)
            self._host.handle(ReserveGranted(number=number, grant=handoff.grant, epoch=Epoch(grant.epoch)))

    async def keep_lease(self, handoff: Handoff) -> None:
        """Renew, the first time at once, until the handoff has ended; report the lease lapsed when no renewal was
        answered in time."""
        while not handoff.ended.done():
            wait_s = handoff.lease_ms / 3000
            sent_s = self._loop.time()
            try:
                left_s = max(handoff.lease_ends_s - sent_s, 0.001)
                reply = await self._calls.renew(handoff.grant, timeout_s=min(left_s, wait_s))
            except BatonError as error:
                if error.reason is Reason.INCARNATION_MISMATCH:
                    self._host.peer_gone()
                elif self._loop.time() >= handoff.lease_ends_s:
                    self._host.handle(LeaseLapsed(number=handoff.number))
            else:
                if reply.renewed:
                    self._set_lease(handoff, sent_s, reply.lease_ms)
                else:
                    self._host.handle(RenewRefused(number=handoff.number))
            if not handoff.ended.done():
                await asyncio.wait([handoff.ended], timeout=handoff.lease_ms / 3000)

    async def commit(self, instruction: SendCommit) -> None:
        """Ask once; the machine asks again where there was no answer, after a pause. So with `release`."""
        number = instruction.number
        handoff = self._host.handoff(number)
        if handoff is None:
            return  # given up before it was sent
        checksums = None if handoff.sample is None else await handoff.sample.checksums()
        if handoff.ended.done():
            return  # given up meanwhile
        try:
            committed = await self._calls.commit(handoff, instruction, checksums)
        except BatonError as error:
            if error.reason is Reason.DATA_CORRUPT:
                self._tell_corrupt(handoff, error)
                self._host.handle(CommitAnswered(number=number, committed=False, corrupt=True))
                return
            await self._after_failed_call(COMMIT_FAILED, error, number)
            self._host.handle(CommitUnanswered(number=number))
            return
        self._repeats.over(self._address.name, "it has answered", what=COMMIT_FAILED)
        self._host.handle(CommitAnswered(number=number, committed=committed))

    def _tell_corrupt(self, handoff: Handoff, error: BatonError) -> None:
        """As loud as at the receiver: either machine may be the one that is failing."""
        transport = handoff.peer.link.transport
        log.error(
            "CORRUPT RECORDS",
            request=handoff.key.request,
            attempt=handoff.key.attempt,
            peer=self._address.name,
            peer_host=error.metadata.get("host", ""),
            host=socket.gethostname(),
            pair=f"{self._address.pair.writer:x}>{self._address.pair.receiver:x}",
            transport=transport.value if transport is not None else "",
            corrupt=error.metadata.get("corrupt", ""),
            layer_block=error.metadata.get("layer_block", ""),
        )

    async def release(self, instruction: SendRelease) -> None:
        try:
            await self._calls.release(instruction)
        except BatonError as error:
            await self._after_failed_call(RELEASE_FAILED, error, instruction.number)
            self._host.handle(ReleaseUnanswered(number=instruction.number))
            return
        self._repeats.over(self._address.name, "it has answered", what=RELEASE_FAILED)
        self._host.handle(ReleaseAnswered(number=instruction.number))

    async def _after_failed_call(self, what: str, error: BatonError, number: ReserveNumber) -> None:
        """Notice a receiver that is another process by now; otherwise pause before the machine asks again."""
        if error.reason is Reason.INCARNATION_MISMATCH:
            self._host.peer_gone()
        handoff = self._host.handoff(number)
        if handoff is None:
            return
        self._repeats.warning(what, peer=self._address.name, request=handoff.key.request, error=error.message)
        pause_ms = min(self._config.retry_ms_max, self._config.retry_ms_min << min(handoff.retries, 16))
        handoff.retries += 1
        await asyncio.sleep(pause_ms / 1000)

    def _set_lease(self, handoff: Handoff, sent_s: float, lease_ms: int) -> None:
        handoff.lease_ms = lease_ms
        handoff.lease_ends_s = sent_s + lease_ms / 1000 * (1 - self._config.drift_per_mille / 1000)


def _fail_grant(handoff: Handoff, error: BatonError) -> None:
    if not handoff.granted.done():
        handoff.granted.set_result(error)
