"""Links between two nodes: whether they may hand KV to each other (I9), over which transport, and a writer's
connections to one receiver process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batonpb import common_pb2, transfer_pb2, transfer_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Epoch, Pair
from baton.liveness import LivenessConfig, Reach
from baton.log import get_log
from baton.rpc import rpc_errors
from baton.wire import ModelInfo
from kvtransfer.status import Moved, MovedSums
from kvtransfer.transport import DataEndpoint, RegionKind, TransportName, WriterEvents, WriterLink

log = get_log("writer")

PROTOCOL_MIN = 3
PROTOCOL_MAX = 3
"""Versions of the Transfer protocol that this build speaks. 2: `writes_in_doubt` of Release and Revoke, without which a
receiver must not believe a writer's claim. 3: two calls are named Release and Liveness, and all transports use one
control channel."""

SAME_HOST_ONLY = frozenset({TransportName.CUDA_IPC, TransportName.SHM})

ANOTHER_MACHINE: Final = "another machine"
OTHER_MEMORY: Final = "one region is in host memory, the other on a device"
NOT_THERE: Final = "not offered there"
NOT_HERE: Final = "not offered here"
LOST_THERE: Final = "its device there is lost"
"""Why a pair does not use a transport. See `rejected_transports`."""
NOBODY_CAN_MEND: Final = frozenset({ANOTHER_MACHINE, OTHER_MEMORY})
"""The log reports these without a warning."""

_HOST_PARTS: Final = ("machine", "user", "network namespace", "PID namespace")

DATA_GOES_ELSEWHERE = frozenset({TransportName.RDMA, TransportName.UCX})
"""Their links are made over a TCP connection, which says nothing of the devices' way to each other. rdma proves that
before a link counts as made, ucx with its first writes."""

SERVED_BY: Final[Mapping[RegionKind, frozenset[TransportName]]] = {
    RegionKind.HOST: frozenset({TransportName.SHM, TransportName.RDMA, TransportName.UCX, TransportName.TCP}),
    RegionKind.DEVICE: frozenset({TransportName.CUDA_IPC, TransportName.RDMA, TransportName.TCP}),
}
"""Which transports can read and write a region of each kind. rdma reaches device memory where the card can register it
(`rdma`), tcp through pinned memory of the host (`kvtransfer.device.staging`)."""

DEFAULT_TRANSPORTS = (TransportName.CUDA_IPC, TransportName.SHM, TransportName.RDMA, TransportName.TCP)
"""Those that do not serve the node's kind of region are left out. So is rdma, silently where there is no device,
and with a warning where one cannot be used for the region (`rdma`). ucx is used where a configuration names it
(docs/transports.md says why)."""

FAILURES_MAX: Final = 2
"""Failed links of one transport to a receiver within the window before it is given up."""
FAILURE_WINDOW_MS: Final = 60_000
COOLDOWN_MS_MIN: Final = 30_000
"""How long a transport is not offered after it was given up for the first time; each further time doubles it."""
COOLDOWN_MS_MAX: Final = 1_800_000


def differences(own: ModelInfo, peer: ModelInfo) -> list[str]:
    """What keeps the two apart, in words; empty when they may hand over."""
    found = []
    if own.fingerprint != peer.fingerprint:
        found.append(f"weights or model configuration ({own.name} {own.fingerprint}, {peer.name} {peer.fingerprint})")
    if own.block_size != peer.block_size:
        found.append(f"block_size ({own.block_size}, {peer.block_size})")
    elif own.layout_hash != peer.layout_hash:
        found.append(f"record layout ({own.layout_hash}, {peer.layout_hash})")
    if own.protocol_max < peer.protocol_min or peer.protocol_max < own.protocol_min:
        found.append(
            f"protocol versions ({own.protocol_min}-{own.protocol_max}, {peer.protocol_min}-{peer.protocol_max})"
        )
    must_agree = own.quantisation_must_agree or peer.quantisation_must_agree
    if must_agree and own.quantisation != peer.quantisation:
        found.append(f"quantisation of the weights ({own.quantisation or 'none'}, {peer.quantisation or 'none'})")
    return found


def check_compatible(*, own: ModelInfo, peer: ModelInfo, peer_name: str) -> None:
    """Raises BatonError INCOMPATIBLE_NODE that names every difference."""
    found = differences(own, peer)
    if found:
        raise BatonError(
            Reason.INCOMPATIBLE_NODE,
            f"This node and {peer_name} differ in {'; '.join(found)}. Nodes of one cluster must run the same model "
            "with the same block size: start one of them anew with the other's settings.",
            metadata={"differs": "; ".join(found)},
        )


def serving(transports: Sequence[TransportName], region: RegionKind) -> tuple[TransportName, ...]:
    """Those of `transports` that serve such a region, in their order."""
    return tuple(transport for transport in transports if transport in SERVED_BY[region])


def check_transports(transports: Sequence[TransportName], region: RegionKind) -> None:
    """Raises InvalidField unless `transports` names at least one that serves the node's region, and none twice."""
    if not transports or len(set(transports)) != len(transports):
        raise InvalidField("transports", "must name at least one transport, none of them twice")
    if not serving(transports, region):
        fit = ", ".join(transport.value for transport in TransportName if transport in SERVED_BY[region])
        raise InvalidField(
            "transports", f"names none that serves this node's region, which is in {region.value}: {fit}"
        )


