"""How much of published traces' prompts a cluster need not compute: our placement and caches, replayed in mock time.

    python -m benchmarks.kvstore replay --trace conversation_trace.jsonl synthetic_trace.jsonl

The traces are not in this repository: github.com/kvcache-ai/Mooncake, FAST25-release/traces. Each request has a time, a
length, and an id for each 512 tokens of its prompt; equal ids are equal prompts up to there.

The classes that decide are the product's: placement and the index it looks into, ledger, block manager, prefix cache,
what nodes say that they hold, the choice between sources, the store and the books of its tiers. Time is a mock, and so
are engines and what bytes pass through: a node computes prompts one after the other at `PREFILL_TOKENS_PER_S`. There is
no decoding. For speed a block has two "tokens", of the block's id, and a prompt's unfinished last block has one: so it
is computed and not cached, as in the product.
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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle
from baton.membership import MembershipConfig
from baton.wire import BlockLoad, ModelInfo, NodeLoad, NodeRecord, Owner, Role
from cachestore.block_manager import BlockManager, prefix_blocks_max
from cachestore.holder_index import HolderIndex
from cachestore.holdings import Tier
from cachestore.ledger import Ledger
from cachestore.prefix_cache import IndexCursor, chain_digests, root_digest
from cachestore.tier_books import TierBooks
from kvtransfer.receiver import PAIRS_IDLE_MAX
from node.computing_cost import ComputingCost, attended
from node.copiers import PositionCopy
from node.disk_file import BLOCKS_IN_FLIGHT_MAX, Done, Outcome
from node.fetch_costs import FetchCosts
from node.fetching import FETCHES_MAX, FETCHES_OWNED_MAX
from node.sources import Gatherer, LinearCost, Offer, Prefix, SourceKind, Wait
from node.store import DISK_BYTES_PER_S as BELIEVED_DISK_BYTES_PER_S
from node.store import DISK_FIXED_S, HOST_FIXED_S, PIECE_BLOCKS_MAX, DiskTier, HostTier, Store
from node.store import HOST_BYTES_PER_S as BELIEVED_HOST_BYTES_PER_S
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
BLOCK_BYTES: Final = BLOCK_TOKENS * 80 * 2 * 8 * 128 * 2
"""Of that model: 80 layers, K and V, 8 heads of 128, 2 bytes."""
PEER_BYTES_PER_S: Final = 87e9
"""Between two nodes: that paper's transfer engine over four links of 200 Gb/s."""
PEER_FIXED_S: Final = 0.005
"""Beside the bytes: two calls between nodes whose control threads are busy."""
PEER_CONNECT_S: Final = 0.05
"""The first fetch of a pair, and the first after it was closed as idle, has to connect: about what RDMA takes."""
HOST_BYTES_PER_S: Final = 8 * 20e9
"""Between host memory and eight devices: PCIe 4.0 x16 each, at two thirds of the line."""
DISK_READ_BYTES_PER_S: Final = 24e9
DISK_WRITE_BYTES_PER_S: Final = 12e9
"""Four NVMe drives on PCIe 4.0."""
HOST_SHARE: Final = 2
DISK_SHARE: Final = 8
"""Tiers below the device, in times of it: ten together."""
NEWS_PAUSE_S: Final = 0.05
"""From a change in a node to the router."""
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
        """Digests of those that need not be computed: the last token always is."""
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
    waits: bool = False
    """For the engine."""
    computing_until_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a replay comes to."""

    requests: int = 0
    tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens that were not computed, by where they were found."""
    ttft_s: list[float] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    """That were not computed, by the prompt's number."""
    missed: dict[str, int] = field(default_factory=dict)
    """Tokens that an infinite cache has and that were computed, by why."""

    def add(self, prompt: Prompt, hits: Mapping[str, int], ttft_s: float) -> None:
        """`hits` are in blocks."""
        self.requests += 1
        self.blocks[prompt.number] = sum(hits.values())
        self.tokens += prompt.tokens
        self.ttft_s.append(ttft_s)
        for kind, blocks in hits.items():
            self.hits[kind] = self.hits.get(kind, 0) + blocks * BLOCK_TOKENS

    def miss(self, why: str, blocks: int) -> None:
        self.missed[why] = self.missed.get(why, 0) + max(0, blocks) * BLOCK_TOKENS

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


