"""Which attention backends are admitted, by running them, and how two of them serve one batch. In the interpreter."""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.gpu_cases import SHAPES, Shape, assert_close, fill, poisoned_pool, random_batch, random_queries

# isort: split
from baton.errors import InvalidField
from engine.attention import TorchAttention
from engine.gpu import attention as libraries
from engine.gpu.attention import (
    CANDIDATES,
    Admitted,
    BackendUnfit,
    GpuAttention,
    Phase,
    TritonDecode,
    Varlen,
    VarlenPlan,
    admit,
)
from engine.gpu.kernels import SPLIT_TOKENS_MIN
from engine.kv_pool import KvPool
from engine.types import Batch

SMALL = Shape(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
PLAIN = SHAPES[0]


def varlen_by_torch(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
    """Stands in for a library's kernel for uneven lengths: float32, one sequence after another."""
    out = []
    for i in range(len(plan.query_starts) - 1):
        rows = slice(int(plan.query_starts[i]), int(plan.query_starts[i + 1]))
        columns = slice(int(plan.context_starts[i]), int(plan.context_starts[i + 1]))
        group = q_RHD.shape[1] // k_CKD.shape[1]
        q, k, v = q_RHD[rows].float(), k_CKD[columns].float(), v_CKD[columns].float()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,chd->hrc", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        out.append(torch.einsum("hrc,chd->rhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(out).to(q_RHD.dtype)


def gather_by_torch(pool: KvPool, num_heads: int) -> Varlen:
    return Varlen(pool, varlen_by_torch)


def broken(pool: KvPool, num_heads: int) -> TorchAttention:
    raise RuntimeError("no kernel image is available for execution on the device")


def missing(pool: KvPool, num_heads: int) -> TorchAttention:
    raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")


def unfit(pool: KvPool, num_heads: int) -> TorchAttention:
    raise BackendUnfit("takes pages of 256 tokens")


class Wrong(TorchAttention):
    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().attend(layer, q_RHD, plan) * 1.1


class ReadsTooFar(TorchAttention):
    """Lets a slot past the end of the context into the result."""

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().attend(layer, q_RHD, plan) * float("nan")


class Misshapen(TorchAttention):
    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().attend(layer, q_RHD, plan)[:-1]


def admitted(*makers: Any, phase: Phase = Phase.PREFILL, shape: Shape = SMALL) -> Admitted:
    candidates = {f"{i}-{maker.__name__}": maker for i, maker in enumerate(makers)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CANDIDATES, phase, candidates)
        return admit(poisoned_pool(shape, 8), shape.heads, phase)


@pytest.mark.parametrize(
    ("maker", "problem"),
    [
        (missing, "not installed (No module named 'flash_attn')"),
        (unfit, "takes pages of 256 tokens"),
        (broken, "failed: RuntimeError: no kernel image is available for execution on the device"),
        (ReadsTooFar, "wrong by nan, 3e-02 is allowed"),
        (Misshapen, "gives (233, 4, 64) instead of (234, 4, 64)"),
    ],
)
def test_a_backend_that_fails_its_trial_is_rejected(maker: Any, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    """The next one in the list is taken, and the reason is told."""
    caplog.set_level(logging.CRITICAL, logger="baton")
    found = admitted(maker, TorchAttention)
    assert isinstance(found.backend, TorchAttention)
    assert found.name == "1-TorchAttention"
    assert str(found) == f"1-TorchAttention; not used: 0-{maker.__name__}: {problem}"


def test_a_backend_that_computes_nonsense_is_found_out() -> None:
    """Off by a tenth: no error, no NaN, and refused by comparing with the reference."""
    found = admitted(Wrong, TorchAttention)
    assert list(found.rejected) == ["0-Wrong"]
    assert found.rejected["0-Wrong"].startswith("wrong by 1.0e-01")


class OneSplit(TritonDecode):
    """Right for what fits in one split, as short contexts do."""

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        return super().attend(layer, q_RHD, replace(plan, contexts_B=plan.contexts_B.clamp(max=SPLIT_TOKENS_MIN)))


def test_a_kernel_that_is_wrong_in_its_second_split_is_found_out() -> None:
    """A context of more than three splits is tried."""
    found = admitted(OneSplit, TritonDecode, phase=Phase.DECODE)
    assert found.rejected["0-OneSplit"].startswith("wrong by ")
    assert found.name == "1-TritonDecode"


def test_the_first_that_agrees_is_taken_and_the_rest_is_not_run() -> None:
    """Triton's decode kernel is good: nothing after it is tried."""
    found = admitted(TritonDecode, broken, phase=Phase.DECODE)
    assert isinstance(found.backend, TritonDecode)
    assert str(found) == "0-TritonDecode"


def test_a_wanted_backend_is_taken_or_the_start_fails() -> None:
    """A setting that names one skips the better ones; one that fails its trial, or does not exist, is an error."""
    pool = poisoned_pool(SMALL, 8)
    assert admit(pool, SMALL.heads, Phase.DECODE, wanted="torch").name == "torch"
    with pytest.raises(InvalidField, match=r"attention_prefill cannot be torch-varlen: .* needs a CUDA device"):
        admit(pool, SMALL.heads, Phase.PREFILL, wanted="torch-varlen")
    with pytest.raises(InvalidField, match="attention_decode is 'fast'; must be auto, or one of triton, flashinfer"):
        admit(pool, SMALL.heads, Phase.DECODE, wanted="fast")


def test_on_a_cpu_the_libraries_say_that_they_need_a_gpu() -> None:
    """Of the real candidates the reference is left for prefill; every other one has told why not."""
    found = admit(poisoned_pool(SMALL, 8), SMALL.heads, Phase.PREFILL)
    assert found.name == "torch"
    assert [*found.rejected, "torch"] == list(CANDIDATES[Phase.PREFILL])
    assert all("needs a CUDA device" in problem for problem in found.rejected.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_mixed_batches_agree_with_the_reference(shape: Shape, seed: int) -> None:
    """Decode and prefill slices in any order, chunks that start inside blocks: each query gets its own answer."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = poisoned_pool(shape, 60)
    batch = random_batch(chance, pool, sequences=6, context_max=5 * shape.block_size)
    if seed == 0:  # as the scheduler has it: running sequences first
        batch = Batch(slices=tuple(sorted(batch.slices, key=lambda s: s.stop - s.start > 1)))
    fill(pool, batch, generator)
    q_THD = random_queries(pool, shape, batch, generator)
    attention = GpuAttention(pool, prefill=gather_by_torch(pool, shape.heads), decode=TritonDecode(pool, shape.heads))
    plan = attention.prepare(batch.slices)
    wide = KvPool(
        pool.kv_LN2KSD.float().reshape(-1).view(torch.uint8), pool.num_blocks, replace(shape.spec, dtype="float32")
    )
    reference = TorchAttention(wide)
    wanted = reference.prepare(batch.slices)
    assert_close(attention.attend(1, q_THD, plan), reference.attend(1, q_THD.float(), wanted), shape.dtype)


class OnCuda:
    """A pool that says it is on a GPU; its tensors stay here. For our side of a call into a library."""

    def __init__(self, pool: KvPool) -> None:
        self.spec, self.dtype, self.kv_LN2KSD, self.num_blocks = pool.spec, pool.dtype, pool.kv_LN2KSD, pool.num_blocks
        self._asked = 0

    @property
    def device(self) -> Any:
        # The check at the making is the first to ask.
        self._asked += 1
        return torch.device("cuda") if self._asked == 1 else torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    made = ModuleType(module)
    made.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, module, made)


def compare(backend: Any, pool: KvPool, batch: Batch, q_THD: torch.Tensor) -> None:
    reference = TorchAttention(pool)
    found = backend.attend(1, q_THD, backend.prepare(batch.slices))
    assert_close(found, reference.attend(1, q_THD, reference.prepare(batch.slices)), pool.spec.dtype)


def case(shape: Shape) -> tuple[KvPool, Batch, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    pool = poisoned_pool(shape, 20)
    batch = random_batch(random.Random(5), pool, sequences=3, context_max=3 * shape.block_size)
    fill(pool, batch, generator)
    return pool, batch, random_queries(pool, shape, batch, generator)


def paged_by_torch(
    q: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, contexts: list[int], table: torch.Tensor, starts: Any
) -> torch.Tensor:
    """What a paged kernel computes, from the arguments that one gets."""
    size = k_NSKD.shape[1]
    k_CKD, v_CKD = (
        torch.cat([x[table[i, : -(-n // size)].long()].flatten(0, 1)[:n] for i, n in enumerate(contexts)])
        for x in (k_NSKD, v_NSKD)
    )
    context_starts = torch.tensor([0, *torch.tensor(contexts).cumsum(0).tolist()])
    return varlen_by_torch(q, k_CKD, v_CKD, SimpleNamespace(query_starts=starts, context_starts=context_starts))  # type: ignore[arg-type]


def test_flash_attention_3_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region's records are handed over as pages with strides, last dimension contiguous, tables int32."""

    def with_kvcache(q: Any, k: Any, v: Any, **a: Any) -> torch.Tensor:
        assert a["causal"] and a["page_table"].dtype == a["cache_seqlens"].dtype == torch.int32
        assert k.stride(-1) == v.stride(-1) == 1 and k.shape[1:] == (16, 2, 64)
        return paged_by_torch(q, k, v, a["cache_seqlens"].tolist(), a["page_table"], a["cu_seqlens_q"])

    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=with_kvcache)
    pool, batch, q_THD = case(SMALL)
    compare(libraries.flash3_paged(OnCuda(pool), 4), pool, batch, q_THD)  # type: ignore[arg-type]


def test_flash_attention_2_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with pages of a multiple of 256 tokens; the refusal names the setting. Where contexts begin is worked out
    for a step, not in each layer, where the host would wait for the device."""
    starts: list[torch.Tensor] = []

    def varlen(q: Any, k: Any, v: Any, **a: Any) -> torch.Tensor:
        starts.append(a["cu_seqlens_k"])
        contexts = a["cu_seqlens_k"].diff().tolist()
        assert a["causal"] and a["max_seqlen_k"] == max(contexts)
        return paged_by_torch(q, k, v, contexts, a["block_table"], a["cu_seqlens_q"])

    install(monkeypatch, "flash_attn", flash_attn_varlen_func=varlen)
    pool, batch, q_THD = case(SHAPES[-1])
    found = OnCuda(pool)
    backend = libraries.flash_varlen("flash_attn", pages=True)(found, 2)  # type: ignore[arg-type]
    found._asked = 1
    compare(backend, pool, batch, q_THD)
    plan = backend.prepare(batch.slices)
    for layer in range(2):
        backend.attend(layer, q_THD, plan)
    assert starts[1] is starts[2]
    with pytest.raises(BackendUnfit, match=r"multiple of 256 tokens, not 16: set engine\.block_size"):
        libraries.flash_varlen("flash_attn", pages=True)(OnCuda(case(SMALL)[0]), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("gives_lse", [False, True])
def test_flash_attention_over_gathered_contexts(monkeypatch: pytest.MonkeyPatch, gives_lse: bool) -> None:
    """The build of 3 on PyPI: contexts are copied together first. Some versions return a pair."""

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, causal: bool
    ) -> Any:
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        plan: Any = SimpleNamespace(query_starts=cu_seqlens_q, context_starts=cu_seqlens_k)
        out = varlen_by_torch(q, k, v, plan)
        return (out, None) if gives_lse else out

    install(monkeypatch, "fa3_fwd_interface", flash_attn_varlen_func=flash_attn_varlen_func)
    pool, batch, q_THD = case(SMALL)
    compare(libraries.flash_varlen("fa3_fwd_interface")(OnCuda(pool), 4), pool, batch, q_THD)  # type: ignore[arg-type]


def old_varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, is_causal: bool) -> Any:
    """As torch 2.10 has it: no grouped heads."""
    assert is_causal and q.shape[1] == k.shape[1]
    return varlen_by_torch(q, k, v, SimpleNamespace(query_starts=cu_q, context_starts=cu_k))  # type: ignore[arg-type]


def new_varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, window_size: Any, enable_gqa: bool = False
) -> Any:
    assert window_size == (-1, 0) and enable_gqa
    return varlen_by_torch(q, k, v, SimpleNamespace(query_starts=cu_q, context_starts=cu_k))  # type: ignore[arg-type]


@pytest.mark.parametrize("varlen", [old_varlen, new_varlen])
def test_torch_varlen_of_several_versions(monkeypatch: pytest.MonkeyPatch, varlen: Any) -> None:
    """Its parameters have changed between versions: they are read from its signature."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    pool, batch, q_THD = case(SMALL)
    compare(libraries.torch_varlen(OnCuda(pool), 4), pool, batch, q_THD)  # type: ignore[arg-type]


def test_flashinfer_sees_the_region_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head-major pages are the region's own layout: nothing is transposed or copied."""

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
            assert kv_layout == "HND"

        def plan(self, starts: Any, page_starts: Any, pages: Any, last_lens: Any, *sizes: int, **options: Any) -> None:
            assert sizes == (4, 2, 64, 16) and options == {"causal": True, "q_data_type": torch.bfloat16}
            used = page_starts.diff().tolist()
            self.starts = starts
            self.contexts = [(n - 1) * 16 + last for n, last in zip(used, last_lens.tolist(), strict=True)]
            self.table = torch.zeros(len(used), max(used), dtype=torch.int32)
            for i, part in enumerate(pages.split(used)):
                self.table[i, : used[i]] = part

        def run(self, q: torch.Tensor, kv_N2KSD: torch.Tensor) -> torch.Tensor:
            k, v = kv_N2KSD[:, 0].transpose(1, 2), kv_N2KSD[:, 1].transpose(1, 2)
            return paged_by_torch(q, k, v, self.contexts, self.table, self.starts)

    monkeypatch.setattr(libraries, "FLASHINFER_WORKSPACE_BYTES", 16)
    install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    pool, batch, q_THD = case(SMALL)
    compare(libraries.FlashInferPaged(OnCuda(pool), 4), pool, batch, q_THD)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [libraries.torch_varlen, libraries.flash_varlen("flash_attn"), libraries.flash3_paged])
def test_float32_is_refused_by_name(make: Any) -> None:
    """Flash attention has no float32: the exact mode keeps the reference for prefill."""
    with pytest.raises(BackendUnfit, match="computes in float16 and bfloat16, not in float32"):
        make(OnCuda(poisoned_pool(PLAIN, 4)), PLAIN.heads)
