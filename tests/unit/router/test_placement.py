"""router.placement: the prefill node with the smallest expected time to the first token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import BlockLoad, FetchLoad, ModelInfo, MovedLoad, NodeLoad, NodeRecord, Owner, PairLoad, Role
from cachestore.holder_index import HolderIndex
from cachestore.holdings import Tier
from cachestore.prefix_cache import chain_digests, root_digest
from router.placement import (
    EXPECTED_BLOCKS_MAX,
    EXPECTED_S,
    FETCH_FIXED_S,
    FETCH_SHARE,
    RATE_UNKNOWN_TOKENS_PER_S,
    Choice,
    Expected,
    Placement,
)

BLOCK = 4
MODEL = ModelInfo(
    name="m",
    fingerprint="f",
    vocab_size=100,
    context_len_max=1_000,
    eos_token_ids=(1,),
    layout_hash="l",
    block_size=BLOCK,
    protocol_min=1,
    protocol_max=1,
    kv_root=b"plain",
)


SALT = b""
NOTHING_MOVED = MovedLoad()


def hashes_of(prompt: Sequence[int], model: ModelInfo = MODEL) -> list[bytes]:
    return chain_digests(root_digest(model.kv_root, SALT), prompt, BLOCK)


def node(
    number: int,
    *,
    waiting: int = 0,
    rate: float = 0.0,
    fetch: float = 0.0,
    fixed_s: float = FETCH_FIXED_S,
    pairs: Mapping[int, float] | None = None,
    moved: MovedLoad = NOTHING_MOVED,
    sequence: int = 1,
    role: Role = Role.PREFILL,
    model: ModelInfo = MODEL,
) -> NodeRecord:
    """`fetch` and `pairs` (by owner's number) are in tokens a second."""
    told = tuple(
        PairLoad(owner=owner + 1, fixed_s=fixed_s, token_s=1 / speed) for owner, speed in (pairs or {}).items()
    )
    costs = FetchLoad(fixed_s=fixed_s, token_s=1 / fetch if fetch else 0.0, pairs=told)
    return NodeRecord(
        name=NodeName(f"{role.name.lower()}-{number}"),
        role=role,
        incarnation=Incarnation(number + 1),
        endpoint=f"127.0.0.1:{number + 1}",
        lifecycle=Lifecycle.READY,
        model=model,
        load=NodeLoad(waiting_tokens=waiting, prefill_tokens_per_s=rate, fetch=costs, moved=moved),
        sequence=sequence,
    )


def key(number: int) -> RequestKey:
    return RequestKey(request=RequestId(f"r{number}"), attempt=Attempt(0))


class Placed(Placement):
    """With an index and a clock that the test sets."""

    def __init__(self, *records: NodeRecord) -> None:
        self.index = HolderIndex()
        self.now_s = 0.0
        super().__init__(self.index, lambda: self.now_s)
        self.follow(*records)

    def follow(self, *records: NodeRecord) -> None:
        self.update([record for record in records if record.role.serves(Role.PREFILL)], records)

    def has(self, record: NodeRecord, prompt: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """The node says that it has this prompt's full blocks."""
        if record.incarnation not in self.index.holders:
            number = self.index.begin()
            assert number is not None
            self.index.publish(record.incarnation, number)
        assert record.model is not None
        hashes = hashes_of(prompt, record.model)
        self.index.put(self.index.holders[record.incarnation], b"".join(hashes), bytes([tier]) * len(hashes))

    def choose(self, prompt: Sequence[int] | int) -> Choice:
        """For a prompt, or one of so many tokens that nobody has."""
        return self.pick(range(prompt) if isinstance(prompt, int) else prompt, SALT)

    def name(self, prompt: Sequence[int] | int) -> str:
        return self.choose(prompt).record.name

    def send(self, number: int, prompt: Sequence[int] | int) -> tuple[Choice, Callable[[], None]]:
        choice = self.choose(prompt)
        return choice, self.sent(choice, key(number))


placement = Placed


def test_expected_ttft_is_queue_and_uncached_tokens_over_the_rate() -> None:
    """40 tokens wait, two of the prompt's three full blocks are there: 40 + 13 - 8 tokens at 100 a second."""
    placed = placement(record := node(0, waiting=40, rate=100.0))
    assert placed.choose(13).ttft_s == 0.53
    placed.has(record, range(8))
    choice = placed.choose(13)
    assert (choice.ttft_s, choice.compute_tokens, choice.hashes) == (0.45, 5, hashes_of(range(13)))


def test_a_wholly_cached_prompt_still_costs_a_token() -> None:
    """The last token is always computed: a node with everything is not free of cost."""
    placed = placement(record := node(0, rate=100.0))
    placed.has(record, range(8))
    assert placed.choose(8).ttft_s == 0.01


def test_what_lies_in_a_slower_tier_saves_less() -> None:
    """Sixteen blocks on the device of one node, in host memory or on disk of others: an eighth more for each tier."""
    records = [node(0, waiting=14, rate=1.0), node(1, waiting=7, rate=1.0), node(2, rate=1.0)]
    placed = placement(*records)
    for record, tier in zip(records, Tier, strict=True):
        placed.has(record, range(64), tier)
    choices = []
    for least in range(3):
        placed.follow(*(record for record in records if record.incarnation > least))
        choices.append((placed.choose(65).record.name, placed.choose(65).ttft_s))
    assert choices == [("prefill-0", 14 + 1.0), ("prefill-1", 7 + 1.0 + 8), ("prefill-2", 1.0 + 16)]


def test_the_faster_node_wins_until_its_queue_outweighs_it() -> None:
    """Three times as fast: chosen with 199 tokens waiting against none, not with 201."""
    slow = node(0, rate=100.0)
    assert placement(slow, node(1, waiting=199, rate=300.0)).name(100) == "prefill-1"
    assert placement(slow, node(1, waiting=201, rate=300.0)).name(100) == "prefill-0"


def test_a_node_that_has_not_measured_itself_counts_as_the_fastest() -> None:
    """A fresh node beside one that does 50,000 tokens a second gets its share, and so a chance to measure."""
    assert placement(node(0, waiting=10, rate=50_000.0), node(1)).name(100) == "prefill-1"
    assert RATE_UNKNOWN_TOKENS_PER_S > 0
    assert placement(node(0, waiting=1), node(1)).name(100) == "prefill-1"


def test_ties_go_by_name_in_any_order() -> None:
    """Two idle nodes: the first by name, whatever the order of the list."""
    records = [node(1), node(0)]
    assert placement(*records).name(10) == "prefill-0"
    assert placement(*records[::-1]).name(10) == "prefill-0"


def test_only_those_that_are_ready_and_asked_for_are_chosen() -> None:
    """A node that drains gets nothing, nor one that the caller rules out."""
    records = [replace(node(0), lifecycle=Lifecycle.DRAINING), node(1), node(2)]
    placed = placement(*records)
    assert placed.name(10) == "prefill-1"
    among = placed.ready.copy()
    among[placed.slots([Incarnation(2), Incarnation(77)])] = False
    assert placed.pick([1], SALT, among=among).record.name == "prefill-2"


def test_a_burst_spreads_before_any_report_comes() -> None:
    """Twelve prompts of one length within one report's age: four to each of three idle nodes."""
    placed = placement(*(node(i) for i in range(3)))
    got = Counter(placed.send(number, [number] * 50)[0].record.name for number in range(12))
    assert got == {"prefill-0": 4, "prefill-1": 4, "prefill-2": 4}


def test_a_request_that_has_left_counts_no_more() -> None:
    """Sent to the one, which loses it at once: the next goes there again. Calling `left` twice changes nothing."""
    placed = placement(node(0), node(1))
    _, left = placed.send(0, 50)
    assert placed.name([9] * 50) == "prefill-1"
    left()
    left()
    assert placed.name([9] * 50) == "prefill-0"


def test_a_burst_with_one_prefix_goes_to_one_node() -> None:
    """Nobody has said that it has it, and the first prompt is being computed. The others go behind it, as it will be
    there for them: until what is to be computed there, of each its own 20 tokens, outweighs it."""
    prefix = list(range(100))
    placed = placement(*(node(i, rate=1.0) for i in range(2)))
    placed.send(0, prefix)
    placed.follow(node(0, rate=1.0, waiting=30, sequence=2), node(1, rate=1.0))
    choices = [placed.send(number, [*prefix, *[1_000 + number] * 20])[0] for number in range(1, 7)]
    assert [choice.record.name for choice in choices] == ["prefill-0"] * 4 + ["prefill-1", "prefill-0"]
    assert [choice.compute_tokens for choice in choices] == [20] * 4 + [120, 20]


def test_what_was_sent_is_expected_for_a_while_behind_the_call() -> None:
    """The call has ended, and the node's word has not come: its blocks count. Seconds later they count no more: they
    were evicted at once, or the call came to nothing. Two calls of one prompt each keep it."""
    prompt = list(range(40))
    placed = placement(node(0, rate=1.0))
    _, first = placed.send(0, prompt)
    _, second = placed.send(1, prompt)
    first()
    placed.now_s = EXPECTED_S
    second()
    assert placed.choose(prompt).compute_tokens == 1
    placed.now_s = 2 * EXPECTED_S - 0.1
    assert placed.choose(prompt).compute_tokens == 1
    placed.now_s = 2 * EXPECTED_S
    assert placed.choose(prompt).compute_tokens == 40
    assert placed._expected._total == 0 and not placed._expected._counts


def test_what_is_expected_is_bounded() -> None:
    """A flood of long prompts: those beyond the limit are placed, but not remembered."""
    expected, hashes = Expected(), [bytes([i]) for i in range(100)]
    taken = [expected.add(Incarnation(1), hashes) for _ in range(EXPECTED_BLOCKS_MAX // 100 + 5)]
    assert sum(taken) == EXPECTED_BLOCKS_MAX // 100
    for _ in range(sum(taken)):
        expected.leave(Incarnation(1), hashes, 0.0)
    expected.expire(EXPECTED_S)
    assert list(expected.blocks(hashes)) == [] and expected.add(Incarnation(1), hashes)


def test_a_report_replaces_what_was_counted_since_the_last_one() -> None:
    """The node's own number is the truth; the same report seen again replaces nothing."""
    records = [node(0, rate=10.0)]
    placed = placement(*records)
    placed.send(0, 50)
    placed.follow(*records)
    assert placed.choose([1] * 10).ttft_s == 6.0
    placed.follow(node(0, waiting=20, rate=10.0, sequence=2))
    assert placed.choose([1] * 10).ttft_s == 3.0


def test_a_prompt_goes_where_its_prefix_is_unless_the_queue_is_longer() -> None:
    """100 tokens of it are cached on the second node: 99 waiting there are still worth it, 101 are not. (Fetches have
    failed so far.)"""
    for waiting, chosen in ((0, "prefill-1"), (99, "prefill-1"), (101, "prefill-0")):
        records = [node(0, moved=MovedLoad(fetches_failed=4)), node(1, waiting=waiting)]
        placed = placement(*records)
        placed.has(records[1], range(100))
        assert placed.name(120) == chosen, waiting


def test_kv_of_another_root_counts_for_its_own_nodes_only() -> None:
    """A node of rounded weights has the prompt, one of full precision has not: each counts what is its own, and neither
    is told of the other as an owner."""
    rounded = replace(MODEL, kv_root=b"rounded")
    records = [node(0, rate=1.0, waiting=50), node(1, rate=1.0, model=rounded)]
    placed = placement(*records)
    placed.has(records[0], range(100))
    assert (placed.choose(101).record.name, placed.choose(101).ttft_s) == ("prefill-0", 51.0)
    placed.has(records[1], range(100))
    assert (placed.choose(101).record.name, placed.choose(101).ttft_s) == ("prefill-1", 1.0)
    placed.follow(records[1])
    placed.index.forget(records[1].incarnation)
    choice = placed.choose(101)
    assert (choice.compute_tokens, choice.owners) == (101, ())


def test_a_fetch_is_weighed_against_queue_and_computing() -> None:
    """100 tokens at a busy node, an idle one that fetches ten times as fast as it computes: it fetches them, as its
    queue is none. Where the busy node's queue is short the prompt goes there, and where fetching is slow too."""
    for waiting, fetch, chosen, tokens in ((90, 100.0, 1, 20), (5, 100.0, 0, 20), (90, 1.0, 0, 20), (120, 1.0, 1, 120)):
        records = [node(0, waiting=waiting, rate=10.0), node(1, rate=10.0, fetch=fetch)]
        placed = placement(*records)
        placed.has(records[0], range(100))
        choice = placed.choose(120)
        assert (choice.record.name, choice.compute_tokens) == (f"prefill-{chosen}", tokens), (waiting, fetch)
    assert choice.owners == (
        Owner(name="prefill-0", endpoint="127.0.0.1:1", incarnation=Incarnation(1), blocks=25),
    )  # it may fetch all the same


def test_a_node_that_never_fetched_is_believed_to_fetch_as_the_others() -> None:
    """100 tokens at a busy node, an idle one that has fetched nothing. It is expected to fetch them in a quarter of the
    time of computing, as is believed while nobody has fetched, or in a tenth, as a third node says. Where that one says
    that it takes longer than computing, or all that the idle one asked for was refused or failed, it computes them; but
    not for one refusal."""
    in_vain = (
        MovedLoad(fetches_refused=4),
        MovedLoad(fetches_failed=4),
        MovedLoad(fetches_refused=2, fetches_failed=2),
    )
    for third, moved, ttft_s in (
        (0.0, MovedLoad(), 100 / 40 + FETCH_FIXED_S + 2.0),
        (0.0, MovedLoad(fetches_refused=3), 100 / 40 + FETCH_FIXED_S + 2.0),
        (100.0, MovedLoad(), 1.0 + FETCH_FIXED_S + 2.0),
        (5.0, MovedLoad(), 12.0),
        *((0.0, each, 12.0) for each in in_vain),
    ):
        busy = node(0, waiting=10_000, rate=10.0)
        placed = placement(busy, node(1, rate=10.0, moved=moved), node(2, waiting=10_000, rate=10.0, fetch=third))
        placed.has(busy, range(100))
        choice = placed.choose(120)
        assert choice.record.name == "prefill-1"
        assert choice.ttft_s == pytest.approx(ttft_s), (third, moved)


def test_what_a_node_says_of_the_owner_counts() -> None:
    """Two idle nodes fetch at one rate in all. The first says of the owner that it is slow, so the second gets the
    prompt; where that says so too, the first, which is next by name, and it computes."""
    owner = node(0, waiting=10_000, rate=10.0)
    for slow, chosen, ttft_s in (((), 1, 3.0), ((1,), 2, 3.0), ((1, 2), 1, 12.0)):
        idle = [node(i, rate=10.0, fetch=100.0, fixed_s=0.0, pairs={0: 1.0} if i in slow else {}) for i in (1, 2)]
        placed = placement(owner, *idle)
        placed.has(owner, range(100))
        choice = placed.choose(120)
        assert choice.record.name == f"prefill-{chosen}", slow
        assert choice.ttft_s == pytest.approx(ttft_s), slow
        assert choice.compute_tokens == (20 if ttft_s == 3.0 else 120)


def test_a_prompt_whose_owners_are_out_of_reach_is_computed() -> None:
    owner = node(0, waiting=10_000, rate=10.0)
    placed = placement(owner, node(1, rate=10.0, fetch=100.0))
    placed.has(owner, range(100))
    choice = placed.pick(range(120), SALT, no_owners={owner.incarnation})
    assert (choice.record.name, choice.ttft_s, choice.compute_tokens) == ("prefill-1", 12.0, 120)


def test_a_fetch_takes_the_time_of_its_bytes_or_of_the_queue() -> None:
    """Ten tokens wait, and 100 are fetched at 50 a second: two seconds and what any fetch takes there, then the rest of
    20."""
    records = [node(0, waiting=10_000, rate=10.0), node(1, waiting=10, rate=10.0, fetch=50.0, fixed_s=0.125)]
    placed = placement(*records)
    placed.has(records[0], range(100))
    assert placed.choose(120).ttft_s == pytest.approx(2.0 + 0.125 + 2.0)
    placed.follow(records[0], node(1, waiting=30, rate=10.0, fetch=50.0, fixed_s=0.125, sequence=2))
    assert placed.choose(120).ttft_s == pytest.approx(3.0 + 2.0)


def test_three_owners_are_named_those_with_the_most_first() -> None:
    """Decode nodes have it too: an answer's KV. A node that does not answer is not named, nor the chosen one."""
    decoders = [node(10 + i, role=Role.DECODE) for i in range(4)]
    records = [node(0), node(1, waiting=1_000), *decoders]
    placed = placement(*records)
    placed.has(records[0], range(8))
    placed.has(records[1], range(40))
    for more, decoder in enumerate(decoders):
        placed.has(decoder, range(4 * (more + 1)))
    choice = placed.pick(range(100), SALT, no_owners={decoders[2].incarnation})
    assert (choice.record.name, choice.compute_tokens) == ("prefill-0", 60)
    assert [(owner.name, owner.blocks) for owner in choice.owners] == [("prefill-1", 10), ("decode-13", 4)]
    assert [owner.name for owner in placed.choose(100).owners] == ["prefill-1", "decode-13", "decode-12"]


def test_many_owners_of_one_prefix_are_asked_in_turn() -> None:
    """A hundred nodes have a system prompt. Prompts that go elsewhere are sent to different ones for it."""
    owners = [node(i, role=Role.DECODE) for i in range(1, 101)]
    placed = placement(node(0), *owners)
    for owner in owners:
        placed.has(owner, range(8))
    named = {owner.name for i in range(50) for owner in placed.choose([*range(8), i, i, i, i]).owners}
    assert len(named) > 50


def test_a_process_that_is_gone_is_forgotten_with_all_it_had() -> None:
    """The node restarts under its name: the new incarnation has no queue and no cache, and the old one is not kept."""
    old, new = node(0, rate=1.0), replace(node(0, rate=1.0), incarnation=Incarnation(99))
    placed = placement(old)
    placed.has(old, range(8))
    _, left = placed.send(0, 8)
    placed.follow(new)
    placed.index.forget(old.incarnation)
    assert placed.choose(8).ttft_s == 8.0
    left()  # the call to the dead process ends only now
    assert placed.choose(8).ttft_s == 8.0
    assert placed.on_their_way() == {}


def test_what_sibling_workers_have_sent_counts_until_the_next_report() -> None:
    """Two idle nodes. Another worker has 50 tokens on its way to the first: this one's go to the second. A report of
    the first one says what it has itself."""
    first, second = node(0, rate=100.0), node(1, rate=100.0)
    placed = placement(first, second)
    placed.follow_siblings({first.incarnation: 50})
    assert placed.name(10) == second.name
    assert placed.on_their_way() == {}
    choice, left = placed.send(1, 20)
    assert choice.record is second
    assert placed.on_their_way() == {second.incarnation: 20}
    left()
    placed.follow(node(0, rate=100.0, sequence=2), second)
    assert placed.name([3] * 10) == first.name


CHAIN = tuple(range(20))
"""Five blocks."""
_Drawn = tuple[int, float, float, int, int, Tier, bool]
NODES = st.tuples(
    st.sampled_from([0, 7, 40]),  # tokens that wait
    st.sampled_from([0.0, 50.0, 200.0]),  # tokens a second
    st.sampled_from([0.0, 100.0, 1e6]),  # that it fetches
    st.integers(0, 5),  # blocks that it has of the chain
    st.integers(0, 5),  # blocks of it in a prompt sent there
    st.sampled_from(Tier),
    st.booleans(),  # of another kind of KV
)


@settings(max_examples=200, deadline=None)
@given(st.lists(NODES, min_size=1, max_size=5), st.integers(1, 25))
def test_the_choice_agrees_with_the_formula(nodes: list[_Drawn], n: int) -> None:
    """Nodes of all sorts: the one chosen has the least expected time, as a plain loop computes it."""
    other = replace(MODEL, kv_root=b"other")
    records = [
        node(i, waiting=waiting, rate=rate, fetch=fetch, model=other if is_other else MODEL)
        for i, (waiting, rate, fetch, _, _, _, is_other) in enumerate(nodes)
    ]
    placed = placement(*records)
    for record, (_, _, _, has, sent, tier, is_other) in zip(records, nodes, strict=True):
        placed.has(record, CHAIN[: 4 * has], tier)
        placed._expected.add(record.incarnation, hashes_of(CHAIN[: 4 * sent], other if is_other else MODEL))
    fastest = max(rate for _, rate, *_ in nodes) or RATE_UNKNOWN_TOKENS_PER_S
    costs = [1 / fetch for _, _, fetch, *_ in nodes if fetch]
    times = []
    for waiting, rate, fetch, has, sent, tier, is_other in nodes:
        full = n // 4
        mine = max(min(has, full), min(sent, full))
        saved = max(min(has, full) * 4 * {Tier.DEVICE: 8, Tier.HOST: 7, Tier.DISK: 6}[tier] / 8, 4 * min(sent, full))
        most = max(min(other_has, full) for _, _, _, other_has, _, _, kind in nodes if kind == is_other)
        speed, fetched = rate or fastest, 4 * max(0, most - mine)
        seconds = waiting / speed + (max(1, n - saved) if saved or most else n) / speed
        cost = 1 / fetch if fetch else sum(costs) / len(costs) if costs else FETCH_SHARE / speed
        if saved or most:
            rest = max(1, n - saved - fetched)
            seconds = min(seconds, max(waiting / speed, FETCH_FIXED_S + fetched * cost) + rest / speed)
        times.append(seconds)
    choice = placed.choose(range(n))
    chosen = records.index(choice.record)
    assert choice.ttft_s == pytest.approx(min(times))
    assert times[chosen] == pytest.approx(min(times))


def test_many_that_are_about_to_have_one_beginning_cost_no_step_for_each_block() -> None:
    """Many nodes get one long prompt, ten of them a longer one: two groups, however many blocks there are."""
    expected = Expected()
    hashes = [i.to_bytes(16, "little") for i in range(500)]
    for number in range(500):
        expected.add(Incarnation(number + 1), hashes[: 500 if number < 10 else 400])
    found = [(sorted(nodes), depth) for nodes, depth in expected.blocks(hashes)]
    assert found == [(list(range(1, 501)), 400), (list(range(1, 11)), 500)]
    assert [(len(nodes), depth) for nodes, depth in expected.blocks(hashes[:3])] == [(500, 3)]
    assert list(expected.blocks([b"x" * 16])) == []


@pytest.mark.parametrize("rate", [math.nan, math.inf, -5.0, 1e300])
def test_a_rate_that_cannot_be_is_not_believed(rate: float) -> None:
    """A broken node says it: prompts go where they would if it had measured nothing."""
    placed = placement(node(0, waiting=10, rate=rate, fetch=rate), node(1, rate=100.0))
    placed.has(node(1, rate=100.0), range(8))
    choice = placed.choose(13)
    assert (choice.record.name, choice.ttft_s) == ("prefill-1", 0.05)


def test_nodes_of_many_kinds_of_kv() -> None:
    """More than numpy's `choose` takes: each knows its own kind."""
    records = [node(i, rate=100.0, model=replace(MODEL, kv_root=b"%d" % i)) for i in range(80)]
    placed = placement(*records)
    placed.has(records[70], range(12))
    assert (placed.choose(13).record, placed.choose(13).compute_tokens) == (records[70], 1)


def test_a_region_that_turns_out_small_counts_at_once() -> None:
    """A node's region is not known, and then is: the next prompt that is longer does not go there."""
    placed = placement(*(records := [node(0), node(1)]))
    placed.choose(5)
    assert placed.may_hold(50).tolist() == [True, True]
    small = replace(records[0], sequence=2, load=NodeLoad(blocks=BlockLoad(free=10)))
    placed.follow(small, records[1])
    assert placed.may_hold(50).tolist() == [False, True]
