"""The device pool: one region, its layout and ledger, the prefix cache over it, the runner bound to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from batonpb import common_pb2, node_pb2

from baton.cores import Cores, own_cores
from baton.errors import BatonError, InvalidField, Reason, bad_field
from baton.ids import BlockId
from baton.log import get_log
from baton.runtime import Progress
from baton.wire import ModelInfo, TierLoad
from cachestore.block_manager import BlockManager
from cachestore.layout import Layout
from cachestore.ledger import Ledger
from cachestore.pins import PinTable
from cachestore.prefix_cache import kv_root
from engine.build import BuiltEngine, ComputeDevice, EngineConfig, build_runner
from engine.core import Engine
from engine.types import Runner, sampling_problem
from kvtransfer.device.staging import StagedRegion, StagingConfig
from kvtransfer.link import DEFAULT_TRANSPORTS, PROTOCOL_MAX, PROTOCOL_MIN, serving
from kvtransfer.native.copy import copies_by
from kvtransfer.region import Region
from kvtransfer.transport import RegionKind, TransportName
from kvtransfer.transports.rdma import RdmaMemory
from kvtransfer.transports.rdma_ports import find_ports
from kvtransfer.transports.rdma_verbs import RdmaUnavailable, posts_by
from kvtransfer.transports.tcp import moved_by
from kvtransfer.transports.ucx import UcxUnavailable, destruction_fences, try_ucx
from node.config import NodeConfig
from node.grammars import Grammars
from node.region_size import RegionSize, region_size
from node.regions import (
    PoolRegion,
    clear_frames_of,
    offered,
    on_thread,
    open_pool_region,
    pin_staging,
    rdma_region,
)
from node.spill import HostMemory, SpillConfig, open_host_memory
from node.store import Store, StoreConfig, open_store

if TYPE_CHECKING:
    from engine.gpu.runner import GpuRunner

log = get_log("transports")
engine_log = get_log("engine")

POISON = 0xFF
"""Such bytes are NaN in every float type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """What a node computes with. `close` frees the region; nothing may use it then: ports and links are closed."""

    runner: Runner
    engine: Engine
    blocks: BlockManager
    pins: PinTable
    ledger: Ledger
    region: PoolRegion
    layout: Layout
    model: ModelInfo
    host: HostMemory | None = None
    """None without overcommit."""
    store: Store | None = None
    """None without tiers below the region."""
    device: ComputeDevice = ComputeDevice.CPU
    compute_threads: int = 1
    cores: Cores = Cores(allowed=1, quota=None)
    """What this process might use, when the pool was opened."""
    on_device: GpuRunner | None = None
    """The runner, where the region lies on its device."""
    staged: StagedRegion | None = None
    """The region on a device as tcp reaches it, where the node offers tcp."""
    transports: tuple[TransportName, ...] = ()
    """Those that the configuration names, whether they serve the region and work here or not."""
    arithmetic: str = ""
    """See `BuiltEngine`."""
    kernels_why: str = ""
    """See `BuiltEngine`."""
    size: str = ""
    """See `RegionSize.text`."""
    grammars: Grammars = field(default_factory=Grammars)

    @property
    def host_region(self) -> Region:
        """The region of a node that has it in host memory."""
        assert self.region.kind is RegionKind.HOST, self.region.kind
        return cast(Region, self.region)

    @property
    def tcp_region(self) -> Region | StagedRegion:
        """What tcp reads and writes."""
        return self.host_region if self.staged is None else self.staged

    def footprint(self, known_len: int, prompt_len: int, max_tokens: int) -> int:
        """Blocks that a request comes to hold where its answer is drawn: for its `known_len` tokens, prompt and answer
        so far, the next one, which is drawn elsewhere, and all that it may draw behind that but the last."""
        end = max(known_len + 1, min(prompt_len + max_tokens, self.model.context_len_max) - 1)
        return self.model.blocks_for(end)

    def tier_loads(self) -> tuple[TierLoad, ...]:
        """What the prefix cache has in the region, and what is below."""
        below = [] if self.store is None else self.store.loads()
        cache, groups, size = self.blocks.prefix_cache, self.blocks.groups, self.model.block_size
        from_below = sum(tier.blocks_hit for tier in below)
        return (
            TierLoad(
                tier="device",
                blocks=len(cache),
                blocks_max=self.ledger.num_blocks // groups,
                block_bytes=self.layout.position_bytes,
                blocks_pinned=cache.pinned_blocks // groups,
                blocks_hit=max(0, cache.hit_tokens // size - from_below),
                blocks_evicted=cache.evicted,
                blocks_evicted_unused=cache.evicted_unused,
            ),
            *below,
        )

    def describe(self) -> dict[str, str]:
        """For people: what computes, and where its KV lies."""
        facts = {
            "device": self.device.value,
            "compute threads": f"{self.compute_threads}, on {self.cores}",
            "KV": self.size,
            "region": f"{self.region.nbytes:,} bytes in {self.region.kind.value}",
        }
        if self.staged is not None:
            facts["staging"] = f"{self.staged.pinned_bytes:,} bytes of pinned memory, {self.staged.used_bytes:,} in use"
        if self.host is not None:
            facts["below the region"] = self.host.memory.describe()
        if self.store is not None:
            facts["store"] = self.store.describe()
        if self.arithmetic:
            facts["arithmetic"] = self.arithmetic
        if self.model.kernel_set:
            facts["kernels"] = f"{self.model.kernel_set}: {self.kernels_why}"
        if self.on_device is not None:
            facts |= self.on_device.describe()
        return facts | self.engine.describe()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.host is not None:
            self.host.memory.close()
        if self.staged is not None:
            self.staged.close()
        self.runner.unbind()
        self.region.close()


def check_tokens(field: str, tokens: Sequence[int], model: Runner | ModelInfo) -> None:
    """Raises BatonError PROMPT_TOO_LONG or TOKEN_OUT_OF_RANGE, of `field`."""
    if len(tokens) >= model.context_len_max:
        text = f"{len(tokens)} tokens leave no room for one more in the model's context of {model.context_len_max}."
        raise bad_field(field, text, reason=Reason.PROMPT_TOO_LONG)
    if max(tokens, default=0) >= model.vocab_size:
        text = f"Token id {max(tokens)} is outside the vocabulary of {model.vocab_size}."
        raise bad_field(field, text, reason=Reason.TOKEN_OUT_OF_RANGE)


def check_request(tokens: Sequence[int], prompt_len: int, sampling: common_pb2.SamplingSpec, runner: Runner) -> None:
    """A bad request must not break the steps of the others. `tokens`: the prompt, and the answer so far.

    Raises BatonError PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE, SAMPLING_OUT_OF_RANGE or BAD_FIELD.
    """
    check_tokens("prompt", tokens, runner)
    problem = sampling_problem(sampling, vocab_size=runner.vocab_size)
    if problem is not None:
        text = f"No token can be drawn with these parameters: {problem}."
        raise bad_field("sampling", text, reason=Reason.SAMPLING_OUT_OF_RANGE)
    if len(tokens) - prompt_len >= sampling.max_tokens:
        raise bad_field("output", f"The answer already has its {sampling.max_tokens} tokens (max_tokens).")


async def open_device_pool(
    config: EngineConfig,
    *,
    name: str,
    progress: Progress,
    spill: SpillConfig | None = None,
    store: StoreConfig | None = None,
    decodes: bool = True,
    transports: Sequence[TransportName] = DEFAULT_TRANSPORTS,
    staging: StagingConfig | None = None,
) -> DevicePool:
    """Load the model, make the region and warm up, each on a thread of its own, with progress.

    With `spill.host_blocks` there is host memory below the region, and the engine runs under overcommit. With
    `store.host_bytes` there are tiers of blocks that the prefix cache gives up. On a device, graphs are captured where
    this node `decodes`, and `transports` get what they need: a handle for cuda_ipc, pinned memory (`staging`) for tcp.

    Raises BatonError: MODEL_MISSING, MODEL_BROKEN, MODEL_UNSUPPORTED, BAD_CONFIG (no room, no such device or backend).
    """
    built, size = await _load(config, progress, spill, store)
    layout = built.runner.layout
    began_s = time.monotonic()
    region = await open_pool_region(config, layout, size.num_blocks, f"baton-{name}", progress, transports)
    engine_log.info(f"KV: {size.text}", opened_s=round(time.monotonic() - began_s, 1))
    with ExitStack() as opened:
        opened.callback(region.close)
        opened.callback(built.runner.unbind)
        try:
            staged = await on_thread(pin_staging, region, transports, staging or StagingConfig())
            if staged is not None:
                opened.callback(staged.close)
            blocks, padding_blocks = await _open_blocks(
                built, region, size.num_blocks, config, decodes=decodes, progress=progress
            )
            engine = Engine(built.runner, blocks, config.scheduler())
            host = None
            if spill is not None and spill.host_blocks:
                host = await open_host_memory(
                    spill, below=region, layout=layout, engine=engine, blocks=blocks, name=name, progress=progress
                )
                opened.callback(host.memory.close)
            tiers = await _open_tiers(store, region, layout, engine, blocks, host, name=name, progress=progress)
        except BaseException as error:
            clear_frames_of(error)
            raise
        opened.pop_all()
    return DevicePool(
        runner=built.runner,
        engine=engine,
        blocks=blocks,
        pins=PinTable(blocks.prefix_cache, num_blocks=size.num_blocks - padding_blocks, limits=config.pins),
        ledger=blocks.ledger,
        region=region,
        layout=layout,
        model=_model_info(built, layout, config),
        host=host,
        store=tiers,
        device=config.device,
        compute_threads=config.compute_threads,
        cores=own_cores(),
        on_device=built.on_device,
        staged=staged,
        transports=tuple(transports),
        arithmetic=built.arithmetic,
        kernels_why=built.kernels_why,
        size=size.text,
        grammars=Grammars(
            built.tokenizer, vocab_size=built.runner.vocab_size, eos_token_ids=built.runner.eos_token_ids
        ),
    )


async def _load(
    config: EngineConfig, progress: Progress, spill: SpillConfig | None, store: StoreConfig | None
) -> tuple[BuiltEngine, RegionSize]:
    """The model, on a thread of its own, and the region that goes with it. Raises BatonError as `open_device_pool`."""
    weights_bytes = 0

    def loading(done: int, total: int) -> None:
        nonlocal weights_bytes
        weights_bytes = total
        progress("loading", done, total)

    built = await asyncio.to_thread(build_runner, config, loading)
    if built.kernel_set:
        engine_log.info("compute kernels", set=built.kernel_set, why=built.kernels_why)
    size = region_size(
        config,
        built.runner.layout,
        context_len_max=built.runner.context_len_max,
        weights_bytes=weights_bytes,
        spill=spill,
        store=store,
    )
    return built, size


async def _open_tiers(
    config: StoreConfig | None,
    region: PoolRegion,
    layout: Layout,
    engine: Engine,
    blocks: BlockManager,
    host: HostMemory | None,
    *,
    name: str,
    progress: Progress,
) -> Store | None:
    """Room that the store makes wakes the engine; under overcommit the answers' headroom is not spare for it."""
    if config is None or not config.host_bytes:
        return None
    store = await open_store(config, below=region, layout=layout, blocks=blocks, name=name, progress=progress)
    store.room_changed = engine.changed
    if host is not None:
        ledger, headroom = blocks.ledger, host.spill.headroom
        store.spare = lambda: ledger.available - headroom()
    return store


async def _open_blocks(
    built: BuiltEngine,
    region: PoolRegion,
    num_blocks: int,
    config: EngineConfig,
    *,
    decodes: bool,
    progress: Progress,
) -> tuple[BlockManager, int]:
    """The region's blocks, and how many of them are held for good. Raises BatonError BAD_CONFIG."""
    layout = built.runner.layout
    await on_thread(_bind, built, region, num_blocks)
    ledger = Ledger(num_blocks, on_free=_on_free(built, region, layout, num_blocks, poison=config.poison_freed))
    padding_blocks = 0
    if built.on_device is not None:
        padding_blocks = await _warm_up(built.on_device, ledger, decodes=decodes, progress=progress)
    blocks = BlockManager(
        ledger, config.block_size, root_of(built, layout), groups=layout.num_groups, padding_blocks=padding_blocks
    )
    return blocks, padding_blocks


async def _warm_up(runner: GpuRunner, ledger: Ledger, *, decodes: bool, progress: Progress) -> int:
    """Compile kernels and capture graphs, before there is any request -> how many of the blocks are held for good."""
    padding = runner.padding_blocks if decodes else 0
    if ledger.num_blocks <= padding:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"engine.num_blocks is {ledger.num_blocks}, of which graphs keep {padding} for padding: set a larger one.",
            field="engine.num_blocks",
        )
    with _room_on_device():
        block = ledger.take(1)
        await on_thread(runner.rehearse, block[0])
        ledger.drop(block)
        if decodes and padding:
            (padding_block,) = ledger.take(padding)
            await on_thread(runner.warm_up, padding_block, lambda done, total: progress("capturing", done, total))
    return padding


