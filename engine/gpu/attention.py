"""Attention on a GPU: a backend for slices of one token (decode) and a backend for longer ones (prefill).

That a library can be imported proves little: its wheel may be built for another torch, architecture or page size, and
some compute nonsense instead of failing. So each candidate runs at start, over a small pool of NaN with the node's own
shape, type and block size. A node uses the best one that agrees with the torch reference.

Shape suffixes as in engine/attention.py; R query rows of decode or prefill, M columns of the block tables.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch

from baton.errors import InvalidField
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from baton.log import get_log
from engine.attention import PagedAttention, TorchAttention
from engine.gpu import kernels
from engine.gpu.config import AUTO
from engine.gpu.kernels import SPLIT_TOKENS_MIN
from engine.kv_pool import KvPool, record_bytes, to_device
from engine.types import Batch, KvSpec, SamplingParams, SequenceSlice


class BackendUnfit(Exception):
    """A backend cannot serve this shape, type or device; the text says what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Block tables and context lengths of slices of one token, int32, on the pool's device."""

    tables_BM: torch.Tensor
    contexts_B: torch.Tensor
    num_splits: int


class TritonDecode:
    """Our split-KV kernel, `kernels.decode`, reads the region in place. Any block size, head dimension and type."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises BackendUnfit."""
        if num_heads % pool.spec.num_kv_heads:
            raise BackendUnfit(f"{num_heads} query heads do not share {pool.spec.num_kv_heads} KV heads evenly")
        if pool.device.type != "cuda" and not kernels.interpreted():
            raise BackendUnfit(f"Triton has no kernels for {pool.device}: it needs a CUDA device")
        self._pool = pool
        self._processors = processors(pool.device)

    def prepare(self, slices: Sequence[SequenceSlice]) -> DecodePlan:
        assert all(s.stop - s.start == 1 for s in slices), "decode takes one token of each sequence"
        return DecodePlan(
            tables_BM=_tables(self._pool, slices),
            contexts_B=_int32([s.stop for s in slices], self._pool.device),
            num_splits=self.num_splits(len(slices), max(s.stop for s in slices)),
        )

    def num_splits(self, rows: int, context_max: int) -> int:
        """For launches with so many rows and contexts of at most `context_max`."""
        return kernels.choose_splits(rows, self._pool.spec.num_kv_heads, context_max, self._processors)

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        return kernels.decode(self._pool, layer, q_RHD, plan.tables_BM, plan.contexts_B, plan.num_splits)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 for a device without."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _int32(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(numbers, dtype=np.int32), device)


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """0 and the running sums -> int32 [sequences + 1]."""
    return _int32([0, *np.cumsum(lengths)], device)


