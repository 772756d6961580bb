"""A cluster with mTLS, of real processes: under attack by those who have no certificate or somebody else's, and while
all its certificates change."""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from batonpb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    directory_pb2,
    directory_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    pins_pb2,
    pins_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason
from baton.ids import Epoch, Incarnation, Pair
from baton.rpc import rpc_errors
from baton.tls import Kind
from cli.ca import CertificateFiles, certificate_files, issue, make_ca
from cli.services import Service
from cli.supervisor import CERTIFICATES, DIRECTORY_NAME, OPERATOR, ROUTER_NAME
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import open_connection
from kvtransfer.transports.receiver_port import SECRET_BYTES
from kvtransfer.transports.tcp import CODEC, TcpHello
from tests.support.attack import ATTACKER, Front, attacker_connection, bystanders, front_door, nobody_notices
from tests.support.certificates import change_ca
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.ports import free_ports
from tests.support.tcp_harness import Raw

STREAMS: Final = 8
TOKENS: Final = 60
BEYOND_ALL: Final = 2**63
"""As `lowest_live`: nothing of this writer lives any more."""
HANDSHAKES: Final = 200
WHOLE_HANDSHAKES: Final = 50
NODE: Final = ("grpc.ssl_target_name_override", Kind.NODE.dns_name)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    data = f"127.0.0.1:{free_ports(1)[0]}"
    with front_door(prefill=2, tls=True, both={"transports": "tcp"}, decode_flags={"data_listen": data}) as started:
        yield started


class Streams:
    """Answers that are being written while something else goes on; each must have exactly its tokens."""

    def __init__(self, cluster: RunningCluster) -> None:
        rng = random.Random(4)
        self._cluster = cluster
        self._prompts = [random_prompt(rng, 40) for _ in range(STREAMS)]
        self._answers: list[asyncio.Task[Answer]] = []

    async def start(self) -> None:
        for prompt in self._prompts:
            answer = self._cluster.client.generate(prompt, max_tokens=TOKENS)
            self._answers.append(asyncio.create_task(answer))

        async def decoding() -> bool:
            return (await self._cluster.status("decode-0")).record.load.running_requests > 0

        await wait_for(decoding, "answers to be written", story=self._cluster.story)

    async def end(self) -> None:
        for prompt, answer in zip(self._prompts, await asyncio.gather(*self._answers), strict=True):
            assert answer.ids == mock_tokens(prompt, TOKENS)
        await assert_conserved(self._cluster)


def credentials(files: CertificateFiles | None, ca: Path) -> grpc.ChannelCredentials:
    mine = (None, None) if files is None else (files.key.read_bytes(), files.cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), *mine)


Forgery = Callable[[grpc.aio.Channel], Awaitable[Any]]


def forgeries(writer: int, router: int, receiver: int) -> dict[str, Forgery]:
    """What ends others' requests, frees their blocks or reads their tokens, in the name of `writer` and `router`."""
    header = common_pb2.Header(sender=writer, receiver=receiver)
    of_router = common_pb2.Header(sender=router, receiver=receiver)

    def transfer(method: str, request: Any) -> Forgery:
        return lambda channel: getattr(transfer_pb2_grpc.TransferStub(channel), method)(request, timeout=CALL_S_MAX)

    def pins(method: str, request: Any) -> Forgery:
        return lambda channel: getattr(pins_pb2_grpc.NodePinsStub(channel), method)(request, timeout=CALL_S_MAX)

    async def subscribe(channel: grpc.aio.Channel) -> None:
        call = decode_pb2_grpc.DecodeStub(channel).Subscribe()
        await call.write(decode_pb2.SubscribeRequest(open=decode_pb2.SubscribeOpen(header=of_router)))
        await call.read()
        call.cancel()

    async def liveness(channel: grpc.aio.Channel) -> None:
        request = transfer_pb2.LivenessRequest(header=header)
        async for _ in transfer_pb2_grpc.TransferStub(channel).Liveness(request):
            return

    def cancel(channel: grpc.aio.Channel) -> Awaitable[Any]:
        request = decode_pb2.CancelRequest(header=of_router, key=common_pb2.RequestKey(request="r", attempt=1))
        call: Awaitable[Any] = decode_pb2_grpc.DecodeStub(channel).Cancel(request, timeout=CALL_S_MAX)
        return call

    release = transfer_pb2.ReleaseRequest(header=header, number=1, lowest_live=BEYOND_ALL)
    return {
        "Release": transfer("Release", release),
        "Connect": transfer("Connect", transfer_pb2.ConnectRequest(header=header)),
        "Reserve": transfer("Reserve", transfer_pb2.ReserveRequest(header=header, number=9, lowest_live=BEYOND_ALL)),
        "Revoke": transfer("Revoke", transfer_pb2.RevokeRequest(header=header, number=1)),
        "HoldPin": pins("HoldPin", pins_pb2.HoldPinRequest(header=of_router)),
        "Subscribe": subscribe,
        "Liveness": liveness,
        "Cancel": cancel,
    }


