"""Runs a Hugging Face model over the paged region, in float32 or bfloat16. Shape suffixes as in engine/types.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from engine.attention import AttentionBackend, AttentionMetadata, TorchAttention
from engine.checkpoint import Progress, load_tensors
from engine.kv_pool import KvPool
from engine.logprobs import token_logprobs
from engine.model_config import ComputeDtype, ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.models.weights import weight_shapes
from engine.sampler import sample
from engine.types import Batch, KvSink, KvSpec, StepResult


def configure_threads(compute_threads: int) -> None:
    """Set how many threads each torch operation of this process uses. Once, at process start, before any engine thread.

    Count the compute threads over all processes of the machine: more than there are cores stalls every one of them.
    """
    assert compute_threads >= 1, compute_threads
    torch.set_num_threads(compute_threads)


class TorchRunner:
    """A `Runner` for one model on one device. `run` is called from one thread at a time."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        block_size: int,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`; those on `device` already are not copied.

        All are of one type, float32 or bfloat16, which is the type of the KV cache too. `deterministic`: the scores
        of a token, bit for bit, depend on the tokens before it alone, not on the batch or on how its prompt was cut
        into chunks (DESIGN I6). See `_forward_each`; it is many times slower.
        """
        dtypes = {tensor.dtype for tensor in tensors.values()}
        assert dtypes <= {torch.float32} or dtypes <= {torch.bfloat16}, dtypes
        self.config = config
        self.device = torch.device(device)
        self.kv_spec = KvSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=str(dtypes.pop()).removeprefix("torch."),
        )
        self.vocab_size = config.vocab_size
        self.context_len_max = config.context_len_max
        self.eos_token_ids = config.eos_token_ids
        self.deterministic = deterministic
        self._decoder = Decoder(config, {name: tensor.to(self.device) for name, tensor in tensors.items()})
        self._pool: KvPool | None = None
        self._attention: AttentionBackend | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        block_size: int,
        dtype: ComputeDtype = ComputeDtype.AUTO,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        progress: Progress | None = None,
    ) -> TorchRunner:
        """Read a checkpoint folder. Blocks for as long as the disk takes; `progress` is called on this thread.

        Raises:
            ModelError: the folder, its config or its weights cannot be used.
        """
        config = load_model_config(folder)
        torch_dtype = torch.bfloat16 if dtype.resolve(config.stored_dtype) is ComputeDtype.BFLOAT16 else torch.float32
        tensors = load_tensors(folder, weight_shapes(config), dtype=torch_dtype, progress=progress)
        return cls(config=config, tensors=tensors, block_size=block_size, device=device, deterministic=deterministic)

    def bind(self, region_U8: np.ndarray, num_blocks: int) -> None:
        """See `Runner.bind`. A region in host memory serves a runner on the CPU only."""
        assert self.device.type == "cpu", f"a region in host memory cannot serve {self.device}: use bind_tensor"
        assert region_U8.flags.writeable, "the region must be writable"
        self.bind_tensor(torch.from_numpy(region_U8), num_blocks)

    def bind_tensor(self, region_U8: torch.Tensor, num_blocks: int) -> None:
        """As `bind`, for a region that is a tensor on this runner's device."""
        assert region_U8.device.type == self.device.type, (region_U8.device, self.device)
        self._pool = KvPool(region_U8, num_blocks, self.kv_spec)
        self._attention = TorchAttention(self._pool)

    def unbind(self) -> None:
        """See `Runner.unbind`."""
        self._pool = self._attention = None

    @torch.inference_mode()
    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """See `Runner.run`. `sink.layer_done` comes as soon as the layer's K and V are in the region.

        That is before the attention of the same layer, so the bytes travel while the rest of the layer is computed.
        """
        assert batch.slices, "an empty batch has nothing to run"
        x_TE = self._forward(batch, sink)
        ends = accumulate(s.stop - s.start for s in batch.slices)
        drawn = [(s, end - 1) for s, end in zip(batch.slices, ends, strict=True) if s.sample]
        if not drawn:
            return StepResult()
        rows_B = torch.tensor([row for _, row in drawn], device=self.device)
        logits_BV = self._logits(x_TE[rows_B])
        params = [s.params for s, _ in drawn]
        tokens_B = sample(
            logits_BV,
            params,
            [s.output_index for s, _ in drawn],
            tokens=[s.tokens for s, _ in drawn],
            eos_token_ids=self.eos_token_ids,
        )
        logprobs = token_logprobs(logits_BV, tokens_B, params)
        return StepResult(
            sampled={s.key: token for (s, _), token in zip(drawn, tokens_B.tolist(), strict=True)},
            logprobs={drawn[row][0].key: found for row, found in logprobs.items()},
        )

    @torch.inference_mode()
    def score(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """As `run`, but returns the scores of every token of the batch instead of drawing -> [T, V]. For evaluation."""
        return self._logits(self._forward(batch, sink))

    def _logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        if not self.deterministic:
            return self._decoder.logits(x_BE)
        return torch.cat([self._decoder.logits(x_BE[row : row + 1].clone()) for row in range(len(x_BE))])

    def _forward(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        if self.deterministic:
            return self._forward_each(batch, sink)
        pool, attention, decoder = self._pool, self._attention, self._decoder
        assert pool is not None and attention is not None, "bind comes before run"
        tokens = np.concatenate([np.asarray(s.tokens[s.start : s.stop], dtype=np.int64) for s in batch.slices])
        assert tokens.min() >= 0 and tokens.max() < self.vocab_size, "token id outside the vocabulary"
        metadata = attention.prepare(batch)
        angles = decoder.angles(metadata.positions_T)
        x_TE = decoder.embed(torch.from_numpy(tokens).to(self.device))
        for layer in range(self.kv_spec.num_layers):

            def attend(
                q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int = layer
            ) -> torch.Tensor:
                pool.store(layer, k_TKD, v_TKD, metadata.slots)
                sink.layer_done(layer)
                return attention.attend(layer, q_THD, metadata)

            x_TE = decoder.run_layer(layer, x_TE, angles, attend)
        return x_TE

    def _forward_each(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """As `_forward`, but every operation is given one token at a time, in order.

        The kernels then see the same shapes whatever else is in the step: they choose blocking and order of summation
        by shape, which is where the difference in rounding between two batches comes from.
        """
        pool, attention, decoder = self._pool, self._attention, self._decoder
        assert pool is not None and attention is not None, "bind comes before run"
        singles = [replace(s, start=at, stop=at + 1) for s in batch.slices for at in range(s.start, s.stop)]
        metadata = [attention.prepare(Batch(slices=(single,))) for single in singles]
        angles = [decoder.angles(each.positions_T) for each in metadata]
        ids = torch.tensor([single.tokens[single.start] for single in singles], device=self.device)
        assert int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size, "token id outside the vocabulary"
        rows = [decoder.embed(ids[row : row + 1]) for row in range(len(singles))]
        for layer in range(self.kv_spec.num_layers):
            for row, each in enumerate(metadata):

                def attend(
                    q_1HD: torch.Tensor,
                    k_1KD: torch.Tensor,
                    v_1KD: torch.Tensor,
                    layer: int = layer,
                    each: AttentionMetadata = each,
                ) -> torch.Tensor:
                    pool.store(layer, k_1KD, v_1KD, each.slots)
                    return attention.attend(layer, q_1HD, each)

                rows[row] = decoder.run_layer(layer, rows[row], angles[row], attend)
            sink.layer_done(layer)
        return torch.cat(rows)
