"""A pair whose better transport keeps failing goes on with the next one, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from batonpb import common_pb2, transfer_pb2, transfer_pb2_grpc

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Epoch, GrantId, RequestId, RequestKey
from cachestore.layout import kv_layout
from kvtransfer.link import ANOTHER_MACHINE, COOLDOWN_MS_MIN, DataDoesNotPass, Offers, PairLink, PeerAddress
from kvtransfer.protocol.writer import WriterMachine
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents, WriterLink
from kvtransfer.writer import WriterConfig, WriterPeer
from tests.support.shm_harness import pair_of

SHM, RDMA, TCP = TransportName.SHM, TransportName.RDMA, TransportName.TCP
PAIR = pair_of(2)
KEY = RequestKey(request=RequestId("r"), attempt=Attempt(0))


class FakeChannel:
    """A receiver that answers Connect with the writer's first offer, and every Reserve with BUSY."""

    def __init__(self) -> None:
        self.offered: list[list[str]] = []
        self.better: dict[str, str] = {}
        """Told with each answer, with why it is not used."""
        self.answers = asyncio.Event()
        """Set while Reserve is answered."""
        self.answers.set()

    def unary_stream(self, path: str, **_: Any) -> None:
        """Liveness is not made by a `WriterPeer` itself."""

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Awaitable[Any]]:
        async def connect(request: transfer_pb2.ConnectRequest, **_: Any) -> transfer_pb2.ConnectReply:
            self.offered.append(list(request.transports))
            better = [common_pb2.RejectedTransport(transport=name, why=why) for name, why in self.better.items()]
            return transfer_pb2.ConnectReply(
                transport=request.transports[0], epoch=0, num_blocks=4, rejected_transports=better
            )

        async def reserve(request: transfer_pb2.ReserveRequest, **_: Any) -> transfer_pb2.ReserveReply:
            await self.answers.wait()
            return transfer_pb2.ReserveReply(busy=transfer_pb2.Busy(retry_after_ms=1, reason="full"))

        return connect if path.endswith("Connect") else reserve


class FakeChannels:
    def __init__(self) -> None:
        self.channel = FakeChannel()

    def get(self, endpoint: str) -> Any:
        return self.channel


class FakeLink:
    epoch = Epoch(0)

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced
        self.closed = False

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        raise AssertionError("nothing is granted")

    def seal(self, seal: Seal) -> None:
        raise AssertionError("nothing is granted")

    def abandon(self, grant: GrantId) -> None:
        raise AssertionError("nothing is granted")

    def forget(self, grant: GrantId) -> None:
        raise AssertionError("nothing is granted")

    async def close(self) -> None:
        self.closed = True


def make_peer(make_link: Any, transports: tuple[TransportName, ...] = (SHM, TCP)) -> tuple[WriterPeer, FakeChannel]:
    channels = FakeChannels()
    peer = WriterPeer(
        address=PeerAddress(name="decode-0", endpoint="127.0.0.1:1", pair=PAIR),
        connect_request=transfer_pb2.ConnectRequest(),
        layout=kv_layout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32", dtype_bytes=4),
        src_num_blocks=4,
        machine=WriterMachine(),
        channels=channels,  # type: ignore[arg-type]
        make_link=make_link,
        offers=Offers(transports),
        loop=asyncio.get_running_loop(),
        config=WriterConfig(),
    )
    return peer, channels.channel


async def ask(peer: WriterPeer) -> Reason:
    with pytest.raises(BatonError) as caught:
        await peer.reserve(KEY, transfer_pb2.ReserveRequest(), metadata=(), sources_released=lambda: None)
    return caught.value.reason


