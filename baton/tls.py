"""mTLS between the processes of a cluster: the certificate files, read anew when they change, and what a caller's
certificate allows.

Both ends of a channel have a certificate of the same CA. Its DNS names say what its holder is (`Kind`) and which one;
addresses are in none of them, so nodes may move. `baton ca` makes such certificates.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import grpc
from batonpb import decode_pb2, directory_pb2

from baton.config import setting
from baton.endpoint import is_loopback
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Incarnation
from baton.log import get_log
from baton.operator import OPERATOR_METHODS
from baton.shared_places import SharedPlaces

log = get_log("tls")

LOOK_MS: Final = 1_000
"""Time between two looks whether the files have changed."""
ENDS_SOON_PART: Final = 0.1
"""A certificate with less than this of its time left is warned of."""
INCARNATIONS_MAX: Final = 16_384
"""Incarnations that a process remembers the certificate of; then the one not heard of for longest is forgotten, of the
certificate that has most of them."""
INSECURE_HELP: Final = "without TLS, listen beyond the loopback too"
INSECURE_WHEN: Final = "Nobody else reaches this network, or something else encrypts and authenticates on it."
PROBE_HELP: Final = "host:port of a gRPC port without TLS for health checks alone; none: off"
PROBE_WHEN: Final = "Nodes use TLS, and who checks their health has no certificate, such as Kubernetes."
READ_METHODS: Final = frozenset(
    {
        "/baton.v1.Node/GetStatus",
        "/baton.v1.Node/WatchStatus",
        "/baton.v1.Directory/List",
        "/baton.v1.Directory/Watch",
    }
)
"""For every certificate of the CA, as are health and reflection. OPERATOR_METHODS are for operators, all others for
nodes."""


class Kind(Enum):
    """What the holder of a certificate is."""

    NODE = "node"
    """A router, a serving node or the directory."""
    OPERATOR = "operator"

    @property
    def dns_name(self) -> str:
        """Every certificate of this kind has it."""
        return f"{self.value}.baton.internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Of every process of the cluster; all three or none."""

    cert_file: Path | None = setting(
        None,
        "this process's certificate, for mTLS between the processes of the cluster (PEM); none: no TLS",
        "Processes are on several machines. `baton ca` makes certificates; a changed file is used at once.",
    )
    key_file: Path | None = setting(None, "private key of cert_file (PEM)", "With cert_file.")
    ca_file: Path | None = setting(
        None, "certificates of the CAs that the others' certificates are from (PEM)", "With cert_file."
    )

    def __post_init__(self) -> None:
        names = ("cert_file", "key_file", "ca_file")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise InvalidField(missing[0], "must be set too: cert_file, key_file and ca_file belong together")

    @property
    def on(self) -> bool:
        return self.cert_file is not None


def check_listens(config: Any, *names: str) -> None:
    """Without TLS everybody who reaches an internal port may do everything. So it must be on the loopback, or
    `insecure` must be set. `names` are the settings with those ports. For `__post_init__`: raises InvalidField."""
    if config.tls.on or config.insecure:
        return
    for name in names:
        listen = getattr(config, name)
        if listen is not None and not _for_this_machine_only(listen):
            raise InvalidField(
                name,
                f"is {listen}, and without TLS whoever reaches it controls this process: set tls.cert_file, "
                "tls.key_file and tls.ca_file (`baton ca` makes certificates), listen on 127.0.0.1, or set insecure "
                "where nobody else reaches this network",
            )


def _for_this_machine_only(listen: str) -> bool:
    try:
        return is_loopback(listen)
    except BatonError:  # no endpoint: the attempt to listen there reports it
        return True