def host_parts(proc: Path = Path("/proc")) -> list[str]:
    """Hashes, the same for two processes that can share memory, in the order of `_HOST_PARTS`: one boot of one machine,
    one user, and the namespaces that the shm transport meets in (network, for its sockets) and watches its writers in
    (process ids)."""
    parts = [(proc / "sys/kernel/random/boot_id").read_text().strip(), str(os.geteuid())]
    parts += [os.readlink(proc / "self/ns" / kind) for kind in ("net", "pid")]
    return [_hash(part) for part in parts]


def host_identity() -> str:
    """One hash of all `host_parts`: 32 hexadecimal digits."""
    return _hash("|".join(host_parts()))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def host_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """What keeps two processes with these `host_parts` from sharing memory; "": nothing does."""
    if len(one) != len(_HOST_PARTS) or len(other) != len(_HOST_PARTS):
        return "another machine, user or namespace"
    differ = [name for name, a, b in zip(_HOST_PARTS, one, other, strict=True) if a != b]
    if _HOST_PARTS[0] in differ:
        return ANOTHER_MACHINE
    return f"another {' and '.join(differ)}" if differ else ""


def choose(offered: Iterable[str], own: Sequence[TransportName], *, same_host: bool) -> TransportName | None:
    """The first of the writer's offers that this receiver has too and that can work between the two; None: no such."""
    for name in offered:
        for transport in own:
            if transport.value == name and (same_host or transport not in SAME_HOST_ONLY):
                return transport
    return None


def rejected_transports(
    chosen: TransportName,
    offered: Sequence[str],
    own: Sequence[TransportName],
    *,
    withdrawn: Sequence[TransportName] = (),
    apart: str = "",
) -> list[common_pb2.RejectedTransport]:
    """Why a pair uses none that is better than `chosen`: a reason for each that one of the two offers, as the writer
    sees it ("here"). `offered` and `own` as for `choose`; `withdrawn`: what the receiver would offer with its device at
    work; `apart`: the `host_difference` of the two."""
    here, there = set(offered), {transport.value for transport in own}
    lost = {transport.value for transport in withdrawn}
    same_host = {transport.value for transport in SAME_HOST_ONLY}
    order = [transport.value for transport in TransportName]
    not_offered = [name for name in order[: order.index(chosen.value)] if name in (there | lost) - here]
    found = []
    for name in [*offered[: list(offered).index(chosen.value)], *not_offered]:
        its_side, other_side = (here, there) if name in here else (there, here)
        why = NOT_THERE if name in here else NOT_HERE
        if name in here & lost:
            why = LOST_THERE
        elif name in same_host and apart:
            why = apart
        elif name in same_host and same_host & (other_side - its_side):
            why = OTHER_MEMORY
        found.append(common_pb2.RejectedTransport(transport=name, why=why))
    return found


