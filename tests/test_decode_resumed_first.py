"""A full decode node gives the room that comes to answers which have lost their node, before new requests."""

from __future__ import annotations

import asyncio

from batonpb import common_pb2, transfer_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Incarnation, Pair, RequestId, ReserveNumber
from decode_node.node import DecodeNode
from decode_node.resumed_first import WAITING_MAX, ResumedFirst
from kvtransfer.transport import TransportName
from tests.cluster_harness import mock_spec
from tests.inprocess_cluster import inprocess

WAIT_MS = 500
BLOCKS = 20
SIZE = 16


def id_of(number: int) -> RequestId:
    return RequestId(f"{number:032x}")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), max_size=30))
def test_new_requests_stand_back_until_all_have_asked_again_or_been_away(steps: list[tuple[int, int, bool]]) -> None:
    """`steps`: who, how many eighths of a second later, and whether it is granted. Against a book without an order."""
    first, last_s, now_s = ResumedFirst(wait_ms=WAIT_MS), dict[RequestId, float](), 0.0
    for who, later, granted in steps:
        now_s += later / 8
        assert first.waiting(now_s) is any(now_s < at_s + WAIT_MS / 1000 for at_s in last_s.values())
        if granted:
            first.granted(id_of(who))
            last_s.pop(id_of(who), None)
        else:
            first.refused(id_of(who), now_s)
            last_s[id_of(who)] = now_s
    assert not first.waiting(now_s + WAIT_MS / 1000)


def test_no_more_are_remembered_than_the_limit() -> None:
    """The one that asked longest ago goes; all the others are still waited for."""
    first = ResumedFirst(wait_ms=WAIT_MS)
    for number in range(WAITING_MAX + 1):
        first.refused(id_of(number), 0.0)
    for number in range(1, WAITING_MAX):
        first.granted(id_of(number))
    assert first.waiting(0.1)
    first.granted(id_of(WAITING_MAX))
    assert not first.waiting(0.1)


def test_a_resumed_request_has_the_room_that_comes() -> None:
    """The node is full. A resumed request is refused, then room comes: a new request that would fit is refused, the
    resumed one is granted when it asks again, and after it the new one."""

    async def scenario() -> None:
        spec = mock_spec(blocks=BLOCKS, decode_flags={"resumed_wait_ms": 600_000})
        async with inprocess(spec) as cluster:
            decode = cluster.decode["decode-0"]
            pair = Pair(receiver=decode.receiver.incarnation, writer=Incarnation(77))
            decode.receiver.connect(pair, "127.0.0.1:1", TransportName.TCP)
            asker = Asker(decode, pair)
            assert asker.ask(1, id_of(1), blocks=18).HasField("granted")
            assert asker.ask(2, id_of(2), blocks=15, output=5).busy.reason == (
                "its blocks are set aside for other requests"
            )
            await decode.receiver.let_go(pair, ReserveNumber(1), ReserveNumber(2), adrift=False)
            refused = asker.ask(3, id_of(3), blocks=2)
            assert refused.busy.reason == "answers that have lost their node go first"
            assert refused.busy.retry_after_ms > 0
            assert asker.ask(4, id_of(2), blocks=15, output=5).HasField("granted")
            assert asker.ask(5, id_of(3), blocks=2).HasField("granted")
            for number in (4, 5):
                await decode.receiver.let_go(pair, ReserveNumber(number), ReserveNumber(6), adrift=False)

    asyncio.run(scenario())


class Asker:
    def __init__(self, decode: DecodeNode, pair: Pair) -> None:
        self._decode = decode
        self._pair = pair

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
            self._pair,
        )
