"""How work requests get to the device: by C, from arrays; or through pyverbs, one object each, where C is not.

Shape suffix: W = one entry per write.
"""

from __future__ import annotations

import ctypes
import select
import socket
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from baton.log import get_log
from baton.native import load
from kvtransfer.transports.rdma_verbs import Verbs, channel_fd, cq_address, qp_address

log = get_log("rdma")

SOURCE = Path(__file__).parents[1] / "native" / "rdma_poster.c"
IMMEDIATE_MASK = 0xFFFF_FFFF
_PLAIN_POLL_MAX = 64
_CHANNEL_READABLE = 1


class DeviceBroken(Exception):
    """The driver refused a call: the queue pair, or the device, is of no use any more."""


class Poster(Protocol):
    """Posts on the queue pairs of one link, and takes their completions. One thread."""

    name: str
    chain_wrs_max: int

    def post_writes(self, qp: int, src_W: np.ndarray, dst_W: np.ndarray, nbytes_W: np.ndarray, wr_id: int) -> None:
        """Post 1 to `chain_wrs_max` writes as one chain; its last completes as `wr_id`. Raises DeviceBroken."""
        ...

    def post_seal(self, qp: int, number: int, wr_id: int) -> None:
        """Post an empty write with `number` as its immediate. Raises DeviceBroken."""
        ...

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:
        """(wr_id, status) of completions, and microseconds waited. Status 0 is success.

        Polls for `spin_us`, then sleeps until a completion comes or `wake_fd` is readable. May come back empty.
        Raises DeviceBroken.
        """
        ...


class Addresses:
    """Where both regions are, as the device addresses them, with their keys."""

    __slots__ = ("dst_base", "lkey", "rkey", "src_base")

    def __init__(self, *, src_base: int, lkey: int, dst_base: int, rkey: int) -> None:
        self.src_base, self.lkey, self.dst_base, self.rkey = src_base, lkey, dst_base, rkey


class RdmaLibrary:
    """`rdma_poster.c`, with its types."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((f"baton_rdma_{name}", handle))

        p, u32, u64, i32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
        self.chain_wrs_max = int(function("chain_wrs_max", i32)())
        self.poll_max = int(function("poll_max", i32)())
        self.qp_num = function("qp_num", u32, p)
        self.cqe = function("cqe", i32, p)
        self.post_writes = function("post_writes", i32, p, u64, u32, u64, u32, p, p, p, i32, u64)
        self.post_seal = function("post_seal", i32, p, u64, u32, u32, u64)
        self.wait = function("wait", i32, p, i32, i32, i32, i32, p, p, p, p)
        self.null_bytes = function("null_bytes", ctypes.c_size_t)
        self.null_init = function("null_init", None, p, p, i32, u32)
        self.null_qp = function("null_qp", p, p)
        self.null_cq = function("null_cq", p, p)
        self.null_logged = function("null_logged", i32, p)


@cache
def rdma_library() -> RdmaLibrary | None:
    """None: it could not be built, which is logged once. The first call may take a second."""
    library = load(SOURCE)
    if library.handle is None:
        log.warning("RDMA requests are posted one by one: no native library", reason=library.status)
        return None
    return RdmaLibrary(library.handle)


def posts_by() -> str:
    """How work requests are posted in this process, for people."""
    return "pyverbs, one by one: no native library" if rdma_library() is None else NativePoster.name


class NativePoster:
    """By C: a chain is one call, without the interpreter's lock."""

    name = "native"

    def __init__(self, library: RdmaLibrary, *, qps: list[int], cq: int, channel_fd: int, addresses: Addresses) -> None:
        """`qps` and `cq` are where the structures of libibverbs are; they outlive the poster."""
        self._library = library
        self._qps = qps
        self._cq = cq
        self._channel_fd = channel_fd
        self._at = addresses
        self.chain_wrs_max = library.chain_wrs_max
        self._wr_ids = np.zeros(library.poll_max, np.uint64)
        self._statuses = np.zeros(library.poll_max, np.uint32)
        self._events = ctypes.c_int(0)
        self._waited_us = ctypes.c_int64(0)
        self.channel_readable = False

    def post_writes(self, qp: int, src_W: np.ndarray, dst_W: np.ndarray, nbytes_W: np.ndarray, wr_id: int) -> None:
        assert src_W.flags.c_contiguous and dst_W.flags.c_contiguous and nbytes_W.flags.c_contiguous
        at = self._at
        error = self._library.post_writes(
            self._qps[qp], at.src_base, at.lkey, at.dst_base, at.rkey,
            src_W.ctypes.data, dst_W.ctypes.data, nbytes_W.ctypes.data, len(src_W), wr_id,
        )  # fmt: skip
        if error:
            raise DeviceBroken(f"posting failed with errno {error}")

    def post_seal(self, qp: int, number: int, wr_id: int) -> None:
        immediate_be = socket.htonl(number & IMMEDIATE_MASK)
        error = self._library.post_seal(self._qps[qp], self._at.dst_base, self._at.rkey, immediate_be, wr_id)
        if error:
            raise DeviceBroken(f"posting failed with errno {error}")

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:
        found = self._library.wait(
            self._cq, self._channel_fd, wake_fd, spin_us, timeout_ms,
            self._wr_ids.ctypes.data, self._statuses.ctypes.data,
            ctypes.addressof(self._events), ctypes.addressof(self._waited_us),
        )  # fmt: skip
        if found < 0:
            raise DeviceBroken(f"polling failed with errno {-found}")
        self.channel_readable = bool(self._events.value & _CHANNEL_READABLE)
        pairs = zip(self._wr_ids[:found].tolist(), self._statuses[:found].tolist(), strict=True)
        return list(pairs), self._waited_us.value


