"""Requests that only some prefill nodes can ever hold, and answers that have outgrown all of them. Pure."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import REGION_BLOCKS_KEY, BatonError, Code, Reason
from baton.ids import Attempt, Incarnation, NodeName, RequestId, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import BlockLoad, NodeLoad, NodeRecord, Role
from cachestore.holder_index import HolderIndex
from router.answers import Collected
from router.config import RouterConfig
from router.job import Job
from router.line import Place, Priority, Turns
from router.placement import (
    ANSWER_TOKENS_MIN,
    KernelWatch,
    RegionWatch,
    answer_tokens,
    outgrown,
    region_tokens,
    tokens_max,
)
from router.prefill_nodes import PrefillNodes
from router.request import CheckedRequest
from router.retries import Retries, RetryConfig
from router.text import AnswerText
from tests.support.router_records import MODEL, client_call

SIZE = MODEL.block_size


def node(
    number: int, blocks: int, *, role: Role = Role.PREFILL, lifecycle: Lifecycle = Lifecycle.READY, **load: Any
) -> NodeRecord:
    """With a region of so many blocks; 0: its record does not tell."""
    held = blocks // 3
    return NodeRecord(
        name=NodeName(f"node-{number}"), role=role, incarnation=Incarnation(number), sequence=1,
        endpoint=f"127.0.0.1:{number}", lifecycle=lifecycle, model=MODEL,
        load=NodeLoad(blocks=BlockLoad(held=held, free=blocks - held), **load),
    )  # fmt: skip


def with_pins(record: NodeRecord, pinned: int) -> NodeRecord:
    """So many of its blocks cached and kept by pins."""
    blocks = record.load.blocks
    blocks = replace(blocks, free=blocks.free - pinned, cached=pinned, pinned=pinned)
    return replace(record, load=replace(record.load, blocks=blocks))


def request(prompt: int, *, output: int = 0) -> Job:
    """One of so many tokens, whose client has so many of the answer."""
    checked = CheckedRequest(
        prompt=tuple(range(prompt)), sampling=common_pb2.SamplingSpec(), stop=(), include_stop=False
    )
    now_s = itertools.count().__next__
    job = Job(
        id=RequestId("r"),
        call=client_call(60.0),
        checked=checked,
        sink=Collected(),
        text=AnswerText(None, checked),
        config=RouterConfig(),
        turns=Turns(lambda _: None, now_s),
        now_s=now_s,
        began_s=0.0,
        place=Place(priority=Priority.NORMAL, rank=(0.0, 1), size_bytes=1),
        retries=Retries(config=RetryConfig(), search_ms_max=10_000),
        stats=inference_pb2.RequestStats(),
    )
    job.output += range(output)
    return job


def placed(nodes: PrefillNodes, job: Job) -> str:
    choice, _ = nodes.place(job, RequestKey(request=job.id, attempt=Attempt(0)), now_s=0.0)
    return choice.record.name


def refused(nodes: PrefillNodes, job: Job) -> BatonError:
    with pytest.raises(BatonError) as caught:
        placed(nodes, job)
    return caught.value


def among(*records: NodeRecord) -> PrefillNodes:
    nodes = PrefillNodes(HolderIndex(), lambda: 0.0)
    nodes.follow(records)
    return nodes


@pytest.mark.parametrize(("prompt", "output"), [(4 * SIZE + 1, 0), (SIZE, 3 * SIZE + 1)])
def test_only_a_node_that_can_hold_it_is_asked(prompt: int, output: int) -> None:
    """The idle node's region is a block too small for the prompt, or for prompt and answer so far: the busy one, whose
    region is not, gets it. What fits goes to the idle one."""
    nodes = among(node(1, 4), node(2, 5, waiting_tokens=10_000))
    assert placed(nodes, request(prompt, output=output)) == "node-2"
    assert placed(nodes, request(prompt - 1, output=output)) == "node-1"


def test_a_node_that_has_failed_the_request_is_asked_again_before_one_that_cannot_hold_it() -> None:
    """The large one did not answer; the small one would only refuse."""
    nodes = among(node(1, 4), node(2, 5))
    job = request(5 * SIZE)
    large = node(2, 5)
    gone = BatonError(Reason.PEER_UNREACHABLE, "It does not answer.")
    assert nodes.failed(job, large, gone, now_s=0.0) is gone
    assert not nodes.untried(job)
    assert placed(nodes, job) == "node-2"


def test_a_region_that_is_not_told_may_be_large_enough() -> None:
    """The node's own answer decides."""
    assert placed(among(node(1, 4), node(2, 0)), request(100 * SIZE)) == "node-2"


