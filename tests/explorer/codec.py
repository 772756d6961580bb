"""Private state of the machines as hashable tuples, and back. The explorer's product states are made of these.

Left out is what nothing reads any more: stories, the seal and rounds of a grant whose writer's right is over, the
writes and grant of a handoff that was given up, and the reason of a stored refusal (it goes into the answer; the
writer's machine does not look at it). That makes many states one.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

from baton.ids import Epoch, GrantId, ReserveNumber
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import GrantEntry, GrantState, PairEntry, ReceiverLimits, ReceiverMachine, Refusal
from kvtransfer.protocol.writer import HandoffEntry, WriterMachine, WriterState

MachineT = TypeVar("MachineT", bound=ReceiverMachine)
GrantTuple = tuple[Any, ...]
ReceiverTuple = tuple[tuple[GrantTuple, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Epoch]
HandoffTuple = tuple[Any, ...]
WriterTuple = tuple[int, tuple[HandoffTuple, ...], tuple[tuple[ReserveNumber, Epoch], ...]]


def save_ledger(ledger: Ledger) -> tuple[Any, ...]:
    return (
        tuple(ledger._holds),
        tuple(ledger._writer),
        tuple(ledger._quarantined),
        tuple(ledger._cached),
        tuple(ledger._free),
        tuple(sorted(ledger._promises.items(), key=repr)),
    )


def load_ledger(saved: tuple[Any, ...]) -> Ledger:
    holds, writer, quarantined, cached, free, promises = saved
    ledger = Ledger(len(holds))
    ledger._holds, ledger._writer = array("I", holds), list(writer)
    ledger._quarantined, ledger._cached, ledger._free = bytearray(quarantined), bytearray(cached), array("I", free)
    ledger._promises = dict(promises)
    ledger._promised = sum(ledger._promises.values())
    ledger._cached_count = sum(c and not h for c, h in zip(cached, holds, strict=True))
    return ledger


def save_receiver(machine: ReceiverMachine) -> ReceiverTuple:
    grants = tuple(_save_grant(g) for _, g in sorted(machine._grants.items()))
    pairs = tuple(
        (
            pair,
            p.epoch,
            p.lowest_live,
            tuple((number, Refusal.STALE) for number in sorted(p.refused)),
            tuple(sorted(p.by_number.items())),
            p.fencing,
        )
        for pair, p in sorted(machine._pairs.items())
    )
    dead = tuple(sorted(machine._dead_attempts.items()))
    return grants, pairs, dead, save_ledger(machine.ledger), machine._first_epoch


def _save_grant(grant: GrantEntry) -> GrantTuple:
    known = (grant.id, grant.number, grant.key, grant.pair)
    if grant.state in (GrantState.COMMITTED, GrantState.FENCED, GrantState.RELEASED):
        assert not grant.commit_waits
        kept = grant.blocks if grant.state is GrantState.COMMITTED else ()
        assert not grant.release_waits
        return (*known, Epoch(0), grant.state, kept, (), None, None, False, grant.was_committed, 0, grant.check, False)
    return (
        *known,
        grant.epoch,
        grant.state,
        grant.blocks,
        grant.prefix,
        grant.sealed,
        grant.expected,
        grant.commit_waits,
        grant.was_committed,
        grant.revoke_rounds,
        grant.check,
        grant.release_waits,
    )


def load_receiver(make: type[MachineT], limits: ReceiverLimits, saved: ReceiverTuple) -> MachineT:
    grants, pairs, dead, ledger, first_epoch = saved
    machine = make(load_ledger(ledger), limits)
    machine._first_epoch = first_epoch
    for row in grants:
        grant = GrantEntry(
            id=row[0],
            number=row[1],
            key=row[2],
            pair=row[3],
            epoch=row[4],
            state=row[5],
            blocks=row[6],
            prefix=row[7],
            sealed=row[8],
            expected=row[9],
            commit_waits=row[10],
            was_committed=row[11],
            revoke_rounds=row[12],
            check=row[13],
            release_waits=row[14],
        )
        machine._grants[grant.id] = grant
        machine._by_request.setdefault(grant.key.request, set()).add(grant.id)
    for pair, epoch, lowest_live, refused, by_number, fencing in pairs:
        machine._pairs[pair] = PairEntry(
            epoch=epoch,
            lowest_live=lowest_live,
            refused=dict(refused),
            by_number=dict(by_number),
            fencing=fencing,
        )
    machine._dead_attempts = dict(dead)
    return machine


def save_writer(machine: WriterMachine) -> WriterTuple:
    handoffs = tuple(_save_handoff(h) for _, h in sorted(machine._handoffs.items()))
    return machine._next, handoffs, tuple(sorted(machine._in_doubt.items()))


def _save_handoff(handoff: HandoffEntry) -> HandoffTuple:
    given_up = handoff.state in (WriterState.DRAINING, WriterState.RELEASING)
    drained = handoff.state is WriterState.RELEASING
    return (
        handoff.number,
        handoff.key,
        handoff.state,
        GrantId(b"") if drained else handoff.grant,
        Epoch(0) if drained and not handoff.in_doubt else handoff.epoch,
        0 if given_up else handoff.writes,
        0 if given_up else handoff.bytes_written,
        handoff.outstanding,
        handoff.sources_held,
        handoff.revoke_waits,
        handoff.reported,
        handoff.in_doubt,
    )


def load_writer(make: type[WriterMachine], live_span_max: int, saved: WriterTuple) -> WriterMachine:
    machine = make(live_span_max=live_span_max)
    machine._next = ReserveNumber(saved[0])
    for row in saved[1]:
        machine._handoffs[row[0]] = HandoffEntry(
            number=row[0],
            key=row[1],
            state=row[2],
            grant=row[3],
            epoch=row[4],
            writes=row[5],
            bytes_written=row[6],
            outstanding=row[7],
            sources_held=row[8],
            revoke_waits=row[9],
            reported=row[10],
            in_doubt=row[11],
        )
    machine._in_doubt = dict(saved[2])
    return machine
