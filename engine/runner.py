"""Runs a Hugging Face model over the paged region, in float32 or bfloat16.

Shape suffixes as in engine/types.py; P packed int64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import torch

from baton.ids import RequestKey
from engine.attention import PagedAttention, TorchAttention, ends_of
from engine.checkpoint import Progress, load_tensors
from engine.grammar import compute_masks
from engine.kernel_sets import KernelSet
from engine.kv_pool import DeviceMirror, KvPool, SlotMapping
from engine.model_config import (
    ComputeDtype,
    ModelConfig,
    Quantisation,
    UnsupportedModelError,
    load_model_config,
    weight_shapes,
)
from engine.models.decoder import Decoder, rotate
from engine.models.matmul import NativePacking
from engine.models.native_decoder import HEAD_DIM_MAX, NativeDecoder
from engine.native.kernels import (
    PACKED_ROWS_MIN,
    TASK_ROWS_MAX,
    AttentionPlan,
    Choice,
    Kernels,
    KernelSetMissing,
    Workspace,
    choose_kernels,
)
from engine.prompt_scores import PromptRows
from engine.sampler import ScoredRows, allow_only, draw_kernel, sample
from engine.types import Batch, KvSink, KvSpec, NullSink, SequenceSlice, StepResult, TokenLogprobs


class Forward(Protocol):
    """One model over one pool. Called from one thread at a time, inside `torch.inference_mode`."""

    def forward(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """The last layer's output for `Batch.drawing_rows` -> [W, E]. K and V of all new tokens are stored.

        `sink` is called for a layer before the last attention of that layer: the bytes travel meanwhile.
        """
        ...

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after the given rows -> [B, V]; the caller's until the next call."""
        ...


def token_ids(batch: Batch, vocab_size: int) -> torch.Tensor:
    """The new tokens of a batch -> int64 [T]; 0 for a pending token."""
    if all(s.stop - s.start == 1 for s in batch.slices):
        tokens = np.array([0 if s.token_pending else s.tokens[s.start] for s in batch.slices], dtype=np.int64)
    else:
        parts = [[0] if s.token_pending else s.tokens[s.start : s.stop] for s in batch.slices]
        tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    assert tokens.min() >= 0 and tokens.max() < vocab_size, "token id outside the vocabulary"
    return torch.from_numpy(tokens)