def test_a_prompt_that_no_region_holds_is_the_clients_error() -> None:
    """By the numbers, without a node being asked."""
    error = refused(among(node(1, 4), node(2, 6)), request(6 * SIZE + 1))
    assert (error.reason, error.code, error.field) == (Reason.PROMPT_TOO_LONG, Code.INVALID_ARGUMENT, "prompt")
    assert error.message == "The prompt's 97 tokens need 7 blocks; the largest region of a prefill node has 6."


def test_an_answer_that_has_outgrown_every_region_is_told_so() -> None:
    """It is no error of the client's, and no wait helps: not placed again, and what to do is said."""
    job = request(SIZE, output=6 * SIZE)
    error = refused(among(node(1, 4), node(2, 6)), job)
    assert (error.reason, error.code, error.field) == (Reason.NOT_RESUMABLE, Code.ABORTED, None)
    assert error.message.startswith(
        "The node that wrote this answer could not go on after 96 tokens, and prompt and answer so far, 112 tokens, "
        "fit nowhere to be taken up. They need 7 blocks; the largest region of a prefill node has 6."
    )
    assert "engine.num_blocks" in error.message
    with pytest.raises(BatonError) as reported:
        job.retries.judge(error, granted=False, now_s=0.0)
    assert reported.value is error


@pytest.mark.parametrize("output", [0, SIZE])
@pytest.mark.parametrize("lifecycle", [Lifecycle.STARTING, Lifecycle.CORDONED])
def test_a_region_that_is_not_ready_yet_is_waited_for(lifecycle: Lifecycle, output: int) -> None:
    """The only one that can hold the request is starting again, or cordoned."""
    job = request(5 * SIZE, output=output)
    error = refused(among(node(1, 4), node(2, 9, lifecycle=lifecycle)), job)
    assert error.reason is Reason.NO_PREFILL_NODE
    assert error.retry_after_ms is not None
    assert "node-2" in error.message
    job.retries.judge(error, granted=False, now_s=0.0)


def test_a_node_of_another_model_is_not_waited_for() -> None:
    """However large it is."""
    other = node(2, 100)
    assert other.model is not None
    other = replace(other, model=replace(other.model, fingerprint="another"), lifecycle=Lifecycle.CORDONED)
    error = refused(among(node(1, 4), other), request(5 * SIZE))
    assert (error.reason, "has 4." in error.message) == (Reason.PROMPT_TOO_LONG, True)


def test_the_nodes_own_word_counts_more_than_its_record() -> None:
    """Pinned prefixes take a part of a region, which its record does not tell. Another node is asked, and where all
    have said no, the client is told what the last one said."""
    records = (node(1, 5), node(2, 5, waiting_tokens=10))
    nodes, job = among(*records), request(5 * SIZE)
    assert placed(nodes, job) == "node-1"
    pinned = BatonError(
        Reason.PROMPT_TOO_LONG, "This node's region has 4.", field="prompt", metadata={REGION_BLOCKS_KEY: "4"}
    )
    again = nodes.failed(job, records[0], pinned, now_s=0.0)
    assert again.reason is Reason.NO_PREFILL_NODE
    job.retries.judge(again, granted=False, now_s=0.0)
    assert placed(nodes, job) == "node-2"
    assert nodes.failed(job, records[1], pinned, now_s=0.0) is pinned
    assert "less what pins and padding keep" in refused(nodes, job).message
    job.output.append(1)
    reported = nodes.failed(job, records[1], pinned, now_s=0.0)
    assert (reported.reason, "This node's region has 4." in reported.message) == (Reason.NOT_RESUMABLE, True)


def test_a_refusal_of_the_decode_nodes_is_passed_on() -> None:
    """It is not about the prefill node that tells it: no other one is asked. In the middle of an answer it is not the
    client's error, and a decode node that has held it may be on its way back."""
    records = (node(1, 5), node(2, 5))
    nodes, job = among(*records), request(SIZE)
    never = BatonError(Reason.PROMPT_TOO_LONG, "Prompt and answer need 9 blocks, the region has 5.")
    assert nodes.failed(job, records[0], never, now_s=0.0) is never
    assert not job.too_small
    job.output.append(1)
    assert nodes.failed(job, records[0], never, now_s=0.0).reason is Reason.NO_DECODE_NODE


