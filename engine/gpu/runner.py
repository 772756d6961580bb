"""Runs a Hugging Face model on a GPU over the paged region. Shape suffixes as in engine/types.py; B rows that draw.

A launched step keeps its tokens on the device for the next step, and queues one small copy for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.gpu import kernels
from engine.gpu.attention import DecodePlan, GpuAttention, Phase, TritonDecode, admit
from engine.gpu.config import GpuConfig
from engine.gpu.graphs import HOST_KNOWS, Capture, CudaCapture, DecodeGraphs, DecodeInputs
from engine.gpu.linears import admit_weights
from engine.kv_pool import KvPool, SlotMapping, to_device
from engine.model_config import ModelConfig, Quantisation
from engine.models.decoder import Decoder, fused_rms_norm
from engine.prompt_scores import PromptRows
from engine.runner import LaunchedStep, ModelRunner, TorchForward, token_ids
from engine.sampler import draws_blind
from engine.types import Batch, KvSink, NullSink, SamplingParams, SequenceSlice, StepResult, TokenLogprobs

OVERLAP_ROWS_MAX = 4096
"""Tokens of a step that the next step may read on the device."""


class FutureTokens:
    """The tokens of the step launched last, on the device, for the next step.

    One buffer serves all steps: on the stream, a step reads it before it writes its own tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.zeros(OVERLAP_ROWS_MAX, dtype=torch.int64, device=device)
        """Never moves: captured graphs read it."""
        self._rows: dict[RequestKey, int] = {}

    def row_of(self, piece: SequenceSlice) -> int:
        """The row of the slice's one new token; HOST_KNOWS if it is in `piece.tokens`."""
        return self._rows[piece.key] if piece.token_pending else HOST_KNOWS

    def keep(self, slices: Sequence[SequenceSlice], tokens_B: torch.Tensor | None) -> None:
        """Keep the tokens that a queued step draws for these slices, in this order; None: it draws none."""
        kept = slices[:OVERLAP_ROWS_MAX]
        self._rows = {piece.key: row for row, piece in enumerate(kept)}
        if tokens_B is not None:
            # A sequence without a token leaves with this step, but its surplus slice needs a valid id.
            self.ids[: len(kept)].copy_(tokens_B[: len(kept)].clamp(min=0))


def pick(ids_B: torch.Tensor, rows_B: torch.Tensor, future_ids: torch.Tensor) -> torch.Tensor:
    """The tokens of a step's rows: those of `future_ids` at `rows_B`, or of `ids_B` where that is HOST_KNOWS."""
    return torch.where(rows_B == HOST_KNOWS, ids_B.to(torch.int64), future_ids[rows_B.clamp(min=0)])


@dataclass(slots=True, eq=False)
class UndrawnStep:
    """A launched step that has grammars, and so needs the tokens of the step before on the host. While the device
    computes its scores, that step is collected; then it is drawn, before anything is queued behind it."""

    drawn: Sequence[SequenceSlice]
    logits_BV: torch.Tensor
    prompt_logprobs: Mapping[RequestKey, list[TokenLogprobs]]
    step: LaunchedStep | None = None
    """Once it is drawn."""


