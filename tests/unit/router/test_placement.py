"""router.placement: the prefill node with the smallest expected time to the first token."""

from __future__ import annotations

from collections import Counter

from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import ModelInfo, NodeLoad, NodeRecord, Role
from cachestore.prefix_cache import chain_digests, root_digest
from router.placement import RATE_UNKNOWN_TOKENS_PER_S, Placement

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
)


def hashes_of(prompt: list[int]) -> list[bytes]:
    return chain_digests(root_digest(b"", b""), prompt, BLOCK)


def node(number: int, *, waiting: int = 0, rate: float = 0.0, sequence: int = 1) -> NodeRecord:
    return NodeRecord(
        name=NodeName(f"prefill-{number}"),
        role=Role.PREFILL,
        incarnation=Incarnation(number + 1),
        endpoint=f"127.0.0.1:{number + 1}",
        lifecycle=Lifecycle.READY,
        model=MODEL,
        load=NodeLoad(waiting_tokens=waiting, prefill_tokens_per_s=rate),
        sequence=sequence,
    )


def key(number: int) -> RequestKey:
    return RequestKey(request=RequestId(f"r{number}"), attempt=Attempt(0))


def placement(*records: NodeRecord, blocks_max: int = 1_000) -> Placement:
    placed = Placement(blocks_max=blocks_max)
    placed.update(records)
    return placed


def test_expected_ttft_is_queue_and_uncached_tokens_over_the_rate() -> None:
    """40 tokens wait, two of the prompt's three full blocks are there: 40 + 13 - 8 tokens at 100 a second."""
    record = node(0, waiting=40)
    prompt = list(range(13))
    hashes = hashes_of(prompt)
    placed = placement(record)
    assert placed.expected_ttft_s(record, hashes, 13, 100.0) == 0.53
    left = placed.sent(record, key(0), hashes[:2], 8)
    left()
    assert placed.expected_ttft_s(record, hashes, 13, 100.0) == 0.45


def test_a_wholly_cached_prompt_still_costs_a_token() -> None:
    """The last token is always computed: a node with everything is not free of cost."""
    record = node(0)
    hashes = hashes_of([7] * 8)
    placed = placement(record)
    placed.sent(record, key(0), hashes, 8)()
    assert placed.expected_ttft_s(record, hashes, 8, 100.0) == 0.01


def test_the_faster_node_wins_until_its_queue_outweighs_it() -> None:
    """Three times as fast: chosen with 200 tokens waiting against none, not with 201 more."""
    slow = node(0, rate=100.0)
    assert (
        placement(slow, node(1, waiting=199, rate=300.0)).pick([slow, node(1, rate=300.0)], [], 100).name == "prefill-1"
    )
    records = [slow, node(1, waiting=201, rate=300.0)]
    assert placement(*records).pick(records, [], 100).name == "prefill-0"


def test_a_node_that_has_not_measured_itself_counts_as_the_fastest() -> None:
    """A fresh node beside one that does 50,000 tokens a second gets its share, and so a chance to measure."""
    records = [node(0, waiting=10, rate=50_000.0), node(1)]
    assert placement(*records).pick(records, [], 100).name == "prefill-1"
    assert RATE_UNKNOWN_TOKENS_PER_S > 0
    unmeasured = [node(0, waiting=1), node(1)]
    assert placement(*unmeasured).pick(unmeasured, [], 100).name == "prefill-1"


def test_ties_go_by_name_in_any_order() -> None:
    """Two idle nodes: the first by name, whatever the order of the list."""
    records = [node(1), node(0)]
    assert placement(*records).pick(records, [], 10).name == "prefill-0"
    assert placement(*records).pick(records[::-1], [], 10).name == "prefill-0"


def test_a_burst_spreads_before_any_report_comes() -> None:
    """Twelve prompts of one length within one report's age: four to each of three idle nodes."""
    records = [node(i) for i in range(3)]
    placed = placement(*records)
    got: Counter[str] = Counter()
    for number in range(12):
        chosen = placed.pick(records, [], 50)
        placed.sent(chosen, key(number), [], 50)
        got[chosen.name] += 1
    assert got == {"prefill-0": 4, "prefill-1": 4, "prefill-2": 4}


def test_a_request_that_has_left_counts_no_more() -> None:
    """Sent to the one, which loses it at once: the next goes there again. Calling `left` twice changes nothing."""
    records = [node(0), node(1)]
    placed = placement(*records)
    left = placed.sent(records[0], key(0), [], 50)
    assert placed.pick(records, [], 50).name == "prefill-1"
    left()
    left()
    assert placed.pick(records, [], 50).name == "prefill-0"


