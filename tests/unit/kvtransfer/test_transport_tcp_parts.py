"""The pure parts of the tcp transport, and of the choice of a transport."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidField
from baton.ids import BlockId, Epoch, GrantId, Incarnation, Pair
from cachestore.layout import kv_layout
from kvtransfer.link import Offers, check_transports, choose, host_identity
from kvtransfer.receiver import PortEvents, ReceiverPorts
from kvtransfer.transport import (
    LOOPED_SEGMENTS_MAX,
    DataEndpoint,
    PairBeingFenced,
    RegionKind,
    Seal,
    TransportName,
    WriteOps,
    WriteRanges,
)
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.settings import STREAMS_MAX
from kvtransfer.transports.tcp import (
    CODEC,
    FRAME_BYTES_MAX,
    FRAME_SEGMENTS_MAX,
    MESSAGE_BYTES,
    TcpHello,
    TcpWelcome,
    cut_frames,
)
from tests.support.shm_harness import pair_of

RDMA, SHM, TCP = TransportName.RDMA, TransportName.SHM, TransportName.TCP
U64 = st.integers(0, 2**64 - 1)
LIMIT = st.integers(1, 2**64 - 1)
WELCOMES = st.builds(
    TcpWelcome, region_nbytes=st.integers(0, 2**63 - 1), frame_bytes_max=LIMIT, frame_segments_max=LIMIT
)


@given(st.integers(0, STREAMS_MAX - 1), WELCOMES)
def test_payloads_come_out_as_they_went_in(stream: int, welcome: TcpWelcome) -> None:
    """They fit into a message of MESSAGE_BYTES; cut short, or longer, they are refused."""
    hello = TcpHello(stream=stream).encode()
    assert TcpHello.decode(hello).stream == stream
    assert TcpWelcome.decode(welcome.encode()) == welcome
    pair = Pair(receiver=Incarnation(1), writer=Incarnation(2))
    assert len(CODEC.encode(wire.Hello(pair=pair, epoch=Epoch(1), payload=hello))) == MESSAGE_BYTES
    assert len(CODEC.encode(wire.Welcome(proof=bytes(32), payload=welcome.encode()))) == MESSAGE_BYTES
    for broken in (hello[:-1], hello + b"x", STREAMS_MAX.to_bytes(8, "little")):
        with pytest.raises(wire.MalformedMessage):
            TcpHello.decode(broken)
    none, far = TcpWelcome.LAYOUT.pack(1, 0, 1), TcpWelcome.LAYOUT.pack(1 << 63, 1, 1)
    for broken in (welcome.encode()[:-1], welcome.encode() + b"x", none, far):
        with pytest.raises(wire.MalformedMessage):
            TcpWelcome.decode(broken)


def test_a_receiver_may_take_larger_frames_than_this_writer_makes() -> None:
    """Its limits are of another version: the smaller one of both holds."""
    allowed = TcpWelcome(region_nbytes=1, frame_bytes_max=1 << 40, frame_segments_max=1 << 40)
    assert TcpWelcome.decode(allowed.encode()).limits_here == (FRAME_BYTES_MAX, FRAME_SEGMENTS_MAX)
    fewer = TcpWelcome(region_nbytes=1, frame_bytes_max=7, frame_segments_max=5)
    assert fewer.limits_here == (7, 5)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 60)), max_size=20),
    st.integers(1, 50),
    st.integers(1, 4),
)
def test_frames_copy_what_the_batch_says(ops: list[tuple[int, int, int]], bytes_max: int, segments_max: int) -> None:
    """Cut into frames of any size, the same bytes go to the same places, in the same order, within the limits."""
    columns = np.array(ops, np.int64).reshape(-1, 3).T
    batch = WriteOps(src=columns[0], dst=columns[1], nbytes=columns[2])
    moved = []
    for frame in cut_frames(batch, bytes_max, segments_max):
        assert 0 < len(frame.src_S) <= segments_max
        assert 0 < frame.nbytes == frame.nbytes_S.sum() <= bytes_max
        for src, (dst, length), nbytes in zip(frame.src_S, frame.table_S2, frame.nbytes_S, strict=True):
            assert nbytes == length > 0
            moved += [(src + i, dst + i) for i in range(nbytes)]
    assert moved == [(src + i, dst + i) for src, dst, nbytes in ops for i in range(nbytes)]


def test_neighbouring_records_travel_as_one_segment() -> None:
    """Four records that follow each other on both sides, and one apart: two segments."""
    src, dst = np.array([0, 8, 16, 24, 80]), np.array([40, 48, 56, 64, 0])
    ops = WriteOps(src=src, dst=dst, nbytes=np.full(5, 8))
    (frame,) = cut_frames(ops, 1000, 10)
    assert (frame.src_S.tolist(), frame.table_S2.tolist()) == ([0, 80], [[40, 32], [0, 8]])


NEAR_RECORDS = st.builds(
    lambda record, into, nbytes: (8 * record + into, nbytes), st.integers(0, 17), st.integers(0, 7), st.integers(1, 20)
)
"""Within the region but for its end; as likely in one record as over two or three."""


@settings(max_examples=300)
@given(
    st.sets(st.integers(0, 5), min_size=3) | st.sets(st.integers(0, 5)),
    st.lists(NEAR_RECORDS | st.tuples(st.integers(-5, 160), st.integers(-3, 160)), min_size=1, max_size=3),
    st.sampled_from([1, LOOPED_SEGMENTS_MAX + 1]),
)
def test_ranges_cover_exactly_the_granted_records(
    blocks: set[int], segments: list[tuple[int, int]], times: int
) -> None:
    """Three layers of six blocks: a segment is inside if each of its bytes lies in a granted block's record; so with
    few segments, and with many."""
    layout = kv_layout(num_layers=3, num_kv_heads=1, head_dim=1, block_size=2, dtype="float16", dtype_bytes=2)
    assert layout.record_bytes == 8
    ranges = WriteRanges(layout, 6, [BlockId(b) for b in blocks])
    open_bytes = {i for i in range(layout.region_bytes(6)) if i // 8 % 6 in blocks}
    dst, nbytes = np.array(segments * times, np.int64).T
    wanted = all(n > 0 and open_bytes.issuperset(range(d, d + n)) for d, n in segments)
    assert ranges.cover(dst, nbytes) is wanted


def test_ranges_are_not_fooled_by_huge_numbers() -> None:
    """Offsets and lengths at the end of int64: outside, whatever they add up to."""
    layout = kv_layout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2, dtype="float16", dtype_bytes=2)
    ranges = WriteRanges(layout, 2, [BlockId(0), BlockId(1)])
    top = 2**63 - 1
    for dst, nbytes in [(top, 1), (1, top), (top, top), (-(2**63), top), (0, -1)]:
        for count in (1, LOOPED_SEGMENTS_MAX + 1):
            assert not ranges.cover(np.array([dst] * count), np.array([nbytes] * count))
    assert ranges.cover(np.array([0]), np.array([16]))


def test_the_first_common_transport_that_can_work_is_chosen() -> None:
    """The writer's order decides; shm only on one host; unknown names are passed over; none in common is said."""
    both = (SHM, TCP)
    assert choose(["shm", "tcp"], both, same_host=True) is SHM
    assert choose(["tcp", "shm"], both, same_host=True) is TCP
    assert choose(["shm", "tcp"], both, same_host=False) is TCP
    assert choose(["warp", "shm", "tcp"], (TCP,), same_host=True) is TCP
    assert choose(["shm"], both, same_host=False) is None
    assert choose(["shm"], (TCP,), same_host=True) is None
    assert choose([], both, same_host=True) is None
    assert host_identity() == host_identity() != ""


