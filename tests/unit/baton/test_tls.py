"""mTLS on the loopback: who gets through to which calls, in whose name, and what happens when certificates change."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    transfer_pb2,
    transfer_pb2_grpc,
)
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc, tls
from baton.errors import BatonError, InvalidField, Reason
from baton.liveness import nobody_listens
from baton.log import LogLevel, set_up_logging
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer, rpc_errors
from baton.tls import CertifiedCallers, Kind, Tls, TlsConfig
from cli.ca import CertificateFiles, issue, make_ca
from cli.directory import DirectoryProcessConfig
from decode_node.config import DecodeConfig
from engine.build import EngineConfig, EngineKind
from router.config import RouterConfig
from tests.support.certificates import certificate, tls_of
from tests.support.logs import tear_down_logging
from tests.support.rpc_harness import HANG_S, run


class Everything:
    """Answers each call, and counts those that came through."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.shown: list[bytes] = []
        """The callers' certificates."""
        self.go_on = asyncio.Event()

    def _seen(self, what: str, context: Any) -> None:
        self.calls.append(what)
        self.shown.append(context.auth_context().get("x509_pem_cert", [b""])[0])

    async def GetStatus(self, _request: object, context: Any) -> node_pb2.NodeStatus:
        self._seen("GetStatus", context)
        return node_pb2.NodeStatus()

    async def Drain(self, _request: object, context: Any) -> node_pb2.NodeStatus:
        self._seen("Drain", context)
        return node_pb2.NodeStatus()

    async def Release(self, _request: object, context: Any) -> transfer_pb2.ReleaseReply:
        self._seen("Release", context)
        return transfer_pb2.ReleaseReply()

    async def Liveness(self, _request: object, context: Any) -> AsyncIterator[transfer_pb2.LivenessReply]:
        self._seen("Liveness", context)
        yield transfer_pb2.LivenessReply()
        await self.go_on.wait()
        yield transfer_pb2.LivenessReply()

    async def Subscribe(self, requests: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        async for _ in requests:
            self._seen("Subscribe", context)
            yield decode_pb2.TokenBatch()

    async def Push(self, _request: object, context: Any) -> directory_pb2.PushReply:
        self._seen("Push", context)
        return directory_pb2.PushReply()

    async def List(self, _request: object, context: Any) -> directory_pb2.ListReply:
        self._seen("List", context)
        return directory_pb2.ListReply()


class Stubs:
    def __init__(self, channel: Any) -> None:
        self.node = node_pb2_grpc.NodeStub(channel)
        self.transfer = transfer_pb2_grpc.TransferStub(channel)
        self.decode = decode_pb2_grpc.DecodeStub(channel)
        self.directory = directory_pb2_grpc.DirectoryStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def release(self, sender: int = 1) -> None:
        header = common_pb2.Header(sender=sender, receiver=2)
        await self.transfer.Release(transfer_pb2.ReleaseRequest(header=header), timeout=HANG_S)

    async def subscribe(self, sender: int) -> None:
        call = self.decode.Subscribe()
        header = common_pb2.Header(sender=sender, receiver=2)
        await call.write(decode_pb2.SubscribeRequest(open=decode_pb2.SubscribeOpen(header=header)))
        await call.done_writing()
        async for _ in call:
            pass

    async def push(self, sender: int) -> None:
        record = directory_pb2.NodeRecord(name="n", incarnation=sender)
        await self.directory.Push(directory_pb2.PushRequest(record=record), timeout=HANG_S)

    async def get_status(self) -> None:
        await self.node.GetStatus(node_pb2.GetStatusRequest(), timeout=HANG_S)

    async def drain(self) -> None:
        await self.node.Drain(node_pb2.LifecycleOrder(), timeout=HANG_S)

    async def list(self) -> None:
        await self.directory.List(directory_pb2.ListRequest(), timeout=HANG_S)

    async def check(self) -> None:
        await self.health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)


