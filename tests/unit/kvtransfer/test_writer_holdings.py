"""Whose blocks a receiver cannot use, since when, and why: followed through the machine's own steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from batonpb import node_pb2

from baton.ids import Epoch, Pair
from kvtransfer.protocol.receiver import (
    CommitAsked,
    GrantState,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    RequestCancelled,
    ResolveAsked,
    SealLanded,
    TimerKind,
    WriterReleased,
    WriterSuspected,
)
from kvtransfer.status import WriterHoldings, WriterPlace
from kvtransfer.transport import Seal, TransportName
from tests.support.grant_scripts import EPOCH_0, OTHER_PAIR, PAIR, Receiver, grant_of, key_of, nth, seal_of

PLACES = {
    PAIR: WriterPlace(endpoint="", name="prefill-0", host="one", transport=TransportName.SHM),
    OTHER_PAIR: WriterPlace(endpoint="", name="prefill-1", host="two", transport=TransportName.TCP),
}
WRITER = f"prefill-0/{PAIR.writer:016x}"


class Scene:
    """A machine with two blocks a grant, followed; a second passes between two events."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.script = Receiver(blocks=8)
        self.holdings = WriterHoldings(self.script.machine, places=PLACES, now_s=lambda: self.now_s)
        machine, handle = self.script.machine, self.script.machine.handle

        def followed(event: ReceiverEvent) -> Any:
            instructions = handle(event)
            self.holdings.follow(event, instructions)
            self.now_s += 1
            return instructions

        machine.handle = followed  # type: ignore[method-assign]

    def handle(self, *events: ReceiverEvent) -> None:
        for event in events:
            self.script.machine.handle(event)

    def of(self, pair: Pair) -> node_pb2.WriterStatus:
        (holding,) = [each for each in self.holdings.of_writers() if each.writer_incarnation == pair.writer]
        counts = self.script.machine.ledger.counts()
        every = self.holdings.of_writers()
        assert sum(each.blocks_quarantined for each in every) == counts.quarantined
        assert sum(each.blocks_granted for each in every) == counts.writer_owned
        return holding


def timer(number: int = 0, kind: TimerKind = TimerKind.REVOKE) -> GrantTimerFired:
    return GrantTimerFired(grant=grant_of(number), kind=kind)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(r.getMessage(), r.baton_fields) for r in caplog.records if "quarantine" in r.getMessage()]  # type: ignore[attr-defined]


