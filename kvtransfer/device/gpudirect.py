"""What a device's driver reports about network cards that read and write its memory (GPUDirect RDMA). Pure.

Numbers are those of CUDA's driver API: CUGPUDirectRDMAWritesOrdering and CUflushGPUDirectRDMAWritesOptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

_ORDERED_FOR_OWNER = 100
"""From here on the device itself sees what others write in order; less is no order, more is for other devices too."""
_FLUSH_BY_HOST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect:
    """What one device allows."""

    peer_memory: bool
    """A card's driver can get its pages by their addresses, where a module of the kernel provides them."""
    dma_buf: bool
    """Its driver makes dma-bufs of it."""
    ordered: bool
    """What a card has written before the host launches something is seen by that, without a flush."""
    host_flushes: bool
    """A call of the host makes it so."""

    @classmethod
    def of(cls, *, peer_memory: int, dma_buf: int, ordering: int, flush_options: int) -> Self:
        """From the attributes of a CUDA device."""
        return cls(
            peer_memory=bool(peer_memory),
            dma_buf=bool(dma_buf),
            ordered=ordering >= _ORDERED_FOR_OWNER,
            host_flushes=bool(flush_options & _FLUSH_BY_HOST),
        )

    def refusal(self, *, remote_writes: bool) -> str | None:
        """Why a card must not be given the memory; None: it may be."""
        if not (self.peer_memory or self.dma_buf):
            return "this device opens its memory to no card: neither as a dma-buf nor as peer memory"
        if remote_writes and not (self.ordered or self.host_flushes):
            return "what a card writes to this device may be seen late, and the host cannot flush it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DmaBuf:
    """Device memory as a descriptor of the kernel's. It is whole pages; the memory begins `offset` bytes into it.

    Whoever asked for it closes `fd`: a registration keeps what it needs.
    """

    fd: int
    offset: int


def page_span(address: int, nbytes: int, page_bytes: int) -> tuple[int, int, int]:
    """The fewest whole pages that hold these bytes: their address, their bytes, and where in them the bytes begin."""
    assert nbytes > 0 and page_bytes > 0, (nbytes, page_bytes)
    offset = address % page_bytes
    whole = -(-(offset + nbytes) // page_bytes) * page_bytes
    return address - offset, whole, offset
