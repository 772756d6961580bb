"""A full decode node gives the room that comes to answers which have lost their node, before new requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from batonpb import common_pb2, transfer_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField
from baton.ids import Attempt, Incarnation, Pair, RequestId, RequestKey, ReserveNumber
from baton.retry_time import RESUMED_WAIT_MS_MIN
from baton.wire import NodeRecord
from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.reserving import WAITING_MAX, ResumedFirst
from engine.build import EngineConfig, EngineKind
from kvtransfer.transport import TransportName
from mixed_node.config import MixedConfig
from tests.cluster.test_mixed_protocol import cancel, directly, key
from tests.support.cluster_harness import mock_spec
from tests.support.inprocess_cluster import inprocess, until

WAIT_MS = 500
HOLD_MS = 1_250
LONG = {"resumed_wait_ms": 600_000, "resumed_hold_ms_max": 600_000}
BLOCKS = 20
SIZE = 16


def id_of(number: int) -> RequestId:
    return RequestId(f"{number:032x}")


def key_of(number: int, attempt: int = 1) -> RequestKey:
    return RequestKey(request=id_of(number), attempt=Attempt(attempt))


def book() -> ResumedFirst:
    return ResumedFirst(wait_ms=WAIT_MS, hold_ms_max=HOLD_MS)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 8), st.sampled_from(["asks", "asks further on", "granted"])),
        max_size=40,
    )
)
def test_how_long_new_requests_stand_back(steps: list[tuple[int, int, str]]) -> None:
    """`steps`: who, how many eighths of a second later, and what. Against books that are searched through: after each
    refusal for the one time, and for no longer than the other after the first one with so much of the answer."""
    first, now_s = book(), 0.0
    output, searches, last_s = Counter[int](), dict[int, float](), dict[int, float]()
    for attempt, (who, later, what) in enumerate(steps):
        now_s += later / 8
        held = [min(last_s[each] + WAIT_MS / 1000, searches[each] + HOLD_MS / 1000) for each in searches]
        assert first.waiting(now_s) is any(now_s < until_s for until_s in held)
        if what == "granted":
            first.waits_no_more(key_of(who, attempt))
            searches.pop(who, None)
            continue
        if what == "asks further on":
            output[who] += 1
            searches.pop(who, None)
        first.refused(key_of(who, attempt), output[who], now_s)
        searches.setdefault(who, now_s)
        last_s[who] = now_s
    assert not first.waiting(now_s + WAIT_MS / 1000)


def test_one_that_never_fits_keeps_new_requests_out_once_and_not_for_long() -> None:
    """It asks every quarter of a second for 30 s. New requests stand back for the first of these."""
    first = book()
    shut = 0
    for quarter in range(120):
        first.refused(key_of(7, quarter), 20, quarter / 4)
        shut += first.waiting(quarter / 4)
    assert shut == HOLD_MS / 250


def test_an_attempt_asks_once() -> None:
    """Its Reserve comes again, and so does one of an attempt before it: neither is another refusal. What ends an
    attempt says nothing of a later one."""
    first = book()
    first.refused(key_of(7, attempt=3), 20, 0.0)
    first.refused(key_of(7, attempt=3), 20, 0.4)
    first.refused(key_of(7, attempt=2), 20, 0.4)
    assert first.waiting(0.49) and not first.waiting(0.5)
    first.refused(key_of(7, attempt=4), 20, 0.6)
    first.waits_no_more(key_of(7, attempt=3))
    assert first.waiting(0.7)
    first.waits_no_more(key_of(7, attempt=4))
    assert not first.waiting(0.7)


def test_no_more_are_remembered_than_the_limit() -> None:
    """The one that asked longest ago goes; all the others are still waited for."""
    first = book()
    for number in range(WAITING_MAX + 1):
        first.refused(key_of(number), 1, 0.0)
    for number in range(1, WAITING_MAX):
        first.waits_no_more(key_of(number))
    assert first.waiting(0.1)
    first.waits_no_more(key_of(WAITING_MAX))
    assert not first.waiting(0.1)


@pytest.mark.parametrize("make", [DecodeConfig, MixedConfig])
def test_room_is_kept_for_longer_than_routers_pause(make: type[DecodeConfig] | type[MixedConfig]) -> None:
    """A shorter wait would be over before the request has asked again, a shorter hold before its first wait."""
    engine = EngineConfig(kind=EngineKind.MOCK)
    make(name="a", engine=engine, resumed_wait_ms=RESUMED_WAIT_MS_MIN, resumed_hold_ms_max=RESUMED_WAIT_MS_MIN)
    with pytest.raises(InvalidField, match=r"resumed_wait_ms.*at least 800, not 799: routers ask again.*up to 400 ms"):
        make(name="a", engine=engine, resumed_wait_ms=RESUMED_WAIT_MS_MIN - 1)
    with pytest.raises(InvalidField, match=r"resumed_hold_ms_max.*not be less than resumed_wait_ms \(1500\), not 1499"):
        make(name="a", engine=engine, resumed_hold_ms_max=1_499)


def test_a_resumed_request_has_the_room_that_comes() -> None:
    """The node is full. A resumed request is refused, then room comes: a new request that would fit is refused, the
    resumed one is granted when it asks again, and after it the new one."""

    async def scenario() -> None:
        async with inprocess(mock_spec(blocks=BLOCKS, decode_flags=LONG)) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            pair = asker.pair
            assert asker.ask(1, id_of(1), blocks=18).HasField("granted")
            assert asker.ask(2, id_of(2), blocks=15, output=5).busy.reason == (
                "its blocks are set aside for other requests"
            )
            await decode.receiver.release(pair, ReserveNumber(1), ReserveNumber(2), in_doubt=False)
            refused = asker.ask(3, id_of(3), blocks=2)
            assert refused.busy.reason == "answers that have lost their node go first"
            assert refused.busy.retry_after_ms > 0
            assert asker.ask(4, id_of(2), blocks=15, output=5).HasField("granted")
            assert asker.ask(5, id_of(3), blocks=2).HasField("granted")
            for number in (4, 5):
                await decode.receiver.release(pair, ReserveNumber(number), ReserveNumber(6), in_doubt=False)

    asyncio.run(scenario())


def test_a_repeated_reserve_keeps_nobody_out() -> None:
    """A resumed request was refused and has found its room elsewhere, which this node is told. Then its Reserve comes
    once more: it has the answer that it had, and a new request has the room."""

    async def scenario() -> None:
        async with inprocess(mock_spec(blocks=BLOCKS, decode_flags=LONG)) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            assert asker.ask(1, id_of(1), blocks=10).HasField("granted")
            refused = asker.ask(2, id_of(2), blocks=15, output=5)
            assert refused.busy.reason == "its blocks are set aside for other requests"
            assert asker.ask(3, id_of(3), blocks=2).busy.reason == "answers that have lost their node go first"
            assert not decode.cancel(key_of(2, attempt=2), "it has its grant elsewhere")
            assert asker.ask(2, id_of(2), blocks=15, output=5).HasField("busy")
            assert asker.ask(4, id_of(3), blocks=2).HasField("granted")
            for number in (1, 4):
                await decode.receiver.release(asker.pair, ReserveNumber(number), ReserveNumber(5), in_doubt=False)

    asyncio.run(scenario())


def test_one_that_has_its_grant_elsewhere_keeps_nobody_out() -> None:
    """A resumed request is refused by one decode node and granted by the other: the first one is told, and does not
    keep room for it."""

    async def scenario() -> None:
        def by_name(records: Sequence[NodeRecord], **_: Any) -> list[NodeRecord]:
            return sorted(records, key=lambda record: record.name)

        async with inprocess(mock_spec(decode=2, blocks=BLOCKS, decode_flags=LONG)) as cluster:
            full, free = cluster.decode["decode-0"], cluster.decode["decode-1"]
            asker = Asker(full)
            assert asker.ask(1, id_of(1), blocks=18).HasField("granted")
            with patch("prefill_node.decode_nodes.order_decode_nodes", by_name):
                granted = await directly(cluster, "prefill-0", key("a", 3), [7] * 90, 40, [], output=[8] * 10)
            assert granted == free.receiver.incarnation
            resumed = RequestKey(request=RequestId("a"), attempt=Attempt(3))
            await until(cluster, "the full node to be told", lambda: full.receiver.grants.is_over(resumed))
            assert asker.ask(2, id_of(3), blocks=2).HasField("granted")
            assert await cancel(cluster, "decode-1", key("a", 3))
            for number in (1, 2):
                await full.receiver.release(asker.pair, ReserveNumber(number), ReserveNumber(3), in_doubt=False)

    asyncio.run(scenario())


class Asker:
    """A writer of its own."""

    def __init__(self, decode: DecodeNode) -> None:
        self._decode = decode
        self.pair = Pair(receiver=decode.receiver.incarnation, writer=Incarnation(77))
        decode.receiver.connect(self.pair, "127.0.0.1:1", TransportName.TCP)

    def ask(self, number: int, request: RequestId, *, blocks: int, output: int = 0) -> transfer_pb2.ReserveReply:
        """A Reserve of a request that comes to `blocks` blocks, of which `output` tokens of its answer are known."""
        tokens = blocks * SIZE - 8
        return self._decode.reserve(
            transfer_pb2.ReserveRequest(
                number=number,
                lowest_live=1,
                key=common_pb2.RequestKey(request=request, attempt=number),
                prompt=[number] * (tokens - output),
                output=[7] * output,
                sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=output + 4),
                deadline_left_ms=60_000,
            ),
            self.pair,
        )
