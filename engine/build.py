"""From configuration to a runner. torch is imported only when a real model is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from baton.config import setting
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from cachestore.pins import PinLimits
from engine.gpu.config import GpuConfig
from engine.kernel_sets import KernelSet
from engine.mock import MockConfig, MockRunner
from engine.model_config import (
    ComputeDtype,
    ModelError,
    ModelFolderError,
    Quantisation,
    UnsupportedModelError,
    resolve_model,
)
from engine.scheduler import SchedulerConfig
from engine.types import Runner

if TYPE_CHECKING:
    from engine.gpu.runner import GpuRunner

BLOCKS_MAX = 1 << 24


class EngineKind(Enum):
    MODEL = "model"
    MOCK = "mock"  # no weights; tokens are hashes of the KV bytes (engine/mock.py)


class ComputeDevice(Enum):
    CPU = "cpu"
    CUDA = "cuda"  # kernels and graphs over a region in the GPU's memory
    CUDA_MIRRORED = "cuda-mirrored"  # PyTorch's own operations over a copy of a region in host memory
    CPU_KERNELS = "cpu-kernels"  # what cuda is made of, without a GPU, for tests: slow
    CPU_MIRRORED = "cpu-mirrored"  # the copies of cuda-mirrored without a GPU, for tests

    @property
    def on_gpu(self) -> bool:
        return self in (ComputeDevice.CUDA, ComputeDevice.CUDA_MIRRORED)

    @property
    def has_region(self) -> bool:
        """The region lies in the device's memory, and not in the host's."""
        return self in (ComputeDevice.CUDA, ComputeDevice.CPU_KERNELS)


QUANTISATIONS = {
    ComputeDevice.CPU: (Quantisation.INT8, Quantisation.INT4),
    ComputeDevice.CUDA: (Quantisation.FP8, Quantisation.INT4),
    ComputeDevice.CPU_KERNELS: (Quantisation.FP8, Quantisation.INT4),
}
"""How weights may be rounded, on devices that multiply by rounded ones."""


T = TypeVar("T")


def _by_up(default: T, help: str) -> T:  # noqa: A002
    """A setting that `baton up` gives to the nodes it starts."""
    made: T = field(default=default, metadata={"shown": False, "help": help, "when": "Never: baton up does."})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine of a node."""

    kind: EngineKind = setting(
        EngineKind.MODEL, "model, or mock (tests of the protocol)", "To try the cluster without a model."
    )
    model: str = setting(
        "", "folder of a Hugging Face model, or its name on the hub", "Always, but for the mock engine."
    )
    dtype: ComputeDtype = setting(
        ComputeDtype.AUTO,
        "auto (bfloat16 if the weights are, else float32), float32, or bfloat16; also of the KV cache",
        "Answers must be the same as those of another engine in float32, or memory is short.",
    )
    device: ComputeDevice = setting(
        ComputeDevice.CPU,
        "cpu; cuda: weights, KV and the handoff on a GPU; cuda-mirrored: PyTorch's plain operations on a GPU, "
        "with KV copied to and from host memory",
        "The machine has a GPU.",
    )
    gpu: GpuConfig = field(default_factory=GpuConfig)
    deterministic: bool = setting(
        False,
        "same tokens whatever else is in the batch, and after a resumption: one token at a time, slow; nodes "
        "need the same compute_threads",
        "Answers must be reproducible bit by bit.",
    )
    quantisation: Quantisation = setting(
        Quantisation.NONE,
        "none; int8 or int4 on a cpu, fp8 or int4 on a GPU: weights are rounded at the start, in bfloat16",
        "Weights do not fit, or decoding few sequences should be faster (int8: fewer than 16). Answers change.",
    )
    quantisation_must_agree: bool = setting(
        False,
        "hand over only between nodes of the same quantisation",
        "Answers must not depend on where they are computed.",
    )
    block_size: int = setting(
        16,
        "token positions in a block",
        "It must be the same on all nodes. Smaller blocks waste less, larger ones cost less work per handoff.",
    )
    num_blocks: int | None = setting(
        None,
        "blocks in the region; none: as many as memory_share says (mock engine: 1024)",
        "The memory for KV should be fixed, or as large on prefill nodes as on decode nodes.",
    )
    memory_share: float | None = setting(
        None,
        "share that the region takes of the memory, the host's or the GPU's, that is free with the weights loaded; "
        "none: 0.5 (GPU: 0.8), but no more than sequences_max sequences fill, nor more than 4 GiB of host memory",
        "Other programs need the memory (lower it), or more conversations and prefixes should fit (raise it).",
    )
    memory_nodes: int = _by_up(1, "nodes that share the free memory of this machine, or of its GPU")
    memory_free_bytes: int | None = _by_up(
        None, "host memory that is free before any of them starts; none: what is free once the weights are loaded"
    )
    kernels: KernelSet = setting(
        KernelSet.AUTO,
        "instructions that the compute kernels use: auto (the fastest that this CPU has), avx2, avx512, avx512bf16, "
        "amx, neon, neonbf16, or torch (PyTorch's operations)",
        "CPUs differ, and a resumed answer must go on with the same tokens: set the best that all of them have.",
    )
    compute_threads: int = setting(
        1, "threads of this process that compute", "Always on a CPU: the cores of the machine, less those that copy."
    )
    tokens_per_step_max: int = setting(
        512,
        "token budget of a step",
        "Prompts are too slow (raise it), or they delay running answers too much (lower it).",
    )
    sequences_max: int = setting(
        64, "sequences in the engine at the same time", "More requests should run together, or each should run faster."
    )
    logits_rows_max: int | None = setting(
        None,
        "tokens sampled in a step, each with a score for every token; none: sequences_max",
        "The vocabulary is large and memory is short.",
    )
    mock_layer_delay_ms: float = setting(
        0.0, "mock engine: how long each layer takes", "To try the timing of a cluster."
    )
    poison_freed: bool = setting(
        False, "fill freed blocks with NaN bytes: shows use after free, costs time", "To look for an error."
    )
    mock_seed: int = setting(0, "mock engine: stands for the weights", "To have two mock models that differ.")
    pins: PinLimits = field(default_factory=PinLimits)

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "memory_nodes", "compute_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidField(name, f"is {value}; must be at least 1")
        if self.num_blocks is not None and self.num_blocks > BLOCKS_MAX:
            raise InvalidField("num_blocks", f"is {self.num_blocks}; must be at most {BLOCKS_MAX}")
        if self.memory_share is not None and not 0 < self.memory_share < 1:
            raise InvalidField("memory_share", f"is {self.memory_share}; must be more than 0 and less than 1")
        if self.kind is EngineKind.MODEL and not self.model:
            raise InvalidField("model", "is not set; name a folder or a model on the hub")
        self.scheduler()  # checks its limits
        if self.quantisation is not Quantisation.NONE and (self.deterministic or self.dtype is ComputeDtype.FLOAT32):
            raise InvalidField("quantisation", "needs dtype bfloat16 (or auto) and not deterministic")
        if self.device is not ComputeDevice.CPU and self.kind is EngineKind.MOCK:
            raise InvalidField("device", "must be cpu for the mock engine, which computes nothing")
        usable = (Quantisation.NONE, *QUANTISATIONS.get(self.device, ()))
        if self.quantisation not in usable:
            takes = " or ".join(each.value for each in usable)
            raise InvalidField("quantisation", f"is {self.quantisation.value}; {self.device.value} takes {takes}")
        if self.device.has_region and self.deterministic:
            raise InvalidField(
                "deterministic", "is for the devices cpu and cuda-mirrored; cuda's kernels have no such mode"
            )
        if self.device is not ComputeDevice.CPU and self.kernels is not KernelSet.AUTO:
            raise InvalidField("kernels", f"is {self.kernels.value}; {self.device.value} takes auto: they are a CPU's")
        if self.mock_layer_delay_ms < 0:
            raise InvalidField("mock_layer_delay_ms", "must not be negative")

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            tokens_per_step_max=self.tokens_per_step_max,
            sequences_max=self.sequences_max,
            # A node admits no more requests than places; a mixed one has as many of each half, at most.
            waiting_max=2 * self.sequences_max,
            logits_rows_max=self.logits_rows_max,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """A runner that is not bound to a region yet, and facts about it."""

    runner: Runner
    model_name: str
    fingerprint: str
    """Digest of configuration and weights: nodes hand over only to nodes of the same."""
    quantisation: str = ""
    """How the weights are rounded, which the digest does not cover; empty: not rounded."""
    block_freed: Callable[[BlockId], None] | None = None
    """To be called with each block that becomes free, if the runner needs it."""
    on_device: GpuRunner | None = None
    """The same runner, if its region has to be in its device's memory."""
    tokenizer: Path | None = None
    """Of the model: grammars are followed by its tokens."""
    arithmetic: str = ""
    """For people: what computes, if the runner does not describe itself. Empty: the mock engine."""
    kernel_set: str = ""
    """What computes, to be compared: nodes of the same one compute the same bits. Empty: the mock engine."""
    kernels_why: str = ""
    """For people: why that set."""


