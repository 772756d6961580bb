"""Draining nodes of a running cluster: no request fails, every token is right, and the node proves that it is empty."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Final

import pytest
from batonpb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

from baton.drain import refused_by
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.rpc import rpc_errors
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    assert_conserved,
    collect,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    running,
    wait_for,
)
from tests.support.drain_harness import (
    SLOW,
    drain_under_load,
    end_under_load,
    node_is_empty,
    order,
    state,
)

ROUTER: Final = 0xFEED


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Two by two; a step takes a few milliseconds, so that an answer takes some tenths of a second."""
    with running(mock_spec(prefill=2, decode=2, blocks=600, both=SLOW)) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_a_node_is_drained_under_load(cluster: RunningCluster, name: str) -> None:
    """One of two nodes of a role, in the middle of handoffs and streams."""
    cluster.run(drain_under_load(cluster, name))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_sigterm_is_the_same_drain(cluster: RunningCluster, name: str) -> None:
    """Told to end in the middle of its work, with nobody asking it to drain before."""
    cluster.run(end_under_load(cluster, name))


def test_an_answer_that_nobody_has_fetched_holds_the_drain_back(cluster: RunningCluster) -> None:
    """A router of our own prefills and does not subscribe: the request is over, and the node is not drained before that
    router has read the answer to its end and said so. Meanwhile it refuses new work itself, whatever the others believe
    of it; so does a prefill node.
    """

    async def scenario() -> None:
        prefill = (await cluster.status("prefill-0")).record
        key = common_pb2.RequestKey(request="unfetched")
        request = prefill_pb2.PrefillRequest(
            header=common_pb2.Header(sender=ROUTER, receiver=prefill.incarnation),
            key=key,
            prompt=[5, 6, 7],
            sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=20),
            router=ROUTER,
        )
        stub = prefill_pb2_grpc.PrefillStub(cluster.channel("prefill-0"))
        events = [event async for event in stub.Prefill(request, timeout=CALL_S_MAX)]
        name, incarnation = events[0].granted.decode_node, events[0].granted.decode_incarnation

        async def is_over() -> bool:
            return (await cluster.status(name)).requests == 0

        await order(cluster, name, "Drain")
        await wait_for(is_over, "the answer to end", story=cluster.story)
        status = await cluster.status(name)
        assert (state(status), status.safe_to_delete, status.answers_unacknowledged) == ("DRAINING", False, 1)

        reserve = transfer_pb2.ReserveRequest(header=request.header, key=key, prompt=[1], router=ROUTER, number=1)
        reserve.header.receiver = incarnation
        transfer = transfer_pb2_grpc.TransferStub(cluster.channel(name))
        with pytest.raises(BatonError, match="takes no new requests") as caught, rpc_errors(name):
            await transfer.Reserve(reserve, timeout=CALL_S_MAX)
        assert refused_by(caught.value, Incarnation(incarnation))
        await order(cluster, "prefill-0", "Cordon")
        with pytest.raises(BatonError, match="takes no new requests") as caught, rpc_errors("prefill-0"):
            [event async for event in stub.Prefill(request, timeout=CALL_S_MAX)]
        assert refused_by(caught.value, Incarnation(prefill.incarnation))
        await order(cluster, "prefill-0", "Uncordon")

        reported = asyncio.Event()

        async def says() -> AsyncIterator[decode_pb2.SubscribeRequest]:
            header = common_pb2.Header(sender=ROUTER, receiver=incarnation)
            yield decode_pb2.SubscribeRequest(open=decode_pb2.SubscribeOpen(header=header))
            await reported.wait()
            yield decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=[key]))

        ids: list[int] = []
        call = decode_pb2_grpc.DecodeStub(cluster.channel(name)).Subscribe(says())
        async for batch in call:
            ids += batch.requests[0].ids
            if batch.requests[0].HasField("finish"):
                break
        assert ids == mock_tokens([5, 6, 7], 20)
        assert state(await cluster.status(name)) == "DRAINING"
        reported.set()
        await node_is_empty(cluster, name)
        call.cancel()
        assert state(await order(cluster, name, "Undrain")) == "READY"

    cluster.run(scenario())


async def with_first_token(cluster: RunningCluster, prompt: list[int], count: int) -> asyncio.Task[Answer]:
    """A request whose first token is out."""
    call = cluster.client.stub.Generate(make_request(prompt, max_tokens=count), timeout=CALL_S_MAX)
    seen = asyncio.Event()

    async def events() -> AsyncIterator[object]:
        async for event in call:
            if event.HasField("tokens"):
                seen.set()
            yield event

    async def read() -> Answer:
        with rpc_errors("router"):
            return await collect(events())

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(seen.wait())
    await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert seen.is_set(), await reading
    return reading


