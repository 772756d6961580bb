"""The whole cluster against transformers: separate processes, real weights, greedy tokens equal token for token.

Every freed block is filled with NaN on every node, so a block that is read after it was freed, or before it has landed,
changes the answer. tests/support/reference_model.py says what "equal" means where two scores tie.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from batonpb import common_pb2
from tokenizers import Tokenizer

from engine.demo_model import EOS_ID
from engine.types import SamplingParams
from tests.support.cluster_harness import Answer, assert_conserved
from tests.support.exactness_cluster import (
    AT_ONCE,
    LENGTH_MAX,
    LLAMA,
    NEW_TOKENS,
    QWEN3,
    VOCAB,
    Prompt,
    Served,
    random_prompt,
    serving,
)
from tests.support.reference_model import TIE_TOLERANCE, OneProcess, Tie

pytestmark = pytest.mark.slow

TIES_SHARE_MAX: Final = 0.002
"""Of all tokens: about five in ten thousand have two best scores within the tolerance; rounding turns few of these."""
SENDS_MAX: Final = 60
SAMPLING_SEED: Final = 4
"""So chosen that no draw is decided by rounding, which the test checks."""
STOP: Final = common_pb2.FINISH_REASON_STOP
LENGTH: Final = common_pb2.FINISH_REASON_LENGTH
RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="module", params=[LLAMA, QWEN3], ids=["llama", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp("exactness") / "model") as served:
        yield served


def report(record_property: RecordProperty, answers: Sequence[Answer], ties: Sequence[Tie]) -> None:
    """Record how many ties there were (shown with -rA too); too many are no rounding."""
    tokens = sum(len(answer.ids) for answer in answers)
    record_property("prompts", len(answers))
    record_property("tokens", tokens)
    record_property("ties", len(ties))
    print(f"{len(answers)} prompts, {tokens} tokens, {len(ties)} ties {list(ties)}")
    assert len(ties) <= TIES_SHARE_MAX * tokens, f"{len(ties)} of {tokens} tokens are ties: {list(ties)}"


def test_tolerance_is_what_rounding_allows(served: Served, record_property: RecordProperty) -> None:
    """float32 against float64 in the reference itself: four times the largest error is within the tolerance."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 200, 1_000, LENGTH_MAX)]
    worst = 0.0
    for prompt, answer in zip(prompts, served.reference.generate(prompts, max_new=NEW_TOKENS), strict=True):
        worst = max(worst, served.reference.rounding(prompt, answer))
    record_property("rounding", worst)
    print(f"float32 is off by at most {worst:.1e}")
    assert 0 < 4 * worst < TIE_TOLERANCE


def test_greedy_answers_equal_generate(served: Served, record_property: RecordProperty) -> None:
    """Prompts of 1 to 2,000 tokens around block and chunk boundaries, one at a time and sixteen at once."""
    rng = random.Random(2)
    alone = [random_prompt(rng, length) for length in served.setup.lengths_alone()]
    crowd = [random_prompt(rng, length) for length in served.setup.lengths()]
    rng.shuffle(crowd)
    answers = served.ask(alone, at_once=1) + served.ask(crowd)
    ties = served.check(alone + crowd, answers)
    assert len(answers) >= 90
    assert {a.stats.prefill_node for a in answers} == {"prefill-0", "prefill-1"}
    assert {a.stats.decode_node for a in answers} - {""} == {"decode-0", "decode-1"}
    assert len({token for a in answers for token in a.ids}) > 100, "the answers are too monotonous to show anything"
    report(record_property, answers, ties)
    served.cluster.run(assert_conserved(served.cluster))


def send_until_everywhere(served: Served, prompt: Prompt) -> list[Answer]:
    """Send one prompt again and again until both prefill nodes and both decode nodes have had it."""
    answers: list[Answer] = []
    while len({a.stats.prefill_node for a in answers} | {a.stats.decode_node for a in answers}) < 4:
        assert len(answers) < SENDS_MAX, "some node never gets a request"
        # Several at a time: a lone prompt would go to the prefill node that has it, every time.
        answers += served.ask([prompt] * 8, at_once=8)
        for nodes in ({a.stats.prefill_node for a in answers}, {a.stats.decode_node for a in answers}):
            if len(nodes) == 1:
                # A node that has the prompt goes first; the other one gets it while that one takes nothing.
                (has_it,) = nodes
                served.cluster.run(served.cluster.order(has_it, "Cordon"))
                answers += served.ask([prompt], at_once=1)
                served.cluster.run(served.cluster.order(has_it, "Uncordon"))
    return answers


