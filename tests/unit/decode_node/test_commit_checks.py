"""What a decode node refuses of a Reserve and a Commit, before one bad value ends every sequence of its batch."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from batonpb import common_pb2, prefill_pb2, transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import Epoch, GrantId, Incarnation, Pair, ReserveNumber
from engine.types import sampling_problem
from kvtransfer.protocol.receiver import GrantState
from kvtransfer.transport import Seal
from prefill_node.job import check_fits
from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import ask_exactly, inprocess, until
from tests.unit.decode_node.test_resumed_first import Asker, id_of

VOCAB = 1000
"""Of the mock engine."""


def spec_of(**values: Any) -> common_pb2.SamplingSpec:
    bias = values.pop("logit_bias", {})
    spec = common_pb2.SamplingSpec(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 8, **values})
    spec.logit_bias.update(bias)
    return spec


BAD_SAMPLING: dict[str, tuple[common_pb2.SamplingSpec, str]] = {
    "temperature": (spec_of(temperature=math.nan), "not a finite number"),
    "negative temperature": (spec_of(temperature=-1.0), "out of range"),
    "top_p": (spec_of(top_p=0.0), "out of range"),
    "min_p": (spec_of(min_p=math.nan), "out of range"),
    "repetition_penalty": (spec_of(repetition_penalty=0.0), "out of range"),
    "presence_penalty": (spec_of(presence_penalty=math.inf), "not a finite number"),
    "frequency_penalty": (spec_of(frequency_penalty=-math.inf), "not a finite number"),
    "logit_bias": (spec_of(logit_bias={3: math.nan}), "not a finite number"),
    "logit_bias id": (spec_of(logit_bias={VOCAB: 1.0}), "token id 1000, outside the vocabulary of 1000"),
    "stop_token_ids": (spec_of(stop_token_ids=[VOCAB + 1]), "token id 1001, outside the vocabulary of 1000"),
    "logprobs": (spec_of(logprobs=VOCAB + 1), "out of range"),
    "min_tokens": (spec_of(min_tokens=9), "out of range"),
}


@pytest.mark.parametrize("name", BAD_SAMPLING)
def test_sampling_that_cannot_be_drawn_by_is_refused(name: str) -> None:
    """Each field with a value that no router lets through: the check names the problem, and the prefill node refuses
    the request at its door."""
    spec, says = BAD_SAMPLING[name]
    problem = sampling_problem(spec, vocab_size=VOCAB)
    assert problem is not None and says in problem
    pool: Any = SimpleNamespace(runner=SimpleNamespace(vocab_size=VOCAB, context_len_max=100))
    request = prefill_pb2.PrefillRequest(prompt=[1, 2], sampling=spec)
    with pytest.raises(BatonError, match=says) as caught:
        check_fits(request, pool)
    assert (caught.value.reason, caught.value.field) == (Reason.SAMPLING_OUT_OF_RANGE, "sampling")


def test_the_edges_of_what_can_be_drawn_by_are_allowed() -> None:
    """The largest and smallest values within each range."""
    edges = spec_of(
        temperature=0.0,
        min_p=1.0,
        repetition_penalty=1e-3,
        presence_penalty=-2.0,
        logit_bias={0: -100.0, VOCAB - 1: 100.0},
        stop_token_ids=[VOCAB - 1],
        logprobs=VOCAB,
        min_tokens=8,
    )
    assert sampling_problem(edges, vocab_size=VOCAB) is None


def test_a_reserve_with_bad_sampling_is_rejected() -> None:
    """Nothing is granted for it, and the node keeps nothing of it."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            request = transfer_pb2.ReserveRequest(
                number=1,
                lowest_live=1,
                key=common_pb2.RequestKey(request=id_of(1), attempt=1),
                prompt=[1] * 40,
                sampling=spec_of(logit_bias={VOCAB: 1.0}),
                deadline_left_ms=60_000,
            )
            reject = decode.reserve(request, asker.pair).reject.reason
            assert "a sampling parameter names token id 1000, outside the vocabulary of 1000" in reject
            assert decode.requests == 0
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_reserve_that_breaks_the_node_gets_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that no check knows raises where the sequence is made: the error is the writer's answer, and no block is
    set aside. The same Reserve is granted once the sequence can be made, and a repeat gets the same grant."""

    def broken(spec: common_pb2.SamplingSpec) -> None:
        raise ValueError(f"top_k is {spec.top_k}")

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            with monkeypatch.context() as patched:
                patched.setattr("decode_node.reserving.params_from_proto", broken)
                with pytest.raises(ValueError, match="top_k is"):
                    asker.ask(1, id_of(1), blocks=4)
            assert (decode.requests, decode.receiver.grants.unreleased) == (0, 0)
            await assert_conserved(cluster)
            granted = asker.ask(1, id_of(1), blocks=4).granted
            assert asker.ask(1, id_of(1), blocks=4).granted == granted
            await decode.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(2))
            await until(cluster, "the request to be forgotten", lambda: not decode.requests)
            await assert_conserved(cluster)

    asyncio.run(scenario())


BAD_COMMITS: dict[str, tuple[dict[str, Any], Reason]] = {
    "first token": ({"first_token": VOCAB}, Reason.TOKEN_OUT_OF_RANGE),
    "alternative": (
        {"first_token": 1, "first_logprobs": common_pb2.TokenLogprobs(top_ids=[VOCAB], top_logprobs=[-1.0])},
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "lengths": (
        {"first_token": 1, "first_logprobs": common_pb2.TokenLogprobs(top_ids=[1, 2], top_logprobs=[-1.0])},
        Reason.BAD_FIELD,
    ),
    "checksums": (
        {"first_token": 1, "checksum_layers": [999], "checksum_blocks": [0], "checksums": [7]},
        Reason.BAD_FIELD,
    ),
}


def test_a_bad_commit_of_another_writer_ends_nothing() -> None:
    """It names the grant of a request that is being handed over. That request stays open, and only the Commit of its
    own writer can end it."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            granted = asker.ask(1, id_of(1), blocks=4).granted
            grant = GrantId(granted.grant)
            stranger = Pair(receiver=asker.pair.receiver, writer=Incarnation(78))
            bad = transfer_pb2.CommitRequest(grant=grant, first_token=VOCAB)
            assert not await decode.commit(bad, stranger)
            assert decode.receiver.grants.state_of(grant) is GrantState.RESERVED
            with pytest.raises(BatonError):
                await decode.commit(bad, asker.pair)
            await decode.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(2))
            await until(cluster, "the request to be forgotten", lambda: not decode.requests)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_a_bad_commit_ends_its_own_request_only(name: str) -> None:
    """The seal of a granted request has landed, then its Commit is refused with a typed error. The request is over, a
    repeat of the Commit is answered "revoked", another request runs to its end with the right tokens, and once the
    writer has released the grant every block is free."""
    fields, reason = BAD_COMMITS[name]

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            running = asyncio.create_task(ask_exactly(cluster, random_prompt(random.Random(7), 60), 40))
            granted = asker.ask(1, id_of(1), blocks=4).granted
            grant = GrantId(granted.grant)
            decode.receiver.seal_landed(
                asker.pair, Seal(grant=grant, epoch=Epoch(granted.epoch), writes=0, bytes_written=0)
            )
            with pytest.raises(BatonError) as caught:
                await decode.commit(transfer_pb2.CommitRequest(grant=grant, **fields), asker.pair)
            assert caught.value.reason is reason
            assert not await decode.commit(transfer_pb2.CommitRequest(grant=grant, first_token=1), asker.pair)
            await running
            await decode.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(2))
            await until(cluster, "the request to be forgotten", lambda: not decode.requests)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_grammar_that_a_decode_node_cannot_compile() -> None:
    """As its prefill node could: the request is over here, and its writer and its router, which may try elsewhere, hear
    why. It is no bug of the node's."""

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            decode = cluster.decode["decode-0"]
            asker = Asker(decode)
            request = transfer_pb2.ReserveRequest(
                number=1,
                lowest_live=1,
                key=common_pb2.RequestKey(request=id_of(1), attempt=1),
                prompt=[1] * 20,
                sampling=spec_of(grammar=common_pb2.Grammar(regex="[0-9]+")),
                deadline_left_ms=60_000,
            )
            granted = decode.reserve(request, asker.pair).granted
            (job,) = decode._jobs.values()
            await until(cluster, "the request to be forgotten", lambda: not decode.requests)
            assert job.output.error == "The grammar cannot be used: this node's engine has no tokenizer."
            assert not await decode.commit(transfer_pb2.CommitRequest(grant=granted.grant, first_token=1), asker.pair)
            await decode.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(2))
            await until(cluster, "its answer to be forgotten", lambda: not decode.answers_unacknowledged)
            await assert_conserved(cluster)

    asyncio.run(scenario())
