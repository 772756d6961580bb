"""What sampled checksums cost: the speed of the sum against a plain copy, and what they add to a Commit.

    python benchmarks/checksum.py [--layers 16] [--blocks 64] [--record-kib 64] [--repeats 7]

One handoff is played without engine and network: layer by layer its records are copied into a second region (as a
transport does) and put into the sample; then comes what a Commit has to wait for with checksums and not without them:
the rest of the writer's reading, the message there and back into arrays, the receiver's reading. Everything is measured
in one run, best of the repeats, and told as a ratio to copying the same handoff once.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from batonpb import transfer_pb2

from baton.ids import BlockId, GrantId
from cachestore.layout import Layout, kv_layout
from kvtransfer.checksums import ChecksumThread, RecordChecks, SourceSample, checksums_from_proto
from kvtransfer.protocol.receiver import RecordsChecked
from kvtransfer.transport import RecordPlan

FRACTIONS = (0.0, 0.01, 0.1, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one handoff at one fraction."""

    fraction: float
    records: int
    handoff_s: float
    """Copying all of it, with the sample being taken beside."""
    commit_s: float
    """From the last copy to the comparison's result."""


def best_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


def speeds(region_U8: np.ndarray, record_bytes: int, repeats: int) -> dict[str, float]:
    """Bytes a second of a copy of the region, and of checksums over its records; others where they are installed."""
    records = [region_U8[at : at + record_bytes].data for at in range(0, region_U8.size, record_bytes)]
    target_U8 = np.empty_like(region_U8)
    sums: dict[str, Callable[[memoryview], object]] = {"zlib.crc32": zlib.crc32, "zlib.adler32": zlib.adler32}
    for module, function in (("xxhash", "xxh3_64_intdigest"), ("google_crc32c", "value")):
        try:
            found = getattr(importlib.import_module(module), function)
        except ImportError:
            continue
        sums[f"{module}.{function}"] = found if module == "xxhash" else lambda record, f=found: f(bytes(record))

    def each(function: Callable[[memoryview], object]) -> None:
        for record in records:
            function(record)

    taken_s = {"copy": best_s(lambda: np.copyto(target_U8, region_U8), repeats)}
    taken_s |= {name: best_s(lambda f=function: each(f), repeats) for name, function in sums.items()}  # type: ignore[misc]
    return {name: region_U8.size / seconds for name, seconds in taken_s.items()}


async def handoff(layout: Layout, source_U8: np.ndarray, target_U8: np.ndarray, blocks: int, fraction: float) -> Cost:
    """Play one handoff of `blocks` blocks; the regions have just as many."""
    grant = GrantId(np.random.default_rng(1).bytes(16))
    ids_B = np.arange(blocks, dtype=np.int64)
    reader, checks = ChecksumThread(source_U8, name="source"), RecordChecks(
        ChecksumThread(target_U8, name="target"), layout, num_blocks=blocks
    )  # fmt: skip
    sample = SourceSample(reader, grant, fraction=fraction, records=layout.num_layers * blocks)
    plan = RecordPlan(layout, ids_B, ids_B, src_num_blocks=blocks, dst_num_blocks=blocks)
    layer_bytes = blocks * layout.record_bytes
    reported: list[RecordsChecked] = []
    try:
        began_s = time.perf_counter()
        for layer in range(layout.num_layers):
            sample.take(layer, ids_B, plan.of_layer(layer))
            at = slice(layer * layer_bytes, (layer + 1) * layer_bytes)
            np.copyto(target_U8[at], source_U8[at])
        copied_s = time.perf_counter()
        sums = await sample.checksums()
        message = transfer_pb2.CommitRequest(
            checksum_layers=sums.layers_R.tolist(),
            checksum_blocks=sums.blocks_R.tolist(),
            checksums=sums.crcs_R.tolist(),
        )
        sent = checksums_from_proto(transfer_pb2.CommitRequest.FromString(message.SerializeToString()))
        if len(sent):
            checks.keep(grant, sent, [BlockId(block) for block in range(blocks)])
            await checks.run(grant, reported.append)
            assert reported[0].intact
        ended_s = time.perf_counter()
    finally:
        reader.close()
        checks.close()
    return Cost(fraction=fraction, records=len(sums), handoff_s=copied_s - began_s, commit_s=ended_s - copied_s)


def measure(layout: Layout, blocks: int, repeats: int) -> tuple[dict[str, float], list[Cost]]:
    nbytes = layout.region_bytes(blocks)
    source_U8 = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    target_U8 = np.zeros_like(source_U8)
    costs = []
    for fraction in FRACTIONS:
        runs = [asyncio.run(handoff(layout, source_U8, target_U8, blocks, fraction)) for _ in range(repeats)]
        costs.append(min(runs, key=lambda cost: cost.commit_s))
    return speeds(source_U8, layout.record_bytes, repeats), costs


def main() -> None:
    parser = argparse.ArgumentParser(description="What sampled checksums cost.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--record-kib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    layout = kv_layout(
        num_layers=given.layers,
        num_kv_heads=8,
        head_dim=given.record_kib * 1024 // (2 * 8 * 16),
        block_size=16,
        dtype="uint8",
        dtype_bytes=1,
    )
    rates, costs = measure(layout, given.blocks, given.repeats)
    print(f"records of {layout.record_bytes:,} bytes, {layout.region_bytes(given.blocks):,} bytes in all\n")
    for name, rate in rates.items():
        print(f"{name:28} {rate / 1e9:7.2f} GB/s   {rate / rates['copy']:.2f} of a copy")
    plain = costs[0]
    print("\nfraction  records  commit waits (ms)  of copying the handoff  copying beside it")
    for cost in costs:
        print(
            f"{cost.fraction:8.2f}  {cost.records:7}  {cost.commit_s * 1e3:17.2f}  "
            f"{cost.commit_s / plain.handoff_s:22.3f}  {cost.handoff_s / plain.handoff_s:17.2f}"
        )


if __name__ == "__main__":
    main()
