"""A node's region as it is registered with an RDMA device, in host memory or on a device, and what a device's asks for
behind the card's writes.

Memory of a device is registered as a dma-buf where its driver makes one and the card's takes it: that asks for nothing
but these two. Else by its address, as peer memory, for which a module of the kernel (nvidia_peermem) has to tell the
card's driver what lies there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvtransfer.device.driver import DeviceError
from kvtransfer.device.gpudirect import GpuDirect
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transports.rdma_verbs import Verbs

WHAT_GPUS_NEED = (
    "load the kernel's module nvidia_peermem (modprobe nvidia_peermem), or use NVIDIA's open kernel modules, which "
    "make dma-bufs; a region larger than the GPU's BAR1 (nvidia-smi -q) cannot be registered either way"
)
_WHAT_HOSTS_NEED = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=, or the capability IPC_LOCK)"


class RegistrationRefused(Exception):
    """Memory cannot be registered with this card; the text says why."""


class RegisteredAs(Enum):
    HOST_MEMORY = "host memory"
    DMA_BUF = "device memory as a dma-buf"
    PEER_MEMORY = "device memory as peer memory"


class Keys(NamedTuple):
    """`base`: where the card finds the first byte, under these keys."""

    base: int
    lkey: int
    rkey: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    keys: Keys
    registered_as: RegisteredAs
    why_not_better: str = ""
    """Why not in the way that is tried first; empty: it was that one."""

    @property
    def told(self) -> str:
        """For people."""
        return self.registered_as.value + (f" ({self.why_not_better})" if self.why_not_better else "")


class Registrar(Protocol):
    """Registers memory with one card, and keeps it registered until it is closed itself."""

    def by_address(self, address: int, nbytes: int) -> Keys:
        """Raises RegistrationRefused."""
        ...

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        """`nbytes` from `offset` on; `fd` stays the caller's, who may close it at once. Raises RegistrationRefused."""
        ...


class RdmaRegion(Protocol):
    """What `RdmaMemory` registers; its memory outlives that. Any thread, one at a time."""

    @property
    def nbytes(self) -> int: ...

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """The whole region. `remote_writes`: others may write into it. Raises RegistrationRefused."""
        ...

    def flush(self) -> bool:
        """What a card is known to have written is seen by all that is launched after this. Whether anything had to be
        done for that. Once registered; raises DeviceError."""
        ...


class HostBytes:
    """A region in host memory: the processor sees what a card has written before the card says so."""

    def __init__(self, array_U8: Callable[[], np.ndarray]) -> None:
        """`array_U8` gives all bytes, which lie where they are for good; no view of them is kept."""
        self._array_U8 = array_U8

    @property
    def nbytes(self) -> int:
        return len(self._array_U8())

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """See `RdmaRegion.register`."""
        del remote_writes  # they need nothing
        array_U8 = self._array_U8()
        assert array_U8.dtype == np.uint8 and array_U8.flags.c_contiguous
        try:
            keys = registrar.by_address(int(array_U8.ctypes.data), len(array_U8))
        except RegistrationRefused as error:
            raise RegistrationRefused(f"{error}; {_WHAT_HOSTS_NEED}") from error
        return Registration(keys=keys, registered_as=RegisteredAs.HOST_MEMORY)

    def flush(self) -> bool:
        """See `RdmaRegion.flush`."""
        return False


class DeviceBytes:
    """A region on a device."""

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region
        self._allowed: GpuDirect | None = None

    @property
    def nbytes(self) -> int:
        return self._region.nbytes

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """See `RdmaRegion.register`: as a dma-buf, or else as peer memory."""
        try:
            allowed = self._region.driver.gpudirect()
        except DeviceError as error:
            raise RegistrationRefused(str(error)) from error
        refusal = allowed.refusal(remote_writes=remote_writes)
        if refusal is not None:
            raise RegistrationRefused(refusal)
        self._allowed = allowed
        why = "the device's driver makes none"
        if allowed.dma_buf:
            try:
                return Registration(keys=self._by_dma_buf(registrar), registered_as=RegisteredAs.DMA_BUF)
            except (DeviceError, RegistrationRefused) as error:
                why = str(error)
        try:
            keys = self._by_address(registrar, allowed)
        except RegistrationRefused as error:
            raise RegistrationRefused(f"as a dma-buf: {why}; as peer memory: {error}; {WHAT_GPUS_NEED}") from error
        return Registration(keys=keys, registered_as=RegisteredAs.PEER_MEMORY, why_not_better=f"no dma-buf: {why}")

    def flush(self) -> bool:
        """See `RdmaRegion.flush`. A completion says that the card has sent its writes on, towards the device; only the
        device's driver can say that they are there."""
        assert self._allowed is not None, "not registered"
        if self._allowed.ordered:
            return False
        self._region.driver.flush_remote_writes()
        return True

    def _by_dma_buf(self, registrar: Registrar) -> Keys:
        region = self._region
        found = region.driver.dma_buf(region.address, region.nbytes)
        try:
            return registrar.by_dma_buf(found.fd, found.offset, region.nbytes)
        finally:
            os.close(found.fd)

    def _by_address(self, registrar: Registrar, allowed: GpuDirect) -> Keys:
        if not allowed.peer_memory:
            raise RegistrationRefused("the device's driver does not tell its pages")
        return registrar.by_address(self._region.address, self._region.nbytes)


class VerbsRegistrar:
    """By pyverbs, in one protection domain, before which it is closed."""

    def __init__(self, verbs: Verbs, domain: Any, access: int) -> None:
        self._verbs = verbs
        self._domain = domain
        self._access = access
        self._opened = contextlib.ExitStack()

    def by_address(self, address: int, nbytes: int) -> Keys:
        """See `Registrar`."""
        return self._kept(address, lambda: self._verbs.mr.MR(self._domain, nbytes, self._access, address=address))

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        """See `Registrar`. pyverbs gives such memory the addresses from `offset` on, whatever it has elsewhere."""
        make = getattr(self._verbs.mr, "DmaBufMR", None)
        if make is None:
            raise RegistrationRefused("this pyverbs knows no dma-bufs; rdma-core 34 does")
        try:
            return self._kept(offset, lambda: make(self._domain, nbytes, self._access, dmabuf=fd, offset=offset))
        except TypeError as error:
            raise RegistrationRefused(f"this pyverbs takes no dma-buf by its descriptor: {error}") from error

    def close(self) -> None:
        """Nothing is registered any more. Raises what pyverbs raises."""
        self._opened.close()

    def _kept(self, base: int, register: Callable[[], Any]) -> Keys:
        try:
            registered = register()
        except self._verbs.error as error:
            raise RegistrationRefused(str(error)) from error
        self._opened.callback(registered.close)
        return Keys(base, int(registered.lkey), int(registered.rkey))
