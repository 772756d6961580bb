"""How much of published traces' prompts a cluster need not compute: our placement and caches, replayed in mock time.

    python -m benchmarks.kvstore_replay --trace conversation_trace.jsonl synthetic_trace.jsonl

The traces are not in this repository: github.com/kvcache-ai/Mooncake, FAST25-release/traces. Each request has a time, a
length, and an id for each 512 tokens of its prompt; equal ids are equal prompts up to there.

The classes that decide are the product's: placement, ledger, block manager, prefix cache. Time is a mock, and so are
engines: a node computes prompts one after the other at `PREFILL_TOKENS_PER_S`. There is no decoding. For speed a block
has two "tokens", of the block's id, and a prompt's unfinished last block has one: so it is computed and not cached, as
in the product.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Final

from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle
from baton.membership import MembershipConfig
from baton.wire import BlockLoad, ModelInfo, NodeLoad, NodeRecord, Role
from cachestore.block_manager import BlockManager, prefix_blocks_max
from cachestore.ledger import Ledger
from cachestore.prefix_cache import IndexCursor, chain_digests, root_digest
from router.config import RouterConfig
from router.placement import Placement

BLOCK_TOKENS: Final = 512
"""Of a trace's block."""
BLOCK_UNITS: Final = 2
"""What stands for them here."""
UNIT_TOKENS: Final = BLOCK_TOKENS // BLOCK_UNITS
NODES: Final = 10
DEVICE_TOKENS: Final = 3_000_000
"""Of each node: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST'25, figure 10."""
PREFILL_TOKENS_PER_S: Final = 8_900.0
"""LLaMA3-70B (2 x 70e9 operations a token) on that paper's node, eight A800 of 312 TFLOP/s each, at half their peak."""
KV_ROOT: Final = b"replay"
SALT: Final = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """Share of prompt tokens found, FAST'25 figure 10: in the caches of single nodes, and in all of them together."""

    local: float
    everywhere: float


PAPER: Final[Mapping[str, Paper]] = {
    "conversation_trace": Paper(local=0.17, everywhere=0.375),
    "synthetic_trace": Paper(local=0.26, everywhere=0.62),
}


# Traces.


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a trace."""

    number: int
    arrival_s: float
    tokens: int
    ids: tuple[int, ...]
    """One for each block; the last one may be unfinished."""

    @cached_property
    def units(self) -> list[int]:
        """What the product is given as tokens."""
        full = self.tokens // BLOCK_TOKENS
        units = [self.ids[index // BLOCK_UNITS] for index in range(full * BLOCK_UNITS)]
        return [*units, self.ids[-1]] if len(self.ids) > full else units

    @cached_property
    def chain(self) -> list[bytes]:
        """A digest for each full block: the router's."""
        return chain_digests(root_digest(KV_ROOT, SALT), self.units, BLOCK_UNITS)

    @property
    def reusable(self) -> list[bytes]:
        """Those that need not be computed: the last token always is."""
        return self.chain[: prefix_blocks_max(len(self.units), BLOCK_UNITS)]


