"""Private state of the machines as hashable tuples, and back. The explorer's product states are made of these.

Stories are left out (the explorer sets `story_steps_max` to 0), as is everything that follows from the rest.
"""

from __future__ import annotations

from typing import Any

from baton.ids import ReserveNumber
from kvtransfer.ledger import Ledger
from kvtransfer.receiver_grants import ReceiverGrants, ReceiverLimits, _Grant, _PairState
from kvtransfer.writer_grants import WriterGrants, WriterLimits, _Handoff

GrantTuple = tuple[Any, ...]
ReceiverTuple = tuple[tuple[GrantTuple, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
HandoffTuple = tuple[Any, ...]
WriterTuple = tuple[int, tuple[HandoffTuple, ...]]


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
    ledger._holds, ledger._writer = list(holds), list(writer)
    ledger._quarantined, ledger._cached, ledger._free = list(quarantined), list(cached), list(free)
    ledger._promises = dict(promises)
    ledger._promised = sum(ledger._promises.values())
    ledger._cached_count = sum(c and not h for c, h in zip(cached, holds, strict=True))
    return ledger


def save_receiver(machine: ReceiverGrants) -> ReceiverTuple:
    grants = tuple(
        (
            g.id,
            g.number,
            g.key,
            g.pair,
            g.epoch,
            g.state,
            g.blocks,
            g.prefix,
            tuple(sorted(g.seals.items())),
            g.expected,
            g.commit_waits,
            g.was_committed,
            g.revoke_rounds,
        )
        for _, g in sorted(machine._grants.items())
    )
    pairs = tuple(
        (
            pair,
            p.epoch,
            p.lowest_live,
            tuple(sorted(p.refused.items())),
            tuple(sorted(p.by_number.items())),
            p.fencing,
        )
        for pair, p in sorted(machine._pairs.items())
    )
    return grants, pairs, tuple(sorted(machine._dead_attempts.items())), save_ledger(machine.ledger)


def load_receiver(make: type[ReceiverGrants], limits: ReceiverLimits, saved: ReceiverTuple) -> ReceiverGrants:
    grants, pairs, dead, ledger = saved
    machine = make(load_ledger(ledger), limits)
    for row in grants:
        grant = _Grant(
            id=row[0],
            number=row[1],
            key=row[2],
            pair=row[3],
            epoch=row[4],
            state=row[5],
            blocks=row[6],
            prefix=row[7],
            seals=dict(row[8]),
            expected=row[9],
            commit_waits=row[10],
            was_committed=row[11],
            revoke_rounds=row[12],
        )
        machine._grants[grant.id] = grant
        machine._by_request.setdefault(grant.key.request, set()).add(grant.id)
    for pair, epoch, lowest_live, refused, by_number, fencing in pairs:
        machine._pairs[pair] = _PairState(
            epoch=epoch,
            lowest_live=lowest_live,
            refused=dict(refused),
            by_number=dict(by_number),
            fencing=fencing,
        )
    machine._dead_attempts = dict(dead)
    return machine


def save_writer(machine: WriterGrants) -> WriterTuple:
    return machine._next, tuple(
        (
            h.number,
            h.key,
            h.state,
            h.grant,
            h.epoch,
            h.writes,
            h.bytes_written,
            h.outstanding,
            h.sources_held,
            h.revoke_waits,
            h.reported,
        )
        for _, h in sorted(machine._handoffs.items())
    )


def load_writer(make: type[WriterGrants], limits: WriterLimits, saved: WriterTuple) -> WriterGrants:
    machine = make(limits)
    machine._next = ReserveNumber(saved[0])
    for row in saved[1]:
        machine._handoffs[row[0]] = _Handoff(
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
        )
    return machine
