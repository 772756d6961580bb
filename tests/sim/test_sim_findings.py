"""What the simulator has found: each held still in a cluster over real gRPC, or the seed that shows it."""

from __future__ import annotations

import asyncio
import logging
import random
from unittest.mock import patch

import pytest
from batonpb import common_pb2, inference_pb2

from baton.ids import Attempt, GrantId, Incarnation, RequestId, RequestKey
from decode_node.node import DecodeNode
from decode_node.streams import RequestOutput, TokenStreams
from router.prompts import PromptEncoder
from router.request import read_attach
from tests.sim.run import simulate_or_fail, suite_config
from tests.support.cluster_harness import (
    assert_conserved,
    mock_spec,
    random_prompt,
)
from tests.support.inprocess_cluster import MARK, inprocess

REACHED_S_MAX = 30.0


def test_a_cancel_in_the_moment_of_the_commit(caplog: pytest.LogCaptureFixture) -> None:
    """Cancel is served in the turn of the loop in which the commit was taken, before the request's own task has run:
    the grant's blocks are free by then, and the request must not be run on them."""

    async def scenario() -> None:
        real = DecodeNode.committed
        served = asyncio.Event()

        def cancel(node: DecodeNode, key: RequestKey) -> None:
            assert node.cancel(key, "in the same turn")
            served.set()

        def committed(self: DecodeNode, key: RequestKey, grant: GrantId) -> None:
            marked = self._jobs[grant].seq.tokens[0] == MARK
            real(self, key, grant)
            if marked:
                cancel(self, key)

        with patch.object(DecodeNode, "committed", committed):
            async with inprocess(mock_spec()) as cluster:
                prompt = [MARK, *random_prompt(random.Random(1), 40)]
                asking = asyncio.create_task(cluster.client.generate(prompt, max_tokens=16))
                await asyncio.wait_for(served.wait(), REACHED_S_MAX)
                asking.cancel()
                await asyncio.wait([asking])
                await assert_conserved(cluster)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert not [record.getMessage() for record in caplog.records]


def test_one_cut_between_router_and_decode_node_loses_no_request() -> None:
    """The router cannot reach a decode node that prefill nodes reach: the router names it with the request, and they
    ask another one. (They did not once; two attempts there counted as two deaths and ended the request.)"""
    simulate_or_fail(suite_config(143))


def test_who_forgets_an_answer_does_not_get_it_once_more() -> None:
    """A router takes a finished answer over only to have it forgotten: its stream carries nothing of it."""
    streams = TokenStreams(lambda: 0.0)
    key, former, later = RequestKey(request=RequestId("one"), attempt=Attempt(0)), Incarnation(1), Incarnation(2)
    output = RequestOutput(key=key, router=former, tokens=[1, 2, 3])
    streams.open(output)
    output.end(finish=common_pb2.FINISH_REASON_LENGTH)
    subscription = streams.attach(later, {})
    streams.take_over(output, later)
    output.forgotten.set()
    assert not streams.collect(subscription).requests


def test_an_attach_without_its_request_is_one() -> None:
    """The reader of the message looks into the request, and must not make one of nothing."""
    raw = inference_pb2.AttachRequest(resume_token="t").SerializeToString()
    assert not read_attach(PromptEncoder(chars_max=100), raw, 100).HasField("request")
