"""A node's region on a device: one allocation, exported once."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Any, ClassVar

import numpy as np

from kvtransfer.device.driver import IPC_HANDLE_BYTES, DeviceDriver, wait_for
from kvtransfer.transport import DeviceError, RegionKind, WriteOps

_MAGIC = b"BtCu"
_EXPORT = struct.Struct(f"<4sQ{IPC_HANDLE_BYTES}s")


class _DeviceMemory:
    """Memory of a device, open until `close`."""

    def __init__(self, driver: DeviceDriver, address: int, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self._address = address
        self._open = True

    @property
    def address(self) -> int:
        """Of the first byte, by the driver."""
        assert self._open, "closed"
        return self._address

    @property
    def memory(self) -> Any:
        """All bytes, as the driver's streams and the engine take them; not to be used after `close`."""
        return self.driver.memory(self.address, self.nbytes)


class DeviceRegion(_DeviceMemory):
    """Device memory of a fixed size, zeroed. Not thread-safe; the memory may be used from any thread.

    `fd` is a small sealed file with the IPC handle, which shm's handshake passes on in the place of the memory itself.
    """

    kind: ClassVar[RegionKind] = RegionKind.DEVICE
    huge_bytes = 0
    """A device has no such pages."""

    def __init__(self, driver: DeviceDriver, nbytes: int, name: str, *, shared: bool = True) -> None:
        """`shared`: other processes can be given it (cuda_ipc). Raises DeviceError: no room, or it cannot be shared."""
        assert nbytes > 0, nbytes
        refusal = driver.refusal() if shared else None
        if refusal is not None:
            raise DeviceError(f"cuda_ipc: {refusal}")
        super().__init__(driver, driver.allocate(nbytes), nbytes)
        self._fd: int | None = None
        try:
            if shared:
                self._fd = _sealed_file(name, _EXPORT.pack(_MAGIC, nbytes, driver.export(self._address)))
        except BaseException:
            driver.free(self._address)
            raise

    @property
    def shared(self) -> bool:
        """Whether there is a descriptor to give away."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """Still owned by the region."""
        assert self._open, "the region is closed"
        assert self._fd is not None, "the region is not shared"
        return self._fd

    def read(self, start: int, stop: int) -> bytes:
        """A copy of these bytes, behind what the calling thread's stream has queued. Blocks. Any thread."""
        part_U8 = self.memory[start:stop]
        return bytes(part_U8 if isinstance(part_U8, np.ndarray) else part_U8.cpu().numpy())

    def rehearse_copy(self, record_bytes: int) -> None:
        """Copy the first record over the second, and wait: kernels are compiled now, and not in the first handoff."""
        if self.nbytes < 2 * record_bytes:
            return
        streams, memory = self.driver.streams, self.memory
        src, dst, nbytes = (np.array([number], dtype=np.int64) for number in (0, record_bytes, record_bytes))
        side = streams.side()
        streams.copy(side, memory, memory, WriteOps(src=src, dst=dst, nbytes=nbytes))
        wait_for(side.record())

    def close(self) -> None:
        """Free the memory; the caller has made sure that no stream uses it any more. Idempotent."""
        if self._open:
            self.driver.free(self._address)
            self._open = False
            if self._fd is not None:
                os.close(self._fd)


class OpenedRegion(_DeviceMemory):
    """A region of another process, open here."""

    def __init__(self, driver: DeviceDriver, fd: int, nbytes: int) -> None:
        """`fd` stays the caller's. Raises DeviceError."""
        raw = os.pread(fd, _EXPORT.size + 1, 0)
        if len(raw) != _EXPORT.size or raw[:4] != _MAGIC:
            raise DeviceError("the receiver's file is no exported region: are both sides of one version?")
        _, exported_nbytes, handle = _EXPORT.unpack(raw)
        if exported_nbytes != nbytes:
            raise DeviceError(f"the receiver exports {exported_nbytes} bytes for a region of {nbytes}")
        super().__init__(driver, driver.open(handle), nbytes)

    def close(self) -> None:
        """No stream copies into it any more. Idempotent."""
        if self._open:
            self._open = False
            self.driver.close(self._address)


def _sealed_file(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd
