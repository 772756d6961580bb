"""A cluster over rdma on a device made of arrays (`rdma_double`); `make test-rdma` has a real one."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.ids import GrantId
from cachestore.ledger import Ledger
from kvtransfer.link import LOST_THERE
from kvtransfer.protocol.receiver import OPEN, GrantState
from kvtransfer.transport import TransportName
from kvtransfer.transports import rdma
from kvtransfer.transports.rdma import RdmaLimits, RdmaReceiverPort, RdmaWriterLink
from kvtransfer.transports.rdma_verbs import posts_by
from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import ask_exactly, inprocess, peer_of, until
from tests.support.rdma_double import Deliver, DoubleQueuePairs, install

SPEC = mock_spec(both={"transports": "rdma"}, decode_flags={"receiver.lease_ms": 600_000})


def test_nothing_lands_late_and_nothing_waits_for_a_lease_when_the_link_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's link ends in mid-handoff with writes on their way, and the receiver hears nothing of it but the
    writer's Release. Not a block is freed before its own queue pairs are gone, so that what the network held back comes
    to nothing; then all are, in far less than a lease, and the answer comes from a second attempt."""
    install(monkeypatch)
    freed: list[tuple[GrantId, bool]] = []
    writer_gone = Ledger.writer_gone

    def watched(ledger: Ledger, blocks: tuple[int, ...], grant: GrantId) -> None:
        freed.append((grant, any(not qps.sends for qps in DoubleQueuePairs.alive.values())))
        writer_gone(ledger, blocks, grant)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "writer_gone", watched)
    monkeypatch.setattr(RdmaReceiverPort, "_lost", lambda port, c: port._loop.remove_reader(c.sock))

    async def scenario() -> None:
        async with inprocess(SPEC) as cluster:
            await ask_exactly(cluster, random_prompt(random.Random(1), 40))
            freed.clear()
            receiver = cluster.decode["decode-0"].receiver
            held: list[Deliver] = []
            DoubleQueuePairs.on_the_way = held
            call = asyncio.create_task(ask_exactly(cluster, random_prompt(random.Random(2), 40)))
            await until(cluster, "writes to be on their way", lambda: bool(held))
            (grant,) = (g for g in receiver.grants._grants if receiver.grants.state_of(g) in OPEN)
            DoubleQueuePairs.on_the_way = None  # for those of the second attempt
            link = peer_of(cluster, "decode-0").link.now
            assert isinstance(link, RdmaWriterLink)
            link._device_lost("the cable is cut")
            await until(cluster, "the blocks to be free", lambda: bool(freed))
            assert freed[0] == (grant, False)  # the second attempt may have come and gone by now
            await call
            assert not any(deliver() for deliver in held)
            assert receiver.grants.states()[GrantState.QUARANTINED] == 0
            await assert_conserved(cluster)

    asyncio.run(scenario())
    assert not DoubleQueuePairs.alive


def test_a_pair_whose_device_was_away_says_why_it_uses_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device goes away between two requests: the second one goes over tcp, and the pair says that it does so for
    want of the receiver's device. It says so too when the device is back, since its link stays as it is; the next link
    is over rdma again, and nothing is left to say."""
    state = install(monkeypatch)
    monkeypatch.setattr(rdma, "RDMA_LIMITS", RdmaLimits(device_check_ms=5))
    rng = random.Random(3)

    async def scenario() -> None:
        spec = mock_spec(
            both={"transports": "rdma,tcp"},
            router_flags={"placement_wait_ms_max": 30_000},
        )
        async with inprocess(spec) as cluster:

            async def reported() -> tuple[str, bool, list[tuple[str, str]]]:
                (pair,) = (await cluster.statuses())["prefill-0"].pairs
                return (
                    pair.transport,
                    pair.link_open,
                    [(other.transport, other.why) for other in pair.rejected_transports],
                )

            assert (await ask_exactly(cluster, random_prompt(rng, 40))).stats.transport == "rdma"
            assert await reported() == ("rdma", True, [])
            peer, ports = peer_of(cluster, "decode-0"), cluster.decode["decode-0"].receiver.ports

            state["lost"] = "pulled out"
            await until(cluster, "both sides to miss the device", lambda: bool(ports.withdrawn) and not peer.link.now)
            assert await reported() == ("rdma", False, [])
            assert (await ask_exactly(cluster, random_prompt(rng, 40))).stats.transport == "tcp"
            away = ("tcp", True, [("rdma", LOST_THERE)])
            assert await reported() == away

            state["lost"] = ""
            await until(cluster, "the device to be back", lambda: not ports.withdrawn)
            memory = cluster.peers["prefill-0"]._rdma
            assert memory is not None
            await until(cluster, "the writer to have it too", lambda: memory.device is not None)
            assert (await ask_exactly(cluster, random_prompt(rng, 40))).stats.transport == "tcp"
            assert await reported() == away
            link = peer.link.now
            assert link is not None
            await link.close()
            peer.link_lost(peer.address.pair, "closed by the test")
            assert (await ask_exactly(cluster, random_prompt(rng, 40))).stats.transport == "rdma"
            assert await reported() == ("rdma", True, [])
            facts = {fact.name: fact.text for fact in (await cluster.statuses())["prefill-0"].engine.facts}
            assert facts["rdma posted by"] == posts_by()
            await assert_conserved(cluster)

    asyncio.run(scenario())
    assert not DoubleQueuePairs.alive


def test_devices_that_do_not_reach_each_other_cost_no_answer_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides offer rdma, and between them nothing passes: the first request goes over tcp at once, rdma is given up
    and that is told, by the pair and by a counter; at the receiver nothing is fenced and no queue pair is left."""
    install(monkeypatch)
    monkeypatch.setattr(DoubleQueuePairs, "probes_lost", {0: 12, 1: 12})

    async def scenario() -> None:
        async with inprocess(mock_spec(both={"transports": "rdma,tcp"})) as cluster:
            for seed in (1, 2):
                answer = await ask_exactly(cluster, random_prompt(random.Random(seed), 40))
                assert (answer.stats.transport, answer.stats.resumptions) == ("tcp", 0)
            peer = peer_of(cluster, "decode-0")
            assert (list(peer.link.offers.given_up), peer.link.failures) == ([TransportName.RDMA], 1)
            reported = (await cluster.statuses())["prefill-0"]
            assert [list(pair.transports_given_up) for pair in reported.pairs] == [["rdma"]]
            assert {c.name: c.value for c in reported.counters}["transports given up"] == 1
            port = cluster.decode["decode-0"].receiver.ports.describe()[TransportName.RDMA]
            assert (port["links_unproved"], port["fences_ended"], port["connections_writing"]) == (1, 0, 0)
            await assert_conserved(cluster)

    asyncio.run(scenario())
    assert not DoubleQueuePairs.alive