def directory_forgeries(record: directory_pb2.NodeRecord) -> dict[str, Forgery]:
    """The node with this record is told to be elsewhere, or gone."""
    elsewhere = directory_pb2.NodeRecord()
    elsewhere.CopyFrom(record)
    elsewhere.endpoint, elsewhere.sequence = "127.0.0.1:1", BEYOND_ALL
    gone = directory_pb2.RemoveRequest(name=record.name, incarnation=record.incarnation)

    def directory(method: str, request: Any) -> Forgery:
        return lambda channel: getattr(directory_pb2_grpc.DirectoryStub(channel), method)(request, timeout=CALL_S_MAX)

    push = directory_pb2.PushRequest(record=elsewhere, ttl_ms=60_000)
    return {"Push": directory("Push", push), "Remove": directory("Remove", gone)}


def drain(channel: grpc.aio.Channel) -> Awaitable[Any]:
    call: Awaitable[Any] = node_pb2_grpc.NodeStub(channel).Drain(node_pb2.LifecycleOrder(), timeout=CALL_S_MAX)
    return call


async def refused(forgery: Forgery, channel: grpc.aio.Channel, what: str) -> Reason:
    try:
        with rpc_errors(what):
            await forgery(channel)
    except BatonError as error:
        return error.reason
    raise AssertionError(f"{what} was taken")


def test_forged_calls_of_strangers_and_of_other_nodes_do_nothing(front: Front, tmp_path: Path) -> None:
    """While answers are written: a plain client, one without a certificate, one of another CA, an operator, and
    prefill-1 in the name of prefill-0 and the router. A node's order is not taken either. No answer notices, no block
    is lost."""
    folder = front.cluster.log_dir / CERTIFICATES
    make_ca(tmp_path / "theirs")
    foreign = issue(tmp_path / "theirs", kind=Kind.NODE, name="prefill-0")
    operator, other = (certificate_files(folder, name) for name in (OPERATOR, "prefill-1"))
    strangers = {Reason.PEER_UNREACHABLE}
    attackers: tuple[tuple[CertificateFiles | None, set[Reason]], ...] = (
        (None, strangers),
        (foreign, strangers),
        (operator, {Reason.PERMISSION_DENIED}),
        (other, {Reason.PERMISSION_DENIED}),
    )
    decode, directory = (front.cluster.endpoints[name] for name in ("decode-0", DIRECTORY_NAME))

    async def attack(place: str, forged: dict[str, Forgery]) -> None:
        async with AsyncExitStack() as opened:
            plain = await opened.enter_async_context(grpc.aio.insecure_channel(place))
            channels: list[tuple[grpc.aio.Channel, set[Reason]]] = [(plain, strangers)]
            for files, wanted in attackers:
                channel = grpc.aio.secure_channel(place, credentials(files, operator.ca), options=[NODE])
                channels.append((await opened.enter_async_context(channel), wanted))
            for channel, wanted in channels:
                assert {await refused(forgery, channel, what) for what, forgery in forged.items()} == wanted
            if place == decode:
                assert await refused(drain, channels[-1][0], "Drain") is Reason.UNAUTHENTICATED

    async def scene() -> None:
        writer, router, receiver = [
            (await front.status(name)).record for name in ("prefill-0", ROUTER_NAME, "decode-0")
        ]

        async def attack_all() -> None:
            await attack(decode, forgeries(writer.incarnation, router.incarnation, receiver.incarnation))
            await attack(directory, directory_forgeries(writer))

        await nobody_notices(front, attack_all)
        await assert_conserved(front)
        assert (await front.status("prefill-0")).record.endpoint == writer.endpoint

    front.run(scene())


