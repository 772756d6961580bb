"""One Triton kernel that copies records between two memories of a device, wherever the writes say.

One of the two may be pinned memory of the host, which a kernel reads and writes over the bus.

Shape suffix: W = one entry per write; P = one entry per piece of a write, of `PIECE_WORDS` words at most.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvtransfer.transport import WriteOps

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
