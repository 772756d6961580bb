"""Prefill nodes that connect to decode nodes: silent, lost, found again; each situation is held still."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.wire import Role
from decode_node.service import ReceiverService
from node.peers import Peers
from tests.support.cluster_harness import (
    Answer,
    assert_conserved,
    mock_spec,
    wait_for,
)
from tests.support.inprocess_cluster import REACHED_S_MAX, ask_exactly, inprocess, peer_of, until
from tests.support.node_states import prefill_state

TWO_NODES: dict[str, Any] = {"decode": 2, "node_flags": {"decode-0": {"engine.num_blocks": 900}}}
"""decode-0 is the roomier one, and so the first that is asked."""


def test_requests_share_one_try_to_connect() -> None:
    """decode-0 takes Connect and does not answer. Six requests wait for that one call; when it fails, all six are
    served by decode-1, and decode-0 was called once."""

    async def scenario() -> None:
        fails = asyncio.Event()
        silent: set[int] = set()
        calls = 0
        real_connect = ReceiverService.Connect

        async def connect(self: ReceiverService, request: transfer_pb2.ConnectRequest, context: Any) -> Any:
            nonlocal calls
            if request.header.receiver in silent:
                calls += 1
                await fails.wait()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "no answer")
            return await real_connect(self, request, context)

        with patch.object(ReceiverService, "Connect", connect):
            async with inprocess(mock_spec(**TWO_NODES, prefill_flags={"writer.call_ms_max": 30_000})) as cluster:
                silent.add(cluster.runtimes["decode-0"].incarnation)
                node = cluster.prefill["prefill-0"]
                asked = [asyncio.create_task(ask_exactly(cluster, [5 + i, 6, 7])) for i in range(6)]
                await until(cluster, "six to wait", lambda: len(prefill_state(node).admitted) == 6 and calls > 0)
                fails.set()
                answers = await asyncio.gather(*asked)
                assert {answer.stats.decode_node for answer in answers} == {"decode-1"}
                assert calls == 1
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_peer_that_is_lost_while_it_is_connected_to() -> None:
    """decode-0 takes Connect and does not answer; then the directory says that it is gone. The request that waited is
    not cancelled by that: decode-1 serves it."""

    async def scenario() -> None:
        silent: set[int] = set()
        taken, never = asyncio.Event(), asyncio.Event()
        real_connect = ReceiverService.Connect

        async def connect(self: ReceiverService, request: transfer_pb2.ConnectRequest, context: Any) -> Any:
            if request.header.receiver in silent:
                taken.set()
                await never.wait()
            return await real_connect(self, request, context)

        with patch.object(ReceiverService, "Connect", connect):
            async with inprocess(mock_spec(**TWO_NODES, prefill_flags={"writer.call_ms_max": 30_000})) as cluster:
                silent.add(cluster.runtimes["decode-0"].incarnation)
                waiting = asyncio.create_task(ask_exactly(cluster, [5, 6, 7]))
                await asyncio.wait_for(taken.wait(), REACHED_S_MAX)
                peer_of(cluster, "decode-0").peer_gone()
                cluster.peers["prefill-0"].close_gone()
                assert (await waiting).stats.decode_node == "decode-1"
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_peer_that_comes_back_goes_on_with_its_numbering() -> None:
    """decode-0 is wrongly believed gone. Until its writer is closed it is refused, and decode-1 serves; then a new
    writer goes on where the numbering was, and decode-0 serves again."""

    async def scenario() -> None:
        async with inprocess(mock_spec(**TWO_NODES)) as cluster:
            peers: Peers = cluster.peers["prefill-0"]
            runtime = cluster.runtimes["prefill-0"]
            for i in range(3):
                assert (await ask_exactly(cluster, [5 + i, 6])).stats.decode_node == "decode-0"
            await assert_conserved(cluster)
            (record,) = (r for r in runtime.membership.nodes(Role.DECODE) if r.name == "decode-0")
            old = peer_of(cluster, "decode-0")
            number = old.machine.next_number
            assert number == 3
            with patch.object(peers, "close_gone", lambda: None):
                old.peer_gone()
                with pytest.raises(BatonError) as refused:
                    peers.for_record(record)
                assert refused.value.reason is Reason.PEER_UNREACHABLE
                assert (await ask_exactly(cluster, [15, 6])).stats.decode_node == "decode-1"
            peers.close_gone()
            await until(cluster, "the writer to be closed", lambda: peers.find(record.incarnation) is None)
            new = peers.for_record(record)
            assert new is not old
            assert new.machine.next_number == number

            async def served_again() -> bool:  # not while the old link is still being fenced
                return (await ask_exactly(cluster, [25, 6])).stats.decode_node == "decode-0"

            await wait_for(served_again, "decode-0 to serve again", story=cluster.story)
            assert new.machine.next_number > number
            assert cluster.decode["decode-0"].receiver.refused == {}
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_writer_that_fails_to_close_is_logged_and_followed_by_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    """decode-0 is believed gone, and closing its writer raises. The log says so, and a new writer goes on with the
    numbering."""

    async def scenario() -> None:
        async with inprocess(mock_spec(**TWO_NODES)) as cluster:
            peers: Peers = cluster.peers["prefill-0"]
            assert (await ask_exactly(cluster, [5, 6])).stats.decode_node == "decode-0"
            await assert_conserved(cluster)
            old = peer_of(cluster, "decode-0")
            closed = old.close

            async def close() -> None:
                await closed()
                raise ValueError("in closing")

            with patch.object(old, "close", close):
                old.peer_gone()
                peers.close_gone()
                incarnation = cluster.runtimes["decode-0"].incarnation
                await until(cluster, "the writer to be closed", lambda: peers.find(incarnation) is None)
            runtime = cluster.runtimes["prefill-0"]
            (record,) = (r for r in runtime.membership.nodes(Role.DECODE) if r.name == "decode-0")
            assert peers.for_record(record).machine.next_number == 1
            await assert_conserved(cluster)

    asyncio.run(scenario())
    (logged,) = (record for record in caplog.records if record.getMessage() == "closing a writer failed")
    assert logged.exc_info is not None and isinstance(logged.exc_info[1], ValueError)


def test_the_limits_of_shm_are_settings_of_either_side() -> None:
    """Three copying threads for a link; at the port one pair at most: of two prefill nodes only one connects, and the
    other one's requests find no decode node."""

    async def scenario() -> None:
        spec = mock_spec(
            prefill=2,
            prefill_flags={"shm.copy_threads": 3},
            decode_flags={"receiver.pairs_max": 1},
            router_flags={"placement_wait_ms_max": 200},
        )
        async with inprocess(spec) as cluster:
            outcomes = await asyncio.gather(
                *(cluster.client.generate([5 + i, 6, 7], max_tokens=4) for i in range(8)), return_exceptions=True
            )
            served = {outcome.stats.prefill_node for outcome in outcomes if isinstance(outcome, Answer)}
            assert len(served) == 1
            refused = [outcome for outcome in outcomes if isinstance(outcome, BatonError)]
            assert {error.reason for error in refused} == {Reason.TOO_MANY_PEERS}
            assert len(refused) + sum(isinstance(outcome, Answer) for outcome in outcomes) == 8
            threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shm-copy-")]
            assert len(threads) == 3
            await assert_conserved(cluster)

    asyncio.run(scenario())
