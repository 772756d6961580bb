"""Transport over what UCX finds (RoCE, InfiniBand, EFA, tcp, shared memory), through NIXL's Python package
(github.com/ai-dynamo/nixl), which is imported when the first agent is made.

Optional, and never chosen unless `transports` names it. A seal is a SEAL on the control channel and a NIXL notification
with its number; SEALED says that both have come. The BYE's `drained` says that everything that was handed to UCX has
completed, so that no write is in doubt.

NIXL has one UCX worker for all peers of an agent. Hence each link has an agent, with which it registers the whole
region: once that is destroyed, a receiving worker writes nothing more into the region, and a writing one reads nothing
more of its source.

Evidence (I3). Where the receiving worker itself moves every byte into the region (`MOVED_BY_THE_RECEIVER`), its
destruction is proof: a writer that is dead, stopped or cut off is fenced at once, and a link that ends without BYE is
itself the reason for a fence. With every other UCX transport (cma, verbs, all that UCX may choose by itself) this is
not proved. There it also takes the writer: its BYE, sent after all its posts have completed and its agent is destroyed,
or, on the same host, the proof of its death by its pidfd. Without either the pair's blocks stay quarantined.

On the writer's side a thread of the link's own hands writes to NIXL and looks for their completion. A batch is complete
when UCX has flushed all its writes, or when the link is over and its agent is destroyed: then nothing reads the source
any more (I1). NIXL offers nothing to sleep on, so the thread looks again after ever longer pauses.

Shape suffix: W = one entry per write.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from baton.log import get_log
from kvtransfer.link import host_identity
from kvtransfer.region import Region
from kvtransfer.transport import ReceiverEvents, TransportName, WriteOps
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import (
    ChannelState,
    Refusal,
    RefusalReason,
    SealGather,
    WriterChannel,
    connect_errors,
)
from kvtransfer.transports.rdma_ports import find_ports
from kvtransfer.transports.receiver_port import Connection, Evidence, ListeningPort, PortLimits
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.writer_link import ChainLimits, ChainLink, LinkParts, SealPart

log = get_log("ucx")

METADATA_BYTES_MAX: Final = 1 << 16
_TRIAL_BYTES: Final = 1 << 12
MODULES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""NIXL's wheels. They differ in the GPUs they know, which host memory does not need."""
MOVED_BY_THE_RECEIVER = frozenset({"tcp", "self"})
"""UCX transports whose receiving worker itself moves each byte into the region, in its progress calls. Tests show it.
With others (cma, xpmem, verbs) the writer or a device does it."""
PREPARED_MAX = 4
"""Record sizes for which a link keeps lists of the places in both regions. Writes then name places by index."""
PREPARED_WRITES_MIN = 16
"""Fewer writes of one size are not worth such a list."""
PLACES_MAX = 1 << 24
"""In one list."""
_SETTINGS = "MAX_RMA_RAILS=1,IB_PCI_RELAXED_ORDERING=n"
"""The seal's notification must not overtake data: one rail for both, and strict order on the bus."""
PROGRESS_US = 5_000
"""The longest sleep of NIXL's progress thread. What comes wakes it. NIXL's default, 0, burns a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxHello(wire.Packed):
    """`host` is the bytes of `link.host_identity`; `pid` is of use only where it is the same."""

    LAYOUT = struct.Struct("<16sI")
    host: bytes
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxWelcome(wire.Packed):
    """Where the receiver's region is, and the metadata of its agent, which a writer needs to write into it."""

    LAYOUT = struct.Struct("<QQ")
    HAS_PAYLOAD = True
    region_base: int
    region_nbytes: int
    metadata: bytes

    def __post_init__(self) -> None:
        if not self.metadata:
            raise wire.MalformedMessage("a WELCOME without metadata")


CODEC: Final = wire.Codec(TransportName.UCX, payload_bytes_max=UcxWelcome.LAYOUT.size + METADATA_BYTES_MAX)


class UcxUnavailable(Exception):
    """ucx does not work here: what is missing, and what to do."""


class UcxFailed(Exception):
    """A call to NIXL failed: the link is of no use any more."""


