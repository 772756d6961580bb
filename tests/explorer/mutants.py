"""Machines with one guard taken out each: an explorer that finds nothing wrong with these is worth nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton.ids import Epoch, GrantId, Pair, RequestKey, ReserveNumber
from kvtransfer.protocol.receiver import (
    AnswerRelease,
    CommitAsked,
    GrantEntry,
    GrantState,
    GrantTimerFired,
    RecordCheck,
    RecordsChecked,
    ReportCorrupt,
    RequestEnded,
    SealLanded,
    Step,
    TimerKind,
    WriterReleased,
)
from kvtransfer.protocol.writer import HandoffEntry, WriterMachine, WriterState, WriterStep, WritesInDoubt
from kvtransfer.transport import Seal
from tests.explorer.bounds import SAME_REQUEST, Bounds, Profile
from tests.explorer.data_path import SEAL, DataPath, Item
from tests.support.grant_scripts import AdmittingReceiver

_OPEN = (GrantState.RESERVED, GrantState.WRITING)


class NoEpochCheck(AdmittingReceiver):
    """Whatever arrives may land, and a seal of an old epoch counts like any other."""

    def admits_write(self, pair: Pair, epoch: Epoch, grant: GrantId) -> bool:
        return True

    def _seal(self, event: SealLanded) -> None:
        known = self._grant(event.seal.grant, event.pair)
        book = self._pair(event.pair)
        now = book.epoch
        book.epoch = known.epoch if known is not None else now
        super()._seal(replace(event, seal=replace(event.seal, epoch=book.epoch)))
        book.epoch = now


class EpochOnlyCheck(AdmittingReceiver):
    """A write is admitted by the epoch of its connection alone, whatever became of its grant."""

    def admits_write(self, pair: Pair, epoch: Epoch, grant: GrantId) -> bool:
        return epoch == self.epoch(pair)


class NoRefusedNumbers(AdmittingReceiver):
    """A Release that comes before its Reserve leaves nothing behind."""

    def _released(self, event: WriterReleased) -> None:
        super()._released(event)
        self._pair(event.pair).refused.clear()


class NoLowestLive(AdmittingReceiver):
    """The release of all numbers below the writer's lowest live one is not remembered."""

    def _raise_lowest_live(self, pair_key: Pair, lowest_live: ReserveNumber) -> None:
        super()._raise_lowest_live(pair_key, lowest_live)
        self._pair(pair_key).lowest_live = ReserveNumber(0)


class NoDeadAttempts(AdmittingReceiver):
    """A cancelled or resolved attempt leaves nothing behind."""

    def _add_tombstone(self, key: RequestKey) -> None:
        del key


class FreeOnTimeout(AdmittingReceiver):
    """A lease that has run out ends the writer's ownership."""

    def _timer(self, event: GrantTimerFired) -> None:
        grant = self._grants.get(event.grant)
        if grant is not None and event.kind is TimerKind.LEASE and grant.state in _OPEN:
            self._step(grant, Step.FENCE, GrantState.FENCED)
        else:
            super()._timer(event)


class FreeAfterRevokes(AdmittingReceiver):
    """So does a writer that does not answer to Revoke for long enough."""

    def _next_revoke_round(self, grant: GrantEntry) -> None:
        if grant.revoke_rounds + 1 >= self.limits.revoke_rounds_before_quarantine:
            self._step(grant, Step.FENCE, GrantState.FENCED)
        else:
            super()._next_revoke_round(grant)


class NoSeal(AdmittingReceiver):
    """The writer's Commit is enough: it counts as the seal too."""

    def _commit(self, event: CommitAsked) -> None:
        grant = self._grant(event.grant, event.pair)
        if grant is not None:
            seal = Seal(grant=grant.id, epoch=grant.epoch, writes=event.writes, bytes_written=event.bytes_written)
            self._seal(SealLanded(pair=event.pair, seal=seal))
        super()._commit(event)


class Unchecked(AdmittingReceiver):
    """Checksums that come with a Commit are compared, and the Commit counts meanwhile."""

    def _after_seal_or_commit(self, grant: GrantEntry, stay: GrantState) -> GrantState:
        super()._after_seal_or_commit(grant, stay)
        grant.check = RecordCheck.NONE
        return super()._after_seal_or_commit(grant, stay)


