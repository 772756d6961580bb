"""The compute kernels, with their types and the layouts of their matrices: bfloat16 on a CPU.

All calls release the interpreter's lock. They check nothing: the caller has checked shapes and ids.

Shape suffixes as in engine/types.py; of matrices Y outputs, X inputs, P panels of 32 outputs.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.cores import own_cores
from baton.log import get_log
from baton.native import NativeLibrary, load
from engine.kernel_sets import KernelSet

log = get_log("native")

TASK_ROWS_MAX = 256
"""Rows of one sequence whose attention one thread computes; more are shared among threads."""
PACKED_ROWS_MIN = 4
"""From so many rows on, keys and values are packed for them; fewer rows read them in place, one after another."""
PANEL = 32
SCALED = 64
"""Inputs of an output that share a scale."""
_HUGE_PAGE = 2 << 20


class Epilogue(IntEnum):
    """What happens to a product, by the kernels' numbers."""

    STORE = 0
    ADD = 1
    SWIGLU = 2


class Opening(IntEnum):
    """What a layer is opened for, by the kernels' numbers."""

    QUERIES = 1  # those that `layer_close` attends with
    RECORDS = 2  # keys and values of the new tokens into their slots
    WHOLE = 3


class Workspace:
    """Buffers by name, kept between calls: the system would clear fresh memory page by page in every step."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[rows, columns], uninitialised. Valid until the next call with this name."""
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A weight [Y, X] in the kernels' layout, and its bias. The first `columns` outputs are used."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    """[P, ceil(X / 64), 32] where `bits` is not 16."""
    bias: torch.Tensor | None
    """One for each output of all panels."""
    bits: int
    columns: int
    inputs: int


