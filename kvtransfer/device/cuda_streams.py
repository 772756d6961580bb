"""`DeviceStreams` by torch.cuda, which run on a GPU only, and their copies: one Triton kernel.

A copy is between two memories of a device, or one of them and pinned memory of the host, over the bus.

Shape suffix: W = one entry per write; P = one entry per piece of a write, of `PIECE_WORDS` words at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from kvtransfer.transport import DeviceError, WriteOps

PIECE_WORDS = 1024


@triton.jit(do_not_specialize=["num_writes"])  # or each kind of number is compiled for when it first comes
def copy_kernel(
    dst: tl.tensor,
    src: tl.tensor,
    writes: tl.tensor,  # int64 [3, W], contiguous: source, destination and length, in words
    num_writes: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """Grid (W, pieces of the longest write)."""
    write = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < tl.load(writes + 2 * num_writes + write)
    words = tl.load(src + tl.load(writes + write) + at, mask=inside)
    tl.store(dst + tl.load(writes + num_writes + write) + at, words, mask=inside)


def copy_records(dst_U8: torch.Tensor, src_U8: torch.Tensor, ops: WriteOps) -> None:
    """Queue the copies on the current stream. Both memories are uint8 tensors of one device, or one is in pinned
    memory; `ops` has been checked.

    In words of 8 bytes where every offset and length is a multiple of that, as records of KV are; else byte by byte.
    """
    if len(ops.src) == 0:
        return
    word_bytes = 8
    aligned = dst_U8.data_ptr() % 8 == 0 and src_U8.data_ptr() % 8 == 0
    writes_3W = torch.from_numpy(np.stack([ops.src, ops.dst, ops.nbytes]))
    if not aligned or bool((writes_3W % word_bytes).any()):
        word_bytes = 1
    writes_3W //= word_bytes
    longest = int(writes_3W[2].max())
    if longest == 0:
        return
    if dst_U8.is_cuda or src_U8.is_cuda:
        device = dst_U8.device if dst_U8.is_cuda else src_U8.device
        # From pinned memory the copy of the table is queued as well; its allocator waits for that before reuse.
        writes_3W = writes_3W.pin_memory().to(device, non_blocking=True)
    copy_kernel[(len(ops.src), triton.cdiv(longest, PIECE_WORDS))](
        _words(dst_U8, word_bytes), _words(src_U8, word_bytes), writes_3W, len(ops.src), PIECE=PIECE_WORDS
    )


def _words(memory_U8: torch.Tensor, word_bytes: int) -> torch.Tensor:
    if word_bytes == 1:
        return memory_U8
    return memory_U8[: len(memory_U8) // word_bytes * word_bytes].view(torch.int64)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        with _device_errors():
            return bool(self.event.query())


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> CudaEvent:
        with _device_errors():
            event = torch.cuda.Event()
            event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: CudaEvent) -> None:
        with _device_errors():
            self.stream.wait_event(event.event)


class CudaStreams:
    """The streams of one CUDA device. Side streams have high priority: a copy that waits delays another node."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> CudaStream:
        stream = torch.cuda.current_stream(self._device)
        # Blocks are computed on one thread and posted on another too, which knows of the device's default stream only.
        assert stream == torch.cuda.default_stream(self._device), (
            "transfers are posted from the device's default stream"
        )
        return CudaStream(stream)

    def side(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device, priority=-1))

    def copy(self, stream: CudaStream, dst: torch.Tensor, src: torch.Tensor, ops: WriteOps) -> None:
        with _device_errors(), torch.cuda.stream(stream.stream):
            copy_records(dst, src, ops)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Whatever CUDA raises, or Triton for a kernel that it cannot compile or launch. After an error of a kernel the
    context is lost: every later call raises it again."""
    try:
        yield
    except (RuntimeError, TritonError) as error:
        raise DeviceError(str(error)) from error