class GpuForward(TorchForward):
    """With Triton's kernels, and tokens that may be only on the device."""

    attention: GpuAttention

    def __init__(self, decoder: Decoder, pool: KvPool, attention: GpuAttention, future: FutureTokens) -> None:
        super().__init__(decoder, pool, attention)
        self._future = future

    def token_ids(self, batch: Batch) -> torch.Tensor:
        device = self.pool.device
        ids_T = to_device(token_ids(batch, self.decoder.config.vocab_size).numpy(), device)
        if not any(s.token_pending for s in batch.slices):
            return ids_T
        rows = np.array([self._future.row_of(s) for s in batch.slices], dtype=np.int64)
        rows_T = to_device(rows.repeat([s.stop - s.start for s in batch.slices]), device)
        return pick(ids_T, rows_T, self._future.ids)

    def rotate_and_store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: SlotMapping,
    ) -> torch.Tensor:
        return kernels.rotate_and_store(self.pool, layer, q_THD, k_TKD, v_TKD, angles, slots.blocks_T, slots.slots_T)

    def decode(self, inputs: DecodeInputs, context_max: int) -> torch.Tensor:
        """From token ids to scores, without a look at any value: captured as a graph."""
        decoder, backend, size = self.decoder, self.attention.decode, self.pool.spec.block_size
        assert isinstance(backend, TritonDecode)
        positions_B = inputs.positions_B.to(torch.int64)
        tables_BM = inputs.tables_BM.contiguous()
        blocks_B = tables_BM.gather(1, (positions_B // size)[:, None])[:, 0].to(torch.int64)
        slots = SlotMapping(positions_T=positions_B, blocks_T=blocks_B, slots_T=positions_B % size)
        plan = DecodePlan(
            tables_BM=tables_BM,
            contexts_B=(inputs.positions_B + 1).contiguous(),
            num_splits=backend.num_splits(len(positions_B), context_max),
        )
        x_BE = decoder.embed(pick(inputs.ids_B, inputs.future_rows_B.to(torch.int64), self._future.ids))
        x_BE = self.run_layers(x_BE, slots, lambda layer, q_BHD: backend.attend(layer, q_BHD, plan))
        return decoder.logits(x_BE)


_REHEARSAL = RequestKey(request=RequestId("rehearsal"), attempt=Attempt(0))


class GpuRunner(ModelRunner):
    """An `OverlapRunner` for one model on one device; for tests on the CPU, in Triton's interpreter.

    When `run` returns or raises, the device has finished the step. Its blocks may then go to a remote writer, whose
    copies are on no stream of ours.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        block_size: int,
        device: torch.device | str = "cuda",
        quantisation: Quantisation = Quantisation.NONE,
        gpu: GpuConfig | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`, on any device, of one type, which is the KV cache's too.
        Packing needs room for one more copy of a matrix on `device`.

        Raises UnsupportedModelError: this device cannot use such quantised weights.
        """
        super().__init__(config, tensors, block_size=block_size, device=device)
        self.gpu = gpu or GpuConfig()
        self._attention_rows: dict[str, str] = {}
        weights = admit_weights(quantisation, config, device=self.device, dtype=getattr(torch, self.kv_spec.dtype))
        self.quantisation = weights.registered
        self._weights_row = weights.description
        self._decoder = Decoder(config, tensors, weights, fused_rms_norm)
        self._capture = capture
        self._bound: GpuForward | None = None
        self._graphs: DecodeGraphs | None = None
        self.overlap_rows_max = OVERLAP_ROWS_MAX if self.gpu.overlap_steps else 0
        self._future = FutureTokens(self.device)
        self._undrawn: UndrawnStep | None = None

    def bind(self, region_U8: Any, num_blocks: int) -> None:
        """See `Runner.bind`. A tensor on this runner's device, or an array. Chooses the attention: runs kernels.

        Raises InvalidField: a backend that the configuration names failed its trial.
        """
        pool = KvPool(torch.as_tensor(region_U8), num_blocks, self.kv_spec)
        assert pool.device.type == self.device.type, (pool.device, self.device)
        heads = self.config.num_heads
        prefill = admit(pool, heads, Phase.PREFILL, wanted=self.gpu.attention_prefill)
        decode = admit(pool, heads, Phase.DECODE, wanted=self.gpu.attention_decode)
        # As text, because backends hold the pool, which `unbind` has to release.
        self._attention_rows = {f"{each.phase.value} attention": str(each) for each in (prefill, decode)}
        attention = GpuAttention(pool, prefill=prefill.backend, decode=decode.backend)
        self._forward = self._bound = GpuForward(self._decoder, pool, attention, self._future)

    @property
    def padding_blocks(self) -> int:
        """How many blocks of the region `warm_up` keeps: none if it captures nothing. After `bind`."""
        return 0 if self._unfit_for_graphs() else 1

    def rehearse(self, block: BlockId) -> None:
        """Compute a prompt in `block`, which nothing else uses meanwhile, and draw: kernels are compiled now, not while
        the first request waits."""
        tokens = [0] * min(self.kv_spec.block_size, self.context_len_max)
        params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)
        prompt = SequenceSlice(
            key=_REHEARSAL,
            tokens=tokens,
            start=0,
            stop=len(tokens),
            block_table=(block,),
            sample=True,
            output_index=0,
            params=params,
        )
        self.run(Batch(slices=(prompt,)), NullSink())

    @torch.inference_mode()
    def warm_up(self, padding_block: BlockId, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the decode graphs, which write padding to `padding_block` from now on.

        Captures nothing where decode is not Triton's: other backends plan each step on the host.
        """
        forward = self._bound
        assert forward is not None, "bind comes before warm_up"
        if self._unfit_for_graphs():
            return
        limits = self.gpu.graphs
        context_max = min(limits.graph_context_max, self.context_len_max)
        graphs = DecodeGraphs(
            forward=lambda inputs: forward.decode(inputs, context_max),
            block_size=self.kv_spec.block_size,
            padding_block=padding_block,
            device=self.device,
            row_of=self._future.row_of,
            capture=self._capture or (CudaCapture(self.device) if self.device.type == "cuda" else Capture()),
            config=replace(limits, graph_context_max=context_max),
        )
        graphs.warm_up(progress)
        self._graphs = graphs

    def _unfit_for_graphs(self) -> str:
        """Why `warm_up` captures nothing; empty if it captures."""
        if self._bound is None:
            return "not bound"
        if not self.gpu.graphs.graph_rows_max:
            return "graph_rows_max is 0"
        if not isinstance(self._bound.attention.decode, TritonDecode):
            return "the attention of single tokens is not Triton's"
        return ""

    def poison(self, block: BlockId) -> None:
        """Fill a free block with NaN, and wait for that, as its next writer may be another process. Any thread, even
        during a step."""
        assert self._bound is not None, "unbound"
        self._bound.pool.kv_LN2KSD[:, block] = float("nan")
        self._settle()

    def unbind(self) -> None:
        """See `Runner.unbind`. Waits for the device."""
        self._forward = self._bound = self._graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, str]:
        """For people: which attention is used, and why; how the weights are kept; which decode steps run as graphs, and
        how many did."""
        rows = {**self._attention_rows, "weights": self._weights_row}
        if self._graphs is None:
            return {**rows, "decode graphs": f"none ({self._unfit_for_graphs() or 'not captured'})"}
        return {
            **rows,
            "decode graphs": str(self._graphs),
            "decode graphs used": f"{self._graphs.steps} steps, {self._graphs.rows_padded} rows of padding",
        }

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """See `Runner.run`. `sink.layer_done` is called when the layer's K and V are *queued* on the current stream.

        A sink that copies them has to order its copies behind that stream, by an event recorded there.
        """
        return self.collect(self.launch(batch, sink))

    def can_overlap(self, params: SamplingParams) -> bool:
        """See `OverlapRunner.can_overlap`."""
        return draws_blind(params)

    @torch.inference_mode()
    def launch(self, batch: Batch, sink: KvSink) -> LaunchedStep | UndrawnStep:
        """See `OverlapRunner.launch`; `sink` as for `run`. Waits for the device only if sampling needs values."""
        drawn = [s for s in batch.slices if s.sample]
        try:
            if self._undrawn is not None:
                self._draw_late(self._undrawn)
            prompts = PromptRows.of(batch)
            if prompts is None:
                logits_BV = self._logits(batch, sink)
                logprobs: Mapping[RequestKey, list[TokenLogprobs]] = {}
            else:
                logits_BV, logprobs = self._scored(batch, prompts, sink)
            if logits_BV is not None and any(s.grammar is not None and s.token_pending for s in drawn):
                self._undrawn = UndrawnStep(drawn, logits_BV, logprobs)
                return self._undrawn
            return self._draw(drawn, logits_BV, logprobs)
        except BaseException:
            self._settle()  # the work queued before the error still writes
            raise

    @torch.inference_mode()
    def collect(self, in_flight: LaunchedStep | UndrawnStep) -> StepResult:
        """See `OverlapRunner.collect`."""
        if isinstance(in_flight, UndrawnStep):
            try:
                in_flight = self._draw_late(in_flight)
            except BaseException:
                self._undrawn = None  # or each step to come would fail with it
                self._settle()
                raise
        return in_flight.result()

    def _draw(
        self,
        drawn: Sequence[SequenceSlice],
        logits_BV: torch.Tensor | None,
        prompt_logprobs: Mapping[RequestKey, list[TokenLogprobs]],
    ) -> LaunchedStep:
        tokens_B, scored = (None, None) if logits_BV is None else self.draw(drawn, logits_BV, blind=True)
        self._future.keep(drawn, tokens_B)
        return LaunchedStep.of(drawn, tokens_B, scored, device=self.device, prompt_logprobs=prompt_logprobs)

    def _draw_late(self, undrawn: UndrawnStep) -> LaunchedStep:
        if undrawn.step is None:
            assert undrawn is self._undrawn, "another step was launched behind it"
            undrawn.step, self._undrawn = self._draw(undrawn.drawn, undrawn.logits_BV, undrawn.prompt_logprobs), None
        return undrawn.step

    def _logits(self, batch: Batch, sink: KvSink) -> torch.Tensor | None:
        """Scores of the rows that draw; None without any. The next step overwrites them."""
        drawing = [row for row, s in enumerate(batch.slices) if s.sample]
        forward, sink = self._begin(batch, sink)
        if self._graphs is not None and self._graphs.fits(batch.slices):
            token_ids(batch, self.vocab_size)  # checks them
            logits_BV = self._graphs.run(batch.slices)
            # One launch computes all layers.
            for layer in range(self.kv_spec.num_layers):
                sink.layer_done(layer)
            if 0 < len(drawing) < len(batch.slices):
                logits_BV = logits_BV[to_device(np.array(drawing, dtype=np.int64), self.device)]
            return logits_BV if drawing else None
        x_WE = forward.forward(batch, sink)
        return forward.logits(x_WE) if drawing else None

    def _scored(
        self, batch: Batch, prompts: PromptRows, sink: KvSink
    ) -> tuple[torch.Tensor | None, dict[RequestKey, list[TokenLogprobs]]]:
        """As `_logits`, and the log-probabilities of prompts, for which it waits; never by a graph."""
        forward, sink = self._begin(batch, sink)
        x_WE = forward.forward(prompts.batch, sink)
        logprobs = prompts.logprobs(x_WE, forward.logits)
        return (forward.logits(x_WE[prompts.draws]) if prompts.draws else None), logprobs

    def _settle(self) -> None:
        """Wait for the calling thread's stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