def test_links_that_cannot_be_made_lead_to_the_next_transport() -> None:
    """Shared memory fails twice: the second request goes on with tcp alone, and the pair works."""
    made: list[TransportName] = []

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        made.append(endpoint.transport)
        if endpoint.transport is SHM:
            raise BatonError(Reason.PEER_UNREACHABLE, "no shared memory here")
        return FakeLink(fenced=False)

    async def test() -> None:
        peer, channel = make_peer(make_link)
        assert [await ask(peer) for _ in range(2)] == [Reason.PEER_UNREACHABLE, Reason.DECODE_FULL]
        assert made == [SHM, SHM, TCP]
        assert channel.offered == [["shm", "tcp"], ["shm", "tcp"], ["tcp"]]
        assert (peer.link.transport, list(peer.link.offers.given_up), peer.link.failures) == (TCP, [SHM], 2)
        await peer.close()

    asyncio.run(test())


async def give_up_the_best(peer: WriterPeer) -> None:
    """Its best transport breaks twice; the request after that goes over the next one."""
    for _ in range(2):
        assert await ask(peer) is Reason.DECODE_FULL
        peer.link_lost(PAIR, "broken")
    assert await ask(peer) is Reason.DECODE_FULL


def test_a_transport_that_was_given_up_is_offered_again_after_its_cooldown(caplog: pytest.LogCaptureFixture) -> None:
    """Shared memory breaks twice and is given up for tcp. When its cooldown is over, the pair keeps its tcp link while
    a handoff uses it, and the first request after that closes it and connects over shared memory. One more failure
    there gives it up for twice as long. The status says how long is left."""
    links: list[FakeLink] = []

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        links.append(FakeLink(fenced=False))
        return links[-1]

    async def test() -> None:
        loop = asyncio.get_running_loop()
        began_s, later_s = loop.time(), 0.0
        loop.time = lambda: began_s + later_s  # type: ignore[method-assign]
        peer, channel = make_peer(make_link)
        await give_up_the_best(peer)
        assert list(peer.status().given_up_left_ms) == [COOLDOWN_MS_MIN]

        channel.answers.clear()
        waiting = asyncio.create_task(ask(peer))
        await asyncio.sleep(0)
        later_s = COOLDOWN_MS_MIN / 1e3
        also_waiting = asyncio.create_task(ask(peer))
        await asyncio.sleep(0)
        channel.answers.set()
        assert [await waiting, await also_waiting] == [Reason.DECODE_FULL] * 2
        assert (peer.link.transport, links[2].closed, len(channel.offered)) == (TCP, False, 3)
        status = peer.status()
        assert (list(status.transports_given_up), list(status.given_up_left_ms)) == (["shm"], [0])

        assert await ask(peer) is Reason.DECODE_FULL
        assert (peer.link.transport, links[2].closed, links[3].closed) == (SHM, True, False)
        assert channel.offered == [["shm", "tcp"], ["shm", "tcp"], ["tcp"], ["shm", "tcp"]]
        assert list(peer.status().transports_given_up) == []

        peer.link_lost(PAIR, "broken")
        assert list(peer.status().given_up_left_ms) == [2 * COOLDOWN_MS_MIN]
        await peer.close()

    with caplog.at_level(logging.INFO, logger="baton.writer"):
        asyncio.run(test())
    assert [r.getMessage() for r in caplog.records if "transport" in r.getMessage()] == [
        "transport given up", "transport offered again", "transport given up",
    ]  # fmt: skip


def test_a_better_transport_that_still_fails_costs_no_request() -> None:
    """Shared memory was given up for tcp, its cooldown is over, and it still cannot be had. The requests that wait
    while it is tried go on over tcp, in the same try, and shared memory is given up for twice as long."""
    works = [SHM, TCP]
    links: list[tuple[TransportName, FakeLink]] = []

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        if endpoint.transport not in works:
            raise BatonError(Reason.PEER_UNREACHABLE, "no shared memory here")
        links.append((endpoint.transport, FakeLink(fenced=False)))
        return links[-1][1]

    async def test() -> None:
        loop = asyncio.get_running_loop()
        began_s, later_s = loop.time(), 0.0
        loop.time = lambda: began_s + later_s  # type: ignore[method-assign]
        peer, channel = make_peer(make_link)
        await give_up_the_best(peer)
        works.remove(SHM)
        later_s = COOLDOWN_MS_MIN / 1e3
        assert list(await asyncio.gather(ask(peer), ask(peer))) == [Reason.DECODE_FULL] * 2
        assert channel.offered[2:] == [["tcp"], ["shm", "tcp"], ["tcp"]]
        assert [(transport, link.closed) for transport, link in links[2:]] == [(TCP, True), (TCP, False)]
        assert (peer.link.transport, list(peer.status().given_up_left_ms)) == (TCP, [2 * COOLDOWN_MS_MIN])
        assert await ask(peer) is Reason.DECODE_FULL
        assert len(channel.offered) == 5
        await peer.close()

    asyncio.run(test())