def build_runner(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> BuiltEngine:
    """Load the model (blocking; `progress` gets bytes loaded and bytes in all).

    Raises BatonError MODEL_MISSING, MODEL_BROKEN, MODEL_UNSUPPORTED, or BAD_CONFIG for a device that is not here.
    """
    if config.kind is EngineKind.MOCK:
        return _build_mock(config)
    try:
        return _build_model(config, progress)
    except ModelFolderError as error:
        raise BatonError(Reason.MODEL_MISSING, str(error), field="engine.model") from error
    except UnsupportedModelError as error:
        raise BatonError(Reason.MODEL_UNSUPPORTED, str(error), field="engine.model") from error
    except ModelError as error:
        raise BatonError(Reason.MODEL_BROKEN, str(error), field="engine.model") from error


MOCK_TWO_GROUPS = "two-groups"
"""`engine.model` of a mock engine whose layers have records of two sizes, in two groups."""
TWO_GROUPS_LAYERS = 6
TWO_GROUPS_LATENT = (1, 4)


def _build_mock(config: EngineConfig) -> BuiltEngine:
    mock = MockConfig(
        block_size=config.block_size,
        model_seed=config.mock_seed,
        layer_delay_s=config.mock_layer_delay_ms / 1000,
    )
    if config.model == MOCK_TWO_GROUPS:
        mock = replace(mock, num_layers=TWO_GROUPS_LAYERS, latent_layers=TWO_GROUPS_LATENT)
    identity = f"mock {mock.model_seed} {mock.num_layers} {mock.head_dim} {mock.vocab_size} {mock.draws_eos}"
    if mock.latent_layers:
        identity += f" {mock.latent_layers}"
    fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return BuiltEngine(runner=MockRunner(mock), model_name="mock", fingerprint=fingerprint)


def _build_model(config: EngineConfig, progress: Callable[[int, int], None] | None) -> BuiltEngine:
    """Raises ModelError, BatonError BAD_CONFIG."""
    import torch

    from engine.checkpoint import checkpoint_fingerprint
    from engine.native.kernels import KernelSetMissing, choose_kernels

    # For the whole process, before any engine thread: more threads than cores on the machine stall every one of them.
    torch.set_num_threads(config.compute_threads)
    device = _torch_device(config.device)
    try:
        if config.kernels is not KernelSet.AUTO:
            choose_kernels(config.kernels)  # now, and not after minutes of loading
    except KernelSetMissing as error:
        text = f"{error}. Set it to a set that is here, to torch, or to auto."
        raise BatonError(Reason.BAD_CONFIG, text, field="engine.kernels") from error
    folder = resolve_model(config.model)
    common: dict[str, Any] = {
        "block_size": config.block_size,
        "dtype": config.dtype,
        "device": device,
        "quantisation": config.quantisation,
        "progress": progress,
    }
    with ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as beside:  # it reads what is loaded meanwhile
        fingerprint = beside.submit(checkpoint_fingerprint, folder)
        built = _load_runner(config, folder, common)
        return replace(
            built,
            model_name=Path(config.model).name if Path(config.model).is_dir() else config.model,
            fingerprint=fingerprint.result(),
            tokenizer=folder / "tokenizer.json",
        )


def _load_runner(config: EngineConfig, folder: Path, common: Mapping[str, Any]) -> BuiltEngine:
    """Without what the folder says of itself. Raises ModelError, BatonError BAD_CONFIG."""
    from engine.runner import TorchRunner

    if config.device.has_region:
        rows_max = min(config.gpu.graphs.graph_rows_max, config.sequences_max)
        gpu = replace(config.gpu, graphs=replace(config.gpu.graphs, graph_rows_max=rows_max))
        on_device = _gpu_runner(config.device).load(folder, gpu=gpu, **common)
        return BuiltEngine(
            runner=on_device,
            model_name="",
            fingerprint="",
            quantisation=on_device.quantisation,
            on_device=on_device,
            kernel_set=config.device.value,
            kernels_why="the kernels of engine.device",
        )
    runner = TorchRunner.load(
        folder,
        deterministic=config.deterministic,
        mirrored=config.device is not ComputeDevice.CPU,
        kernels=config.kernels,
        **common,
    )
    return BuiltEngine(
        runner=runner,
        model_name="",
        fingerprint="",
        quantisation="" if config.quantisation is Quantisation.NONE else config.quantisation.value,
        block_freed=None if runner.mirror is None else runner.mirror.forget,
        arithmetic=runner.arithmetic,
        kernel_set=_registered(runner.kernel_set, config.device),
        kernels_why=runner.kernels_why,
    )


def _registered(kernel_set: KernelSet, device: ComputeDevice) -> str:
    """PyTorch chooses instructions by the CPU, so its operations alone do not say which bits come out."""
    import torch

    if kernel_set is not KernelSet.TORCH:
        return str(kernel_set.value)
    capability = device.value if device.on_gpu else str(torch.backends.cpu.get_cpu_capability())
    return f"{kernel_set.value} {capability.lower()}"


def _gpu_runner(device: ComputeDevice) -> type[GpuRunner]:
    """Raises BatonError BAD_CONFIG."""
    try:
        if device is ComputeDevice.CPU_KERNELS:
            from engine.gpu.interpreter import use_interpreter

            use_interpreter()
        from engine.gpu.runner import GpuRunner
    except ImportError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"engine.device is {device.value}, and its kernels cannot be loaded: {error}. Install triton.",
            field="engine.device",
        ) from error
    return GpuRunner


def _torch_device(device: ComputeDevice) -> str:
    """Raises BatonError BAD_CONFIG."""
    import torch

    if device.on_gpu and not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda} and finds no GPU" if torch.version.cuda else "has no CUDA"
        raise BatonError(
            Reason.BAD_CONFIG,
            f"engine.device is {device.value}, and PyTorch {torch.__version__} {built}. Install PyTorch with CUDA on a "
            "machine with a GPU and its driver, or set engine.device to cpu.",
            field="engine.device",
        )
    return "cuda" if device.on_gpu else "cpu"


def device_memory_bytes() -> tuple[int, int]:
    """Free and all of the GPU that this process computes on."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(free_bytes), int(total_bytes)
