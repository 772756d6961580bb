"""Which prefill node gets a request: the one with the smallest expected time to its first token. Pure, but for one log.

Expected TTFT = (tokens left to compute there + tokens of this prompt that it has not cached) / its rate; or, where it
fetches what others have of the prompt, the longer of queue and fetch, and then the rest of the prompt. A fetch costs
what the node has measured lately, with these owners if it says so. Who has what is
in the index, which the nodes keep true. What this router has sent since the last report counts at once, or a burst
would all go to the node that was idle then, and what such a prompt will leave there counts as cached. What its sibling
workers have sent counts 200 ms later at most.

A resumption computes prompt and answer so far again on one prefill node, whose region must hold both. So an answer may
grow on a decode node until it cannot be resumed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.ids import Incarnation, RequestKey
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.wire import FetchLoad, ModelInfo, NodeRecord, Owner, PairLoad, Role, kernel_sets
from cachestore.holder_index import SAVED_WHOLE, Found, HolderIndex
from cachestore.prefix_cache import chain_digests, root_digest

log = get_log("router")


def region_tokens(record: NodeRecord) -> int:
    """Tokens that the node's region holds when nothing else is in it; 0 while its record does not say."""
    return record.model.tokens_in(record.load.blocks.total) if record.model is not None else 0


def may_hold(record: NodeRecord, tokens: int) -> bool:
    """Whether the node may be able to compute so many tokens at some time. One whose region is not known may."""
    return not 0 < region_tokens(record) < tokens


ANSWERS_PER_REGION = 32
"""Requests that name no limit and have room on a decode node at a time, however long their answers become."""
ANSWER_TOKENS_MIN = 256
"""What a request that names no limit may always have, though fewer than `ANSWERS_PER_REGION` then have room."""