class VerbsNativePoster(NativePoster):
    """On real queue pairs: takes the events of the completion channel too."""

    def __init__(
        self, library: RdmaLibrary, verbs: Verbs, *, qps: list[Any], cq: Any, channel: Any, addresses: Addresses
    ) -> None:
        """Raises LayoutUnknown."""
        super().__init__(
            library,
            qps=[qp_address(qp) for qp in qps],
            cq=cq_address(cq),
            channel_fd=channel_fd(channel),
            addresses=addresses,
        )
        assert all(library.qp_num(at) == qp.qp_num for at, qp in zip(self._qps, qps, strict=True))
        assert library.cqe(self._cq) == cq.cqe
        self._verbs = verbs
        self._verbs_cq, self._verbs_channel = cq, channel

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:
        found = super().wait(wake_fd, spin_us, timeout_ms)
        if self.channel_readable:
            try:
                take_event(self._verbs_channel, self._verbs_cq)
            except self._verbs.error as error:
                raise DeviceBroken(str(error)) from error
        return found


class PlainPoster:
    """Through pyverbs: an object for each request, thousands a second. Where the native library could not be built."""

    name = "pyverbs"
    chain_wrs_max = 32

    def __init__(self, verbs: Verbs, *, qps: list[Any], cq: Any, channel: Any, addresses: Addresses) -> None:
        self._verbs = verbs
        self._qps = qps
        self._cq, self._channel = cq, channel
        self._channel_fd = channel_fd(channel)
        self._at = addresses

    def post_writes(self, qp: int, src_W: np.ndarray, dst_W: np.ndarray, nbytes_W: np.ndarray, wr_id: int) -> None:
        enums, at = self._verbs.enums, self._at
        # A request points to the next one in C alone: all have to be kept until they are posted.
        requests: list[Any] = []
        for src, dst, nbytes in zip(src_W.tolist(), dst_W.tolist(), nbytes_W.tolist(), strict=True):
            sge = self._verbs.wr.SGE(at.src_base + src, nbytes, at.lkey)
            request = self._verbs.wr.SendWR(
                wr_id=wr_id, opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge], send_flags=0
            )
            request.set_wr_rdma(at.rkey, at.dst_base + dst)
            if requests:
                requests[-1].next_wr = request
            requests.append(request)
        requests[-1].send_flags = enums.IBV_SEND_SIGNALED
        self._post(qp, requests[0])

    def post_seal(self, qp: int, number: int, wr_id: int) -> None:
        enums = self._verbs.enums
        request = self._verbs.wr.SendWR(
            wr_id=wr_id,
            opcode=enums.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            imm_data=socket.htonl(number & IMMEDIATE_MASK),
            sg=[self._verbs.wr.SGE(self._at.src_base, 0, self._at.lkey)],
            send_flags=enums.IBV_SEND_SIGNALED,
        )
        # An immediate takes no bytes with it; pyverbs insists on some.
        request.num_sge = 0
        request.set_wr_rdma(self._at.rkey, self._at.dst_base)
        self._post(qp, request)

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:  # noqa: ARG002
        """As promised, but without polling first; reports the whole timeout as waited unless something was there."""
        try:
            found = self._take()
            if not found:
                self._cq.req_notify()
                found = self._take()
            if found:
                return found, 0
            poll = select.poll()
            poll.register(self._channel_fd, select.POLLIN)
            poll.register(wake_fd, select.POLLIN)
            if any(fd == self._channel_fd for fd, _ in poll.poll(timeout_ms)):
                take_event(self._channel, self._cq)
            return self._take(), timeout_ms * 1000
        except self._verbs.error as error:
            raise DeviceBroken(str(error)) from error

    def _take(self) -> list[tuple[int, int]]:
        _, completions = self._cq.poll(_PLAIN_POLL_MAX)
        return [(completion.wr_id, completion.status) for completion in completions]

    def _post(self, qp: int, request: Any) -> None:
        try:
            self._qps[qp].post_send(request)
        except self._verbs.error as error:
            raise DeviceBroken(str(error)) from error


def take_event(channel: Any, cq: Any) -> None:
    """Take one event off a readable completion channel."""
    channel.get_cq_event(cq)
    cq.ack_events(1)