def test_a_quarantine_from_its_beginning_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Two grants of one writer lapse, and nobody answers: its blocks are told with since when and why, one line begins
    the quarantine, one ends it. Another writer goes on and holds its own."""
    scene = Scene()
    for number in range(2):
        scene.script.reserve(number, key=key_of(f"r{number}"))
    scene.script.reserve(2, key=key_of("other"), pair=OTHER_PAIR)
    holding = scene.of(PAIR)
    assert (holding.grants, holding.blocks_granted, holding.blocks_quarantined) == (2, 4, 0)
    assert (holding.taken_back_ms, holding.quarantined_ms, holding.why) == (0, 0, "")
    with caplog.at_level(logging.WARNING):
        scene.handle(timer(0, TimerKind.LEASE))
        assert scene.of(PAIR).why == "its lease ran out"
        scene.handle(timer(0), timer(0))
        assert scene.script.machine.state_of(grant_of(0)) is GrantState.QUARANTINED
        scene.handle(timer(0), timer(1), timer(1), timer(1))
        holding, other = scene.of(PAIR), scene.of(OTHER_PAIR)
        assert (holding.grants, holding.blocks_granted, holding.blocks_quarantined) == (2, 0, 4)
        assert (holding.taken_back_ms, holding.quarantined_ms, holding.why) == (7000, 5000, "its lease ran out")
        assert (other.blocks_granted, other.blocks_quarantined, other.why) == (2, 0, "")
        assert [what for what, _ in lines(caplog)] == [
            "quarantine begins: no evidence that the writer has stopped writing"
        ]
        scene.handle(PairFenced(pair=PAIR, epoch=EPOCH_0))
    assert lines(caplog) == [
        (
            "quarantine begins: no evidence that the writer has stopped writing",
            {
                "writer": WRITER, "host": "one", "transport": "shm", "blocks": 2, "blocks_to_come": 2,
                "why": "its lease ran out", "asked_back_s": 2,
            },
        ),
        ("quarantine ends", {"writer": WRITER, "blocks": 4, "seconds": 5.0, "evidence": "a fence"}),
    ]  # fmt: skip
    holding = scene.of(PAIR)
    assert (holding.grants, holding.taken_back_ms, holding.quarantined_ms, holding.why) == (0, 0, 0, "")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (RequestCancelled(key=key_of()), "its request was cancelled"),
        (ResolveAsked(key=key_of()), "its router asked whether it had committed, and it had not"),
        (WriterSuspected(pair=PAIR), "its writer was lost"),
        (timer(0, TimerKind.LEASE), "its lease ran out"),
        (
            WriterReleased(pair=PAIR, number=nth(1), lowest_live=nth(0), in_doubt=True),
            "its writer released another grant with writes in doubt",
        ),
    ],
)
def test_why_blocks_are_taken_back(event: ReceiverEvent, why: str) -> None:
    """Each thing that starts it, with another grant of the writer beside."""
    scene = Scene()
    scene.script.reserve()
    scene.script.reserve(1, key=key_of("beside"))
    scene.handle(event)
    assert scene.of(PAIR).why == why


def test_a_newer_attempt_takes_the_older_ones_blocks_back() -> None:
    scene = Scene()
    scene.script.reserve(key=key_of(attempt=1))
    scene.script.reserve(1, key=key_of(attempt=2))
    holding = scene.of(PAIR)
    assert (holding.grants, holding.why) == (2, "a newer attempt of its request came")


def test_a_grant_beside_one_that_is_not_given_back() -> None:
    """The fence that a round starts takes the whole pair's right."""
    scene = Scene()
    scene.script.reserve()
    scene.handle(RequestCancelled(key=key_of()))
    scene.script.reserve(1, key=key_of("beside"))
    scene.handle(timer(0))
    assert scene.script.machine.state_of(grant_of(1)) is GrantState.REVOKING
    assert [taken.why for taken in scene.holdings._taken_back.values()] == [
        "its request was cancelled", "another grant of its writer was not given back",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "evidence"),
    [
        ([PairFenced(pair=PAIR, epoch=Epoch(0))], "a fence"),
        ([WriterReleased(pair=PAIR, number=nth(0), lowest_live=nth(0))], "the writer's release"),
        (
            [
                SealLanded(pair=PAIR, seal=seal_of(grant_of(0), writes=1)),
                CommitAsked(pair=PAIR, grant=grant_of(0), writes=1, bytes_written=10),
            ],
            "seals and commit",
        ),
    ],
    ids=["fence", "word", "commit"],
)
def test_what_ends_a_quarantine(events: list[ReceiverEvent], evidence: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.script.reserve()
    with caplog.at_level(logging.WARNING):
        scene.handle(timer(0, TimerKind.LEASE), timer(0), timer(0), timer(0), *events)
    ((_, begun), (what, ended)) = lines(caplog)
    assert (what, begun["blocks"], ended["blocks"], ended["evidence"]) == ("quarantine ends", 2, 2, evidence)


def test_a_grant_that_comes_back_in_time_is_no_quarantine(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.script.reserve()
    with caplog.at_level(logging.WARNING):
        scene.handle(RequestCancelled(key=key_of()), timer(0), PairFenced(pair=PAIR, epoch=EPOCH_0))
    assert lines(caplog) == []
    assert scene.of(PAIR).taken_back_ms == 0


def test_what_has_landed_is_told_of_each_writer() -> None:
    """One writer seals two handoffs, the second twenty seconds later; another writer seals none. Once the first writer
    is forgotten nothing of it is left."""
    scene = Scene()
    for number, nbytes in enumerate((300, 80)):
        scene.script.reserve(number, key=key_of(f"r{number}"))
        seal = Seal(grant=grant_of(number), epoch=EPOCH_0, writes=2, bytes_written=nbytes)
        scene.handle(SealLanded(pair=PAIR, seal=seal))
        if number == 0:
            assert scene.of(PAIR).landed_per_s == pytest.approx(300 / 9)
            scene.now_s += 20
    scene.script.reserve(2, key=key_of("other"), pair=OTHER_PAIR)
    assert scene.of(PAIR).bytes_landed == 380
    assert scene.of(PAIR).landed_per_s == pytest.approx(80 / 9)
    assert (scene.of(OTHER_PAIR).bytes_landed, scene.of(OTHER_PAIR).landed_per_s) == (0, 0.0)
    scene.holdings.forget(PAIR)
    assert scene.of(PAIR).bytes_landed == 0