class CheckedTooLate(AdmittingReceiver):
    """What a comparison has read counts, though the writer has let go and the block is another's by now."""

    def _checked(self, event: RecordsChecked) -> None:
        grant = self._grants.get(event.grant)
        if grant is not None and not event.intact and grant.state is GrantState.FENCED:
            self._out.append(ReportCorrupt(pair=grant.pair, key=grant.key, grant=grant.id))
        super()._checked(event)


class FreeOnCancel(AdmittingReceiver):
    """A fetch that is given up frees its blocks at once: nobody waits for them, though its owner may still write."""

    def _enter_revoking(self, grant: GrantEntry) -> None:
        super()._enter_revoking(grant)
        self._step(grant, Step.FENCE, GrantState.FENCED)


class KeptAfterCommit(AdmittingReceiver):
    """A fetch whose blocks are in the prefix cache does not end."""

    def _ended(self, event: RequestEnded) -> None:
        del event


class NoRevokeTimer(AdmittingReceiver):
    """One Revoke, and then nothing: safe, but a lost message holds the block for ever."""

    def _enter_revoking(self, grant: GrantEntry) -> None:
        super()._enter_revoking(grant)
        self._out.pop()


class DoubtIgnored(AdmittingReceiver):
    """A Release is evidence, whatever became of the link that its writes went on."""

    def _released(self, event: WriterReleased) -> None:
        super()._released(replace(event, in_doubt=False))


class DoubtAnsweredAtOnce(AdmittingReceiver):
    """A Release with writes in doubt starts a fence, and is answered before it has ended."""

    def _released(self, event: WriterReleased) -> None:
        super()._released(event)
        grant = self._grants.get(self._pair(event.pair).by_number.get(event.number, GrantId(b"")))
        if grant is not None and grant.release_waits:
            grant.release_waits = False
            self._out.append(AnswerRelease(pair=event.pair, number=event.number))


class DoubtUnreported(WriterMachine):
    """The writer takes what has completed for what has landed or is lost."""

    def _writes_in_doubt(self, event: WritesInDoubt) -> None:
        del event


class DoubtForgotten(WriterMachine):
    """A writer that has given its peer up, and asks it again, has forgotten that writes were in doubt."""

    def _forget_if_over(self, handoff: HandoffEntry) -> None:
        super()._forget_if_over(handoff)
        self._in_doubt.clear()


class ReleaseUndrained(WriterMachine):
    """The writer sends Release while its copies are still running."""

    def _drain(self, handoff: HandoffEntry) -> None:
        if handoff.outstanding == 0:
            super()._drain(handoff)
        elif handoff.state is WriterState.DRAINING:
            self._step(handoff, WriterStep.DRAINED, WriterState.RELEASING)


class RevokeAnsweredAtOnce(WriterMachine):
    """A writer that gives its peer up answers a Revoke at once (the machine once did this)."""

    def _peer_gone(self, event: Any) -> None:
        for handoff in self._handoffs.values():
            self._answer_revoke(handoff)
        super()._peer_gone(event)


class SealOvertakesData(DataPath):
    """The seal has a channel of its own, which nothing orders behind the writes, and waits for no completion."""

    def may_seal(self, outstanding: int) -> bool:
        return True

    def put(self, number: int, writer: int, epoch: Epoch, items: tuple[Item, ...]) -> int:
        data = self.by_id[number]
        place = data.link(writer, epoch)
        if place is None or not items or items[0][1] != SEAL:
            return super().put(number, writer, epoch, items)
        return self.id(data.with_queue(place, items + data.connections[place].queue))


class ByeBeforeDrain(DataPath):
    """The writer sends BYE when it has closed its connection, while copies of its own threads still run."""

    def may_leave(self, number: int, writer: int, epoch: Epoch, outstanding: int) -> bool:
        return super().may_leave(number, writer, epoch, 0)