def read_trace(lines: Iterable[str]) -> Iterator[Prompt]:
    """In order of arrival. Raises ValueError: a line is not of a trace."""
    for number, line in enumerate(lines):
        data = json.loads(line)
        prompt = Prompt(
            number=number,
            arrival_s=data["timestamp"] / 1000,
            tokens=data["input_length"],
            ids=tuple(data["hash_ids"]),
        )
        if len(prompt.ids) != -(-prompt.tokens // BLOCK_TOKENS):
            raise ValueError(f"line {number + 1}: {prompt.tokens} tokens have {len(prompt.ids)} ids")
        yield prompt


# Mocks: time, and nodes whose engine only takes time.


class _Jump(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that never happens"
        self.now_s += timeout
        return []


class MockTimeLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything runs, and else jumps to the next timer."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt at a node."""

    prompt: Prompt
    reusable: list[bytes] = field(default_factory=list)
    computing_until_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a replay comes to."""

    requests: int = 0
    tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens that were not computed, by where they were found."""
    ttft_s: list[float] = field(default_factory=list)

    def add(self, prompt: Prompt, hits: Mapping[str, int], ttft_s: float) -> None:
        """`hits` are in blocks."""
        self.requests += 1
        self.tokens += prompt.tokens
        self.ttft_s.append(ttft_s)
        for kind, blocks in hits.items():
            self.hits[kind] = self.hits.get(kind, 0) + blocks * BLOCK_TOKENS

    def share(self, kind: str | None = None) -> float:
        """Of all prompt tokens, those that were found (there)."""
        found = sum(self.hits.values()) if kind is None else self.hits.get(kind, 0)
        return found / max(1, self.tokens)

    @property
    def ttft_mean_s(self) -> float:
        return sum(self.ttft_s) / max(1, len(self.ttft_s))

    @property
    def ttft_p99_s(self) -> float:
        return sorted(self.ttft_s)[int(0.99 * len(self.ttft_s))] if self.ttft_s else 0.0


class MockNode:
    """The books of a prefill node. Its engine computes one prompt after the other, and nothing but time passes."""

    def __init__(self, number: int, *, blocks: int, tokens_per_s: float) -> None:
        self.ledger = Ledger(blocks)
        self.blocks = BlockManager(self.ledger, BLOCK_UNITS, KV_ROOT)
        self.cache = self.blocks.prefix_cache
        self.tokens_per_s = tokens_per_s
        self._engine = asyncio.Lock()
        self._jobs: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self.record = NodeRecord(
            name=NodeName(f"prefill-{number}"),
            role=Role.PREFILL,
            incarnation=Incarnation(number + 1),
            endpoint=f"prefill-{number}:1",
            lifecycle=Lifecycle.READY,
            model=MODEL,
            load=self._load(),
            sequence=1,
        )

    async def prefill(self, prompt: Prompt) -> dict[str, int]:
        """Compute what is not found -> blocks that were, by where."""
        job = Job(prompt=prompt, reusable=prompt.reusable)
        self._jobs.append(job)
        try:
            async with self._engine:
                return await self._compute(job)
        finally:
            self._jobs.remove(job)

    async def _compute(self, job: Job) -> dict[str, int]:
        prompt = job.prompt
        found = self.blocks.match_prompt(prompt.units, SALT)
        new_blocks = self.blocks.blocks_for(len(prompt.units)) - len(found)
        table = self.blocks.admit(found, new_blocks)
        seconds = (prompt.tokens - len(found) * BLOCK_TOKENS) / self.tokens_per_s
        job.computing_until_s = self._loop.time() + seconds
        await asyncio.sleep(seconds)
        self.cache.index(prompt.units, table, len(prompt.units), SALT, IndexCursor())
        self.blocks.release(table)
        return {"device": len(found)}

    def report(self) -> NodeRecord:
        """As the directory would pass it on: a new one only where something has changed."""
        load = self._load()
        if load != self.record.load:
            record = self.record
            self.record = NodeRecord(
                name=record.name,
                role=record.role,
                incarnation=record.incarnation,
                endpoint=record.endpoint,
                lifecycle=record.lifecycle,
                model=record.model,
                load=load,
                sequence=record.sequence + 1,
            )
        return self.record

    def _load(self) -> NodeLoad:
        return NodeLoad(
            waiting_requests=len(self._jobs),
            waiting_tokens=self._units_left(),
            blocks=BlockLoad(free=self.ledger.num_blocks),
            prefill_tokens_per_s=self.tokens_per_s / UNIT_TOKENS,
        )

    def _units_left(self) -> int:
        """As PrefillNode counts them: a beginning that several prompts share counts once."""
        expected: set[bytes] = set()
        left = 0
        for job in self._jobs:
            missing = bisect_left(
                job.reusable, True, key=lambda digest: digest not in expected and not self.cache.indexed(digest)
            )
            expected.update(job.reusable[missing:])
            if job.computing_until_s is None:
                left += len(job.prompt.units) - missing * BLOCK_UNITS
            else:
                left += round((job.computing_until_s - self._loop.time()) * self.tokens_per_s / UNIT_TOKENS)
        return left


MODEL: Final = ModelInfo(
    name="replayed",
    fingerprint="replayed",
    vocab_size=1 << 30,
    context_len_max=1 << 20,
    eos_token_ids=(),
    layout_hash="replayed",
    block_size=BLOCK_UNITS,
    protocol_min=1,
    protocol_max=1,
    kv_root=KV_ROOT,
)


# Replays.


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to run the cluster."""

    name: str
    paper: Callable[[Paper], float] | None = None
    """The figure to compare with."""
    at_random: bool = False
    """Not the product's placement: any node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    nodes: int = NODES
    device_tokens: int = DEVICE_TOKENS
    tokens_per_s: float = PREFILL_TOKENS_PER_S

    @property
    def device_blocks(self) -> int:
        return self.device_tokens // BLOCK_TOKENS


POLICIES: Final = (
    Policy(name="any node, its own cache", at_random=True, paper=lambda paper: paper.local),
    Policy(name="placed, its own cache", paper=lambda paper: paper.local),
)


class Cluster:
    """Nodes, and a router that places prompts on them."""

    def __init__(self, policy: Policy, sizes: Sizes) -> None:
        self._policy = policy
        self._rng = random.Random(0)
        self._loop = asyncio.get_running_loop()
        self._placement = Placement(blocks_max=RouterConfig().prefix_blocks_max)
        self.nodes = [
            MockNode(number, blocks=sizes.device_blocks, tokens_per_s=sizes.tokens_per_s)
            for number in range(sizes.nodes)
        ]
        self._by_name = {node.record.name: node for node in self.nodes}
        self.tally = Tally()

    async def live(self, prompt: Prompt) -> None:
        """One request, from its arrival to its first token."""
        records = [node.record for node in self.nodes]
        if self._policy.at_random:
            record = self._rng.choice(records)
        else:
            record = self._placement.pick(records, prompt.chain, len(prompt.units))
        key = RequestKey(request=RequestId(f"r{prompt.number}"), attempt=Attempt(0))
        left = self._placement.sent(record, key, prompt.chain, len(prompt.units))
        hits = await self._by_name[record.name].prefill(prompt)
        left()
        self.tally.add(prompt, hits, self._loop.time() - prompt.arrival_s)

    async def report(self) -> None:
        """What nodes say of themselves comes to the router with their heartbeats. Never ends."""
        while True:
            self._placement.update([node.report() for node in self.nodes])
            await asyncio.sleep(MembershipConfig().heartbeat_ms / 1000)


async def replay(prompts: Sequence[Prompt], policy: Policy, sizes: Sizes) -> Tally:
    """The whole trace through a cluster, cold at the start."""
    cluster = Cluster(policy, sizes)
    loop = asyncio.get_running_loop()
    reports = asyncio.create_task(cluster.report())
    async with asyncio.TaskGroup() as requests:
        for prompt in prompts:
            await asyncio.sleep(max(0.0, prompt.arrival_s - loop.time()))
            requests.create_task(cluster.live(prompt))
    reports.cancel()
    return cluster.tally


def run(prompts: Sequence[Prompt], policy: Policy, sizes: Sizes) -> Tally:
    with asyncio.Runner(loop_factory=MockTimeLoop) as runner:
        return runner.run(replay(prompts, policy, sizes))


def infinite(prompts: Sequence[Prompt]) -> Tally:
    """The product's prefix cache, one for all and never full; each prompt has been computed before the next comes."""
    blocks = BlockManager(Ledger(sum(len(prompt.ids) for prompt in prompts) or 1), BLOCK_UNITS, KV_ROOT)
    tally = Tally()
    for prompt in prompts:
        found = blocks.match_prompt(prompt.units, SALT)
        table = blocks.admit(found, blocks.blocks_for(len(prompt.units)) - len(found))
        blocks.prefix_cache.index(prompt.units, table, len(prompt.units), SALT, IndexCursor())
        blocks.release(table)
        tally.add(prompt, {"device": len(found)}, 0.0)
    return tally


# Reports.

COLUMNS: Final = ("policy", "hits", "of infinite", "paper", "device", "TTFT mean s", "p99 s", "took s")


def row(name: str, tally: Tally, most: Tally, paper: float | None, took_s: float) -> list[str]:
    timed = any(tally.ttft_s)
    return [
        name,
        f"{tally.share():.3f}",
        f"{tally.share() / most.share():.2f}" if most.share() else "-",
        "-" if paper is None else f"{paper:.3f}",
        f"{tally.share('device'):.3f}",
        f"{tally.ttft_mean_s:.2f}" if timed else "-",
        f"{tally.ttft_p99_s:.2f}" if timed else "-",
        f"{took_s:.0f}",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(path: Path, *, limit: int | None, policies: Sequence[Policy], sizes: Sizes) -> str:
    with path.open() as lines:
        prompts = list(read_trace(islice(lines, limit)))
    paper = PAPER.get(path.stem)
    began_s = time.monotonic()
    most = infinite(prompts)
    everywhere = paper.everywhere if paper is not None else None
    rows = [row("infinite", most, most, everywhere, time.monotonic() - began_s)]
    for policy in policies:
        began_s = time.monotonic()
        tally = run(prompts, policy, sizes)
        figure = policy.paper(paper) if policy.paper is not None and paper is not None else None
        rows.append(row(policy.name, tally, most, figure, time.monotonic() - began_s))
        print(f"{path.stem}: {rows[-1]}", file=sys.stderr)
    return f"{path.stem}, {len(prompts)} requests\n\n{table(rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="files of Mooncake's FAST'25 release")
    parser.add_argument("--limit", type=int, help="only so many requests of each")
    parser.add_argument("--policies", nargs="+", type=int, help="by their numbers in the table")
    args = parser.parse_args()
    policies = [POLICIES[number - 1] for number in args.policies] if args.policies else POLICIES
    for path in args.trace:
        print(report(path, limit=args.limit, policies=policies, sizes=Sizes()))


if __name__ == "__main__":
    main()
