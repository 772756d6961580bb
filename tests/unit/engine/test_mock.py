"""The mock runner: what it computes, and that every byte it has written matters to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.ids import BlockId
from engine.mock import MockConfig, MockRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice
from tests.support.engine_bench import POISON, SMALL, Node, key_of, params_of
from tests.support.mock_reference import mock_reference


def one_slice(tokens: list[int], table: list[int], params: SamplingParams, *, start: int = 0) -> SequenceSlice:
    return SequenceSlice(
        key=key_of("a"),
        tokens=tokens,
        start=start,
        stop=len(tokens),
        block_table=[BlockId(b) for b in table],
        sample=True,
        output_index=0,
        params=params,
    )


def test_the_reference_is_fixed() -> None:
    """Changing what the mock model computes would let nodes of different versions disagree: it is noticed here."""
    config = MockConfig(num_layers=2, vocab_size=100)
    assert mock_reference([1, 2, 3], params_of(), 6, config=config) == [79, 56, 80, 3, 26, 19]
    assert mock_reference([1, 2, 3], params_of(temperature=0.5, seed=9), 6, config=config) == [36, 82, 84, 89, 76, 51]


def test_the_reference_goes_on_after_output() -> None:
    """Given the first tokens as output of an earlier attempt, the rest is the same, seeded too."""
    for params in (params_of(), params_of(temperature=1.0)):
        whole = mock_reference([5, 6], params, 9, config=SMALL)
        assert mock_reference([5, 6], params, 5, config=SMALL, output=whole[:4]) == whole[4:]


def test_sampling_fields_matter_only_above_temperature_zero() -> None:
    """Greedy ignores the seed; seeded draws differ by seed, choice and temperature."""

    def draw(params: SamplingParams) -> tuple[int, ...]:
        return tuple(mock_reference([1, 2], params, 8, config=MockConfig()))

    greedy, seeded = params_of(), params_of(temperature=1.0)
    assert draw(greedy) == draw(replace(greedy, seed=2, choice=3, top_k=4))
    variants = [
        greedy,
        seeded,
        replace(seeded, seed=2),
        replace(seeded, choice=1),
        replace(seeded, temperature=0.5),
        replace(seeded, top_k=3),
        replace(seeded, top_p=0.5),
    ]
    assert len({draw(params) for params in variants}) == len(variants)


def test_end_of_sequence_is_drawn_only_when_configured() -> None:
    """Two of three tokens end a sequence."""
    quiet = MockConfig(vocab_size=3, eos_token_ids=frozenset({0, 2}))
    assert set(mock_reference([1], params_of(), 50, config=quiet)) == {1}
    loud = MockConfig(vocab_size=3, eos_token_ids=frozenset({0, 2}), draws_eos=True)
    assert set(mock_reference([1], params_of(), 50, config=loud)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"layer_delay_s": -1.0}, "layer_delay_s is -1.0"),
        ({"vocab_size": 1}, "none is left to draw"),
    ],
)
def test_the_configuration_is_validated(fields: dict[str, float], message: str) -> None:
    """The message names the field."""
    with pytest.raises(AssertionError, match=message):
        MockConfig(**fields)  # type: ignore[arg-type]


def test_every_byte_of_every_record_counts() -> None:
    """Each byte of a sequence's slots in turn is changed: the token drawn changes. Bytes of slots not reached yet, and
    of other blocks, change nothing."""
    node = Node(MockConfig(num_layers=2, vocab_size=2**40, block_size=4), num_blocks=4)
    tokens, table = [3, 1, 4, 1, 5, 9], [2, 0]
    runner = node.runner
    runner.run(Batch(slices=(one_slice(tokens, table, params_of()),)), NullSink())
    kv = node.region.reshape(2, 4, 2, 4, 8)
    last = one_slice(tokens, table, params_of(), start=5)
    good = runner.run(Batch(slices=(last,)), NullSink())
    before = node.region.copy()
    same = []
    for layer in range(2):
        for position in range(5):
            for byte in range(16):
                kv[layer, table[position // 4], byte // 8, position % 4, byte % 8] ^= 1
                same.append(runner.run(Batch(slices=(last,)), NullSink()) == good)
                node.region[:] = before
    assert len(same) == 160
    assert not any(same)
    kv[:, 1] ^= 1
    kv[:, 3] ^= 1
    kv[:, 0, :, 2:] ^= 1
    assert runner.run(Batch(slices=(last,)), NullSink()) == good


def test_every_byte_of_every_group_counts() -> None:
    """Two groups of layers with a block each for every position: any byte of either group's records changes the token
    drawn, and so do two blocks that are mixed up. What no record covers changes nothing."""
    config = MockConfig(num_layers=3, latent_layers=(1,), vocab_size=2**40, block_size=4)
    layout = config.layout
    assert [(layout.record_bytes_of(g), layout.block_bytes(g)) for g in range(2)] == [(64, 128), (32, 32)]
    node = Node(config, num_blocks=6)
    tokens, table = [3, 1, 4, 1, 5, 9], [4, 0, 1, 3]
    node.runner.run(Batch(slices=(one_slice(tokens, table, params_of()),)), NullSink())
    last = one_slice(tokens, table, params_of(), start=5)
    good = node.runner.run(Batch(slices=(last,)), NullSink())
    before, matters = node.region.copy(), np.zeros(node.region.shape, bool)
    for at in range(len(node.region)):
        node.region[at] ^= 1
        matters[at] = node.runner.run(Batch(slices=(last,)), NullSink()) != good
        node.region[:] = before
    expected = np.zeros_like(matters)
    for layer, (group, _) in enumerate(layout.places):
        components = 1 if group else 2
        for position in range(5):
            begin = layout.offset(layer, table[position // 4 * 2 + group], 6)
            for component in range(components):
                slot = begin + (component * 4 + position % 4) * 8
                expected[slot : slot + 8] = True
    assert np.array_equal(matters, expected)
    for mixed in ([0, 4, 1, 3], [4, 0, 3, 1], [1, 3, 4, 0], [4, 3, 1, 0]):
        wrong = one_slice(tokens, mixed, params_of(), start=5)
        assert node.runner.run(Batch(slices=(wrong,)), NullSink()) != good
        node.region[:] = before


def test_layers_are_told_in_order_after_they_are_written() -> None:
    """The sink looks at the region at each call: this layer is there, the next is not. The pause comes before each."""
    pauses: list[float] = []
    config = MockConfig(num_layers=3, block_size=4, layer_delay_s=0.5)
    node = Node(config, num_blocks=2, runner=MockRunner(config, pause=pauses.append))
    seen: list[tuple[int, int, list[bool]]] = []

    class Sink:
        def layer_done(self, layer: int) -> None:
            written = [not (node.pages[n, 0] == POISON).all() for n in range(3)]
            seen.append((layer, len(pauses), written))

    node.runner.run(Batch(slices=(one_slice([1, 2, 3, 4], [0], params_of()),)), Sink())
    assert seen == [(0, 1, [True, False, False]), (1, 2, [True, True, False]), (2, 3, [True, True, True])]
    assert pauses == [0.5, 0.5, 0.5]


def test_a_region_may_be_longer_than_its_records() -> None:
    """A region rounded up to pages: the tail is not touched."""
    runner = MockRunner(SMALL)
    region = np.zeros(2 * 2 * 64 + 100, np.uint8)
    runner.bind(region, 2)
    runner.run(Batch(slices=(one_slice([1] * 8, [0, 1], params_of()),)), NullSink())
    assert region[: 2 * 2 * 64].reshape(4, 64).any(axis=1).all()
    assert not region[2 * 2 * 64 :].any()