class MockLane:
    """What bytes pass through, one transfer after the other: a link, or the way to a tier."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """From when on nothing is on it."""

    def take(self, nbytes: int, *others: MockLane) -> float:
        """When so many bytes will have passed, over all these lanes at once."""
        now_s = asyncio.get_running_loop().time()
        lanes = (self, *others)
        ends_s = max(now_s, *(lane.free_s for lane in lanes)) + nbytes / min(lane.bytes_per_s for lane in lanes)
        for lane in lanes:
            lane.free_s = ends_s
        return ends_s


class MockMemoryBelow:
    """Stands for a tier's memory and for its copier: nothing is copied."""

    def __init__(self) -> None:
        self.copier = self
        self.region = SimpleNamespace(array_U8=None)
        self._lane = MockLane(HOST_BYTES_PER_S)

    def start(self, copy: PositionCopy, done: Callable[[BaseException | None], None]) -> None:
        asyncio.get_running_loop().call_at(self._lane.take(len(copy.host) * BLOCK_BYTES), done, None)


class MockDiskFile:
    """Stands for `node.disk_file.DiskFile`: nothing is written or read."""

    writable = readable = True
    room = BLOCKS_IN_FLIGHT_MAX

    def __init__(self) -> None:
        self._reads, self._writes = MockLane(DISK_READ_BYTES_PER_S), MockLane(DISK_WRITE_BYTES_PER_S)

    def start_store(self, memory: object, slots: Sequence[int], keys: object, at: object, done: Done) -> None:
        self._start(self._writes, len(slots), done)

    def start_load(self, memory: object, slots: Sequence[int], at: object, done: Done) -> None:
        self._start(self._reads, len(slots), done)

    def erase(self, slots: Sequence[int]) -> None:
        """No later process is there to find them."""

    def _start(self, lane: MockLane, count: int, done: Done) -> None:
        asyncio.get_running_loop().call_at(lane.take(count * BLOCK_BYTES), done, [Outcome.DONE] * count)