def test_a_large_node_that_was_here_is_waited_for() -> None:
    """It has left the directory, as a node does that starts again: a prompt that only it could hold is no mistake of
    the client's, nor is an answer lost."""
    records = [node(1, 4), node(2, 9)]
    nodes = among(*records)
    nodes.follow(records[:1])
    for job in (request(8 * SIZE), request(SIZE, output=7 * SIZE)):
        assert refused(nodes, job).reason is Reason.NO_PREFILL_NODE
    assert refused(nodes, request(9 * SIZE + 1)).reason is Reason.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ((node(1, 4), node(2, 4, role=Role.DECODE)), None),
        ((node(1, 4), node(3, 5), node(2, 5, role=Role.DECODE)), None),
        ((node(1, 4), node(3, 3), node(2, 5, role=Role.DECODE)), (64, 80)),
        ((node(1, 6), node(2, 1_000, role=Role.DECODE)), (96, 100)),
        ((node(1, 7), node(2, 1_000, role=Role.DECODE)), None),  # the model's context ends it before
        ((node(1, 4), node(2, 5, role=Role.MIXED)), None),  # it reads prompts itself
        (
            (node(1, 4), node(2, 3, role=Role.MIXED), node(3, 5, role=Role.DECODE)),
            (64, 80),
        ),
        ((node(1, 0), node(2, 5, role=Role.DECODE)), None),
        ((node(2, 5, role=Role.DECODE),), None),
        ((node(1, 5),), None),
    ],
)  # fmt: skip
def test_whether_answers_may_outgrow_the_prefill_nodes(
    records: tuple[NodeRecord, ...], found: tuple[int, int] | None
) -> None:
    """By the largest region of each kind, and by the model's context of 100 tokens."""
    shuffled = list(records)
    random.Random(1).shuffle(shuffled)
    assert outgrown(shuffled) == found


def test_the_log_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Reports come all the time. A line when it becomes so, one when it becomes otherwise so, none when it ends."""
    watch, decode = RegionWatch(), node(2, 6, role=Role.DECODE)
    with caplog.at_level(logging.WARNING):
        for blocks in (6, 4, 4, 6, 4, 5, 5):
            watch.look((node(1, blocks), decode))
    reported = [record.baton_fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [fields["tokens_to_be_resumed_max"] for fields in reported] == [64, 64, 80]
    assert {fields["tokens_max"] for fields in reported} == {96}


def computing(number: int, kernel_set: str) -> NodeRecord:
    return replace(node(number, 5), model=replace(MODEL, kernel_set=kernel_set))


def test_a_pool_of_different_kernels_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nodes come with each report. A line when they differ, one when they differ otherwise; a node that does not say,
    and a router, differ from nobody."""
    watch, first, second, silent = KernelWatch(), computing(1, "amx"), computing(2, "avx2"), computing(3, "")
    router = replace(node(4, 0, role=Role.ROUTER), model=None)
    seen = [(), (first, silent, router), (first, second), (second, first, silent), (first,), (first, second, router)]
    with caplog.at_level(logging.WARNING):
        for records in (*seen, (first, second, computing(5, "neon"))):
            watch.look(records)
    reported = [record.baton_fields["kernels"] for record in caplog.records]  # type: ignore[attr-defined]
    assert reported == ["amx, avx2", "amx, avx2", "amx, avx2, neon"]


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ((), 100),
        ((node(1, 7), node(2, 7, role=Role.DECODE)), 100),
        ((node(1, 4), node(2, 7, role=Role.DECODE)), 64),
        ((node(1, 7), node(2, 4, role=Role.DECODE), node(3, 5, role=Role.DECODE)), 80),
        ((node(1, 3, role=Role.MIXED),), 48),
        ((node(1, 3, role=Role.MIXED), node(2, 5)), 48),
        ((node(1, 0), node(2, 5, role=Role.DECODE)), 80),
        ((node(1, 2), replace(node(2, 1, role=Role.DECODE), model=replace(MODEL, fingerprint="other"))), 32),
    ],
)
def test_how_long_a_request_may_be(records: tuple[NodeRecord, ...], found: int) -> None:
    """By the largest region of each kind: both have to hold it. Nodes of another model do not count."""
    assert tokens_max(records, MODEL) == found