def test_prefix_hits_on_both_sides_change_nothing(served: Served, record_property: RecordProperty) -> None:
    """One prompt on every node; then the same again, its beginnings with other ends, and its answer's next turn.

    What a node has cached is not computed or not sent again, and the tokens stay those of `generate`.
    """
    size, rng = served.setup.block_size, random.Random(3)
    base = random_prompt(rng, 10 * size - 8)  # its answer fills a block that only decode nodes have
    sent = send_until_everywhere(served, base)
    cold = next(a for a in sent if a.stats.blocks_skipped == 0)
    assert cold.stats.blocks_written == 10
    assert any(answer.stats.prompt_tokens_cached == 0 for answer in sent), "somebody was the first"

    again = served.ask([base], at_once=1)
    assert (again[0].stats.blocks_skipped, again[0].stats.blocks_written) == (9, 1)
    assert again[0].stats.prompt_tokens_cached == 9 * size
    assert 0 < again[0].stats.bytes_written < cold.stats.bytes_written

    whole = random_prompt(rng, 3 * size)
    wholes = send_until_everywhere(served, whole) + served.ask([whole], at_once=1)
    assert (wholes[-1].stats.blocks_skipped, wholes[-1].stats.blocks_written, wholes[-1].stats.bytes_written) == (
        3,
        0,
        0,
    )
    assert wholes[-1].stats.prompt_tokens_cached == 2 * size, "at least one token is always computed"

    cuts = [blocks * size + side for blocks in (1, 2, 5, 9) for side in (-1, 0, 1)]
    branches = [base[:cut] + random_prompt(rng, length) for cut in cuts for length in (1, size, 2 * size + 3)]
    branched = served.ask(branches)
    for prompt, answer in zip(branches, branched, strict=True):
        shared = next(i for i, (a, b) in enumerate(zip(prompt, [*base, -1], strict=False)) if a != b) // size
        assert answer.stats.blocks_skipped >= shared, "both decode nodes have these blocks"

    turn = base + cold.ids + random_prompt(rng, 5)
    turns = served.ask([turn], at_once=1)
    assert len(cold.ids) > 8, "the answer must fill the block"
    assert turns[0].stats.blocks_skipped * size > turns[0].stats.prompt_tokens_cached, "only decode has the answer"

    prompts = [base] * len(sent) + [base] + [whole] * len(wholes) + branches + [turn]
    answers = sent + again + wholes + branched + turns
    assert any(a.stats.prompt_tokens_cached > 0 for a in branched)
    report(record_property, answers, served.check(prompts, answers))
    served.cluster.run(assert_conserved(served.cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A sampled request."""

    prompt: Prompt
    params: SamplingParams

    @property
    def fields(self) -> dict[str, Any]:
        p = self.params
        return {
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "seed": p.seed,
            "max_tokens": p.max_tokens,
        }


def sampled_requests(rng: random.Random) -> list[Draw]:
    """Sixteen with every filter alone, both and none, at several temperatures; lengths of one token to six chunks."""
    filters = [(0, 1.0), (1, 1.0), (5, 1.0), (40, 1.0), (0, 0.95), (0, 0.5), (0, 0.05), (40, 0.9)]
    requests = []
    for index in range(AT_ONCE):
        top_k, top_p = filters[index % len(filters)]
        params = SamplingParams(
            temperature=(0.5, 1.0, 1.7, 4.0)[index % 4 if index < len(filters) else 3 - index % 4],
            top_k=top_k,
            top_p=top_p,
            seed=rng.getrandbits(64),
            max_tokens=NEW_TOKENS,
        )
        requests.append(Draw(prompt=random_prompt(rng, rng.choice([1, 17, 64, 129, 300, 777])), params=params))
    return requests


def test_sampled_answers_are_the_same_alone_and_in_any_batch(served: Served) -> None:
    """Each request alone, then all sixteen at once in two orders: the same tokens, whichever nodes they meet.

    They are also those of one process that runs all in one batch, and each is the one that the sampler draws from the
    reference's scores, with a lead that no rounding takes away.
    """
    rng = random.Random(SAMPLING_SEED)
    requests = sampled_requests(rng)
    alone = served.ask_each([(r.prompt, r.fields) for r in requests], at_once=1)
    nodes = [{(a.stats.prefill_node, a.stats.decode_node)} for a in alone]
    for _ in range(2):
        order = rng.sample(range(len(requests)), len(requests))
        crowd = served.ask_each([(requests[i].prompt, requests[i].fields) for i in order], at_once=AT_ONCE)
        for i, answer in zip(order, crowd, strict=True):
            assert (answer.ids, answer.reason) == (alone[i].ids, alone[i].reason), requests[i].params
            nodes[i].add((answer.stats.prefill_node, answer.stats.decode_node))
    assert max(map(len, nodes)) > 1, "no request has met other nodes"

    single = OneProcess(
        served.folder,
        block_size=served.setup.block_size,
        num_blocks=1_000,
        tokens_per_step_max=served.setup.tokens_per_step_max,
    )
    in_one_process = single.answers([(r.prompt, r.params) for r in requests])
    for request, answer, single_ids in zip(requests, alone, in_one_process, strict=True):
        assert answer.ids == single_ids, request.params
        drawn, lead = served.reference.draws(request.prompt, answer.ids, request.params)
        assert answer.ids == drawn, request.params
        assert lead > TIE_TOLERANCE / request.params.temperature, (request.params, lead, "choose another SAMPLING_SEED")
    assert len({tuple(a.ids) for a in alone}) == AT_ONCE
    served.cluster.run(assert_conserved(served.cluster))


def test_other_seeds_draw_other_tokens(served: Served) -> None:
    """The same prompt eight times: one seed gives one answer, eight seeds eight; without a seed they differ too."""
    prompt = random_prompt(random.Random(5), 40)
    same = served.ask([prompt] * 8, temperature=2.0, ignore_eos=True, seed=2**64 - 1)
    assert len({tuple(a.ids) for a in same}) == 1
    seeded = served.ask_each(
        [(prompt, {"temperature": 2.0, "ignore_eos": True, "seed": i, "max_tokens": NEW_TOKENS}) for i in range(8)],
        at_once=8,
    )
    assert len({tuple(a.ids) for a in seeded}) == 8
    unseeded = served.ask([prompt] * 8, temperature=2.0, ignore_eos=True)
    assert len({tuple(a.ids) for a in unseeded}) == 8


def test_the_end_token_ends_an_answer_as_in_generate(served: Served) -> None:
    """Answers in which the model draws its end token: it is the last token, reason STOP. With ignore_eos they go on."""
    rng = random.Random(6)
    prompts = [random_prompt(rng, 30) for _ in range(160)]
    expected = served.reference.generate(prompts, max_new=NEW_TOKENS)
    ending = [i for i, answer in enumerate(expected) if answer[-1] == EOS_ID and len(answer) < NEW_TOKENS][:6]
    assert len(ending) >= 2, "no answer ends; choose another seed"
    chosen = [prompts[i] for i in ending]
    for answer, index in zip(served.ask(chosen), ending, strict=True):
        assert (answer.ids, answer.reason) == (expected[index], STOP)
    on = served.reference.generate(chosen, max_new=NEW_TOKENS, eos_token_ids=())
    for answer, right in zip(served.ask(chosen, ignore_eos=True), on, strict=True):
        assert (answer.ids, answer.reason) == (right, LENGTH)
    served.cluster.run(assert_conserved(served.cluster))


def test_stop_tokens_and_limits_end_an_answer_as_in_generate(served: Served) -> None:
    """Stop tokens at the first, a middle and the last place, max_tokens from 1 on, and the end of the context."""
    rng = random.Random(7)
    prompt = random_prompt(rng, 50)
    whole = served.reference.generate([prompt], max_new=NEW_TOKENS, eos_token_ids=())[0]
    for place in (0, 1, 7, NEW_TOKENS - 1):
        stops = [whole[place], VOCAB - 1]
        right = served.reference.generate([prompt], max_new=NEW_TOKENS, eos_token_ids=stops)[0]
        answer = served.ask([prompt], stop_token_ids=stops, ignore_eos=True)[0]
        assert (answer.ids, answer.reason) == (right, STOP), place
        assert (answer.stats.decode_node == "") == (len(right) == 1), "an answer of one token needs no decode node"
    for limit in (1, 2, 15, 16, 17):
        answer = served.ask([prompt], max_tokens=limit, ignore_eos=True)[0]
        assert (answer.ids, answer.reason) == (whole[:limit], LENGTH)
        assert (answer.stats.decode_node == "") == (limit == 1)
    context = served.setup.model.context_len_max
    for room in (1, 2, 5):
        long = random_prompt(rng, context - room)
        right = served.reference.generate([long], max_new=room, eos_token_ids=())[0]
        answer = served.ask([long], max_tokens=100, ignore_eos=True)[0]
        assert (answer.ids, answer.reason) == (right, LENGTH)
    served.cluster.run(assert_conserved(served.cluster))


def test_text_in_and_out_is_that_of_the_tokenizer(served: Served) -> None:
    """A text prompt gives the answer of its token ids; the streamed text is the decoded answer, broken bytes too."""
    tokenizer = Tokenizer.from_file(str(served.folder / "tokenizer.json"))
    texts = ["Tell me about the river.", " leading space", "naïve café, 東京 and 🦊🦊\n", "x" * 700]
    by_text = served.ask_each([(text, {"max_tokens": NEW_TOKENS}) for text in texts], at_once=len(texts))
    ids = [tokenizer.encode(text).ids for text in texts]
    by_ids = served.ask(ids)
    assert [a.ids for a in by_text] == [a.ids for a in by_ids]
    assert [a.stats.prompt_tokens for a in by_text] == [len(i) for i in ids]
    served.check(ids, by_ids)

    # A high temperature draws single bytes of characters, which the greedy answers of this model never have.
    wild = served.ask(ids, temperature=50.0, seed=1, ignore_eos=True)
    for answer in by_text + by_ids + wild:
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert any("\ufffd" in answer.text for answer in wild)
    assert max(answer.batches for answer in by_text) > 1, "nothing was streamed"
    unary = served.cluster.run(served.cluster.client.unary(texts[2], max_tokens=NEW_TOKENS))
    assert (unary.text, list(unary.ids)) == (by_text[2].text, by_text[2].ids)


def test_answers_are_exact_while_memory_is_short(
    tmp_path_factory: pytest.TempPathFactory, record_property: RecordProperty
) -> None:
    """Regions hold one or two long prompts: decode nodes answer BUSY, everybody evicts, and no token changes."""
    setup = replace(LLAMA, num_blocks=160)
    rng = random.Random(8)
    stem = random_prompt(rng, 600)
    prompts = []
    for index, length in enumerate([1, 40, 333, 900, 1_500, LENGTH_MAX] * 6):
        shared = stem[: length - 1] if index % 3 == 0 else []
        prompts.append(shared + random_prompt(rng, length - len(shared)))
    folder = tmp_path_factory.mktemp("pressure") / "model"
    with serving(setup, folder, node_flags={"prefill-1": {"engine.num_blocks": 400}}) as served:
        answers = served.ask(prompts) + served.ask(prompts[:12])
        report(record_property, answers, served.check(prompts + prompts[:12], answers))
        blocks = Counter[str]()
        for answer in answers:
            computed = answer.stats.prompt_tokens - answer.stats.prompt_tokens_cached
            blocks[answer.stats.prefill_node] += computed // setup.block_size
            blocks[answer.stats.decode_node] += answer.stats.blocks_written
        assert min(blocks[name] for name in ("prefill-0", "decode-0", "decode-1")) > 2 * setup.num_blocks, blocks
        logs = "".join(served.cluster.log_text(name) for name in ("prefill-0", "prefill-1"))
        assert "not granted" in logs, "no decode node was ever busy"
        served.cluster.run(assert_conserved(served.cluster))
