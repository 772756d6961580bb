"""Link and port of ucx with a double in NIXL's place: what is evidence and what is not, deadlines, failures."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.endpoint import split_endpoint
from baton.ids import Epoch
from kvtransfer.link import host_identity
from kvtransfer.region import Region
from kvtransfer.transport import ConnectError, DataEndpoint, PairBeingFenced, Seal
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import ucx
from kvtransfer.transports.control_channel import RefusalReason
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import CODEC, UCX_LINK_LIMITS, UCX_PORT_LIMITS, UcxHello, UcxReceiverPort, UcxWriterLink
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, pair_of, run
from tests.support.shm_peer import source_bytes
from tests.support.ucx_double import AgentDouble, agents

__all__ = ["agents"]

EPOCH = Epoch(3)
PAIR = pair_of(2)
GRANT = grant_of(7)
ELSEWHERE = "00" * 16
SEAL = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=100)
Agents = type[AgentDouble]


class Receiving:
    def __init__(self, config: UcxConfig, limits: PortLimits) -> None:
        self.events = Recorder()
        self.region = Region.create(REGION_NBYTES, "test-region")
        self.port = UcxReceiverPort(
            region=self.region,
            events=self.events,
            config=config,
            limits=limits,
        )

    def describe(self, what: str) -> Any:
        return self.port.describe()[what]


@asynccontextmanager
async def receiving(tls: str = "all", **limits: int) -> AsyncIterator[Receiving]:
    it = Receiving(UcxConfig(tls=tls), replace(UCX_PORT_LIMITS, **limits))
    try:
        yield it
    finally:
        await it.port.close()
        # A thread that makes agents lets go of the region's array a moment after its agent is there.
        await asyncio.get_running_loop().shutdown_default_executor()
        it.region.close()


@asynccontextmanager
async def linked(r: Receiving, **limits: int) -> AsyncIterator[tuple[UcxWriterLink, Recorder]]:
    events = Recorder()
    it = await UcxWriterLink.connect(
        LinkParts(r.port.expect(PAIR, EPOCH), PAIR, events, asyncio.get_running_loop()),
        source_bytes(1, REGION_NBYTES),
        limits=replace(UCX_LINK_LIMITS, **limits),
    )
    try:
        yield it, events
    finally:
        await it.close()


class ByHand:
    """Speaks the writer's side word by word, so that it can leave some out."""

    def __init__(self) -> None:
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.inbox = wire.Inbox(CODEC)
        self.messages: list[wire.Message] = []

    async def say(self, message: wire.Message) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, CODEC.encode(message))

    async def hear(self) -> wire.Message | None:
        """The next message; None: the receiver has closed."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.messages:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 12)
                if not data:
                    return None
                self.messages += self.inbox.feed(data)
        return self.messages.pop(0)

    async def link(self, endpoint: DataEndpoint, host: str, pid: int) -> wire.Message | None:
        """The answer to the ANSWER."""
        await asyncio.get_running_loop().sock_connect(self.sock, split_endpoint(endpoint.address))
        own = UcxHello(host=bytes.fromhex(host), pid=pid)
        untagged = wire.Hello(pair=PAIR, epoch=endpoint.epoch, link=9, payload=own.encode())
        hello = CODEC.tagged(endpoint.secret, untagged)
        await self.say(hello)
        challenge = await self.hear()
        assert isinstance(challenge, wire.Challenge)
        await self.say(wire.Answer(proof=CODEC.writer_proof(endpoint.secret, hello, challenge.nonce)))
        return await self.hear()


@asynccontextmanager
async def by_hand(r: Receiving, host: str = ELSEWHERE, pid: int = 1) -> AsyncIterator[ByHand]:
    it = ByHand()
    try:
        assert isinstance(await it.link(r.port.expect(PAIR, EPOCH), host, pid), wire.Welcome)
        yield it
    finally:
        it.sock.close()


async def settled(r: Receiving, holds: Callable[[], bool]) -> None:
    """Until the port has seen something that it reports to nobody."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - a gauge, which tells nobody when it changes
            await asyncio.sleep(0)