class ByeBelieved(DataPath):
    """The receiver takes a BYE for evidence, and destroys no end of a link that still has writes on their way."""

    def fenced(self, number: int, writer: int, epoch: Epoch) -> int:
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`says`: part of what the checks must say about it."""

    bounds: Bounds
    says: str


def _mutant(
    says: str,
    *,
    profile: Profile = Profile.CHANNEL,
    receiver: type[AdmittingReceiver] = AdmittingReceiver,
    writer: type[WriterMachine] = WriterMachine,
    data_path: type[DataPath] | None = None,
    crashes_max: int = 1,
    links_break: bool = True,
    writers_give_peers_up: bool = False,
    samples: bool = False,
    fetches: bool = False,
) -> Mutant:
    bounds = Bounds(
        profile=profile,
        keys=SAME_REQUEST,
        crashes_max=crashes_max,
        links_break=links_break,
        writers_give_peers_up=writers_give_peers_up,
        samples=samples,
        fetches=fetches,
        receiver=receiver,
        writer=writer,
        data_path=data_path,
    )
    return Mutant(bounds=bounds, says=says)


MUTANTS: dict[str, Mutant] = {
    "no epoch check": _mutant("would land", receiver=NoEpochCheck, links_break=False),
    "epoch but no grant check": _mutant("would land", receiver=EpochOnlyCheck),
    "no tombstone: refused numbers": _mutant("after its Release was answered", receiver=NoRefusedNumbers),
    "no tombstone: lowest live number": _mutant("is granted twice", receiver=NoLowestLive),
    "no tombstone: dead attempts": _mutant("commits after it was cancelled", receiver=NoDeadAttempts),
    "free on timeout: lease": _mutant("may still write", profile=Profile.SHM, receiver=FreeOnTimeout),
    "free on timeout: revoke rounds": _mutant("may still write", profile=Profile.SHM, receiver=FreeAfterRevokes),
    "no seal, channel": _mutant("of its writes only 0 landed", receiver=NoSeal),
    "no seal, shm": _mutant("of its writes only 0 landed", profile=Profile.SHM, receiver=NoSeal),
    "commit before its records are checked": _mutant(
        "not found intact", receiver=Unchecked, samples=True, crashes_max=0
    ),
    "records of a grant that is over": _mutant(
        "by the bytes of another one", receiver=CheckedTooLate, samples=True, crashes_max=0
    ),
    "no revoke timer": _mutant("never becomes free", profile=Profile.SHM, receiver=NoRevokeTimer, crashes_max=0),
    "Release with writes in doubt taken for evidence": _mutant(
        "would land", profile=Profile.RDMA, receiver=DoubtIgnored
    ),
    "Release with writes in doubt answered before the fence": _mutant(
        "would land", profile=Profile.RDMA, receiver=DoubtAnsweredAtOnce
    ),
    "writes in doubt, and not reported": _mutant("would land", profile=Profile.RDMA, writer=DoubtUnreported),
    "writes in doubt forgotten with their peer": _mutant(
        "would land", profile=Profile.RDMA, writer=DoubtForgotten, writers_give_peers_up=True, crashes_max=0
    ),
    "Release before the writes have drained": _mutant("outstanding", writer=ReleaseUndrained),
    "Revoke answered when the peer is given up": _mutant(
        "outstanding", profile=Profile.SHM, writer=RevokeAnsweredAtOnce, writers_give_peers_up=True
    ),
    "a SEAL that overtakes DATA, channel": _mutant("of its writes only 0 landed", data_path=SealOvertakesData),
    "a SEAL that overtakes DATA, rdma": _mutant(
        "of its writes only 0 landed", profile=Profile.RDMA, data_path=SealOvertakesData
    ),
    "a SEAL that overtakes DATA, shm": _mutant(
        "of its writes only 0 landed", profile=Profile.SHM, data_path=SealOvertakesData
    ),
    "a BYE before the drain, shm": _mutant("may still write", profile=Profile.SHM, data_path=ByeBeforeDrain),
    "a BYE before the drain, rdma": _mutant("would land", profile=Profile.RDMA, data_path=ByeBelieved),
    "a fetch that is entered before its seal": _mutant(
        "of its writes only 0 landed", profile=Profile.SHM, receiver=NoSeal, fetches=True
    ),
    "a fetch that is given up and freed": _mutant(
        "may still write", profile=Profile.SHM, receiver=FreeOnCancel, fetches=True, crashes_max=0
    ),
    "a fetch freed after revokes of a dead owner": _mutant(
        "may still write", profile=Profile.SHM, receiver=FreeAfterRevokes, fetches=True
    ),
    "a fetch that never ends": _mutant(
        "goes on for ever", profile=Profile.SHM, receiver=KeptAfterCommit, fetches=True, crashes_max=0
    ),
}