def test_a_transport_that_fails_twice_within_the_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once; failures farther apart do not count; the last transport stays whatever happens."""
    monkeypatch.setattr("kvtransfer.link.FAILURE_WINDOW_MS", 1_000)
    offers = Offers((SHM, TCP))
    assert [offers.failed(SHM, 0.0), offers.failed(SHM, 1.5)] == [False, False]
    assert offers.names == ["shm", "tcp"]
    assert offers.failed(SHM, 2.0) is True
    assert (offers.names, list(offers.given_up)) == (["tcp"], [SHM])
    assert offers.failed(SHM, 2.1) is False
    assert [offers.failed(TCP, 3.0), offers.failed(TCP, 3.1), offers.failed(TCP, 3.2)] == [False] * 3
    assert (offers.names, list(offers.given_up)) == (["tcp"], [SHM])


def test_a_transport_that_was_given_up_comes_back_after_a_cooldown_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further time doubles it, up to the maximum. After it came back, one failure within the window gives it up
    again; a later one is like a first one."""
    monkeypatch.setattr("kvtransfer.link.FAILURES_MAX", 3)
    monkeypatch.setattr("kvtransfer.link.FAILURE_WINDOW_MS", 1_000)
    offers = Offers((RDMA, SHM, TCP))
    now_s = 0.0
    for _ in range(3):
        offers.failed(SHM, now_s)
    for cooldown_ms in (30_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_800_000, 1_800_000):
        assert offers.given_up == {SHM: now_s + cooldown_ms / 1_000}
        now_s += cooldown_ms / 1_000
        assert (offers.restore(now_s - 0.001), offers.better_restorable(TCP, now_s - 0.001)) == ([], False)
        assert (offers.better_restorable(TCP, now_s), offers.better_restorable(RDMA, now_s)) == (True, False)
        assert (offers.restore(now_s), offers.restore(now_s), offers.given_up) == ([SHM], [], {})
        assert offers.names == ["rdma", "shm", "tcp"]
        now_s += 1.0
        assert offers.failed(SHM, now_s) is True
    now_s += 1_800.0
    offers.restore(now_s)
    assert [offers.failed(SHM, now_s + 1.001), offers.failed(SHM, now_s + 2.2)] == [False, False]