def test_what_the_node_has_cached_is_no_load_of_requests_sent_there() -> None:
    """Two nodes, one with a long prefix. Of 120 tokens sent there 100 are cached: the next prompt with the prefix goes
    there too, until what is left to compute there outweighs the prefix."""
    prompt = list(range(120))
    hashes = hashes_of(prompt)
    records = [node(0), node(1)]
    placed = placement(*records)
    placed.sent(records[1], key(0), hashes[:25], 0)()
    for number in range(1, 6):
        assert placed.expected_ttft_s(records[1], hashes[:25], 120, 1.0) == 20.0 * number, number
        assert placed.pick(records, hashes[:25], 120).name == "prefill-1", number
        placed.sent(records[1], key(number), hashes[:25], 120)
    assert placed.pick(records, hashes[:25], 120).name == "prefill-0"


def test_a_report_replaces_what_was_counted_since_the_last_one() -> None:
    """The node's own number is the truth; the same report seen again replaces nothing."""
    records = [node(0), node(1)]
    placed = placement(*records)
    placed.sent(records[0], key(0), [], 50)
    placed.update(records)
    assert placed.expected_ttft_s(records[0], [], 10, 10.0) == 6.0
    placed.update([node(0, waiting=20, sequence=2), records[1]])
    assert placed.expected_ttft_s(records[0], [], 10, 10.0) == 3.0


def test_a_prompt_goes_where_its_prefix_is_unless_the_queue_is_longer() -> None:
    """100 tokens of it are cached on the second node: 99 waiting there are still worth it, 101 are not."""
    prompt = list(range(120))
    hashes = hashes_of(prompt)
    for waiting, chosen in ((0, "prefill-1"), (99, "prefill-1"), (101, "prefill-0")):
        records = [node(0), node(1, waiting=waiting)]
        placed = placement(*records)
        placed.sent(records[1], key(0), hashes[:25], 0)()
        assert placed.pick(records, hashes, 120).name == chosen, waiting


def test_only_a_leading_chain_counts_as_cached() -> None:
    """A block in the middle that is not known ends the prefix, though later ones are known."""
    record = node(0)
    hashes = hashes_of(list(range(16)))
    placed = placement(record)
    placed.sent(record, key(0), [hashes[0], hashes[2], hashes[3]], 16)
    assert placed.cached_blocks(record.incarnation, hashes) == 1
    assert placed.cached_blocks(Incarnation(99), hashes) == 0


def test_the_memory_of_blocks_is_bounded_and_forgets_the_oldest() -> None:
    """Three blocks are remembered: a fourth pushes the least recently sent one out."""
    record = node(0)
    placed = placement(record, blocks_max=3)
    a, b, c, d = (hashes_of([i] * BLOCK)[0] for i in range(4))
    for digest in (a, b, c, a, d):
        placed.sent(record, key(0), [digest], 4)
    assert [placed.cached_blocks(record.incarnation, [digest]) for digest in (a, b, c, d)] == [1, 0, 1, 1]


def test_a_process_that_is_gone_is_forgotten_with_all_it_had() -> None:
    """The node restarts under its name: the new incarnation has no queue and no cache, and the old one is not kept."""
    old = node(0)
    hashes = hashes_of(list(range(8)))
    placed = placement(old)
    left = placed.sent(old, key(0), hashes, 8)
    placed.update([node(1)])
    assert placed.cached_blocks(old.incarnation, hashes) == 0
    left()  # the call to the dead process ends only now
    placed.update([old])
    assert placed.expected_ttft_s(old, hashes, 8, 1.0) == 8.0


def test_what_sibling_workers_have_sent_counts_until_the_next_report() -> None:
    """Two idle nodes. Another worker has 50 tokens on its way to the first: this one's go to the second. A report of
    the first one says what it has itself."""
    first, second = node(0, rate=100.0), node(1, rate=100.0)
    placed = placement(first, second)
    placed.follow_siblings({first.incarnation: 50})
    assert placed.pick([first, second], [], 10) is second
    assert placed.on_their_way() == {}
    left = placed.sent(second, key(1), [], 20)
    assert placed.on_their_way() == {second.incarnation: 20}
    left()
    first = node(0, rate=100.0, sequence=2)
    placed.update([first, second])
    assert placed.pick([first, second], [], 10) is first