def test_a_batch_lands_and_its_seal_follows_by_both_ways(agents: Agents) -> None:
    """The seal is reported when its message and its notification have come, and an orderly close leaves no agent."""

    async def case() -> None:
        async with receiving() as r:
            async with linked(r) as (it, events):
                it.post(GRANT, ops_of([5], [50], [100]))
                await events.until(lambda e: bool(e.completed))
                assert events.completed == [(GRANT, 1, 100, True)]
                it.seal(SEAL)
                await r.events.until(lambda e: bool(e.seals))
                assert r.events.seals == [(PAIR, SEAL)]
                wanted = source_bytes(1, REGION_NBYTES)[5:105]
                assert np.array_equal(r.region.array_U8[50:150], wanted)
            await settled(r, lambda: not agents.alive)
            assert (events.lost, r.events.gone, r.describe("connections_writing")) == ([], [], 0)

    run(case())


def test_a_message_without_its_notification_is_no_seal(agents: Agents) -> None:
    """NIXL's notification is what comes behind the data: without it nothing is reported, and closing waits no longer
    than it may."""
    agents.deaf = True

    async def case() -> None:
        async with receiving() as r, linked(r, bye_ms_max=50) as (it, _):
            it.seal(SEAL)
            await it.close()
            assert r.events.seals == []

    run(case())


def test_without_the_writers_word_nothing_frees_a_grant(agents: Agents) -> None:
    """Of a writer elsewhere, on transports whose fence is not proved: neither its closed connection, nor a BYE that
    does not say `drained`, nor time is evidence. The fence waits, in sight, and no newer epoch is given."""

    async def case() -> None:
        async with receiving() as r:
            async with by_hand(r) as writer:
                await writer.say(wire.Bye(epoch=EPOCH, drained=False))
                assert await writer.hear() is None
            r.port.fence(PAIR, EPOCH)
            await settled(r, lambda: r.describe("connections_unproved") == 1)
            assert (r.describe("fences_waiting"), r.events.gone) == (1, [])
            with pytest.raises(PairBeingFenced):
                r.port.expect(PAIR, EPOCH)
            assert "needs the writer" in r.describe("fence")
            assert len(agents.alive) == 1, "its agent may still have something to receive"
        assert agents.alive == {}

    run(case())


def test_the_writers_word_is_evidence(agents: Agents) -> None:
    """FENCE is answered by BYE, after everything has arrived: the agent is destroyed, then the end is told."""

    async def case() -> None:
        async with receiving() as r, by_hand(r) as writer:
            r.port.fence(PAIR, EPOCH)
            assert await writer.hear() == wire.Fence(epoch=EPOCH)
            assert r.events.gone == []
            await writer.say(wire.Bye(epoch=EPOCH, drained=True))
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]
            assert (agents.alive, r.describe("fences_waiting")) == ({}, 0)

    run(case())


def test_the_death_of_a_writer_on_this_host_is_evidence(agents: Agents) -> None:
    """Its connection has closed long before, which told nothing; its pidfd does, without anybody asking."""

    async def case() -> None:
        process = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220 - done before anything else runs
        try:
            async with receiving() as r:
                async with by_hand(r, host_identity(), process.pid):
                    pass
                await settled(r, lambda: r.describe("connections_unproved") == 1)
                r.port.fence(PAIR, EPOCH)
                await asyncio.sleep(0)
                assert r.events.gone == []
                process.send_signal(signal.SIGKILL)
                await r.events.until(lambda e: bool(e.gone))
                assert r.events.gone == [(PAIR, EPOCH, f"1 dead, by pidfd (pid {process.pid})")]
                assert agents.alive == {}
        finally:
            process.kill()
            process.wait()

    run(case())


