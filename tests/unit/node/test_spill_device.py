"""The engine under overcommit with its region on a simulated device: blocks leave and return on a side stream that runs
as late and as oddly as CUDA allows, steps overlap, and whatever touches a block has to know that nothing on
the device still does. The mock model's tokens are hashes of the bytes read back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.ids import BlockId
from engine.types import SequenceSlice
from node.copiers import BlockCopier
from tests.conformance.transport_kits import FakeSource
from tests.support.engine_bench import SMALL, key_of, params_of
from tests.support.late_runner import LateRunner, Overlap, OverlapSpillNode
from tests.support.mock_reference import mock_reference
from tests.support.shm_harness import run
from tests.support.spill_bench import SpillNode
from tests.support.staging_scenes import HastyDevice, ShimPinned
from tests.support.stream_shim import Memory, MissingDependency

STEPS_MAX = 5_000
WAIT_S = 30


class LookingRunner(LateRunner):
    """Asks before it reads or writes a block of a layer."""

    look: Callable[[int, BlockId, bool], None]

    def _write(self, piece: SequenceSlice, layer: int) -> None:
        size, table = self.config.block_size, piece.block_table
        for block in table[piece.start // size : -(-piece.stop // size)]:
            self.look(layer, block, True)
        if piece.start:
            self.look(layer, table[(piece.start - 1) // size], False)
        super()._write(piece, layer)

    def _sample(self, piece: SequenceSlice) -> int:
        for layer in range(self.config.num_layers):
            for block in piece.block_table[: -(-piece.stop // self.config.block_size)]:
                self.look(layer, block, False)
        return super()._sample(piece)


class DeviceNode(OverlapSpillNode):
    """An `OverlapSpillNode` whose copies are a `BlockCopier`'s. Freed blocks are poisoned, which is a touch too."""

    def __init__(self, device: HastyDevice, *, num_blocks: int, host_blocks: int, copy_blocks_max: int = 3) -> None:
        runner = LookingRunner(SMALL, chance=random.Random(1))
        SpillNode.__init__(
            self, num_blocks=num_blocks, host_blocks=host_blocks, copy_blocks_max=copy_blocks_max, runner=runner
        )
        self.overlap = Overlap()
        self.device = device
        self.on_device = Memory("region", self.region)
        streams: Any = device
        self.stream_copier = BlockCopier(
            streams=streams,
            places=self.places,
            device=FakeSource(self.on_device, self.region.nbytes),
            host=ShimPinned(Memory("host memory", self.host_memory)),
            name="test",
            poll_interval_s=1e-5,
        )
        self.spill._copier = self.stream_copier
        self.changed = asyncio.Event()
        self.engine.changed = self.changed.set
        runner.look = self._look

    def _look(self, layer: int, block: BlockId, write: bool) -> None:
        layout = self.runner.layout
        first, nbytes = layout.offset(layer, block, self.ledger.num_blocks), layout.record_bytes
        with self.device.lock:
            self.device.host_access(self.on_device, first, first + nbytes, write=write)
            # Whatever is launched from now on is behind what the host knows of.
            known = self.device.host_clock
            self.on_device.accesses = [a for a in self.on_device.accesses if known.get(a[3], 0) < a[4]]

    def _poison(self, block: BlockId) -> None:
        for layer in range(self.config.num_layers):
            self._look(layer, block, True)
        super()._poison(block)

    async def play(self) -> None:
        """To the end, also of copies whose sequences have ended."""
        for _ in range(STEPS_MAX):
            if not self.engine.has_work and not self.spill.host.copying:
                break
            self.changed.clear()
            self.step()
            if self.idle and self.spill.host.copying:
                async with asyncio.timeout(WAIT_S):
                    await self.changed.wait()
            else:
                await asyncio.sleep(0)
        else:
            raise AssertionError(f"not over after {STEPS_MAX} steps")
        self.events += self.engine.take_events()
        self.stream_copier.close()


def prompt_of(name: int, length: int) -> list[int]:
    return [1 + (name * 7 + i * 3) % 49 for i in range(length)]


def reference(prompt: list[int], count: int) -> list[int]:
    return mock_reference(prompt, params_of(count), count, config=SMALL)


@pytest.mark.parametrize("seed", range(6))
def test_a_region_that_is_too_small_gives_the_undisturbed_answers(seed: int) -> None:
    """Three sequences that come to nine, eight and seven blocks on a device of ten: each token is the reference's and
    was computed once, steps overlapped where there was room and were held back where there was none."""

    async def scene() -> None:
        node = DeviceNode(HastyDevice(seed), num_blocks=10, host_blocks=20, copy_blocks_max=1 + seed % 3)
        counts = {"old": 28, "middle": 24, "young": 20}
        prompts = {name: prompt_of(n, 7 + n) for n, name in enumerate(counts)}
        for name, prompt in prompts.items():
            assert node.enter(name, prompt, params_of(counts[name]))
        await node.play()
        for name, prompt in prompts.items():
            assert node.tokens(name) == reference(prompt, counts[name])
        spill, counters = node.spill, node.engine.counters
        assert spill.counters.copied_out == spill.counters.copied_back + spill.counters.merged > 0
        assert counters.tokens_computed == node.expected_tokens_computed
        assert counters.steps_overlapped > 0
        assert counters.steps_held_back > 0
        node.assert_nothing_held()

    run(scene())


@pytest.mark.parametrize("first_seed", [0, 100])
def test_sequences_that_end_at_any_moment(first_seed: int) -> None:
    """Aborts at random, many while blocks of the sequence are being copied, either way: the device's copy keeps them
    until it has ended, and the answers of the others are whole."""

    async def scene() -> None:
        during_copies = 0
        for seed in range(first_seed, first_seed + 8):
            rng = random.Random(seed)
            node = DeviceNode(HastyDevice(seed), num_blocks=rng.choice([8, 10]), host_blocks=16)
            wanted: dict[str, list[int]] = {}
            for n in range(4):
                prompt, count = prompt_of(n, rng.randrange(1, 12)), rng.randrange(12, 20)
                if node.enter(f"{n}", prompt, params_of(count)):
                    wanted[f"{n}"] = reference(prompt, count)
            aborted: set[str] = set()
            copying = 0

            def ask(node: DeviceNode = node, rng: random.Random = rng, aborted: set[str] = aborted) -> None:
                nonlocal copying
                name = f"{rng.randrange(4)}"
                swapped_out = node.spill._swapped_out.get(key_of(name))
                under_copy = swapped_out is not None and any(unit.copying for unit in swapped_out.units)
                if rng.random() < (0.3 if under_copy else 0.005) and node.engine.abort(key_of(name)):
                    aborted.add(name)
                    copying += under_copy

            node.overlap.between = ask
            await node.play()
            for name, tokens in wanted.items():
                reported = node.tokens(name)
                assert reported == (tokens[: len(reported)] if name in aborted else tokens)
            node.assert_nothing_held()
            during_copies += copying
        assert during_copies > 0

    run(scene())


def test_a_copier_that_tells_of_the_end_too_early_is_found() -> None:
    """Events that have always passed: a block is given away, or read, under its copy."""

    async def scene() -> None:
        device = HastyDevice(1)
        node = DeviceNode(device, num_blocks=10, host_blocks=20)
        device.hasty = True
        for name in range(3):
            assert node.enter(f"{name}", prompt_of(name, 9), params_of(24))
        with pytest.raises(MissingDependency, match=r"the host touches region.* nothing orders it after copy"):
            await node.play()
        node.stream_copier.close()

    run(scene())
