"""What a node says that it has cached: a follower's books against the node's, whatever it misses."""

from __future__ import annotations

import gc

from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.holdings import GONE, Holdings, HoldingsPart, Snapshot, Tier
from cachestore.ledger import Ledger
from cachestore.prefix_cache import DIGEST_BYTES, IndexCursor, PrefixCache


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "little")


def parsed(part: HoldingsPart) -> dict[bytes, int]:
    keys = [part.digests[i : i + DIGEST_BYTES] for i in range(0, len(part.digests), DIGEST_BYTES)]
    return dict(zip(keys, part.tiers, strict=True))


def whole(holdings: Holdings, snapshot: Snapshot) -> dict[bytes, int]:
    """Of all its parts, two blocks each."""
    known: dict[bytes, int] = {}
    for first in range(0, len(snapshot.digests), 2):
        known |= parsed(holdings.part(snapshot, first, first + 2))
    return {key: tier for key, tier in known.items() if tier != GONE}


class Follower:
    """A router's books of one node."""

    def __init__(self) -> None:
        self.number = 0
        self.known: dict[bytes, int] = {}
        self.snapshots = 0

    def look(self, holdings: Holdings) -> None:
        part = holdings.since(self.number)
        if part is None:
            self.snapshots += 1
            snapshot = holdings.snapshot()
            self.known, self.number = whole(holdings, snapshot), snapshot.number
            part = holdings.since(self.number)
            assert part is not None, "the log goes on from a snapshot"
        for key, tier in parsed(part).items():
            if tier == GONE:
                self.known.pop(key, None)
            else:
                self.known[key] = tier
        self.number = part.number


STEPS = st.lists(st.one_of(st.tuples(st.integers(0, 5), st.sampled_from(Tier)), st.integers(0, 2)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_followers_know_what_the_node_has(steps: list[tuple[int, Tier] | int]) -> None:
    """Blocks come to tiers and leave them; three followers look at moments of their own, and the log keeps eight
    changes. Each then knows the fastest tier of each block, and nothing else."""
    holdings = Holdings(changes_kept_max=8)
    followers = [Follower() for _ in range(3)]
    model: dict[bytes, set[Tier]] = {}
    for step in steps:
        if isinstance(step, int):
            followers[step].look(holdings)
            assert followers[step].known == {key: min(tiers) for key, tiers in model.items()}
            continue
        key, tier = digest(step[0]), step[1]
        tiers = model.setdefault(key, set())
        if tier in tiers:
            tiers.discard(tier)
            holdings.removed(key, tier)
        else:
            tiers.add(tier)
            holdings.added(key, tier)
        if not tiers:
            del model[key]
        assert len(holdings) == len(model)
    for follower in followers:
        follower.look(holdings)
        assert follower.known == {key: min(tiers) for key, tiers in model.items()}


def test_a_change_that_others_do_not_see_is_none() -> None:
    """A block in device memory is copied to disk and dropped there again: followers hear of nothing."""
    holdings = Holdings()
    holdings.added(digest(1), Tier.DEVICE)
    holdings.added(digest(1), Tier.DISK)
    holdings.removed(digest(1), Tier.DISK)
    assert holdings.number == 1
    holdings.added(digest(1), Tier.HOST)
    holdings.removed(digest(1), Tier.DEVICE)
    part = holdings.since(1)
    assert part is not None and parsed(part) == {digest(1): Tier.HOST}


def test_followers_share_a_snapshot_while_it_is_sent() -> None:
    """Ten routers start at once: the node's books are copied once. Later ones get a new copy, and the old one goes."""
    holdings = Holdings(changes_kept_max=4)
    for number in range(6):
        holdings.added(digest(number), Tier.DEVICE)
    first = holdings.snapshot()
    holdings.removed(digest(0), Tier.DEVICE)
    assert holdings.snapshot() is first
    old = first.number
    del first
    gc.collect()
    assert holdings.snapshot().number == old + 1


def test_a_snapshot_is_made_anew_before_the_log_leaves_it_behind() -> None:
    """One of them is slow to be sent; the log moves on: the next follower gets one that the log still reaches."""
    holdings = Holdings(changes_kept_max=4)
    slow = holdings.snapshot()
    for number in range(9):
        holdings.added(digest(number), Tier.DEVICE)
    assert holdings.since(slow.number) is None
    assert len(whole(holdings, holdings.snapshot())) == 9


def test_a_part_of_a_snapshot_says_where_its_blocks_are_by_now() -> None:
    """One block leaves and another changes its tier between two parts: both are told as they are, and the log, which
    goes on from the snapshot, tells the same once more."""
    holdings = Holdings()
    for number in range(3):
        holdings.added(digest(number), Tier.DEVICE)
    snapshot = holdings.snapshot()
    assert parsed(holdings.part(snapshot, 0, 1)) == {digest(0): Tier.DEVICE}
    holdings.removed(digest(1), Tier.DEVICE)
    holdings.added(digest(2), Tier.DISK)
    holdings.removed(digest(2), Tier.DEVICE)
    part = holdings.part(snapshot, 1, 3)
    assert (part.number, parsed(part)) == (3, {digest(1): GONE, digest(2): Tier.DISK})
    since = holdings.since(part.number)
    assert since is not None and parsed(since) == {digest(1): GONE, digest(2): Tier.DISK}


def test_the_last_tier_of_a_block_is_told() -> None:
    """A block leaves one of two tiers, and then the other: it is gone once, with the second."""
    holdings = Holdings()
    gone: list[bytes] = []
    holdings.on_gone = gone.append
    holdings.added(digest(1), Tier.DEVICE)
    holdings.added(digest(1), Tier.HOST)
    holdings.removed(digest(1), Tier.DEVICE)
    assert gone == [] and digest(1) in holdings
    holdings.removed(digest(1), Tier.HOST)
    assert gone == [digest(1)] and digest(1) not in holdings


def test_the_prefix_cache_says_what_comes_and_goes() -> None:
    """Two blocks are computed, the deeper one is evicted, and the other is forgotten as spoiled."""
    ledger = Ledger(2)
    cache = PrefixCache(ledger, block_size=2, kv_root=b"")
    table = ledger.take(2)
    cache.index([1, 2, 3, 4], table, 4, b"", IndexCursor())
    chain = cache.chain([1, 2, 3, 4], b"")
    part = cache.holdings.since(0)
    assert part is not None and parsed(part) == dict.fromkeys(chain, Tier.DEVICE)
    ledger.drop(table)
    cache.released(table)
    assert cache.evict_until(1)
    part = cache.holdings.since(2)
    assert part is not None and parsed(part) == {chain[1]: GONE}
    cache.forget([table[0]])
    assert len(cache.holdings) == 0