class MockPeers:
    """A `PrefixSource`: other nodes. Decides as `node.fetching.Fetches` does; a fetch only takes time."""

    def __init__(self, node: MockNode, by_name: Mapping[str, MockNode]) -> None:
        self._node = node
        self._by_name = by_name
        self._loop = asyncio.get_running_loop()
        self.costs = FetchCosts()
        self._connected: OrderedDict[str, None] = OrderedDict()
        """By name, least recently used first."""
        self._connecting: dict[str, asyncio.Future[None]] = {}
        self._under_way = 0
        self.served = 0
        """Under way as owner."""
        self.link = MockLane(PEER_BYTES_PER_S)

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        if self._under_way >= FETCHES_MAX:
            return None
        end = min(len(prompt.chain), have_blocks + max(0, self._node.spare_blocks))
        offers = [self._offer_of(owner, prompt, have_blocks, end) for owner in prompt.owners]
        best = max(offers, key=lambda offer: (offer.blocks, -offer.expected_s), default=None)
        if best is not None and best.blocks:
            self._connect(best.origin)
        return best

    def _offer_of(self, owner: Owner, prompt: Prefix, have_blocks: int, end: int) -> Offer:
        cost = self.costs.cost(owner, self._loop.time())
        return Offer(
            source=self,
            kind=SourceKind.PEER,
            prompt=prompt,
            have_blocks=have_blocks,
            blocks=max(0, min(owner.blocks, end) - have_blocks),
            fixed_s=cost.fixed_s + (0.0 if owner.name in self._connected else self.costs.connect_s),
            block_s=cost.unit_s * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            origin=owner.name,
            detail=owner,
        )

    def _connect(self, name: str) -> asyncio.Future[None]:
        """Goes on though nobody waits for it. Pairs beyond the limit are closed, least recently used first."""
        connecting = self._connecting.get(name)
        if connecting is None:
            connecting = self._connecting[name] = self._loop.create_future()
            if name in self._connected:
                self._over(name)
            else:
                self._loop.call_later(PEER_CONNECT_S, self._over, name)
        return connecting

    def _over(self, name: str) -> None:
        if name not in self._connected:
            self.costs.connected(PEER_CONNECT_S)
        self._connected[name] = None
        self._connected.move_to_end(name)
        if len(self._connected) > PAIRS_IDLE_MAX:
            self._connected.popitem(last=False)
        self._connecting.pop(name).set_result(None)

    async def bring(self, offer: Offer, wait: Wait) -> int:
        await asyncio.shield(self._connect(offer.origin))
        owner, began_s = self._by_name[offer.origin], self._loop.time()
        prompt, end = offer.prompt, offer.have_blocks + offer.blocks
        if owner.peers.served >= FETCHES_OWNED_MAX:
            return 0
        if owner.store is not None:
            await owner.store.bring_all(prompt.tokens[: end * BLOCK_UNITS], prompt.salt)
        source = owner.cache.match(prompt.tokens, prompt.salt, end)
        owner.ledger.hold(source)
        before = self._node.cache.match(prompt.tokens, prompt.salt, len(source))
        self._node.ledger.hold(before)
        count = min(len(source) - len(before), max(0, self._node.spare_blocks))
        table = [*before, *self._node.blocks.allocate(count)]
        self._under_way += 1
        owner.peers.served += 1
        assert isinstance(offer.detail, Owner), offer
        try:
            ends_s = self.link.take(count * BLOCK_BYTES, owner.peers.link) + PEER_FIXED_S
            await asyncio.sleep(ends_s - self._loop.time())
            units = len(table) * BLOCK_UNITS
            self._node.cache.index(prompt.tokens, table, units, prompt.salt, IndexCursor())
        except asyncio.CancelledError:  # as `Fetches` learns from what comes late
            waited_s, now_s = self._loop.time() - began_s, self._loop.time()
            if wait.timer.expired() and waited_s > self.costs.cost(offer.detail, now_s).of(offer.nbytes):
                self.costs.measured(offer.detail, offer.nbytes, waited_s, now_s)
            raise
        finally:
            self._under_way -= 1
            owner.peers.served -= 1
            self._node.blocks.release(table, used=False)
            owner.blocks.release(source)
        if count:
            self.costs.measured(offer.detail, count * BLOCK_BYTES, self._loop.time() - began_s, self._loop.time())
        return max(0, len(table) - offer.have_blocks)


