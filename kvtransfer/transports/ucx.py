"""Transport over what UCX finds (RoCE, InfiniBand, EFA, tcp, shared memory), through NIXL's Python package
(github.com/ai-dynamo/nixl), which is imported when the first agent is made.

Optional, and never chosen unless `transports` names it. `ucx_receiver` has the port, `ucx_writer` the link. A seal is a
SEAL on the control channel and a NIXL notification with its number; SEALED says that both have come. The BYE's
`drained` says that everything that was handed to UCX has completed, so that no write is in doubt.

NIXL has one UCX worker for all peers of an agent. Hence each link has an agent, with which it registers the whole
region: once that is destroyed, a receiving worker writes nothing more into the region, and a writing one reads nothing
more of its source.

Shape suffix: W = one entry per write.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import struct
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.transport import TransportName, WriteOps
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.rdma_ports import find_ports

log = get_log("ucx")

HOST_BYTES: Final = 16
METADATA_BYTES_MAX: Final = 1 << 16
_TRIAL_BYTES: Final = 1 << 12
_HELLO: Final = struct.Struct(f"<{HOST_BYTES}sI")
_WELCOME: Final = struct.Struct("<QQ")
CODEC: Final = wire.Codec(TransportName.UCX, payload_bytes_max=_WELCOME.size + METADATA_BYTES_MAX)
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
class UcxHello:
    """`host` is `link.host_identity`, 32 hexadecimal digits; `pid` is of use only where it is the same."""

    host: str
    pid: int

    def encode(self) -> bytes:
        raw = bytes.fromhex(self.host)
        assert len(raw) == HOST_BYTES, self.host
        return _HELLO.pack(raw, self.pid)

    @classmethod
    def decode(cls, payload: bytes) -> UcxHello:
        """Raises MalformedMessage."""
        if len(payload) != _HELLO.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a HELLO")
        host, pid = _HELLO.unpack(payload)
        return cls(host=host.hex(), pid=pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxWelcome:
    """Where the receiver's region is, and the metadata of its agent, which a writer needs to write into it."""

    region_base: int
    region_nbytes: int
    metadata: bytes

    def encode(self) -> bytes:
        assert 0 < len(self.metadata) <= METADATA_BYTES_MAX, len(self.metadata)
        return _WELCOME.pack(self.region_base, self.region_nbytes) + self.metadata

    @classmethod
    def decode(cls, payload: bytes) -> UcxWelcome:
        """Raises MalformedMessage."""
        if len(payload) <= _WELCOME.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
        base, nbytes = _WELCOME.unpack_from(payload)
        return cls(region_base=base, region_nbytes=nbytes, metadata=payload[_WELCOME.size :])


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
        except self._errors as error:
            self._agent = None
            raise UcxUnavailable(f"UCX cannot be used with the transports {transports!r}: {error}") from error

    def metadata(self) -> bytes:
        """What a peer needs to write into the region."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    # Writer.

    def load_peer(self, metadata: bytes, base: int, nbytes: int) -> None:
        """Be ready to write to the region of the agent that gave this metadata. Raises UcxFailed."""
        with self._or_failed("no connection"):
            self._peer = self._agent.loadRemoteMD(metadata)
            self._agent.makeConnection(self._peer, [])
        self._peer_base, self.peer_nbytes = base, nbytes

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


def usable(transports: Sequence[TransportName], tls: str) -> bool:
    """Whether ucx is to be offered and can be, which is logged. Called once, at start: NIXL is loaded here.

    Raises:
        InvalidField: ucx alone is to be offered, and it does not work here.
    """
    if TransportName.UCX not in transports:
        return False
    try:
        used = try_ucx(tls)
    except UcxUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has ucx alone, which does not work here: {error}. `baton doctor` says more"
            ) from error
        log.warning("ucx is not offered", reason=str(error))
        return False
    log.info("ucx is offered", ucx_transports=used, fence="own" if destruction_fences(used) else "needs the writer")
    return True