def test_a_better_transport_that_is_not_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A pair connects again and again: that it uses nothing better is told when it is news, with the reason, and as a
    warning where somebody could mend it. What the writer gave up itself is told as that."""

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        return FakeLink(fenced=True)

    async def test() -> None:
        peer, channel = make_peer(make_link, (TCP,))
        reported: list[tuple[str, str]] = []
        seen: list[list[common_pb2.RejectedTransport]] = []
        for better in (
            {"shm": ANOTHER_MACHINE},
            {"shm": ANOTHER_MACHINE, "rdma": "its device there is lost"},
            {"shm": ANOTHER_MACHINE, "rdma": "its device there is lost"},
            {},
            {"shm": ANOTHER_MACHINE},
        ):
            channel.better = better
            caplog.clear()
            assert await ask(peer) is Reason.DECODE_FULL
            reported += [
                (record.levelname, record.baton_fields["instead_of"])  # type: ignore[attr-defined]
                for record in caplog.records
                if record.getMessage() == "a better transport is not used"
            ]
            seen.append(peer.link.rejected_transports)
            peer.link_lost(PAIR, "broken")
        machine = "shm (another machine)"
        assert reported == [
            ("INFO", machine),
            ("WARNING", f"{machine}; rdma (its device there is lost)"),
            ("INFO", machine),
        ]
        assert [len(rejected_transports) for rejected_transports in seen] == [1, 2, 2, 0, 1]
        status = peer.status()
        assert (status.transport, status.link_open) == ("tcp", False)
        assert [(other.transport, other.why) for other in status.rejected_transports] == [("shm", ANOTHER_MACHINE)]

        peer.link.offers = Offers((SHM, TCP))
        for _ in range(2):
            peer.link.offers.failed(SHM, asyncio.get_running_loop().time())
        channel.better = {"shm": "not offered here"}
        assert await ask(peer) is Reason.DECODE_FULL
        status = peer.status()
        assert (status.link_open, list(status.rejected_transports), list(status.transports_given_up)) == (
            True,
            [],
            ["shm"],
        )
        await peer.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(test())


def test_a_pair_on_another_path_is_measured_anew() -> None:
    """Two links over shared memory make one measure, with what lies between them; tcp, when that is given up, begins
    another one. A batch that could not be posted leaves nothing behind."""

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        return FakeLink(fenced=False)

    async def test() -> None:
        peer, _ = make_peer(make_link)
        sizes = []
        for _ in range(3):
            assert await ask(peer) is Reason.DECODE_FULL
            speed = peer.link.speed
            for nbytes in (100, 1):
                speed.posted(nbytes, peer.loop.time())
            speed.completed(1, peer.loop.time(), copied=False)
            peer.link.completed(100, copied=True)
            now_s = peer.loop.time()
            moved = speed.in_all(now_s)
            assert moved == speed.recent(now_s)
            assert moved == speed.in_all(now_s + 1), "nothing is outstanding, so that no time goes by"
            sizes.append((peer.link.transport, moved.nbytes))
            peer.link_lost(PAIR, "broken")
        assert sizes == [(SHM, 100), (SHM, 200), (TCP, 100)]
        await peer.close()

    asyncio.run(test())


def test_devices_that_do_not_reach_each_other_cost_no_handoff() -> None:
    """Making the link shows that no data passes over rdma, which is given up: the same try goes on over tcp."""
    made: list[TransportName] = []

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        made.append(endpoint.transport)
        if endpoint.transport is RDMA:
            raise DataDoesNotPass("No rdma link: the devices do not reach each other.")
        return FakeLink(fenced=False)

    async def test() -> None:
        peer, channel = make_peer(make_link, (RDMA, TCP))
        assert await ask(peer) is Reason.DECODE_FULL
        assert made == [RDMA, TCP]
        assert channel.offered == [["rdma", "tcp"], ["tcp"]]
        assert (peer.link.transport, list(peer.link.offers.given_up), peer.link.failures) == (TCP, [RDMA], 1)
        await peer.close()

    asyncio.run(test())


def test_without_another_transport_the_one_whose_data_does_not_pass_is_tried_again() -> None:
    """rdma alone: an error each time, once, with what is wrong; nothing is given up."""
    made: list[TransportName] = []

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        made.append(endpoint.transport)
        raise DataDoesNotPass("No rdma link: the devices do not reach each other.")

    async def test() -> None:
        peer, _ = make_peer(make_link, (RDMA,))
        assert [await ask(peer) for _ in range(3)] == [Reason.PEER_UNREACHABLE] * 3
        assert (made, list(peer.link.offers.given_up), peer.link.failures) == ([RDMA] * 3, [], 3)
        await peer.close()

    asyncio.run(test())


@pytest.mark.parametrize(("fenced", "transport"), [(False, TCP), (True, SHM)])
def test_links_that_break_count_and_fences_do_not(fenced: bool, transport: TransportName) -> None:
    """Two links break by themselves: the third is a tcp one. The receiver fences two: shared memory stays."""

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        return FakeLink(fenced)

    async def test() -> None:
        peer, _ = make_peer(make_link)
        for _ in range(2):
            assert await ask(peer) is Reason.DECODE_FULL
            assert peer.link.transport is SHM
            peer.link_lost(PAIR, "broken")
        assert await ask(peer) is Reason.DECODE_FULL
        assert peer.link.transport is transport
        assert peer.link.failures == (0 if fenced else 2)
        await peer.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("transports", "completions", "left"),
    [
        ((RDMA, TCP), [False], ["tcp"]),
        ((RDMA, TCP), [True, False], ["rdma", "tcp"]),
        ((RDMA, TCP), [], ["rdma", "tcp"]),
        ((SHM, TCP), [False], ["shm", "tcp"]),
        ((TCP, RDMA), [False], ["tcp", "rdma"]),
        ((RDMA,), [False], ["rdma"]),
    ],
)
def test_a_link_on_which_nothing_arrived_is_the_last_of_a_transport_with_a_way_of_its_own(
    transports: tuple[TransportName, ...], completions: list[bool], left: list[str]
) -> None:
    """Two hosts have RDMA devices that do not reach each other: the first write is lost, and rdma given up with it. Not
    so once something has arrived, for a link that broke unused, where making a link has proved the way, or where there
    is nothing else."""

    async def make_link(endpoint: DataEndpoint, pair: object, events: WriterEvents) -> WriterLink:
        return FakeLink(fenced=False)

    async def test() -> None:
        channels = FakeChannels()
        link = PairLink(
            address=PeerAddress(name="decode-0", endpoint="127.0.0.1:1", pair=PAIR),
            stub=transfer_pb2_grpc.TransferStub(channels.get("127.0.0.1:1")),
            call_ms_max=1000,
            request=transfer_pb2.ConnectRequest(),
            make_link=make_link,
            offers=Offers(transports),
            events=None,  # type: ignore[arg-type]
            replaced=lambda: None,
            loop=asyncio.get_running_loop(),
        )
        await link.ensure(idle=True)
        for copied in completions:
            link.completed(1, copied=copied)
        assert link.lost("retries exceeded") == 0
        assert link.offers.names == left

    asyncio.run(test())