class Offers:
    """What one writer offers to one receiver process, best first. Pure; the caller passes the time in.

    A transport that fails too often is given up for a cooldown; `restore` gives it back.
    """

    def __init__(self, transports: Sequence[TransportName]) -> None:
        self._transports = tuple(transports)
        self._failures: dict[TransportName, deque[float]] = {}
        self._times_given_up: Counter[TransportName] = Counter()
        self._retry_s: dict[TransportName, float] = {}

    @property
    def names(self) -> list[str]:
        return [transport.value for transport in self._offered]

    @property
    def given_up(self) -> Mapping[TransportName, float]:
        """Not offered, in the order in which they were given up, with the time from which `restore` offers each."""
        return self._retry_s

    def better_restorable(self, used: TransportName, now_s: float) -> bool:
        """Whether `restore` would offer one that ranks above `used`."""
        return any(t in self._restorable(now_s) for t in self._transports[: self._transports.index(used)])

    def restore(self, now_s: float) -> list[TransportName]:
        """Offer those again whose cooldown is over, and return them. One that fails within the window from now on is
        given up again at once."""
        restored = self._restorable(now_s)
        for transport in restored:
            del self._retry_s[transport]
            self._failures[transport].extend([now_s] * (FAILURES_MAX - 1))
        return restored

    def failed(self, transport: TransportName, now_s: float, *, worked: bool = True) -> bool:
        """A link of this transport could not be made, or broke. True if it has just been given up for the next best.

        `worked` False: what was sent on it did not arrive. Of DATA_GOES_ELSEWHERE it is then given up at once. The last
        that is left is never given up.
        """
        offered = self._offered
        if transport not in offered:
            return False
        failures = self._failures.setdefault(transport, deque(maxlen=FAILURES_MAX))
        failures.append(now_s)
        hopeless = not worked and transport in DATA_GOES_ELSEWHERE
        often = len(failures) == FAILURES_MAX and now_s - failures[0] <= FAILURE_WINDOW_MS / 1000
        if not (hopeless or often) or transport is offered[-1]:
            return False
        doublings = min(self._times_given_up[transport], 16)
        self._retry_s[transport] = now_s + min(COOLDOWN_MS_MIN << doublings, COOLDOWN_MS_MAX) / 1000
        self._times_given_up[transport] += 1
        return True

    def _restorable(self, now_s: float) -> list[TransportName]:
        return [transport for transport, retry_s in self._retry_s.items() if retry_s <= now_s]

    @property
    def _offered(self) -> list[TransportName]:
        return [transport for transport in self._transports if transport not in self._retry_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A receiver process, from the directory."""

    name: str
    endpoint: str
    pair: Pair


class DataDoesNotPass(BatonError):
    """The receiver answers calls, but data sent to it does not arrive: trying again does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PEER_UNREACHABLE, message)


LinkMaker = Callable[[DataEndpoint, Pair, WriterEvents], Awaitable[WriterLink]]
"""Opens a data connection of the transport that the endpoint names. Raises BatonError, DataDoesNotPass."""


