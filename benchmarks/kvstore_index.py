"""What a router's index of who has which blocks takes: memory at a million blocks, and time at 1,250 nodes.

    python -m benchmarks.kvstore index             # a minute or two; processor time, so other work harms little
    python -m benchmarks.kvstore index --rounds 9

Memory is what the index has allocated, by tracemalloc, over the (block, node) pairs that it knows: when it has been
filled; when a third of all blocks has been evicted and others have come; and at most meanwhile. Its limit is 24 bytes.
Times are processor time of the calling thread, means over prompts of 24 blocks, the best of some rounds: of a look-up,
of the prompt's digests, and of `Placement.pick`, which does both and chooses. The limit of a pick is 200 us.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeLoad, NodeRecord, Role
from cachestore.holder_index import HolderIndex
from cachestore.prefix_cache import chain_digests, root_digest
from router.placement import Placement

PAIRS: Final = 1_000_000
BYTES_MAX: Final = 24.0
PICK_US_MAX: Final = 200.0
NODES: Final = 1_250
BLOCK, BLOCKS = 16, 24
PROMPTS: Final = 50
NEWS_BLOCKS: Final = 256
"""Changes in one message of a node."""
MODEL = ModelInfo(
    name="m", fingerprint="f", vocab_size=1 << 17, context_len_max=1 << 20, eos_token_ids=(1,), layout_hash="l",
    block_size=BLOCK, protocol_min=1, protocol_max=1, kv_root=b"root",
)  # fmt: skip


def numbers(index: HolderIndex, count: int) -> list[int]:
    found = []
    for node in range(count):
        number = index.begin()
        assert number is not None
        index.publish(Incarnation(node + 1), number)
        found.append(number)
    return found


def news(index: HolderIndex, number: int, digests: bytes, tier: int) -> None:
    for start in range(0, len(digests) // 16, NEWS_BLOCKS):
        part = digests[16 * start : 16 * (start + NEWS_BLOCKS)]
        index.put(number, part, bytes([tier]) * (len(part) // 16))


def memory(nodes: int, holders: int) -> dict[str, Any]:
    """A million pairs: each block has so many `holders`."""
    rng = np.random.default_rng(1)
    groups = nodes // holders
    own = PAIRS // nodes
    chains = [rng.bytes(16 * own) for _ in range(groups)]
    third = 16 * (own // 3)
    later = [rng.bytes(third) for _ in range(groups)]
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    index = HolderIndex()
    known = numbers(index, groups * holders)
    began_s = time.thread_time()
    for i, number in enumerate(known):
        news(index, number, chains[i % groups], 1)
    filled = tracemalloc.get_traced_memory()[0] - base
    for i, number in enumerate(known):
        news(index, number, chains[i % groups][:third], 0)
        news(index, number, later[i % groups], 1)
    took_s = time.thread_time() - began_s
    changed, most = (value - base for value in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    pairs, changes = len(known) * own, len(known) * (own + 2 * (third // 16))
    return {
        "nodes": len(known),
        "holders of a block": holders,
        "pairs": pairs,
        "bytes a pair, filled": round(filled / pairs, 1),
        "bytes a pair, a third changed": round(changed / pairs, 1),
        "bytes a pair, at most": round(most / pairs, 1),
        "limit": BYTES_MAX,
        "us a change": round(took_s / changes * 1e6, 2),
    }


def pauses(pairs: int) -> dict[str, Any]:
    """How long the index keeps its thread at most, while 1,250 nodes say what they have, and when one of them ends."""
    rng = np.random.default_rng(4)
    index = HolderIndex()
    known = numbers(index, NODES)
    puts_s, slices_s = [], []
    for i in range(pairs // NEWS_BLOCKS):
        digests = rng.bytes(16 * NEWS_BLOCKS)
        began_s = time.thread_time()
        index.put(known[i % NODES], digests, b"\1" * NEWS_BLOCKS)
        puts_s.append(time.thread_time() - began_s)
    index.forget(Incarnation(1))
    more = True
    while more:
        began_s = time.thread_time()
        more = index.sweep()
        slices_s.append(time.thread_time() - began_s)
    return {
        "pairs": index.entries,
        "us a message of 256": round(1e6 * sum(puts_s) / len(puts_s)),
        "the longest, ms": round(1e3 * max(puts_s), 1),
        "99.9%, ms": round(1e3 * sorted(puts_s)[int(len(puts_s) * 0.999)], 1),
        "a slice of a sweep at most, ms": round(1e3 * max(slices_s), 1),
        "a sweep, ms": round(1e3 * sum(slices_s)),
    }


def record(number: int, rng: np.random.Generator) -> NodeRecord:
    return NodeRecord(
        name=NodeName(f"prefill-{number:04}"), role=Role.PREFILL, incarnation=Incarnation(number + 1),
        endpoint=f"10.0.{number // 250}.{number % 250}:7000", lifecycle=Lifecycle.READY, model=MODEL, sequence=1,
        load=NodeLoad(
            waiting_tokens=int(rng.integers(0, 50_000)), prefill_tokens_per_s=float(rng.uniform(5e3, 2e4)),
            fetch_tokens_per_s=float(rng.uniform(5e4, 2e5)),
        ),
    )  # fmt: skip


def prompts(first: int, shared: int) -> list[list[int]]:
    """Their first `shared` blocks are one system prompt."""
    system = list(range(first, first + shared * BLOCK))
    own = (BLOCKS - shared) * BLOCK + 1
    return [[*system, *range(first + 1_000 * (i + 1), first + 1_000 * (i + 1) + own)] for i in range(PROMPTS)]


def digests(prompt: list[int]) -> list[bytes]:
    return chain_digests(root_digest(MODEL.kv_root, b""), prompt, BLOCK)


def mean_us(call: Callable[[list[int]], object], over: list[list[int]], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began_ns = time.thread_time_ns()
        for prompt in over:
            call(prompt)
        best = min(best, (time.thread_time_ns() - began_ns) / len(over) / 1e3)
    return round(best, 1)


def times(rounds: int) -> dict[str, dict[str, float]]:
    """1,250 prefill nodes, 800 blocks each."""
    rng = np.random.default_rng(2)
    index = HolderIndex()
    known = numbers(index, NODES)
    placement = Placement(index, time.monotonic)
    placement.update([record(number, rng) for number in range(NODES)])
    cases = {
        "nobody has any of it": (prompts(0, 0), 0, 0),
        "three nodes have all of it": (prompts(1 << 20, 0), 3, BLOCKS),
        "all nodes have its first 8 blocks": (prompts(2 << 20, 8), NODES, 8),
        "all nodes have all of it": (prompts(3 << 20, BLOCKS), NODES, BLOCKS),
    }
    for number in known:
        news(index, number, rng.bytes(16 * 768), 1)
    for texts, holders, blocks in cases.values():
        having = {digest: None for text in texts for digest in digests(text)[:blocks]}
        for number in rng.choice(known, holders, replace=False).tolist():
            news(index, number, b"".join(having), 1)
    found: dict[str, dict[str, float]] = {}
    for name, (texts, holders, blocks) in cases.items():
        chains = {id(text): digests(text) for text in texts}
        have = index.lookup(chains[id(texts[0])]) or index.nothing()
        assert np.count_nonzero(have.blocks[:-1] == blocks) >= holders
        found[name] = {
            "look-up, us": mean_us(lambda text, chains=chains: index.lookup(chains[id(text)]), texts, rounds),  # type: ignore[misc]
            "digests, us": mean_us(digests, texts, rounds),
            "pick, us": mean_us(lambda text: placement.pick(text, b""), texts, rounds),
            "limit of a pick": PICK_US_MAX,
        }
    found["the index"] = {"pairs": index.entries, "bytes a pair": round(index.nbytes / index.entries, 1)}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)


def run(options: argparse.Namespace) -> None:
    print(json.dumps({"times": times(options.rounds)}, indent=2))
    print(json.dumps({"pauses": [pauses(1_000_000), pauses(16_000_000)]}, indent=2))
    print(json.dumps({"memory": [memory(100, 1), memory(NODES, 1), memory(NODES, 10), memory(1_000, 1_000)]}, indent=2))
