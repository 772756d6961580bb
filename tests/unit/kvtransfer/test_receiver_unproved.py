"""A receiver whose port has bytes of a grant on a device that failed: the writer's word does not free the blocks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.ids import Epoch, GrantId, Pair
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import GrantState, ReceiverMachine, ReserveAsked, SendRevoke, WriterReleased
from kvtransfer.receiver import Receiver, ReceiverConfig
from kvtransfer.transport import TransportName
from tests.conformance.transport_kits import Everything
from tests.support.grant_scripts import EPOCH_0, LIMITS, PAIR, grant_of, key_of, nth
from tests.support.shm_harness import run


class Ports:
    """A port that has no evidence for the grants in `failed`."""

    def __init__(self) -> None:
        self.failed: set[GrantId] = set()
        self.fenced: list[tuple[Pair, Epoch]] = []

    def expect(self, pair: Pair, epoch: Epoch, transport: TransportName) -> None:
        pass

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: object) -> None:
        pass

    def forbid(self, grant: GrantId) -> bool:
        return grant not in self.failed

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        self.fenced.append((pair, epoch))


def reserve(number: int, lowest_live: int = 0) -> ReserveAsked:
    return ReserveAsked(
        pair=PAIR,
        number=nth(number),
        lowest_live=nth(lowest_live),
        key=key_of(f"r{number}"),
        grant=grant_of(number),
        blocks_new=2,
        prefix=(),
        promise=0,
        host_backed=False,
        room=True,
    )


def receiver_of(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    monkeypatch.setattr("kvtransfer.receiver.WriteRanges", lambda *_: Everything())
    host: Any = SimpleNamespace(let_go=lambda grant: None)
    checks: Any = SimpleNamespace(close=lambda: None)
    unused: Any = None
    receiver = Receiver(
        incarnation=PAIR.receiver,
        grants=ReceiverMachine(Ledger(8), LIMITS),
        layout=unused,
        host=host,
        channels=unused,
        loop=asyncio.get_running_loop(),
        config=ReceiverConfig(lease_ms=60_000, revoke_ms=60_000),
        checks=checks,
    )
    receiver.ports = ports  # type: ignore[assignment]
    # Revokes go nowhere: the writer's word is given by hand.
    receiver._actions[SendRevoke] = lambda _: None
    receiver.connect(PAIR, "writer:1", TransportName.TCP)
    return receiver


@pytest.mark.parametrize("how", ["named", "below the lowest live"])
def test_the_writers_word_frees_no_block_that_a_failed_device_may_still_write(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grant 0 has copies on a device that failed, grant 1 has none. The writer lets go of both: 1 is released; 0 keeps
    its blocks, and its pair is fenced. The evidence of that fence releases it."""

    async def test() -> None:
        ports = Ports()
        receiver = receiver_of(ports, monkeypatch)
        for number in range(2):
            receiver.reserve(reserve(number))
        ports.failed.add(grant_of(0))
        if how == "named":
            receiver._handle(WriterReleased(pair=PAIR, number=nth(1), lowest_live=nth(0)))
            receiver._handle(WriterReleased(pair=PAIR, number=nth(0), lowest_live=nth(0)))
            receiver._handle(WriterReleased(pair=PAIR, number=nth(0), lowest_live=nth(0)))
        else:
            receiver._handle(WriterReleased(pair=PAIR, number=nth(1), lowest_live=nth(2)))
        states = [receiver.grants.state_of(grant_of(number)) for number in range(2)]
        assert states == [GrantState.REVOKING, GrantState.RELEASED]
        assert receiver.grants.ledger.free == 6
        assert ports.fenced == [(PAIR, EPOCH_0)]
        receiver._handle(reserve(2, lowest_live=2))
        assert receiver.grants.state_of(grant_of(0)) is GrantState.REVOKING
        receiver.writer_gone(PAIR, EPOCH_0, "1 closed, its receive thread joined")
        assert receiver.grants.state_of(grant_of(0)) is GrantState.RELEASED
        assert receiver.grants.ledger.free == 8
        await receiver.close()

    run(test())
