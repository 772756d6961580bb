"""A mock engine on simulated time. A slot's bytes are a checksum of the token and of the slot before it, read back from
the region; the next token is a checksum of the whole context in all layers, read back too. So one wrong byte anywhere
in a sequence's records changes the next token, and with it all that follow. Cheaper than `engine.mock`, same purpose.
Each token also tells the attempt that has drawn it, so that a client sees an answer mixed from two attempts.

A step yields the seconds that pass between its parts (`loop.ProcessLoop.run_in_executor` lets them pass).
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any, cast
from zlib import crc32

import numpy as np

from baton.ids import BlockId
from baton.wire import ModelInfo
from cachestore.block_manager import BlockManager
from cachestore.ledger import Ledger
from cachestore.pins import PinTable
from engine.build import EngineConfig
from engine.core import Engine
from engine.types import Batch, KvSink, KvSpec, Runner, SequenceSlice, StepResult, TokenLogprobs
from kvtransfer.link import PROTOCOL_MAX, PROTOCOL_MIN
from kvtransfer.transport import RegionKind
from node.pool import DevicePool

LAYERS = 2
SLOT_BYTES = 4
ATTEMPTS = 256
"""A token tells which attempt has drawn it: its id modulo this."""
VOCAB = 50_000 * ATTEMPTS
CONTEXT_MAX = 1_024
EOS = 0
KV_ROOT = b"sim"
"""Never drawn."""
SEED_PLAIN = 2
"""From this sampling seed on a token does not tell its attempt: every attempt draws the same, as real engines do."""
POISON = b"\xff"
_ROOTS = (0x1234_5678, 0x9ABC_DEF0)
PROMPTS_KEPT = 1_024
_pack_token = struct.Struct("<I").pack
"""Packs a slot too."""


def _draw(context: int, seed: int, index: int, attempt: int) -> int:
    drawn = crc32(b"%d,%d" % (seed & 0xFFFF_FFFF, index), context) % (VOCAB // ATTEMPTS - 1) + 1
    return drawn * ATTEMPTS + (attempt % ATTEMPTS if seed < SEED_PLAIN else 0)


class SimRegion:
    """Stands for `kvtransfer.region.Region`."""

    kind = RegionKind.HOST

    def __init__(self, nbytes: int) -> None:
        self.array_U8 = np.zeros(nbytes, np.uint8)
        self.nbytes = nbytes

    def close(self) -> None:
        """Nothing to unmap."""


class SimRunner:
    """An `engine.types.Runner` whose `run` is a computation that takes simulated time."""

    def __init__(self, block_size: int, *, groups: int, step_s: float, token_s: float, rng: Random) -> None:
        """All layers are one group, or each is one."""
        assert groups in (1, LAYERS), groups
        plain = KvSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=SLOT_BYTES, block_size=block_size, dtype="uint8")
        self.layout = plain.layout
        if groups > 1:
            (kv,) = self.layout.groups
            self.layout = replace(self.layout, groups=tuple(replace(kv, layers=(layer,)) for layer in range(LAYERS)))
        self.vocab_size = VOCAB
        self.context_len_max = CONTEXT_MAX
        self.eos_token_ids = frozenset({EOS})
        self._size = block_size
        self._step_s = step_s
        self._token_s = token_s
        self._rng = rng
        half = block_size * SLOT_BYTES
        self._parts = [(slice(nbytes), slice(half, half + nbytes)) for nbytes in range(half)]
        """Of a record that has so many bytes of keys, and as many of values, where those are."""
        self._num_blocks = 0
        self._slots = memoryview(b"").cast("I")
        """The region by slots: of each record first those of K, then those of V."""
        self.layers: list[list[memoryview]] = []
        """The records that each layer may have: those of its row of the region."""

    def bind(self, region: np.ndarray, num_blocks: int) -> None:
        record = 2 * self._size * SLOT_BYTES
        view = memoryview(region)  # type: ignore[arg-type]  # mypy knows no buffers of 3.11
        self._num_blocks = num_blocks
        self._slots = view.cast("I")
        records = [view[at : at + record] for at in range(0, self.layout.num_rows * num_blocks * record, record)]
        self.layers = [records[row * num_blocks : (row + 1) * num_blocks] for _, row in self.layout.places]

    def _table(self, piece: SequenceSlice, layer: int) -> Sequence[BlockId]:
        groups = self.layout.num_groups
        return piece.block_table if groups == 1 else piece.block_table[self.layout.places[layer][0] :: groups]

    def unbind(self) -> None:
        """Nothing to let go of."""

    def run(self, batch: Batch, sink: KvSink) -> Generator[float, None, StepResult]:
        slices = batch.slices
        part_s = (self._step_s + self._token_s * batch.num_tokens) * (0.75 + 0.5 * self._rng.random()) / 2
        yield part_s
        for layer in range(LAYERS):
            self._write(slices, layer)
            sink.layer_done(layer)
            if layer == 0:
                yield part_s
        result = StepResult()
        for piece in slices:
            if piece.sample:
                result.sampled[piece.key] = self._sample(piece)
                if piece.params.logprobs is not None:
                    result.logprobs[piece.key] = TokenLogprobs(logprob=-1.0 - piece.key.attempt)
        return result

    def _write(self, slices: Sequence[SequenceSlice], layer: int) -> None:
        slots, size, root = self._slots, self._size, _ROOTS[layer]
        base = self.layout.places[layer][1] * self._num_blocks
        record, crc, pack = 2 * size, crc32, _pack_token
        for piece in slices:
            table, tokens, start = self._table(piece, layer), piece.tokens, piece.start
            if start == 0:
                at, slot = -1, root
            else:
                at = (base + table[(start - 1) // size]) * record + (start - 1) % size
                slot = slots[at]
            for position in range(start, piece.stop):
                at = at + 1 if position % size else (base + table[position // size]) * record
                slots[at] = slot = crc(pack(tokens[position]), slot)
                slots[at + size] = slot ^ 0xFFFF_FFFF

    def _sample(self, piece: SequenceSlice) -> int:
        full, rest = divmod(piece.stop, self._size)
        keys, values = self._parts[rest * SLOT_BYTES]
        crc = 0
        for layer, records in enumerate(self.layers):
            table = self._table(piece, layer)
            parts = [records[block] for block in table[:full]]
            if rest:
                record = records[table[full]]
                parts += (record[keys], record[values])
            crc = crc32(b"".join(parts), crc)
        return _draw(crc, piece.params.seed, piece.output_index, piece.key.attempt)


class _Records:
    """What one layer has of some tokens, by definition: the last slot, whole records, and the keys and values of the
    record that is not full yet."""

    __slots__ = ("half", "keys", "slot", "values", "whole")

    def __init__(self, root: int, block_size: int) -> None:
        self.slot = root
        self.half = block_size * SLOT_BYTES
        self.whole = self.keys = self.values = b""

    def append(self, packed_token: bytes) -> None:
        self.slot = slot = crc32(packed_token, self.slot)
        self.keys += _pack_token(slot)
        self.values += _pack_token(slot ^ 0xFFFF_FFFF)
        if len(self.keys) == self.half:
            self.whole += self.keys + self.values
            self.keys = self.values = b""


@lru_cache(maxsize=PROMPTS_KEPT)
def _of_prompt(prompt: tuple[int, ...], block_size: int) -> tuple[_Records, ...]:
    layers = tuple(_Records(root, block_size) for root in _ROOTS)
    for token in prompt:
        packed = _pack_token(token)
        for layer in layers:
            layer.append(packed)
    return layers


def reference(prompt: tuple[int, ...], seed: int, attempts: Sequence[int], block_size: int) -> list[int]:
    """The answer by definition alone, token i drawn by `attempts[i]`: no region, blocks or batches."""
    layers = [copy(layer) for layer in _of_prompt(prompt, block_size)]
    answer = []
    for index, attempt in enumerate(attempts):
        crc = 0
        for layer in layers:
            crc = crc32(layer.values, crc32(layer.keys, crc32(layer.whole, crc)))
        token = _draw(crc, seed, index, attempt)
        answer.append(token)
        packed = _pack_token(token)
        for layer in layers:
            layer.append(packed)
    return answer


def make_pool(config: EngineConfig, *, groups: int, step_s: float, token_s: float, rng: Random) -> DevicePool:
    """What `open_device_pool` makes, on simulated memory. Freed blocks are poisoned."""
    runner = SimRunner(config.block_size, groups=groups, step_s=step_s, token_s=token_s, rng=rng)
    layout = runner.layout
    num_blocks = config.num_blocks
    assert num_blocks is not None
    region = SimRegion(layout.region_bytes(num_blocks))
    runner.bind(region.array_U8, num_blocks)
    layers, poison = runner.layers, POISON * layout.page_bytes

    def poison_block(block: BlockId) -> None:
        for records in layers:
            records[block][:] = poison

    ledger = Ledger(num_blocks, on_free=poison_block)
    blocks = BlockManager(ledger, config.block_size, KV_ROOT, groups=groups)
    return DevicePool(
        pins=PinTable(blocks.prefix_cache, num_blocks=num_blocks, limits=config.pins),
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
            layer_groups=groups,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            kv_root=KV_ROOT,
        ),
    )
