"""A mock engine on simulated time. A slot's bytes are a checksum of the token and of the slot before it, read back from
the region; the next token is a checksum of the whole context in all layers, read back too. So one wrong byte anywhere
in a sequence's records changes the next token, and with it all that follow. Cheaper than `engine.mock`, same purpose.

A step yields the seconds that pass between its parts (`loop.ProcessLoop.run_in_executor` lets them pass).
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from random import Random
from typing import Any, cast
from zlib import crc32

from baton.ids import BlockId
from baton.wire import ModelInfo
from cachestore.device_pool import DevicePool, layout_of
from engine.block_manager import BlockManager
from engine.build import EngineConfig
from engine.core import Engine
from engine.pins import PinTable
from engine.types import Batch, KvSink, KvSpec, Runner, SequenceSlice, StepResult, TokenLogprobs
from kvtransfer.compatibility import PROTOCOL_MAX, PROTOCOL_MIN
from kvtransfer.ledger import Ledger

LAYERS = 2
SLOT_BYTES = 4
VOCAB = 50_000
CONTEXT_MAX = 1_024
EOS = 0
"""Never drawn."""
POISON = b"\xff"
_ROOTS = (0x1234_5678, 0x9ABC_DEF0)
_SLOT = struct.Struct("<I")
_TOKEN = struct.Struct("<I")


def _next_slot(before: int, token: int) -> int:
    return crc32(_TOKEN.pack(token), before)


def _draw(context: int, seed: int, index: int) -> int:
    return crc32(b"%d,%d" % (seed & 0xFFFF_FFFF, index), context) % (VOCAB - 1) + 1


class SimRegion:
    """Stands for `kvtransfer.region.Region`."""

    def __init__(self, nbytes: int) -> None:
        self.array_U8 = bytearray(nbytes)
        self.nbytes = nbytes

    def close(self) -> None:
        """Nothing to unmap."""


class SimRunner:
    """An `engine.types.Runner` whose `run` is a computation that takes simulated time."""

    def __init__(self, block_size: int, *, step_s: float, token_s: float, rng: Random) -> None:
        self.kv_spec = KvSpec(
            num_layers=LAYERS, num_kv_heads=1, head_dim=SLOT_BYTES, block_size=block_size, dtype="uint8"
        )
        self.vocab_size = VOCAB
        self.context_len_max = CONTEXT_MAX
        self.eos_token_ids = frozenset({EOS})
        self._size = block_size
        self._half = block_size * SLOT_BYTES
        self._record = 2 * self._half
        self._step_s = step_s
        self._token_s = token_s
        self._rng = rng
        self._region = memoryview(bytearray())
        self._num_blocks = 0

    def bind(self, region: bytearray, num_blocks: int) -> None:
        self._region = memoryview(region)
        self._num_blocks = num_blocks

    def unbind(self) -> None:
        """Nothing to let go of."""

    def run(self, batch: Batch, sink: KvSink) -> Generator[float, None, StepResult]:
        tokens = sum(piece.stop - piece.start for piece in batch.slices)
        part_s = (self._step_s + self._token_s * tokens) * (0.75 + 0.5 * self._rng.random()) / 2
        yield part_s
        for layer in range(LAYERS):
            for piece in batch.slices:
                self._write(piece, layer)
            sink.layer_done(layer)
            if layer == 0:
                yield part_s
        sampled = {piece.key: self._sample(piece) for piece in batch.slices if piece.sample}
        logprobs = {
            piece.key: TokenLogprobs(logprob=-1.0 - piece.key.attempt)
            for piece in batch.slices
            if piece.sample and piece.params.logprobs is not None
        }
        return StepResult(sampled=sampled, logprobs=logprobs)

    def _write(self, piece: SequenceSlice, layer: int) -> None:
        region, size, half, record = self._region, self._size, self._half, self._record
        table, base = piece.block_table, layer * self._num_blocks
        position = piece.start
        if position == 0:
            slot = _ROOTS[layer]
        else:
            before = position - 1
            at = (base + table[before // size]) * record + before % size * SLOT_BYTES
            slot = _SLOT.unpack_from(region, at)[0]
        pack = _SLOT.pack_into
        for token in piece.tokens[position : piece.stop]:
            slot = crc32(_TOKEN.pack(token), slot)
            at = (base + table[position // size]) * record + position % size * SLOT_BYTES
            pack(region, at, slot)
            pack(region, at + half, slot ^ 0xFFFF_FFFF)
            position += 1

    def _sample(self, piece: SequenceSlice) -> int:
        region, half, record = self._region, self._half, self._record
        full, rest = divmod(piece.stop, self._size)
        rest *= SLOT_BYTES
        table = piece.block_table
        crc = 0
        for layer in range(LAYERS):
            base = layer * self._num_blocks
            for block in table[:full]:
                at = (base + block) * record
                crc = crc32(region[at : at + record], crc)
            if rest:
                at = (base + table[full]) * record
                crc = crc32(region[at + half : at + half + rest], crc32(region[at : at + rest], crc))
        return _draw(crc, piece.params.seed, piece.output_index)


def reference(prompt: Sequence[int], seed: int, count: int, block_size: int) -> list[int]:
    """The answer by definition alone: no region, blocks or batches."""
    whole = [b""] * LAYERS
    keys, values = [b""] * LAYERS, [b""] * LAYERS
    slots = list(_ROOTS)
    half = block_size * SLOT_BYTES

    def append(token: int) -> None:
        for layer in range(LAYERS):
            slots[layer] = slot = _next_slot(slots[layer], token)
            keys[layer] += _SLOT.pack(slot)
            values[layer] += _SLOT.pack(slot ^ 0xFFFF_FFFF)
            if len(keys[layer]) == half:
                whole[layer] += keys[layer] + values[layer]
                keys[layer] = values[layer] = b""

    for token in prompt:
        append(token)
    answer = []
    for index in range(count):
        crc = 0
        for layer in range(LAYERS):
            crc = crc32(values[layer], crc32(keys[layer], crc32(whole[layer], crc)))
        answer.append(_draw(crc, seed, index))
        append(answer[-1])
    return answer


def make_pool(config: EngineConfig, *, step_s: float, token_s: float, rng: Random) -> DevicePool:
    """What `open_device_pool` makes, on simulated memory. Freed blocks are poisoned."""
    runner = SimRunner(config.block_size, step_s=step_s, token_s=token_s, rng=rng)
    layout = layout_of(runner.kv_spec)
    region = SimRegion(layout.region_bytes(config.num_blocks))
    runner.bind(region.array_U8, config.num_blocks)
    memory, record = region.array_U8, layout.record_bytes
    poison = POISON * record

    def poison_block(block: BlockId) -> None:
        for layer in range(LAYERS):
            at = (layer * config.num_blocks + block) * record
            memory[at : at + record] = poison

    ledger = Ledger(config.num_blocks, on_free=poison_block)
    blocks = BlockManager(ledger, config.block_size, b"sim")
    return DevicePool(
        pins=PinTable(
            blocks.prefix_cache, num_blocks=config.num_blocks, block_size=config.block_size, limits=config.pins
        ),
        runner=cast("Runner", runner),
        engine=Engine(cast("Runner", runner), blocks, config.scheduler()),
        blocks=blocks,
        ledger=ledger,
        region=cast("Any", region),
        layout=layout,
        model=ModelInfo(
            name="sim",
            fingerprint="sim",
            vocab_size=VOCAB,
            context_len_max=CONTEXT_MAX,
            eos_token_ids=(EOS,),
            layout_hash=layout.compatibility_hash(),
            block_size=config.block_size,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
        ),
    )