class MockNode:
    """The books of a prefill node. Its engine computes one prompt after the other, and nothing but time passes."""

    def __init__(self, number: int, *, sizes: Sizes, policy: Policy, by_name: Mapping[str, MockNode]) -> None:
        self.ledger = Ledger(sizes.device_blocks)
        self.blocks = BlockManager(self.ledger, BLOCK_UNITS, KV_ROOT)
        self.cache = self.blocks.prefix_cache
        self.tokens_per_s = sizes.tokens_per_s
        self._engine = asyncio.Lock()
        self._jobs: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._computing = ComputingCost(fixed_s=0.0, token_s=UNIT_TOKENS / self.tokens_per_s)
        self.gatherer = Gatherer(
            block_size=BLOCK_UNITS, have=self._have, computing=self._computing, clock=self._loop.time
        )
        self.peers = MockPeers(self, by_name)
        if policy.fetches:
            self.gatherer.add(self.peers)
        self.store: Store | None = None
        if policy.tiers:
            self.store = self._open_store(sizes)
            self.gatherer.add(self.store)
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

    def _open_store(self, sizes: Sizes) -> Store:
        memory: Any = MockMemoryBelow()
        file: Any = MockDiskFile()
        store = Store(
            blocks=self.blocks,
            groups=1,
            host=HostTier(
                memory=memory,
                books=self._books(Tier.HOST, sizes.host_blocks),
                cost=LinearCost(
                    fixed_s=HOST_FIXED_S, unit_s=BLOCK_BYTES / BELIEVED_HOST_BYTES_PER_S, units=PIECE_BLOCKS_MAX
                ),
            ),
            disk=DiskTier(
                file=file,
                books=self._books(Tier.DISK, sizes.disk_blocks),
                cost=LinearCost(
                    fixed_s=DISK_FIXED_S, unit_s=BLOCK_BYTES / BELIEVED_DISK_BYTES_PER_S, units=PIECE_BLOCKS_MAX
                ),
            ),
        )
        store.spare = lambda: self.spare_blocks
        store.start()
        return store

    def _books(self, tier: Tier, slots: int) -> TierBooks:
        holdings = self.cache.holdings
        return TierBooks(
            slots,
            BLOCK_BYTES,
            on_added=lambda digest: holdings.added(digest, tier),
            on_removed=lambda digest: holdings.removed(digest, tier),
        )

    def holds(self, digest: bytes) -> bool:
        """In any tier."""
        tiers = () if self.store is None else self.store.tiers
        return self.cache.indexed(digest) or any(tier.books.known(digest) for tier in tiers)

    @property
    def spare_blocks(self) -> int:
        """As PrefillNode counts them."""
        waiting = (job for job in self._jobs if job.waits)
        return self.ledger.available - sum(self.blocks.blocks_for(len(job.prompt.units)) for job in waiting)

    def _have(self, prompt: Prefix) -> int:
        return bisect_left(prompt.chain, True, key=lambda digest: not self.cache.indexed(digest))

    async def prefill(self, prompt: Prompt, owners: Sequence[Owner]) -> dict[str, int]:
        """Gather, wait for the engine, compute what is not found -> blocks that were, by where."""
        job = Job(prompt=prompt, reusable=prompt.reusable)
        self._jobs.append(job)
        try:
            units = prompt.units[: len(job.reusable) * BLOCK_UNITS]
            gathered = await self.gatherer.gather(Prefix(tokens=units, salt=SALT, chain=job.reusable, owners=owners))
            job.waits = True
            async with self._engine:
                job.waits = False
                left = await self._compute(job)
        finally:
            self._jobs.remove(job)
        hits = {}
        for kind in (SourceKind.PEER, SourceKind.DISK, SourceKind.HOST):  # as prefill_node.job.prompt_sources
            hits[kind.value] = min(left, gathered.blocks.get(kind, 0))
            left -= hits[kind.value]
        return {"device": left, **hits}

    async def _compute(self, job: Job) -> int:
        """-> blocks that were not computed."""
        prompt = job.prompt
        found = self.blocks.match_prompt(prompt.units, SALT)
        new_blocks = self.blocks.blocks_for(len(prompt.units)) - len(found)
        table = self.blocks.admit(found, new_blocks)
        seconds = (prompt.tokens - len(found) * BLOCK_TOKENS) / self.tokens_per_s
        job.computing_until_s = self._loop.time() + seconds
        await asyncio.sleep(seconds)
        self.cache.index(prompt.units, table, len(prompt.units), SALT, IndexCursor())
        self.blocks.release(table)
        first, end = len(found) * BLOCK_UNITS, len(prompt.units)
        self._computing.measured(end - first, attended(first, end), seconds)
        return len(found)

    def report(self) -> NodeRecord:
        """As the directory would pass it on: a new one only where something has changed."""
        load = self._load()
        if load != self.record.load:
            self.record = replace(self.record, load=load, sequence=self.record.sequence + 1)
        return self.record

    def _load(self) -> NodeLoad:
        return NodeLoad(
            waiting_requests=len(self._jobs),
            waiting_tokens=self._units_left(),
            blocks=BlockLoad(free=self.ledger.num_blocks),
            prefill_tokens_per_s=self.tokens_per_s / UNIT_TOKENS,
            fetch=self.peers.costs.load(self._loop.time(), BLOCK_BYTES / BLOCK_UNITS),
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
    fetches: bool = False
    """From other nodes."""
    tiers: bool = False
    """Host memory and disk below the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    nodes: int = NODES
    device_tokens: int = DEVICE_TOKENS
    tokens_per_s: float = PREFILL_TOKENS_PER_S
    host_share: float = HOST_SHARE
    disk_share: float = DISK_SHARE

    @property
    def device_blocks(self) -> int:
        return self.device_tokens // BLOCK_TOKENS

    @property
    def host_blocks(self) -> int:
        return int(self.host_share * self.device_blocks)

    @property
    def disk_blocks(self) -> int:
        return int(self.disk_share * self.device_blocks)


POLICIES: Final = (
    Policy(name="any node, its own cache", at_random=True, paper=lambda paper: paper.local),
    Policy(name="placed, its own cache", paper=lambda paper: paper.local),
    Policy(name="any node, fetches", at_random=True, fetches=True, paper=lambda paper: paper.everywhere),
    Policy(name="placed, fetches", fetches=True, paper=lambda paper: paper.everywhere),
    Policy(name="placed, tiers", tiers=True),
    Policy(name="placed, fetches, tiers", fetches=True, tiers=True),
)


def _leading(prompt: Prompt, has: Callable[[bytes], bool]) -> int:
    """Blocks of its beginning that are there; what is there is always the beginning of a chain, or nearly."""
    return bisect_left(prompt.reusable, True, key=lambda digest: not has(digest))


class Cluster:
    """Nodes, and a router that places prompts on them."""

    def __init__(self, policy: Policy, sizes: Sizes, most: Tally) -> None:
        """`most` is what an infinite cache has of each prompt."""
        self._policy = policy
        self._most = most
        self._computed: set[bytes] = set()
        """Blocks of prompts that have ended."""
        self._rng = random.Random(0)
        self._loop = asyncio.get_running_loop()
        self._index = HolderIndex()
        self._placement = Placement(self._index, self._loop.time)
        self._by_name: dict[str, MockNode] = {}
        self.nodes = [
            MockNode(number, sizes=sizes, policy=policy, by_name=self._by_name) for number in range(sizes.nodes)
        ]
        for node in self.nodes:
            self._by_name[node.record.name] = node
            self._follow(node)
        self.tally = Tally()

    def _follow(self, node: MockNode) -> None:
        """What the node holds comes into the index: at most `NEWS_PAUSE_S` late, as the router's stream would be."""
        number = self._index.begin()
        assert number is not None
        self._index.publish(node.record.incarnation, number)
        holdings, known = node.cache.holdings, 0

        def changed() -> None:
            holdings.on_change = None
            self._loop.call_later(NEWS_PAUSE_S, take)

        def take() -> None:
            nonlocal known
            part = holdings.since(known)
            assert part is not None, "too far behind"
            self._index.put(number, part.digests, part.tiers)
            known = part.number
            holdings.on_change = changed

        holdings.on_change = changed

    async def live(self, prompt: Prompt) -> None:
        """One request, from its arrival to its first token."""
        among = None
        if self._policy.at_random:
            among = np.zeros(len(self.nodes), dtype=np.bool_)
            among[self._rng.randrange(len(self.nodes))] = True
        choice = self._placement.pick(prompt.units, SALT, among=among)
        key = RequestKey(request=RequestId(f"r{prompt.number}"), attempt=Attempt(0))
        left = self._placement.sent(choice, key)
        computed = _leading(prompt, self._computed.__contains__)
        held = max(_leading(prompt, node.holds) for node in self.nodes)
        hits = await self._by_name[choice.record.name].prefill(prompt, choice.owners)
        left()
        self._computed.update(prompt.chain)
        self.tally.add(prompt, hits, self._loop.time() - prompt.arrival_s)
        found = sum(hits.values())
        self.tally.miss("too early", self._most.blocks[prompt.number] - max(computed, found))
        self.tally.miss("evicted", computed - max(held, found))
        self.tally.miss("not brought", held - found)

    async def report(self) -> None:
        """What nodes say of themselves comes to the router with their heartbeats. Never ends."""
        while True:
            self._placement.update([node.report() for node in self.nodes])
            await asyncio.sleep(MembershipConfig().heartbeat_ms / 1000)

    def tiers(self) -> str:
        """What became of blocks in the tiers of all nodes."""
        text = ""
        for kind in (SourceKind.HOST, SourceKind.DISK):
            of_kind = [t for node in self.nodes if node.store for t in node.store.tiers if t.kind is kind]
            counts = {
                "stored": sum(tier.counters.stored_blocks for tier in of_kind),
                "lost": sum(tier.counters.lost_blocks for tier in of_kind),
                "refused": sum(tier.counters.refused_blocks for tier in of_kind),
                "evicted": sum(tier.books.evicted for tier in of_kind),
                "evicted unused": sum(tier.books.evicted_unused for tier in of_kind),
                "there": sum(tier.books.blocks for tier in of_kind),
            }
            if of_kind:
                text += f"\n  {kind.value}, blocks: {', '.join(f'{count} {what}' for what, count in counts.items())}"
        return text

    async def stop(self) -> None:
        for node in self.nodes:
            if node.store is not None:
                await node.store.stop()


async def replay(prompts: Sequence[Prompt], policy: Policy, sizes: Sizes, most: Tally) -> Cluster:
    """The whole trace through a cluster, cold at the start."""
    cluster = Cluster(policy, sizes, most)
    loop = asyncio.get_running_loop()
    reports = asyncio.create_task(cluster.report())
    async with asyncio.TaskGroup() as requests:
        for prompt in prompts:
            await asyncio.sleep(max(0.0, prompt.arrival_s - loop.time()))
            requests.create_task(cluster.live(prompt))
    reports.cancel()
    await cluster.stop()
    return cluster


def run_cluster(prompts: Sequence[Prompt], policy: Policy, sizes: Sizes, most: Tally | None = None) -> Cluster:
    """The cluster as it is at the end. `most` is `infinite(prompts)`."""
    most = infinite(prompts) if most is None else most
    with asyncio.Runner(loop_factory=MockTimeLoop) as runner:
        return runner.run(replay(prompts, policy, sizes, most))


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

KINDS: Final = ("device", "peer", "host", "disk")
MISSES: Final = ("too early", "evicted", "not brought")
COLUMNS: Final = ("policy", "hits", "of infinite", "paper", *KINDS, *MISSES, "TTFT mean s", "p99 s", "took s")


def row(name: str, tally: Tally, most: Tally, paper: float | None, took_s: float) -> list[str]:
    timed = any(tally.ttft_s)
    return [
        name,
        f"{tally.share():.3f}",
        f"{tally.share() / most.share():.2f}" if most.share() else "-",
        "-" if paper is None else f"{paper:.3f}",
        *(f"{tally.share(kind):.3f}" if kind in tally.hits else "-" for kind in KINDS),
        *(f"{tally.missed[why] / tally.tokens:.3f}" if why in tally.missed else "-" for why in MISSES),
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
        cluster = run_cluster(prompts, policy, sizes, most)
        figure = policy.paper(paper) if policy.paper is not None and paper is not None else None
        rows.append(row(policy.name, cluster.tally, most, figure, time.monotonic() - began_s))
        print(f"{path.stem}: {' '.join(rows[-1])}{cluster.tiers()}", file=sys.stderr, flush=True)
    return f"{path.stem}, {len(prompts)} requests\n\n{table(rows)}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="files of Mooncake's FAST'25 release")
    parser.add_argument("--limit", type=int, help="only so many requests of each")
    parser.add_argument("--device-tokens", type=int, default=DEVICE_TOKENS, help="of each node")
    parser.add_argument("--host", type=float, default=HOST_SHARE, help="host memory of a node, in times of its device")
    parser.add_argument("--disk", type=float, default=DISK_SHARE, help="the same of its disk")
    parser.add_argument("--policies", nargs="+", type=int, help="by their numbers in the table")


def run(options: argparse.Namespace) -> None:
    policies = [POLICIES[number - 1] for number in options.policies] if options.policies else POLICIES
    sizes = Sizes(device_tokens=options.device_tokens, host_share=options.host, disk_share=options.disk)
    for path in options.trace:
        print(report(path, limit=options.limit, policies=policies, sizes=sizes))