def test_where_the_receiver_moves_the_bytes_it_fences_alone(agents: Agents) -> None:
    """Over UCX's tcp: a writer that says nothing is fenced by destroying the worker; a closed connection is a fence."""

    async def case() -> None:
        async with receiving("tcp") as r:
            async with by_hand(r) as writer:
                r.port.fence(PAIR, EPOCH)
                assert await writer.hear() == wire.Fence(epoch=EPOCH)
                assert await writer.hear() is None
                await r.events.until(lambda e: bool(e.gone))
                assert r.events.gone == [(PAIR, EPOCH, "1 closed, its receiving worker destroyed")]
            assert agents.alive == {}
            next_epoch = Epoch(EPOCH + 1)
            other = ByHand()
            endpoint = r.port.expect(PAIR, next_epoch)
            assert isinstance(await other.link(endpoint, ELSEWHERE, 1), wire.Welcome)
            other.sock.close()
            await r.events.until(lambda e: len(e.gone) == 2)
            assert r.events.gone_epochs[1] == (PAIR, next_epoch)

    run(case())


def test_an_agent_that_is_not_destroyed_is_no_evidence(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours: the fence waits for good, and is counted."""

    async def case() -> None:
        async with receiving("tcp") as r, by_hand(r):
            agents.indestructible = True
            r.port.fence(PAIR, EPOCH)
            await settled(r, lambda: r.describe("destroy_failed") == 1)
            assert (r.describe("fences_waiting"), r.events.gone) == (1, [])
            (left,) = agents.alive.values()
            assert left.region_U8 is not None, "the region cannot be closed under it"
            left.region_U8 = None

    run(case())
    assert "a fence has no evidence" in caplog.text


def test_a_failed_write_ends_the_link(agents: Agents) -> None:
    """Everything completes uncopied, once, after the agent is destroyed; the link is lost, and is not fenced."""

    async def case() -> None:
        async with receiving("tcp") as r, linked(r) as (it, events):
            agents.stalled = True
            for _ in range(3):
                it.post(GRANT, ops_of([0], [0], [10]))
            agents.failing = True
            await events.until(lambda e: bool(e.lost))
            assert events.completed == [(GRANT, 1, 10, False)] * 3
            assert [reason for _, reason in events.lost] == ["a write failed"]
            assert (it.fenced, agents.alive.keys() & {b"writer"}) == (False, set())

    run(case())


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_after_the_fence_nothing_is_left_of_a_link_that_failed_with_writes_on_their_way(
    agents: Agents, tls: str
) -> None:
    """They are in doubt, and the writer's agent is gone; it says BYE, and not that all has arrived. Over UCX's tcp the
    receiver fences by itself; with all that UCX has it takes the word of a writer on its own host for the agent's end,
    and the fence is there for the asking. Either way its own agent is destroyed before the fence has ended, so what
    the network held back has nowhere to go; and neither connection nor books of the pair stay."""

    async def case() -> None:
        async with receiving(tls) as r:
            async with linked(r) as (it, events):
                agents.stalled = True
                it.post(GRANT, ops_of([0], [0], [10]))
                await settled(r, lambda: it.describe()["chains"] == 1)
                agents.failing = True
                await events.until(lambda e: bool(e.lost))
                assert (events.in_doubt, events.completed) == ([(GRANT, 0)], [(GRANT, 1, 10, False)])
            await settled(r, lambda: not agents.alive)
            if tls == "all":
                assert r.events.gone == []
                r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            reported = "1 acknowledged" if tls == "all" else "1 closed, its receiving worker destroyed"
            assert r.events.gone == [(PAIR, EPOCH, reported)]
            await settled(r, lambda: PAIR not in r.port._pairs)
            assert (r.port._connections, r.describe("fences_waiting")) == ({}, 0)
            assert not r.region.array_U8.any()
            assert r.port.expect(PAIR, Epoch(EPOCH + 1)).epoch == EPOCH + 1

    run(case())


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_writer_elsewhere_vouches_for_a_link_that_failed_with_nothing_on_its_way(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, in_doubt: bool
) -> None:
    """On transports whose fence is not proved its BYE is all the evidence that there will ever be. All that was posted
    has arrived, only a look at it fails: the BYE says so, and the pair lives on. With a write on its way it cannot: its
    connection stays, in sight, and the pair is fenced by nothing but the end of the receiver."""

    async def case() -> None:
        async with receiving("all") as r:
            monkeypatch.setattr(ucx, "host_identity", lambda: ELSEWHERE)
            async with linked(r) as (it, events):
                it.post(GRANT, ops_of([0], [0], [10]))
                await events.until(lambda e: bool(e.completed))
                agents.stalled = in_doubt
                if in_doubt:
                    it.post(GRANT, ops_of([0], [0], [10]))
                    await settled(r, lambda: it.describe()["chains"] == 2)
                agents.failing = True
                it._wake()
                await events.until(lambda e: bool(e.lost))
                assert events.in_doubt == ([(GRANT, 1)] if in_doubt else [])
            r.port.fence(PAIR, EPOCH)
            if in_doubt:
                await settled(r, lambda: r.describe("connections_unproved") == 1)
                assert (r.describe("fences_waiting"), r.events.gone, len(agents.alive)) == (1, [], 1)
            else:
                await r.events.until(lambda e: bool(e.gone))
                assert (r.events.gone, agents.alive) == ([(PAIR, EPOCH, "1 acknowledged")], {})
        assert agents.alive == {}

    run(case())


def test_writes_of_an_abandoned_grant_have_a_deadline(agents: Agents) -> None:
    """A receiver that takes nothing in: an abandoned grant lets go of its sources within `drain_ms_max`, by the link's
    end; without an abandonment it would wait on."""
    agents.stalled = True

    async def case() -> None:
        async with receiving("tcp") as r, linked(r, drain_ms_max=20) as (it, events):
            it.post(GRANT, ops_of([0], [0], [10]))
            await settled(r, lambda: it.describe()["chains"] == 1)
            assert events.completed == []
            it.abandon(GRANT)
            await events.until(lambda e: bool(e.lost))
            assert events.completed == [(GRANT, 1, 10, False)]
            assert events.lost[0][1] == "writes of an abandoned grant have not moved for 20 ms"

    run(case())


def test_no_ucx_at_either_side_is_an_error_and_no_link(agents: Agents) -> None:
    """Without NIXL no link comes to be, with the reason; the receiver's handshake is over too."""

    async def case() -> None:
        async with receiving() as r:
            agents.unavailable = "writer"
            with pytest.raises(ConnectError, match="the test says so"):
                async with linked(r):
                    pass
            agents.unavailable = "receiver"
            writer = ByHand()
            refused = await writer.link(r.port.expect(PAIR, EPOCH), ELSEWHERE, 1)
            writer.sock.close()
            assert refused == wire.Refused(reason=RefusalReason.UCX)
            await settled(r, lambda: r.describe("connections_handshaking") == 0)

    run(case())


def test_words_out_of_order_are_refused_and_the_word_still_heard(agents: Agents) -> None:
    """A second HELLO on a link that may write: it is refused, its pair fenced, and only its BYE still counts."""

    async def case() -> None:
        async with receiving() as r, by_hand(r) as writer:
            await writer.say(
                wire.Hello(
                    pair=PAIR, epoch=EPOCH, link=1, payload=UcxHello(host=bytes.fromhex(ELSEWHERE), pid=1).encode()
                )
            )
            assert await writer.hear() == wire.Refused(reason=RefusalReason.OUT_OF_ORDER)
            assert await writer.hear() == wire.Fence(epoch=EPOCH)
            await writer.say(wire.SealSent(number=1, seal=SEAL))
            await writer.say(wire.Bye(epoch=EPOCH, drained=True))
            await r.events.until(lambda e: bool(e.gone))
            assert r.describe("refused") == {"OUT_OF_ORDER": 1}

    run(case())


def test_a_port_that_cannot_be_made_leaves_nothing_open(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's identity cannot be read: the error comes out, and no socket listens."""

    def fail() -> str:
        raise OSError("no /etc/machine-id")

    monkeypatch.setattr(ucx, "host_identity", fail)

    async def test() -> None:
        before = set(os.listdir("/proc/self/fd"))
        region = Region.create(REGION_NBYTES, "test-region")
        with pytest.raises(OSError, match="machine-id"):
            UcxReceiverPort(region=region, events=Recorder())
        region.close()
        assert set(os.listdir("/proc/self/fd")) == before

    run(test())