def _bind(built: BuiltEngine, region: PoolRegion, num_blocks: int) -> None:
    """Blocks. Raises BatonError BAD_CONFIG: no room on the device, or an attention backend that is wrong there."""
    try:
        with _room_on_device():
            built.runner.bind(region.memory, num_blocks)
    except InvalidField as error:
        field = f"engine.gpu.{error.field}"
        raise BatonError(Reason.BAD_CONFIG, f"{field} {error.args[0]}", field=field) from error


@contextmanager
def _room_on_device() -> Iterator[None]:
    """Raises BatonError BAD_CONFIG where the device has not the room."""
    try:
        yield
    except RuntimeError as error:
        # torch's error for this, whose type cannot be named without importing torch.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise BatonError(
            Reason.BAD_CONFIG,
            f"The device has too little memory: {error} Set a smaller engine.num_blocks.",
            field="engine.num_blocks",
        ) from error


def _on_free(
    built: BuiltEngine, region: PoolRegion, layout: Layout, num_blocks: int, *, poison: bool
) -> Callable[[BlockId], None] | None:
    """What is done with a freed block; with `poison` it is overwritten, all of its pages."""
    if not poison:
        return built.block_freed
    if built.on_device is not None:
        return built.on_device.poison
    nbytes, shape = layout.region_bytes(num_blocks), (layout.num_rows, num_blocks, layout.page_bytes)

    def overwrite(block: BlockId) -> None:
        # No view is kept: the region could not be closed then.
        region.memory[:nbytes].reshape(shape)[:, block] = POISON
        if built.block_freed is not None:
            built.block_freed(block)

    return overwrite


