"""A model without weights: the protocol's test tool (CONTRIBUTING.md).

The KV bytes of a slot are a digest of the token and of the slot before it, read back from the region; the next token is
a digest of the whole context in all layers. So one wrong byte in a sequence's records changes all tokens that follow.

With `latent_layers` there are two groups of layers: these have smaller records, of one component, and fewer of them
(cachestore/layout.py).

Shape suffixes as in `engine.types`; C is the components of a record (K and V, or a latent), R rows of pages.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from cachestore.layout import Component, LayerGroup, Layout
from engine.types import Batch, KvSink, SamplingParams, SequenceSlice, StepResult, TokenLogprobs

_BLAKE2B_BYTES_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """The mock model. Two runners draw the same tokens if and only if all fields but the last two are equal."""

    num_layers: int = 4
    latent_layers: tuple[int, ...] = ()
    """Those of them that have a latent of `head_dim` bytes in place of K and V, and are a group of their own."""
    head_dim: int = 8
    vocab_size: int = 1000
    model_seed: int = 0
    """Stands for the weights."""
    eos_token_ids: frozenset[int] = frozenset({0})
    draws_eos: bool = False
    """Whether end-of-sequence tokens are ever drawn."""
    context_len_max: int = 4096
    block_size: int = 16
    layer_delay_s: float = 0.0
    """How long each layer takes, by the runner's `pause`."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "head_dim", "vocab_size", "context_len_max", "block_size"):
            assert getattr(self, name) >= 1, f"{name} is {getattr(self, name)}"
        assert 2 * self.head_dim <= _BLAKE2B_BYTES_MAX, f"head_dim is {self.head_dim}: a slot's K and V are one digest"
        assert set(self.latent_layers) < set(range(self.num_layers)), f"latent_layers are {self.latent_layers}"
        assert self.layer_delay_s >= 0, f"layer_delay_s is {self.layer_delay_s}"
        assert len(self.banned) < self.vocab_size, "all are end-of-sequence tokens; none is left to draw"

    @property
    def banned(self) -> list[int]:
        """Tokens that are never drawn, ascending."""
        return [] if self.draws_eos else sorted(t for t in self.eos_token_ids if 0 <= t < self.vocab_size)

    @property
    def layout(self) -> Layout:
        """The layers with K and V are the first group."""
        k, v, latent = (Component(name=name, num_heads=1, slot_bytes=self.head_dim) for name in ("k", "v", "latent"))
        plain = tuple(layer for layer in range(self.num_layers) if layer not in self.latent_layers)
        groups = [LayerGroup(layers=plain, components=(k, v))]
        if self.latent_layers:
            groups.append(LayerGroup(layers=self.latent_layers, components=(latent,)))
        return Layout(groups=tuple(groups), block_size=self.block_size, dtype="uint8")


def _root(config: MockConfig, layer: int) -> bytes:
    nbytes = config.head_dim if layer in config.latent_layers else 2 * config.head_dim
    return blake2b(struct.pack("<qq", config.model_seed, layer), digest_size=nbytes, person=b"root").digest()


def _next_slot(before: bytes, token: int, layer: int) -> bytes:
    return blake2b(before + struct.pack("<qq", token, layer), digest_size=len(before), person=b"slot").digest()


def _draw(last_slots: bytes, context_digests: bytes, params: SamplingParams, index: int, config: MockConfig) -> int:
    draw = blake2b(last_slots + context_digests, digest_size=8, person=b"draw")
    if params.temperature > 0:
        draw.update(struct.pack("<ddq", params.temperature, params.top_p, params.top_k))
        draw.update(f"{params.seed},{params.choice},{index}".encode())
    banned = config.banned
    token = int.from_bytes(draw.digest(), "little") % (config.vocab_size - len(banned))
    for skipped in banned:  # ascending, so this counts the drawable tokens off
        token += token >= skipped
    return token


