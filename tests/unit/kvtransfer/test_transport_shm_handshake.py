"""The shm receiver against peers that break the protocol, or fail in the middle of it."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from baton.ids import Epoch, Incarnation, Pair
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TooManyPairs, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import RefusalReason
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import CODEC, ShmWelcome, ShmWriterLink, socket_address
from kvtransfer.transports.writer_link import LinkParts
from tests.support.shm_harness import (
    DEADLINE_S,
    REGION_NBYTES,
    Receiver,
    Recorder,
    grant_of,
    linked,
    pair_of,
    receiver,
    run,
)
from tests.support.shm_harness import LINK_EPOCH as EPOCH
from tests.support.shm_harness import LINK_PAIR as PAIR

GRANT = grant_of(7)
SEAL = wire.SealSent(number=1, seal=Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=1))


class RawPeer:
    """A socket in this process that says what the test likes."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.sock.connect(socket_address(address))

    def say(self, message: wire.Message) -> None:
        self.sock.send(CODEC.encode(message))

    async def hear(self) -> wire.Message | None:
        """The next message; None at the end of the connection. The kernel closes a descriptor that comes along."""
        async with asyncio.timeout(DEADLINE_S):
            packet = await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        return CODEC.decode(packet) if packet else None

    async def refusal(self) -> RefusalReason:
        message = await self.hear()
        assert isinstance(message, wire.Refused), message
        return message.reason

    async def shake_hands(self, endpoint: DataEndpoint) -> None:
        self.say(hello_of(endpoint))
        challenge = await self.hear()
        assert isinstance(challenge, wire.Challenge)
        self.say(answer_to(challenge, endpoint))
        welcome = await self.hear()
        assert isinstance(welcome, wire.Welcome)
        assert ShmWelcome.decode(welcome.payload).region_nbytes == REGION_NBYTES
        assert welcome.proof == CODEC.receiver_proof(
            endpoint.secret, hello_of(endpoint), challenge.nonce, welcome.payload
        )


def hello_of(endpoint: DataEndpoint, pair: Pair = PAIR) -> wire.Hello:
    return CODEC.tagged(endpoint.secret, wire.Hello(pair=pair, epoch=endpoint.epoch))


def answer_to(challenge: wire.Challenge, endpoint: DataEndpoint) -> wire.Answer:
    return wire.Answer(proof=CODEC.writer_proof(endpoint.secret, hello_of(endpoint), challenge.nonce))


@asynccontextmanager
async def raw_peer(r: Receiver) -> AsyncIterator[RawPeer]:
    peer = RawPeer(r.port.address)
    try:
        yield peer
    finally:
        peer.sock.close()


def changed(endpoint: DataEndpoint, **fields: object) -> DataEndpoint:
    values = {"transport": endpoint.transport, "address": endpoint.address, "secret": endpoint.secret}
    return DataEndpoint(**{**values, "epoch": endpoint.epoch, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "pair", "reason"),
    [
        ({"secret": b"x" * 16}, PAIR, RefusalReason.SECRET),
        ({"epoch": EPOCH + 1}, PAIR, RefusalReason.EPOCH),
        ({"epoch": EPOCH - 1}, PAIR, RefusalReason.EPOCH),
        ({}, pair_of(9), RefusalReason.NOT_EXPECTED),
        ({}, Pair(receiver=Incarnation(9), writer=PAIR.writer), RefusalReason.NOT_EXPECTED),
    ],
)
def test_a_writer_that_does_not_prove_its_pair_is_refused(
    fields: dict[str, object], pair: Pair, reason: RefusalReason
) -> None:
    """Wrong secret, epoch or pair: a typed refusal, counted, and a fence of the pair finds nobody."""

    async def test() -> None:
        async with receiver() as r:
            endpoint = changed(r.port.expect(PAIR, EPOCH), **fields)
            with pytest.raises(ConnectError) as error:
                await ShmWriterLink.connect(
                    LinkParts(endpoint, pair, Recorder(), asyncio.get_running_loop()), np.zeros(1, np.uint8)
                )
            assert error.value.reason is reason
            assert r.port.describe()["refused"] == {reason.name: 1}
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "no connection that could write")]

    run(test())


