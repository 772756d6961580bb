"""Attention on a GPU: one backend for slices of one token (decode), one for longer ones (prefill), chosen apart.

Attention of libraries that may be installed is wrapped as `PagedAttention`: each maker raises ImportError or
BackendUnfit. None of them can run on a CPU: what the tests run is the choice among them, and our side of each call with
a stand-in for the library. That a library really computes what we think is seen at each start by a trial.

A node uses the backends that, run at start on this device, agree with the torch reference.

Importing a library tells little: a wheel may be built for another torch, another architecture or other page sizes, and
some compute nonsense instead of refusing. So each candidate is run, over a small pool of NaN of the node's own shape,
type and block size, with sequences that begin, end and pause inside blocks, one of them over several tiles and splits.

Shape suffixes as in engine/attention.py; R query rows of the slices of one part, M columns of the block tables.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from baton.errors import InvalidField
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from baton.log import get_log
from engine.attention import AttentionMetadata, TorchAttention
from engine.gpu import paged
from engine.gpu.config import AUTO
from engine.gpu.paged import SPLIT_TOKENS_MIN
from engine.kv_pool import KvPool, to_device
from engine.types import Batch, KvSpec, SamplingParams, SequenceSlice


class BackendUnfit(Exception):
    """A backend cannot serve this shape, type or device; the text says what it would need."""


class PagedAttention(Protocol):
    """Attention of some slices over the pool. Made for one pool; used by the engine thread only."""

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> Any:
        """Once per step: what `attend` needs in every layer."""
        ...

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        """Each query over its sequence up to and including itself -> [R, H, D]. K and V of the step are stored."""
        ...


class TorchPaged:
    """The reference, whatever the device: gathers each sequence and calls torch's own attention."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        del num_heads
        self._attention = TorchAttention(pool)

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> AttentionMetadata:
        return self._attention.prepare(Batch(slices=slices))

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: AttentionMetadata) -> torch.Tensor:
        return self._attention.attend(layer, q_RHD, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Block tables and context lengths of slices of one token, int32, on the pool's device."""

    tables_BM: torch.Tensor
    contexts_B: torch.Tensor
    num_splits: int


class TritonDecode:
    """Our split-KV kernel over the region as it lies: `paged.decode`. Any block size, head dimension and type."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises BackendUnfit."""
        if num_heads % pool.spec.num_kv_heads:
            raise BackendUnfit(f"{num_heads} query heads do not share {pool.spec.num_kv_heads} KV heads evenly")
        if pool.device.type != "cuda" and not paged.interpreted():
            raise BackendUnfit(f"Triton has no kernels for {pool.device}: it needs a CUDA device")
        self._pool = pool
        self._processors = processors(pool.device)

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> DecodePlan:
        assert all(s.stop - s.start == 1 for s in slices), "decode takes one token of each sequence"
        size = self._pool.spec.block_size
        columns = max(-(-s.stop // size) for s in slices)
        tables_BM = np.zeros((len(slices), columns), dtype=np.int32)
        for row, s in enumerate(slices):
            needed = -(-s.stop // size)
            tables_BM[row, :needed] = s.block_table[:needed]
        contexts_B = np.array([s.stop for s in slices], dtype=np.int32)
        device = self._pool.device
        return DecodePlan(
            tables_BM=to_device(tables_BM, device),
            contexts_B=to_device(contexts_B, device),
            num_splits=self.num_splits(len(slices), int(contexts_B.max())),
        )

    def num_splits(self, rows: int, context_max: int) -> int:
        """For launches with so many rows, none of which has a longer context."""
        return paged.choose_splits(rows, self._pool.spec.num_kv_heads, context_max, self._processors)

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        return paged.decode(self._pool, layer, q_RHD, plan.tables_BM, plan.contexts_B, plan.num_splits)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 where there are none."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenPlan:
    """Contexts to gather, and where each sequence's queries and keys begin (int32 [sequences + 1])."""

    contexts: paged.GatherPlan
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    queries_max: int
    context_max: int


class Varlen(Protocol):
    """Causal attention of sequences one after another; the last query of each sees its last key."""

    def __call__(
        self, q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan
    ) -> torch.Tensor: ...


class GatherVarlen:
    """Copies the contexts of the chunk together, once in each layer, and gives them to a kernel for uneven lengths.

    The copy moves each K and V twice where the attention of a chunk of some hundred tokens reads them that often from
    caches: it is small beside it, and free of any rule about pages.
    """

    def __init__(self, pool: KvPool, varlen: Varlen) -> None:
        self._pool = pool
        self._varlen = varlen

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> VarlenPlan:
        return VarlenPlan(
            contexts=paged.plan_gather(self._pool, Batch(slices=slices)),
            query_starts=starts_of([s.stop - s.start for s in slices], self._pool.device),
            context_starts=starts_of([s.stop for s in slices], self._pool.device),
            queries_max=max(s.stop - s.start for s in slices),
            context_max=max(s.stop for s in slices),
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        k_CKD, v_CKD = paged.gather(self._pool, layer, plan.contexts)
        return self._varlen(q_RHD, k_CKD, v_CKD, plan)


def starts_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """0 and the running sums -> int32 [sequences + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return to_device(starts, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlan:
    decode: Any
    prefill: Any
    decode_rows_R: torch.Tensor | None
    """Where the decode queries are in the batch; None where they are the first ones, in order."""
    prefill_rows_R: torch.Tensor | None
    num_decode: int
    num_prefill: int
    """Slices of either part."""


class GpuAttention:
    """An `AttentionBackend` made of two: slices of one token go to `decode`, the others to `prefill`."""

    def __init__(self, pool: KvPool, *, prefill: PagedAttention, decode: PagedAttention) -> None:
        self._pool = pool
        self.prefill = prefill
        self.decode = decode

    def prepare(self, batch: Batch) -> AttentionMetadata:
        device = self._pool.device
        short = tuple(s for s in batch.slices if s.stop - s.start == 1)
        long = tuple(s for s in batch.slices if s.stop - s.start > 1)
        # The scheduler puts running sequences first, so rows seldom have to be picked apart.
        in_order = batch.slices == short + long
        decode_rows: list[int] = []
        prefill_rows: list[int] = []
        row = 0
        for s in () if in_order else batch.slices:
            rows = range(row, row + s.stop - s.start)
            (decode_rows if len(rows) == 1 else prefill_rows).extend(rows)
            row += len(rows)
        positions_T = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in batch.slices])
        return AttentionMetadata(
            slots=self._pool.map_slots(batch),
            positions_T=to_device(positions_T, device),
            plan=_StepPlan(
                decode=self.decode.prepare(short) if short else None,
                prefill=self.prefill.prepare(long) if long else None,
                decode_rows_R=None if in_order else to_device(np.array(decode_rows, dtype=np.int64), device),
                prefill_rows_R=None if in_order else to_device(np.array(prefill_rows, dtype=np.int64), device),
                num_decode=len(short),
                num_prefill=len(long),
            ),
        )

    def attend(self, layer: int, q_THD: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        plan: _StepPlan = metadata.plan
        if not plan.num_prefill:
            return self.decode.attend(layer, q_THD, plan.decode)
        if not plan.num_decode:
            return self.prefill.attend(layer, q_THD, plan.prefill)
        out_THD = torch.empty_like(q_THD)
        decode_rows = slice(None, plan.num_decode) if plan.decode_rows_R is None else plan.decode_rows_R
        prefill_rows = slice(plan.num_decode, None) if plan.prefill_rows_R is None else plan.prefill_rows_R
        out_THD[decode_rows] = self.decode.attend(layer, q_THD[decode_rows], plan.decode)
        out_THD[prefill_rows] = self.prefill.attend(layer, q_THD[prefill_rows], plan.prefill)
        return out_THD


FLASH2_PAGE_MULTIPLE = 256
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def _need_half(pool: KvPool, name: str) -> None:
    if pool.device.type != "cuda":
        raise BackendUnfit(f"{name} needs a CUDA device, not {pool.device}")
    if pool.dtype not in (torch.float16, torch.bfloat16):
        raise BackendUnfit(f"{name} computes in float16 and bfloat16, not in {pool.spec.dtype}")


def torch_varlen(pool: KvPool, num_heads: int) -> GatherVarlen:
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
        # This version of torch wants as many KV heads as query heads.
        repeats = group

    def attend(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        if repeats > 1:
            k_CKD, v_CKD = k_CKD.repeat_interleave(repeats, dim=1), v_CKD.repeat_interleave(repeats, dim=1)
        out = varlen_attn(
            q_RHD,
            k_CKD,
            v_CKD,
            plan.query_starts,
            plan.context_starts,
            plan.queries_max,
            plan.context_max,
            **options,
        )
        assert isinstance(out, torch.Tensor), "the log-sum-exp was not asked for"
        return out

    return GatherVarlen(pool, attend)


def flash_varlen(module: str) -> Callable[[KvPool, int], GatherVarlen]:
    """`flash_attn_varlen_func` of a flash-attention package: 2 in `flash_attn`, 3 in `flash_attn_interface`, or
    `fa3_fwd_interface`, the build of 3 on PyPI, which has no general paged mode."""

    def make(pool: KvPool, num_heads: int) -> GatherVarlen:
        del num_heads
        _need_half(pool, module)
        function = importlib.import_module(module).flash_attn_varlen_func
        names = inspect.signature(function).parameters

        def attend(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
            arguments: dict[str, Any] = {
                "cu_seqlens_q": plan.query_starts,
                "cu_seqlens_k": plan.context_starts,
                "max_seqlen_q": plan.queries_max,
                "max_seqlen_k": plan.context_max,
                "causal": True,
            }
            assert arguments.keys() <= names.keys(), (module, sorted(arguments.keys() - names.keys()))
            out = function(q_RHD, k_CKD, v_CKD, **arguments)
            # Some versions of 3 give the log-sum-exp as well.
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first

        return GatherVarlen(pool, attend)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    tables_BM: torch.Tensor
    contexts_B: torch.Tensor
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    queries_max: int
    context_max: int


class FlashPaged:
    """flash-attention over the region's own pages, which it sees as [N, S, K, D] with strides."""

    def __init__(self, pool: KvPool, call: Callable[..., torch.Tensor]) -> None:
        self._pool = pool
        self._call = call

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> PagedPlan:
        size, device = self._pool.spec.block_size, self._pool.device
        tables_BM = np.zeros((len(slices), max(-(-s.stop // size) for s in slices)), dtype=np.int32)
        for row, s in enumerate(slices):
            needed = -(-s.stop // size)
            tables_BM[row, :needed] = s.block_table[:needed]
        return PagedPlan(
            tables_BM=to_device(tables_BM, device),
            contexts_B=to_device(np.array([s.stop for s in slices], dtype=np.int32), device),
            query_starts=starts_of([s.stop - s.start for s in slices], device),
            context_starts=starts_of([s.stop for s in slices], device),
            queries_max=max(s.stop - s.start for s in slices),
            context_max=max(s.stop for s in slices),
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        kv_N2KSD = self._pool.kv_LN2KSD[layer]
        k_NSKD, v_NSKD = kv_N2KSD[:, 0].transpose(1, 2), kv_N2KSD[:, 1].transpose(1, 2)
        return self._call(q_RHD, k_NSKD, v_NSKD, plan)


def flash2_paged(pool: KvPool, num_heads: int) -> FlashPaged:
    """flash-attn 2 with block tables."""
    del num_heads
    _need_half(pool, "flash_attn")
    if pool.spec.block_size % FLASH2_PAGE_MULTIPLE:
        raise BackendUnfit(
            f"flash-attention 2 takes pages of a multiple of {FLASH2_PAGE_MULTIPLE} tokens, "
            f"not {pool.spec.block_size}: set engine.block_size, or use another backend"
        )
    function = importlib.import_module("flash_attn").flash_attn_varlen_func

    def call(q_RHD: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        out: torch.Tensor = function(
            q_RHD,
            k_NSKD,
            v_NSKD,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.context_starts,
            max_seqlen_q=plan.queries_max,
            max_seqlen_k=plan.context_max,
            causal=True,
            block_table=plan.tables_BM,
        )
        return out

    return FlashPaged(pool, call)


def flash3_paged(pool: KvPool, num_heads: int) -> FlashPaged:
    """flash-attn 3 (`flash_attn_interface`) with a page table."""
    del num_heads
    _need_half(pool, "flash_attn_interface")
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(q_RHD: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
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
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return FlashPaged(pool, call)


class FlashInferPaged:
    """FlashInfer's paged prefill over head-major pages [N, 2, K, S, D]: the region as it lies."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises ImportError or BackendUnfit."""
        _need_half(pool, "FlashInfer")
        flashinfer = importlib.import_module("flashinfer")
        workspace_U8 = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._pool = pool
        self._num_heads = num_heads
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_U8, kv_layout="HND")

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> None:
        """The plan is kept in the wrapper: one step at a time."""
        spec, device = self._pool.spec, self._pool.device
        used = [-(-s.stop // spec.block_size) for s in slices]
        blocks = np.concatenate([np.asarray(s.block_table[:n], np.int32) for s, n in zip(slices, used, strict=True)])
        self._wrapper.plan(
            starts_of([s.stop - s.start for s in slices], device),
            starts_of(used, device),
            to_device(blocks, device),
            to_device(np.array([(s.stop - 1) % spec.block_size + 1 for s in slices], dtype=np.int32), device),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend that might serve a phase. `make` raises ImportError or BackendUnfit where it cannot."""

    name: str
    make: Callable[[KvPool, int], PagedAttention]


CANDIDATES: dict[Phase, tuple[Candidate, ...]] = {
    Phase.PREFILL: (
        Candidate(name="flash3-paged", make=flash3_paged),
        Candidate(name="flash3-gather", make=flash_varlen("flash_attn_interface")),
        Candidate(name="fa3-fwd-gather", make=flash_varlen("fa3_fwd_interface")),
        Candidate(name="flashinfer", make=FlashInferPaged),
        Candidate(name="flash2-paged", make=flash2_paged),
        Candidate(name="torch-varlen", make=torch_varlen),
        Candidate(name="flash2-gather", make=flash_varlen("flash_attn")),
        Candidate(name="torch", make=TorchPaged),
    ),
    Phase.DECODE: (
        Candidate(name="triton", make=TritonDecode),
        Candidate(name="flashinfer", make=FlashInferPaged),
        Candidate(name="torch", make=TorchPaged),
    ),
}
"""Best first. The reference ends each list: it is never refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one candidate. `problem` None: it agreed with the reference."""

    name: str
    problem: str | None
    error: float | None = None
    """Largest difference from the reference, of the largest reference value."""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}" if self.problem else f"{self.name} (off by {self.error:.1e})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The backend of one phase, and why it and not a better one."""

    phase: Phase
    backend: PagedAttention
    name: str
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        """For `baton describe`: the one in use, then those that were passed over."""
        passed_over = "; ".join(str(trial) for trial in self.trials if trial.problem)
        return f"{self.name}; not used: {passed_over}" if passed_over else self.name


def admit(
    pool: KvPool,
    num_heads: int,
    phase: Phase,
    *,
    wanted: str = AUTO,
    candidates: Sequence[Candidate] | None = None,
) -> Admitted:
    """Run the candidates of a phase, best first, until one agrees with the reference. Runs kernels: takes seconds.

    Raises:
        InvalidField: `wanted` names a backend that does not exist, or that failed its trial; the text says how.
    """
    choices = list(CANDIDATES[phase] if candidates is None else candidates)
    field = f"attention_{phase.value}"
    if wanted != AUTO:
        choices = [candidate for candidate in choices if candidate.name == wanted]
        if not choices:
            names = ", ".join(candidate.name for candidate in CANDIDATES[phase])
            raise InvalidField(field, f"is {wanted!r}; must be {AUTO}, or one of {names}")
    trials: list[Trial] = []
    for candidate in choices:
        trial = try_out(candidate, pool.spec, num_heads, phase, pool.device)
        trials.append(trial)
        if trial.problem is None:
            admitted = Admitted(
                phase=phase, backend=candidate.make(pool, num_heads), name=candidate.name, trials=tuple(trials)
            )
            log.info("attention", phase=phase.value, backend=str(admitted))
            return admitted
    raise InvalidField(field, f"cannot be {wanted}: {'; '.join(map(str, trials))}. Set it to {AUTO}.")


def try_out(candidate: Candidate, spec: KvSpec, num_heads: int, phase: Phase, device: torch.device) -> Trial:
    """Run one candidate on a pool of its own. Never raises: what goes wrong is the trial's `problem`."""
    pool, batch, q_RHD, wanted_RHD = _trial(spec, num_heads, phase, device)
    try:
        backend = candidate.make(pool, num_heads)
        found_RHD = backend.attend(1, q_RHD, backend.prepare(batch.slices))
        error = _relative_error(found_RHD, wanted_RHD)
    except ImportError as error_importing:
        return Trial(name=candidate.name, problem=f"not installed ({error_importing})")
    except BackendUnfit as unfit:
        return Trial(name=candidate.name, problem=str(unfit))
    except Exception as failure:
        # Foreign code: whatever it raises, the node goes on with the next one.
        log.exception("attention backend failed its trial", backend=candidate.name, phase=phase.value)
        return Trial(name=candidate.name, problem=f"failed: {type(failure).__name__}: {str(failure)[:200]}")
    limit = ERROR_MAX[spec.dtype]
    if not error <= limit:
        return Trial(name=candidate.name, problem=f"wrong by {error:.1e}, {limit:.0e} is allowed", error=error)
    return Trial(name=candidate.name, problem=None, error=error)


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN where anything is; the comparison with a limit is then false."""
    if found.shape != wanted.shape:
        raise BackendUnfit(f"gives {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    difference = (found.double() - wanted.double()).abs().max()
    return float(difference / wanted.double().abs().max())


def _trial(
    spec: KvSpec, num_heads: int, phase: Phase, device: torch.device
) -> tuple[KvPool, Batch, torch.Tensor, torch.Tensor]:
    """A pool of NaN, four sequences in scattered blocks, a batch over them, queries, and the reference's answer."""
    spec, size = replace(spec, num_layers=2), spec.block_size
    # The long one: a kernel's loop goes round, and the last of its splits has one token.
    lengths = (2 * size + 1, size, max(1, size // 2), 3 * SPLIT_TOKENS_MIN + 1)
    tables, num_blocks = _scattered([-(-length // size) for length in lengths])
    pool = _nan_pool(spec, num_blocks, device)
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
                # Two go on inside a block, one is whole: both masks are met.
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
    return pool, batch, q_RHD, reference.attend(1, q_RHD.float(), reference.prepare(batch))


def _scattered(counts: Sequence[int]) -> tuple[list[list[BlockId]], int]:
    """So many blocks for each sequence, none next to another of its own, one unused at either end."""
    total = sum(counts)
    order = sorted(range(1, total + 1), key=lambda block: (block % 3, -block))
    tables, taken = [], 0
    for count in counts:
        tables.append([BlockId(block) for block in order[taken : taken + count]])
        taken += count
    return tables, total + 2


def _nan_pool(spec: KvSpec, num_blocks: int, device: torch.device) -> KvPool:
    itemsize = getattr(torch, spec.dtype).itemsize
    nbytes = spec.num_layers * num_blocks * 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * itemsize
    return KvPool(torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device), num_blocks, spec)
