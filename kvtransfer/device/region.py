"""A node's region on a device: one allocation, exported once."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Any, Protocol

from kvtransfer.device.driver import IPC_HANDLE_BYTES, DeviceDriver, DeviceError

_MAGIC = b"BtCu"
_EXPORT = struct.Struct(f"<4sQ{IPC_HANDLE_BYTES}s")


class DeviceMemory(Protocol):
    """What records are copied from."""

    @property
    def nbytes(self) -> int: ...

    @property
    def memory(self) -> Any:
        """All bytes, as the driver's streams take them."""
        ...


class DeviceRegion:
    """Device memory of a fixed size, zeroed. Owns it until `close`.

    `fd` is a small sealed file that holds the IPC handle: the shm transport's handshake passes it to a writer as it
    passes the memory itself on a CPU. Not thread-safe; the memory may be used from any thread.
    """

    huge_bytes = 0
    """A device has no such pages."""

    def __init__(self, driver: DeviceDriver, nbytes: int, name: str) -> None:
        """Raises DeviceError: no room, or memory cannot be shared here."""
        assert nbytes > 0, nbytes
        refusal = driver.refusal()
        if refusal is not None:
            raise DeviceError(f"cuda_ipc: {refusal}")
        self.nbytes = nbytes
        self._driver = driver
        self._address = driver.allocate(nbytes)
        try:
            self._fd = _sealed_file(name, _EXPORT.pack(_MAGIC, nbytes, driver.export(self._address)))
        except BaseException:
            driver.free(self._address)
            raise
        self._open = True

    @property
    def fd(self) -> int:
        """Still owned by the region."""
        assert self._open, "the region is closed"
        return self._fd

    @property
    def memory(self) -> Any:
        """All bytes, as the driver's streams and the engine take them; not to be used after `close`."""
        assert self._open, "the region is closed"
        return self._driver.memory(self._address, self.nbytes)

    def close(self) -> None:
        """Free the memory; the caller has made sure that no stream uses it any more. Idempotent."""
        if self._open:
            self._open = False
            os.close(self._fd)
            self._driver.free(self._address)


class OpenedRegion:
    """A region of another process, open here."""

    def __init__(self, driver: DeviceDriver, fd: int, nbytes: int) -> None:
        """`fd` stays the caller's. Raises DeviceError."""
        raw = os.pread(fd, _EXPORT.size + 1, 0)
        if len(raw) != _EXPORT.size or raw[:4] != _MAGIC:
            raise DeviceError("the receiver's file is no exported region: are both sides of one version?")
        _, exported_nbytes, handle = _EXPORT.unpack(raw)
        if exported_nbytes != nbytes:
            raise DeviceError(f"the receiver exports {exported_nbytes} bytes for a region of {nbytes}")
        self.driver = driver
        self.nbytes = nbytes
        self._address = driver.open(handle)
        self._open = True

    @property
    def memory(self) -> Any:
        assert self._open, "closed"
        return self.driver.memory(self._address, self.nbytes)

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