class TorchForward:
    """PyTorch's own operations: any device, float32 or bfloat16. The reference for the others."""

    def __init__(self, decoder: Decoder, pool: KvPool, attention: PagedAttention | None = None) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention or TorchAttention(pool)

    def forward(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """See `Forward.forward`."""
        attention = self.attention
        slots, plan = self.pool.map_slots(batch), attention.prepare(batch.slices)
        x_TE = self.decoder.embed(self.token_ids(batch))
        ends = ends_of(batch, self.pool.device)
        last = self.decoder.config.num_layers - 1

        def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            sink.layer_done(layer)
            if ends is not None and layer == last:
                return ends.attend(attention, layer, q_THD)
            return attention.attend(layer, q_THD, plan)

        return self.run_layers(x_TE, slots, attend, None if ends is None else ends.rows_W)

    def run_layers(
        self,
        x_TE: torch.Tensor,
        slots: SlotMapping,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        rows_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers. `attend` gets each layer and its queries, once K and V are stored. With `rows_W` only these rows
        are computed to the end of the last layer."""
        angles, last = self.decoder.angles(slots.positions_T), self.decoder.config.num_layers - 1
        for layer in range(last + 1):
            x_TE = self.run_layer(layer, x_TE, slots, angles, attend, rows_W if layer == last else None)
        return x_TE

    def run_layer(
        self,
        layer: int,
        x_TE: torch.Tensor,
        slots: SlotMapping,
        angles: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        rows_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer; parameters as for `run_layers`."""

        def attend_stored(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            return attend(layer, self.rotate_and_store(layer, q_THD, k_TKD, v_TKD, angles, slots))

        return self.decoder.run_layer(layer, x_TE, attend_stored, rows_W)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(x_BE)

    def token_ids(self, batch: Batch) -> torch.Tensor:
        return token_ids(batch, self.decoder.config.vocab_size).to(self.pool.device)

    def rotate_and_store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: SlotMapping,
    ) -> torch.Tensor:
        """Rotate, and store K and V in the pool -> the rotated queries."""
        self.pool.store(layer, rotate(k_TKD, *angles), v_TKD, slots)
        return rotate(q_THD, *angles)


class DeterministicForward(TorchForward):
    """Each operation of a layer gets one token at a time, in order; many times slower.

    The kernels then see the same shapes whatever else is in the step: they choose blocking and order of summation by
    shape, which is where the difference in rounding between two batches comes from.
    """

    def forward(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """See `Forward.forward`."""
        tokens = [replace(s, start=at, stop=at + 1) for s in batch.slices for at in range(s.start, s.stop)]
        singles = [Batch(slices=(token,)) for token in tokens]
        slots = [self.pool.map_slots(single) for single in singles]
        angles = [self.decoder.angles(each.positions_T) for each in slots]
        plans = [self.attention.prepare(single.slices) for single in singles]
        rows = [self.decoder.embed(self.token_ids(single)) for single in singles]
        at = 0  # the row that is being computed

        def attend(layer: int, q_1HD: torch.Tensor) -> torch.Tensor:
            if at == len(rows) - 1:
                sink.layer_done(layer)
            return self.attention.attend(layer, q_1HD, plans[at])

        for layer in range(self.decoder.config.num_layers):
            for at in range(len(rows)):
                rows[at] = self.run_layer(layer, rows[at], slots[at], angles[at], attend)
        drawing = [rows[row] for row in batch.drawing_rows]
        return torch.cat(drawing) if drawing else rows[0][:0]

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.decoder.logits(x_BE[row : row + 1].clone()) for row in range(len(x_BE))])


class NativeForward:
    """The compute kernels with packed matrices: bfloat16 on a CPU. A step with a `NullSink` is one call of it."""

    def __init__(self, decoder: NativeDecoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool

    def forward(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """See `Forward.forward`."""
        plan, positions_T = plan_attention(batch, self._pool)
        ends = None
        if len(batch.drawing_rows) < batch.num_tokens:
            drawing = [sequence for sequence, s in enumerate(batch.slices) if s.sample]
            ends = plan.ends(np.array(drawing, dtype=np.int64))
        x_TE = self._decoder.embed(token_ids(batch, self._decoder.config.vocab_size))
        layer_done = None if isinstance(sink, NullSink) else sink.layer_done
        return self._decoder.run_layers(x_TE, positions_T, plan, self._pool, layer_done, ends)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(x_BE)


def plan_attention(batch: Batch, pool: KvPool) -> tuple[AttentionPlan, torch.Tensor]:
    """The plan of a batch for the compute kernels, and the positions of its new tokens. Checks the block ids."""
    slices, block_size = batch.slices, pool.spec.block_size
    tables = [np.asarray(s.block_table[: -(-s.stop // block_size)], dtype=np.int64) for s in slices]
    starts, stops = (np.array([getattr(s, name) for s in slices], dtype=np.int64) for name in ("start", "stop"))
    counts = stops - starts
    rows_at = np.concatenate(([0], counts.cumsum()))
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    table_at_B = lengths.cumsum() - lengths
    every = np.concatenate(tables)
    assert every.min() >= 0 and every.max() < pool.num_blocks, "block id outside the region"
    sequence_T = np.repeat(np.arange(len(slices)), counts)
    positions_T = np.arange(rows_at[-1]) - rows_at[sequence_T] + starts[sequence_T]
    tasks = [
        (b, first, rows, rows >= PACKED_ROWS_MIN)
        for b, count in enumerate(counts.tolist())
        for first in range(0, count, TASK_ROWS_MAX)
        if (rows := min(TASK_ROWS_MAX, count - first))
    ]
    plan = AttentionPlan(
        tables=every,
        table_at_B=table_at_B,
        rows_at=rows_at,
        contexts_B=stops,
        tasks=np.array(tasks, dtype=np.int64),
        blocks_T=every[table_at_B[sequence_T] + positions_T // block_size],
        slots_T=positions_T % block_size,
    )
    return plan, torch.from_numpy(positions_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step whose tokens and log-probabilities are being copied to the host, in one copy."""

    slices: list[SequenceSlice]
    """The slices that draw."""
    scored: ScoredRows | None
    packed_P: torch.Tensor | None
    """In pinned memory where the device is a GPU. None: nothing is drawn."""
    done: torch.cuda.Event | None
    """Recorded after the copy, and so after the whole step."""
    prompt_logprobs: Mapping[RequestKey, list[TokenLogprobs]]

    @classmethod
    def of(
        cls,
        slices: Sequence[SequenceSlice],
        tokens_B: torch.Tensor | None,
        scored: ScoredRows | None,
        *,
        device: torch.device,
        prompt_logprobs: Mapping[RequestKey, list[TokenLogprobs]] = MappingProxyType({}),
    ) -> LaunchedStep:
        """Queue the copy on the current stream, after all other work of the step."""
        on_gpu, packed_P, done = device.type == "cuda", None, None
        if tokens_B is not None:
            drawn_P = tokens_B if scored is None else torch.cat([tokens_B, scored.packed()])
            packed_P = torch.empty(drawn_P.shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            packed_P.copy_(drawn_P, non_blocking=on_gpu)
        if on_gpu:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
        return cls(slices=list(slices), scored=scored, packed_P=packed_P, done=done, prompt_logprobs=prompt_logprobs)

    def result(self) -> StepResult:
        """Wait for the step."""
        if self.done is not None:
            self.done.synchronize()
        prompts = dict(self.prompt_logprobs)
        if self.packed_P is None:
            return StepResult(prompt_logprobs=prompts)
        numbers: np.ndarray = self.packed_P.numpy()
        count = len(self.slices)
        sampled = {s.key: token for s, token in zip(self.slices, numbers[:count].tolist(), strict=True)}
        if self.scored is None:
            return StepResult(sampled=sampled, prompt_logprobs=prompts)
        found = self.scored.by_row(numbers[count:])
        logprobs = {self.slices[row].key: each for row, each in found.items()}
        return StepResult(sampled=sampled, logprobs=logprobs, prompt_logprobs=prompts)


class ModelRunner:
    """Shared by the runners of Hugging Face models: their shapes, how they are loaded and how they draw."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        block_size: int,
        device: torch.device | str,
    ) -> None:
        """The tensors have one type, which is the KV cache's too."""
        dtypes = {tensor.dtype for tensor in tensors.values()}
        assert len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}, dtypes
        self.config = config
        self.device = torch.device(device)
        self.kv_spec = KvSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=str(dtypes.pop()).removeprefix("torch."),
        )
        self.layout = self.kv_spec.layout
        assert self.layout.num_groups == 1, "the kernels read a block table as a plain list of blocks"
        self.vocab_size = config.vocab_size
        self.context_len_max = config.context_len_max
        self.eos_token_ids = config.eos_token_ids
        self.mirror: DeviceMirror | None = None
        self._forward: Forward | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: ComputeDtype = ComputeDtype.AUTO,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Self:
        """Read a checkpoint folder; blocks while the disk reads. `progress` is called on this thread.

        `settings` are the class's other arguments.

        Raises ModelError: the folder, its config or its weights cannot be used, or cannot be quantised on this device.
        """
        config = load_model_config(folder)
        torch_dtype = torch.bfloat16 if dtype.resolve(config.stored_dtype) is ComputeDtype.BFLOAT16 else torch.float32
        tensors = load_tensors(folder, weight_shapes(config), dtype=torch_dtype, progress=progress)
        return cls(config=config, tensors=tensors, **settings)

    def draw(
        self, drawn: Sequence[SequenceSlice], logits_BV: torch.Tensor, *, blind: bool = False
    ) -> tuple[torch.Tensor, ScoredRows | None]:
        """A token for each slice, int64 [B], and the requested log-probabilities. `blind`: see `sample`. Computes the
        masks of grammars, and may overwrite the scores."""
        params = [s.params for s in drawn]
        masks, scores_BV = compute_masks(drawn), logits_BV
        if masks is not None:
            wanted = any(p.logprobs is not None for p in params)  # by the model's own scores
            scores_BV = allow_only(logits_BV, *masks, in_place=not wanted)
        tokens_B = sample(
            scores_BV,
            params,
            [s.output_index for s in drawn],
            tokens=[s.tokens for s in drawn],
            eos_token_ids=self.eos_token_ids,
            blind=blind,
        )
        return tokens_B, ScoredRows.of(logits_BV, tokens_B, params, blind=blind)

    def _begin(self, batch: Batch, sink: KvSink) -> tuple[Forward, KvSink]:
        assert batch.slices, "an empty batch has nothing to run"
        assert self._forward is not None, "bind comes before run"
        return self._forward, sink if self.mirror is None else self.mirror.begin(batch, sink)


class TorchRunner(ModelRunner):
    """A `Runner` for one model on one device. `run` is called from one thread at a time."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        block_size: int,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        quantisation: Quantisation = Quantisation.NONE,
        kernels: KernelSet = KernelSet.AUTO,
        mirrored: bool | None = None,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`, all float32 or all bfloat16; copies those not on `device`.

        `deterministic`: the scores of a token, bit for bit, depend only on the tokens before it (I6); see
        `DeterministicForward`. `mirrored`: compute on a copy of the region (engine/kv_pool.py); None: unless the device
        is the CPU. Raises UnsupportedModelError: `kernels` are not there, or the weights cannot be quantised.
        """
        super().__init__(config, tensors, block_size=block_size, device=device)
        assert self.kv_spec.dtype in ("float32", "bfloat16"), self.kv_spec.dtype
        self.deterministic = deterministic
        if mirrored or (mirrored is None and self.device.type != "cpu"):
            self.mirror = DeviceMirror(self.device)
        choice = self._choice(kernels, quantisation)
        self.kernel_set = choice.kernel_set
        self.kernels_why = choice.why
        # A CPU without AVX512-BF16 emulates products of bfloat16, eight times as slowly as it multiplies float32.
        # Weights are widened when they are loaded: for each product it would take longer than the product, in decoding.
        # K and V are stored as bfloat16 all the same, so that nodes with other kernels take them over.
        widened = self.kv_spec.dtype == "bfloat16" and self.device.type == "cpu" and not deterministic
        numbers = "float32, K and V bfloat16" if widened else self.kv_spec.dtype
        self.arithmetic = f"PyTorch's operations{', a token at a time' * deterministic} ({numbers})"
        """For people: what computes, and with which type of number."""
        self._native: NativeDecoder | None = None
        if quantisation is Quantisation.FP8:
            raise UnsupportedModelError("weights can be fp8 on a GPU only; a CPU takes int8 and int4")
        if choice.kernels is not None:
            self._native = self._native_decoder(tensors, choice.kernels, quantisation)
        elif quantisation is not Quantisation.NONE:
            raise UnsupportedModelError(
                f"weights cannot be {quantisation.value} here: that needs bfloat16 and the engine's compute kernels "
                f"({choice.why}); set quantisation to none"
            )
        else:
            dtype = torch.float32 if widened else getattr(torch, self.kv_spec.dtype)
            own = {name: tensor.to(self.device, dtype) for name, tensor in tensors.items()}
            self._decoder = Decoder(config, own)
        if self.device.type == "cpu":
            draw_kernel()  # compiled now if needed, and not in the first step

    def bind(self, region_U8: Any, num_blocks: int) -> None:
        """See `Runner.bind`. A tensor on this runner's device, or an array. A mirror allocates a copy on the device.

        Raises torch.OutOfMemoryError: the copy does not fit.
        """
        assert isinstance(region_U8, torch.Tensor) or region_U8.flags.writeable, "the region is not writable"
        if self.mirror is not None:
            region_U8 = self.mirror.open(region_U8, num_blocks, self.kv_spec)
        pool = KvPool(torch.as_tensor(region_U8), num_blocks, self.kv_spec)
        assert pool.device.type == self.device.type, (pool.device, self.device)
        if self._native is not None:
            self._forward = NativeForward(self._native, pool)
        elif self.deterministic:
            self._forward = DeterministicForward(self._decoder, pool)
        else:
            self._forward = TorchForward(self._decoder, pool)

    def unbind(self) -> None:
        """See `Runner.unbind`."""
        self._forward = None
        if self.mirror is not None:
            self.mirror.close()

    @torch.inference_mode()
    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """See `Runner.run`, and `Forward.forward` for the sink."""
        forward, sink = self._begin(batch, sink)
        prompts = PromptRows.of(batch)
        x_WE = forward.forward(batch if prompts is None else prompts.batch, sink)
        logprobs = {} if prompts is None else prompts.logprobs(x_WE, forward.logits)
        drawn = [s for s in batch.slices if s.sample]
        if not drawn:
            return StepResult(prompt_logprobs=logprobs)
        tokens_B, scored = self.draw(drawn, forward.logits(x_WE if prompts is None else x_WE[prompts.draws]))
        step = LaunchedStep.of(drawn, tokens_B, scored, device=self.device, prompt_logprobs=logprobs)
        return step.result()

    def _choice(self, wanted: KernelSet, quantisation: Quantisation) -> Choice:
        """The set, or PyTorch's operations where no set computes such a model."""
        # The deterministic results were compared with PyTorch's operations only.
        reasons = {
            f"{self.kv_spec.dtype} is computed by PyTorch's operations": self.kv_spec.dtype != "bfloat16",
            f"the compute kernels are for the CPU, not for {self.device.type}": self.device.type != "cpu",
            "engine.deterministic computes by PyTorch's operations": self.deterministic,
            f"heads of {self.config.head_dim} are more than the {HEAD_DIM_MAX} that the compute kernels take":
                self.config.head_dim > HEAD_DIM_MAX,
        }  # fmt: skip
        why = next((why for why, holds in reasons.items() if holds), None)
        if why is not None:
            return Choice(kernel_set=KernelSet.TORCH, kernels=None, why=why)
        try:
            return choose_kernels(wanted, rounded=quantisation is not Quantisation.NONE)
        except KernelSetMissing as error:
            raise UnsupportedModelError(str(error)) from error

    def _native_decoder(
        self, tensors: Mapping[str, torch.Tensor], kernels: Kernels, quantisation: Quantisation
    ) -> NativeDecoder:
        workspace = Workspace()
        packing = NativePacking(kernels, workspace, quantisation.bits)
        numbers = "bfloat16" if quantisation is Quantisation.NONE else f"bfloat16, weights {quantisation.value}"
        self.arithmetic = f"compute kernels ({numbers})"
        return NativeDecoder(self.config, tensors, kernels=kernels, packing=packing, workspace=workspace)