def open_tls(config: Any) -> Tls | None:
    """By the settings `tls` and `insecure`. Raises BatonError BAD_CONFIG for files that are of no use."""
    if config.tls.on:
        return Tls(config.tls)
    if config.insecure:
        log.warning("insecure: without TLS whoever reaches the ports of this process controls it")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What the files had, checked."""

    cert: bytes
    key: bytes
    ca: bytes
    kinds: frozenset[Kind]
    begins_s: float
    ends_s: float


class Tls:
    """Credentials from certificate files. They are read anew when they have changed; files that do not fit each other
    are left alone. Any thread: gRPC asks from its own."""

    def __init__(self, config: TlsConfig, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises BatonError BAD_CONFIG."""
        assert config.cert_file is not None and config.key_file is not None and config.ca_file is not None
        self._files = (config.cert_file, config.key_file, config.ca_file)
        self._now_s = now_s
        self._looked_s = now_s()
        self._looking = threading.Lock()
        self._seen = self._stamps()
        self._ending_told = False
        try:
            self._loaded = _load(*self._files)
        except (OSError, ValueError) as error:
            text = f"The certificate files {', '.join(map(str, self._files))} are of no use: {_problem(error)}."
            raise BatonError(Reason.BAD_CONFIG, text, field="tls.cert_file") from error
        self.generation = 1
        """Rises when other files are in use."""

    def look(self) -> int:
        """Read the files anew if they have changed, at most once per LOOK_MS. Returns `generation`."""
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_MS / 1e3 and self._looking.acquire(blocking=False):
            try:
                self._looked_s = now_s
                self._read()
            finally:
                self._looking.release()
        return self.generation

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._loaded.kinds

    def channel_credentials(self) -> grpc.ChannelCredentials:
        loaded = self._loaded
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that demands a certificate of every caller, and always has the newest one itself."""
        served = self.generation

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            generation = self.look()
            if generation == served:
                return None
            served = generation
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            newer,  # type: ignore[arg-type]  # the stubs do not know that None stands for no change
            require_client_authentication=True,
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        loaded = self._loaded
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)

    def _read(self) -> None:
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                loaded = _load(*self._files)
                if self._stamps() != stamps:
                    raise ValueError("they were being written")
            except (OSError, ValueError) as error:
                log.warning("changed certificate files are not used; the ones before are", problem=_problem(error))
            else:
                self._loaded = loaded
                self.generation += 1
                self._ending_told = False
                log.info("certificate files were read anew", file=str(self._files[0]))
        left_s, life_s = self._loaded.ends_s - time.time(), self._loaded.ends_s - self._loaded.begins_s
        if left_s < life_s * ENDS_SOON_PART and not self._ending_told:
            self._ending_told = True
            log.warning("the certificate ends soon", file=str(self._files[0]), hours_left=round(left_s / 3600, 1))

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        stamps: list[tuple[int, int, int] | None] = []
        for path in self._files:
            try:
                found = os.stat(path)
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
        return stamps


def _load(cert_file: Path, key_file: Path, ca_file: Path) -> _Loaded:
    """Raises OSError (an SSLError is one) or ValueError for files that no peer would take."""
    cert, key, ca = cert_file.read_bytes(), key_file.read_bytes(), ca_file.read_bytes()
    shown = _shown_to_itself(cert_file, key_file, ca_file)
    names = {value for kind, value in shown["subjectAltName"] if kind == "DNS"} if "subjectAltName" in shown else set()
    kinds = frozenset(kind for kind in Kind if kind.dns_name in names)
    if not kinds:
        wanted = " or ".join(kind.dns_name for kind in Kind)
        raise ValueError(f"the certificate must have the DNS name {wanted}, by which the others know what it is for")
    begins_s, ends_s = (float(ssl.cert_time_to_seconds(shown[key])) for key in ("notBefore", "notAfter"))
    return _Loaded(cert=cert, key=key, ca=ca, kinds=kinds, begins_s=begins_s, ends_s=ends_s)


def _shown_to_itself(cert_file: Path, key_file: Path, ca_file: Path) -> dict[str, Any]:
    """The certificate as a peer with the same files gets it, by a handshake in memory.

    Raises SSLError if the peer would refuse it, or key and certificate do not belong together.
    """
    ends = []
    incoming = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    for i, protocol in enumerate((ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(cert_file, key_file, password="")
        context.load_verify_locations(ca_file)
        ends.append(context.wrap_bio(incoming[i], incoming[1 - i], server_side=i == 1))
    for _ in range(4):  # two flights each
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert()
    assert shown is not None and ends[1].getpeercert() == shown
    return dict(shown)


def _problem(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'cannot be read').lower()}"
    return str(error)


def peer_names(context: Any) -> frozenset[str]:
    """The DNS names of the caller's certificate; none if the caller has shown none."""
    return frozenset(name.decode() for name in context.auth_context().get("peer_dns", ()))