@dataclass
class Scene:
    """A server with mTLS, and callers of it. Closed with `opened`."""

    opened: AsyncExitStack
    served: Everything
    endpoint: str = ""
    probes: str = ""

    @classmethod
    async def make(cls, opened: AsyncExitStack, own: Tls | None) -> Scene:
        scene = cls(opened, Everything())
        server = RpcServer(limits=RpcLimits(), rng=random.Random(1), tls=own)
        for name, register in (
            ("Node", node_pb2_grpc.add_NodeServicer_to_server),
            ("Transfer", transfer_pb2_grpc.add_TransferServicer_to_server),
            ("Decode", decode_pb2_grpc.add_DecodeServicer_to_server),
            ("Directory", directory_pb2_grpc.add_DirectoryServicer_to_server),
        ):
            bases = {"Node": node_pb2_grpc.NodeServicer, "Transfer": transfer_pb2_grpc.TransferServicer}
            bases |= {"Decode": decode_pb2_grpc.DecodeServicer, "Directory": directory_pb2_grpc.DirectoryServicer}
            server.add(f"baton.v1.{name}", register, _served_by(scene.served, bases[name]))
        opened.push_async_callback(server.stop, 0)
        probes = await _free_port()
        scene.probes = f"127.0.0.1:{probes}"
        scene.endpoint = f"127.0.0.1:{await server.start('127.0.0.1:0', probe_listen=scene.probes)}"
        return scene

    def caller(self, own: Tls | None) -> Stubs:
        channels = Channels(limits=ChannelLimits(), tls=own)
        self.opened.push_async_callback(channels.close)
        return Stubs(channels.get(self.endpoint))


def _served_by(served: Everything, base: type) -> object:
    """The methods of `base`, by those of `served`; the others are not served."""
    methods = {name: getattr(served, name) for name in dir(base) if hasattr(served, name) and name[0].isupper()}
    return type("Service", (base,), {name: staticmethod(method) for name, method in methods.items()})()


async def _free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


def with_scene(test: Callable[[Scene], Any], own: Callable[[], Tls | None] = lambda: tls_of("server")) -> None:
    async def body() -> None:
        async with AsyncExitStack() as opened:
            await test(await Scene.make(opened, own()))

    run(body())


async def refused(call: Any) -> BatonError:
    """What the call ends with."""
    with pytest.raises(BatonError) as caught, rpc_errors("The node"):
        await call
    return caught.value


def test_a_node_of_the_ca_may_call_everything_but_give_orders() -> None:
    """Calls and streams of nodes, status, list and health; an order needs an operator, or the token."""

    async def scene(it: Scene) -> None:
        node = it.caller(tls_of("decode-0"))
        await node.release()
        await node.subscribe(1)
        await node.push(1)
        await node.get_status()
        await node.list()
        await node.check()
        assert it.served.calls == ["Release", "Subscribe", "Push", "GetStatus", "List"]
        assert (await refused(node.drain())).reason is Reason.UNAUTHENTICATED

    with_scene(scene)


def test_an_operator_may_look_and_give_orders_and_is_no_node() -> None:
    """Release, Subscribe and Push are refused before their handlers see them."""

    async def scene(it: Scene) -> None:
        operator = it.caller(tls_of("alice", Kind.OPERATOR))
        await operator.get_status()
        await operator.list()
        await operator.drain()
        await operator.check()
        for call in (operator.release(), operator.subscribe(1), operator.push(1)):
            error = await refused(call)
            assert error.reason is Reason.PERMISSION_DENIED
            assert error.message.endswith(
                "is for nodes of the cluster, whose certificates have the name node.baton.internal; the caller's has "
                "alice.operator.baton.internal, operator.baton.internal."
            )
        assert it.served.calls == ["GetStatus", "List", "Drain"]

    with_scene(scene)


def test_whoever_has_no_certificate_of_the_ca_reaches_nothing(tmp_path: Path) -> None:
    """A plain client, one without a certificate, one of another CA, and one whose certificate has ended. The port
    for probes has health, and nothing else."""
    make_ca(tmp_path / "other")
    other = issue(tmp_path / "other", kind=Kind.NODE, name="decode-0")
    ours = certificate("decode-0")
    ended = issue(ours.ca.parent, kind=Kind.NODE, name="late", days=-0.01)

    def credentials(files: CertificateFiles | None) -> grpc.ChannelCredentials:
        mine = (None, None) if files is None else (files.key.read_bytes(), files.cert.read_bytes())
        return grpc.ssl_channel_credentials(ours.ca.read_bytes(), *mine)

    async def scene(it: Scene) -> None:
        options = [("grpc.ssl_target_name_override", "node.baton.internal")]
        for channel in (
            grpc.aio.insecure_channel(it.endpoint),
            *(grpc.aio.secure_channel(it.endpoint, credentials(f), options=options) for f in (None, other, ended)),
        ):
            async with channel:
                caller = Stubs(channel)
                for call in (caller.release(), caller.push(1), caller.drain(), caller.get_status(), caller.check()):
                    assert (await refused(call)).reason is Reason.PEER_UNREACHABLE
        async with grpc.aio.insecure_channel(it.probes) as channel:
            caller = Stubs(channel)
            await caller.check()
            for call in (caller.release(), caller.drain(), caller.get_status()):
                assert (await refused(call)).reason is Reason.UNIMPLEMENTED
        assert it.served.calls == []

    with_scene(scene)


