"""Situations that once went wrong: each test holds one still and asserts how it must end."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from batonpb import transfer_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.errors import BatonError, Reason
from baton.ids import RequestKey
from baton.wire import Role
from cli.services import Service
from decode_node.node import DecodeNode
from decode_node.service import ReceiverService
from kvtransfer.receiver_grants import GrantState
from kvtransfer.transports import shm_copy
from kvtransfer.writer import WriterPeer
from prefill_node.main import Peers
from router.node import RouterNode
from router.text import TextCodec
from tests.cluster_harness import (
    CALL_S_MAX,
    Answer,
    assert_conserved,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    wait_for,
)
from tests.inprocess_cluster import MARK, InProcessCluster, Point, inprocess

REACHED_S_MAX = 30.0
LAYERS = 4
"""Of the mock engine: a prompt of one chunk is sent in as many batches."""
TWO_NODES: dict[str, Any] = {"decode": 2, "node_flags": {"decode-0": {"engine.num_blocks": 900}}}
"""decode-0 is the roomier one, and so the first that is asked."""
SLOW_DECODE = {"engine.mock_layer_delay_ms": 0.5}
CHARS_MAX = 40
TEXT = "a cab, a bad cab"


def marked(rng: random.Random, length: int) -> list[int]:
    return [MARK, *random_prompt(rng, length - 1)]


async def until(cluster: InProcessCluster, what: str, holds: Callable[[], bool]) -> None:
    async def now() -> bool:
        return holds()

    await wait_for(now, what, story=cluster.story)


async def reached(cluster: InProcessCluster, point: Point) -> None:
    await asyncio.wait_for(cluster.gates[point].reached.wait(), REACHED_S_MAX)


def asking(cluster: InProcessCluster, prompt: Sequence[int], count: int = 8, **request: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(cluster.client.generate(prompt, max_tokens=count, **request))


async def ask_exactly(cluster: InProcessCluster, prompt: Sequence[int], count: int = 8) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


def peer_of(cluster: InProcessCluster, decode: str) -> WriterPeer:
    peer = cluster.peers["prefill-0"].find(cluster.runtimes[decode].incarnation)
    assert peer is not None
    return peer


def region_is_mapped(name: str) -> bool:
    return f"memfd:baton-{name}" in Path("/proc/self/maps").read_text()


def test_no_seal_vouches_for_a_batch_that_was_not_copied() -> None:
    """The copy of the last layer fails after the Commit has been sent: the decode node is never given the seal, the
    grant is not committed, the client is told, and every block comes back."""

    async def scenario() -> None:
        real_copy, commit_sent = shm_copy.copy_records, threading.Event()
        copies = 0
        died: list[type[BaseException]] = []
        committed: list[bool] = []

        def copy(*args: Any) -> None:
            nonlocal copies
            copies += 1
            if copies == LAYERS:
                assert commit_sent.wait(REACHED_S_MAX)
                raise MemoryError
            real_copy(*args)

        real_commit = DecodeNode.commit

        async def commit(self: DecodeNode, *args: Any) -> bool:
            committed.append(await real_commit(self, *args))
            return committed[-1]

        with (
            patch.object(shm_copy, "copy_records", copy),
            patch.object(threading, "excepthook", lambda args: died.append(args.exc_type)),
            patch.object(DecodeNode, "commit", commit),
        ):
            async with inprocess(mock_spec()) as cluster:
                prompt = marked(random.Random(1), 40)
                call = asyncio.create_task(error_of(asking(cluster, prompt)))
                await reached(cluster, Point.COMMIT_TAKEN)
                commit_sent.set()
                error = await call
                assert (error.reason, died, copies) == (Reason.PEER_UNREACHABLE, [MemoryError], LAYERS), error
                await assert_conserved(cluster)
                assert not cluster.gates[Point.SEAL_LANDED].reached.is_set(), "sealed what was never copied"
                states = cluster.decode["decode-0"].receiver.grants.states()
                assert not states.get(GrantState.COMMITTED), states
                assert True not in committed
                await ask_exactly(cluster, prompt)
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_blocks_of_a_cancelled_request_go_to_the_next_in_line() -> None:
    """One prompt fills the prefill node's region, another waits. The first client leaves while a step runs: its blocks
    come free only with the step's end, and that lets the second one go ahead."""

    async def scenario() -> None:
        rng = random.Random(2)
        async with inprocess(mock_spec(node_flags={"prefill-0": {"engine.num_blocks": 100}})) as cluster:
            node, gate = cluster.prefill["prefill-0"], cluster.gates[Point.LAYER]
            gate.close()
            call: Any = cluster.client.stub.Generate(make_request(marked(rng, 1500), max_tokens=8), timeout=CALL_S_MAX)
            await reached(cluster, Point.LAYER)
            second = [5, *random_prompt(rng, 1499)]
            waiting = asyncio.create_task(ask_exactly(cluster, second))
            await until(cluster, "the second to be queued", lambda: len(node._queue) == 1)
            call.cancel()
            await until(cluster, "the first to be given back", lambda: not node._admitted)
            assert len(node._queue) == 1, "admitted while the step had the blocks"
            gate.open()
            await waiting
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_node_whose_engine_loop_breaks_ends(name: str) -> None:
    """A bug ends the engine loop: `serve` ends with an error, its region is unmapped, its port is free, and a node
    started in its place serves."""

    async def scenario() -> None:
        async with inprocess(mock_spec(router_flags={"liveness.reconnect_ms_max": 300})) as cluster:
            nodes: dict[str, Any] = {**cluster.prefill, **cluster.decode}
            host, port = cluster.endpoints[name].split(":")
            assert region_is_mapped(name)

            def breaks(*_args: Any) -> None:
                raise AssertionError("a bug")

            with patch.object(nodes[name], "step_ended", breaks):
                asked = asyncio.create_task(error_of(asking(cluster, [5, 6, 7])))
                error = await asyncio.wait_for(cluster.broken(name), REACHED_S_MAX)
            assert error.reason is Reason.INTERNAL
            assert isinstance(error.__cause__, AssertionError)
            await asked
            assert not region_is_mapped(name)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
            await cluster.start_node(name, Service.PREFILL if name.startswith("prefill") else Service.DECODE)
            await ask_exactly(cluster, [5, 6, 7])
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_commit_whose_seal_is_lost_with_the_link_is_given_up() -> None:
    """The Commit waits at the decode node when the link ends, and the seal never comes: the request ends as a failed
    handoff, long before its client's deadline."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill_flags={"writer.call_ms_max": 300})) as cluster:
            cluster.gates[Point.SEAL].close()
            call = asyncio.create_task(error_of(asking(cluster, marked(random.Random(4), 40), timeout_s=20)))
            await reached(cluster, Point.SEAL)
            await reached(cluster, Point.COMMIT_TAKEN)
            link: Any = peer_of(cluster, "decode-0")._link
            link._end("the test ended the link")
            error = await call
            assert error.reason is Reason.PEER_UNREACHABLE, error
            assert "decode-0" in error.message
            await assert_conserved(cluster)
            assert cluster.traces() == {}
            cluster.gates[Point.SEAL].open()
            await ask_exactly(cluster, [5, 6, 7])
            await assert_conserved(cluster)

    asyncio.run(scenario())


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
                await until(cluster, "six to wait", lambda: len(node._admitted) == 6 and calls > 0)
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


def test_the_prefill_node_stops_what_the_router_never_heard_of() -> None:
    """The client leaves when the decode node has committed and the router has not read `granted`: it cannot tell the
    decode node, so the prefill node does, and nothing runs on."""

    async def scenario() -> None:
        real_take, real_cancel = RouterNode._take, DecodeNode.cancel
        cancelled: list[tuple[RequestKey, str]] = []

        def take(self: RouterNode, job: Any, attempt: Any, event: Any) -> None:
            if job.checked.prompt[0] != MARK:
                real_take(self, job, attempt, event)

        def cancel(self: DecodeNode, key: RequestKey, reason: str) -> bool:
            found = real_cancel(self, key, reason)
            if found:
                cancelled.append((key, reason))
            return found

        spec = mock_spec(blocks=1000, decode_flags={**SLOW_DECODE, "orphan_ms": 600_000})
        with patch.object(RouterNode, "_take", take), patch.object(DecodeNode, "cancel", cancel):
            async with inprocess(spec) as cluster:
                cluster.gates[Point.COMMIT_ANSWERED].close()
                request = make_request(marked(random.Random(7), 40), max_tokens=8000, ignore_eos=True)
                call: Any = cluster.client.stub.Generate(request, timeout=CALL_S_MAX)
                await reached(cluster, Point.COMMIT_ANSWERED)
                call.cancel()
                await until(cluster, "the request to be freed", lambda: not cluster.traces())
                (key,) = {key for key, _ in cancelled}
                assert cluster.is_marked(key.request)
                assert cancelled[0][1] == "the prefill node gave the request up"
                await assert_conserved(cluster)

    asyncio.run(scenario())


def small_tokenizer(folder: Path) -> Tokenizer:
    """Three letters, a comma and a space."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3, ",": 4, " ": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_text_is_measured_first_and_encoded_off_the_loop(tmp_path: Path) -> None:
    """A text over the limit is refused before it is encoded; one within it is encoded on another thread."""

    async def scenario() -> None:
        tokenizer = small_tokenizer(tmp_path)
        threads: list[int] = []
        real_encode = TextCodec.encode

        def encode(self: TextCodec, text: str) -> Sequence[int]:
            threads.append(threading.get_ident())
            return real_encode(self, text)

        flags = {"model": str(tmp_path), "prompt_chars_max": CHARS_MAX}
        with patch.object(TextCodec, "encode", encode):
            async with inprocess(mock_spec(router_flags=flags)) as cluster:
                error = await error_of(cluster.client.generate("a" * (CHARS_MAX + 1), max_tokens=3))
                assert (error.reason, error.field) == (Reason.PROMPT_TOO_LONG, "text"), error
                assert threads == []
                answer = await cluster.client.generate(TEXT, max_tokens=3)
                assert answer.ids == mock_tokens(tokenizer.encode(TEXT).ids, 3)
                assert len(threads) == 1
                assert threads[0] != threading.get_ident(), "encoded on the loop"
                await ask_length(cluster, CHARS_MAX)

    async def ask_length(cluster: InProcessCluster, length: int) -> None:
        assert (await cluster.client.generate("a" * length, max_tokens=1)).stats.prompt_tokens == length

    asyncio.run(scenario())


def test_the_router_keeps_no_channel_to_what_is_gone() -> None:
    """Both nodes restart again and again, each time on another port, serving in between: the router's channels are
    those of a router that has met these processes only."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            channels = cluster.router._channels
            await ask_exactly(cluster, [5, 6])
            expected, gone = len(channels._channels), set[str]()
            for i in range(4):
                for name, service in (("prefill-0", Service.PREFILL), ("decode-0", Service.DECODE)):
                    gone.add(cluster.endpoints[name])
                    await cluster.stop_node(name)
                    await cluster.start_node(name, service)
                await ask_exactly(cluster, [5 + i, 6])
            gone -= set(cluster.endpoints.values())
            assert len(gone) >= 4
            await until(cluster, "channels to be dropped", lambda: not gone & channels._channels.keys())
            assert len(channels._channels) == expected
            await assert_conserved(cluster)

    asyncio.run(scenario())