class MockRunner:
    """A `Runner` on NumPy. A sequence's result does not depend on the rest of the batch."""

    def __init__(self, config: MockConfig, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.config = config
        self.layout = config.layout
        self.vocab_size = config.vocab_size
        self.context_len_max = config.context_len_max
        self.eos_token_ids = config.eos_token_ids
        self._pause = pause
        self._layers: list[np.ndarray] = []
        """Of each layer its records, [N][C][S][D]: a view of the region."""

    def bind(self, region_U8: np.ndarray, num_blocks: int) -> None:
        """Use the region as the paged pool; bytes past its last page are not touched."""
        layout, size = self.layout, self.layout.region_bytes(num_blocks)
        assert region_U8.dtype == np.uint8, region_U8.dtype
        assert region_U8.ndim == 1, region_U8.shape
        assert region_U8.flags.carray, region_U8.flags
        assert region_U8.size >= size, (region_U8.size, size)
        pages_RNU8 = region_U8[:size].reshape(layout.num_rows, num_blocks, layout.page_bytes)
        self._layers = []
        for (group, row), nbytes in zip(layout.places, layout.bytes_by_layer, strict=True):
            shape = (num_blocks, len(layout.groups[group].components), layout.block_size, self.config.head_dim)
            records = pages_RNU8[row, :, :nbytes].reshape(shape)
            assert np.shares_memory(records, region_U8)
            self._layers.append(records)

    def unbind(self) -> None:
        """See `Runner.unbind`."""
        self._layers = []

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        """Compute the batch layer by layer, then draw. Raises AssertionError: a slice is wrong."""
        for piece in batch.slices:
            self._check(piece)
        for layer in range(self.config.num_layers):
            if self.config.layer_delay_s > 0:
                self._pause(self.config.layer_delay_s)
            for piece in batch.slices:
                self._write(piece, layer)
            sink.layer_done(layer)
        sampled = {piece.key: self._sample(piece) for piece in batch.slices if piece.sample}
        # The mock model has no doubts.
        logprobs = {
            p.key: TokenLogprobs(logprob=0.0, top=((sampled[p.key], 0.0),)[: p.params.logprobs])
            for p in batch.slices
            if p.sample and p.params.logprobs is not None
        }
        prompts = {
            p.key: [
                TokenLogprobs(logprob=0.0, top=((token, 0.0),)[: p.params.prompt_logprobs])
                for token in p.tokens[p.start + 1 : p.stop + 1]
            ]
            for p in batch.slices
            if p.is_scored
        }
        return StepResult(sampled=sampled, logprobs=logprobs, prompt_logprobs=prompts)

    def _check(self, piece: SequenceSlice) -> None:
        assert 0 <= piece.start < piece.stop <= len(piece.tokens), (piece.key, piece.start, piece.stop)
        assert piece.stop <= self.context_len_max, (piece.key, piece.stop)
        positions = len(piece.block_table) // self.layout.num_groups
        assert positions * self.config.block_size >= piece.stop, (piece.key, len(piece.block_table))
        new = piece.tokens[piece.start : piece.stop]
        assert all(0 <= token < self.vocab_size for token in new), (piece.key, "token id out of range")

    def _write(self, piece: SequenceSlice, layer: int) -> None:
        records_NCSD, table_N = self._layer(layer), self._table(piece, layer)
        size = self.config.block_size
        if piece.start == 0:
            slot = _root(self.config, layer)
        else:
            before = piece.start - 1
            slot = records_NCSD[table_N[before // size], :, before % size].tobytes()
        new = bytearray()
        for token in piece.tokens[piece.start : piece.stop]:
            slot = _next_slot(slot, token, layer)
            new += slot
        positions_T = np.arange(piece.start, piece.stop)
        blocks_T = table_N[positions_T // size]
        # An index array on each side of a slice: NumPy puts T first, so this is T, C, D.
        new_TCD = np.frombuffer(new, np.uint8).reshape(len(positions_T), -1, self.config.head_dim)
        records_NCSD[blocks_T, :, positions_T % size] = new_TCD

    def _sample(self, piece: SequenceSlice) -> int:
        positions = -(-piece.stop // self.config.block_size)
        last_slots = b""
        context_digests = b""
        for layer in range(self.config.num_layers):
            context_NSCD = self._layer(layer)[self._table(piece, layer)[:positions]].transpose(0, 2, 1, 3)
            context = context_NSCD.reshape(positions * self.config.block_size, -1)[: piece.stop]
            last_slots += context[-1].tobytes()
            context_digests += blake2b(np.ascontiguousarray(context).data).digest()
        return _draw(last_slots, context_digests, piece.params, piece.output_index, self.config)

    def _layer(self, layer: int) -> np.ndarray:
        assert self._layers, "run before bind"
        return self._layers[layer]

    def _table(self, piece: SequenceSlice, layer: int) -> np.ndarray:
        """The blocks that have this layer's records."""
        group = self.layout.places[layer][0]
        return np.asarray(piece.block_table[group :: self.layout.num_groups], dtype=np.int64)