def installed() -> str | None:
    """The name of NIXL's package, without importing it."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def load_nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """Import NIXL: its bindings, and the classes of its errors, which have no common base. The Python around the
    bindings cannot set how long the progress thread sleeps. Gives defaults to the environment that NIXL reads.

    Raises UcxUnavailable.
    """
    name = installed()
    if name is None:
        raise UcxUnavailable("NIXL is not installed: pip install 'baton-serve[ucx]'")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # else it writes to stdout, which may have a reader
    if not find_ports():
        # Without RDMA ports verbs are of no use, and loading the verbs libraries of both NIXL's wheel and the
        # distribution can end a process with a segmentation fault (1.5.1).
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        bindings = importlib.import_module(f"{name}._bindings")
    except (ImportError, OSError) as error:
        raise UcxUnavailable(f"{name} is installed, and cannot be imported: {error}") from error
    found = [value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)]
    return bindings, (*found, RuntimeError)


def ucx_transports(configured: str) -> str:
    """The UCX transports that are used: UCX_TLS wins where it is set, as in every program with UCX."""
    return os.environ.get("UCX_TLS") or configured


def destruction_fences(transports: str) -> bool:
    """For each of these UCX transports destroying the receiving worker proves that no byte lands any more."""
    return set(transports.split(",")) <= MOVED_BY_THE_RECEIVER


class UcxAgent:
    """One link's agent, with the region registered. Every call from one thread at a time; `destroy` comes last."""

    def __init__(self, region_U8: np.ndarray, name: str, transports: str) -> None:
        """Takes some tenths of a second at first, then about 0.1 s. Keeps `region_U8` until `destroy`.

        Raises:
            UcxUnavailable: no NIXL, or UCX has nothing for these transports.
        """
        self._lib, self._errors = load_nixl()
        self._region_U8: np.ndarray | None = region_U8
        self.base, self.nbytes = region_U8.ctypes.data, region_U8.nbytes
        self._agent: Any = None
        self._peer: Any = None
        self._peer_base = self.peer_nbytes = 0
        self._transfers: dict[int, int] = {}
        self._prepared: OrderedDict[int, tuple[int, int]] = OrderedDict()
        config = self._lib.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        try:
            self._agent = self._lib.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": f"TLS={transports},{_SETTINGS}"})
            self._registered = self._lib.nixlRegDList(self._lib.DRAM_SEG, [(self.base, self.nbytes, 0, "")])
            self._agent.registerMem(self._registered, [])
            metadata: bytes = self._agent.getLocalMD()
        except self._errors as error:
            self._agent = None
            raise UcxUnavailable(f"UCX cannot be used with the transports {transports!r}: {error}") from error
        self.welcome = UcxWelcome(region_base=self.base, region_nbytes=self.nbytes, metadata=metadata)

    # Writer.

    def load_peer(self, welcome: UcxWelcome) -> None:
        """Be ready to write to the region of the agent whose `welcome` this is. Raises UcxFailed."""
        with self._or_failed("no connection"):
            self._peer = self._agent.loadRemoteMD(welcome.metadata)
            self._agent.makeConnection(self._peer, [])
        self._peer_base, self.peer_nbytes = welcome.region_base, welcome.region_nbytes

    def post(self, ops: WriteOps, number: int) -> None:
        """Begin the writes, none of them empty, all inside both regions. Raises UcxFailed."""
        with self._or_failed("a write was not taken"):
            self._transfers[number] = transfer = self._make(ops)
            state = self._agent.postXferReq(transfer, b"")
        self._check(state)

    def completed(self) -> list[int]:
        """Numbers of the posts that have landed since the last call; UCX has flushed them. Raises UcxFailed."""
        done = []
        with self._or_failed("a write failed"):
            for number, transfer in list(self._transfers.items()):
                if self._check(self._agent.getXferStatus(transfer)):
                    self._agent.releaseXferReq(transfer)
                    del self._transfers[number]
                    done.append(number)
        return done

    def notify(self, number: int) -> None:
        """Behind all that has landed on the way that the data took. Raises UcxFailed."""
        with self._or_failed("a seal was not sent"):
            self._agent.genNotif(self._peer, number.to_bytes(8, "little"))

    # Receiver.

    def notified(self) -> list[int]:
        """Numbers that writers have sent since the last call. Cheap. Raises UcxFailed."""
        with self._or_failed("no seals can be received"):
            received: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        return [int.from_bytes(message, "little") for messages in received.values() for message in messages]

    # Both.

    def destroy(self) -> None:
        """When this returns UCX does nothing more with the region, whatever the peer does. Takes some hundredths of a
        second, with the interpreter's lock held. Idempotent."""
        if self._agent is None:
            return
        # What cannot be cancelled or taken back goes with the worker.
        for transfer in self._transfers.values():
            with contextlib.suppress(*self._errors):
                self._agent.releaseXferReq(transfer)
        for places in self._prepared.values():
            self._release(places)
        with contextlib.suppress(*self._errors):
            self._agent.deregisterMem(self._registered, [])
        self._transfers.clear()
        self._prepared.clear()
        gone = weakref.ref(self._agent)
        self._agent = None
        assert gone() is None, "somebody still holds the agent: its worker lives"
        self._region_U8 = None

    @contextlib.contextmanager
    def _or_failed(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise UcxFailed(f"{what}: {error}") from error

    def _check(self, state: Any) -> bool:
        """True if it has landed."""
        if state not in (self._lib.NIXL_SUCCESS, self._lib.NIXL_IN_PROG):
            raise UcxFailed(f"a write failed: {state}")
        return bool(state == self._lib.NIXL_SUCCESS)

    def _make(self, ops: WriteOps) -> int:
        """A transfer, not begun."""
        src_W, dst_W, nbytes_W = ops.src, ops.dst, ops.nbytes
        unit = int(nbytes_W[0])
        if (nbytes_W == unit).all() and not (src_W % unit).any() and not (dst_W % unit).any():
            places = self._places(unit, len(src_W))
            if places is not None:
                at = [(offsets_W // unit).astype(np.int32) for offsets_W in (src_W, dst_W)]
                return int(
                    self._agent.makeXferReq(self._lib.NIXL_WRITE, places[0], at[0], places[1], at[1], b"", [], False)
                )
        lists = []
        for base, at_W in ((self.base, src_W), (self._peer_base, dst_W)):
            rows = np.stack([at_W + base, nbytes_W, np.zeros_like(at_W)], axis=1).astype(np.uint64)
            lists.append(self._lib.nixlXferDList(self._lib.DRAM_SEG, rows))
        return int(self._agent.createXferReq(self._lib.NIXL_WRITE, lists[0], lists[1], self._peer, b"", []))

    def _places(self, unit: int, writes: int) -> tuple[int, int] | None:
        """Lists of both regions cut into places of `unit` bytes; None: not worth it."""
        if unit in self._prepared:
            self._prepared.move_to_end(unit)
            return self._prepared[unit]
        if writes < PREPARED_WRITES_MIN or max(self.nbytes, self.peer_nbytes) // unit > PLACES_MAX:
            return None
        if len(self._prepared) >= PREPARED_MAX:
            self._release(self._prepared.popitem(last=False)[1])
        local, remote = (
            int(self._agent.prepXferDlist(whose, self._lib.DRAM_SEG, _strided(base, unit, nbytes // unit), []))
            for whose, base, nbytes in (
                (self._lib.NIXL_INIT_AGENT, self.base, self.nbytes),
                (self._peer, self._peer_base, self.peer_nbytes),
            )
        )
        self._prepared[unit] = (local, remote)
        return local, remote

    def _release(self, places: tuple[int, int]) -> None:
        for side in places:
            with contextlib.suppress(*self._errors):
                self._agent.releasedDlistH(side)


def _strided(base: int, unit: int, count: int) -> np.ndarray:
    """NIXL's row for `count` places of `unit` bytes, one behind the other: address, length, device, stride, count."""
    return np.array([[base, unit, 0, unit, count]], np.uint64)


def try_ucx(tls: str) -> str:
    """Make an agent and destroy it: the UCX transports that are used. Takes up to a second. Raises UcxUnavailable."""
    UcxAgent(np.zeros(_TRIAL_BYTES, np.uint8), "trial", tls).destroy()
    return ucx_transports(tls)


UCX_PORT_LIMITS: Final = PortLimits(handshake_ms_max=10_000)
SEALS_PARTIAL_MAX: Final = 512
"""Seals of one connection of which only a part has come."""
SEAL_POLL_US: Final = 200
"""Pause between two looks for the rest of a seal."""


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection(Connection):
    """It may write from before its WELCOME until its agent is destroyed *and* there is evidence."""

    poll_timer: asyncio.TimerHandle | None = None
    agent: UcxAgent | None = None
    work: asyncio.Task[None] | None = None
    """Making its agent, or destroying it."""
    evidence: Evidence | None = None
    """Once it is there the agent is destroyed, and then the evidence counts."""

    def cancel_poll(self) -> None:
        if self.poll_timer is not None:
            self.poll_timer.cancel()


class UcxReceiverPort(ListeningPort[UcxConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). A pool's thread makes and destroys
    agents."""

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        region: Region,
        events: ReceiverEvents,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        config: UcxConfig | None = None,
        limits: PortLimits = UCX_PORT_LIMITS,
    ) -> None:
        """See `ListeningPort`. `region` is the caller's and outlives the port.

        Raises OSError also where the host's identity cannot be read.
        """
        self._host = bytes.fromhex(host_identity())
        self._config = config or UcxConfig()
        self._region = region
        self._ucx_transports = ucx_transports(self._config.tls)
        self._fences_alone = destruction_fences(self._ucx_transports)
        super().__init__(UcxConnection, listen=listen, advertise_host=advertise_host, events=events, limits=limits)

    async def close(self) -> None:
        """See `BasePort.close`. Returns when all agents are destroyed."""
        await super().close()
        while works := [c.work for c in self._connections.values() if c.work is not None]:
            await asyncio.wait(works)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "ucx_transports": self._ucx_transports,
            "fence": "by the receiver alone" if self._fences_alone else "needs the writer's BYE, or its death",
            "connections_unproved": sum(c.channel.opened and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "destroy_failed")},
        }

    # Handshake.

    def _identify(self, connection: UcxConnection) -> None:
        hello = UcxHello.decode(connection.hello.payload)
        if not self._fences_alone and hello.host == self._host:
            connection.identify(hello.pid)

    def _prepare(self, connection: UcxConnection) -> None:
        connection.work = self._loop.create_task(self._make_agent(connection))

    async def _make_agent(self, connection: UcxConnection) -> None:
        name = f"receiver-{connection.number}-{connection.hello.link:x}"
        event: wire.Event
        try:
            agent = await self._loop.run_in_executor(None, UcxAgent, self._region.array_U8, name, self._config.tls)
        except UcxUnavailable as error:
            log.warning("no agent for a writer", reason=str(error))
            event = Refusal(RefusalReason.UCX)
        else:
            connection.agent, event = agent, wire.Prepared(payload=agent.welcome.encode())
        finally:
            connection.work = None
        if connection.sock is None:
            self._drop(connection)
        else:
            self._handle(connection, event)

    def _opened(self, connection: UcxConnection) -> None:
        connection.seals = SealGather(epoch=connection.epoch, ways=1, seals_max=SEALS_PARTIAL_MAX)

    # What writers send.

    def _left(self, connection: UcxConnection, *, drained: bool) -> None:
        self._take_notifications(connection)
        # On the same host an agent that is destroyed has no put of its own under way. Elsewhere the network may.
        if connection.evidence is None and (drained or connection.pidfd is not None):
            self._stopped_writing(connection, Evidence.ACKNOWLEDGED)
        elif connection.evidence is None:
            self._lost(connection)

    def _lost(self, connection: UcxConnection) -> None:
        """Without a BYE that counts. Whole seals are delivered first."""
        self._take_notifications(connection)
        if self._fences_alone and connection.evidence is None:
            self._stopped_writing(connection, Evidence.WORKER)
            self._fence_own(connection)
        else:
            # It may write on, until its pidfd, if there is one, proves its death.
            connection.close_sock(self._loop)

    def _deliver(self, connection: UcxConnection, message: wire.SealSent | wire.LateBye) -> None:
        super()._deliver(connection, message)
        self._take_notifications(connection)

    def _take_notifications(self, connection: UcxConnection) -> None:
        """Look for the other half of seals; come back soon while some wait for it."""
        connection.cancel_poll()
        if connection.agent is None or connection.evidence or connection.channel.state is ChannelState.BROKEN:
            return
        assert connection.seals is not None
        try:
            for number in connection.agent.notified():
                self._report(connection, connection.seals.number_came(number))
        except Refusal as refusal:
            self._handle(connection, refusal)
        except UcxFailed as error:
            log.warning("ucx link ended", reason=str(error))
            self._handle(connection, Refusal(RefusalReason.UCX))
        if connection.seals.waiting and connection.sock is not None:
            connection.poll_timer = self._loop.call_later(SEAL_POLL_US / 1e6, self._take_notifications, connection)

    # Ends.

    def _broken(self, connection: UcxConnection, reason: RefusalReason) -> None:
        """Its pair is fenced. Where its BYE is needed the port goes on reading."""
        del reason  # the base has counted it
        self._fenced(connection)
        self._fence_own(connection)

    def _fenced(self, connection: UcxConnection) -> None:
        if self._fences_alone and connection.evidence is None:
            self._stopped_writing(connection, Evidence.WORKER)

    def _drop(self, connection: UcxConnection) -> None:
        connection.close(self._loop)
        connection.cancel_poll()
        if connection.work is not None:
            return  # it comes back here, or is on its way out already
        if connection.agent is None:
            self._connections.pop(connection.number, None)
            return
        connection.work = self._loop.create_task(self._destroy(connection))

    def _stopped_writing(self, connection: UcxConnection, evidence: Evidence) -> None:
        """It counts as one that may write until its agent is destroyed."""
        assert connection.channel.opened and connection.evidence is None, connection
        connection.evidence = evidence
        self._drop(connection)

    async def _destroy(self, connection: UcxConnection) -> None:
        assert connection.agent is not None
        destroyed = True
        try:
            await self._loop.run_in_executor(None, connection.agent.destroy)
        except AssertionError as error:
            # A bug of ours: its worker may live. There is no evidence, and never will be.
            destroyed = False
            self._counts["destroy_failed"] += 1
            log.error("a fence has no evidence", reason=str(error))
        connection.agent = connection.work = None
        if destroyed or self._closed:
            self._connections.pop(connection.number, None)
        if destroyed and connection.channel.opened and not self._closed:
            assert connection.evidence is not None
            self._proved(connection, connection.evidence)


UCX_LINK_LIMITS: Final = ChainLimits(
    connect_ms_max=10_000,
    chain_wrs_max=4096,
    chain_bytes_max=16 << 20,
    wr_bytes_max=1 << 30,
    on_the_way_bytes_max=64 << 20,
)
"""A chain is what is handed to NIXL at once."""
SEND_WRS_MAX: Final = 1 << 30
"""NIXL takes any number of writes."""
SEALS_MAX: Final = 256
"""Seals on their way that the receiver has not confirmed."""
POLL_US_MIN: Final = 50
"""Pause between two looks at what is on its way, at first."""
POLL_US_MAX: Final = 1000
"""The longest pause, while nothing completes."""
SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""


async def _until_over(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait even where the caller is cancelled, since a thread cannot be stopped in a call. Returns the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


class UcxWriterLink(ChainLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    `close`, FENCE and REFUSED let what is on its way arrive. EOF, a failed write and a deadline destroy the agent at
    once.
    """

    transport: ClassVar[TransportName] = TransportName.UCX
    codec: ClassVar[wire.Codec] = CODEC
    ends_in_order = True
    failed = UcxFailed

    def __init__(
        self, channel: WriterChannel, parts: LinkParts, limits: ChainLimits, *, agent: UcxAgent, config: UcxConfig
    ) -> None:
        """Takes over what is connected. Use `connect`."""
        self._agent, self._config = agent, config
        self._destroyed = False
        self._awake = threading.Event()
        super().__init__(
            channel,
            parts,
            limits,
            src_nbytes=agent.nbytes,
            dst_nbytes=agent.peer_nbytes,
            qps=1,
            send_wrs_max=SEND_WRS_MAX,
            seals_max=SEALS_MAX,
        )

    @classmethod
    async def connect(
        cls,
        parts: LinkParts,
        source_region_U8: np.ndarray,
        config: UcxConfig | None = None,
        limits: ChainLimits = UCX_LINK_LIMITS,
    ) -> UcxWriterLink:
        """Connect, prove the pair's secret, register the source for this link, which releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, no NIXL, or not done within `connect_ms_max`.
        """
        config = config or UcxConfig()
        endpoint, loop = parts.endpoint, parts.loop
        link = int.from_bytes(os.urandom(8))
        own = UcxHello(host=bytes.fromhex(host_identity()), pid=os.getpid())
        hello = wire.Hello(pair=parts.pair, epoch=endpoint.epoch, link=link, payload=own.encode())
        making = loop.run_in_executor(None, UcxAgent, source_region_U8, f"writer-{link:x}", config.tls)
        channel: WriterChannel | None = None
        with connect_errors(endpoint.address, limits.connect_ms_max, UcxFailed, UcxUnavailable):
            try:
                async with asyncio.timeout(limits.connect_ms_max / 1000):
                    channel = await WriterChannel.open(endpoint.address, loop, CODEC, address=endpoint.address)
                    welcome = UcxWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
                    agent = await asyncio.shield(making)
                loading = loop.run_in_executor(None, agent.load_peer, welcome)
                if cancelled := await _until_over(loading):
                    raise cancelled
                loading.result()
                return cls(channel, parts, limits, agent=agent, config=config)
            except BaseException as error:
                cancelled = await _until_over(making)
                if making.exception() is None:
                    cancelled = await _until_over(loop.run_in_executor(None, making.result().destroy)) or cancelled
                if channel is not None:
                    channel.leave(wire.Bye(epoch=endpoint.epoch))
                if cancelled is not None:
                    raise cancelled from error
                raise

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {**super().describe(), "ucx_transports": ucx_transports(self._config.tls)}

    def _wake(self) -> None:
        self._awake.set()

    # Posting thread.

    def _post_all(self) -> None:
        pause_us = POLL_US_MIN
        try:
            while not self._cut and not (self._ending and self._lanes.drained and not self._seals_out):
                self._awake.clear()
                moved = self._post_what_fits()
                for number in self._agent.completed():
                    self._lanes.completed(number)
                    moved = True
                pause_us = POLL_US_MIN if moved else min(2 * pause_us, POLL_US_MAX)
                self._awake.wait(pause_us / 1e6 if self._lanes.on_the_way else SLEEP_MS_MAX / 1000)
        finally:
            self._agent.destroy()
            self._destroyed = True

    def _post_what_fits(self) -> bool:
        posted = False
        while not self._cut and (taken := self._lanes.take()) is not None:
            posted = True
            if isinstance(taken, SealPart):
                self._agent.notify(taken.seal)
                self._lanes.completed(taken.number)
            else:
                self._agent.post(taken.part.ops, taken.number)
        return posted

    # Control thread.

    def _handle(self, message: wire.Message) -> None:
        if isinstance(message, (wire.Fence, wire.Refused)):
            # No seal is confirmed any more. The receiver may need our BYE, which says that all has arrived.
            self._seals_out.clear()
        super()._handle(message)

    def _thread_over(self, failure: str) -> None:
        del failure
        if not self._destroyed:
            # A bug of ours, raised in the thread. Its worker may still read the source: no completion, and no BYE.
            log.error("ucx link keeps its source blocks", peer=self._address)
            self._hang_up(None)
            self._finish()
            return
        drained = not self._queue.on_the_way  # else some are in doubt, and the queue reports each grant
        self._lanes.lose()
        self._hang_up(wire.Bye(epoch=self._epoch, drained=drained))
        self._finish_soon()