class PairSpeed:
    """Bytes that were copied, over the time with a posted batch outstanding: what the path does while it has work.

    A batch counts with its completion, and with it the time since the last event: both are of the same batches.
    May be used from any thread. The caller passes the time in, in seconds of a clock that never goes back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding_bytes = 0
        self._counted_to_s = 0.0
        """Of the time with something outstanding; without meaning while there is nothing."""
        self._sums = MovedSums()

    def posted(self, nbytes: int, now_s: float) -> None:
        """They are about to be posted: a completion may come at once."""
        with self._lock:
            if self._outstanding_bytes == 0:
                self._counted_to_s = now_s
            self._outstanding_bytes += nbytes

    def completed(self, nbytes: int, now_s: float, *, copied: bool) -> None:
        """So many of the posted bytes are outstanding no more; not `copied`: they have not moved."""
        with self._lock:
            self._sums.add(nbytes if copied else 0, self._uncounted_s(now_s), now_s)
            # A surplus completion must not end the node over a statistic.
            self._outstanding_bytes = max(0, self._outstanding_bytes - nbytes)
            self._counted_to_s = now_s

    def restart(self, now_s: float) -> None:
        """From here on another path is measured. What is outstanding completes all the same."""
        with self._lock:
            self._counted_to_s = now_s
            self._sums = MovedSums()

    def in_all(self, now_s: float) -> Moved:
        """Since the path was last changed."""
        with self._lock:
            return self._sums.in_all + Moved(moving_s=self._uncounted_s(now_s))

    def recent(self, now_s: float) -> Moved:
        """Of the last RECENT_S seconds, and the whole time that what is outstanding has taken so far."""
        with self._lock:
            return self._sums.recent(now_s) + Moved(moving_s=self._uncounted_s(now_s))

    def _uncounted_s(self, now_s: float) -> float:
        return now_s - self._counted_to_s if self._outstanding_bytes else 0.0


class PairLink:
    """At most one connection at a time. Control thread only, except `speed`."""

    def __init__(
        self,
        *,
        address: PeerAddress,
        stub: transfer_pb2_grpc.TransferStub,
        call_ms_max: int,
        request: transfer_pb2.ConnectRequest,
        make_link: LinkMaker,
        offers: Offers,
        events: WriterEvents,
        replaced: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`request` is filled in with what is offered. `replaced` is called when another process answers."""
        self.offers = offers
        self.now: WriterLink | None = None
        self.transport: TransportName | None = None
        """Of the current or the last connection; so is `epoch`."""
        self.epoch = Epoch(0)
        self.num_blocks = 0
        """Of the receiver's region."""
        self.failures = 0
        """Connections that broke or could not be made."""
        self.rejected_transports: list[common_pb2.RejectedTransport] = []
        """Better transports than the connection's, when it was made; not those that this side has given up."""
        self.speed = PairSpeed()
        """Of `transport`. Also for the engine thread, which posts."""
        self._address = address
        self._stub = stub
        self._call_s_max = call_ms_max / 1000
        self._request = request
        self._make_link = make_link
        self._events = events
        self._replaced = replaced
        self._outgoing: WriterLink | None = None
        self._loop = loop
        self._connecting: asyncio.Task[None] | None = None
        self._landed = self._lost_writes = False

    async def ensure(self, *, idle: bool) -> None:
        """Connect if there is no connection, or if a better transport can be tried again and the pair is `idle`: no
        handoff uses this one. All who wait share one try. Raises BatonError."""
        if self.now is not None:
            assert self.transport is not None
            if not (idle and self.offers.better_restorable(self.transport, self._loop.time())):
                return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(self._connect_over)
        connecting = self._connecting
        await asyncio.wait([connecting])  # a cancelled caller must not end the others' try
        if not connecting.cancelled():
            connecting.result()

    def completed(self, nbytes: int, *, copied: bool) -> None:
        """A batch that was posted on the connection, or on one before it, has completed."""
        self.speed.completed(nbytes, self._loop.time(), copied=copied)
        if copied:
            self._landed = True
        else:
            self._lost_writes = True

    def lost(self, reason: str) -> Epoch | None:
        """The connection has ended by itself: its epoch. None: it was no longer in use."""
        link, self.now = self.now, None
        if link is None:
            return None
        if not link.fenced:
            assert self.transport is not None
            self._count_failure(self.transport, reason, worked=self._landed or not self._lost_writes)
        return link.epoch

    async def close(self) -> None:
        """Close the connection, also one that is still being made."""
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for link in (self._outgoing, self.now):
            if link is not None:
                await link.close()

    def _connect_over(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved here too: those who waited may have gone away

    async def _connect(self) -> None:
        """Where a transport is given up meanwhile, the next best one is tried at once. A connection that still works is
        closed for a better transport. Raises BatonError."""
        if self.now is not None:
            self._outgoing, self.now = self.now, None
            await self._outgoing.close()
        restored = self.offers.restore(self._loop.time())
        if restored:
            names = ",".join(transport.value for transport in restored)
            log.info("transport offered again", peer=self._address.name, transports=names)
        while True:
            offered = self.offers.names
            try:
                await self._connect_once(offered)
                return
            except BatonError:
                if self.offers.names == offered:
                    raise

    async def _connect_once(self, offered: list[str]) -> None:
        self._request.transports[:] = offered
        try:
            with rpc_errors(self._address.endpoint):
                reply: transfer_pb2.ConnectReply = await self._stub.Connect(self._request, timeout=self._call_s_max)
        except BatonError as error:
            if error.reason is Reason.INCARNATION_MISMATCH:
                self._replaced()
            raise
        transport, epoch = TransportName(reply.transport), Epoch(reply.epoch)
        endpoint = DataEndpoint(transport=transport, address=reply.address, secret=reply.secret, epoch=epoch)
        self.num_blocks = reply.num_blocks
        try:
            self.now = await self._make_link(endpoint, self._address.pair, self._events)
        except BatonError as error:
            self._count_failure(transport, error.message, worked=not isinstance(error, DataDoesNotPass))
            raise
        if transport is not self.transport:
            self.speed.restart(self._loop.time())
        self.transport, self.epoch = transport, epoch
        self._landed = self._lost_writes = False
        self._note_rejected(reply)
        log.info("data link", peer=self._address.name, transport=reply.transport, epoch=reply.epoch)

    def _note_rejected(self, reply: transfer_pb2.ConnectReply) -> None:
        """Log a fall back once, and again when it, or its reason, changes."""
        before, given_up = self.rejected_transports, {transport.value for transport in self.offers.given_up}
        self.rejected_transports = [better for better in reply.rejected_transports if better.transport not in given_up]
        if self.rejected_transports and self.rejected_transports != before:
            expected = all(better.why in NOBODY_CAN_MEND for better in self.rejected_transports)
            (log.info if expected else log.warning)(
                "a better transport is not used",
                peer=self._address.name,
                transport=reply.transport,
                instead_of="; ".join(f"{better.transport} ({better.why})" for better in self.rejected_transports),
            )

    def _count_failure(self, transport: TransportName, reason: str, *, worked: bool = True) -> None:
        self.failures += 1
        facts: dict[str, Any] = {"peer": self._address.name, "transport": transport.value, "reason": reason}
        if not worked:
            log.warning("link lost before anything arrived", **facts)
        if self.offers.failed(transport, self._loop.time(), worked=worked):
            log.warning("transport given up", **facts, left=",".join(self.offers.names))


class LivenessStream:
    """The writer's end of one long call to a receiver, by which each watches the other.

    Made on a running loop, ended by `close`. `lost` is called each time the receiver is believed lost, from which it
    may come back; `gone` when another process is at its address.
    """

    def __init__(
        self,
        *,
        address: PeerAddress,
        stub: transfer_pb2_grpc.TransferStub,
        lost: Callable[[], None],
        gone: Callable[[], None],
        liveness: LivenessConfig,
        clock: Clock,
    ) -> None:
        self.out_of_reach = False
        """Believed lost, and not reached again since."""
        self._name = address.name
        self._stub = stub
        header = common_pb2.Header(sender=address.pair.writer, receiver=address.pair.receiver)
        self._request = transfer_pb2.LivenessRequest(header=header)
        self._lost = lost
        self._gone = gone
        self._reach = Reach(address.endpoint, liveness, clock)
        self._clock = clock
        self._pause_s = liveness.reconnect_ms_max / 1000
        self._stays_s = liveness.failed_stream_ms_max / 1000
        self._task = asyncio.create_task(self._run(), name=f"liveness-{address.name}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                if await self._replaced():
                    self._gone()
                    return
                lost = await self._reach.lost()
                why = self._reach.why
            except Exception as error:
                log.error("watching a receiver failed", peer=self._name, exc_info=error)
                lost, why = True, "watching it failed"
            if lost:
                if not self.out_of_reach:
                    self.out_of_reach = True
                    log.warning("receiver lost", peer=self._name, why=why)
                    try:
                        self._lost()
                    except Exception as error:
                        log.error("giving up the handoffs to a receiver failed", peer=self._name, exc_info=error)
                await self._clock.sleep_s(max(self._pause_s, self._reach.doubt_pause_s))

    async def _replaced(self) -> bool:
        """One call, to its end. True: another process is at the receiver's address. The one answer says that the call
        was taken; what counts is whether it stays."""
        staying: asyncio.TimerHandle | None = None
        try:
            with rpc_errors(self._name):
                call = self._stub.Liveness(self._request)
                await self._reach.connected(call)
                if self._reach.doubted:
                    staying = asyncio.get_running_loop().call_later(self._stays_s, self._stayed)
                async for _ in call:
                    if not self._reach.doubted:
                        self._reached()
        except BatonError as error:
            return error.reason is Reason.INCARNATION_MISMATCH
        finally:
            if staying is not None:
                staying.cancel()
        return False

    def _stayed(self) -> None:
        """The call that a doubted receiver has taken is still there."""
        self._reach.heard()
        self._reached()

    def _reached(self) -> None:
        if self.out_of_reach:
            self.out_of_reach = False
            log.info("receiver reached again", peer=self._name)
