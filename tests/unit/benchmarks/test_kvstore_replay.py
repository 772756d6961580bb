"""benchmarks.kvstore_replay: made-up traces, whose hits can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.kvstore_replay import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    PEER_BYTES_PER_S,
    POLICIES,
    Policy,
    Prompt,
    Sizes,
    Tally,
    infinite,
    read_trace,
    run_cluster,
)

AT_RANDOM, PLACED, AT_RANDOM_FETCHES, PLACED_FETCHES, PLACED_TIERS, PLACED_ALL = POLICIES
BLOCKS = 8
TOKENS = BLOCKS * BLOCK_TOKENS
RATE = float(TOKENS)
"""A prompt takes a second."""


def prompt(number: int, at_s: float, chat: int, *, tokens: int = TOKENS) -> Prompt:
    """Of one of many chats; the same chat has the same tokens."""
    ids = tuple(1_000 * chat + index for index in range(-(-tokens // BLOCK_TOKENS)))
    return Prompt(number=number, arrival_s=at_s, tokens=tokens, ids=ids)


def chats(rounds: int, count: int, *, every_s: float) -> list[Prompt]:
    """Each chat once in each round."""
    return [prompt(n, n * every_s, n % count) for n in range(rounds * count)]


def sizes(*, nodes: int, prompts: int) -> Sizes:
    """Nodes with room for so many prompts each."""
    return Sizes(nodes=nodes, device_tokens=prompts * TOKENS, tokens_per_s=RATE)


def run(prompts: list[Prompt], policy: Policy, room: Sizes) -> Tally:
    """Every node's books are sound at the end."""
    cluster = run_cluster(prompts, policy, room)
    for node in cluster.nodes:
        node.ledger.check()
        assert node.ledger.books().held == 0
        if node.store is not None:
            node.store.check()
    return cluster.tally


def hit_blocks(tally: Tally) -> dict[str, int]:
    return {kind: tokens // BLOCK_TOKENS for kind, tokens in tally.hits.items() if tokens}


def missed_blocks(tally: Tally) -> dict[str, int]:
    return {why: tokens // BLOCK_TOKENS for why, tokens in tally.missed.items() if tokens}


def test_what_a_trace_says() -> None:
    """Two full blocks and a token more: two blocks of two units, and one unit that is computed in any case."""
    line = json.dumps({"timestamp": 2500, "input_length": 1025, "output_length": 3, "hash_ids": [7, 8, 9]})
    (found,) = read_trace([line])
    assert (found.arrival_s, found.units, len(found.chain), len(found.reusable)) == (2.5, [7, 7, 8, 8, 9], 2, 2)
    with pytest.raises(ValueError, match="line 1: 1025 tokens have 2 ids"):
        list(read_trace([line.replace(", 9]", "]")]))


def test_an_infinite_cache_has_all_but_the_block_of_the_last_token() -> None:
    """Of prompts of 8 full blocks 7 are found again, of those with a token more all 8."""
    assert hit_blocks(infinite(chats(3, 10, every_s=0.0))) == {"device": 2 * 10 * 7}
    longer = [prompt(n, 0.0, 0, tokens=TOKENS + 1) for n in range(3)]
    assert hit_blocks(infinite(longer)) == {"device": 2 * 8}


def test_placement_finds_what_a_node_has_and_chance_does_not() -> None:
    """24 prompts of 4 chats, 10 s apart, 4 nodes with room for all: placed where their beginnings are, each finds them
    after the first round. It waits a second for 8 blocks, and then an eighth of one."""
    prompts = chats(6, 4, every_s=10.0)
    placed = run(prompts, PLACED, sizes(nodes=4, prompts=4))
    assert hit_blocks(placed) == {"device": 20 * 7}
    assert placed.ttft_s == [*[1.0] * 4, *[0.125] * 20]
    # With this generator 12 of them come to a node that has had their chat.
    by_chance = run(prompts, AT_RANDOM, sizes(nodes=4, prompts=4))
    assert (hit_blocks(by_chance), missed_blocks(by_chance)) == ({"device": 12 * 7}, {"not brought": 8 * 7})


def test_what_another_node_has_is_fetched() -> None:
    """The same prompts, sent anywhere: the 8 that come to a node without their chat fetch it from one that has it. That
    takes 7 blocks of 160 MiB over 87 GB/s and 5 ms, and the last block is computed."""
    fetched = run(chats(6, 4, every_s=10.0), AT_RANDOM_FETCHES, sizes(nodes=4, prompts=4))
    assert (hit_blocks(fetched), missed_blocks(fetched)) == ({"device": 12 * 7, "peer": 8 * 7}, {})
    fetch_s = 0.005 + 7 * BLOCK_BYTES / PEER_BYTES_PER_S
    assert sorted(round(s, 6) for s in fetched.ttft_s) == [*[0.125] * 12, *[round(0.125 + fetch_s, 6)] * 8, *[1.0] * 4]


def test_a_burst_of_one_chat() -> None:
    """Three prompts of a chat at once, two nodes: two compute all of it, as that is sooner than to wait for one and
    compute a block; the third one waits for that, and finds the rest."""
    tally = run([prompt(n, 0.0, 0) for n in range(3)], PLACED_FETCHES, sizes(nodes=2, prompts=4))
    assert ([round(s, 6) for s in tally.ttft_s], hit_blocks(tally)) == ([1.0, 1.0, 1.125], {"device": 7})
    assert missed_blocks(tally) == {"too early": 7}


def test_tiers_keep_what_the_device_evicts() -> None:
    """One node with room for 3 prompts and 6 below it: of 4 chats in turn all are found again, in host memory."""
    room = replace(sizes(nodes=1, prompts=3), host_share=2.0, disk_share=1.0)
    tally = run(chats(5, 4, every_s=10.0), PLACED_TIERS, room)
    assert (hit_blocks(tally), missed_blocks(tally)) == ({"host": 4 * 4 * 7}, {})


def test_a_disk_with_room_has_what_was_used_once() -> None:
    """Of 12 chats in turn on one node with room for 3 prompts and 6 below it none is used again before it leaves host
    memory. They go to the disk before, which has room for all."""
    room = replace(sizes(nodes=1, prompts=3), host_share=2.0, disk_share=5.0)
    tally = run(chats(4, 12, every_s=10.0), PLACED_ALL, room)
    assert (hit_blocks(tally), missed_blocks(tally)) == ({"disk": 3 * 12 * 7}, {})


def test_what_is_least_recently_used_is_evicted() -> None:
    """One node with room for 3 prompts: of 3 chats in turn all are found again, of 4 none."""
    room = sizes(nodes=1, prompts=3)
    assert hit_blocks(run(chats(5, 3, every_s=10.0), PLACED, room)) == {"device": 4 * 3 * 7}
    none = run(chats(5, 4, every_s=10.0), PLACED, room)
    assert (hit_blocks(none), missed_blocks(none)) == ({}, {"evicted": 4 * 4 * 7})


def test_prompts_wait_for_the_engine() -> None:
    """Three different prompts at once on one node: the first tokens come after one, two and three seconds."""
    tally = run([prompt(n, 0.0, n) for n in range(3)], PLACED, sizes(nodes=1, prompts=4))
    assert [round(ttft_s, 6) for ttft_s in tally.ttft_s] == [1, 2, 3]