def pack(
    weight_YX: torch.Tensor, bits: int = 16, *, bias_Y: torch.Tensor | None = None, columns: int | None = None
) -> Operand:
    """Copy a bfloat16 matrix into panels; with 8 or 4 `bits` as whole numbers of so many bits times a scale.
    `columns` None: all outputs."""
    assert bits in (16, 8, 4), bits
    outputs, inputs = weight_YX.shape
    if bits == 16:
        panels, scales = _huge_copy(_panels(_padded(weight_YX, 2))), None
    else:
        whole_YX, scales = quantise(_padded(weight_YX, SCALED), bits)
        panels = _huge_copy(_nibbles(whole_YX) if bits == 4 else _panels(whole_YX))
    bias = None
    if bias_Y is not None:
        bias = bias_Y.new_zeros(-(-outputs // PANEL) * PANEL)
        bias[: len(bias_Y)] = bias_Y
    columns = outputs if columns is None else columns
    return Operand(panels=panels, scales=scales, bias=bias, bits=bits, columns=columns, inputs=inputs)


def quantise(weight_YX: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (int8 [Y, X] of `bits` bits, float32 scales [Y / 32, X / 64, 32]).

    8 bits: the largest magnitude of 64 weights becomes 127. 4 bits: the weight of largest magnitude becomes -8, as the
    range is -8 to 7.
    """
    outputs, inputs = weight_YX.shape
    parts = weight_YX.float().view(outputs, inputs // SCALED, SCALED)
    if bits == 8:
        scales, least, most = parts.abs().amax(dim=-1) / 127, -127, 127
    else:
        furthest = parts.gather(-1, parts.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        scales, least, most = furthest / -8, -8, 7
    scales[scales == 0] = 1.0
    whole = (parts / scales[..., None]).round_().clamp_(least, most).to(torch.int8)
    return whole.view(outputs, inputs), scales.view(outputs // PANEL, PANEL, -1).transpose(1, 2).contiguous()


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed memory, uint8 [num_bytes], in pages of 2 MiB if the system has them: every step reads all weights, and
    small pages cost a table walk every 4 KiB."""
    block = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE_PAGE
    return whole[first : first + num_bytes]


def _padded(weight_YX: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zeros up to whole panels and to a multiple of inputs."""
    outputs, inputs = weight_YX.shape
    shape = (-(-outputs // PANEL) * PANEL, -(-inputs // multiple) * multiple)
    if shape == (outputs, inputs):
        return weight_YX
    padded = weight_YX.new_zeros(shape)
    padded[:outputs, :inputs] = weight_YX
    return padded


def _panels(weight_YX: torch.Tensor) -> torch.Tensor:
    """-> [P, X / 2, 32, 2]."""
    outputs, inputs = weight_YX.shape
    return weight_YX.view(outputs // PANEL, PANEL, inputs // 2, 2).permute(0, 2, 1, 3)


def _nibbles(whole_YX: torch.Tensor) -> torch.Tensor:
    """-> int16 [P, X / 8, 2, 16, 2]: four pairs of inputs in each word, the first lowest."""
    outputs, inputs = whole_YX.shape
    parts = (whole_YX.to(torch.int32) + 8).view(outputs // PANEL, 2, 16, inputs // 8, 4, 2)
    words = sum(parts[..., pair, :] << (4 * pair) for pair in range(4))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int16).permute(0, 3, 1, 2, 4)


def _huge_copy(tensor: torch.Tensor) -> torch.Tensor:
    target = huge_pages(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
    return target.copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Where the rows and contexts of a step are, for all layers. All int64."""

    tables: np.ndarray
    """Block ids of all sequences, one after another."""
    table_at_B: np.ndarray
    rows_at: np.ndarray
    """[B + 1] first row of each sequence, then the number of rows."""
    contexts_B: np.ndarray
    tasks: np.ndarray
    """[tasks, 4] sequence, its first row, number of rows, whether keys and values are packed for them."""
    blocks_T: np.ndarray
    slots_T: np.ndarray

    def ends(self, sequences: np.ndarray) -> Ends:
        """The last row of each of these sequences.

        Keys are packed exactly where they would be with all rows: the same sums, in the same order.
        """
        count, first_W, rows_W = len(sequences), self.rows_at[sequences], self.rows_at[sequences + 1] - 1
        tasks = np.zeros((count, 4), dtype=np.int64)
        tasks[:, 0], tasks[:, 2] = np.arange(count), 1
        tasks[:, 3] = (rows_W - first_W) % TASK_ROWS_MAX + 1 >= PACKED_ROWS_MIN
        plan = AttentionPlan(
            tables=self.tables,
            table_at_B=self.table_at_B[sequences],
            rows_at=np.arange(count + 1),
            contexts_B=self.contexts_B[sequences],
            tasks=tasks,
            blocks_T=self.blocks_T[rows_W],
            slots_T=self.slots_T[rows_W],
        )
        return Ends(rows_W=torch.from_numpy(rows_W), plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The rows that are computed to the end of the last layer, and their attention."""

    rows_W: torch.Tensor
    plan: AttentionPlan


def address(of: torch.Tensor | np.ndarray | None) -> int | None:
    """Address of the first element; the caller keeps it alive."""
    if of is None:
        return None
    return of.data_ptr() if isinstance(of, torch.Tensor) else of.ctypes.data


class Pointer:
    """Type of an argument: a tensor, an array, None or an address."""

    @classmethod
    def from_param(cls, value: torch.Tensor | np.ndarray | int | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(value if isinstance(value, int) else address(value))


class Kernels:
    """The functions of one set. Any thread may call them; a workspace belongs to one caller at a time."""

    def __init__(self, handle: ctypes.CDLL, *, cores: int) -> None:
        """`cores`: how many this process may use. With more threads than that, waiting threads do not spin."""
        pointer, integer, flag, real = Pointer, ctypes.c_int64, ctypes.c_int, ctypes.c_float

        def function(name: str, result: type | None, *types: type) -> Any:
            found = getattr(handle, name)
            found.restype, found.argtypes = result, types
            return found

        function("baton_kernels_cores", None, flag)(cores)
        self._linear = function(
            "baton_linear",
            None,
            *[pointer, integer, pointer, pointer, flag, pointer, pointer],
            *[integer] * 4,
            *[flag, pointer, flag],
        )
        self.linear_scratch = function("baton_linear_scratch", integer, integer, integer, flag)
        """(rows, inputs, bits) -> 32-bit words of scratch for `linear`."""
        self._rms_norm = function("baton_rms_norm", None, *[pointer] * 3, *[integer] * 2, real, flag)
        self.attention_scratch = function("baton_attention_scratch", integer, integer, integer)
        """(longest context, head dimension) -> bytes of scratch for each thread."""
        self._highest = function("baton_highest", None, *[pointer] * 2, *[integer] * 2, flag)
        place = ctypes.c_void_p
        self.layer_open = function("baton_layer_open", None, flag, *[place] * 3)
        self.layer_close = function("baton_layer_close", None, *[place] * 3)
        self.layers = function("baton_layers", None, place, integer, place, place, integer)

    def highest(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The first column of each row's highest value -> int64 [B], -1 for a row with NaN. Contiguous bfloat16."""
        assert scores_BV.dtype is torch.bfloat16 and scores_BV.is_contiguous(), scores_BV.dtype
        out_B = torch.empty(scores_BV.shape[0], dtype=torch.int64)
        self._highest(scores_BV, out_B, *scores_BV.shape, torch.get_num_threads())
        return out_B

    def linear(
        self,
        x_TX: torch.Tensor,
        operand: Operand,
        out_TY: torch.Tensor,
        *,
        epilogue: Epilogue,
        workspace: Workspace,
    ) -> None:
        """`x_TX` times the operand's columns, into `out_TY`; rows of both are contiguous."""
        rows = x_TX.shape[0]
        words = self.linear_scratch(rows, operand.inputs, operand.bits)
        self._linear(
            *(x_TX, x_TX.stride(0), operand.panels, operand.scales, operand.bits, operand.bias),
            *(out_TY, out_TY.stride(0), rows, operand.columns, operand.inputs, epilogue),
            *(workspace.take("linear", 1, words, torch.int32), torch.get_num_threads()),
        )

    def rms_norm(self, x_TE: torch.Tensor, weight: torch.Tensor, out_TE: torch.Tensor, eps: float) -> None:
        """As `engine.models.decoder.rms_norm`, into `out_TE`; both are contiguous."""
        self._rms_norm(x_TE, weight, out_TE, *x_TE.shape, eps, torch.get_num_threads())


class KernelSetMissing(Exception):
    """The message names the set and says what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A set that is there."""

    kernel_set: KernelSet
    """Never AUTO."""
    kernels: Kernels | None
    """None: TORCH."""
    why: str
    """For people: why this one."""


OWN = (
    KernelSet.AMX,
    KernelSet.AVX512BF16,
    KernelSet.AVX512,
    KernelSet.AVX2,
    KernelSet.NEONBF16,
    KernelSet.NEON,
)
"""The sets that have a library, the best first, unless pairs are slow (`_best_first`)."""
ROUNDED = frozenset(OWN) - {KernelSet.AMX}
"""Those that multiply by weights of 8 and 4 bits."""
_CPU_BITS = {
    KernelSet.AVX2: 1,
    KernelSet.AVX512: 2,
    KernelSet.AVX512BF16: 4,
    KernelSet.AMX: 8,
    KernelSet.NEON: 16,
    KernelSet.NEONBF16: 32,
}
"""By cpu.c's numbers."""
_SLOW_PAIRS_BIT = 64


def choose_kernels(wanted: KernelSet, *, rounded: bool = False) -> Choice:
    """Raises KernelSetMissing: the set that is wanted is not there. AUTO always finds one.

    `rounded`: weights of 8 or 4 bits. Where the set that is wanted does not multiply by those it is the best that does.
    """
    if wanted is KernelSet.TORCH:
        return Choice(kernel_set=wanted, kernels=None, why="engine.kernels names it")
    here = cpu_sets()
    if wanted is not KernelSet.AUTO and wanted not in here:
        raise KernelSetMissing(f"engine.kernels is {wanted.value}, which this CPU lacks: it has {_names(here)}")
    if rounded and wanted in here - ROUNDED:
        return _best(here & ROUNDED, f"{wanted.value} does not multiply by rounded weights")
    if wanted is KernelSet.AUTO:
        return _best(here & ROUNDED if rounded else here, f"the best of what this CPU has: {_names(here)}")
    kernels = own_kernels(wanted)
    if kernels is None:
        status = _library(wanted).status
        raise KernelSetMissing(f"engine.kernels is {wanted.value}, which has no library here: {status}")
    return Choice(kernel_set=wanted, kernels=kernels, why="engine.kernels names it")


def _best(here: frozenset[KernelSet], why: str) -> Choice:
    missing: list[str] = []
    for own in _best_first():
        if own not in here:
            continue
        kernels = own_kernels(own)
        if kernels is not None:
            return Choice(kernel_set=own, kernels=kernels, why="; ".join([why, *missing]))
        missing.append(f"{own.value} has no library: {_library(own).status}")
    if missing:
        why = f"no compute kernels: {'; '.join(missing)}"
    else:
        why = f"the compute kernels need {' or '.join(each.value for each in reversed(OWN))}, which this CPU lacks"
    return Choice(kernel_set=KernelSet.TORCH, kernels=None, why=why)


def _best_first() -> tuple[KernelSet, ...]:
    if not pairs_are_slow():
        return OWN
    swapped = {KernelSet.AVX512: KernelSet.AVX512BF16, KernelSet.AVX512BF16: KernelSet.AVX512}
    return tuple(swapped.get(each, each) for each in OWN)


def _names(sets: frozenset[KernelSet]) -> str:
    return ", ".join(each.value for each in _CPU_BITS if each in sets) or "none of them"


@cache
def _cpu_bits() -> int:
    library = load(Path(__file__).with_name("cpu.c"))
    if library.handle is None:
        log.warning("compute kernels are missing: PyTorch's are used, which are slower", why=library.status)
        return 0
    return int(library.handle.baton_cpu_sets())


def cpu_sets() -> frozenset[KernelSet]:
    """The sets whose instructions this CPU has; empty where there is no compiler to build what asks it."""
    return frozenset(each for each, bit in _CPU_BITS.items() if _cpu_bits() & bit)


def pairs_are_slow() -> bool:
    """This CPU multiplies pairs of bfloat16 more slowly than the float32 that they are widened to."""
    return bool(_cpu_bits() & _SLOW_PAIRS_BIT)


@cache
def _library(own: KernelSet) -> NativeLibrary:
    return load(Path(__file__).with_name(f"kernels_{own.value}.c"))


@cache
def own_kernels(own: KernelSet) -> Kernels | None:
    """The library of a set whose instructions this CPU has, if it can be built. The first call may take seconds."""
    library = _library(own)
    if library.handle is None:
        log.warning("compute kernels are missing: others are used, which are slower", set=own.value, why=library.status)
        return None
    return Kernels(library.handle, cores=own_cores().usable)


def native_kernels() -> Kernels | None:
    """Those of AUTO. None: no library, or a CPU without the instructions of any set."""
    return choose_kernels(KernelSet.AUTO).kernels
