"""Which decode nodes a prefill node asks, in which order, and the error when there is nobody to ask."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import BlockLoad, ModelInfo, NodeLoad, NodeRecord, Role
from node.pool import DevicePool
from prefill_node.decode_nodes import DecodeAffinity, may_hold, order_decode_nodes, room

MODEL = ModelInfo(
    name="m",
    fingerprint="f",
    vocab_size=100,
    context_len_max=1_000,
    eos_token_ids=(1,),
    layout_hash="l",
    block_size=16,
    protocol_min=1,
    protocol_max=1,
)


def node(number: int, *, blocks: BlockLoad | None = None, lifecycle: Lifecycle = Lifecycle.READY) -> NodeRecord:
    return NodeRecord(
        name=NodeName(f"decode-{number}"),
        role=Role.DECODE,
        incarnation=Incarnation(number + 1),
        endpoint=f"127.0.0.1:{number + 1}",
        lifecycle=lifecycle,
        model=MODEL,
        load=NodeLoad(blocks=blocks or BlockLoad(free=100)),
    )


def order(
    records: Sequence[NodeRecord],
    *,
    behind: frozenset[str] = frozenset(),
    seed: int = 0,
    tries_max: int = 3,
    blocks: int = 0,
    avoid: frozenset[int] = frozenset(),
    avoided_too: bool = True,
) -> list[str]:
    found = order_decode_nodes(
        records,
        own=MODEL,
        may_place=lambda record: record.name not in behind,
        rng=random.Random(seed),
        tries_max=tries_max,
        affinity=DecodeAffinity(blocks_max=1),
        blocks=blocks,
        avoid=avoid,
        avoided_too=avoided_too,
    )
    return [record.name for record in found]


def refusal(records: Sequence[NodeRecord], **how: Any) -> BatonError:
    with pytest.raises(BatonError) as caught:
        order(records, **how)
    return caught.value


def test_room_is_what_nobody_owns_less_what_is_promised() -> None:
    """Free and cached blocks count, promised ones do not; held, written and quarantined ones never do."""
    blocks = BlockLoad(free=10, cached=7, promised=4, held=100, writer_owned=50, quarantined=3)
    assert room(node(0, blocks=blocks)) == 13


def test_of_two_nodes_the_roomier_is_asked_first() -> None:
    """With two nodes both are always drawn: the roomier one first, whatever the randomness."""
    records = [node(0, blocks=BlockLoad(free=5)), node(1, blocks=BlockLoad(free=2, cached=4))]
    assert {tuple(order(records, seed=seed)) for seed in range(20)} == {("decode-1", "decode-0")}


def test_equal_nodes_share_the_load() -> None:
    """Four idle nodes, 400 requests: each is the first choice of 60 to 140, not one of all."""
    records = [node(i) for i in range(4)]
    first = Counter(order(records, seed=seed)[0] for seed in range(400))
    assert len(first) == 4
    assert all(60 <= count <= 140 for count in first.values()), first


def test_the_fullest_of_three_is_never_asked_first() -> None:
    """Power of two choices: the fullest node loses to whichever node it is drawn with."""
    records = [node(i, blocks=BlockLoad(free=free)) for i, free in enumerate((50, 1, 60))]
    assert "decode-1" not in {order(records, seed=seed)[0] for seed in range(50)}
    assert "decode-0" in {order(records, seed=seed)[0] for seed in range(50)}, (
        "the best is not everybody's first choice"
    )


@given(count=st.integers(1, 8), tries_max=st.integers(1, 10), seed=st.integers(0, 99))
def test_no_more_than_the_limit_and_none_twice(count: int, tries_max: int, seed: int) -> None:
    """As many different nodes as there are, and no more than may be tried."""
    names = order([node(i) for i in range(count)], seed=seed, tries_max=tries_max)
    assert len(names) == len(set(names)) == min(count, tries_max)


def test_a_node_that_is_behind_with_its_writes_is_left_out() -> None:
    """Nothing new is placed where the unacknowledged writes have reached their limit; all of them: full."""
    records = [node(0), node(1)]
    assert order(records, behind=frozenset({"decode-0"})) == ["decode-1"]
    error = refusal(records, behind=frozenset({"decode-0", "decode-1"}))
    assert (error.reason, error.retry_after_ms) == (Reason.DECODE_FULL, 200)
    assert "All 2 decode nodes" in error.message


@pytest.mark.parametrize("lifecycle", [state for state in Lifecycle if state is not Lifecycle.READY])
def test_only_ready_nodes_are_asked(lifecycle: Lifecycle) -> None:
    """A node that starts, is cordoned, drains or stops gets nothing new."""
    assert order([node(0, lifecycle=lifecycle), node(1)]) == ["decode-1"]
    error = refusal([node(0, lifecycle=lifecycle)])
    assert (error.reason, error.retry_after_ms) == (Reason.NO_DECODE_NODE, 1_000)
    assert "1 known" in error.message


def test_no_decode_node_at_all() -> None:
    """The error says that none is known."""
    error = refusal([])
    assert error.reason is Reason.NO_DECODE_NODE
    assert "0 known" in error.message


def test_nodes_that_differ_are_never_asked_and_the_error_says_in_what() -> None:
    """Other weights, or another layout: passed over; with no other node there, each is named with its difference."""
    weights = replace(node(0), model=replace(MODEL, fingerprint="g"))
    layout = replace(node(1), model=replace(MODEL, layout_hash="k"))
    assert order([weights, layout, node(2)]) == ["decode-2"]
    error = refusal([weights, layout])
    assert error.reason is Reason.INCOMPATIBLE_NODE
    assert error.message.index("decode-0: ") < error.message.index("decode-1: ")


def test_a_node_without_a_model_is_not_ready() -> None:
    """A record without a model cannot be compared: nobody writes there."""
    assert order([replace(node(0), model=None), node(1)]) == ["decode-1"]


def test_nodes_to_avoid_are_asked_only_where_there_is_no_other() -> None:
    """Of three nodes the roomiest one is to be avoided: never asked beside others, and asked alone where these are
    behind with their writes, unless the caller would rather have nobody asked then."""
    records = [node(0, blocks=BlockLoad(free=500)), node(1), node(2)]
    avoid = frozenset({records[0].incarnation})
    others = frozenset({"decode-1", "decode-2"})
    for seed in range(20):
        assert sorted(order(records, seed=seed, avoid=avoid)) == ["decode-1", "decode-2"]
        assert order(records, behind=others, seed=seed, avoid=avoid) == ["decode-0"]
        assert sorted(order(records, seed=seed, avoid=avoid, avoided_too=False)) == ["decode-1", "decode-2"]
    error = refusal(records, behind=others, avoid=avoid, avoided_too=False)
    assert error.reason is Reason.NO_DECODE_NODE
    assert "This node reaches 1 decode nodes; the router reaches none" in error.message


SMALL, LARGE = BlockLoad(free=50), BlockLoad(held=190, free=10)


def test_tries_are_not_spent_on_nodes_that_can_never_hold_it() -> None:
    """Twenty small nodes, all idle, and a large one that is nearly full: a request of 60 blocks goes to the large one
    alone, one of 50 to the idle ones too."""
    records = [*(node(i, blocks=SMALL) for i in range(20)), node(20, blocks=LARGE)]
    assert {tuple(order(records, seed=seed, blocks=60)) for seed in range(50)} == {("decode-20",)}
    assert {len(order(records, seed=seed, blocks=50)) for seed in range(50)} == {3}


def test_where_all_are_too_small_they_say_so_themselves() -> None:
    """No report is taken for the truth where it leaves nobody: the nodes are asked, as if nothing were known."""
    records = [node(i, blocks=SMALL) for i in range(3)]
    assert [order(records, seed=seed, blocks=60) for seed in range(9)] == [order(records, seed=s) for s in range(9)]


def test_a_large_node_that_takes_nothing_now_is_waited_for() -> None:
    """The small ones would refuse for good. So the request comes again, and is told who is waited for."""
    records = [node(0, blocks=SMALL), node(1, blocks=LARGE), node(2, blocks=SMALL)]
    error = refusal(records, behind=frozenset({"decode-1"}), blocks=60)
    assert (error.reason, error.retry_after_ms) == (Reason.DECODE_FULL, 200)
    assert "The decode nodes that are large enough for the request (decode-1; 1 of 3) are behind" in error.message


def test_a_node_to_avoid_is_asked_where_the_others_are_too_small() -> None:
    """The router could not reach it with this request. It is the only one that could ever take it."""
    records = [node(0, blocks=SMALL), node(1, blocks=LARGE)]
    assert order(records, blocks=60, avoid=frozenset({records[1].incarnation})) == ["decode-1"]


def test_what_pins_keep_is_nobodys_and_an_unknown_region_may_be_large() -> None:
    """A region of 100 blocks with 30 pinned holds requests of up to 70. A record without a load tells nothing."""
    pinned = node(0, blocks=BlockLoad(held=20, cached=40, pinned=30, free=40))
    assert [may_hold(pinned, blocks) for blocks in (70, 71)] == [True, False]
    assert may_hold(replace(pinned, load=NodeLoad()), 10_000)


@pytest.mark.parametrize(
    ("tokens", "prompt", "max_tokens", "blocks"),
    [
        pytest.param(16, 16, 1, 2, id="the decode node counts one more than the prompt"),
        pytest.param(15, 15, 17, 2, id="the last token's KV is never written"),
        pytest.param(16, 16, 18, 3, id="one token more"),
        pytest.param(40, 10, 50, 4, id="in the middle of its answer"),
        pytest.param(100, 100, 10_000, 63, id="to the end of the context"),
    ],
)
def test_what_a_request_comes_to_hold(tokens: int, prompt: int, max_tokens: int, blocks: int) -> None:
    """Blocks of 16 and a context of 1,000, as the decode node counts them itself."""
    model = replace(MODEL, context_len_max=1_000, block_size=16)
    plain: Any = SimpleNamespace(model=model)
    held = DevicePool.footprint(plain, tokens, prompt, max_tokens)
    grouped: Any = SimpleNamespace(model=replace(model, layer_groups=3))
    assert DevicePool.footprint(grouped, tokens, prompt, max_tokens) == 3 * held
    assert held == blocks