OTHER_VERSION = struct.pack("<2sBBI", b"Bt", wire.PROTOCOL_VERSION + 1, 1, 0)


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", RefusalReason.MALFORMED),
        (b"B", RefusalReason.MALFORMED),
        (os.urandom(65), RefusalReason.MALFORMED),
        (CODEC.encode(SEAL) + b"\0" * 60_000, RefusalReason.MALFORMED),
        (CODEC.encode(SEAL)[:-1], RefusalReason.MALFORMED),
        (OTHER_VERSION, RefusalReason.VERSION),
        (CODEC.encode(SEAL), RefusalReason.OUT_OF_ORDER),
        (CODEC.encode(wire.Answer(proof=b"0" * 32)), RefusalReason.OUT_OF_ORDER),
        (CODEC.encode(wire.Welcome(proof=bytes(32), payload=bytes(8))), RefusalReason.OUT_OF_ORDER),
    ],
    ids=["text", "one byte", "oversized", "huge", "short", "version", "seal", "answer", "welcome"],
)
def test_a_first_packet_that_is_no_hello_is_refused(packet: bytes, reason: RefusalReason) -> None:
    """Garbage before the handshake: a typed refusal, the connection closed, others not disturbed."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            peer.sock.send(packet)
            assert await peer.refusal() is reason
            assert await peer.hear() is None
            assert r.port.describe()["refused"] == {reason.name: 1}
            assert r.port.describe()["connections_handshaking"] == 0
            async with linked(r):
                assert r.port.describe()["connections_writing"] == 1

    run(test())


def test_descriptors_that_a_peer_sends_are_refused() -> None:
    """A peer passes us file descriptors: none stays open here (the leak check would see it)."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            socket.send_fds(peer.sock, [CODEC.encode(hello_of(r.port.expect(PAIR, EPOCH)))], [0, 1, 2])
            assert await peer.refusal() is RefusalReason.MALFORMED
            assert await peer.hear() is None

    run(test())


def test_a_wrong_answer_to_the_challenge_is_refused() -> None:
    """The proof of another handshake proves nothing about this process."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            peer.say(hello_of(r.port.expect(PAIR, EPOCH)))
            assert isinstance(await peer.hear(), wire.Challenge)
            peer.say(wire.Answer(proof=b"\0" * 32))
            assert await peer.refusal() is RefusalReason.SECRET
            assert await peer.hear() is None

    run(test())


def test_a_fence_between_hello_and_answer_refuses_the_region() -> None:
    """The handshake had begun when its epoch was fenced: no descriptor leaves, and the fence has nobody to wait for."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            endpoint = r.port.expect(PAIR, EPOCH)
            peer.say(hello_of(endpoint))
            challenge = await peer.hear()
            assert isinstance(challenge, wire.Challenge)
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            r.port.expect(PAIR, Epoch(EPOCH + 1))
            peer.say(answer_to(challenge, endpoint))
            assert await peer.refusal() is RefusalReason.EPOCH
            assert await peer.hear() is None

    run(test())


def test_a_silent_peer_is_cut_off_at_the_handshake_deadline() -> None:
    """It connects and says nothing."""

    async def test() -> None:
        async with receiver(PortLimits(handshake_ms_max=1)) as r, raw_peer(r) as peer:
            assert await peer.refusal() is RefusalReason.DEADLINE
            assert await peer.hear() is None

    run(test())


def test_connections_and_pairs_have_limits() -> None:
    """One connection more than allowed is refused when it has proved itself, until one has said BYE; one pair more
    raises."""

    async def test() -> None:
        config = PortLimits(connections_max=1, pairs_max=1, handshake_ms_max=60_000)
        async with receiver(config) as r:
            async with linked(r), raw_peer(r) as peer:
                endpoint = r.port.expect(PAIR, EPOCH)
                peer.say(hello_of(endpoint))
                challenge = await peer.hear()
                assert isinstance(challenge, wire.Challenge)
                peer.say(answer_to(challenge, endpoint))
                assert await peer.refusal() is RefusalReason.CONNECTIONS_MAX
                assert await peer.hear() is None
                with pytest.raises(TooManyPairs):
                    r.port.expect(pair_of(9), EPOCH)
            async with linked(r):
                assert r.port.describe()["connections_made"] == 3

    run(test())


def test_a_second_hello_on_a_used_connection_ends_its_seals_but_not_its_bye() -> None:
    """After a breach the receiver believes nothing of this writer but that it has gone."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            endpoint = r.port.expect(PAIR, EPOCH)
            await peer.shake_hands(endpoint)
            peer.say(hello_of(endpoint))
            assert await peer.refusal() is RefusalReason.OUT_OF_ORDER
            peer.say(SEAL)
            r.port.fence(PAIR, EPOCH)
            assert await peer.hear() == wire.Fence(epoch=EPOCH)
            peer.say(wire.Bye(epoch=EPOCH))
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]
            assert r.events.seals == []
            assert r.port.describe()["seals_refused"] == 1

    run(test())


def test_a_seal_or_bye_of_another_epoch_is_not_believed() -> None:
    """The connection belongs to one epoch; a BYE for another one is a breach, and no evidence."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            await peer.shake_hands(r.port.expect(PAIR, EPOCH))
            other = Seal(grant=GRANT, epoch=Epoch(EPOCH + 1), writes=1, bytes_written=1)
            peer.say(wire.SealSent(number=2, seal=other))
            peer.say(SEAL)
            await r.events.until(lambda e: bool(e.seals))
            assert r.events.seals == [(PAIR, SEAL.seal)]
            assert r.port.describe()["seals_refused"] == 1
            peer.say(wire.Bye(epoch=Epoch(EPOCH + 1)))
            assert await peer.refusal() is RefusalReason.OUT_OF_ORDER
            assert r.port.describe()["connections_writing"] == 1

    run(test())