def test_handshakes_that_lead_to_nothing_keep_nobody_out(front: Front, tmp_path: Path) -> None:
    """Hundreds at each port of the cluster's own: without a word, half of one, another protocol, whole ones with the
    certificate of another CA. Meanwhile prompts are handed over, and tokens come."""
    make_ca(tmp_path / "theirs")
    foreign = issue(tmp_path / "theirs", kind=Kind.NODE, name="prefill-0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(foreign.cert, foreign.key)
    words = (b"", b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(range(256)) * 16)

    async def attack(place: str) -> None:
        held = [await attacker_connection(place) for _ in range(HANDSHAKES)]
        for i, (_, writer) in enumerate(held):
            writer.write(words[i % len(words)])
        for _ in range(WHOLE_HANDSHAKES):
            host, port = split_endpoint(place)
            with suppress(OSError):  # an SSLError is one
                reader, writer = await asyncio.open_connection(host, port, ssl=context, local_addr=(ATTACKER, 0))
                held.append((reader, writer))
                await reader.read()
        for _, writer in held:
            writer.close()
        for _, writer in held:
            with suppress(OSError):
                await writer.wait_closed()

    async def attack_all() -> None:
        places = {*front.cluster.endpoints.values(), *front.cluster.command_endpoints.values()} - {front.cluster.router}
        for place in sorted(places):
            await attack(place)

    async def scene() -> None:
        await nobody_notices(front, attack_all)
        await assert_conserved(front)

    front.run(scene())


def test_a_data_connection_without_the_secret_of_the_pair_is_refused(front: Front) -> None:
    """It speaks for prefill-0, which has a link and hands over meanwhile. The secret has come to prefill-0 by a call
    with mTLS, so nobody else knows it."""

    async def answered(place: str, pair: Pair, epoch: int) -> str:
        sock = await open_connection(place, asyncio.get_running_loop())
        with sock:
            stranger = Raw(sock)
            hello = wire.Hello(pair=pair, epoch=Epoch(epoch), link=1, payload=TcpHello(stream=0).encode())
            await stranger.send(CODEC.encode(CODEC.tagged(bytes(SECRET_BYTES), hello)))
            answer = await stranger.receive()
            assert isinstance(answer, wire.Refused)
            return answer.reason.name

    async def scene() -> None:
        status = await front.status("decode-0")
        (pair,) = [p for p in (await front.status("prefill-0")).pairs if p.peer == "decode-0"]
        writer = Incarnation((await front.status("prefill-0")).record.incarnation)
        of = Pair(receiver=Incarnation(status.record.incarnation), writer=writer)
        place = str(front.cluster.spec.flags[Service.DECODE]["data_listen"])
        async with bystanders(front) as others:
            assert await answered(place, of, pair.epoch) == "SECRET"
            assert await answered(place, of, pair.epoch + 1) == "EPOCH"
            assert await answered(place, Pair(receiver=of.receiver, writer=Incarnation(7)), 1) == "NOT_EXPECTED"
        others.check()
        await assert_conserved(front)

    front.run(scene())


def test_a_forged_prefill_is_refused(front: Front) -> None:
    """Whoever reaches a prefill node is no router."""

    async def scene() -> None:
        own = (await front.status("prefill-0")).record.incarnation
        request = prefill_pb2.PrefillRequest(header=common_pb2.Header(sender=7, receiver=own))
        async with grpc.aio.insecure_channel(front.cluster.endpoints["prefill-0"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in prefill_pb2_grpc.PrefillStub(channel).Prefill(request, timeout=CALL_S_MAX):
                    pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    front.run(scene())


@pytest.mark.slow
def test_all_certificates_change_to_another_ca_under_load(tmp_path: Path) -> None:
    """Both CAs are trusted first, then come the new certificates, then the old CA goes. Answers that are being written
    have all their tokens. Then a node that is started anew takes over from one that is killed, by new connections."""
    make_ca(tmp_path / "new")
    spec = mock_spec(prefill=2, decode=1, decode_flags={"engine.mock_layer_delay_ms": 10}, tls=True)
    with running(spec) as cluster:
        names = cluster.cluster.names

        async def all_read(times: int) -> None:
            async def read() -> bool:
                nodes = [name for name in names if name != DIRECTORY_NAME]
                return all(cluster.log_text(name).count("were read anew") >= times for name in nodes)

            await wait_for(read, "all nodes to read the files", story=cluster.story)

        async def scene() -> None:
            streams = Streams(cluster)
            await streams.start()
            await change_ca(cluster, tmp_path / "new", all_read)
            await streams.end()
            cluster.send_signal("prefill-1", signal.SIGKILL)
            await cluster.wait_exit("prefill-1")
            await cluster.cluster.start_process("prefill-1")
            cluster.send_signal("prefill-0", signal.SIGKILL)
            cluster.set_down("prefill-0")

            async def answered() -> bool:
                try:
                    answer = await cluster.client.generate([5, 6, 7], max_tokens=5)
                except BatonError:
                    return False
                return answer.ids == mock_tokens([5, 6, 7], 5)

            await wait_for(answered, "the new node to serve", story=cluster.story)

        cluster.run(scene())