def baton(cluster: RunningCluster, *arguments: str) -> tuple[int, str, str]:
    done = run_baton(*arguments, "--directory", cluster.cluster.directory)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_orders_of_an_operator() -> None:
    """One by one node, one long answer: a drain that runs out of time says what is still there and goes on; undrain
    takes it back; a cordon keeps requests away; orders that make no sense are refused; and SIGTERM gives up what is
    not done within `drain_ms_max`.
    """
    long = list(range(1, 40))
    spec = mock_spec(
        router_flags={"placement_wait_ms_max": 200, "retries.resume_wait_ms_max": 200},
        decode_flags={"engine.mock_layer_delay_ms": 10, "drain_ms_max": 200},
    )
    with running(spec) as cluster:
        code, out, _ = baton(cluster, "describe", "prefill-0", "-o", "json")
        reported = json.loads(out)
        assert (code, reported["name"], reported["status"]["state"]) == (0, "prefill-0", "ready")
        assert [(pair["peer"], pair["transport"]) for pair in reported["status"]["pairs"]] == [("decode-0", "shm")]
        code, out, _ = baton(cluster, "nodes", "-o", "json")
        assert [node["name"] for node in json.loads(out)] == ["decode-0", "prefill-0", "router-0"]
        _, out, _ = baton(cluster, "describe", "prefill-0")
        assert re.search(r"^decode-0 +[0-9a-f]{16} +shm +open +0 +[1-9]\d* +\S+ +\S+ +0 +- +- +-$", out, re.MULTILINE)

        words = f"baton drain --directory {cluster.cluster.directory} de"
        completed = run_baton(env={"_BATON_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "4"})
        assert completed.stdout == "plain,decode-0\n"

        call = cluster.run(with_first_token(cluster, long, 2_000))
        code, out, err = baton(cluster, "drain", "decode-0", "--wait", "--timeout", "0.2")
        assert (code, out) == (1, "decode-0 is draining; it holds 1 request, 1 grant received.\n"), err
        assert err == "decode-0 is not empty after 0.2 s; still there: 1 request, 1 grant received.\n"
        assert baton(cluster, "uncordon", "decode-0")[0] == 1
        refused = cluster.run(error_of(cluster.client.generate([1, 2], max_tokens=4)))
        assert refused.reason in (Reason.NO_DECODE_NODE, Reason.NODE_DRAINING)
        stale = cluster.run(error_of(order(cluster, "decode-0", "Undrain", incarnation=7)))
        assert stale.reason is Reason.INCARNATION_MISMATCH
        assert baton(cluster, "undrain", "decode-0") == (
            0, "decode-0 is ready; it holds 1 request, 1 grant received.\n", "",
        )  # fmt: skip

        for name in ("prefill-0", "decode-0"):
            assert baton(cluster, "cordon", name)[0] == 0
        cluster.run(refuses(cluster))
        for name in ("prefill-0", "decode-0"):
            assert baton(cluster, "uncordon", name)[0] == 0
        cluster.run(answers_again(cluster))

        code, out, err = baton(cluster, "cordon", "decode-7")
        assert (code, out) == (1, "")
        assert "does not know 'decode-7'. It knows decode-0, prefill-0, router-0." in err

        async def end() -> BatonError:
            cluster.set_down("decode-0")
            cluster.send_signal("decode-0", signal.SIGTERM)
            assert await cluster.wait_exit("decode-0") == 0, cluster.story()
            assert "drain given up" in cluster.log_text("decode-0")
            return await error_of(call)

        assert cluster.run(end()).reason is Reason.NO_DECODE_NODE
        cluster.run(assert_conserved(cluster))


async def refuses(cluster: RunningCluster) -> None:
    """The nodes know of their state at once, the router when the directory has told it."""

    async def holds() -> bool:
        with suppress(BatonError):
            await cluster.client.generate([1, 2], max_tokens=4)
            return False
        return True

    await wait_for(holds, "the router to see that all nodes are cordoned", story=cluster.story)


async def answers_again(cluster: RunningCluster) -> None:
    async def holds() -> bool:
        with suppress(BatonError):
            return (await cluster.client.generate([1, 2], max_tokens=4)).ids == mock_tokens([1, 2], 4)
        return False

    await wait_for(holds, "the cluster to answer again", story=cluster.story)