def root_of(built: BuiltEngine, layout: Layout) -> bytes:
    return kv_root(
        fingerprint=built.fingerprint, quantisation=built.quantisation, layout_hash=layout.compatibility_hash()
    )


def _model_info(built: BuiltEngine, layout: Layout, config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        name=built.model_name,
        fingerprint=built.fingerprint,
        vocab_size=built.runner.vocab_size,
        context_len_max=built.runner.context_len_max,
        eos_token_ids=tuple(sorted(built.runner.eos_token_ids)),
        layout_hash=layout.compatibility_hash(),
        block_size=layout.block_size,
        layer_groups=layout.num_groups,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        quantisation=built.quantisation,
        quantisation_must_agree=config.quantisation_must_agree,
        kernel_set=built.kernel_set,
        kv_root=root_of(built, layout),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTransports:
    """Transports that serve a node's region and work here, best first, and the region as rdma has registered it."""

    offered: tuple[TransportName, ...]
    rdma: RdmaMemory | None = None
    """Where rdma is offered. Both halves of a node use it; the queue pairs of the writing one take no remote writes."""


def open_transports(
    config: NodeConfig, region: PoolRegion, opened: AsyncExitStack, *, remote_writes: bool = True
) -> RegionTransports:
    """Find out which of the configured transports work; NIXL is loaded for ucx. The region is registered for rdma,
    which pins it: that may take seconds. `opened` ends the registration, which lets others write where `remote_writes`
    says so. Raises InvalidField: none works."""
    serving = offered(config.transports, region)
    rdma: RdmaMemory | None = None
    failures: dict[TransportName, Exception] = {}
    if TransportName.RDMA in serving:
        try:
            rdma = RdmaMemory(region=rdma_region(region), config=config.rdma, remote_writes=remote_writes)
            opened.push_async_callback(rdma.close)
            log.info("rdma is offered", region=rdma.describe())
        except RdmaUnavailable as error:
            failures[TransportName.RDMA] = error
    if TransportName.UCX in serving:
        try:
            used = try_ucx(config.ucx.tls)
            fence = "own" if destruction_fences(used) else "needs the writer"
            log.info("ucx is offered", ucx_transports=used, fence=fence)
        except UcxUnavailable as error:
            failures[TransportName.UCX] = error
    for transport, failure in failures.items():
        if len(serving) == 1:
            text = f"has {transport.value} alone, which does not work here: {failure}. `baton doctor` says more"
            raise InvalidField("transports", text) from failure
        # A machine without any RDMA device is no reason for a warning.
        is_usual = transport is TransportName.RDMA and not find_ports()
        (log.debug if is_usual else log.warning)(f"{transport.value} is not offered", reason=str(failure))
    found = tuple(transport for transport in serving if transport not in failures)
    if not found:
        raise InvalidField("transports", "names none that works on this machine; `baton doctor` says why")
    return RegionTransports(offered=found, rdma=rdma)


def transport_facts(configured: Sequence[TransportName], region: RegionKind, offered: Sequence[str]) -> dict[str, str]:
    """For people: by what this process moves bytes, and which transports that serve its region it cannot offer."""
    facts = {}
    if region is RegionKind.HOST:
        facts["copies by"] = copies_by()
        if TransportName.TCP.value in offered:
            facts["tcp moved by"] = moved_by()
    if TransportName.RDMA.value in offered:
        facts["rdma posted by"] = posts_by()
    missing = [transport.value for transport in serving(configured, region) if transport.value not in offered]
    if missing:
        facts["not offered"] = f"{', '.join(missing)}: not usable here, `baton doctor` says why"
    return facts


def add_fact(message: node_pb2.NodeStatus, name: str, text: str) -> None:
    """One more line for people, once, though both halves of a node may add it."""
    if all(fact.name != name for fact in message.engine.facts):
        message.engine.facts.add(name=name, text=text)