def test_bye_is_heard_although_the_writer_closed_with_a_fence_unread() -> None:
    """The kernel reports a reset before the packets that came earlier: the BYE among them must not be lost."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            await peer.shake_hands(r.port.expect(PAIR, EPOCH))
            r.port.fence(PAIR, EPOCH)
            peer.say(SEAL)
            peer.say(wire.Bye(epoch=EPOCH))
            peer.sock.close()
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged")]
            assert r.events.seals == [(PAIR, SEAL.seal)]

    run(test())


def test_a_writer_that_gives_up_in_the_handshake_leaves_no_doubt() -> None:
    """Its deadline passes while the WELCOME is on its way: BYE says that it will not take the region."""

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            endpoint = r.port.expect(PAIR, EPOCH)
            peer.say(hello_of(endpoint))
            challenge = await peer.hear()
            assert isinstance(challenge, wire.Challenge)
            peer.say(answer_to(challenge, endpoint))
            peer.say(wire.Bye(epoch=EPOCH))
            peer.sock.close()
            # The port answers this later connection only after it has read the earlier one's packets.
            async with raw_peer(r) as later:
                later.sock.send(b"?")
                assert await later.refusal() is RefusalReason.MALFORMED
            assert r.port.describe()["connections_handshaking"] == 0
            assert r.port.describe()["connections_unproved"] == 0
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone_epochs == [(PAIR, EPOCH)]

    run(test())


def test_expect_and_fence_may_be_repeated() -> None:
    """The same epoch has the same endpoint; a fence repeated while it waits is told once, afterwards again."""

    async def test() -> None:
        async with receiver() as r:
            endpoint = r.port.expect(PAIR, EPOCH)
            assert r.port.expect(PAIR, EPOCH) == endpoint
            assert endpoint.transport is TransportName.SHM
            assert endpoint.epoch == EPOCH
            assert len(endpoint.secret) == 16
            async with linked(r):
                r.port.fence(PAIR, EPOCH)
                r.port.fence(PAIR, EPOCH)
                await r.events.until(lambda e: bool(e.gone))
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: len(e.gone) == 2)
            assert r.events.gone == [(PAIR, EPOCH, "1 acknowledged"), (PAIR, EPOCH, "no connection that could write")]

    run(test())


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("/tmp/socket", "does not start with"),
        ("@other", "does not start with"),
        ("@baton-shm-" + "a" * 97, "108 bytes, the kernel takes 107"),
        ("@baton-shm-a\0b", "does not start with"),
        ("@baton-shm-gone", "Connection refused"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_clear_error(address: str, text: str) -> None:
    """Of another kind, too long for the kernel, or nobody there."""

    async def test() -> None:
        endpoint = DataEndpoint(transport=TransportName.SHM, address=address, secret=b"0" * 16, epoch=EPOCH)
        with pytest.raises(ConnectError, match=text):
            await ShmWriterLink.connect(
                LinkParts(endpoint, PAIR, Recorder(), asyncio.get_running_loop()), np.zeros(1, np.uint8)
            )

    run(test())


def test_a_peer_of_another_user_is_refused_by_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract socket names have no permissions: both sides ask the kernel who is at the other end."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            assert await peer.refusal() is RefusalReason.USER
            assert await peer.hear() is None
            with pytest.raises(ConnectError, match="the listener runs as user"):
                async with linked(r):
                    pass

    run(test())


def test_without_a_pidfd_there_is_no_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of such a writer could not be proved, so it gets no region."""

    def fail(pid: int) -> int:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(os, "pidfd_open", fail)

    async def test() -> None:
        async with receiver() as r, raw_peer(r) as peer:
            peer.say(hello_of(r.port.expect(PAIR, EPOCH)))
            assert await peer.refusal() is RefusalReason.NO_PIDFD
            assert await peer.hear() is None

    run(test())


def test_without_descriptors_accepting_pauses_and_goes_on() -> None:
    """The process has no descriptor left when a peer connects: it is answered when there is one again."""

    async def test() -> None:
        async with receiver(PortLimits(accept_pause_ms=1)) as r, raw_peer(r) as peer:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            next_fd = os.dup(0)
            os.close(next_fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, hard))
            try:
                # One turn of the loop is enough for the waiting connection to be tried.
                for _ in range(2):
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            peer.sock.send(b"?")
            assert await peer.refusal() is RefusalReason.MALFORMED
            refused = r.port.describe()["refused"]
            assert isinstance(refused, dict)
            assert refused["DESCRIPTORS"] >= 1

    run(test())


@pytest.mark.parametrize("started", [0, 1])
def test_a_writer_without_a_thread_to_copy_with_leaves_with_bye(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """The region is unmapped before that: so the word is true, and the next fence of the pair waits for nobody."""
    real, left = threading.Thread.start, [started]

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("shm-copy-"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    async def test() -> None:
        async with receiver() as r:
            with pytest.raises(ConnectError, match="no thread to copy with: can't start new thread"):
                async with linked(r, config=ShmConfig(copy_threads=2)):
                    raise AssertionError("there is no link")
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))

    run(test())