def answer_tokens(prompt_tokens: int, records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """Output tokens of a request that names no limit: what the model's context leaves, within a share of the region.

    A decode node promises an answer all the blocks that it may need (I5), so a few chats could fill it. Therefore
    prompt and answer together get 1 / ANSWERS_PER_REGION of the smallest region of a ready decode node, without its
    pinned blocks and the engine's own one; but the answer gets at least ANSWER_TOKENS_MIN.
    """
    usable = [
        record.load.blocks.total - record.load.blocks.pinned - 1
        for record in records
        if record.role.serves(Role.DECODE) and record.lifecycle is Lifecycle.READY and region_tokens(record)
    ]
    share = model.tokens_in(min(usable, default=0) // ANSWERS_PER_REGION)
    return min(max(share - prompt_tokens, ANSWER_TOKENS_MIN), model.context_len_max - prompt_tokens)


def tokens_max(records: Sequence[NodeRecord], model: ModelInfo) -> int:
    """What prompt and answer may have together: the model's context, or what both a prefill node and a decode node hold
    beside idle pins. Answers may grow beyond that where decode nodes have more."""
    return min(_most(records, model, role, beside_pins=True) for role in (Role.PREFILL, Role.DECODE))


def _most(records: Sequence[NodeRecord], model: ModelInfo, role: Role, *, beside_pins: bool = False) -> int:
    """What one node of the role holds at most, within the model's context; that where none is there, or not known."""

    def holds(record: NodeRecord) -> int:
        if not region_tokens(record):
            return model.context_len_max
        pinned = record.load.blocks.pinned if beside_pins else 0
        return region_tokens(record) - model.tokens_in(pinned)

    sizes = [
        holds(record)
        for record in records
        if record.role.serves(role) and record.model is not None and record.model.fingerprint == model.fingerprint
    ]
    return min(max(sizes, default=model.context_len_max), model.context_len_max)


def outgrown(records: Sequence[NodeRecord]) -> tuple[int, int] | None:
    """Tokens of the longest request that could be resumed, and of the longest that decode nodes let grow, where that is
    more than any prefill node could take up. Else None, as where one kind of node is not there."""

    def most(role: Role) -> int:
        reach = [
            min(region_tokens(record), record.model.context_len_max)
            for record in records
            if record.model is not None and record.role.serves(role)
        ]
        return max(reach, default=0)

    prefill_tokens, decode_tokens = most(Role.PREFILL), most(Role.DECODE)
    return (prefill_tokens, decode_tokens) if 0 < prefill_tokens < decode_tokens else None


class KernelWatch:
    """Logs when nodes compute with different kernels: each state of it once."""

    def __init__(self) -> None:
        self._found: frozenset[str] = frozenset()

    def look(self, records: Sequence[NodeRecord]) -> None:
        found = frozenset(kernel_sets(records))
        if len(found) > 1 and found != self._found:
            log.warning(
                "nodes compute with different kernels: an answer that is resumed on another node may go on with other "
                "tokens where scores tie. Where that matters, set engine.kernels to the best set that all of them have",
                kernels=", ".join(sorted(found)),
            )
        self._found = found


class RegionWatch:
    """Logs when regions are smaller than the model's context, and when answers may outgrow the prefill nodes: each
    state of it once."""

    def __init__(self) -> None:
        self._outgrown: tuple[int, int] | None = None
        self._limits = (0, 0)

    def look(self, records: Sequence[NodeRecord]) -> None:
        self._look_at_context(records)
        found = outgrown(records)
        if found is not None and found != self._outgrown:
            log.warning(
                "an answer may become too long to be resumed: longer than tokens_to_be_resumed_max it is lost with its "
                "decode node. Give prefill nodes as large a region as decode nodes (engine.num_blocks)",
                tokens_to_be_resumed_max=found[0],
                tokens_max=found[1],
            )
        self._outgrown = found

    def _look_at_context(self, records: Sequence[NodeRecord]) -> None:
        model = next((record.model for record in records if record.model is not None), None)
        if model is None:
            return
        # Not what is left beside pins: that changes with each request that reads one.
        decode_tokens = _most(records, model, Role.DECODE)
        found = (min(decode_tokens, _most(records, model, Role.PREFILL)), decode_tokens)
        if found != self._limits and found[0] < model.context_len_max:
            log.info(
                "requests that no region holds are refused, though the model's context is longer. Give nodes of both "
                "kinds more blocks (engine.num_blocks) for prompts of more than prompt_tokens_max, or prompts with "
                "answers of more than tokens_max",
                prompt_tokens_max=found[0],
                tokens_max=found[1],
                context=model.context_len_max,
            )
        self._limits = found


RATE_UNKNOWN_TOKENS_PER_S = 1_000.0
"""Assumed while no node has measured itself; only ratios between nodes matter."""
RATE_MAX_PER_S: Final = 1e9
"""Tokens a second. A node that says more is not believed."""
NO_FETCH_S_PER_TOKEN: Final = 1e6
"""Stands for a node that was refused all fetches so far, or to which they failed: placement does not count on them. The
node itself may fetch."""
FETCHES_IN_VAIN_MIN: Final = 4
"""So many are all: one refusal says that a block was evicted, or that an owner was busy."""
FETCH_FIXED_S: Final = 0.01
FETCH_SHARE: Final = 0.25
"""What a fetch is believed to take while no node has measured one: a fixed time, and a share of the time of computing.
What it has lost by one that does not come is bounded (`node.sources.LOST_SHARE_MAX`)."""
PAIRS_LOOKED_AT_MAX: Final = 4
"""Nodes for one prompt of which it is looked at what they say of single owners."""
OWNERS_MAX: Final = 3
"""Nodes with a part of the prompt that a prefill node is told of."""
EXPECTED_S: Final = 5.0
"""How long what a call has left in a node's cache counts without the node's own word: longer than that takes."""
EXPECTED_BLOCKS_MAX: Final = 262_144
"""Blocks that are expected at nodes; of prompts beyond that none are."""

Mask = npt.NDArray[np.bool_]
_Floats = npt.NDArray[np.float64]


class Expected:
    """Blocks that nodes are about to have: those of prompts on their way there, and for a while after."""

    def __init__(self) -> None:
        self._counts: dict[bytes, dict[Incarnation, int]] = {}
        """Who has a block is about to have all before it, too: chains come and go as a whole."""
        self._leaving: deque[tuple[float, Incarnation, Sequence[bytes]]] = deque()
        self._total = 0

    def add(self, incarnation: Incarnation, hashes: Sequence[bytes]) -> bool:
        """Whether there is room. If so, call `leave` later."""
        if self._total + len(hashes) > EXPECTED_BLOCKS_MAX:
            return False
        self._total += len(hashes)
        for digest in hashes:
            counts = self._counts.get(digest)
            if counts is None:
                self._counts[digest] = {incarnation: 1}
            else:
                counts[incarnation] = counts.get(incarnation, 0) + 1
        return True

    def leave(self, incarnation: Incarnation, hashes: Sequence[bytes], now_s: float) -> None:
        """The call has ended: the node's own word follows."""
        self._leaving.append((now_s + EXPECTED_S, incarnation, hashes))

    def expire(self, now_s: float) -> None:
        while self._leaving and self._leaving[0][0] <= now_s:
            _, incarnation, hashes = self._leaving.popleft()
            self._total -= len(hashes)
            for digest in hashes:
                counts = self._counts[digest]
                if counts[incarnation] > 1:
                    counts[incarnation] -= 1
                elif len(counts) > 1:
                    del counts[incarnation]
                else:
                    del self._counts[digest]

    def blocks(self, hashes: Sequence[bytes]) -> Iterator[tuple[Collection[Incarnation], int]]:
        """Who is about to have how many leading blocks of a chain, at least: the fewest first, then ever fewer nodes.
        It takes no step for each block of each node: a thousand nodes may be about to have one long beginning."""
        having: Collection[Incarnation] = ()
        for depth, digest in enumerate(hashes):
            more: Collection[Incarnation] = self._counts.get(digest, ())
            if len(more) < len(having):
                yield having, depth
            if not more:
                return
            having = more
        if having:
            yield having, len(hashes)


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """What this router believes of one prefill process."""

    slot: int = -1
    """Its place in the arrays; -1 once it is gone."""
    sequence: int = -1
    waiting_tokens: int = 0
    """To compute there: as last reported, and of what was sent since then."""
    sent: dict[RequestKey, int] = field(default_factory=dict)
    """Tokens to compute of requests sent since the last report, less what the node probably has cached."""
    pairs: Mapping[int, PairLoad] = field(default_factory=dict)
    """What it says of owners."""
    sent_by_siblings: int = 0
    """Tokens that other workers of this router have sent since the last report, as they last said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a prompt goes."""

    record: NodeRecord
    ttft_s: float
    """Expected."""
    compute_tokens: int
    """Expected to be computed there: neither cached nor fetched."""
    hashes: Sequence[bytes]
    """The digests of its full blocks, as the node makes them."""
    owners: tuple[Owner, ...]
    """Others that have more of it than the node, those with the most first."""


class Placement:
    """Mutable, owned by the router's loop. The nodes are rows of arrays, ordered by name."""

    def __init__(self, index: HolderIndex, now_s: Callable[[], float]) -> None:
        self._index = index
        self._now_s = now_s
        self._expected = Expected()
        self._nodes: dict[Incarnation, _Node] = {}
        self._serving: dict[Incarnation, NodeRecord] = {}
        """Whoever may have KV."""
        self.records: list[NodeRecord] = []
        self._roots: list[tuple[bytes, int]] = []
        """Kinds of KV, each with its block size; mostly one."""
        self._fingerprints: set[str] = set()
        """Of the ready ones, or of those that were since the last change of processes."""
        self._index_version = -1
        self._make_arrays(0)

    def _make_arrays(self, count: int) -> None:
        self._region_tokens = np.zeros(count, dtype=np.int64)
        """0: not known."""
        self._region_least = 0
        """The smallest of these, where none is smaller."""
        self.ready: Mask = np.zeros(count, dtype=np.bool_)
        self._waiting = np.zeros(count, dtype=np.float64)
        self._rate = np.zeros(count, dtype=np.float64)
        """Tokens a second; 0 while the node has not measured itself."""
        self._measured_fetch_s = np.zeros(count, dtype=np.float64)
        """As the node says; 0 while it has fetched nothing."""
        self._measured_fixed_s = np.zeros(count, dtype=np.float64)
        self._fetch_s = np.zeros(count, dtype=np.float64)
        """Seconds to fetch a token's KV."""
        self._fixed_s = np.zeros(count, dtype=np.float64)
        """Seconds that a fetch takes beside that."""
        self._token_s = np.zeros(count, dtype=np.float64)
        """Seconds to compute a token."""
        self._queue_s = np.zeros(count, dtype=np.float64)
        """Seconds until a prompt that comes now is begun."""
        self._not_ready_s = np.zeros(count, dtype=np.float64)
        """Without end for one that is not ready, else none."""
        self._changed = True
        """Rates, or who is ready: `_token_s` and what follows from it are out of date."""
        self._root = np.zeros(count, dtype=np.int64)
        """Its place in `_roots`."""
        self._holder = np.full(count, -1, dtype=np.int64)
        """Its number in the index; -1: not there."""

    def update(self, records: Iterable[NodeRecord], serving: Iterable[NodeRecord] = ()) -> None:
        """Take the latest reports of prefill nodes in; forget processes that are gone. `serving`: others that may have
        KV, too."""
        records = sorted(records, key=lambda record: record.name)
        self._serving = {record.incarnation: record for record in (*serving, *records)}
        old = self.records
        self.records = records
        if [record.incarnation for record in records] != [record.incarnation for record in old]:
            old = []
            self._make_arrays(len(records))
            self._roots, self._fingerprints = [], set()
            self._index_version = -1
            for node in self._nodes.values():
                node.slot = -1
            present = {record.incarnation for record in records}
            self._nodes = {i: node for i, node in self._nodes.items() if i in present}
        for slot, record in enumerate(records):
            if not old or old[slot] is not record:
                self._set(slot, record)

    def _set(self, slot: int, record: NodeRecord) -> None:
        node, load, model = self._nodes.setdefault(record.incarnation, _Node()), record.load, record.model
        node.slot = slot
        self._changed = True
        if record.sequence != node.sequence:
            node.sequence, node.waiting_tokens = record.sequence, load.waiting_tokens
            node.sent.clear()
            node.sent_by_siblings = 0
        self._count(node)
        self.ready[slot] = record.lifecycle is Lifecycle.READY and model is not None
        if self._region_tokens[slot] != region_tokens(record):
            self._region_tokens[slot], self._region_least = region_tokens(record), 0
        self._rate[slot] = _rate(load.prefill_tokens_per_s)
        moved, fetch = load.moved, load.fetch
        in_vain = moved.fetches_refused + moved.fetches_failed >= FETCHES_IN_VAIN_MIN
        known = _is_cost(fetch)
        self._measured_fetch_s[slot] = fetch.token_s if known else NO_FETCH_S_PER_TOKEN if in_vain else 0.0
        self._measured_fixed_s[slot] = fetch.fixed_s if known else 0.0
        node.pairs = {pair.owner: pair for pair in fetch.pairs if _is_cost(pair)}
        if model is not None:
            root = (model.kv_root, model.block_size)
            if root not in self._roots:
                self._roots.append(root)
            self._root[slot] = self._roots.index(root)
            self._fingerprints.add(model.fingerprint)

    def _count(self, node: _Node) -> None:
        if node.slot >= 0:
            self._waiting[node.slot] = node.waiting_tokens + node.sent_by_siblings
            self._queue_s[node.slot] = self._waiting[node.slot] * self._token_s[node.slot]

    def serving(self, fingerprint: str) -> Mask:
        """Those that are ready and have this model."""
        if self._fingerprints == {fingerprint}:
            return self.ready
        models = [record.model for record in self.records]
        alike: Mask = np.array([model is not None and model.fingerprint == fingerprint for model in models])
        return self.ready & alike

    def may_hold(self, tokens: int) -> Mask:
        """As `may_hold` of each record."""
        if tokens <= self._region_least:
            return self.ready
        found: Mask = (self._region_tokens == 0) | (self._region_tokens >= tokens)
        return found

    def sequence(self, incarnation: Incarnation) -> int:
        """Of its last report; -1: it is not known."""
        node = self._nodes.get(incarnation)
        return -1 if node is None else node.sequence

    def slots(self, incarnations: Iterable[Incarnation]) -> list[int]:
        """Of those that are known."""
        return [self._nodes[i].slot for i in incarnations if i in self._nodes]

    def on_their_way(self) -> dict[Incarnation, int]:
        """Tokens sent to each process since its last report."""
        return {incarnation: sum(node.sent.values()) for incarnation, node in self._nodes.items() if node.sent}

    def follow_siblings(self, tokens: Mapping[Incarnation, int]) -> None:
        """What the other workers of this router have on their way to each process."""
        for incarnation, node in self._nodes.items():
            node.sent_by_siblings = tokens.get(incarnation, 0)
            self._count(node)

    def pick(
        self,
        tokens: Sequence[int],
        salt: bytes,
        *,
        among: Mask | None = None,
        no_owners: Collection[Incarnation] = (),
    ) -> Choice:
        """The node with the smallest expected TTFT; ties go to the emptiest, then by name. `among` (None: those that
        are ready) is not empty. `no_owners` are not asked for KV.

        One that has not measured itself yet is taken to be as fast as the fastest, or it would never get to measure.
        """
        among = self.ready if among is None else among
        self._expected.expire(self._now_s())
        self._refresh()
        count = len(tokens)
        kinds = [self._kind(root, size, tokens, salt) for root, size in self._roots]
        kind = kinds[0] if len(kinds) == 1 else _by_slot(kinds, self._root)
        ttft_s, rest, fetches = self._expect(kind, count)
        if among is self.ready:
            ttft_s += self._not_ready_s
        else:
            ttft_s[~among] = np.inf
        slot = self._least(ttft_s)
        own = kinds[int(self._root[slot])]
        owners = self._owners(own, slot, no_owners) if own.some else ()
        for _ in range(PAIRS_LOOKED_AT_MAX):
            if fetches is None or not fetches[slot]:
                break
            seconds = self._fetching_s(slot, owners, own, float(rest[slot]))
            if seconds <= ttft_s[slot]:
                break
            computing_s = self._queue_s[slot] + self._token_s[slot] * max(1.0, count - own.saved_tokens[slot])
            fetches[slot] = seconds < computing_s
            ttft_s[slot] = min(seconds, computing_s)
            slot = self._least(ttft_s)
            own = kinds[int(self._root[slot])]
            owners = self._owners(own, slot, no_owners) if own.some else ()
        to_compute = max(1.0, count - float(own.saved_tokens[slot])) if own.some else count
        if fetches is not None and fetches[slot]:
            to_compute = float(rest[slot])
        return Choice(
            record=self.records[slot],
            ttft_s=float(ttft_s[slot]),
            compute_tokens=int(to_compute),
            hashes=own.hashes,
            owners=owners,
        )

    def _least(self, ttft_s: _Floats) -> int:
        slot = int(ttft_s.argmin())
        same = ttft_s == ttft_s[slot]
        if np.count_nonzero(same) > 1:
            equals = np.flatnonzero(same)
            slot = int(equals[self._waiting[equals].argmin()])
        return slot

    def _fetching_s(self, slot: int, owners: Sequence[Owner], kind: _Kind, rest: float) -> float:
        """The TTFT of a node that fetches, by what it says of these owners. It takes the fastest."""
        pairs, tokens = self._nodes[self.records[slot].incarnation].pairs, float(kind.fetched_tokens[slot])
        costs = [
            pair.fixed_s + pair.token_s * tokens
            if (pair := pairs.get(owner.incarnation)) is not None
            else float(self._fixed_s[slot] + self._fetch_s[slot] * tokens)
            for owner in owners
            if owner.blocks == owners[0].blocks
        ]
        if not costs:
            return math.inf
        return max(min(costs), float(self._queue_s[slot])) + rest * float(self._token_s[slot])

    def _expect(self, kind: _Kind, count: int) -> tuple[_Floats, _Floats, Mask | None]:
        """By place: the TTFT of so many tokens; those of them left to compute, where they count; where something is
        fetched. In place: each pass over a thousand nodes costs a microsecond or two."""
        queue_s, token_s = self._queue_s, self._token_s
        if not kind.some:
            return queue_s + token_s * count, _NONE, None
        rest = count - kind.saved_tokens
        ttft_s = np.maximum(rest, 1.0)
        ttft_s *= token_s
        ttft_s += queue_s
        fetch_s = self._fetch_s * kind.fetched_tokens
        fetch_s += self._fixed_s
        np.maximum(fetch_s, queue_s, out=fetch_s)
        rest -= kind.fetched_tokens
        np.maximum(rest, 1.0, out=rest)
        fetch_s += rest * token_s
        fetches = fetch_s < ttft_s
        np.minimum(fetch_s, ttft_s, out=ttft_s)
        return ttft_s, rest, fetches

    def _refresh(self) -> None:
        """What the next choice starts from, where records or the index have changed."""
        if self._index_version != self._index.version:
            self._index_version = self._index.version
            self._holder[:] = [self._index.holders.get(record.incarnation, -1) for record in self.records]
        if self._changed:
            self._changed = False
            fastest = (self._rate * self.ready).max(initial=0.0) or RATE_UNKNOWN_TOKENS_PER_S
            self._not_ready_s = np.where(self.ready, 0.0, np.inf)
            self._token_s = 1 / np.where(self._rate > 0, self._rate, fastest)
            self._queue_s = self._waiting * self._token_s
            self._region_least = int(self._region_tokens.min(initial=1 << 62, where=self._region_tokens > 0))
            self._believe_fetches()

    def _believe_fetches(self) -> None:
        """A node that has not fetched is taken to be as the others are, or it would get no prompts to measure it by."""
        measured = self._measured_fetch_s
        known = (measured > 0) & (measured < NO_FETCH_S_PER_TOKEN)
        if known.any():
            fetch_s, fixed_s = measured.mean(where=known), self._measured_fixed_s.mean(where=known)
        else:
            fetch_s, fixed_s = FETCH_SHARE * self._token_s, FETCH_FIXED_S
        self._fetch_s = np.where(measured > 0, measured, fetch_s)
        self._fixed_s = np.where(measured > 0, self._measured_fixed_s, fixed_s)

    def _kind(self, root: bytes, block_size: int, tokens: Sequence[int], salt: bytes) -> _Kind:
        """What nodes have of the prompt, and could fetch, if its KV is of this kind for all of them."""
        hashes = chain_digests(root_digest(root, salt), tokens, block_size)
        found = self._index.lookup(hashes)
        expected = [(slots, count) for those, count in self._expected.blocks(hashes) if (slots := self.slots(those))]
        if found is None and not expected:
            return _Kind(hashes=hashes)
        if found is None:
            found = self._index.nothing()
        most = int(found.blocks.max())
        saved: _Floats = found.saved.take(self._holder) * np.float64(block_size / SAVED_WHOLE)
        missing = most - found.blocks.take(self._holder).astype(np.int64)
        for slots, count in expected:
            missing[slots] = np.minimum(missing[slots], max(0, most - count))
            saved[slots] = np.maximum(saved[slots], count * block_size)
        missing *= block_size
        return _Kind(hashes=hashes, found=found, most=most, saved_tokens=saved, fetched_tokens=missing)

    def _owners(self, kind: _Kind, slot: int, no_owners: Collection[Incarnation]) -> tuple[Owner, ...]:
        """Of those that have as much of it as each other, other prompts get others."""
        assert kind.found is not None
        blocks = kind.found.blocks
        own, chosen = int(blocks[self._holder[slot]]), self.records[slot].incarnation
        owners: list[Owner] = []
        most, turn = kind.most, int.from_bytes(kind.hashes[-1][:4], "little")
        while len(owners) < OWNERS_MAX and most > own:
            having = np.flatnonzero(blocks == most)
            first = turn % len(having)
            for number in (*having[first : first + OWNERS_MAX].tolist(), *having[: min(first, OWNERS_MAX)].tolist()):
                incarnation = self._index.incarnation(number)
                record = None if incarnation is None or incarnation in no_owners else self._serving.get(incarnation)
                if record is not None and record.lifecycle is Lifecycle.READY and incarnation != chosen:
                    owners.append(
                        Owner(name=record.name, endpoint=record.endpoint, incarnation=record.incarnation, blocks=most)
                    )
            most = int(blocks.max(where=blocks < most, initial=0))
        del owners[OWNERS_MAX:]
        return tuple(owners)

    def sent(self, choice: Choice, key: RequestKey) -> Callable[[], None]:
        """Count a request as placed there; call the result when it has left the node's queue or failed."""
        incarnation, hashes = choice.record.incarnation, choice.hashes
        node = self._nodes[incarnation]
        node.waiting_tokens += choice.compute_tokens - node.sent.get(key, 0)
        node.sent[key] = choice.compute_tokens
        self._count(node)
        expected = [hashes] if self._expected.add(incarnation, hashes) else []

        def left() -> None:
            node.waiting_tokens -= node.sent.pop(key, 0)
            self._count(node)
            if expected:
                self._expected.leave(incarnation, expected.pop(), self._now_s())

        return left


def _rate(per_s: float) -> float:
    """As a node says it; 0, not known, if that cannot be: one such number would draw all prompts to it."""
    return per_s if 0 < per_s < RATE_MAX_PER_S else 0.0


def _is_cost(fetch: FetchLoad | PairLoad) -> bool:
    """Whether it is measured, and can be: see `_rate`."""
    return 1 / RATE_MAX_PER_S < fetch.token_s < math.inf and 0 <= fetch.fixed_s < math.inf


_NONE: Final[_Floats] = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Of one prompt and one kind of KV, by place in the arrays."""

    hashes: Sequence[bytes]
    found: Found | None = None
    """None: nobody has any of it, nor is about to."""
    most: int = 0
    """Leading blocks that any node has."""
    saved_tokens: _Floats = field(default_factory=lambda: _NONE)
    """Tokens that it does not compute: of blocks in slower tiers a part."""
    fetched_tokens: npt.NDArray[Any] = field(default_factory=lambda: _NONE)
    """Of blocks behind those that it has, or is about to have, and that some other node has."""

    @property
    def some(self) -> bool:
        return self.found is not None


def _by_slot(kinds: Sequence[_Kind], root: npt.NDArray[np.int64]) -> _Kind:
    """Each node's own kind."""
    some = next((kind for kind in kinds if kind.some), None)
    if some is None:
        return _Kind(hashes=())
    saved, fetched = np.zeros(len(root)), np.zeros(len(root))
    for place, kind in enumerate(kinds):
        if kind.some:
            np.copyto(saved, kind.saved_tokens, where=root == place)
            np.copyto(fetched, kind.fetched_tokens, where=root == place)
    return _Kind(hashes=(), found=some.found, saved_tokens=saved, fetched_tokens=fetched)