class CertifiedCallers:
    """Which calls a caller's certificate allows, and as whom it may speak: the first call of an incarnation binds it to
    the names of its certificate, so that nobody else speaks for it."""

    def __init__(self) -> None:
        self._bound: dict[Incarnation, frozenset[str]] = {}
        self._crowds = SharedPlaces(INCARNATIONS_MAX)

    def guard(self, method: str, behavior: Callable[..., Any], *, request_streaming: bool) -> Callable[..., Any]:
        """`behavior`, which then raises BatonError PERMISSION_DENIED where the caller may not call `method`, or not as
        the one that it says it is."""

        async def guarded(request: Any, context: Any) -> Any:
            names = peer_names(context)
            check_kind(method, names)
            if request_streaming:
                return await behavior(_Checked(request, lambda message: self.check(message, names)), context)
            self.check(request, names)
            return await behavior(request, context)

        return guarded

    def check(self, message: object, names: frozenset[str]) -> None:
        """Raises BatonError PERMISSION_DENIED for a message in the name of an incarnation with another certificate."""
        incarnation = claimed_sender(message)
        if not incarnation:
            return
        bound = self._bound.setdefault(incarnation, names)
        if bound != names:
            raise BatonError(
                Reason.PERMISSION_DENIED,
                f"Incarnation {incarnation:016x} has another certificate than the caller: it is that of "
                f"{', '.join(sorted(bound))}.",
            )
        self._crowds.leave(incarnation)
        forgotten = self._crowds.enter(incarnation, names)
        if forgotten is not None:
            del self._bound[Incarnation(forgotten)]


class _Checked:
    """The messages of a stream, each checked before its reader gets it."""

    def __init__(self, messages: AsyncIterator[Any], check: Callable[[Any], None]) -> None:
        self._messages = aiter(messages)
        self._check = check

    def __aiter__(self) -> _Checked:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        self._check(message)
        return message


def check_kind(method: str, names: frozenset[str]) -> None:
    """Raises BatonError PERMISSION_DENIED unless these names of a certificate allow `method`. What OPERATOR_METHODS
    need besides is checked elsewhere."""
    service = method[1:].partition("/")[0]
    if Kind.NODE.dns_name in names:
        return
    if Kind.OPERATOR.dns_name in names and (
        method in READ_METHODS or method in OPERATOR_METHODS or not service.startswith("baton.")
    ):
        return
    raise BatonError(
        Reason.PERMISSION_DENIED,
        f"{method[1:]} is for nodes of the cluster, whose certificates have the name {Kind.NODE.dns_name}; the "
        f"caller's has {', '.join(sorted(names)) or 'none'}.",
    )


def claimed_sender(message: object) -> Incarnation:
    """The incarnation in whose name a message speaks; 0: none."""
    match message:
        case directory_pb2.PushRequest():
            return Incarnation(message.record.incarnation)
        case directory_pb2.RemoveRequest():
            return Incarnation(message.incarnation)
        case decode_pb2.SubscribeRequest():
            return Incarnation(message.open.header.sender)
        case _:
            header = getattr(message, "header", None)
            return Incarnation(0 if header is None else header.sender)
