"""Runs a Hugging Face model over the paged region, in float32 or bfloat16. Shape suffixes as in engine/types.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint import Progress, load_tensors
from engine.forward import DeterministicForward, Forward, NativeForward, TorchForward
from engine.kv_pool import KvPool
from engine.logprobs import token_logprobs
from engine.mirror import DeviceMirror
from engine.model_config import ComputeDtype, ModelConfig, Quantisation, UnsupportedModelError, load_model_config
from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder, supports
from engine.models.products import NativePacking, OneDnnPacking, Packing
from engine.models.weights import weight_shapes
from engine.native.draw import draw_kernel
from engine.native.kernels import Kernels, Workspace, native_kernels
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
        quantisation: Quantisation = Quantisation.NONE,
        mirrored: bool | None = None,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`; those on `device` already are not copied.

        All are of one type, float32 or bfloat16, which is the type of the KV cache too. `deterministic`: the scores
        of a token, bit for bit, depend on the tokens before it alone, not on the batch or on how its prompt was cut
        into chunks (DESIGN I6). See `DeterministicForward`; it is many times slower. `mirrored`: compute on a copy of
        the region (engine/mirror.py); None: where the device is not the CPU.
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
        mirrored = self.device.type != "cpu" if mirrored is None else mirrored
        self.mirror = DeviceMirror(self.device) if mirrored else None
        self._native: _Native | None = None
        kernels = native_kernels() if self._may_be_native() else None
        if quantisation is Quantisation.FP8:
            raise UnsupportedModelError("weights can be fp8 on a GPU only; a CPU takes int8 and int4")
        if kernels is not None:
            self._native = _Native(config, tensors, kernels, quantisation)
        elif quantisation is not Quantisation.NONE:
            raise UnsupportedModelError(
                f"weights cannot be {quantisation.value} here: that needs bfloat16, a CPU with AVX512-BF16 and the "
                "engine's compute kernels (a C compiler at the first start); set quantisation to none"
            )
        else:
            self._decoder = Decoder(config, {name: tensor.to(self.device) for name, tensor in tensors.items()})
        if self.device.type == "cpu":
            draw_kernel()  # built now, if it has to be, and not in the first step
        self._forward: Forward | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        block_size: int,
        dtype: ComputeDtype = ComputeDtype.AUTO,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        quantisation: Quantisation = Quantisation.NONE,
        mirrored: bool | None = None,
        progress: Progress | None = None,
    ) -> TorchRunner:
        """Read a checkpoint folder. Blocks for as long as the disk takes; `progress` is called on this thread.

        Raises:
            ModelError: the folder, its config or its weights cannot be used, or not quantised on this machine.
        """
        config = load_model_config(folder)
        torch_dtype = torch.bfloat16 if dtype.resolve(config.stored_dtype) is ComputeDtype.BFLOAT16 else torch.float32
        tensors = load_tensors(folder, weight_shapes(config), dtype=torch_dtype, progress=progress)
        return cls(
            config=config,
            tensors=tensors,
            block_size=block_size,
            device=device,
            deterministic=deterministic,
            quantisation=quantisation,
            mirrored=mirrored,
        )

    @property
    def uses_kernels(self) -> bool:
        """Whether kernels.c computes, and not PyTorch's operations."""
        return self._native is not None

    @property
    def arithmetic(self) -> str:
        """For people: what computes, and with which numbers."""
        if self._native is not None:
            return f"compute kernels ({self._native.numbers})"
        one_by_one = ", a token at a time" if self.deterministic else ""
        return f"PyTorch's operations{one_by_one} ({self.kv_spec.dtype})"

    def bind(self, region_U8: np.ndarray, num_blocks: int) -> None:
        """See `Runner.bind`. With a mirror, memory for a copy of the region is taken on the device.

        Raises:
            torch.OutOfMemoryError: it has not the room.
        """
        assert region_U8.flags.writeable, "the region must be writable"
        if self.mirror is None:
            self.bind_tensor(torch.from_numpy(region_U8), num_blocks)
        else:
            self.bind_tensor(self.mirror.open(region_U8, num_blocks, self.kv_spec), num_blocks)

    def bind_tensor(self, region_U8: torch.Tensor, num_blocks: int) -> None:
        """As `bind`, for a region that is a tensor on this runner's device."""
        assert region_U8.device.type == self.device.type, (region_U8.device, self.device)
        pool = KvPool(region_U8, num_blocks, self.kv_spec)
        if self._native is not None:
            self._forward = self._native.over(pool)
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
        """See `Runner.run`. `sink.layer_done` comes as soon as the layer's K and V are in the region.

        That is before the attention of the same layer, so the bytes travel while the rest of the layer is computed.
        """
        assert batch.slices, "an empty batch has nothing to run"
        forward = self._forward
        assert forward is not None, "bind comes before run"
        if self.mirror is not None:
            sink = self.mirror.begin(batch, sink)
        x_WE = forward.forward(batch, sink)
        drawn = [s for s in batch.slices if s.sample]
        if not drawn:
            return StepResult()
        logits_BV = forward.logits(x_WE)
        params = [s.params for s in drawn]
        tokens_B = sample(
            logits_BV,
            params,
            [s.output_index for s in drawn],
            tokens=[s.tokens for s in drawn],
            eos_token_ids=self.eos_token_ids,
        )
        logprobs = token_logprobs(logits_BV, tokens_B, params)
        return StepResult(
            sampled={s.key: token for s, token in zip(drawn, tokens_B.tolist(), strict=True)},
            logprobs={drawn[row].key: found for row, found in logprobs.items()},
        )

    @torch.inference_mode()
    def score(self, batch: Batch, sink: KvSink) -> torch.Tensor:
        """As `run`, but returns the scores of every token of the batch instead of drawing -> [T, V]. For evaluation."""
        assert self._forward is not None, "bind comes before score"
        if self.mirror is not None:
            sink = self.mirror.begin(batch, sink)
        return self._forward.logits(self._forward.forward(batch, sink, every_row=True)).clone()

    def _may_be_native(self) -> bool:
        """A deterministic runner stays with the operations whose results it was compared by."""
        is_bfloat16 = self.kv_spec.dtype == "bfloat16"
        return is_bfloat16 and self.device.type == "cpu" and not self.deterministic and supports(self.config)


class _Native:
    """The decoder over kernels.c, and its buffers."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], kernels: Kernels, quantisation: Quantisation
    ) -> None:
        workspace = Workspace()
        packing: Packing = NativePacking(kernels, workspace, quantisation.bits)
        self.numbers = "bfloat16" if quantisation is Quantisation.NONE else f"bfloat16, weights {quantisation.value}"
        if kernels.level > 1 and quantisation is Quantisation.NONE:
            packing = OneDnnPacking()
            self.numbers += ", products by oneDNN"
        self._decoder = NativeDecoder(config, tensors, kernels=kernels, packing=packing, workspace=workspace)

    def over(self, pool: KvPool) -> NativeForward:
        return NativeForward(self._decoder, pool)
