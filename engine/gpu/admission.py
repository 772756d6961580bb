"""Which attention backends a node uses: those that, run at start on this device, agree with the torch reference.

Importing a library tells little: a wheel may be built for another torch, another architecture or other page sizes, and
some compute nonsense instead of refusing. So each candidate is run, over a small pool of NaN of the node's own shape,
type and block size, with sequences that begin, end and pause inside blocks, one of them over several tiles and splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from baton.errors import InvalidField
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from baton.log import get_log
from engine.attention import TorchAttention
from engine.gpu import libraries
from engine.gpu.attention import BackendUnfit, PagedAttention, TorchPaged, TritonDecode
from engine.gpu.config import AUTO
from engine.gpu.paged import SPLIT_TOKENS_MIN
from engine.kv_pool import KvPool
from engine.types import Batch, KvSpec, SamplingParams, SequenceSlice

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
        Candidate(name="flash3-paged", make=libraries.flash3_paged),
        Candidate(name="flash3-gather", make=libraries.flash_varlen("flash_attn_interface")),
        Candidate(name="fa3-fwd-gather", make=libraries.flash_varlen("fa3_fwd_interface")),
        Candidate(name="flashinfer", make=libraries.FlashInferPaged),
        Candidate(name="flash2-paged", make=libraries.flash2_paged),
        Candidate(name="torch-varlen", make=libraries.torch_varlen),
        Candidate(name="flash2-gather", make=libraries.flash_varlen("flash_attn")),
        Candidate(name="torch", make=TorchPaged),
    ),
    Phase.DECODE: (
        Candidate(name="triton", make=TritonDecode),
        Candidate(name="flashinfer", make=libraries.FlashInferPaged),
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