def test_two_groups_of_layers_halve_what_a_region_holds() -> None:
    """Nine blocks of 16 tokens are four positions with a block of each group, and one block over."""
    model = replace(MODEL, layer_groups=2)
    records = [
        replace(node(number, 9, role=role), model=model) for number, role in ((1, Role.PREFILL), (2, Role.DECODE))
    ]
    assert [region_tokens(record) for record in records] == [64, 64]
    assert tokens_max(records, model) == 64
    assert tokens_max([with_pins(record, 4) for record in records], model) == 32
    assert [model.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 2, 2, 4]


def test_what_pins_keep_is_no_part_of_a_request() -> None:
    """Nor does a node without room beside its pins count as one whose region is not known."""
    decode = node(2, 6, role=Role.DECODE)
    assert tokens_max((node(1, 7), with_pins(decode, 2)), MODEL) == 64
    assert tokens_max((with_pins(node(1, 7), 1), decode), MODEL) == 96
    assert tokens_max((with_pins(node(1, 4), 1), decode), MODEL) == 48
    assert tokens_max((with_pins(node(1, 3), 2), node(3, 2), decode), MODEL) == 32
    assert tokens_max((with_pins(replace(node(1, 2), load=NodeLoad(blocks=BlockLoad(free=2))), 2), decode), MODEL) == 0


def test_the_log_is_told_of_regions_below_the_context(caplog: pytest.LogCaptureFixture) -> None:
    """Each length once, however often nodes report and whatever pins keep; none where all of the context fits, or
    nobody is there. A prompt has to fit on both sides, with its answer on a decode node: the same bound there as where
    the log tells that answers may outgrow the prefill nodes."""
    watch, decode = RegionWatch(), node(2, 7, role=Role.DECODE)
    with caplog.at_level(logging.INFO):
        watch.look(())
        for blocks in (7, 5, 5, 7, 5, 4):
            watch.look((node(1, blocks), decode))
        for pinned in (1, 0):
            watch.look((with_pins(node(1, 4), pinned), decode))
        watch.look((node(1, 4), node(2, 6, role=Role.DECODE)))
    reported = [
        record.baton_fields  # type: ignore[attr-defined]
        for record in caplog.records
        if record.getMessage().startswith("requests that no region holds are refused")
    ]
    assert [tuple(fields.values()) for fields in reported] == [
        (80, 100, 100), (80, 100, 100), (64, 100, 100), (64, 96, 100)
    ]  # fmt: skip


def test_an_answer_without_a_limit_takes_a_share_of_the_smallest_decode_region() -> None:
    """Regions of 6,401 and 3,201 blocks, both ready, and smaller ones that are draining or only prefill: 32 requests
    of 100 tokens with the answer that each may have fit the smaller one beside a block of its engine's own."""
    records = (
        node(1, 6_401, role=Role.DECODE),
        node(2, 3_201, role=Role.MIXED),
        node(3, 100, role=Role.DECODE, lifecycle=Lifecycle.DRAINING),
        node(4, 100),
    )
    model = replace(MODEL, context_len_max=100_000)
    assert answer_tokens(100, records, model) == 100 * SIZE - 100
    assert 32 * -(-(100 + answer_tokens(100, records, model)) // SIZE) + 1 == 3_201
    pinned = (*records, with_pins(node(5, 3_201, role=Role.DECODE), 320))
    assert answer_tokens(100, pinned, model) == 90 * SIZE - 100


def test_an_answer_without_a_limit_has_some_tokens_wherever_the_context_leaves_them() -> None:
    """A small region, no region that is known, and a prompt of more than its share: 256 tokens, or what is left."""
    model = replace(MODEL, context_len_max=5_000)
    small = (node(1, 64, role=Role.DECODE),)
    for records in (small, (), (node(1, 0, role=Role.DECODE),)):
        assert answer_tokens(100, records, model) == ANSWER_TOKENS_MIN == 256
    large = (node(1, 32 * 1_000 + 1, role=Role.DECODE),)
    assert answer_tokens(100, large, model) == min(1_000 * SIZE, 5_000) - 100
    assert answer_tokens(4_900, large, model) == 100
    assert answer_tokens(4_900, small, model) == 100