def test_a_caller_talks_to_nodes_only() -> None:
    """A server with an operator's certificate, and one without TLS, get no call."""

    async def scene(it: Scene) -> None:
        caller = it.caller(tls_of("decode-0"))
        assert (await refused(caller.get_status())).reason is Reason.PEER_UNREACHABLE
        assert it.served.calls == []

    with_scene(scene, lambda: tls_of("mallory", Kind.OPERATOR))
    with_scene(scene, lambda: None)


def test_an_incarnation_belongs_to_the_certificate_that_it_came_with(tmp_path: Path) -> None:
    """Another node may not release, subscribe or register in its name; a renewed certificate of its own may."""

    async def scene(it: Scene) -> None:
        one, two = it.caller(tls_of("prefill-0")), it.caller(tls_of("prefill-1"))
        await one.release(7)
        for call in (two.release(7), two.subscribe(7), two.push(7)):
            error = await refused(call)
            assert error.reason is Reason.PERMISSION_DENIED
            assert error.message == (
                "Incarnation 0000000000000007 has another certificate than the caller: it is that of "
                "node.baton.internal, prefill-0.node.baton.internal."
            )
        await two.push(8)
        assert (await refused(one.release(8))).reason is Reason.PERMISSION_DENIED
        renewed = issue(certificate("prefill-0").ca.parent, kind=Kind.NODE, name="prefill-0")
        await it.caller(Tls(renewed.config())).subscribe(7)
        assert it.served.calls == ["Release", "Push", "Subscribe"]

    with_scene(scene)


def test_the_table_of_incarnations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not heard of for longest goes; the others stay bound."""
    monkeypatch.setattr(tls, "INCARNATIONS_MAX", 2)
    callers, mine, other = CertifiedCallers(), frozenset({"a"}), frozenset({"b"})

    def message(sender: int) -> transfer_pb2.ReleaseRequest:
        return transfer_pb2.ReleaseRequest(header=common_pb2.Header(sender=sender, receiver=9))

    for sender in (1, 2, 1, 3):
        callers.check(message(sender), mine)
    with pytest.raises(BatonError):
        callers.check(message(1), other)
    callers.check(message(2), other)


def test_a_node_with_any_number_of_incarnations_pushes_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it could fill the table, and then speak as whom it has made the process forget."""
    monkeypatch.setattr(tls, "INCARNATIONS_MAX", 4)
    callers, mine, flood = CertifiedCallers(), frozenset({"a"}), frozenset({"b"})

    def message(sender: int) -> transfer_pb2.ReleaseRequest:
        return transfer_pb2.ReleaseRequest(header=common_pb2.Header(sender=sender, receiver=9))

    callers.check(message(1), mine)
    for sender in range(2, 100):
        callers.check(message(sender), flood)
    with pytest.raises(BatonError):
        callers.check(message(1), flood)
    callers.check(message(1), mine)


def test_the_port_for_probes_is_in_use() -> None:
    """The error names its setting, and nothing listens."""

    async def scene(it: Scene) -> None:
        server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
        port = await _free_port()
        with pytest.raises(BatonError) as caught:
            await server.start(f"127.0.0.1:{port}", probe_listen=it.probes)
        assert (caught.value.reason, caught.value.field) == (Reason.PORT_IN_USE, "probe_listen")
        assert await nobody_listens(f"127.0.0.1:{port}", timeout_s=HANG_S)

    with_scene(scene)