@pytest.mark.parametrize("transports", [(), (SHM, SHM)])
def test_a_wrong_list_of_transports_is_refused(transports: tuple[TransportName, ...]) -> None:
    """None at all, or one twice."""
    with pytest.raises(InvalidField, match="at least one"):
        check_transports(transports, RegionKind.HOST)


class FakePort:
    """Records what it is asked; its evidence comes when the test gives it."""

    def __init__(self, transport: TransportName) -> None:
        self.transport = transport
        self.asked: list[object] = []

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        return DataEndpoint(transport=self.transport, address="", secret=b"", epoch=epoch)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        self.asked.append(("allow", grant))

    def forbid(self, grant: GrantId) -> bool:
        self.asked.append(("forbid", grant))
        return True

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        self.asked.append(("fence", pair, epoch))

    def describe(self) -> dict[str, object]:
        return {}

    async def close(self) -> None:
        self.asked.append("close")


class Told:
    def __init__(self) -> None:
        self.gone: list[tuple[Pair, Epoch, str]] = []

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        raise AssertionError("no seal here")

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self.gone.append((pair, epoch, evidence))


def two_ports() -> tuple[ReceiverPorts, Told, FakePort, FakePort]:
    reported, shm, tcp = Told(), FakePort(SHM), FakePort(TCP)
    ports = ReceiverPorts(reported)
    ports.add(shm)
    ports.add(tcp)
    return ports, reported, shm, tcp


def test_a_pair_is_gone_when_every_port_that_it_used_says_so() -> None:
    """A pair that went from shm down to tcp: one port's evidence, asked for or not, makes the other fence too, and
    only both together are evidence. Meanwhile nothing new is expected of the pair."""
    ports, reported, shm, tcp = two_ports()
    pair, epoch = pair_of(2), Epoch(4)
    ports.expect(pair, epoch, SHM)
    ports.expect(pair, epoch, TCP)
    PortEvents(ports, TCP).writer_gone(pair, epoch, "joined")
    assert (shm.asked, tcp.asked, reported.gone) == ([("fence", pair, epoch)], [], [])
    ports.fence(pair, epoch)
    assert (shm.asked, tcp.asked) == ([("fence", pair, epoch)], [])
    for transport in (SHM, TCP):
        with pytest.raises(PairBeingFenced):
            ports.expect(pair, epoch, transport)
    ports.expect(pair_of(3), epoch, TCP)
    PortEvents(ports, SHM).writer_gone(pair, epoch, "dead")
    assert reported.gone == [(pair, epoch, "shm: dead; tcp: joined")]
    ports.expect(pair, Epoch(5), TCP)


def test_a_pair_of_one_transport_does_not_wait_for_the_other() -> None:
    """Only the port that the pair used is asked; a pair that never connected is asked of all."""
    ports, reported, shm, tcp = two_ports()
    pair, nobody, epoch = pair_of(2), pair_of(3), Epoch(0)
    ports.expect(pair, epoch, TCP)
    ports.fence(pair, epoch)
    PortEvents(ports, TCP).writer_gone(pair, epoch, "joined")
    assert reported.gone == [(pair, epoch, "joined")]
    assert (shm.asked, tcp.asked) == ([], [("fence", pair, epoch)])
    ports.fence(nobody, epoch)
    assert shm.asked == [("fence", nobody, epoch)]
