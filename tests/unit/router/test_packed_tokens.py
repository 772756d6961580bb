"""Plain tokens come from a decode node as numbers in arrays, where router and node both understand them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from batonpb import common_pb2, decode_pb2

from baton.errors import Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from baton.wire import key_to_proto
from decode_node.streams import Subscription, TokenStreams
from router.decode_streams import DecodeSubscription
from router.job import Inbox, Parting
from tests.support.cluster_harness import mock_spec, random_prompt
from tests.support.inprocess_cluster import ask_exactly, inprocess


def old_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say that it understands arrays."""
    real = DecodeSubscription._requests

    async def requests(self: DecodeSubscription, wake: asyncio.Event) -> AsyncIterator[decode_pb2.SubscribeRequest]:
        async for request in real(self, wake):
            request.open.packed = False if request.HasField("open") else request.open.packed
            yield request

    monkeypatch.setattr(DecodeSubscription, "_requests", requests)


def old_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know what the router says of arrays."""
    real = TokenStreams.attach

    def attach(self: TokenStreams, *args: Any, packed: bool = False, **rest: Any) -> Subscription:
        assert packed
        return real(self, *args, **rest)

    monkeypatch.setattr(TokenStreams, "attach", attach)


@pytest.mark.parametrize("make_old", [None, old_router, old_node])
def test_arrays_come_where_both_sides_understand_them(
    make_old: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers at once come whole between a router and a node of today. An old router with a new node, and a new
    router with an old node, have them whole too, without arrays and without numbers."""
    batches: list[decode_pb2.TokenBatch] = []
    real_take = DecodeSubscription._take

    def take(self: DecodeSubscription, batch: decode_pb2.TokenBatch) -> None:
        batches.append(batch)
        real_take(self, batch)

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            prompts = [random_prompt(random.Random(seed), 40) for seed in (1, 2)]
            await asyncio.gather(*(ask_exactly(cluster, prompt, 40) for prompt in prompts))

    monkeypatch.setattr(DecodeSubscription, "_take", take)
    if make_old is not None:
        make_old(monkeypatch)
    asyncio.run(scenario())
    told = {message.number for batch in batches for message in batch.requests}
    packed = {number for batch in batches for number in batch.numbers}
    if make_old is None:
        assert told == {1, 2} and packed <= told
    else:
        assert told == {0} and not packed


class Reader:
    """A router's end of a decode node's stream, without the stream."""

    def __init__(self) -> None:
        self.streams = MagicMock(inboxes={})
        self.subscription = DecodeSubscription(self.streams, "decode-0", "127.0.0.1:1", Incarnation(7))

    def serve(self, name: str, epoch: int = 0) -> Inbox:
        inbox = Inbox(key=RequestKey(request=RequestId(name), attempt=Attempt(0)), epoch=epoch)
        self.streams.inboxes[inbox.key] = self.subscription._inboxes[inbox.key] = inbox
        return inbox

    def let_go(self, inbox: Inbox) -> None:
        del self.streams.inboxes[inbox.key]
        self.subscription.let_go(inbox, Parting.LEAVE)

    def tell(self, inbox: Inbox, number: int, first_index: int, ids: list[int], epoch: int = 0, **end: Any) -> None:
        key = key_to_proto(inbox.key, epoch)
        message = decode_pb2.RequestTokens(key=key, number=number, first_index=first_index, ids=ids, **end)
        self.subscription._take(decode_pb2.TokenBatch(requests=[message]))

    def say(self, *tokens: tuple[int, int, int]) -> None:
        """Each with its number and its index."""
        numbers, indices, ids = zip(*tokens, strict=True)
        self.subscription._take(decode_pb2.TokenBatch(numbers=numbers, indices=indices, tokens=ids))


def test_tokens_in_arrays_go_to_who_has_the_number() -> None:
    """Two requests have numbers, in one message with their first tokens. Each gets its own, an index that came before
    is dropped, and of one that the router has let go of nothing is kept, whether by its number or after its end."""
    reader = Reader()
    one, other = reader.serve("one"), reader.serve("other")
    reader.tell(one, 1, 0, [10])
    reader.tell(other, 2, 0, [20])
    reader.say((2, 1, 21), (1, 1, 11))
    reader.say((1, 1, 11), (2, 2, 22))
    assert (one.tokens, other.tokens) == ([10, 11], [20, 21, 22])
    reader.let_go(one)
    reader.say((1, 2, 12), (2, 3, 23))
    assert (one.tokens, other.tokens) == ([10, 11], [20, 21, 22, 23])
    reader.tell(other, 2, 4, [24], finish=common_pb2.FINISH_REASON_LENGTH)
    assert (other.tokens, other.finish) == ([20, 21, 22, 23, 24], common_pb2.FINISH_REASON_LENGTH)
    assert not reader.subscription._numbered


def test_a_token_that_is_missing_fails_its_request() -> None:
    """The node says a token by a number that the router was never told. It is not taken for another's, and the
    request fails with its next message rather than skip a token, be that the end."""
    reader = Reader()
    inbox = reader.serve("one")
    reader.tell(inbox, 0, 0, [10])
    reader.say((1, 1, 11))
    assert (inbox.tokens, inbox.error) == ([10], None)
    reader.tell(inbox, 1, 2, [12], finish=common_pb2.FINISH_REASON_LENGTH)
    assert inbox.tokens == [10] and inbox.error is not None and inbox.error.reason is Reason.INTERNAL


def test_a_number_of_an_earlier_epoch_brings_nothing() -> None:
    """A router has left a request and takes it over again. What the node has said by the former number comes late, and
    is dropped; what comes by the new number before the reply to TakeOver waits for it."""
    reader = Reader()
    inbox = reader.serve("one")
    reader.tell(inbox, 1, 0, [10])
    reader.let_go(inbox)
    again = reader.serve("one")
    again.early = []
    reader.say((1, 1, 11))
    assert again.early == []
    reader.tell(again, 2, 0, [10, 11], epoch=1)
    reader.say((2, 2, 12))
    assert [(list(message.ids), message.key.epoch) for message in again.early] == [([10, 11], 1), ([12], 1)]
    assert (inbox.tokens, again.tokens) == ([10], [])
    again.epoch, early, again.early = 1, again.early, None
    for message in early:
        reader.subscription._put(again, message)
    reader.say((2, 3, 13))
    assert again.tokens == [10, 11, 12, 13]
    reader.let_go(again)
    assert not reader.subscription._numbered