class Files:
    """Certificate files of one process that change, and a clock that makes it look."""

    def __init__(self, folder: Path, first: CertificateFiles) -> None:
        self.files = CertificateFiles(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
        self.put(first)
        self.now_s = 0.0
        self.tls = Tls(self.files.config(), now_s=lambda: self.now_s)

    def put(self, source: CertificateFiles, *, cas: tuple[CertificateFiles, ...] = ()) -> None:
        shutil.copy(source.key, self.files.key)
        shutil.copy(source.cert, self.files.cert)
        self.files.ca.write_bytes(b"".join(each.ca.read_bytes() for each in cas or (source,)))

    def look(self) -> int:
        self.now_s += tls.LOOK_MS / 1e3
        return self.tls.look()


def test_a_whole_cluster_changes_to_another_ca_while_streams_run(tmp_path: Path) -> None:
    """First both CAs are trusted, then the certificates are changed, then the old CA goes. The stub of before is used
    all the time, and its stream goes on."""
    for name in ("old", "new"):
        make_ca(tmp_path / name)
        (tmp_path / f"{name}-of").mkdir()
    old, new = (issue(tmp_path / name, kind=Kind.NODE, name="n") for name in ("old", "new"))
    ends = [Files(tmp_path / f"{name}-of", old) for name in ("old", "new")]
    server, client = ends

    async def scene(it: Scene) -> None:
        caller = it.caller(client.tls)
        stream = caller.transfer.Liveness(transfer_pb2.LivenessRequest())
        await stream.read()
        for cert, cas in ((old, (old, new)), (new, (old, new)), (new, (new,))):
            for end in ends:
                end.put(cert, cas=cas)
                end.look()
            await caller.get_status()
            assert _serial(it.served.shown[-1]) == _serial(cert.cert.read_bytes())
        assert [end.tls.generation for end in ends] == [4, 4]
        late = it.caller(Tls(old.config()))
        assert (await refused(late.get_status())).reason is Reason.PEER_UNREACHABLE
        it.served.go_on.set()
        assert await stream.read() == transfer_pb2.LivenessReply()

    with_scene(scene, lambda: server.tls)


def _serial(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


def test_a_channel_closes_with_its_last_call_when_it_is_replaced(tmp_path: Path) -> None:
    """One for each set of files, of which the last is open at the end, and one that has a stream."""
    files = Files(tmp_path, certificate("prefill-0"))

    async def scene(it: Scene) -> None:
        channels = Channels(limits=ChannelLimits(), tls=files.tls)
        it.opened.push_async_callback(channels.close)
        channel = channels.get(it.endpoint)
        caller = Stubs(channel)
        stream = caller.transfer.Liveness(transfer_pb2.LivenessRequest())
        await stream.read()
        first = channel._current
        for name in ("prefill-1", "prefill-2"):
            files.put(certificate(name))
            files.look()
            await caller.get_status()
        second = channel._retired[1]
        await second.closing
        assert second.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert first.closing is None
        it.served.go_on.set()
        await stream.read()
        assert await stream.read() is grpc.aio.EOF
        await caller.get_status()  # what ends a call is told in the order of the ends
        closing: Any = first.closing
        await closing

    with_scene(scene)


def test_files_that_do_not_fit_are_left_alone_and_taken_once_they_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A key that is written before its certificate, or rubbish; each is told once. Looks come a second apart."""
    handler = set_up_logging(node="n", level=LogLevel.INFO)
    try:
        files, later = Files(tmp_path, certificate("prefill-0")), certificate("prefill-1")
        shutil.copy(later.key, files.files.key)
        assert files.tls.look() == 1
        assert [files.look(), files.look()] == [1, 1]
        shutil.copy(later.cert, files.files.cert)
        assert [files.look(), files.look()] == [2, 2]
        files.files.ca.write_text("rubbish")
        assert files.look() == 2
        files.files.ca.unlink()
        assert files.look() == 2
    finally:
        tear_down_logging(handler)
    told = [line for line in capfd.readouterr().err.splitlines() if "are not used" in line]
    assert len(told) == 3
    assert "key values mismatch" in told[0]


def test_a_certificate_that_ends_soon_is_told_of_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Less than a tenth of its time is left: of an hour and four minutes, the hour has gone."""
    handler = set_up_logging(node="n", level=LogLevel.INFO)
    try:
        make_ca(tmp_path / "ca")
        short = issue(tmp_path / "ca", kind=Kind.NODE, name="short", days=0.003)
        files = Files(tmp_path, short)
        files.look()
        files.look()
    finally:
        tear_down_logging(handler)
    assert capfd.readouterr().err.count("the certificate ends soon") == 1


def test_files_of_no_use_are_refused_at_the_start_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended, it is another CA's, it says nothing about its holder, it is not there."""
    good = certificate("prefill-0")
    make_ca(tmp_path / "other")
    foreign = issue(tmp_path / "other", kind=Kind.NODE, name="x")
    ended = issue(tmp_path / "other", kind=Kind.NODE, name="late", days=-0.01)
    with monkeypatch.context() as patched:
        patched.setattr(Kind, "dns_name", "elsewhere.example")
        nameless = issue(tmp_path / "other", kind=Kind.NODE, name="y")
    for config, why in (
        (ended.config(), "certificate has expired"),
        (TlsConfig(cert_file=foreign.cert, key_file=foreign.key, ca_file=good.ca), "unable to get local issuer"),
        (TlsConfig(cert_file=good.cert, key_file=foreign.key, ca_file=good.ca), "key values mismatch"),
        (TlsConfig(cert_file=tmp_path / "no.pem", key_file=good.key, ca_file=good.ca), "no.pem: no such file"),
        (nameless.config(), "must have the DNS name node.baton.internal or operator.baton.internal"),
    ):
        with pytest.raises(BatonError) as caught:
            Tls(config)
        assert caught.value.reason is Reason.BAD_CONFIG
        assert why in caught.value.message


def test_the_files_are_set_all_or_none() -> None:
    """The error names a missing one."""
    with pytest.raises(InvalidField) as caught:
        TlsConfig(cert_file=Path("a"), ca_file=Path("b"))
    assert caught.value.field == "key_file"


def test_a_connection_does_not_live_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is authenticated once. Beyond its age it is closed, with what still runs after the grace; the next call opens
    another one."""
    monkeypatch.setattr(rpc, "TLS_CONNECTION_MS_MAX", 50)
    monkeypatch.setattr(rpc, "INTERNAL_MARGIN_S", 0)
    limits = RpcLimits(public_deadline_ms_default=50, public_deadline_ms_max=50)
    monkeypatch.setattr("tests.unit.baton.test_tls.RpcLimits", lambda: limits)

    async def scene(it: Scene) -> None:
        caller = it.caller(tls_of("decode-0"))
        stream = caller.transfer.Liveness(transfer_pb2.LivenessRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stream:
                pass
        await caller.list()

    with_scene(scene)


def test_keys_are_for_their_owner_only() -> None:
    """As the CA's own is."""
    files = certificate("prefill-0")
    for path in (files.key, files.ca.parent / "ca-key.pem"):
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_certificate_lasts_a_year_and_its_ca_ten() -> None:
    """From about now."""
    files = certificate("prefill-0")
    for path, days in ((files.cert, 365), (files.ca, 3650)):
        ends_s = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
        assert days - 1 < (ends_s - time.time()) / 86_400 <= days


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, None),
        ({"listen": "[::1]:0", "data_listen": "localhost:0"}, None),
        ({"listen": "0.0.0.0:0"}, "listen"),
        ({"listen": "decode-0:7000"}, "listen"),
        ({"data_listen": "10.0.0.1:7102"}, "data_listen"),
        ({"listen": "0.0.0.0:0", "data_listen": "10.0.0.1:7102", "insecure": True}, None),
        ({"listen": "0.0.0.0:0", "data_listen": "10.0.0.1:7102", "tls": certificate("decode-0").config()}, None),
        ({"probe_listen": "0.0.0.0:7012"}, None),
    ],
)
def test_without_tls_a_node_listens_on_the_loopback_only(settings: dict[str, Any], wrong: str | None) -> None:
    """Where a name service decides, nobody knows. The port for probes does nothing that matters."""
    engine = EngineConfig(kind=EngineKind.MOCK)
    if wrong is None:
        DecodeConfig(name="n", engine=engine, **settings)
        return
    with pytest.raises(InvalidField) as caught:
        DecodeConfig(name="n", engine=engine, **settings)
    assert caught.value.field == wrong
    assert f"is {settings[wrong]}, and without TLS whoever reaches it controls this process" in str(caught.value)


def test_the_directory_listens_on_the_loopback_only_and_a_router_anywhere() -> None:
    """A router's clients are strangers anyway."""
    with pytest.raises(InvalidField):
        DirectoryProcessConfig(listen="0.0.0.0:7070")
    DirectoryProcessConfig(listen="0.0.0.0:7070", insecure=True)
    RouterConfig(listen="0.0.0.0:7000", http_listen="0.0.0.0:8000")