def _tables(pool: KvPool, slices: Sequence[SequenceSlice]) -> torch.Tensor:
    """The blocks of each context -> int32 [B, M], zeros at the end."""
    used = [-(-s.stop // pool.spec.block_size) for s in slices]
    tables_BM = np.zeros((len(slices), max(used)), dtype=np.int32)
    for row, (s, count) in enumerate(zip(slices, used, strict=True)):
        tables_BM[row, :count] = s.block_table[:count]
    return to_device(tables_BM, pool.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenPlan:
    """Where each sequence's queries and keys start (int32 [sequences + 1]), and where its keys are: contexts to gather,
    or block tables and context lengths (int32) for a backend that reads pages."""

    contexts: kernels.GatherPlan | None
    tables_BM: torch.Tensor | None
    contexts_B: torch.Tensor | None
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    queries_max: int
    context_max: int


VarlenCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenPlan], torch.Tensor]
"""(q_RHD, K, V, plan) -> causal attention of concatenated sequences, [R, H, D]: the last query of each sees its last
key. K and V are [C, K, D]; for a backend that reads pages the region's own, [N, S, K, D] with strides."""


class Varlen:
    """A library's kernel for uneven lengths. Without `pages` it copies the contexts together in each layer: that costs
    little beside the attention of some hundred tokens, and no page size is refused."""

    def __init__(self, pool: KvPool, call: VarlenCall, *, pages: bool = False) -> None:
        self._pool = pool
        self._call = call
        self._pages = pages

    def prepare(self, slices: Sequence[SequenceSlice]) -> VarlenPlan:
        pool, device = self._pool, self._pool.device
        queries, contexts = [s.stop - s.start for s in slices], [s.stop for s in slices]
        return VarlenPlan(
            contexts=None if self._pages else kernels.plan_gather(pool, slices),
            tables_BM=_tables(pool, slices) if self._pages else None,
            contexts_B=_int32(contexts, device) if self._pages else None,
            query_starts=_starts(queries, device),
            context_starts=_starts(contexts, device),
            queries_max=max(queries),
            context_max=max(contexts),
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        if plan.contexts is not None:
            k, v = kernels.gather(self._pool, layer, plan.contexts)
        else:
            kv_N2KSD = self._pool.kv_LN2KSD[layer]
            k, v = kv_N2KSD[:, 0].transpose(1, 2), kv_N2KSD[:, 1].transpose(1, 2)
        return self._call(q_RHD, k, v, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlan:
    """Decode or prefill is None where it has no slices."""

    decode: Any
    prefill: Any
    decode_rows: slice | torch.Tensor | None
    prefill_rows: slice | torch.Tensor | None


class GpuAttention:
    """A `PagedAttention` made of two: slices of one token go to `decode`, the others to `prefill`."""

    def __init__(self, pool: KvPool, *, prefill: PagedAttention, decode: PagedAttention) -> None:
        self._pool = pool
        self.prefill = prefill
        self.decode = decode

    def prepare(self, slices: Sequence[SequenceSlice]) -> _StepPlan:
        short = [s for s in slices if s.stop - s.start == 1]
        long = [s for s in slices if s.stop - s.start > 1]
        decode_rows: slice | torch.Tensor = slice(None, len(short))
        prefill_rows: slice | torch.Tensor = slice(len(short), None)
        # The scheduler puts running sequences first, so rows are seldom mixed.
        if list(slices) != short + long:
            lengths = np.array([s.stop - s.start for s in slices])
            is_short_T = np.repeat(lengths == 1, lengths)
            decode_rows, prefill_rows = (
                to_device(np.flatnonzero(chosen_T), self._pool.device) for chosen_T in (is_short_T, ~is_short_T)
            )
        return _StepPlan(
            decode=self.decode.prepare(short) if short else None,
            prefill=self.prefill.prepare(long) if long else None,
            decode_rows=decode_rows if short else None,
            prefill_rows=prefill_rows if long else None,
        )

    def attend(self, layer: int, q_THD: torch.Tensor, plan: _StepPlan) -> torch.Tensor:
        if plan.prefill_rows is None:
            return self.decode.attend(layer, q_THD, plan.decode)
        if plan.decode_rows is None:
            return self.prefill.attend(layer, q_THD, plan.prefill)
        out_THD = torch.empty_like(q_THD)
        out_THD[plan.decode_rows] = self.decode.attend(layer, q_THD[plan.decode_rows], plan.decode)
        out_THD[plan.prefill_rows] = self.prefill.attend(layer, q_THD[plan.prefill_rows], plan.prefill)
        return out_THD


FLASH2_PAGE_MULTIPLE = 256
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def _need_half(pool: KvPool, name: str) -> None:
    if pool.device.type != "cuda":
        raise BackendUnfit(f"{name} needs a CUDA device, not {pool.device}")
    if pool.dtype not in (torch.float16, torch.bfloat16):
        raise BackendUnfit(f"{name} computes in float16 and bfloat16, not in {pool.spec.dtype}")


def _output(result: Any) -> torch.Tensor:
    """Some versions return the log-sum-exp as well."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def torch_varlen(pool: KvPool, num_heads: int) -> Varlen:
    """torch's own flash attention for uneven lengths (torch.nn.attention.varlen, torch 2.10 and later)."""
    _need_half(pool, "torch's varlen attention")
    from torch.nn.attention.varlen import varlen_attn

    group = num_heads // pool.spec.num_kv_heads
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    repeats = 1
    if group > 1 and "enable_gqa" in names:
        options["enable_gqa"] = True
    elif group > 1:
        # This version of torch needs as many KV heads as query heads.
        repeats = group

    def call(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        if repeats > 1:
            k_CKD, v_CKD = k_CKD.repeat_interleave(repeats, dim=1), v_CKD.repeat_interleave(repeats, dim=1)
        sizes = (plan.query_starts, plan.context_starts, plan.queries_max, plan.context_max)
        return _output(varlen_attn(q_RHD, k_CKD, v_CKD, *sizes, **options))

    return Varlen(pool, call)


def flash_varlen(module: str, *, pages: bool = False) -> Callable[[KvPool, int], Varlen]:
    """`flash_attn_varlen_func` of a package: `flash_attn` is flash-attention 2, `flash_attn_interface` version 3, and
    `fa3_fwd_interface` its build on PyPI, without a general paged mode. `pages`: with version 2's block tables.
    """

    def make(pool: KvPool, num_heads: int) -> Varlen:
        del num_heads
        _need_half(pool, module)
        if pages and pool.spec.block_size % FLASH2_PAGE_MULTIPLE:
            raise BackendUnfit(
                f"flash-attention 2 takes pages of a multiple of {FLASH2_PAGE_MULTIPLE} tokens, "
                f"not {pool.spec.block_size}: set engine.block_size, or use another backend"
            )
        function = importlib.import_module(module).flash_attn_varlen_func

        def call(q_RHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
            arguments: dict[str, Any] = {
                "cu_seqlens_q": plan.query_starts,
                "cu_seqlens_k": plan.context_starts,
                "max_seqlen_q": plan.queries_max,
                "max_seqlen_k": plan.context_max,
                "causal": True,
            }
            if pages:
                arguments["block_table"] = plan.tables_BM
            return _output(function(q_RHD, k, v, **arguments))

        return Varlen(pool, call, pages=pages)

    return make


def flash3_paged(pool: KvPool, num_heads: int) -> Varlen:
    """flash-attn 3 (`flash_attn_interface`) with a page table."""
    del num_heads
    _need_half(pool, "flash_attn_interface")
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(q_RHD: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        out = function(
            q_RHD,
            k_NSKD,
            v_NSKD,
            cache_seqlens=plan.contexts_B,
            page_table=plan.tables_BM,
            cu_seqlens_q=plan.query_starts,
            max_seqlen_q=plan.queries_max,
            causal=True,
        )
        return _output(out)

    return Varlen(pool, call, pages=True)


class FlashInferPaged:
    """FlashInfer's paged prefill over head-major pages [N, 2, K, S, D]: it reads the region in place."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises ImportError or BackendUnfit."""
        _need_half(pool, "FlashInfer")
        flashinfer = importlib.import_module("flashinfer")
        workspace_U8 = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._pool = pool
        self._num_heads = num_heads
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_U8, kv_layout="HND")

    def prepare(self, slices: Sequence[SequenceSlice]) -> None:
        """The wrapper keeps the plan, so only one step at a time."""
        spec, device = self._pool.spec, self._pool.device
        used = [-(-s.stop // spec.block_size) for s in slices]
        blocks = np.concatenate([np.asarray(s.block_table[:n], np.int32) for s, n in zip(slices, used, strict=True)])
        self._wrapper.plan(
            _starts([s.stop - s.start for s in slices], device),
            _starts(used, device),
            to_device(blocks, device),
            _int32([(s.stop - 1) % spec.block_size + 1 for s in slices], device),
            self._num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            q_data_type=self._pool.dtype,
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: None) -> torch.Tensor:
        del plan
        out: torch.Tensor = self._wrapper.run(q_RHD, self._pool.kv_LN2KSD[layer])
        return out


log = get_log("attention")

ERROR_MAX = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference allowed, of the largest reference value: a few units of rounding of the type."""

_TRIAL_PARAMS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


Maker = Callable[[KvPool, int], PagedAttention]
"""(pool, query heads). Raises ImportError or BackendUnfit where the backend cannot serve."""

CANDIDATES: dict[Phase, dict[str, Maker]] = {
    Phase.PREFILL: {
        "flash3-paged": flash3_paged,
        "flash3-gather": flash_varlen("flash_attn_interface"),
        "fa3-fwd-gather": flash_varlen("fa3_fwd_interface"),
        "flashinfer": FlashInferPaged,
        "flash2-paged": flash_varlen("flash_attn", pages=True),
        "torch-varlen": torch_varlen,
        "flash2-gather": flash_varlen("flash_attn"),
        "torch": TorchAttention,
    },
    Phase.DECODE: {"triton": TritonDecode, "flashinfer": FlashInferPaged, "torch": TorchAttention},
}
"""By name, best first. Each list ends with the reference, which is never refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The backend of one phase, and why better ones were rejected."""

    phase: Phase
    backend: PagedAttention
    name: str
    rejected: dict[str, str]
    """Reasons by name, in the order of the trials."""

    def __str__(self) -> str:
        """For `baton describe`."""
        return f"{self.name}; not used: {_listed(self.rejected)}" if self.rejected else self.name


def _listed(rejected: dict[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in rejected.items())


def admit(
    pool: KvPool,
    num_heads: int,
    phase: Phase,
    *,
    wanted: str = AUTO,
) -> Admitted:
    """Run the candidates of a phase, best first, until one agrees with the reference. Runs kernels: takes seconds.

    Raises InvalidField: `wanted` names a backend that does not exist, or that failed its trial; the text says how.
    """
    choices = CANDIDATES[phase]
    field = f"attention_{phase.value}"
    if wanted not in (AUTO, *choices):
        raise InvalidField(field, f"is {wanted!r}; must be {AUTO}, or one of {', '.join(choices)}")
    rejected: dict[str, str] = {}
    for name in choices if wanted == AUTO else [wanted]:
        problem = try_out(name, choices[name], pool.spec, num_heads, phase, pool.device)
        if problem is None:
            backend = choices[name](pool, num_heads)
            admitted = Admitted(phase=phase, backend=backend, name=name, rejected=rejected)
            log.info("attention", phase=phase.value, backend=str(admitted))
            return admitted
        rejected[name] = problem
    raise InvalidField(field, f"cannot be {wanted}: {_listed(rejected)}. Set it to {AUTO}.")


def try_out(name: str, make: Maker, spec: KvSpec, num_heads: int, phase: Phase, device: torch.device) -> str | None:
    """Run one candidate on a small pool -> what is wrong with it, if anything. Never raises."""
    pool, batch, q_RHD, wanted_RHD = _trial(spec, num_heads, phase, device)
    try:
        backend = make(pool, num_heads)
        found_RHD = backend.attend(1, q_RHD, backend.prepare(batch.slices))
        if found_RHD.shape != wanted_RHD.shape:
            return f"gives {tuple(found_RHD.shape)} instead of {tuple(wanted_RHD.shape)}"
        # NaN where anything is; the comparison is then false.
        error = float((found_RHD.double() - wanted_RHD.double()).abs().max() / wanted_RHD.double().abs().max())
    except ImportError as missing:
        return f"not installed ({missing})"
    except BackendUnfit as unfit:
        return str(unfit)
    except Exception as failure:
        # Foreign code: after any error the node tries the next one.
        log.exception("attention backend failed its trial", backend=name, phase=phase.value)
        return f"failed: {type(failure).__name__}: {str(failure)[:200]}"
    limit = ERROR_MAX[spec.dtype]
    return None if error <= limit else f"wrong by {error:.1e}, {limit:.0e} is allowed"


def _trial(
    spec: KvSpec, num_heads: int, phase: Phase, device: torch.device
) -> tuple[KvPool, Batch, torch.Tensor, torch.Tensor]:
    """A pool of NaN, four sequences in scattered blocks, a batch over them, queries, and the reference's answer."""
    spec, size = replace(spec, num_layers=2), spec.block_size
    # In the longest a kernel's loop repeats, and the last split has one token.
    lengths = (2 * size + 1, size, max(1, size // 2), 3 * SPLIT_TOKENS_MIN + 1)
    # Scattered blocks: no neighbours belong to the same sequence, and the first and the last are unused.
    counts = [-(-length // size) for length in lengths]
    order = iter(sorted(range(1, sum(counts) + 1), key=lambda block: (block % 3, -block)))
    tables = [[BlockId(block) for block in islice(order, count)] for count in counts]
    num_bytes = (sum(counts) + 2) * spec.num_layers * record_bytes(spec)
    pool = KvPool(torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device), sum(counts) + 2, spec)
    generator = torch.Generator().manual_seed(0)
    for table, length in zip(tables, lengths, strict=True):
        at_T = torch.arange(length)
        blocks_T = torch.tensor(table)[at_T // size].to(device)
        kv = torch.randn(2, length, spec.num_kv_heads, spec.head_dim, generator=generator)
        pool.kv_LN2KSD[1, blocks_T, :, :, (at_T % size).to(device)] = kv.transpose(0, 1).to(pool.dtype).to(device)
    batch = Batch(
        slices=tuple(
            SequenceSlice(
                key=RequestKey(request=RequestId(f"trial-{i}"), attempt=Attempt(0)),
                tokens=[0] * length,
                # Two start inside a block, the others at 0: both masks are used.
                start=length - 1 if phase is Phase.DECODE else (length // 2 if i in (0, 3) else 0),
                stop=length,
                block_table=table,
                sample=False,
                output_index=0,
                params=_TRIAL_PARAMS,
            )
            for i, (table, length) in enumerate(zip(tables, lengths, strict=True))
        )
    )
    q_RHD = torch.randn(batch.num_tokens, num_heads, spec.head_dim, generator=generator).to(pool.dtype).to(device)
    wide = KvPool(pool.kv_LN2KSD.float().reshape(-1).view(torch.uint8), pool.num_blocks, replace(spec, dtype="float32"))
    reference = TorchAttention(wide)
    return pool, batch, q_RHD, reference.attend(1, q_RHD.float(), reference.prepare(batch.slices))
